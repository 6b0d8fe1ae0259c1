"""Whole models, each on one page."""

from tilewright.models.gpt import GPT

__all__ = ["GPT"]
