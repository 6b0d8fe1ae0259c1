"""Starts a program on a GPU: one launch for all stages, or one a stage, on one stream or on a stream each.

Semaphores belong to one launch at a time. Eager calls have a set for each stream, on which launches follow each other,
and each mode, by whose blocks they grow; a captured call has one of its own, for its graph may be replayed on any
stream. Sets are zeroed once, when made.

Nothing of a runner is ever freed, since a captured graph may read it whenever it is replayed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tilewright.runtime import dispatch, hopper, nvrtc
from tilewright.tilesync import device
from tilewright.tilesync.check import Program
from tilewright.tilesync.device import DEPENDENT, STREAMS, TIMES, WAITS
from tilewright.tilesync.graph import GraphError
from tilewright.tilesync.residency import MOST_STREAMS, blocks_of_streams

PATIENCE = 2 * 10**9  # nanoseconds
_FLAGS = {"persistent": WAITS, "streams": WAITS | STREAMS, "pdl": DEPENDENT, "serial": 0}
SPARE = 32  # sets of semaphores that are ready before a capture begins: as many as many models have layers

T = TypeVar("T")


class TilesyncError(RuntimeError):
    """A wait that took too long."""


def aside(on: torch.device, function: Callable[[], T]) -> T:
    """Call a function in a thread and on a stream of its own, behind the current stream; return when both are done.

    So what it allocates does not lie in the memory of CUDA graphs that the caller warms up for, as torch.compile does
    with ``mode="reduce-overhead"``, and it may capture graphs itself. The caller's stream must not be capturing.
    """
    current = torch.cuda.current_stream(on)

    def call() -> T:
        with torch.no_grad(), torch.cuda.device(on):
            own = torch.cuda.Stream()
            own.wait_stream(current)
            with torch.cuda.stream(own):
                result = function()
            own.synchronize()
            return result

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


class Runner:
    """A program on one device and in one dtype; made `aside`."""

    def __init__(self, program: Program, on: torch.device, dtype: torch.dtype) -> None:
        self.device, self.lowered = on, device.lower(program, dtype)
        lowered = self.lowered
        module = nvrtc.Module(device.SOURCE, on.index, lowered.macros, lowered.headers)
        self.kernel = module.kernel(device.KERNEL, device.THREADS, lowered.shared_bytes)
        self.begin = module.kernel(device.BEGIN, 32, 0)
        self.lock = threading.Lock()  # while launches follow each other that count on the same semaphores
        self.streams = [torch.cuda.Stream(on) for _ in range(min(len(lowered.stages), MOST_STREAMS) - 1)]
        self.started = [nvrtc.Started(on.index) for _ in self.streams]  # of all stages but the last
        tables = lowered.stages, lowered.tasks, lowered.waits, lowered.posts
        self.tables = [torch.from_numpy(table.view(np.uint8).copy()).to(on) for table in tables]
        self.failure = torch.zeros(device.FAILURE.itemsize, dtype=torch.uint8, device=on)
        self.report = torch.zeros(device.FAILURE.itemsize, dtype=torch.uint8, pin_memory=True)
        self.reported = self.report.numpy().view(device.FAILURE)
        self.controls: dict[tuple[int, str], Tensor] = {}  # by stream and mode
        self.spare = self._zeroed_controls()
        self.captured: list[Tensor] = []  # for as long as their graphs may be replayed
        self.places = dispatch.multiprocessors(on)  # a block takes all of one's shared memory or registers
        self.blocks = min(self.places, len(program.tasks))

    @functools.cached_property
    def _blocks_of_streams(self) -> list[int]:
        """The blocks of each stage, which take a millisecond to prove for thousands of tiles."""
        return blocks_of_streams(self.lowered.program, self.places)

    def _zeroed_controls(self) -> list[Tensor]:
        sizes = SPARE + 1, self.lowered.control_words
        return list(torch.zeros(sizes, dtype=torch.int32, device=self.device))

    def _control(self, mode: str) -> Tensor:
        """Return the semaphores of a call: the current stream's for a mode, or new ones while it is capturing."""
        if torch.cuda.is_current_stream_capturing():
            # Without a spare one the graph clears a new one itself, each time it is replayed.
            words = self.lowered.control_words
            control = self.spare.pop() if self.spare else torch.zeros(words, dtype=torch.int32, device=self.device)
            self.captured.append(control)
            return control
        key = torch._C._cuda_getCurrentRawStream(self.device.index), mode
        is_new = key not in self.controls
        if len(self.spare) < SPARE + is_new:
            self.spare += aside(self.device, self._zeroed_controls)
        if is_new:
            self.controls[key] = self.spare.pop()
        return self.controls[key]

    def raise_if_failed(self) -> None:
        """Raise what a launch that has ended reported."""
        if self.reported[0]["is_there"]:
            sentence = self.lowered.failure_sentence(self.reported[0].copy())
            self.report.zero_()
            raise TilesyncError(sentence)

    def run(self, mode: str, inputs: dict[str, Tensor], times: Tensor | None = None) -> list[Tensor]:
        """Compute the graph's outputs by `mode`: serial, pdl, streams or persistent."""
        self.raise_if_failed()
        lowered, graph = self.lowered, self.lowered.program.graph
        values = dict(inputs)
        first = values[next(iter(graph.inputs))]
        for name, spec in graph.specs.items():
            dtype = torch.float32 if spec.dtype == "float32" else first.dtype
            values[name] = torch.empty(spec.shape, dtype=dtype, device=self.device)
        tensors = device.fill_tensors([values[name].data_ptr() for name in lowered.slots])
        parts = [(0, len(lowered.tasks))] if mode == "persistent" else lowered.ranges()
        flags = _FLAGS[mode] | (TIMES if times is not None else 0)
        blocks = [min(self.blocks, count) for _, count in parts]
        if mode == "streams":
            blocks = self._blocks_of_streams
        control = self._control(mode).data_ptr() if flags & WAITS else 0
        addresses = [table.data_ptr() for table in self.tables]
        addresses += [
            control,
            self.failure.data_ptr(),
            self.report.data_ptr(),
            0 if times is None else times.data_ptr(),
        ]
        launches = [
            device.ProgramArgument(
                *addresses, PATIENCE, begin, count, len(lowered.program.semaphores), flags, number, len(lowered.stages),
                sum(blocks),
            )
            for number, (begin, count) in enumerate(parts)
        ]  # fmt: skip
        if mode == "streams":
            self._run_on_streams(launches, blocks, tensors)
        else:
            for number, program in enumerate(launches):
                self.kernel(blocks[number], (program, tensors), begins_early=mode == "pdl" and number > 0)
        return [values[name] for name in graph.outputs]

    def _run_on_streams(self, launches: list[Any], blocks: list[int], tensors: Any) -> None:
        """Start each stage on a stream of its own, behind a kernel that ends when the stage before has begun.

        That kernel's launch is behind the start of the stage that it waits for, in a captured graph by an edge: in no
        order of launches that a graph may be replayed in does it keep that stage from beginning. Each stream joins the
        caller's at the end, so a graph that captures the caller's has them all.
        """
        caller = torch.cuda.current_stream(self.device)
        with self.lock:  # stages of another thread's call would take the tickets of this one's
            for number, stream in enumerate([caller, *self.streams]):
                with torch.cuda.stream(stream):
                    if number:
                        self.started[number - 1].wait()
                        before = device.ProgramArgument.from_buffer_copy(launches[number])
                        before.cell, before.blocks = number - 1, blocks[number - 1]
                        self.begin(1, (before,))
                    started = self.started[number] if number < len(self.streams) else None
                    self.kernel(blocks[number], (launches[number], tensors), started=started)
            for stream in self.streams:
                caller.wait_stream(stream)

    def times(self, mode: str, inputs: dict[str, Tensor]) -> np.ndarray:
        """Run once and return when each task started, had waited and ended, and on which SM."""
        times = torch.zeros(len(self.lowered.tasks) * device.TIME.itemsize, dtype=torch.uint8, device=self.device)
        self.run(mode, inputs, times)
        return times.cpu().numpy().view(device.TIME)


