"""Logits that nobody has computed yet.

The fused head and loss never hold all logits, but a model returns them. What it returns then is a tensor that knows
its shape, dtype and device, and computes itself, with its gradient, as soon as anybody reads a number of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_PROPERTIES = (
    "shape", "dtype", "device", "ndim", "is_cuda", "layout", "is_sparse", "is_quantized", "is_meta", "itemsize",
    "nbytes",
)  # fmt: skip
# What is answered without computing anything.
_KNOWN = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.element_size, Tensor.get_device, Tensor.__hash__,
}  # fmt: skip
_REQUIRES_GRAD = getattr(Tensor, "requires_grad").__get__  # noqa: B009
_LAZY = {  # they give another tensor of the same shape, and are as lazy as their input
    Tensor.float: torch.float32, Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16,
    Tensor.double: torch.float64,
}  # fmt: skip


class DeferredTensor(Tensor):
    """A tensor that is computed when it is read, by `make(*inputs)`.

    Args:
        make: computes it, differentiably, under the grad mode and autocast of when it was deferred.
        inputs: what `make` takes. One that is written to before the tensor is read is an error, not a wrong number.
        shape, dtype: what it will have.

    >>> x = torch.ones(2, 3, requires_grad=True)
    >>> later = DeferredTensor.of(lambda x: x * 2, [x], (2, 3), torch.float32)
    >>> later.shape, later.is_computed, later.sum().item(), later.is_computed
    (torch.Size([2, 3]), False, 12.0, True)
    """

    _make: Callable[..., Tensor]
    _inputs: list[Tensor]
    _versions: list[int]  # of the inputs, when the tensor was deferred
    _wants_gradient: bool
    _autocast: list[tuple[str, torch.dtype, bool]]
    _made: Tensor | None

    @staticmethod
    def of(make: Callable[..., Tensor], inputs: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Any:
        """A tensor of this shape and dtype that `make(*inputs)` computes later."""
        device = inputs[0].device
        found: Any = Tensor._make_wrapper_subclass(DeferredTensor, tuple(shape), dtype=dtype, device=device)
        found._make, found._inputs, found._made = make, list(inputs), None
        found._versions = [each._version for each in inputs]
        found._wants_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
        kinds = dict.fromkeys((device.type, "cpu"))
        found._autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]
        return found

    @property
    def is_computed(self) -> bool:
        """Whether somebody has read it."""
        return self._made is not None

    def compute(self) -> Tensor:
        """The tensor itself, computed once."""
        if self._made is None:
            versions = [each._version for each in self._inputs]
            if versions != self._versions or any(map(_is_freed, self._inputs)):
                raise RuntimeError(
                    "The logits were not computed with the loss, and the weights they come from have changed since; "
                    "read them before optimizer.step(), or optimize without the rule linear_cross_entropy."
                )
            with torch.set_grad_enabled(self._wants_gradient):
                contexts = [torch.autocast(kind, dtype, on) for kind, dtype, on in self._autocast]
                for context in contexts:
                    context.__enter__()
                try:
                    self._made = self._make(*self._inputs)
                finally:
                    for context in reversed(contexts):
                        context.__exit__(None, None, None)
            self._inputs = []
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is _REQUIRES_GRAD:
            return args[0]._wants_gradient
        dtype = _LAZY.get(func)
        if func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
            dtype = args[1]
        if dtype is not None and isinstance(args[0], cls) and not args[0].is_computed:
            return args[0]._cast(dtype)
        return func(*_computed(args), **_computed(kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_computed(args), **_computed(kwargs or {}))

    def _cast(self, dtype: torch.dtype) -> Any:
        if dtype == self.dtype:
            return self
        return DeferredTensor.of(lambda *_: self.compute().to(dtype), self._inputs, self.shape, dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.compute().detach().clone()


def _is_freed(tensor: Tensor) -> bool:
    """Whether a tensor's memory is gone, as that of FSDP's weights is behind the backward."""
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def _computed(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(DeferredTensor, lambda each: each.compute(), value)
