"""Fused kernels, one file an op. `tilewright.ops.dropout_add_norm` is the function; its file has the rest."""

from tilewright.ops.activation import bias_gelu, geglu, swiglu
from tilewright.ops.cross_entropy import cross_entropy
from tilewright.ops.dropout_add_norm import dropout_add_norm
from tilewright.ops.embedding import embedding
from tilewright.ops.gelu_mlp import gelu_mlp
from tilewright.ops.linear import linear, linear_parts
from tilewright.ops.linear_cross_entropy import linear_cross_entropy
from tilewright.ops.rope import rope, rope_tables

__all__ = [
    "bias_gelu", "cross_entropy", "dropout_add_norm", "embedding", "geglu", "gelu_mlp", "linear",
    "linear_cross_entropy", "linear_parts", "rope", "rope_tables", "swiglu",
]  # fmt: skip
