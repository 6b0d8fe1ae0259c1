"""The training loop, its data, its optimizers, its checkpoints."""
