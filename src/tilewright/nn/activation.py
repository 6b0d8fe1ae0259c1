"""The feed-forward blocks of transformers, made of `ops.activation`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from tilewright.nn.linear import Linear
from tilewright.ops.activation import bias_gelu, geglu, swiglu
from tilewright.ops.linear import linear

_GATED: dict[str, Callable[..., torch.Tensor]] = {
    "swiglu": swiglu,
    "geglu_tanh": functools.partial(geglu, approximate="tanh"),
    "geglu": functools.partial(geglu, approximate="none"),
}


def _maybe_again(recompute: bool, rest: Callable[..., torch.Tensor], *inner: torch.Tensor) -> torch.Tensor:
    """`rest`, which backward runs again up to its last product, where asked for; nothing in it is random."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(rest, *inner, use_reentrant=False, preserve_rng_state=False)
    return rest(*inner)


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _maybe_again(self.recompute, self._rest, self.gate_proj(x), self.up_proj(x))

    def _rest(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_GATED[self.activation](gate, up))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class GeluMLP(torch.nn.Module):
    """``down(gelu(up(x)))``, where the kernel of the activation adds the bias of `up`.

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _maybe_again(self.recompute, self._rest, linear(x, self.up.weight))

    def _rest(self, inner: torch.Tensor) -> torch.Tensor:
        return self.down(bias_gelu(inner, self.up.bias, approximate=self.approximate))

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"
