"""One file an op or workload, run by `tilewright bench NAME` wherever the package is installed."""

NAMES = (
    "activation", "attention", "cross_entropy", "dropout_add_norm", "gelu_mlp", "linear_cross_entropy", "loss_curves",
    "memory", "models", "rope", "self_attention", "shapes", "train",
)  # fmt: skip
