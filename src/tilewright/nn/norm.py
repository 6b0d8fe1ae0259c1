"""`torch.nn.LayerNorm` and `torch.nn.RMSNorm` by the kernel of `ops.dropout_add_norm`."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops.dropout_add_norm.op import HOST_BOUND, dropout_add_norm
from tilewright.runtime import dispatch, paths


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm`` over the last dimension, forward and backward in one pass each; same parameters and names.

    Args:
        normalized_shape: the size of the last dimension, as a number or a sequence of one.
        eps, elementwise_affine, bias, device, dtype: as in ``torch.nn.LayerNorm``.
        out_dtype: dtype of the output, also inside ``torch.autocast``; default: autocast's inside of it, where torch's
            is float32, else that of the input.

    >>> norm, x = LayerNorm(8), torch.randn(2, 3, 8)
    >>> torch.allclose(norm(x), torch.nn.functional.layer_norm(x, (8,)), atol=1e-6), sorted(norm.state_dict())
    (True, ['bias', 'weight'])
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _check_shape("LayerNorm", self.normalized_shape)
        self.out_dtype = out_dtype

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        _check_width("LayerNorm", input, self.normalized_shape)
        if _is_host_bound(input, self.weight, self.bias, self.out_dtype):
            return super().forward(input)
        out: torch.Tensor = dropout_add_norm(
            input, None, self.weight, self.bias, eps=self.eps, out_dtype=self.out_dtype
        )
        return out


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension, forward and backward in one pass each; same parameters and names.

    Args:
        normalized_shape: the size of the last dimension, as a number or a sequence of one.
        eps: added to the mean square; None: the machine epsilon of the arithmetic, which is float32 (float64 for
            float64).
        elementwise_affine, device, dtype: as in ``torch.nn.RMSNorm``.
        out_dtype: dtype of the output, also inside ``torch.autocast``; default: autocast's inside of it, else that of
            the input. (Torch's depends on its version there.)

    >>> norm, x = RMSNorm(8), torch.randn(2, 3, 8)
    >>> torch.allclose(norm(x), torch.nn.functional.rms_norm(x, (8,)), atol=1e-6), sorted(norm.state_dict())
    (True, ['weight'])
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _check_shape("RMSNorm", self.normalized_shape)
        self.out_dtype = out_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_width("RMSNorm", x, self.normalized_shape)
        if _is_host_bound(x, self.weight, None, self.out_dtype):
            return super().forward(x)
        eps = torch.finfo(dispatch.compute_dtype(x)).eps if self.eps is None else self.eps
        out: torch.Tensor = dropout_add_norm(x, None, self.weight, eps=eps, norm="rms", out_dtype=self.out_dtype)
        return out


def _is_host_bound(x: Any, weight: Any, bias: Any, out_dtype: torch.dtype | None) -> bool:
    """Whether a call is left to PyTorch's own op, whose backward takes the host less time; notes it if so."""
    if out_dtype not in (None, x.dtype) or (weight is not None and weight.dtype != x.dtype):
        return False
    if not dispatch.is_host_bound(x, HOST_BOUND, weight, bias):
        return False
    paths.note("dropout_add_norm", paths.PYTORCH, paths.why_host_bound(HOST_BOUND))
    return True


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 1:
        raise ValueError(
            f"{name}: normalized_shape is {tuple(shape)}; give one dimension, or use torch.nn.{name} for several."
        )


def _check_width(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Refuse an input of another width: without a weight nobody else would."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: the input must be a tensor, not {type(x).__name__}.")
    if x.shape[-1:] != shape:
        raise ValueError(f"{name}: the input has shape {tuple(x.shape)}, but normalized_shape is {shape[0]}.")
