"""Rows of bfloat16 logits on a Hopper: when `hopper.cu` takes them, and how it is started."""

from __future__ import annotations

import functools
from ctypes import c_float, c_int, c_longlong, c_void_p
from pathlib import Path

import torch

from tilewright.measure import work
from tilewright.runtime import dispatch, hopper

SOURCE = Path(__file__).with_name("hopper.cu")
NAME = "tilewright_cross_entropy_rows"
_LEAST, _MOST = 20480, 65536  # classes; below, what rows exchange takes too long; beyond, registers do not hold one
_VECTOR = 8  # logits
_SHARES = {512: 16, 640: 12, 768: 10, 896: 8}  # threads that may share a row, and vectors that each has registers for
_RING_BYTES = 230_000


@functools.cache
def launch_config(classes: int, stride: int) -> dict[str, int] | None:
    """Threads that share a row, the vectors of each, and the ring's slots; None where no block holds such a row.

    >>> launch_config(50304, 50304)
    {'THREADS': 640, 'EACH': 10, 'SLOTS': 22, 'RAGGED': 0}
    """
    before = 0 if stride % _VECTOR == 0 else _VECTOR - 1  # elements of the row's first vector that are not its own
    vectors = -(-(before + classes) // _VECTOR)
    shares = [(threads, -(-vectors // threads)) for threads in _SHARES]
    fitting = [(threads, each) for threads, each in shares if each <= _SHARES[threads]]
    if not fitting:
        return None
    threads, each = min(fitting, key=lambda share: share[0] * share[1])  # where the fewest are idle
    ragged = int(before > 0 or classes % _VECTOR > 0)
    return {"THREADS": threads, "EACH": each, "SLOTS": _RING_BYTES // (threads * 16), "RAGGED": ragged}


def compile_ahead(device: torch.device, classes: int) -> None:
    """Begins to compile the kernel for so many classes, if it takes them.

    A loss has rows that follow each other or, in `linear_cross_entropy`, that begin at a vector: one configuration for
    both where rows are whole vectors; where not, the latter.
    """
    config = launch_config(classes, -(-classes // _VECTOR) * _VECTOR) if _LEAST <= classes <= _MOST else None
    if config is not None:
        hopper.compile_ahead(device, SOURCE, config)


def start(
    logits: torch.Tensor, targets: torch.Tensor, denominator: torch.Tensor | None, loss: torch.Tensor,
    lse: torch.Tensor | None, gradient: torch.Tensor, ignore_index: int, z_loss: float,
) -> bool:  # fmt: skip
    """Fills `loss`, `lse` and `gradient`, which may be the logits, where it can, and says whether it did.

    Rows of logits and gradient lie alike, anywhere behind an aligned address; `targets` are packed.
    """
    rows, classes = targets.numel(), logits.shape[-1]
    if logits.dtype != torch.bfloat16 or not _LEAST <= classes <= _MOST:
        return False
    stride = classes if logits.is_contiguous() else logits.stride(-2)
    if (logits.data_ptr() | gradient.data_ptr()) % 16 or logits.device.type != "cuda":
        return False
    macros = launch_config(classes, stride)
    if macros is None:
        return False
    threads, ring = macros["THREADS"] + 32, macros["SLOTS"] * macros["THREADS"] * 16
    kernels = hopper.kernels(logits.device, SOURCE, (NAME,), threads, ring, macros)
    if kernels is None:
        return False
    tensors = (logits, targets, denominator, loss, lse, gradient)
    with work.launching(NAME, tensors):
        narrow = c_int(targets.dtype == torch.int32)
        numbers = c_longlong(ignore_index), c_longlong(rows), c_longlong(stride), c_int(classes), narrow
        addresses = [c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
        kernels[NAME](min(rows, dispatch.multiprocessors(logits.device)), (*addresses, *numbers, c_float(z_loss)))
    return True
