"""A compiled graph: one op, with a fake and a gradient; every mode computes the same on a GPU."""

import contextlib
import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilesync.emulated import Streams
from tilesync.graphs import chain, graphs, tensors
from tilewright.measure.clock import Timing
from tilewright.runtime import nvrtc, paths
from tilewright.tilesync import (
    Gemm,
    Graph,
    GraphError,
    TilesyncError,
    chains,
    check,
    compile,
    compiled,
    launch,
    raise_if_failed,
)
from tilewright.tilesync.compiled import compute_plainly

HALF = torch.bfloat16
OURS = ("serial", "pdl", "streams", "persistent")


def swiglu(rows=5, width=16, inner=24):
    return chains.mlp(rows, width, inner)


def test_a_graph_is_called_by_the_names_of_its_inputs():
    graph = swiglu()
    x, gate, up, down = tensors(graph).values()
    truth = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
    torch.testing.assert_close(compile(graph)(x=x, gate=gate, up=up, down=down), truth)
    assert compile(graph) is compile(swiglu()) is not compile(graph, "plain")
    with pytest.raises(GraphError, match="takes the inputs x, gate, up, down, not x"):
        compile(graph)(x=x)
    with pytest.raises(GraphError, match=r"x has shape \(4, 16\), but \(5, 16\) is needed"):
        compile(graph)(x=x[:4], gate=gate, up=up, down=down)
    with pytest.raises(GraphError, match="mode is 'fast'; choose one of plain, serial"):
        compile(graph, "fast")
    in_place = Graph({"x": (8, 8), "w": (8, 8), "y": (8, 8)}, [Gemm("y", "x", "w", (8, 8, 8), tile=(8, 8))], ["y"])
    with pytest.raises(GraphError, match="changes its input y in place"):
        compile(in_place)


def test_graphs_that_differ_in_a_policy_a_tile_or_a_function_are_others():
    prints = [compiled.fingerprint(chain(*sizes)) for sizes in itertools.product((2, 3), repeat=3)]
    prints += [compiled.fingerprint(chain(order=order)) for order in ("rows", "columns")]
    assert len(set(prints)) == len(prints)
    again = chain()
    check(again)  # which keeps what it finds in the stages
    assert compiled.fingerprint(again) == compiled.fingerprint(chain()) == prints[-2]


@settings(max_examples=4)
@given(graphs(stages=4), st.integers(0, 99))
def test_the_op_passes_torchs_checks(graph, seed):
    inputs = [x.double().requires_grad_() for x in tensors(graph, seed).values()]
    op = compile(graph)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(compiled._registered, (inputs, op.name), test_utils=utilities)


def test_a_decode_step_is_one_op_and_takes_the_caches_length_from_the_device():
    graph = chains.decode_step(1, 16, 24, 2, 1, 8, 20, 12, 2)
    inputs = tensors(graph)
    op = compile(graph)
    first = op(**inputs)
    assert [tuple(y.shape) for y in first] == [(2, 20), (2, 32)]
    inputs["k0"][7:], inputs["v0"][7:] = torch.nan, torch.nan
    assert all(torch.equal(*pair) for pair in zip(op(**inputs), first, strict=True))
    inputs["length"] -= 1
    logits, rotated = op(**inputs)
    assert not torch.equal(logits, first[0]) and not torch.equal(rotated, first[1])
    assert torch.equal(rotated[:, 24:], first[1][:, 24:])  # values, which have no position
    torch.library.opcheck(
        compiled._registered, (list(inputs.values()), op.name), test_utils=("test_schema", "test_faketensor")
    )


def test_gradients_are_those_of_the_stages():
    graph = swiglu(3, 8, 8)
    leaves = {name: x.double().requires_grad_() for name, x in tensors(graph).items()}
    op = compile(graph)
    assert torch.autograd.gradcheck(
        lambda *values: op(**dict(zip(leaves, values, strict=True))), tuple(leaves.values())
    )


