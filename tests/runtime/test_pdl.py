"""Who begins early in a chain of launches. The driver's captures and Triton's launcher are stand-ins that note what
they are told; what kernels do in a chain on a GPU is tested in `tests/generate/test_pdl.py`."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import threading
from types import SimpleNamespace

import pytest
import torch

from tilewright.ops.quantized_linear import few_rows
from tilewright.runtime import dispatch, pdl

GPU = torch.device("cuda", 0)
TENSORS = (torch.zeros(4, dtype=torch.bfloat16), None)
PLAIN, EARLY, BEHIND = "no code of PDL", "early", "behind all"


class Captures:
    """The driver's view of one stream: its capture, and the nodes that the next launch would depend on."""

    def __init__(self):
        self.capture, self.nodes, self.count = 0, [], 100

    def begin(self):
        self.capture, self.nodes = self.capture + 1, []

    def add(self):
        """A node of anybody's."""
        if self.nodes is not None:
            self.count += 1
            self.nodes = [self.count]

    def info(self, stream, status, capture, graph, nodes, edges, count):
        assert stream == 7 and graph is None
        status._obj.value = int(self.nodes is not None)
        if self.nodes is not None:
            self.held = (ctypes.c_uint64 * max(1, len(self.nodes)))(*self.nodes)
            capture._obj.value, count._obj.value = self.capture, len(self.nodes)
            nodes._obj.value = ctypes.addressof(self.held)
        return 0


class Launcher:
    """Triton's, as `Launch` calls it."""

    def __init__(self, log, captures, launch_pdl=False, code=False):
        self.log, self.captures, self.launch_pdl, self.code = log, captures, launch_pdl, code

    def __call__(self, gx, gy, gz, stream, function, metadata, *rest):
        self.captures.add()
        constants = rest[-2:]
        assert constants == (5, self.code), "PDL is the last constant"
        self.log.append(PLAIN if not self.code else EARLY if self.launch_pdl else BEHIND)


class Kernel:
    """A Triton kernel whose constants are SIZE and PDL."""

    fn = SimpleNamespace(__name__="kernel")

    def __init__(self, captures):
        self.captures, self.log, self.compiled = captures, [], []

    def _binary(self, launch_pdl, code):
        run = Launcher(self.log, self.captures, launch_pdl, code)
        return SimpleNamespace(run=run, function=1, packed_metadata=2)

    def warmup(self, *arguments, grid, num_warps, launch_pdl):
        assert self.captures.nodes is None, "a kernel is loaded while a graph is captured"
        self.compiled.append((arguments[-1], launch_pdl, num_warps))
        return self._binary(launch_pdl, arguments[-1])

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            binary = self._binary(False, arguments[-1])
            binary.run(*grid, 1, 7, 1, 2, *arguments)
            return binary

        return launch


@pytest.fixture
def captures(monkeypatch):
    made = Captures()
    made.nodes = None
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch, "triton_ready", dispatch.Job(lambda: None))
    monkeypatch.setattr(pdl, "_capture_info", lambda: made.info)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return made


def launch_of(captures, chained=True):
    return dispatch.Launch(Kernel(captures), GPU, (5,) if chained else (5, False), 4, chained=chained)


def run(launch):
    launch((1, 1), TENSORS, (3,))
    return launch.kernel.log[-1]


def test_a_launch_begins_early_behind_one_of_its_chain_and_nowhere_else(captures):
    first, second = launch_of(captures), launch_of(captures)
    chain = pdl.Chain()
    with pdl.chaining(chain):
        assert [run(first), run(second), run(first)] == [BEHIND] * 3, "nothing is captured"
        assert chain.captured == 0
        captures.begin()
        assert [run(first), run(second), run(second)] == [BEHIND, EARLY, EARLY]
        captures.add()  # a kernel or a copy of PyTorch's
        assert [run(first), run(second)] == [BEHIND, EARLY]
        captures.nodes = [*captures.nodes, 77]  # another stream was joined
        assert [run(first), run(first)] == [BEHIND, EARLY]
        captures.nodes = None  # the capture ends
        assert run(second) == BEHIND
        node = captures.count
        captures.begin()
        captures.nodes = [node]  # an address may come again in another capture
        assert [run(first), run(second)] == [BEHIND, EARLY]
    assert (chain.early, chain.captured) == (5, 9)
    assert str(chain) == "5 of 9 launches of ours begin before the one in front of them has ended"
    assert first.kernel.compiled == second.kernel.compiled == [(True, True, 4)]


def test_outside_of_a_chain_kernels_have_no_code_of_pdl(captures):
    launch = launch_of(captures)
    captures.begin()
    assert [run(launch), run(launch)] == [PLAIN] * 2
    captures.nodes = None
    with pdl.chaining(pdl.Chain()):
        assert run(launch) == BEHIND
        with pdl.chaining(None):
            assert run(launch) == PLAIN
        assert run(launch) == BEHIND
    assert run(launch) == PLAIN and pdl.active() is None


def test_a_kernel_that_does_not_keep_the_rule_breaks_the_chain(captures):
    ours, other = launch_of(captures), launch_of(captures, chained=False)
    with pdl.chaining(pdl.Chain()):
        run(ours)
        captures.begin()
        assert [run(ours), run(ours), run(other), run(ours)] == [BEHIND, EARLY, PLAIN, BEHIND]


