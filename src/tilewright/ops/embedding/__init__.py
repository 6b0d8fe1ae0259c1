"""Token and position embeddings, and their sum."""
