"""Kernels that are compiled ahead of their first launch: what is foreseen, and that nothing depends on it."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from tilewright.models import GPT
from tilewright.ops import embedding, geglu
from tilewright.plan.gpt import GPTConfig
from tilewright.runtime import dispatch

GPU = torch.device("cuda", 0)


class Kernel:
    """A Triton kernel as `Launch` sees it, which notes what becomes of it."""

    def __init__(self):
        self.fn = SimpleNamespace(__module__="tilewright.ops.some.kernels", __name__="kernel")
        self.compiled, self.launched, self.error = [], [], None

    def warmup(self, *arguments, grid, num_warps):
        self.compiled.append((arguments, num_warps, threading.current_thread().name))
        if self.error:
            raise self.error
        return SimpleNamespace(src="source", metadata="metadata")

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            self.launched.append((grid, arguments, num_warps))
            return SimpleNamespace(run=lambda *rest: self.launched.append(rest), function=1, packed_metadata=2)

        return launch


@pytest.fixture
def kernel(monkeypatch):
    from triton.runtime import driver

    made = Kernel()
    made.launchers = []
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    active = SimpleNamespace(launcher_cls=lambda source, metadata: made.launchers.append((source, metadata)))
    monkeypatch.setattr(type(driver), "active", property(lambda self: active), raising=False)
    monkeypatch.setattr(dispatch, "triton_ready", dispatch.Job(lambda: None))
    return made


TENSORS = (torch.zeros(4, dtype=torch.bfloat16), None)


def test_a_rehearsal_compiles_once_and_launches_nothing(kernel):
    launch = dispatch.Launch(kernel, GPU, (7,), 4)
    for _ in range(3):
        dispatch.rehearse(launch, (5, 1), TENSORS, (3,))
    launch.job.result()
    ((arguments, warps, _),) = kernel.compiled
    assert arguments == (torch.bfloat16, None, 3, 7) and warps == 4
    assert kernel.launchers == [("source", "metadata")] and not kernel.launched
    launch((5, 1), TENSORS, (3,))
    (started,) = kernel.launched
    assert started == ((5, 1), (*TENSORS, 3, 7), 4)
    launch((6, 1), TENSORS, (3,))
    assert len(kernel.launched) == 2 and len(kernel.compiled) == 1
    dispatch.rehearse(launch, (5, 1), TENSORS, (3,))
    assert len(kernel.launched) == 2 and len(kernel.compiled) == 1


def test_a_launch_waits_for_its_compilation(kernel):
    held, order = threading.Event(), []
    warmup = kernel.warmup

    def slow(*arguments, **options):
        held.wait(30)
        order.append("compiled")
        return warmup(*arguments, **options)

    kernel.warmup = slow
    launch = dispatch.Launch(kernel, GPU, (), 4)
    dispatch.rehearse(launch, (1, 1), TENSORS, ())
    threading.Timer(0.2, held.set).start()
    launch((1, 1), TENSORS, ())
    order.append("launched")
    assert order == ["compiled", "launched"]


def test_what_fails_ahead_of_time_fails_nothing(kernel, caplog):
    caplog.set_level("DEBUG", "tilewright")
    kernel.error = RuntimeError("no such compiler")
    launch = dispatch.Launch(kernel, GPU, (), 4)
    dispatch.rehearse(launch, (1, 1), TENSORS, ())
    launch((1, 1), TENSORS, ())
    assert len(kernel.launched) == 1 and "no such compiler" in caplog.text

    def fails():
        raise IndexError("nothing like it")

    dispatch.rehearse(fails)
    assert "nothing like it" in caplog.text
    launch((1, 1), TENSORS, ())
    assert len(kernel.launched) == 2  # the rehearsal is over


def test_other_threads_launch_during_a_rehearsal(kernel):
    launch = dispatch.Launch(kernel, GPU, (), 4)

    def elsewhere():
        thread = threading.Thread(target=launch, args=((1, 1), TENSORS, ()))
        thread.start()
        thread.join()

    dispatch.rehearse(elsewhere)
    assert len(kernel.launched) == 1 and not kernel.compiled


def test_nothing_is_rehearsed_while_a_graph_is_captured(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    dispatch.rehearse(dispatch.Launch(kernel, GPU, (), 4), (1, 1), TENSORS, ())
    assert not kernel.compiled and not kernel.launched


@pytest.fixture
def launches(monkeypatch):
    """What is launched for the first time, and what is foreseen."""
    if not dispatch.INTERPRETED:
        pytest.skip("on a GPU a kernel that ran before is not foreseen again")
    found = SimpleNamespace(actual=set(), foreseen=set())
    start = dispatch.Launch._start

    def note(self, grid, tensors, scalars):
        if self.is_new:
            found.actual.add((id(self), self.name, dispatch.dtypes(tensors)))
        start(self, grid, tensors, scalars)

    def foresee(self, types, scalars):
        found.foreseen.add((id(self), self.name, tuple(types)))

    monkeypatch.setattr(dispatch.Launch, "_start", note)
    monkeypatch.setattr(dispatch.Launch, "compile_ahead", foresee)
    return found


@pytest.mark.parametrize(("loss", "residual", "width"), [("linear_fused", "auto", 52), ("fused", "bf16", 54)])
def test_forward_foresees_what_backward_launches(loss, residual, width, launches, monkeypatch):
    """Of widths that no other test has, so that all launches are new."""
    options = dict(gpt_block="optimized", loss=loss, residual=residual, activation="gelu_tanh", dropout=0.0)
    model = GPT(GPTConfig(width=width, layers=2, heads=1, vocabulary=width + 9, sequence=32, **options))
    tokens = torch.randint(width, (2, 32))
    with torch.autocast("cpu", torch.bfloat16):
        value = model(tokens, tokens)
    forward = set(launches.actual)
    value.backward()
    backward = launches.actual - forward
    assert len(backward) >= 5
    assert not backward - launches.foreseen, sorted(name for _, name, _ in backward - launches.foreseen)


def test_a_gate_and_a_table_foresee_their_backward(launches):
    gate, up = (torch.randn(3, 5, 44, requires_grad=True) for _ in range(2))
    geglu(gate, up, bias=torch.randn(88)).sum().backward()  # with a bias the kernel is one of this width
    assert {name for _, name, _ in launches.actual - launches.foreseen} == {"tilewright_activation_forward"}
    weight = torch.randn(50, 44, requires_grad=True)
    embedding(torch.randint(50, (2, 40)), weight).sum().backward()
    assert "tilewright_embedding_backward" in {name for _, name, _ in launches.foreseen}


def test_what_traces_behind_dynamo_is_a_compiler_too(monkeypatch):
    """Where torch says so of Dynamo alone, as 2.11 does: what stands for plain tensors is no foreign subclass."""
    from torch._dynamo.backends.debugging import aot_eager

    seen = []

    class Watched(torch.nn.Module):
        def __init__(self, graph):
            super().__init__()
            self.graph = graph

        def forward(self, *inputs):
            seen.append((type(inputs[-1]) in dispatch.PLAIN, dispatch.is_plain(inputs[-1]), dispatch.is_compiling()))
            return self.graph(*inputs)

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.sin(), backend=lambda graph, inputs: aot_eager(Watched(graph), inputs))
    compiled(torch.randn(3, requires_grad=True)).sum().backward()
    assert seen and set(seen) == {(False, True, True)} and not dispatch.is_compiling()