def test_a_launch_that_fails_is_not_taken_for_the_one_in_front(captures):
    launch = launch_of(captures)
    with pdl.chaining(pdl.Chain()):
        run(launch)
        captures.begin()
        run(launch)
        with pytest.raises(RuntimeError, match="out of resources"), pdl.launching(GPU):
            raise RuntimeError("out of resources")
        assert [run(launch), run(launch)] == [BEHIND, EARLY]


def test_a_chain_is_its_threads(captures):
    launch, found = launch_of(captures), []
    with pdl.chaining(pdl.Chain()):
        thread = threading.Thread(target=lambda: found.append(run(launch)))
        thread.start()
        thread.join()
    assert found == [PLAIN]


def test_a_driver_that_cannot_tell_leaves_all_dependencies_full(captures, monkeypatch):
    launch = launch_of(captures)
    for ask in (None, lambda *_: 1):
        monkeypatch.setattr(pdl, "_capture_info", lambda ask=ask: ask)
        with pdl.chaining(pdl.Chain()):
            captures.nodes = None
            run(launch)
            captures.begin()
            assert [run(launch), run(launch)] == [BEHIND] * 2


def test_kernels_in_cuda_c_take_part(captures, monkeypatch):
    """They have the code of PDL always; the attribute says whether they begin early."""
    seen = []

    def kernel(programs, arguments, *, begins_early):
        captures.add()
        seen.append(begins_early)

    monkeypatch.setattr(few_rows, "_kernel", lambda *_: kernel)
    config = few_rows.choose(1, 128, 64, torch.int8, torch.bfloat16, None, False, 132)
    x, y = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(1, 128, dtype=torch.bfloat16)
    weight, scale = torch.zeros(128, 64, dtype=torch.int8), torch.ones(128)
    inputs = (object(), config, x, weight, scale, None, None, None, y)
    captures.begin()
    few_rows.multiply(*inputs)
    with pdl.chaining(pdl.Chain()):
        for _ in range(2):
            few_rows.multiply(*inputs)
        captures.add()
        few_rows.multiply(*inputs)
    assert seen == [False, False, True, False]


@pytest.mark.parametrize(
    ("cuda", "capability", "driver", "words"),
    [
        (None, (9, 4), True, "PDL is for CUDA"), ("13.0", (8, 9), True, "compute capability 8.9, and PDL needs 9.0"),
        ("13.0", (9, 0), False, "older than CUDA 12.3"), ("13.0", (9, 0), True, ""), ("13.0", (12, 0), True, ""),
    ],
    ids=str,
)  # fmt: skip
def test_gpus_that_have_no_pdl_say_why(cuda, capability, driver, words, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(pdl, "_capture_info", lambda: object() if driver else None)
    why = pdl.why_not(GPU)
    assert words in why and bool(words) == bool(why)
    assert pdl.why_not(torch.device("cpu"))


def test_triton_s_launcher_passes_the_attribute_that_it_is_given(monkeypatch):
    """What `ChainedLaunch` sets on a copy of it is what the driver is told."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    told = []
    active = SimpleNamespace(get_current_device=lambda: 0, allocate_default_profile_scratch=None)
    monkeypatch.setattr(type(driver.triton.runtime.driver), "active", property(lambda self: active), raising=False)
    launcher = object.__new__(driver.CudaLauncher)  # whose `__init__` needs a driver and, in some releases, a compiler
    vars(launcher).update(
        num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
        launch_cooperative_grid=False, launch_pdl=True, gsan_enabled=False, arg_annotations=[], kernel_signature=b"",
        launch=lambda *arguments: told.append(arguments),
    )  # fmt: skip
    binary = SimpleNamespace(run=launcher, function=1, packed_metadata=2)
    kernel = SimpleNamespace(fn=Kernel.fn, warmup=lambda *_, **__: binary)
    is_early = [False, True, False]
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(dispatch.pdl, "launching", lambda device: contextlib.nullcontext(is_early[len(told)]))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    launch = dispatch.ChainedLaunch(kernel, GPU, (True,), 4)
    for _ in is_early:
        launch._start((3, 1), (TENSORS[0],), ())
    # Grid, stream, function, whether it is cooperative, and then the attribute.
    assert [arguments[:7] for arguments in told] == [(3, 1, 1, 7, 1, False, early) for early in is_early]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here, and so no cuda.h")
def test_the_driver_s_function_is_that_of_the_header(tmp_path):
    (tmp_path / "check.cu").write_text(
        f"""
#include <cuda.h>
static_assert(CU_STREAM_CAPTURE_STATUS_ACTIVE == {pdl._ACTIVE} && sizeof(CUstreamCaptureStatus) == 4);
static_assert(sizeof(cuuint64_t) == 8 && sizeof(CUgraphNode) == 8 && sizeof(size_t) == 8);
CUresult (*const ask)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, CUgraph*, const CUgraphNode**,
                      const CUgraphEdgeData**, size_t*) = cuStreamGetCaptureInfo_v3;
"""
    )
    command = ["nvcc", "-std=c++17", "-c", "-o", str(tmp_path / "check.o"), str(tmp_path / "check.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
