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
    "requires_grad", "grad_fn", "is_leaf", "shape", "dtype", "device", "ndim", "is_cuda", "layout", "is_sparse",
    "is_quantized", "is_meta", "itemsize", "nbytes",
)  # fmt: skip
# What is answered without computing anything.
_KNOWN = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.element_size, Tensor.get_device, Tensor.__hash__,
}  # fmt: skip
_HOOKS = {Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook}
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
    _seen: list[tuple[int, int, Tensor]]  # of the inputs, when the tensor was deferred: `_fingerprint`
    _sources: list[Tensor]
    _wants_gradient: bool
    _autocast: list[tuple[str, torch.dtype, bool]]
    _made: Tensor | None

    @staticmethod
    def of(
        make: Callable[..., Tensor], inputs: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype,
        parent: DeferredTensor | None = None,
    ) -> Any:  # fmt: skip
        """A tensor of this shape and dtype that `make(*inputs)` computes later; of a cast, `parent` computes."""
        device = inputs[0].device
        found = _Defer.apply(make, tuple(shape), dtype, *inputs)
        found._make, found._made = make, None
        found._inputs = [] if parent is not None else list(inputs)
        found._seen = [_fingerprint(each) for each in found._inputs]
        found._wants_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
        kinds = dict.fromkeys((device.type, "cpu"))
        found._autocast = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]
        found._sources = list(inputs)
        return found

    @property
    def is_computed(self) -> bool:
        """Whether somebody has read it."""
        return self._made is not None

    def compute(self) -> Tensor:
        """The tensor itself, computed once."""
        if self._made is None:
            if any(map(_is_freed, self._inputs)) or not all(map(_is_as_seen, self._inputs, self._seen)):
                raise RuntimeError(
                    "The logits were not computed with the loss, and the weights they come from have changed since; "
                    "read them before optimizer.step(), or optimize without the rule linear_cross_entropy."
                )
            with torch.inference_mode(False), torch.set_grad_enabled(self._wants_gradient):
                contexts = [torch.autocast(kind, dtype, on) for kind, dtype, on in self._autocast]
                for context in contexts:
                    context.__enter__()
                try:
                    self._made = self._make(*self._inputs)
                finally:
                    for context in reversed(contexts):
                        context.__exit__(None, None, None)
            self._inputs, self._sources = [], []
            del self._make
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _HOOKS:
            if str(getattr(args[-1], "__module__", "")).startswith("torch."):  # FSDP's, which the loss has as well
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            raise RuntimeError(
                "The loss does not go through these logits, which are computed when they are read: a hook on them sees "
                "nothing of it. Optimize without the rule linear_cross_entropy to hook them."
            )
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
        return DeferredTensor.of(lambda *_: self.compute().to(dtype), self._sources, self.shape, dtype, parent=self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.compute().detach().clone()


class _Defer(torch.autograd.Function):
    """Gives a deferred tensor its place in the graph of autograd, for those who look at nothing else of it."""

    @staticmethod
    def forward(ctx: Any, make: Any, shape: Any, dtype: Any, *inputs: Tensor) -> Any:
        ctx.make = make
        ctx.save_for_backward(*inputs)
        return Tensor._make_wrapper_subclass(DeferredTensor, shape, dtype=dtype, device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        needs = ctx.needs_input_grad[3:]
        with torch.enable_grad():
            given = [each.detach().requires_grad_(need) for each, need in zip(ctx.saved_tensors, needs, strict=True)]
            wanted = [each for each in given if each.requires_grad]
            found = iter(torch.autograd.grad(ctx.make(*given), wanted, gradient))
        return None, None, None, *(next(found) if need else None for need in needs)


def _fingerprint(tensor: Tensor) -> tuple[int, int, Tensor]:
    """What tells that a tensor is as it was: its version, its address, and some of its numbers, for `.data` has no
    version."""
    with torch.no_grad():
        flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()[:1]
        some = flat[:: max(1, flat.numel() // 256)].clone()
    return tensor._version if not tensor.is_inference() else 0, tensor.data_ptr(), some


def _is_as_seen(tensor: Tensor, seen: tuple[int, int, Tensor]) -> bool:
    version, address, some = _fingerprint(tensor)
    return (version, address) == seen[:2] and torch.equal(some, seen[2])


def _is_freed(tensor: Tensor) -> bool:
    """Whether a tensor's memory is gone, as that of FSDP's weights is behind the backward."""
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def _computed(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(DeferredTensor, lambda each: each.compute(), value)
