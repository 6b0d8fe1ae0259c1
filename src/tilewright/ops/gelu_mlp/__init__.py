"""The two matmuls of a GELU MLP, with the activation in their epilogues."""
