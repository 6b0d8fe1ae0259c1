"""Which path each call of an op took, and why: `tilewright.ops.explain()`, and `TILEWRIGHT_LOG=paths` for a whole run.

An op decides with `choose`, or tells `note` what it decided. While nobody listens, that costs one comparison. Nothing
is noted while a compiler traces: it decides once for all calls, and its graph says what it calls.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tilewright.runtime import dispatch
from tilewright.runtime.log import LOGS_PATHS, log

KERNEL = "kernel"  # ours, eager
REGISTERED = "registered op"  # the same kernel, where a compiler, a dispatch mode or a tensor subclass must see it
PYTORCH = "PyTorch"  # PyTorch's own ops, where they are quicker
PARTS = "its parts"  # other ops of Tilewright
REFERENCE = "reference"  # the definition in PyTorch's ops, where no kernel can run


class Path(NamedTuple):
    """How calls of an op ran; `why` says why not by an eager kernel; where they did, a remark or nothing."""

    op: str
    ran: str
    why: str


class Paths:
    """The paths that calls took inside of `explain`, and how many took each."""

    def __init__(self) -> None:
        self.calls: Counter[Path] = Counter()

    def __iter__(self) -> Iterator[Path]:
        return iter(sorted(self.calls))

    def __str__(self) -> str:
        rows = [(path.op, str(self.calls[path]), path.ran, path.why) for path in self]
        if not rows:
            return "No op of Tilewright was called."
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = (
            "  ".join([op.ljust(widths[0]), count.rjust(widths[1]), ran.ljust(widths[2]), why]).rstrip()
            for op, count, ran, why in rows
        )
        return "\n".join(lines)


_listeners: list[Paths] = []
_logged = Paths()
if LOGS_PATHS:
    _listeners.append(_logged)


@contextlib.contextmanager
def explain() -> Iterator[Paths]:
    """Collect which path each call of an op takes inside of the context, in all threads.

    >>> import torch
    >>> from tilewright import ops
    >>> with ops.explain() as paths:
    ...     loss = ops.cross_entropy(torch.randn(4, 9), torch.tensor([1, 2, 3, 4]))
    >>> [(path.op, count) for path, count in paths.calls.items()]
    [('cross_entropy', 1)]
    """
    paths = Paths()
    _listeners.append(paths)
    try:
        yield paths
    finally:
        # By identity: two that have seen the same are equal in all but that.
        _listeners[:] = [each for each in _listeners if each is not paths]


def note(op: str, ran: str, why: str = "") -> None:
    """Tell the log and `explain()` which path a call of an op took."""
    if torch.compiler.is_compiling() or not _listeners or dispatch.is_compiling():
        return
    path = Path(op, ran, why)
    for each in list(_listeners):
        if each is _logged and path not in each.calls:
            log.info("%s: %s%s", op, ran, f" ({why})" if why else "")
        each.calls[path] += 1


def choose(
    op: str, x: torch.Tensor, *others: torch.Tensor | None, host_bound: int | None = None, remark: str = ""
) -> str:
    """Decide how a call runs, and note it.

    Args:
        op: its name.
        x, others: its tensors, of which `x` decides about the device.
        host_bound: the most elements of `x` at which an eager call is left to PyTorch's own ops.
        remark: what to note where a kernel runs, as that something else would be faster.
    """
    if not dispatch.runs_kernel(x):
        ran, why = REFERENCE, dispatch.why_no_kernel(x)
    elif host_bound is not None and dispatch.is_host_bound(x, host_bound, *others):
        ran, why = PYTORCH, why_host_bound(host_bound)
    elif dispatch.is_traced(x, *others):
        ran, why = REGISTERED, "a dispatch mode or a tensor subclass must see it"
    else:
        ran, why = KERNEL, remark
    note(op, ran, why)
    return ran


def why_host_bound(most: int) -> str:
    """Say why a call of at most so many elements is left to PyTorch."""
    return f"up to {most:,} elements PyTorch's own ops take less of the host's time"
