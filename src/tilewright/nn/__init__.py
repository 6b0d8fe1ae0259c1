"""Modules made of ops, with the parameters and state_dict keys of the modules they replace."""

from tilewright.nn.activation import GatedMLP, GeluMLP
from tilewright.nn.dropout_add_norm import DropoutAddNorm
from tilewright.nn.linear import Linear
from tilewright.nn.loss import CrossEntropyLoss, LinearCrossEntropyLoss
from tilewright.nn.rope import RoPE

__all__ = [
    "CrossEntropyLoss", "DropoutAddNorm", "GatedMLP", "GeluMLP", "Linear", "LinearCrossEntropyLoss", "RoPE",
]  # fmt: skip