def test_it_is_one_node_without_a_graph_break_forward_and_backward():
    graph = swiglu(3, 8, 8)
    leaves = {name: x.requires_grad_() for name, x in tensors(graph).items()}
    op, seen = compile(graph), []

    def backend(module, _):
        seen.extend(
            node for node in module.graph.nodes if node.op == "call_function" and "tilesync" in str(node.target)
        )
        return module.forward

    torch.compiler.reset()
    y = torch.compile(lambda x: op(**{**leaves, "x": x}) * 2, fullgraph=True, backend=backend)(leaves["x"])
    assert len(seen) == 1
    truth = torch.autograd.grad((op(**leaves) * 2).sum(), leaves["down"])
    assert torch.equal(torch.autograd.grad(y.sum(), leaves["down"])[0], truth[0])
    torch.compiler.reset()
    y = torch.compile(lambda x: op(**{**leaves, "x": x}) * 2, fullgraph=True, backend="aot_eager")(leaves["x"])
    assert torch.equal(torch.autograd.grad(y.sum(), leaves["down"])[0], truth[0])


def test_a_graph_of_another_process_is_not_taken_for_one_of_this():
    with pytest.raises(GraphError, match="was not compiled in this process"):
        compiled._registered([torch.ones(2)], "auto-graph-0")


