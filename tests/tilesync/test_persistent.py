"""The persistent kernel's own source on the CPU, against the stages in plain PyTorch, in racy interleavings."""

import re
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilesync.emulated import HEAD_DIM, MACROS, ROTATED, SOURCE, Emulated, build, rope_source, run_at_once
from tilesync.graphs import graphs, tensors
from tilesync.wrong import WRONG
from tilewright.runtime import nvrtc
from tilewright.tilesync import (
    Combined,
    Custom,
    Gemm,
    Graph,
    GraphError,
    Normed,
    Region,
    RowSync,
    TileSync,
    blocks_of_streams,
    chains,
    check,
    device,
)
from tilewright.tilesync.check import lower
from tilewright.tilesync.graph import span


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which compiles the kernel's source for the CPU")
    return build(tmp_path_factory.mktemp("tilesync"))


def serial(graph, given_tensors):
    values = dict(given_tensors)
    for stage in graph.ordered:
        values[stage.name] = stage.compute(*(values[name] for name in stage.inputs))
    return values


def compare(values, truth, graph):
    for name in graph.specs:
        scale = truth[name].float().abs().max().clamp(min=1e-3)
        error = (values[name].float() - truth[name].float()).abs().max() / scale
        assert error < 0.03, f"{name}: {error}"


def two_layers(rows=5, width=520, inner=72, tile=(8, 8), down_tile=(8, 16), sync=None, apart=False):
    weight = ("gate", "up") if apart else "up"
    up = Gemm("h", "x", weight, (rows, inner, width), tile=tile, gated=True, activation="silu")
    down = Gemm("y", "h", "down", (rows, 40, inner), tile=down_tile, residual="r", sync={"h": sync} if sync else None)
    inputs = {
        "x": (rows, width),
        "gate": (inner, width),
        "up": ((1 if apart else 2) * inner, width),
        "down": (40, inner),
        "r": (rows, 40),
    }
    return Graph(inputs, [up, down], ["y"])


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(graphs(stages=4, for_gpu=True), st.integers(1, 3), st.integers(0, 99))
def test_random_graphs(library, graph, blocks, seed):
    program, given_tensors = check(graph), tensors(graph, seed, torch.bfloat16)
    values = Emulated(library, program)(given_tensors, blocks, seed=seed)
    compare(values, serial(graph, given_tensors), graph)


@pytest.mark.parametrize(
    "graph",
    [
        two_layers(sync=TileSync(), apart=True), two_layers(32, 2200, 24, (32, 8), (32, 16)),
        two_layers(70, 200, 40, (64, 32), (64, 24)),
        two_layers(5, 200, 40, (40, 32), (8, 24), apart=True), two_layers(30, 2200, 40, (32, 20), (32, 40)),
    ],
    ids=["few", "few with panels", "many", "both", "wide tiles with panels"],
)  # fmt: skip
def test_launches_follow_each_other_and_nothing_is_cleared(library, graph):
    """Bit-equal whatever the interleaving, and by any number of blocks, of which few are there at a time."""
    given_tensors = tensors(graph, 1, torch.bfloat16)
    run = Emulated(library, check(graph))
    first = run(given_tensors, blocks=3, seed=1)
    compare(first, serial(graph, given_tensors), graph)
    for seed in (2, 3):
        assert torch.equal(run(given_tensors, blocks=3, seed=seed)["y"], first["y"])
    assert run.control[0] == 3  # launches
    assert torch.equal(Emulated(library, check(graph))(given_tensors, blocks=5, resident=2, seed=4)["y"], first["y"])
    parts = run.lowered.ranges()
    one_by_one = Emulated(library, check(graph))
    assert torch.equal(one_by_one(given_tensors, blocks=2, flags=0, parts=parts)["y"], first["y"])
    assert not one_by_one.control.any()


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(graphs(stages=4, for_gpu=True), st.integers(2, 4), st.booleans(), st.integers(0, 99))
def test_stages_on_streams_of_their_own(library, graph, places, one_queue, seed):
    """On as few places as the proof allows; whatever block gets the next one, none waits for one that has none."""
    program, given_tensors = check(graph), tensors(graph, seed, torch.bfloat16)
    blocks = max(blocks_of_streams(program, places))
    run = Emulated(library, program)
    for launch in (1, 2):
        values = run(given_tensors, blocks, places, seed + launch, streams=True, one_queue=one_queue)
        assert not run.report["is_there"] and run.control[0] == launch
        compare(values, serial(graph, given_tensors), graph)


