"""Runs the source of `run.cu` on the CPU: all blocks at once, in interleavings drawn by a seed."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import torch

from tilewright.tilesync import Rope, device

FOLDER = Path(__file__).parent / "emulator"
# A stage of the user's own: twice the first input plus the second.
SOURCE = """
  for (int i = threadIdx.x; i < tile.rows * tile.columns; i += THREADS) {
    const long long at = (tile.row + i / tile.columns) * (long long)tile.width + tile.column + i % tile.columns;
    const float x = widen(read_number((const u16*)tile.inputs[0] + at));
    write_number((u16*)tile.output + at, narrow(2 * x + widen(read_number((const u16*)tile.inputs[1] + at))));
  }
"""
WRAPPER = """
#include "run.cu"
static Program program;
static Tensors given;
static void start() { tilewright_tilesync_run(program, given); }
extern "C" const char* run(int blocks, int resident, const Program* asked, const Tensors* tensors, int seed, int lost) {
  program = *asked, given = *tensors;
  dice.seed(seed), lost_post = lost, posts_done = 0;
  return run_all(blocks, resident, THREADS, start);
}
"""
# One build for all graphs of the tests: each has fewer tensors, and none larger tiles.
MACROS = {"TENSORS": 64, "HALF": 0, "X_BYTES": 140 * 1024, "FEW_TILES": 4, "MANY_ROWS": 64, "MANY_COLUMNS": 64,
          "COMBINES": 1, "NORMS": 1, "ATTENTION": 1, "HAS_USER_STAGES": 1}  # fmt: skip


HEAD_DIM, ROTATED = 8, 48  # of the decoder of the tests


def rope_source():
    return Rope("r", "x", "cos", "sin", "length", (1, 64), head_dim=HEAD_DIM, rotated=ROTATED).source


def build(folder):
    """The library of the kernel for the CPU."""
    for path in device.SOURCE.parent.glob("*.cu*"):
        shutil.copy(path, folder)
    shutil.copy(FOLDER / "sync.cuh", folder)
    (folder / "run.cpp").write_text(WRAPPER)
    (folder / "user_stages.cuh").write_text(device._user_stages([SOURCE, rope_source()]))
    hopper = FOLDER.parent.parent / "ops" / "hopper_emulator"
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{hopper}"]
    command += [f"-D{name}={value}" for name, value in MACROS.items()]
    subprocess.run([*command, "-o", folder / "run.so", folder / "run.cpp"], check=True)
    library = ctypes.CDLL(str(folder / "run.so"))
    library.run.restype = ctypes.c_char_p
    return library


class Emulated:
    """A program on the emulated GPU, with its semaphores, which live from call to call."""

    def __init__(self, library, program, dtype=torch.bfloat16):
        self.library, self.lowered = library, device.lower(program, dtype)
        kinds = [[SOURCE, rope_source()].index(each) for each in device._sources(program)]
        own = self.lowered.stages["kind"] >= device.USER  # by the numbers that the build has
        self.lowered.stages["kind"][own] = [
            device.USER + kinds[kind - device.USER] for kind in self.lowered.stages["kind"][own]
        ]
        self.control = np.zeros(self.lowered.control_words, np.uint32)
        self.failure, self.report = np.zeros(1, device.FAILURE), np.zeros(1, device.FAILURE)
        self.times = np.zeros(len(program.tasks), device.TIME)

    def __call__(
        self, tensors, blocks=3, resident=None, seed=0, lost=-1, flags=device.WAITS, parts=None, patience=20000
    ):
        """Returns all tensors, and raises what stopped the emulator."""
        graph, lowered = self.lowered.program.graph, self.lowered
        values = dict(tensors)
        for name, spec in graph.specs.items():
            dtype = torch.float32 if spec.dtype == "float32" else next(iter(tensors.values())).dtype
            values[name] = torch.full(spec.shape, torch.nan, dtype=dtype)
        addresses = [values[name].data_ptr() for name in lowered.slots]
        given = device.fill_tensors(addresses + [0] * (MACROS["TENSORS"] - len(addresses)))
        for first, count in parts or [(0, len(lowered.tasks))]:
            tables = lowered.stages, lowered.tasks, lowered.waits, lowered.posts
            arrays = *tables, self.control, self.failure, self.report, self.times
            argument = device.ProgramArgument(
                *(each.ctypes.data for each in arrays), patience, first, count, len(lowered.program.semaphores), flags
            )
            stopped = self.library.run(
                blocks, resident or blocks, ctypes.byref(argument), ctypes.byref(given), seed, lost
            )
            assert stopped is None, stopped.decode()
        return values
