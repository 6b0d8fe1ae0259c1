"""One file an op or workload, run by `tilewright bench NAME` wherever the package is installed."""

NAMES = ("dropout_add_norm", "memory")
