"""Runs the source of `run.cu` on the CPU: all blocks at once, in interleavings drawn by a seed."""

import contextlib
import ctypes
import shutil
import subprocess
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from tilewright.runtime import nvrtc
from tilewright.tilesync import Rope, device, launch

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
static std::vector<Tensors> given;
static void start() { tilewright_tilesync_run(programs[launch_of[block()]], given[launch_of[block()]]); }
static void begin() { tilewright_tilesync_begin(programs[launch_of[block()]]); }
static void hold() {  // a kernel of somebody else's, which has its places for a while
  const u32 nothing = 0;
  for (int turn = 0; turn < 200; turn++) acquire(&nothing);
}
// Of each launch: program, blocks, whether it is a kernel that waits for a stage to begin, launches that must have
// ended, those that must have started, and tensors. Of all: blocks of somebody else's kernel.
extern "C" const char* run(int count, const Program* asked, const int* blocks, const int* waits, const u64* ended,
                           const u64* started, const Tensors* tensors, int held, bool one_queue, int resident, int seed,
                           int lost) {
  programs.assign(asked, asked + count), given.assign(tensors, tensors + count), launches.clear();
  for (int i = 0; i < count; i++) launches.push_back({blocks[i], ended[i], started[i], waits[i] ? begin : start});
  if (held) launches.push_back({held, 0, 0, hold});
  dice.seed(seed), lost_post = lost, posts_done = 0;
  return run_all(resident, THREADS, one_queue);
}
extern "C" u64 turns() { return now; }
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
    library.run.restype, library.turns.restype = ctypes.c_char_p, ctypes.c_uint64
    return library


class Streams:
    """Stand-ins by which `Runner._run_on_streams` says which launch is behind the end or the start of which.

    A launch: program, blocks, whether it is a kernel that waits for a stage to begin, launches that must have ended,
    and launches that must have started; of the latter two each is a bit of a number.
    """

    def __init__(self, count):
        self.launches, self.here = [], None
        self.caller = self.Stream(self)
        self.runner = launch.Runner.__new__(launch.Runner)
        self.runner.device, self.runner.lock = torch.device("cpu"), threading.Lock()
        self.runner.streams = [self.Stream(self) for _ in range(count - 1)]
        self.runner.started = [self.Started(self) for _ in range(count - 1)]
        self.runner.kernel, self.runner.begin = self.kernel, self.begin

    class Stream:
        def __init__(self, all_of_them):
            self.all, self.ended, self.started = all_of_them, 0, 0

        def wait_stream(self, other):
            self.ended |= other.ended

    class Started:
        def __init__(self, all_of_them):
            self.all, self.launch = all_of_them, None

        def wait(self):
            self.all.here.started |= 1 << self.launch

    def kernel(self, blocks, arguments, started=None):
        if started:
            started.launch = len(self.launches)
        self._launch(arguments[0], blocks, False)

    def begin(self, blocks, arguments):
        self._launch(arguments[0], blocks, True)

    def _launch(self, program, blocks, waits):
        here = self.here
        self.launches.append((program, blocks, waits, here.ended, here.started))
        here.ended, here.started = 1 << len(self.launches) - 1, 0

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.here = self.here, stream
        yield
        self.here = before

    def of(self, programs, blocks):
        """Return the launches of stages, of which each has a program and blocks."""
        with (
            mock.patch.object(torch.cuda, "current_stream", lambda on: self.caller),
            mock.patch.object(torch.cuda, "stream", self.stream),
        ):
            self.runner._run_on_streams(programs, blocks, None)
        return self.launches


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
        streams=False, begins=True, edges=True, one_queue=False, held=0,
    ):  # fmt: skip
        """Returns all tensors, and raises what stopped the emulator.

        Of `streams` may be left out: `begins`, kernels that wait for the stage before to begin, and `edges`, their
        launches' being behind its start. `one_queue`: launches begin in an order that no edge forbids, one by one.
        `held`: places that a kernel of somebody else's has for a while.
        """
        launches, values = self.launches(tensors, blocks, flags, parts, patience, streams, begins)
        launches = [(*first, started if edges else 0, given) for *first, started, given in launches]
        for some in [launches] if streams else [[each] for each in launches]:
            run_launches(self.library, some, resident or blocks, seed, lost, one_queue, held)
        return values

    def launches(self, tensors, blocks, flags, parts, patience, streams, begins=True):
        """Return launches as `run_launches` takes them, and all tensors, those that are written full of NaN."""
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
        semaphores, cells = len(lowered.program.semaphores), len(lowered.stages)
        of_each = [min(blocks, count) if streams else blocks for _, count in parts]
        programs = [
            device.ProgramArgument(*arrays, patience, first, count, semaphores, flags, number, cells, sum(of_each))
            for number, (first, count) in enumerate(parts)
        ]
        found = [(program, own, False, 0, 0) for program, own in zip(programs, of_each, strict=True)]
        if streams and begins:
            found = Streams(len(parts)).of(programs, of_each)
        return [(*each, given) for each in found], values


def run_launches(library, launches, resident, seed=0, lost=-1, one_queue=False, held=0):
    """Run launches at the same time, and raise what stopped the emulator."""
    kinds = device.ProgramArgument, ctypes.c_int, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, type(launches[0][-1])
    columns = [(kind * len(launches))(*each) for kind, each in zip(kinds, zip(*launches, strict=True), strict=True)]
    stopped = library.run(len(launches), *columns, held, one_queue, resident, seed, lost)
    assert stopped is None, stopped.decode()


def run_at_once(runs, tensors, blocks, resident, seed, streams):
    """Run each of several calls, of programs whose semaphores are their own, at the same time; return their tensors."""
    together, found = [], []
    for run, given in zip(runs, tensors, strict=True):
        launches, values = run.launches(given, blocks, device.WAITS, None, 20000, streams)
        behind = len(together)
        together += [(*first, ended << behind, started << behind, own) for *first, ended, started, own in launches]
        found.append(values)
    run_launches(runs[0].library, together, resident, seed)
    return found
