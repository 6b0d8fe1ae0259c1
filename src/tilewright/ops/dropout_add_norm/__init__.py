"""Dropout, residual add and norm in one pass."""
