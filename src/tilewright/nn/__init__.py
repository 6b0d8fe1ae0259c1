"""Modules made of ops, with the parameters and state_dict keys of the modules they replace."""

from tilewright.nn.dropout_add_norm import DropoutAddNorm

__all__ = ["DropoutAddNorm"]
