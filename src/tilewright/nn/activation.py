"""The feed-forward blocks of transformers, made of `ops.activation`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tilewright.nn.linear import Linear, is_unheard
from tilewright.nn.recompute import forgetting, is_memory_of
from tilewright.ops.activation import bias_gelu, geglu, swiglu
from tilewright.ops.gelu_mlp import fused_gelu_mlp, gelu_mlp
from tilewright.ops.linear import linear

_GATED: dict[str, Callable[..., torch.Tensor]] = {
    "swiglu": swiglu,
    "geglu_tanh": functools.partial(geglu, approximate="tanh"),
    "geglu": functools.partial(geglu, approximate="none"),
}


def _project(
    down: Callable[..., torch.Tensor],
    activate: Callable[..., torch.Tensor],
    inner: tuple[torch.Tensor, ...],
    again: bool,
) -> Any:
    """``down(activate(*inner))``; `again`: what `down` would keep of the activation, backward computes again."""
    if not again or not torch.is_grad_enabled():
        return down(activate(*inner))
    if torch.compiler.is_compiling():  # which knows what a product need not run again for
        rest = functools.partial(_project, down, activate, again=False)
        return checkpoint(rest, inner, use_reentrant=False, preserve_rng_state=False)
    activated = activate(*inner)
    with forgetting(is_memory_of(activated), lambda: activate(*inner)):
        return down(activated)


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
        if activation not in _GATED:
            raise ValueError(f"GatedMLP: activation is {activation!r}; choose {', '.join(_GATED)}.")
        self.activation, self.recompute = activation, recompute
        self.gate_proj = Linear(width, inner, bias, device=device, dtype=dtype)
        self.up_proj = Linear(width, inner, bias, device=device, dtype=dtype)
        self.down_proj = Linear(inner, width, bias, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, recompute: bool = False, *, with_bias: bool = True) -> torch.Tensor:
        """Without the bias of its last product, if the caller adds that: see `Linear`."""
        inner, down = (self.gate_proj(x), self.up_proj(x)), self.down_proj
        project = down if with_bias else functools.partial(down, with_bias=False)
        return _project(project, _GATED[self.activation], inner, self.recompute or recompute)

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
        self.up = Linear(width, inner, bias, device=device, dtype=dtype)
        self.down = Linear(inner, width, bias, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, recompute: bool = False, *, with_bias: bool = True) -> torch.Tensor:
        """Without the bias of its last product, if the caller adds that: see `Linear`."""
        up, down, again = self.up, self.down, self.recompute or recompute
        if type(down) is Linear and is_unheard(down):
            tensors = x, up.weight, up.bias, down.weight, down.bias if with_bias else None
            if not again:
                return gelu_mlp(*tensors, approximate=self.approximate)
            y = fused_gelu_mlp(*tensors, approximate=self.approximate, lean=True)
            if y is not None:
                return y
        project = down if with_bias else functools.partial(down, with_bias=False)
        return _project(project, self._activate, (linear(x, up.weight),), again)

    def _activate(self, inner: torch.Tensor) -> torch.Tensor:
        return bias_gelu(inner, self.up.bias, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
