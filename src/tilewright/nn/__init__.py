"""Modules made of ops, with the parameters and state_dict keys of the modules they replace."""

from tilewright.nn.activation import GEGLU, GatedMLP, GeluMLP, SwiGLU
from tilewright.nn.dropout_add_norm import DropoutAddNorm
from tilewright.nn.experts import MixtureOfExperts
from tilewright.nn.fused_attention import FusedAttentionBlock
from tilewright.nn.fused_mlp import FusedMLP
from tilewright.nn.linear import Linear
from tilewright.nn.loss import CrossEntropyLoss, LinearCrossEntropyLoss
from tilewright.nn.norm import LayerNorm, RMSNorm
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.nn.rope import RoPE
from tilewright.nn.self_attention import SelfAttention

__all__ = [
    "GEGLU", "CrossEntropyLoss", "DropoutAddNorm", "FusedAttentionBlock", "FusedMLP", "GatedMLP", "GeluMLP",
    "LayerNorm", "Linear", "LinearCrossEntropyLoss", "MixtureOfExperts", "QuantizedLinear", "RMSNorm", "RoPE",
    "SelfAttention", "SwiGLU",
]  # fmt: skip