@pytest.mark.parametrize("name", ["attention", "conv-7"])
def test_chains_compute_what_pytorch_does(name):
    if name == "attention":
        graph = chains.attention_block(2, 32, 4, 8, 24, 2)
        x, query, k, v, project = tensors(graph).values()
        q, k, v = ((t.unflatten(1, (-1, 8))).transpose(0, 1)[None] for t in (x @ query.t(), k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        truth = x + y[0].transpose(0, 1).flatten(1) @ project.t()
    else:
        graph = chains.convolutions(2, 5, 8)
        x, *weights = tensors(graph).values()
        y = x.view(2, 5, 5, 8).permute(0, 3, 1, 2)
        for weight in weights:
            y = torch.nn.functional.conv2d(y, weight.permute(0, 3, 1, 2), padding=1).relu()
        truth = y.permute(0, 2, 3, 1).reshape(50, 8)
    torch.testing.assert_close(compile(graph)(**tensors(graph)), truth, rtol=1e-4, atol=1e-4)


# The host's part, with stand-ins for the kernel, the clock and the stream.


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A CPU that passes for a Hopper; `captures`, `errors`, `broken` and `fastest` can be set."""
    host = SimpleNamespace(captures=False, errors={}, broken={}, fastest="pdl", timed=[], aside=0)

    class Runner:
        def __init__(self, program, on, dtype):
            self.program = program

        def run(self, mode, inputs):
            if mode in host.broken:
                raise host.broken[mode]
            return compute_plainly(self.program, list(inputs.values()))

        def raise_if_failed(self):
            if host.broken.get("replay") and host.timed:
                raise host.broken["replay"]

    def aside(on, function):
        assert not host.captures
        host.aside += 1
        return function()

    def clock(functions):
        host.timed.append([mode for mode, function in functions.items() if function()])
        times = {mode: Timing(1.0 + (mode != host.fastest), 1.0, 1.0, 1, (1.0,)) for mode in functions}
        return {mode: time for mode, time in times.items() if mode not in host.errors}, dict(host.errors)

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(launch, "Runner", Runner)
    monkeypatch.setattr(launch, "aside", aside)
    monkeypatch.setattr(launch, "_runners", {})
    monkeypatch.setattr(launch, "why_no_kernel", lambda program, inputs: "")
    monkeypatch.setattr(compiled, "interleaved_graph_time", clock)
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: host.captures)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a Hopper")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return host


def fresh(monkeypatch, mode="auto"):
    """The graph as another process compiles it, and its inputs."""
    monkeypatch.setattr(compiled, "_compiled", {})
    return compile(swiglu(), mode), tensors(swiglu())


def test_auto_measures_once_and_the_next_process_finds_it_on_disk(host, monkeypatch):
    for _ in range(2):
        op, inputs = fresh(monkeypatch)
        op(**inputs), op(**inputs)
        assert list(op.fastest.values()) == ["pdl"] and host.timed == [["plain", *OURS]]


@pytest.mark.parametrize("where", ["clock", "run", "replay"])
def test_a_measurement_that_failed_is_said_and_is_not_kept_on_disk(host, monkeypatch, caplog, where):
    error = TilesyncError("a sick GPU") if where == "replay" else RuntimeError("a sick GPU")
    if where == "clock":
        host.errors = dict.fromkeys(("plain", *OURS), error)
    else:
        host.broken = {"persistent" if where == "run" else "replay": error}
    op, inputs = fresh(monkeypatch)
    op(**inputs), op(**inputs)
    assert list(op.fastest.values()) == ["plain" if where == "clock" else "pdl"] and len(host.timed) == 1
    said = [record.getMessage() for record in caplog.records]
    count = {"clock": 1 + len(OURS), "run": 1, "replay": 2}[where]
    assert len(said) == count and all("a sick GPU" in each for each in said)
    assert "could not be measured as persistent" in said[-1]
    host.errors, host.broken, host.fastest = {}, {}, "persistent"
    op, inputs = fresh(monkeypatch)
    op(**inputs)
    assert list(op.fastest.values()) == ["persistent"] and len(host.timed) == 2


def test_numbers_that_are_not_finite_say_nothing_of_a_mode(host, monkeypatch, caplog):
    """As where a run has diverged, or a model is called once on memory that nobody has written."""
    op, inputs = fresh(monkeypatch)
    op(**{**inputs, "x": torch.full_like(inputs["x"], torch.nan)})
    (said,) = (record.getMessage() for record in caplog.records)
    assert "not finite" in said and not host.timed and list(op.fastest.values()) == ["plain"]
    op, inputs = fresh(monkeypatch)
    op(**inputs)
    assert list(op.fastest.values()) == ["pdl"]


def test_what_another_kernel_was_measured_at_is_not_taken_for_this_ones(host, monkeypatch):
    fresh(monkeypatch)[0](**tensors(swiglu()))
    host.fastest = "persistent"
    monkeypatch.setattr(nvrtc, "cache_key", lambda *_: "another source")
    for _ in range(2):
        op, inputs = fresh(monkeypatch)
        op(**inputs)
        assert list(op.fastest.values()) == ["persistent"] and len(host.timed) == 2


def test_what_is_captured_first_runs_plainly_or_says_what_to_do(host, monkeypatch, caplog):
    """Also where the disk knows a mode: its kernel cannot be loaded during a capture."""
    op, inputs = fresh(monkeypatch)
    y = op(**inputs)
    monkeypatch.setattr(launch, "_runners", {})
    op, _ = fresh(monkeypatch)
    host.captures = True
    assert torch.equal(op(**inputs), y) and not op.fastest and not launch._runners
    assert "call it once before it is captured" in caplog.text
    explicit, _ = fresh(monkeypatch, "persistent")
    with pytest.raises(GraphError, match=f"{explicit.graph.name}: call it once before it is captured"):
        explicit(**inputs)
    host.captures = False
    op(**inputs), explicit(**inputs)
    host.captures = True
    assert torch.equal(op(**inputs), y) and torch.equal(explicit(**inputs), y)
    assert list(op.fastest.values()) == ["pdl"] and len(host.timed) == 1


def test_a_runner_lives_on_since_captured_graphs_may_read_its_memory(host):
    program, on = check(swiglu()), torch.device("cpu")
    first = launch.runner(program, on, HALF)
    others = {launch.runner(check(swiglu()), on, HALF) for _ in range(300)}
    assert launch.runner(program, on, HALF) is first and len(others) == 300 and host.aside == 301


def test_each_stream_and_each_captured_call_has_semaphores_of_its_own_which_were_zeroed_before(monkeypatch):
    captures, stream, made = False, 7, []

    def aside(on, function):
        assert not captures
        made.append(function())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)
    monkeypatch.setattr(launch, "aside", aside)
    runner = launch.Runner.__new__(launch.Runner)
    runner.device, runner.lowered = torch.device("cpu"), SimpleNamespace(control_words=64)
    runner.controls, runner.captured, runner.spare = {}, [], runner._zeroed_controls()
    ready = {each.data_ptr() for each in runner.spare}
    eager = runner._control("persistent")
    assert runner._control("persistent") is eager and not made
    captures = True
    captured = [runner._control("persistent") for _ in range(launch.SPARE)]
    places = {each.data_ptr() for each in (eager, *captured)}
    assert places == ready and len(ready) == launch.SPARE + 1 and all(len(each) == 64 for each in captured)
    assert runner._control("persistent").data_ptr() not in ready  # its graph clears it
    captures, stream = False, 8
    assert runner._control("persistent") is not eager and len(made) == 1 and len(runner.spare) == launch.SPARE
    assert len(runner.captured) == launch.SPARE + 1
    # Modes count blocks and tickets each in its own way.
    assert len({runner._control(mode).data_ptr() for mode in ("persistent", "streams")}) == 2


def test_streams_fork_behind_the_start_of_the_stage_before_and_join_the_callers():
    """By stand-ins that note what waits for what: so a capture of the caller's stream has them all."""
    program, streams = launch.device.ProgramArgument, Streams(3)
    launches = [program(cell=stage, cells=3, blocks=9) for stage in range(3)]
    done = streams.of(launches, [4, 3, 2])
    assert [(given.cell, given.blocks, blocks, *rest) for given, blocks, *rest in done] == [
        (0, 9, 4, False, 0b0, 0b0),
        (0, 4, 1, True, 0b0, 0b1),  # when the first stage has started, waits for its 4 blocks
        (1, 9, 3, False, 0b10, 0b0),
        (1, 3, 1, True, 0b0, 0b100),
        (2, 9, 2, False, 0b1000, 0b0),
    ]
    assert streams.caller.ended == 0b10101
    assert [each.cell for each in launches] == [0, 1, 2] and {each.blocks for each in launches} == {9}


def test_what_a_driver_cannot_tell_is_said(host, monkeypatch):
    host.fastest = "streams"
    op, inputs = fresh(monkeypatch)
    for version, said in ((12030, "streams"), (12020, "one stage after the other: a driver older than CUDA 12.3")):
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda version=version: version, raising=False)
        with paths.explain() as taken:
            op(**inputs)
        assert said in str(taken)


def test_what_is_proved_of_streams_is_proved_once(monkeypatch):
    program, proofs = check(swiglu(8, 32, 64)), []

    def prove(*given):
        proofs.append(given)
        return [1, 1]

    monkeypatch.setattr(launch, "blocks_of_streams", prove)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    runner = launch.Runner.__new__(launch.Runner)
    runner.lowered, runner.places, runner.blocks = launch.device.lower(program, HALF), 132, 9
    runner.device, runner.tables, runner.spare, runner.captured = torch.device("cpu"), [torch.zeros(1)] * 4, [], []
    runner.failure, runner.reported = torch.zeros(1), [{"is_there": 0}]
    runner.report, runner._run_on_streams = torch.zeros(1), lambda launches, blocks, tensors: None
    inputs = tensors(program.graph, 1, HALF)
    for _ in range(2):
        (y,) = runner.run("streams", inputs)
        assert y.shape == (8, 32)
    assert proofs == [(program, 132)]


def test_threads_on_one_stream_launch_all_stages_one_after_the_other(monkeypatch):
    """They have the same semaphores, and the stages of one would take the tickets of the other's."""
    runner, done = launch.Runner.__new__(launch.Runner), []

    def note(*_):
        done.append(threading.get_ident())
        time.sleep(0.005)

    stream = SimpleNamespace(wait_stream=note)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda on: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    runner.device, runner.streams, runner.lock = torch.device("cpu"), [stream], threading.Lock()
    runner.started = [SimpleNamespace(wait=note)]
    runner.begin, runner.kernel = note, lambda blocks, arguments, started: note()
    launches = [launch.device.ProgramArgument(cell=stage) for stage in range(2)]
    threads = [threading.Thread(target=runner._run_on_streams, args=(launches, [1, 1], None)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    each = len(done) // 4
    assert all(len(set(done[start : start + each])) == 1 for start in range(0, len(done), each)), done


def test_what_runs_aside_has_a_thread_and_a_stream_of_its_own_between_two_waits(monkeypatch):
    done, current = [], object()
    own = SimpleNamespace(wait_stream=lambda other: done.append(other), synchronize=lambda: done.append("ended"))

    @contextlib.contextmanager
    def stream(of):
        done.append(of)
        yield
        done.append("left")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda on: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: own)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    ran = launch.aside(
        torch.device("cuda", 0), lambda: (done.append("ran"), threading.get_ident(), torch.is_grad_enabled())
    )
    assert done == [current, own, "ran", "left", "ended"]
    assert ran[1] != threading.get_ident() and not ran[2] and torch.is_grad_enabled()
    with pytest.raises(GraphError, match="no such stage"):
        launch.aside(torch.device("cuda", 0), lambda: (_ for _ in ()).throw(GraphError("no such stage")))


def test_a_wait_that_failed_in_a_replayed_graph_is_raised_for_every_runner(monkeypatch):
    def fail():
        raise TilesyncError("waited too long")

    sound, sick = SimpleNamespace(raise_if_failed=lambda: None), SimpleNamespace(raise_if_failed=fail)
    monkeypatch.setattr(launch, "_runners", {1: sound})
    raise_if_failed()
    launch._runners[2] = sick
    with pytest.raises(TilesyncError, match="waited too long"):
        raise_if_failed()
