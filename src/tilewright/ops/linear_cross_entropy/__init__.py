"""Classifier and cross-entropy without all logits in memory."""
