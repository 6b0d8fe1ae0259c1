"""The MLP of a transformer as one graph of tiles that wait for each other (`tilewright.tilesync`)."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from tilewright import tilesync
from tilewright.nn.hooks import is_own
from tilewright.nn.linear import Linear
from tilewright.ops.activation.op import bias_gelu, geglu, swiglu
from tilewright.ops.linear.op import matmul_dtype
from tilewright.runtime import paths
from tilewright.tilesync import chains

_ACTIVATIONS = {"swiglu": ("silu", True), "geglu": ("gelu", True), "geglu_tanh": ("gelu_tanh", True),
                "gelu": ("gelu", False), "gelu_tanh": ("gelu_tanh", False)}  # fmt: skip


@functools.lru_cache(256)  # to describe a graph takes longer than to launch it
def _compile_once(mode: str, *sizes: Any) -> str:
    return tilesync.compile(chains.mlp(*sizes), mode).name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _compile(mode: str, *sizes: Any) -> str:
    """Return the name of the compiled graph; under torch.compile, when it is traced."""
    return _compile_once(mode, *sizes)


class FusedMLP(torch.nn.Module):
    """``down(silu(gate(x)) * up(x))``, or ``down(gelu(up(x)))``, in one launch where that is the fastest.

    Its parameters are named as in `GatedMLP` and `GeluMLP`. Each number of rows is a graph of its own, which is checked
    and measured at its first call: for decoding, training and other work of few shapes. On a GPU it is for 16-bit
    weights, or float32 ones under autocast. With a layer that is hooked or replaced, each layer is called.

    Args:
        width: size of the last dimension, in and out.
        inner: size of the dimension between.
        activation: ``"swiglu"``, ``"geglu"``, ``"geglu_tanh"``, ``"gelu"`` or ``"gelu_tanh"``.
        bias: whether the projections of an MLP without a gate have one.
        mode: how it runs (`tilesync.compile`).

    >>> mlp = FusedMLP(16, 24)
    >>> mlp(torch.randn(2, 3, 16)).shape, sorted(mlp.state_dict())
    (torch.Size([2, 3, 16]), ['down_proj.weight', 'gate_proj.weight', 'up_proj.weight'])
    """

    def __init__(
        self, width: int, inner: int, *, activation: str = "swiglu", bias: bool = False, mode: str = "auto",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"FusedMLP: activation is {activation!r}; choose {', '.join(_ACTIVATIONS)}.")
        if mode not in tilesync.MODES:
            raise ValueError(f"FusedMLP: mode is {mode!r}; choose {', '.join(tilesync.MODES)}.")
        self.activation, self.mode, self.width, self.inner = activation, mode, width, inner
        self.is_gated = _ACTIVATIONS[activation][1]
        if self.is_gated and bias:
            raise ValueError("FusedMLP: a gated MLP has no bias; leave it out.")
        if self.is_gated:
            self.gate_proj = Linear(width, inner, False, device=device, dtype=dtype)
            self.up_proj = Linear(width, inner, False, device=device, dtype=dtype)
            self.down_proj = Linear(inner, width, False, device=device, dtype=dtype)
        else:
            self.up = Linear(width, inner, bias, device=device, dtype=dtype)
            self.down = Linear(inner, width, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.width:
            raise ValueError(f"FusedMLP: x has {x.shape[-1]} features, but {self.width} are needed.")
        rows = operator.index(x.numel() // self.width)  # a constant, also where torch.compile has other rows in mind
        activation, gated = _ACTIVATIONS[self.activation]
        if rows == 0:
            return self._by_layers(x)
        if not all(is_own(child, Linear) for child in self.children()):
            paths.note("tilesync", paths.PARTS, "a layer of the MLP is hooked or replaced")
            return self._by_layers(x)
        if gated:
            weights = {"gate": self.gate_proj.weight, "up": self.up_proj.weight, "down": self.down_proj.weight}
        else:
            weights = {"up": self.up.weight, "down": self.down.weight}
            if self.up.bias is not None:
                weights |= {"up_bias": self.up.bias, "down_bias": self.down.bias}
        name = _compile(self.mode, rows, self.width, self.inner, activation, gated, "up_bias" in weights)
        dtype = matmul_dtype(x)
        inputs = {"x": x.reshape(rows, self.width), **weights}
        y: Tensor = tilesync.find(name)(**{name: each.to(dtype) for name, each in inputs.items()})
        return y.view(x.shape)

    def _by_layers(self, x: Tensor) -> Tensor:
        approximate = "tanh" if self.activation.endswith("tanh") else "none"
        if not self.is_gated:
            y: Tensor = self.down(bias_gelu(self.up(x), None, approximate=approximate))
            return y
        gate, up = self.gate_proj(x), self.up_proj(x)
        product = swiglu(gate, up) if self.activation == "swiglu" else geglu(gate, up, approximate=approximate)
        y = self.down_proj(product)
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, mode={self.mode!r}"
