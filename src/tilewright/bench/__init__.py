"""One file an op or workload, run by `tilewright bench NAME` wherever the package is installed."""

NAMES = (
    "activation", "attention", "cross_entropy", "decode", "decode_attention", "dropout_add_norm", "embedding",
    "few_rows_linear", "gelu_mlp", "glu_mlp", "linear", "linear_cross_entropy", "lltm", "loss_curves", "memory",
    "models", "optimizer", "quantized_linear", "rope", "self_attention", "shapes", "tilesync", "train", "wrappers",
)  # fmt: skip