def test_without_the_kernel_that_waits_a_stage_takes_the_places_of_the_one_before(library):
    graph = two_layers()
    run, stopped = Emulated(library, check(graph)), 0
    given_tensors = tensors(graph, 1, torch.bfloat16)
    for seed in range(8):
        run(given_tensors, 2, 2, seed, streams=True, begins=False, patience=300)
        if run.report["is_there"]:
            stopped += 1
            assert "of stage y waited too long: semaphore" in run.lowered.failure_sentence(run.report[0])
            run.report[:] = 0
    assert 0 < stopped < 8
    run(given_tensors, 2, 2, streams=True)
    assert not run.report["is_there"]


def test_a_stage_begins_before_the_kernel_that_waits_for_that_by_an_edge_of_the_graph(library):
    """Launches may begin one by one, in any order that the edges leave: without those the stage may come too late."""
    up, middle = (
        Gemm(name, x, "w", (8, 16, 16), tile=(8, 8), sync={"h": RowSync()} if x == "h" else None)
        for name, x in (("h", "x"), ("m", "h"))
    )
    graph = Graph({"x": (8, 16), "w": (16, 16)}, [up, middle, Gemm("y", "m", "w", (8, 16, 16), tile=(8, 8))], ["y"])
    run, given_tensors = Emulated(library, check(graph)), tensors(graph, 1, torch.bfloat16)
    truth, stopped = run(given_tensors)["y"], 0
    run.control[:] = 0
    for seed in range(4, 8):
        run(given_tensors, 2, 3, seed, streams=True, edges=False, one_queue=True, patience=300)
        if run.report["is_there"]:
            stopped += 1
            said = run.lowered.failure_sentence(run.report[0])
            assert re.search(r"waited too long: semaphore of the blocks of stage \w that have begun stands at", said)
            run.report[:] = 0
        assert torch.equal(run(given_tensors, 2, 3, seed, streams=True, one_queue=True)["y"], truth)
        assert not run.report["is_there"]
    assert 0 < stopped < 4


@pytest.mark.parametrize("streams", [False, True], ids=["persistent", "streams"])
def test_two_calls_at_once_on_places_of_which_a_kernel_of_others_has_some(library, streams):
    """As replays of two captured calls are, each with semaphores of its own, whichever gets a place first."""
    graph = two_layers(sync=RowSync())
    program, inputs = check(graph), [tensors(graph, seed, torch.bfloat16) for seed in (1, 2)]
    runs = [Emulated(library, program) for _ in inputs]
    truth = [Emulated(library, program)(each)["y"] for each in inputs]
    for seed in range(2):
        for values, y in zip(run_at_once(runs, inputs, 3, 4, seed, streams), truth, strict=True):
            assert torch.equal(values["y"], y)
        for run, each, y in zip(runs, inputs, truth, strict=True):
            assert torch.equal(run(each, 3, 4, seed, streams=streams, held=3)["y"], y)
    assert all(run.control[0] == 4 and not run.report["is_there"] for run in runs)


def test_a_stage_that_never_begins_is_named(library):
    """The kernel in front of y waits for one block more of h than there are."""
    graph = two_layers()
    run = Emulated(library, check(graph))
    run.control[device.APART * (1 + len(run.lowered.program.semaphores)) + 1] = 2**32 - 1
    run(tensors(graph, 1, torch.bfloat16), 2, 3, streams=True, patience=300)
    said = run.lowered.failure_sentence(run.report[0])
    assert "of stage y waited too long: semaphore of the blocks of stage h that have begun stands at 1 of 2" in said
    assert not run.control.any()


def test_a_stage_of_the_users_own(library):
    rows, columns = 20, 40

    def reads(tile):
        return [Region(name, (span(tile[0], 8, rows), span(tile[1], 16, columns))) for name in ("h", "g")]

    h, g = (Gemm(name, "x", "w", (rows, columns, 16), tile=(8, 16)) for name in ("h", "g"))
    own = Custom(
        "y", ["h", "g"], (rows, columns), tile=(8, 16), reads=reads, compute=lambda h, g: 2 * h + g, source=SOURCE
    )
    graph = Graph({"x": (rows, 16), "w": (columns, 16)}, [h, g, own], ["y"])
    given_tensors, run = tensors(graph, 1, torch.bfloat16), Emulated(library, check(graph))
    compare(run(given_tensors, seed=3), serial(graph, given_tensors), graph)
    ((name, text),) = run.lowered.headers
    assert name == "user_stages.cuh" and SOURCE in text and run.lowered.macros["HAS_USER_STAGES"] == 1


