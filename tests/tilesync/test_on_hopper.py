"""Every mode on a GPU: the same numbers, replayed, after a lost post, measured, under torch.compile."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.contract import DEVICE, on_hopper
from tilesync.graphs import graphs, tensors
from tilesync.test_attention import combine, of_inputs
from tilesync.test_compiled import HALF, OURS, swiglu
from tilesync.wrong import WRONG
from tilewright.tilesync import Compiled, Packing, TilesyncError, chains, check, compile, launch, raise_if_failed
from tilewright.tilesync.check import lower
from tilewright.tilesync.compiled import compute_plainly
from tilewright.tilesync.residency import MOST_STREAMS


def near(ours, truth):
    return (ours.float() - truth.float()).abs().max() <= 0.03 * truth.float().abs().max()


@on_hopper
@settings(max_examples=30)
@given(graphs(stages=4, for_gpu=True), st.integers(0, 99))
def test_every_mode_computes_the_same(graph, seed):
    inputs = tensors(graph, seed, HALF, DEVICE)
    truth = compute_plainly(check(graph), list(inputs.values()))
    for mode in OURS:
        first = compile(graph, mode).run(list(inputs.values()))
        assert all(near(*pair) for pair in zip(first, truth, strict=True)), mode
        again = compile(graph, mode).run(list(inputs.values()))
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True)), mode


LARGE = [("llama-mlp", 1), ("llama-mlp", 16), ("llama-mlp", 64), ("llama-mlp", 300), ("gpt3-mlp", 1), ("gpt3-mlp", 512),
         ("attention", 1), ("attention", 2), ("attention", 64), ("conv-7", 1), ("conv-14", 4), ("conv-28", 1),
         ("conv-56", 2),
         ("decode", 1), ("decode", 4),
         ("int8", 1), ("int8", 32), ("fp8", 9), ("int4", 1), ("int4", 32), ("int4-32", 4)]  # fmt: skip
PACKINGS = {"int8": Packing("int8"), "fp8": Packing("fp8"), "int4": Packing("int4", 128, scale=HALF),
            "int4-32": Packing("int4", 32, zeros=True, scale=torch.float16)}  # fmt: skip


@on_hopper
@pytest.mark.parametrize(("name", "rows"), LARGE)
def test_large_chains_replayed_1000_times_on_two_streams(name, rows):
    if name in PACKINGS:
        graph = chains.mlp(rows, 4096, 2816, packing=PACKINGS[name])
    elif name == "decode":
        graph = chains.decode_step(2, 2048, 8192, 32, 8, 64, 4096, 512, rows)
    else:
        graph = chains.CHAINS[name](rows)
    inputs = tensors(graph, 1, HALF, DEVICE)
    truth = compute_plainly(check(graph), list(inputs.values()))[0]
    for mode in [mode for mode in OURS if mode != "streams" or len(graph.stages) <= MOST_STREAMS]:
        op, streams, captured = compile(graph, mode), [torch.cuda.Stream() for _ in range(2)], []
        y = op.run(list(inputs.values()))[0]
        assert near(y, truth), mode
        for stream in streams:
            with torch.cuda.stream(stream):
                op.run(list(inputs.values()))
            stream.synchronize()
            captured.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(captured[-1], stream=stream):
                captured[-1].output = op.run(list(inputs.values()))[0]
        for turn in range(1000):
            for stream, replay in zip(streams, captured, strict=True):
                with torch.cuda.stream(stream):
                    replay.replay()
            if turn in (0, 999):  # where each one waited too long, all of them would take hours
                torch.cuda.synchronize()
                raise_if_failed()
        assert all(torch.equal(replay.output, y) for replay in captured), mode


@on_hopper
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("filled", [0, 1, 1000, 4096])
def test_splits_of_a_long_cache_are_its_attention(size, filled):
    graph = of_inputs(2, 4096, 4, 4, size, length="length", new=(16 * size, 20 * size), by_head=True, splits=16, tile=1)
    inputs = tensors(graph, 1, HALF, DEVICE) | {"length": torch.tensor([filled], dtype=torch.int32, device=DEVICE)}
    truth = combine(compute_plainly(check(graph), list(inputs.values()))[0], 16)
    for mode in OURS:
        assert near(combine(compile(graph, mode).run(list(inputs.values()))[0], 16), truth), mode


def captured_comparing(op, inputs, y, wrong):
    """A graph of a call on the current stream, which counts where its result has other bits than y."""
    op.run(list(inputs.values()))
    torch.cuda.current_stream().synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
        wrong += (op.run(list(inputs.values()))[0] != y).any()
    return captured


@on_hopper
@pytest.mark.parametrize("mode", ["persistent", "streams"])
def test_each_of_100_000_replays_on_four_streams_has_the_same_bits(mode):
    inputs = tensors(graph := chains.mlp(1, 1024, 1024), 1, HALF, DEVICE)
    op, streams = compile(graph, mode), [torch.cuda.Stream() for _ in range(4)]
    y, wrong = op.run(list(inputs.values()))[0], torch.zeros(4, dtype=torch.int64, device=DEVICE)
    torch.cuda.synchronize()
    captured = []
    for stream, count in zip(streams, wrong, strict=True):
        with torch.cuda.stream(stream):
            captured.append(captured_comparing(op, inputs, y, count))
    for turn in range(25_000):
        for stream, replay in zip(streams, captured, strict=True):
            with torch.cuda.stream(stream):
                replay.replay()
        if turn % 250 == 0:
            torch.cuda.synchronize()
            raise_if_failed()
            assert not wrong.any(), turn
    torch.cuda.synchronize()
    assert not wrong.any()


@on_hopper
@pytest.mark.parametrize("mode", ["persistent", "streams"])
def test_replays_beside_a_kernel_that_has_the_sms(mode):
    inputs = tensors(graph := chains.mlp(1, 4096, 4096), 1, HALF, DEVICE)
    op, wrong = compile(graph, mode), torch.zeros((), dtype=torch.int64, device=DEVICE)
    y, matrix = op.run(list(inputs.values()))[0], torch.randn(8192, 8192, dtype=HALF, device=DEVICE)
    torch.cuda.synchronize()
    own, others = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(own):
        captured = captured_comparing(op, inputs, y, wrong)
    for _ in range(100):
        with torch.cuda.stream(others):
            matrix @ matrix
        with torch.cuda.stream(own):
            for _ in range(10):
                captured.replay()
    torch.cuda.synchronize()
    raise_if_failed()
    assert not wrong


@on_hopper
def test_a_lost_post_is_an_error_and_the_next_call_is_right():
    """One semaphore is behind by one, as after a post that was lost: its waits end after the bound."""
    graph = swiglu(4, 512, 512)
    inputs = tensors(graph, 1, HALF, DEVICE)
    op = compile(graph, "persistent")
    y = op(**inputs)
    runner = launch.runner(op.program, y.device, y.dtype)
    (control,) = runner.controls.values()
    control[32] -= 1
    torch.cuda.synchronize()
    begin = time.perf_counter()
    op(**inputs)
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 5  # which is promised; the bound is two
    with pytest.raises(
        TilesyncError, match="of stage y waited too long: semaphore 0 of StageSync on h stands at 63 of 64"
    ):
        op(**inputs)
    assert torch.equal(op(**inputs), y)


@on_hopper
@pytest.mark.parametrize("mode", ["persistent", "streams"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_policy_that_nobody_has_checked_ends_by_itself_and_is_named(monkeypatch, name, mode):
    monkeypatch.setattr(launch, "PATIENCE", 10**8)
    graph = WRONG[name]
    op = Compiled(lower(graph), mode, f"{mode}-{name}")
    inputs = list(tensors(graph, 1, HALF, DEVICE).values())
    op.run(inputs)
    torch.cuda.synchronize()
    with pytest.raises(
        TilesyncError, match=r"of stage y waited too long: semaphore .* of Wrong\w+ on h stands at \d+ of"
    ):
        raise_if_failed()
    right = compile(swiglu(4, 512, 512), mode)  # the GPU is as it was
    inputs = list(tensors(right.graph, 1, HALF, DEVICE).values())
    assert near(right.run(inputs)[0], compute_plainly(right.program, inputs)[0])


@on_hopper
def test_auto_measures_every_mode_on_the_default_stream_and_keeps_the_fastest(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    caplog.set_level("INFO", "tilewright")
    graph = chains.mlp(1, 1024, 1024)
    inputs = tensors(graph, 1, HALF, DEVICE)
    op = compile(graph)
    y = op(**inputs)
    (said,) = (record.getMessage() for record in caplog.records if "runs as" in record.getMessage())
    assert all(f"{mode} " in said.split("(")[1] for mode in ("plain", *OURS)), said
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert near(y, compute_plainly(op.program, list(inputs.values()))[0])
    keep = op.fastest.copy()
    op.fastest.clear()
    op(**inputs)
    assert op.fastest == keep and caplog.text.count("runs as") == 1


@on_hopper
@pytest.mark.parametrize("mode", ["auto", *OURS])
def test_reduce_overhead_captures_it_and_replays_are_right(mode):
    graph = chains.mlp(3, 1024, 1024)
    inputs = tensors(graph, 1, HALF, DEVICE)
    op = compile(graph, mode)
    torch.compiler.reset()
    run = torch.compile(lambda x: op(**{**inputs, "x": x}) * 2, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for turn in range(20):
            x = inputs["x"] + turn
            truth = 2 * compute_plainly(op.program, [x, *list(inputs.values())[1:]])[0]
            assert near(run(x).clone(), truth), turn
            filled = [torch.full((2**20,), -1, device=DEVICE) for _ in range(4)]  # memory that was freed is written
            del filled
    torch.cuda.synchronize()
    raise_if_failed()
