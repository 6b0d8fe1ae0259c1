"""Fused kernels, one folder an op: `op.py` has the public function, `kernels.py` its Triton kernels.

`tilewright.ops.dropout_add_norm` is the function; its modules are imported by their full names.
"""

from tilewright.ops.activation.op import bias_gelu, geglu, swiglu
from tilewright.ops.attention.op import attention
from tilewright.ops.cross_entropy.op import cross_entropy
from tilewright.ops.decode_attention.append import append_to_cache
from tilewright.ops.decode_attention.op import decode_attention
from tilewright.ops.dropout_add_norm.op import dropout_add_norm
from tilewright.ops.embedding.op import embedding
from tilewright.ops.few_rows_linear.op import few_rows_linear
from tilewright.ops.gelu_mlp.op import gelu_mlp
from tilewright.ops.glu_mlp.op import glu_mlp
from tilewright.ops.linear.group import linear_group
from tilewright.ops.linear.op import linear, linear_parts
from tilewright.ops.linear_cross_entropy.op import linear_cross_entropy
from tilewright.ops.quantized_linear.op import fp8_linear, int4_linear, int8_linear
from tilewright.ops.rope.op import rope, rope_tables
from tilewright.ops.self_attention.op import self_attention
from tilewright.runtime.paths import explain

__all__ = [
    "append_to_cache", "attention", "bias_gelu", "cross_entropy", "decode_attention", "dropout_add_norm", "embedding",
    "explain", "few_rows_linear", "fp8_linear", "geglu", "gelu_mlp", "glu_mlp", "int4_linear", "int8_linear", "linear",
    "linear_cross_entropy", "linear_group", "linear_parts", "rope", "rope_tables", "self_attention", "swiglu",
]  # fmt: skip
