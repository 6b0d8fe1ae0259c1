"""Cross-entropy: loss and gradient in one pass."""
