"""What every op promises, as checks that take the op: a new op's test file says how to call it and little else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tilewright.measure.numerics import relative_error, tolerance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Ragged on purpose: one, primes, a power of two and its neighbours, no rows, no batch.
SHAPES = ((1, 1), (3, 7), (5, 127), (2, 3, 128), (4, 129), (1, 257), (2, 1000), (0, 16), (2, 0, 8), (24,))

on_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU: size, capture or repetition beyond the interpreter")
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU: the kernels are of its instructions")


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE).requires_grad_(grad)


def doubles(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Fresh float64 leaves with the same values."""
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor | None], upstream: Sequence[Tensor]) -> list[Tensor]:
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return list(torch.autograd.grad(outputs, wanted, [g.to(o.dtype) for g, o in zip(upstream, outputs, strict=True)]))


def assert_near_truth(
    actual: Sequence[Tensor], truth: Sequence[Tensor], reduced: int, compute: torch.dtype = torch.float32
) -> None:
    """Every tensor within the tolerance of its dtype and of the length of the sums behind it."""
    for index, (a, t) in enumerate(zip(actual, truth, strict=True)):
        assert a.shape == t.shape, f"tensor {index}: {a.shape} is not {t.shape}"
        allowed = tolerance(a.dtype, reduced, compute=compute)
        error = relative_error(a, t)
        assert error <= allowed, f"tensor {index}: error {error:.2e} > {allowed:.2e}"


def assert_no_worse(actual: Sequence[Tensor], peer: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """At least as close to the float64 truth as PyTorch's own ops in the same dtype.

    Where both round the same values the same number of times, the order of a sum decides, hence the 5 % and one
    float32 rounding; a lost bit would double the error. Triton's interpreter converts to bfloat16 by cutting off, not
    by rounding, which alone doubles it: there, bfloat16 is held to that.
    """
    for index, (a, p, t) in enumerate(zip(actual, peer, truth, strict=True)):
        ours, theirs = relative_error(a, t), relative_error(p, t)
        factor = 2.1 if DEVICE == "cpu" and a.dtype == torch.bfloat16 else 1.05
        assert ours <= factor * theirs + 2.0**-23, f"tensor {index}: error {ours:.2e}, torch's is {theirs:.2e}"


def assert_equal(first: Sequence[Tensor], again: Sequence[Tensor]) -> None:
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)


def assert_deterministic(run: Callable[[], Sequence[Tensor]], times: int = 3) -> None:
    """Bit-equal on every run, with all memory that torch hands out filled with NaN: nothing unwritten is read."""
    first = run()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in range(times):
            again = run()
            assert all(t.isfinite().all() for t in again)
            assert_equal(first, again)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def assert_compiles(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    """One graph, no break, same outputs and gradients as eager, and no op that Inductor had to be surprised by."""
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True)
    with _unknown_ops() as unknown, torch._inductor.config.patch(force_disable_caches=True):  # a cached graph is silent
        eager_out, compiled_out = function(*inputs), compiled(*inputs)
        upstream = [torch.randn_like(o) for o in eager_out]
        assert_equal(eager_out, compiled_out)
        assert_equal(gradients(eager_out, inputs, upstream), gradients(compiled_out, inputs, upstream))
    assert not unknown


@contextlib.contextmanager
def _unknown_ops() -> Iterator[list[str]]:
    """What Inductor says of ops that it has not been told of; in torch 2.11 saying it takes a deep model hours."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "implicit fallback" in record.msg:
                found.append(record.getMessage()[:200])

    logger, collect = logging.getLogger("torch._inductor.graph"), Collect()
    level = logger.level
    logger.addHandler(collect)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(collect)
        logger.setLevel(level)


def layouts(rows: int, width: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The same kind of tensor as callers really hand it over."""
    yield "transposed", torch.randn(width, rows, dtype=dtype, device=DEVICE).t()
    yield "every other column", torch.randn(rows, 2 * width, dtype=dtype, device=DEVICE)[:, ::2]
    yield "misaligned", torch.randn(rows * width + 1, dtype=dtype, device=DEVICE)[1:].view(rows, width)
    yield "expanded", torch.randn(1, width, dtype=dtype, device=DEVICE).expand(rows, width)
