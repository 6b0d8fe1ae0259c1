"""A linear layer of a few rows, as decoding has them."""
