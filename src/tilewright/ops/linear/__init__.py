"""Matmul with a bias, by cuBLASLt or a Hopper kernel."""
