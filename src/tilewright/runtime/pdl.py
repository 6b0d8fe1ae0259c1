"""Programmatic dependent launch (PDL): kernels of a captured chain, each of which begins while the one before it ends.

A kernel that takes part lets the next one begin (`griddepcontrol.launch_dependents`), fetches the first of its weights,
and waits until the kernel before it has ended (`griddepcontrol.wait`). `pdl_kernels.py` has these in Triton,
`cuda/warp.cuh` in CUDA C++. They are in a kernel's code only where its constant PDL is true.

The rule that each such kernel keeps:

1. Every program of it waits, whatever it does then. So the end of a kernel is also the end of all before it, and
   one wait is enough for what was written two kernels before.
2. Before the wait it writes nothing: its memory may be that of a tensor which a kernel before it still reads.
3. Before the wait it reads nothing that a kernel of the chain writes: only weights, their scales and biases. To have a
   line brought into L2 is not to read it: a write that comes later goes to that line. So keys and values of earlier
   tokens are fetched as well, and how many there are is read past L1 for that, and read again after the wait.

Then it may let the next one begin at any time, even before its own wait: the next one waits for it.

What does not keep the rule is out of the chain: PyTorch's kernels and cuBLAS's, copies, and kernels of ours without a
constant PDL. `launching` enforces that. A launch begins early only where the last thing that its stream has captured is
a launch of the same chain; the driver is asked. All other edges of the graph stay full dependencies. So a weight that
PyTorch has just copied for a kernel is there when the kernel begins, and may be read before the wait like any other.

`chaining` is the switch. Off it, no kernel has code of PDL in it, and none is launched with its attribute.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import torch

LEAST_CAPABILITY = (9, 0)
_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_*


class Chain:
    """Launches that take part: how many were captured, and how many of them begin early."""

    def __init__(self) -> None:
        self.captured = self.early = 0
        self.newest: tuple[int, int] | None = None  # capture and node of the last launch

    def __str__(self) -> str:
        return f"{self.early} of {self.captured} launches of ours begin before the one in front of them has ended"


class _Active(threading.local):
    chain: Chain | None = None


_active = _Active()


def active() -> Chain | None:
    """Return the chain that this thread's launches belong to, None outside of `chaining`."""
    return _active.chain


@contextlib.contextmanager
def chaining(chain: Chain | None) -> Iterator[None]:
    """Have launches of this thread take part in a chain, those of kernels that can; None: in none.

    A kernel is compiled for it at its first launch inside, which therefore must not be captured.
    """
    before, _active.chain = _active.chain, chain
    try:
        yield
    finally:
        _active.chain = before


@contextlib.contextmanager
def launching(device: torch.device) -> Iterator[bool]:
    """Say whether the kernel that is launched inside, which keeps the rule, may begin early."""
    chain = _active.chain
    if chain is None:
        yield False
        return
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    is_early = chain.newest is not None and newest_node(stream) == chain.newest
    chain.newest = None  # should the launch fail
    yield is_early
    chain.newest = newest_node(stream)
    if chain.newest is not None:
        chain.captured += 1
        chain.early += is_early


def newest_node(stream: int) -> tuple[int, int] | None:
    """Return the capture of a stream and the one node that its next launch would depend on, None if there is none."""
    ask, status, capture = _capture_info(), c_int(), c_uint64()
    nodes, edges, count = c_void_p(), c_void_p(), c_size_t()
    if ask is None or ask(stream, byref(status), byref(capture), None, byref(nodes), byref(edges), byref(count)):
        return None
    if status.value != _ACTIVE or count.value != 1 or not nodes.value:
        return None
    return capture.value, ctypes.cast(nodes.value, ctypes.POINTER(c_uint64))[0]


@functools.cache
def _capture_info() -> Any:
    """The driver's function that tells what a stream has captured, edges with data included; None before CUDA 12.3."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v3
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (c_void_p,) * 7, c_int
    return function


def why_not(device: torch.device) -> str:
    """Say why kernels on a device form no chain; nothing where they do.

    >>> why_not(torch.device("cpu"))
    'PDL is for CUDA'
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return "PDL is for CUDA"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, and PDL needs 9.0"
    return "" if _capture_info() else "the driver is older than CUDA 12.3"
