"""Optimizers: the rules, their states in few bits, and one kernel for all tensors."""

from tilewright.optim.optimizers import AdamW, FusedOptimizer

__all__ = ["AdamW", "FusedOptimizer"]
