"""Starts a program on a GPU: one launch for all stages, or one a stage.

Semaphores belong to one launch at a time. Eager calls have a set for each stream, on which launches follow each other;
a captured call has one of its own, for its graph may be replayed on any stream. Sets are zeroed once, when made.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tilewright.runtime import dispatch, hopper, nvrtc
from tilewright.tilesync import device
from tilewright.tilesync.check import Program
from tilewright.tilesync.device import DEPENDENT, TIMES, WAITS

PATIENCE = 2 * 10**9  # nanoseconds
_SPARE = 4  # sets of semaphores for calls that are captured


class TilesyncError(RuntimeError):
    """A wait that took too long."""


class Runner:
    """A program on one device and in one dtype."""

    def __init__(self, program: Program, on: torch.device, dtype: torch.dtype) -> None:
        self.device, self.lowered = on, device.lower(program, dtype)
        lowered = self.lowered
        module = nvrtc.Module(device.SOURCE, on.index, lowered.macros, lowered.headers)
        self.kernel = module.kernel(device.KERNEL, device.THREADS, lowered.shared_bytes)
        tables = lowered.stages, lowered.tasks, lowered.waits, lowered.posts
        self.tables = [torch.from_numpy(table.view(np.uint8).copy()).to(on) for table in tables]
        self.failure = torch.zeros(device.FAILURE.itemsize, dtype=torch.uint8, device=on)
        self.report = torch.zeros(device.FAILURE.itemsize, dtype=torch.uint8, pin_memory=True)
        self.reported = self.report.numpy().view(device.FAILURE)
        self.controls: dict[int, Tensor] = {}  # by stream
        self.spare: list[Tensor] = []
        self.captured: list[Tensor] = []  # for as long as their graphs may be replayed
        self.blocks = min(dispatch.multiprocessors(on), len(program.tasks))

    def _control(self) -> Tensor:
        words, capturing = self.lowered.control_words, torch.cuda.is_current_stream_capturing()
        if capturing:
            # Without a spare one the graph clears a new one itself, each time it is replayed.
            control = self.spare.pop() if self.spare else torch.zeros(words, dtype=torch.int32, device=self.device)
            self.captured.append(control)
            return control
        while len(self.spare) < _SPARE:
            self.spare.append(torch.zeros(words, dtype=torch.int32, device=self.device))
            torch.cuda.current_stream(self.device).synchronize()  # before another stream takes it
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if stream not in self.controls:
            self.controls[stream] = torch.zeros(words, dtype=torch.int32, device=self.device)
        return self.controls[stream]

    def raise_if_failed(self) -> None:
        """Raise what a launch that has ended reported."""
        if self.reported[0]["is_there"]:
            sentence = self.lowered.failure_sentence(self.reported[0].copy())
            self.report.zero_()
            raise TilesyncError(sentence)

    def run(self, mode: str, inputs: dict[str, Tensor], times: Tensor | None = None) -> list[Tensor]:
        """Compute the graph's outputs by `mode`: serial, pdl or persistent."""
        self.raise_if_failed()
        lowered, graph = self.lowered, self.lowered.program.graph
        values = dict(inputs)
        first = values[next(iter(graph.inputs))]
        for name, spec in graph.specs.items():
            dtype = torch.float32 if spec.dtype == "float32" else first.dtype
            values[name] = torch.empty(spec.shape, dtype=dtype, device=self.device)
        tensors = device.fill_tensors([values[name].data_ptr() for name in lowered.slots])
        control = self._control().data_ptr() if mode == "persistent" else 0
        parts = [(0, len(lowered.tasks))] if mode == "persistent" else lowered.ranges()
        flags = {"persistent": WAITS, "pdl": DEPENDENT, "serial": 0}[mode] | (TIMES if times is not None else 0)
        addresses = [table.data_ptr() for table in self.tables]
        addresses += [
            control,
            self.failure.data_ptr(),
            self.report.data_ptr(),
            0 if times is None else times.data_ptr(),
        ]
        for number, (begin, count) in enumerate(parts):
            program = device.ProgramArgument(
                *addresses, PATIENCE, begin, count, len(lowered.program.semaphores), flags
            )  # fmt: skip
            early = mode == "pdl" and number > 0
            self.kernel(min(self.blocks, count), (program, tensors), begins_early=early)
        return [values[name] for name in graph.outputs]

    def times(self, mode: str, inputs: dict[str, Tensor]) -> np.ndarray:
        """Run once and return when each task started, had waited and ended, and on which SM."""
        times = torch.zeros(len(self.lowered.tasks) * device.TIME.itemsize, dtype=torch.uint8, device=self.device)
        self.run(mode, inputs, times)
        return times.cpu().numpy().view(device.TIME)


def why_no_kernel(program: Program, inputs: Sequence[Tensor]) -> str:
    """Say why no kernel of ours computes a program of these inputs; nothing where one does."""
    first = inputs[0]
    if not first.is_cuda:
        return f"The tensors are on {first.device}."
    if not hopper.is_hopper(first.device):
        return "The GPU is no Hopper, or NVRTC is missing."
    graph = program.graph
    wanted = [torch.int32 if name in graph.integers else first.dtype for name in graph.inputs]
    if any(x.dtype != dtype for x, dtype in zip(inputs, wanted, strict=True)) or any(
        not x.is_contiguous() or x.data_ptr() % 16 or x.is_neg() for x in inputs
    ):
        return "The inputs have several dtypes, or one is not contiguous from a multiple of 16 bytes on."
    return device.why_not(program, first.dtype)


@functools.lru_cache(256)
def runner(program: Program, on: torch.device, dtype: torch.dtype) -> Runner:
    """Return the runner of a program, compiled and loaded."""
    return Runner(program, on, dtype)