def describe(mode: str) -> str:
    """Say how a mode runs by this driver: its name, and whether its stages follow each other though they need not."""
    if mode != "streams" or nvrtc.tells_starts():
        return mode
    return "streams, one stage after the other: a driver older than CUDA 12.3 does not tell when a kernel has begun"


def why_no_kernel(program: Program, inputs: Sequence[Tensor]) -> str:
    """Say why no kernel of ours computes a program of these inputs; nothing where one does."""
    first = inputs[0]
    if not first.is_cuda:
        return f"The tensors are on {first.device}."
    if not hopper.is_hopper(first.device):
        return "The GPU is no Hopper, or NVRTC is missing."
    graph = program.graph
    kinds = {**dict.fromkeys(graph.integers, torch.int32), **dict.fromkeys(graph.floats, torch.float32), **graph.packed}
    wanted = [kinds.get(name, first.dtype) for name in graph.inputs]
    if any(x.dtype != dtype for x, dtype in zip(inputs, wanted, strict=True)) or any(
        not x.is_contiguous() or x.data_ptr() % 16 or x.is_neg() for x in inputs
    ):
        return "The inputs have several dtypes, or one is not contiguous from a multiple of 16 bytes on."
    return device.why_not(program, first.dtype)


_runners: dict[tuple[Program, torch.device, torch.dtype], Runner] = {}
_lock = threading.Lock()  # of the one that makes a runner


def runner(program: Program, on: torch.device, dtype: torch.dtype) -> Runner:
    """Return the runner of a program, compiled and loaded; it lives as long as the process."""
    key = program, on, dtype
    if key not in _runners:
        if torch.cuda.is_current_stream_capturing():
            raise GraphError(f"{program.graph.name}: call it once before it is captured.")
        with _lock:
            if key not in _runners:
                _runners[key] = aside(on, lambda: Runner(*key))
    return _runners[key]


def raise_if_failed() -> None:
    """Raise what any launch of this process that has ended reported: a wait that took too long.

    The next call raises it by itself. A CUDA graph that is replayed makes no call, so the code that replays one calls
    this when the GPU has finished, before the numbers are used.

    >>> raise_if_failed()
    """
    for each in list(_runners.values()):
        each.raise_if_failed()
