"""What all tests of ops share."""

import importlib

import pytest

HOST_BOUND = (
    "activation.op", "attention.hopper", "dropout_add_norm.op", "embedding.op", "gelu_mlp.op",
    "linear_cross_entropy.op",
)  # fmt: skip


@pytest.fixture(autouse=True)
def kernels_at_every_size(monkeypatch):
    """Small eager calls on a GPU run our kernels, too, which these tests are about."""
    for name in HOST_BOUND:
        monkeypatch.setattr(importlib.import_module(f"tilewright.ops.{name}"), "HOST_BOUND", -1)
