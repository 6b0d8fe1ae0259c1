"""Fused kernels, one file an op. `tilewright.ops.dropout_add_norm` is the function; its file has the rest."""

from tilewright.ops.cross_entropy import cross_entropy
from tilewright.ops.dropout_add_norm import dropout_add_norm

__all__ = ["cross_entropy", "dropout_add_norm"]
