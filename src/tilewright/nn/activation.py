"""Gated activations, and the feed-forward blocks of transformers, made of `ops.activation`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tilewright.nn.hooks import is_own
from tilewright.nn.linear import Linear
from tilewright.nn.recompute import forgetting, if_unchanged, is_memory_of
from tilewright.ops.activation.op import bias_gelu, geglu, swiglu
from tilewright.ops.gelu_mlp.op import fused_gelu_mlp, gelu_mlp
from tilewright.ops.glu_mlp.op import fused_glu_mlp
from tilewright.ops.linear.op import linear

GATED: dict[str, Callable[..., torch.Tensor]] = {
    "swiglu": swiglu,
    "geglu_tanh": functools.partial(geglu, approximate="tanh"),
    "geglu": functools.partial(geglu, approximate="none"),
}

_ACTIVATIONS = {"swiglu": "silu", "geglu_tanh": "gelu_tanh", "geglu": "gelu"}  # as `glu_mlp` names them


def project(
    down: Callable[..., torch.Tensor],
    activate: Callable[..., torch.Tensor],
    inner: tuple[torch.Tensor, ...],
    again: bool,
) -> Any:
    """``down(activate(*inner))``; `again`: what `down` would keep of the activation, backward computes again."""
    if not again or not torch.is_grad_enabled():
        return down(activate(*inner))
    if torch.compiler.is_compiling():  # which knows what a matmul need not run again for
        rest = functools.partial(project, down, activate, again=False)
        return checkpoint(rest, inner, use_reentrant=False)
    activated = activate(*inner)
    with forgetting(is_memory_of(activated), if_unchanged(lambda: activate(*inner), *inner)):
        return down(activated)


class SwiGLU(torch.nn.Module):
    """``silu(gate) * up`` in one kernel, of two tensors or of one that holds the gate in front of up.

    >>> gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    >>> torch.equal(SwiGLU()(gate, up), SwiGLU()(torch.cat([gate, up], -1)))
    True
    """

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return swiglu(gate, up)


class GEGLU(torch.nn.Module):
    """``gelu(gate) * up`` in one kernel, of two tensors or of one that holds the gate in front of up.

    Args:
        approximate: ``"tanh"`` or ``"none"``, as in ``torch.nn.GELU``, whose default is ``"none"``.

    >>> gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    >>> torch.equal(GEGLU()(gate, up), GEGLU()(torch.cat([gate, up], -1)))
    True
    """

    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        if approximate not in ("tanh", "none"):
            raise ValueError(f"GEGLU: approximate is {approximate!r}; choose 'tanh' or 'none'.")
        self.approximate = approximate

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return geglu(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class GatedMLP(torch.nn.Module):
    """``down_proj(activation(gate_proj(x)) * up_proj(x))``, activation and product in one kernel.

    Its parameters are named as in Hugging Face's ``LlamaMLP``, so the checkpoints of that load.

    Args:
        width: size of the last dimension, in and out.
        inner: size of the dimension between.
        activation: ``"swiglu"``, ``"geglu_tanh"`` or ``"geglu"`` (by erf).
        bias: whether the three projections have one.
        recompute: compute the activation again in backward instead of keeping it.

    >>> mlp = GatedMLP(8, 24)
    >>> mlp(torch.randn(2, 3, 8)).shape, sorted(mlp.state_dict())
    (torch.Size([2, 3, 8]), ['down_proj.weight', 'gate_proj.weight', 'up_proj.weight'])
    """

    linear: type[torch.nn.Linear] = Linear

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in GATED:
            raise ValueError(f"GatedMLP: activation is {activation!r}; choose {', '.join(GATED)}.")
        self.activation, self.recompute = activation, recompute
        self.gate_proj = self.linear(width, inner, bias, device=device, dtype=dtype)
        self.up_proj = self.linear(width, inner, bias, device=device, dtype=dtype)
        self.down_proj = self.linear(inner, width, bias, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        projections = self.gate_proj, self.up_proj, self.down_proj
        if all(is_own(each, Linear) for each in projections) and self.gate_proj.bias is self.up_proj.bias is None:
            weights = (each.weight for each in projections)
            activation, keep = _ACTIVATIONS[self.activation], not (self.recompute or recompute)
            y = fused_glu_mlp(x, *weights, self.down_proj.bias, activation=activation, keep=keep)
            if y is not None:
                return y
        gate, up = self.gate_proj(x), self.up_proj(x)
        dtype = torch.promote_types(gate.dtype, up.dtype)  # of somebody else's module it may be another one
        inputs = gate.to(dtype), up.to(dtype)
        return project(self.down_proj, GATED[self.activation], inputs, self.recompute or recompute)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class GeluMLP(torch.nn.Module):
    """``down(gelu(up(x)))``, by `ops.gelu_mlp`.

    Args:
        width: size of the last dimension, in and out.
        inner: size of the dimension between.
        bias: whether the two projections have one.
        approximate: ``"tanh"`` or ``"none"``, as in ``torch.nn.functional.gelu``.
        recompute: compute the activation again in backward instead of keeping it.

    >>> mlp = GeluMLP(8, 32)
    >>> mlp(torch.randn(2, 3, 8)).shape, sorted(mlp.state_dict())
    (torch.Size([2, 3, 8]), ['down.bias', 'down.weight', 'up.bias', 'up.weight'])
    """

    linear: type[torch.nn.Linear] = Linear

    def __init__(
        self,
        width: int,
        inner: int,
        bias: bool = True,
        approximate: str = "tanh",
        *,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.approximate, self.recompute = approximate, recompute
        self.up = self.linear(width, inner, bias, device=device, dtype=dtype)
        self.down = self.linear(inner, width, bias, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, recompute: bool = False) -> torch.Tensor:
        up, down, again = self.up, self.down, self.recompute or recompute
        if is_own(up, Linear) and is_own(down, Linear):
            tensors = x, up.weight, up.bias, down.weight, down.bias
            if not again:
                return gelu_mlp(*tensors, approximate=self.approximate)
            y = fused_gelu_mlp(*tensors, approximate=self.approximate, lean=True)
            if y is not None:
                return y
        # The activation adds the bias, and sums up its gradient, where nobody else has a say in it.
        inner, bias = (linear(x, up.weight), up.bias) if is_own(up, Linear) else (up(x), None)
        activate = functools.partial(bias_gelu, bias=bias, approximate=self.approximate)
        return project(down, activate, (inner,), again)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
