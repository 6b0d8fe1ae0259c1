"""`ops.int8_linear`, `ops.fp8_linear` and `ops.int4_linear` as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewright.ops.quantized_linear.op import fp8_linear, int4_linear, int8_linear
from tilewright.ops.quantized_linear.reference import dequantize

_EIGHT_BITS = {torch.int8: int8_linear, torch.float8_e4m3fn: fp8_linear}


class QuantizedLinear(torch.nn.Module):
    """A linear layer with a packed weight, of which the dtype says the format.

    The state_dict has ``weight``, ``scale`` and, where there are any, ``zero`` and ``order``, which are buffers, and
    ``bias``, a parameter. `tilewright.quantize.quantize_` puts such modules in the places of ``torch.nn.Linear``.

    Args:
        weight, scale, zero: as the op of the format takes them.
        bias: ``(out,)`` or None.
        order: ``(in,)``, integers: feature j of the weight is feature ``order[j]`` of x. Others' act-order needs that.

    >>> layer = QuantizedLinear(torch.tensor([[2, -3]], dtype=torch.int8), torch.tensor([0.5]))
    >>> layer(torch.ones(3, 2)).tolist(), layer
    ([[-0.5], [-0.5], [-0.5]], QuantizedLinear(in_features=2, out_features=1, int8, bias=False))
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    order: Tensor | None
    bias: torch.nn.Parameter | None

    def __init__(
        self, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.out_features = weight.shape[0]
        self.in_features = weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)
        self.register_buffer("order", order)
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias)
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor, residual: Tensor | None = None, activation: str = "") -> Tensor:
        """The layer's output, or an activation of it; with a residual, their sum. It is rounded once."""
        if self.order is not None:
            x = x.index_select(-1, self.order)
        if self.weight.dtype == torch.uint8:
            return int4_linear(x, self.weight, self.scale, self.zero, self.bias, residual, activation=activation)
        linear = _EIGHT_BITS.get(self.weight.dtype)
        if linear is None:
            raise TypeError(
                f"QuantizedLinear: the weight has become {self.weight.dtype}, as after tie_weights(); quantize the "
                "model again."
            )
        return linear(x, self.weight, self.scale, self.bias, residual, activation=activation)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The ``(out, in)`` matrix that the weight stands for."""
        matrix = dequantize(self.weight, self.scale, self.zero, dtype)
        return matrix if self.order is None else torch.empty_like(matrix).index_copy_(1, self.order.long(), matrix)

    def _apply(self, fn: object, recurse: bool = True) -> torch.nn.Module:
        """Move the packed tensors and keep their dtypes: ``.half()`` is for the bias."""
        kept = {name: buffer.dtype for name, buffer in self._buffers.items() if buffer is not None}
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[arg-type]
        for name, dtype in kept.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype != dtype:
                self._buffers[name] = before[name].to(moved.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Refuse packed tensors of another format, which a copy would turn into other numbers."""
        for name, buffer in self._buffers.items():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor) and buffer is not None and given.dtype != buffer.dtype:
                error_msgs.append(
                    f"{prefix}{name} is {given.dtype} and this layer's {buffer.dtype}: it is of another format, or not "
                    "quantized. Quantize the model in that format first."
                )
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        words = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}
        group = f"int4, group={self.in_features // len(self.scale)}" if self.weight.dtype == torch.uint8 else ""
        kind = words.get(self.weight.dtype, group) + (", zeros" if self.zero is not None else "")
        kind += ", ordered" if self.order is not None else ""
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, {kind}, bias={has_bias}"
