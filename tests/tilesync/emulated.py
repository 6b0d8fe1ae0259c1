"""Runs the source of `run.cu` on the CPU: all blocks at once, in interleavings drawn by a seed."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import torch

from tilewright.runtime import nvrtc
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
static std::vector<Program> programs;
static Tensors given;
static void start() { tilewright_tilesync_run(programs[launch_of[block()]], given); }
static void begin() { tilewright_tilesync_begin(programs[launch_of[block()]]); }
// Of each launch: program, blocks, whether it is a kernel that waits for a stage to begin, and whom it is behind.
extern "C" const char* run(int count, const Program* asked, const int* blocks, const int* waits, const int* behind,
                           int resident, const Tensors* tensors, int seed, int lost) {
  programs.assign(asked, asked + count), given = *tensors, launches.clear();
  for (int i = 0; i < count; i++) launches.push_back({blocks[i], behind[i], waits[i] ? begin : start});
  dice.seed(seed), lost_post = lost, posts_done = 0;
  return run_all(resident, THREADS);
}
"""
# One build for all graphs of the tests: each has fewer tensors, and none larger tiles.
MACROS = {"TENSORS": 64, "HALF": 0, "X_BYTES": 140 * 1024, "FEW_TILES": 4, "LAYOUTS": 63, "MANY_ROWS": 64,
          "MANY_COLUMNS": 64, "COMBINES": 1, "NORMS": 1, "ATTENTION": 64, "HAS_USER_STAGES": 1}  # fmt: skip


HEAD_DIM, ROTATED = 8, 48  # of the decoder of the tests


def rope_source():
    return Rope("r", "x", "cos", "sin", "length", (1, 64), head_dim=HEAD_DIM, rotated=ROTATED).source


def build(folder, **macros):
    """The library of the kernel for the CPU, by other macros where some are given."""
    for path in device.SOURCE.parent.glob("*.cu*"):
        shutil.copy(path, folder)
    shutil.copy(FOLDER / "sync.cuh", folder)
    (folder / "run.cpp").write_text(WRAPPER)
    (folder / "user_stages.cuh").write_text(device._user_stages([SOURCE, rope_source()]))
    hopper = FOLDER.parent.parent / "ops" / "hopper_emulator"
    command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{hopper}", f"-I{nvrtc._HEADERS}"]
    command += [f"-D{name}={value}" for name, value in {**MACROS, **macros}.items()]
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
        self, tensors, blocks=3, resident=None, seed=0, lost=-1, flags=device.WAITS, parts=None, patience=20000,
        streams=False, begins=True,
    ):  # fmt: skip
        """Returns all tensors, and raises what stopped the emulator; `begins`: whether stages wait for each other's."""
        graph, lowered = self.lowered.program.graph, self.lowered
        values = dict(tensors)
        for name, spec in graph.specs.items():
            dtype = torch.float32 if spec.dtype == "float32" else next(iter(tensors.values())).dtype
            values[name] = torch.full(spec.shape, torch.nan, dtype=dtype)
        addresses = [values[name].data_ptr() for name in lowered.slots]
        given = device.fill_tensors(addresses + [0] * (MACROS["TENSORS"] - len(addresses)))
        tables = lowered.stages, lowered.tasks, lowered.waits, lowered.posts
        arrays = [each.ctypes.data for each in (*tables, self.control, self.failure, self.report, self.times)]
        parts = lowered.ranges() if streams else parts or [(0, len(lowered.tasks))]
        flags |= device.STREAMS if streams else 0
        resident, semaphores, cells = resident or blocks, len(lowered.program.semaphores), len(lowered.stages)
        of_each = [min(blocks, count) if streams else blocks for _, count in parts]
        together = []  # launches: program, blocks, whether it waits for a stage to begin, whom it is behind
        for number, ((first, count), own) in enumerate(zip(parts, of_each, strict=True)):
            program = device.ProgramArgument(
                *arrays, patience, first, count, semaphores, flags, number, cells, sum(of_each)
            )
            if streams and begins and number:
                before = device.ProgramArgument.from_buffer_copy(program)
                before.cell, before.blocks = number - 1, of_each[number - 1]
                earlier = [i for i, launch in enumerate(together) if launch[2]]
                together.append((before, 1, True, earlier[-1] if earlier else -1))
            together.append((program, own, False, len(together) - 1 if streams and begins and number else -1))
        for some in [together] if streams else [[each] for each in together]:
            numbers = [(ctypes.c_int * len(some))(*each) for each in list(zip(*some, strict=True))[1:]]
            programs = (device.ProgramArgument * len(some))(*(each[0] for each in some))
            stopped = self.library.run(
                len(some), programs, *numbers, resident, ctypes.byref(given), seed, lost
            )  # fmt: skip
            assert stopped is None, stopped.decode()
        return values
