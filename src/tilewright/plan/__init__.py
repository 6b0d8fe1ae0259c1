"""Arithmetic that needs no GPU and no torch."""