@pytest.mark.parametrize(("rows", "length", "context"), [(1, 5, 24), (3, 0, 24), (1, 24, 24), (2, 150, 200)])
def test_a_decode_step(library, rows, length, context):
    """Of a decoder of two layers, in one launch, against PyTorch's own functions on a cache as long as it is."""
    heads, shared, size, width = 4, 2, HEAD_DIM, 24
    assert (heads + shared) * size == ROTATED
    graph = chains.decode_step(2, width, 40, heads, shared, size, 48, context, rows)
    assert (graph.stages[1].splits > 1) == (context == 200)
    inputs = tensors(graph, 1, torch.bfloat16)
    inputs["length"] = torch.tensor([length], dtype=torch.int32)
    for name in ("k0", "k1", "v0", "v1"):
        inputs[name].view(shared, -1, size)[:, length:] = torch.nan  # where nothing was written yet
    values = Emulated(library, check(graph))(inputs, blocks=3, seed=length)
    compare(values, serial(graph, inputs), graph)
    assert torch.isfinite(values["logits"]).all()

    wide = {name: each.float() for name, each in inputs.items()}
    x, places = wide["x"], (rows, -1, size)
    for layer in ("0", "1"):
        qkv = F.linear(F.rms_norm(x, (width,), wide["norm_a" + layer], 1e-5), wide["qkv" + layer])
        q, k, v = (part.view(places) for part in qkv.split((heads * size, shared * size, shared * size), 1))
        cosine, sine = (torch.cat(2 * [inputs[name][length : length + rows]], -1)[:, None] for name in ("cos", "sin"))
        q, k = (
            each * cosine + torch.cat((-each[..., size // 2 :], each[..., : size // 2]), -1) * sine for each in (q, k)
        )
        k, v = (
            torch.cat((wide[name + layer].view(shared, -1, size)[:, :length].transpose(0, 1), new))
            for name, new in (("k", k), ("v", v))
        )
        mask = torch.ones(rows, length + rows, dtype=torch.bool).tril(length)
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        x = x + F.linear(y, wide["o" + layer])
        h = F.rms_norm(x, (width,), wide["norm_b" + layer], 1e-5)
        x = x + F.linear(
            F.silu(F.linear(h, wide["gate" + layer])) * F.linear(h, wide["up" + layer]), wide["down" + layer]
        )
    logits = F.linear(F.rms_norm(x, (width,), wide["norm"], 1e-5), wide["head"])
    assert (values["logits"].float() - logits).abs().max() < 0.05 * logits.abs().max()


def test_numbers_may_wrap_around(library):
    graph = two_layers()
    given_tensors, run = tensors(graph, 1, torch.bfloat16), Emulated(library, check(graph))
    truth = run(given_tensors, blocks=2)["y"]
    epoch, tasks = 2**32 - 1, len(run.lowered.tasks)
    run.control[:3] = epoch, epoch * (tasks + 2) % 2**32, epoch * 2 % 2**32
    for number, total in {(wait["semaphore"], wait["total"]) for wait in run.lowered.waits}:
        run.control[device.APART * (1 + number)] = epoch * int(total) % 2**32
    for launches in (0, 1):
        assert torch.equal(run(given_tensors, blocks=2, seed=launches)["y"], truth) and run.control[0] == launches


@pytest.mark.parametrize("lost", [0, 4, 8])
def test_a_post_that_is_lost_ends_in_an_error_that_names_tile_and_semaphore_and_the_next_launch_is_sound(library, lost):
    graph = two_layers(sync=RowSync())
    given_tensors, run = tensors(graph, 1, torch.bfloat16), Emulated(library, check(graph))
    begin = library.turns()
    truth = run(given_tensors, seed=1)
    usual, begin = library.turns() - begin, library.turns()
    run(given_tensors, lost=lost, seed=2, patience=300)
    assert library.turns() - begin < 2 * usual + 300 + 100  # one bound for all that wait
    assert run.report["is_there"] == 1 and not run.control.any()
    said = run.lowered.failure_sentence(run.report[0])
    assert "of stage y waited too long: semaphore 0 of RowSync on h stands at 8 of 9." in said and said.startswith(
        "Tile (0,"
    )
    run.report[:] = 0
    for seed in (3, 4):
        assert torch.equal(run(given_tensors, seed=seed)["y"], truth["y"]) and not run.report["is_there"]


def test_without_the_proof_a_wait_for_too_much_ends_by_itself(library):
    class OneTooMany(RowSync):
        def waits(self, edge, tile):
            return [(name, value + 1) for name, value in super().waits(edge, tile)]

    graph = two_layers(sync=OneTooMany())
    with pytest.raises(GraphError, match="it would never begin"):
        check(graph)
    run = Emulated(library, lower(graph))
    run(tensors(graph, 1, torch.bfloat16), patience=300)
    assert (
        "of stage y waited too long: semaphore 0 of OneTooMany on h stands at 9 of 10"
        in run.lowered.failure_sentence(run.report[0])
    )


def test_twenty_wrong_policies_are_refused_and_without_the_proof_end_by_themselves(library):
    assert len(WRONG) == 20
    for number, (name, graph) in enumerate(WRONG.items()):
        with pytest.raises(GraphError, match=r"Tile \(.* of stage y waits for"):
            check(graph)
        run, given_tensors = Emulated(library, lower(graph)), tensors(graph, 1, torch.bfloat16)
        for streams in (False, True)[: 1 + (number % 4 == 0)]:
            run.report[:] = 0
            run(given_tensors, 2, 3, seed=1, patience=300, streams=streams)
            assert run.report["is_there"] == 1 and not run.control.any(), name
            said = run.lowered.failure_sentence(run.report[0])
            assert re.match(
                r"Tile \(\d.* of stage y waited too long: semaphore .* of Wrong\w+ on h stands at \d+ of \d", said
            )


def test_times_are_kept_of_every_tile(library):
    graph = two_layers()
    run = Emulated(library, check(graph))
    run(tensors(graph, 1, torch.bfloat16), flags=device.WAITS | device.TIMES)
    times = run.times
    assert (
        (times["start"] <= times["ready"]).all() and (times["ready"] <= times["end"]).all() and times["end"].min() > 0
    )
    assert set(times["processor"].tolist()) == {0, 1, 2}


def test_what_the_kernel_has_not_is_a_sentence():
    def one(stage, **inputs):
        return check(Graph({"x": (8, 8), "w": (8, 8), **inputs}, [stage], ["y"]))

    half = torch.bfloat16
    fine = one(Gemm("y", "x", "w", (8, 8, 8), tile=(8, 8)))
    assert device.why_not(fine, half) == "" and "torch.float32" in device.why_not(fine, torch.float32)
    odd = one(Gemm("y", "x", "w", (8, 8, 9), tile=(8, 8)), x=(8, 9), w=(8, 9))
    assert "9 inputs are no multiple of 8" in device.why_not(odd, half)
    large = one(Gemm("y", "x", "w", (8, 8, 8), tile=(136, 64)))
    assert "up to 128 rows" in device.why_not(large, half)
    normed = one(Gemm("y", "x", "w", (8, 8, 8), tile=(40, 8), prologue=Normed("g")), g=(8,))
    assert "x is normed or combined in tiles of up to 32 rows only" in device.why_not(normed, half)
    odd = one(Gemm("y", "x", "w", (8, 8, 24), tile=(8, 8), prologue=Combined(2, 3)), x=(3, 8, 26), w=(8, 24))
    assert "combined heads of 12 are no multiple of 8" in device.why_not(odd, half)
    own = one(Custom("y", ["x"], (8, 8), tile=(8, 8), reads=lambda tile: [], compute=lambda x: x))
    with pytest.raises(GraphError, match="Stage y has no source for the GPU"):
        device.lower(own, half)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
@pytest.mark.parametrize(("rows", "layouts", "others"), [(1, 63, True), (4, 63, False), (4, 1, True)])
def test_the_compiler_takes_it_and_spills_nothing(tmp_path, rows, layouts, others):
    """By the tiles of 8 rows that few rows have, and the layouts of weights; `others`: with stages of other kinds."""
    (tmp_path / "user_stages.cuh").write_text(device._user_stages([SOURCE, rope_source()]))
    given_macros = {**MACROS, "X_BYTES": device.X_BYTES, "FEW_TILES": rows, "LAYOUTS": layouts, "ATTENTION": 256}
    given_macros |= dict.fromkeys(("MANY_ROWS", "MANY_COLUMNS"), 128 * others)
    given_macros |= dict.fromkeys(("COMBINES", "NORMS", "HAS_USER_STAGES"), int(others))
    command = ["nvcc", "-std=c++17", "-arch=sm_90a", "-cubin", "-Xptxas", "-v", "-o", tmp_path / "run.cubin"]
    command += [
        f"-I{nvrtc._HEADERS}",
        f"-I{tmp_path}",
        *(f"-D{name}={value}" for name, value in given_macros.items()),
        device.SOURCE,
    ]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert said.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == 2, said
