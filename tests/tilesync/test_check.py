"""What `check` proves: random graphs pass, wrong ones are refused with the right tile named."""

import functools
import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilesync.graphs import chain, graphs, tensors
from tilewright.tilesync import (
    Attention,
    Combined,
    Conv2d,
    Conv2DSync,
    Custom,
    Elementwise,
    Gemm,
    Graph,
    GraphError,
    NoSync,
    Policy,
    Reduction,
    Region,
    Rotation,
    RowSync,
    SplitKSync,
    TileSync,
    blocks_of_streams,
    chains,
    check,
    check_queues,
    check_residency,
)
from tilewright.tilesync.check import _overlapping
from tilewright.tilesync.graph import overlaps

WRONG_NUMBER = 997.0  # finite: what causal attention hides is multiplied by 0


def by_tiles(program, given_tensors, seed):
    """Compute task by task, in a random order that the waits allow; what it does not declare to read is wrong."""
    graph, dice = program.graph, random.Random(seed)
    values = dict(given_tensors)
    for name, spec in graph.specs.items():
        values[name] = torch.full(spec.shape, WRONG_NUMBER)
    reached, left = [0] * len(program.semaphores), list(range(len(program.tasks)))
    while left:
        able = [n for n in left if all(reached[wait.semaphore] >= wait.value for wait in program.tasks[n].waits)]
        number = dice.choice(able)
        left.remove(number)
        task = program.tasks[number]
        stage = program.stages[task.stage]
        seen = {
            name: torch.full_like(values[name], WRONG_NUMBER) if name in graph.producers else values[name]
            for name in stage.inputs
        }
        for region in stage.reads(task.tile):
            where = tuple(slice(*each) for each in region.box)
            seen[region.tensor][where] = values[region.tensor][where]
        result = stage.compute(*(seen[name] for name in stage.inputs))
        for region in stage.writes(task.tile):
            where = tuple(slice(*each) for each in region.box)
            values[region.tensor][where] = result[where]
        for post in task.posts:
            reached[post.semaphore] += post.amount
    return values


@settings(max_examples=20)
@given(graphs(), st.integers(0, 99))
def test_tiles_in_any_order_that_the_waits_allow_compute_the_same(graph, seed):
    program = check(graph)
    values = by_tiles(program, tensors(graph, seed), seed)
    whole = dict(tensors(graph, seed))
    for stage in program.stages:
        whole[stage.name] = stage.compute(*(whole[name] for name in stage.inputs))
    for name in graph.outputs:
        torch.testing.assert_close(values[name], whole[name], rtol=1e-5, atol=1e-5)


class Dropping(Policy):
    """A policy less one of the waits of one tile."""

    def __init__(self, policy, tile, which):
        self.policy, self.tile, self.which = policy, tile, which

    def semaphore(self, edge, tile):
        return self.policy.semaphore(edge, tile)

    def waits(self, edge, tile):
        waits = list(super().waits(edge, tile))
        if tile == self.tile:
            del waits[self.which % len(waits)]
        return waits


@settings(max_examples=40)
@given(st.data())
def test_any_wait_that_is_left_out_is_missed_at_its_tile(data):
    rows, middle, columns = (data.draw(st.integers(1, 5)) for _ in range(3))
    tile = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    policy = Dropping(data.draw(st.sampled_from((RowSync(), TileSync()))), tile, data.draw(st.integers(0, 9)))
    with pytest.raises(GraphError, match=rf"Tile \({tile[0]}, {tile[1]}\) of stage y reads"):
        check(chain(rows, middle, columns, policy))


def policy(waits=None, semaphore=None, posts=None, producers=None):
    """A user's subclass with some methods replaced."""
    methods = {"waits": waits, "semaphore": semaphore, "posts": posts, "producers": producers}
    body = {name: functools.partialmethod(_without_self, function) for name, function in methods.items() if function}
    return type("Wrong", (TileSync,), body)()


def _without_self(self, function, edge, tile):
    return function(edge, tile)


def row(edge, tile):
    return tile[0]


# (what is wrong, the policy, the stage and the tile that are named, and what else is: a tile of h, or words)
WRONG = (
    ("nothing is waited for", NoSync(), "y", (0, 0), (0, 0)),
    ("one too few", policy(lambda e, t: [(t[0], 5)], row), "y", (0, 0), "does not wait"),
    ("one too many", policy(lambda e, t: [(t[0], 7)], row), "y", (0, 0), "add up to 6"),
    ("the row above", policy(lambda e, t: [((t[0] - 1) % 4, 6)], row), "y", (0, 0), (0, 0)),
    ("the row below, but not of the last", policy(lambda e, t: [(min(t[0] + 1, 3), 6)], row), "y", (0, 0), "reads"),
    ("all but the last column", policy(producers=lambda e, t: e.read_by(t)[:-1]), "y", (0, 0), (0, 5)),
    ("all but the first", policy(producers=lambda e, t: e.read_by(t)[1:]), "y", (0, 0), (0, 0)),
    ("odd rows do not wait", policy(lambda e, t: [] if t[0] % 2 else [(t[0], 6)], row), "y", (1, 0), (1, 0)),
    ("the last tile does not", policy(lambda e, t: [] if t == (3, 2) else [(t[0], 6)], row), "y", (3, 2), (3, 0)),
    ("a tile does not post",
     policy(posts=lambda e, t: int(t != (2, 3)), producers=lambda e, t: [o for o in e.read_by(t) if o != (2, 3)]),
     "y", (2, 0), (2, 3)),
    ("a post takes away", policy(lambda e, t: [], posts=lambda e, t: -1 if t == (1, 1) else 1), "h", (1, 1), "adds -1"),
    ("posts are counted twice", policy(lambda e, t: [(t[0], 6)], row, lambda e, t: 2), "y", (0, 0), "does not wait"),
    ("its own column", policy(lambda e, t: [(t[1], 4)], lambda e, t: t[1]), "y", (0, 0), (0, 1)),
    ("rows and columns swapped", policy(producers=lambda e, t: [(t[1], t[0])]), "y", (0, 0), (0, 1)),
    ("a semaphore that nobody posts", policy(lambda e, t: [(t[0] + 1, 6)], row), "y", (3, 0), "no tile of stage h"),
    ("a wait for nothing", policy(lambda e, t: [(t[0], 0)], row), "y", (0, 0), "is no wait"),
    ("one of two strides", policy(lambda e, t: [((t[0], t[1] % 2), 3)], lambda e, t: (t[0], t[1] % 2)), "y", (0, 0),
     (0, 1)),
    ("one of three groups", policy(lambda e, t: [((t[0], t[1]), 2)], lambda e, t: (t[0], t[1] // 2)), "y", (0, 0),
     (0, 2)),
    ("half the rows", policy(lambda e, t: [(t[0] // 2, 6)], row), "y", (1, 0), (1, 0)),
    ("the first tile of a row", policy(lambda e, t: [((t[0], 0), 1)]), "y", (0, 0), (0, 1)),
    ("any six of the whole stage", policy(lambda e, t: [(0, 6)], lambda e, t: 0), "y", (0, 0), "does not wait"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "stage", "tile", "said"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_a_wrong_policy_is_refused_and_the_first_wrong_tile_named(wrong, stage, tile, said):
    said = said if isinstance(said, str) else rf"tile \({said[0]}, {said[1]}\) of stage h writes"
    with pytest.raises(GraphError, match=rf"^Tile \({tile[0]}, {tile[1]}\) of stage {stage} .*{said}"):
        check(chain(sync=wrong))


def test_a_convolution_without_its_halo_and_a_split_too_few_are_refused():
    class NoHalo(Conv2DSync):
        def producers(self, edge, tile):
            return [other for other in edge.read_by(tile) if other[0] == tile[0]]

    def convolutions(sync):
        first = Conv2d("h", "x", "w", images=2, height=6, width=6, channels=(3, 8), tile=(9, 4))
        second = Conv2d("y", "h", "v", images=2, height=6, width=6, channels=(8, 4), tile=(9, 4), sync={"h": sync})
        return Graph({"x": (72, 3), "w": (8, 3, 3, 3), "v": (4, 3, 3, 8)}, [first, second], ["y"])

    program = check(convolutions(Conv2DSync()))
    waits = [len(task.waits) for task in program.tasks if task.stage == 1]
    assert waits == [2, 3, 3, 2] * 2  # of the four tiles of each image, never of the other's
    with pytest.raises(GraphError, match=r"Tile \(0, 0\) of stage y reads .*tile \(1, 0\) of stage h writes.*NoHalo"):
        check(convolutions(NoHalo()))

    class OneTooFew(SplitKSync):
        def waits(self, edge, tile):
            return [(name, value - 1) for name, value in super().waits(edge, tile)]

    def split(sync):
        sums = Gemm("s", "x", "w", (8, 8, 192), tile=(4, 4), splits=3)
        added = Reduction("y", "s", (8, 8), splits=3, tile=(4, 4), like="x", sync={"s": sync})
        return Graph({"x": (8, 192), "w": (8, 192)}, [sums, added], ["y"])

    assert {wait.value for task in check(split(SplitKSync())).tasks for wait in task.waits} == {3}
    with pytest.raises(GraphError, match=r"Tile \(0, 0\) of stage y reads \[0:3, 0:4, 0:4\] of s"):
        check(split(OneTooFew()))


def test_what_another_wait_implies_needs_no_semaphore_of_its_own():
    """y adds x2, which h was made of: whoever waits for h needs not wait for x2."""
    m = 8
    inputs = {"x": (m, m), "a": (m, m), "b": (m, m), "c": (m, m)}

    def graph(sync):
        return Graph(inputs, [
            Gemm("x2", "x", "a", (m, m, m), tile=(4, 4)),
            Gemm("h", "x2", "b", (m, m, m), tile=(4, 4)),
            Gemm("y", "h", "c", (m, m, m), tile=(4, 4), residual="x2", sync=sync),
        ], ["y"])  # fmt: skip

    assert len(check(graph({"h": RowSync(), "x2": NoSync()})).semaphores) == 4
    with pytest.raises(GraphError, match=r"Tile \(0, 0\) of stage y reads .* of h, .* NoSync"):
        check(graph({"h": NoSync(), "x2": RowSync()}))


def gemm(output, x, weight="w", size=8, **more):
    return Gemm(output, x, weight, (size, size, size), tile=(4, 4), **more)


def overlapping():
    class Part(Custom):
        def writes(self, tile):
            return [region._replace(tensor="h") for region in super().writes(tile)]

    part = Part("part", ["x"], (8, 8), tile=(8, 4), reads=lambda tile: [], compute=lambda x: x)
    part.outputs["h"] = part.outputs.pop("part")
    return [gemm("h", "x"), part, gemm("y", "h")]


SQUARE = {"x": (8, 8), "w": (8, 8)}


@pytest.mark.parametrize(
    ("stages", "outputs", "said"),
    [
        ([gemm("h", "y"), gemm("y", "h")], ["y"], "Stages y -> h -> y|Stages h -> y -> h"),
        ([gemm("y", "y")], ["y"], "cycle"),
        ([gemm("y", "nowhere")], ["y"], "Stage y reads nowhere, which nobody feeds"),
        ([gemm("h", "x"), gemm("y", "x")], ["y"], "Nobody reads what stage h writes"),
        ([gemm("y", "x"), gemm("y", "x")], ["y"], "Two stages are called y"),
        ([gemm("y", "x")], ["z"], "The output z is written by no stage"),
        ([gemm("y", "x", sync={"w": RowSync()})], ["y"], "sync names w"),
        ([gemm("h", "x"), gemm("y", "h", sync={"h": "row"})], ["y"], "give a Policy"),
        ([gemm("y", "x", order="diagonal")], ["y"], "order 'diagonal' is unknown"),
        ([gemm("y", "x", order=[(0, 0), (0, 1), (1, 0), (1, 0)])], ["y"], r"has tile \(1, 0\) twice"),
        ([gemm("y", "x", order=[(0, 0), (0, 1), (1, 0)])], ["y"], r"leaves out tile \(1, 1\)"),
        (overlapping(), ["y"], r"Tile \(0, 0\) of stage part writes part of h that tile \(0, 0\) of stage h"),
        ([Gemm("y", "x", "w", (8, 8, 8), tile=(512, 512))], ["y"], "393,216 bytes of shared memory"),
    ],
)  # fmt: skip
def test_a_graph_that_cannot_run_is_one_sentence(stages, outputs, said):
    with pytest.raises(GraphError, match=said) as error:
        check(Graph(SQUARE, stages, outputs))
    assert str(error.value).count("\n") == 0


@pytest.mark.parametrize(("heads", "splits"), [(2, 2), (2, 4), (4, 3)])
def test_a_sum_over_other_splits_or_heads_than_there_are_is_refused(heads, splits):
    def graph(combined):
        attention = Attention("parts", "q", "k", "v", rows=1, context=24, heads=2, head_dim=8, splits=3, tile=8)
        y = Gemm("y", "parts", "o", (1, 8, 16), tile=(8, 8), prologue=combined)
        return Graph({"q": (1, 16), "k": (24, 16), "v": (24, 16), "o": (8, 16)}, [attention, y], ["y"])

    check(graph(Combined(2, 3)))
    with pytest.raises(GraphError, match=r"reads parts as .* but it is \(3, 1, 18\); give both stages the same"):
        check(graph(Combined(heads, splits)))


def test_a_stage_cannot_be_made_of_nothing():
    with pytest.raises(GraphError, match="no tiles"):
        Gemm("y", "x", "w", (0, 8, 8), tile=(4, 4))
    with pytest.raises(GraphError, match="activation 'tanh' is unknown"):
        gemm("y", "x", activation="tanh")
    with pytest.raises(GraphError, match="for the Reduction"):
        gemm("y", "x", splits=2, bias="b")
    with pytest.raises(GraphError, match="8 columns, 8 of them rotated, are no heads of 3"):
        gemm("y", "x", rotation=Rotation("cos", "sin", "length", 3, 8))
    with pytest.raises(GraphError, match="nothing but a bias"):
        gemm("y", "x", rotation=Rotation("cos", "sin", "length", 4, 8), residual="x")
    with pytest.raises(GraphError, match="a context of 3 has 1 to 3 splits, not 4"):
        Attention("y", "x", "k", "v", rows=1, context=3, heads=1, head_dim=8, splits=4)
    with pytest.raises(GraphError, match="up to 32 new tokens, not 33"):
        chains.decode_step(1, 64, 96, 4, 2, 16, 100, 32, rows=33)


def test_regions_outside_or_unwritten_are_refused():
    class Beyond(Elementwise):
        def writes(self, tile):
            return [Region(self.name, ((tile[0] * 4, tile[0] * 4 + 4), (tile[1] * 4 + 1, tile[1] * 4 + 5)))]

    class Half(Elementwise):
        def writes(self, tile):
            return [region._replace(box=(region.box[0], (0, 2))) for region in super().writes(tile) if tile[1] == 0]

    def of(kind):
        return Graph({"x": (8, 8)}, [kind("y", ["x"], (8, 8), tile=(4, 4), function="relu")], ["y"])

    with pytest.raises(
        GraphError, match=r"Tile \(0, 1\) of stage y writes \[0:4, 5:9\] of y, which has the shape \(8, 8\)"
    ):
        check(of(Beyond))
    with pytest.raises(GraphError, match="Stage y: some of y is written by no tile"):
        check(of(Half))


def test_an_order_that_is_not_topological_is_refused():
    graph = chain(2, 2, 2)
    tiles = [("h", tile) for tile in graph.stages[0].tiles]
    rest = [("y", tile) for tile in graph.stages[1].tiles]
    assert [task.stage for task in check(graph, order=[*tiles[:2], *rest[:2], *tiles[2:], *rest[2:]]).tasks] == [
        0,
        0,
        1,
        1,
    ] * 2
    with pytest.raises(
        GraphError, match=r"Tile \(1, 0\) of stage y waits for tile \(1, 1\) of stage h, which begins no earlier"
    ):
        check(graph, order=[*tiles[:3], *rest[2:3], *tiles[3:], *rest[:2], *rest[3:]])
    with pytest.raises(GraphError, match=r"leaves out tile \(1, 1\) of stage y"):
        check(graph, order=[*tiles, *rest[:3]])


@settings(max_examples=30)
@given(graphs(), st.integers(1, 5), st.integers(0, 99))
def test_queues_of_any_assignment_in_the_programs_order_are_a_linear_extension(graph, workers, seed):
    program, dice = check(graph), random.Random(seed)
    queues = [[] for _ in range(workers)]
    for number in range(len(program.tasks)):
        dice.choice(queues).append(number)
    order = check_queues(program, queues)
    at = {number: index for index, number in enumerate(order)}
    assert sorted(order) == list(range(len(order)))
    assert all(at[other] < at[number] for number, needed in enumerate(program.needs()) for other in needed)


def test_queues_that_could_deadlock_are_refused():
    program = check(chain(1, 2, 1))  # two tiles of h, then one of y
    assert check_queues(program, [[0, 2], [1]])
    with pytest.raises(
        GraphError, match=r"Tile \(0, 0\) of stage y is next in the queue of worker 0 .* tile \(0, 0\) of stage h"
    ):
        check_queues(program, [[2, 0], [1]])
    with pytest.raises(GraphError, match=r"Tile \(0, 1\) of stage h is in no queue"):
        check_queues(program, [[0, 2]])
    with pytest.raises(GraphError, match="200 blocks wait for each other, but only 132"):
        check_residency(200, 132)


def test_stages_on_streams_get_blocks_or_are_refused():
    program = check(chain(2, 3, 4))
    assert blocks_of_streams(program, 132) == [6, 8] and blocks_of_streams(program, 7) == [6, 7]
    with pytest.raises(GraphError, match="2 blocks wait for each other, but only 1"):
        blocks_of_streams(program, 1)
    tiles = [(stage.name, tile) for stage in program.stages for tile in stage.tiles]
    mixed = sorted(tiles, key=lambda each: (each[1][0], each[0]))  # row by row
    with pytest.raises(GraphError, match="cannot run on streams of their own; leave out `order`"):
        blocks_of_streams(check(chain(2, 3, 4), order=mixed), 132)
    many = [Gemm(f"t{i + 1}", f"t{i}" if i else "x", "w", (8, 8, 8), tile=(8, 8)) for i in range(17)]
    with pytest.raises(GraphError, match="17 stages are more than 16 streams"):
        blocks_of_streams(check(Graph({"x": (8, 8), "w": (8, 8)}, many, ["t17"])), 132)


def test_boxes_that_overlap_are_found_as_by_comparing_all(monkeypatch):
    chance, compared = np.random.default_rng(0), []
    for dimensions in (1, 2, 3):
        for _ in range(60):
            starts = chance.integers(0, 12, (chance.integers(1, 9), dimensions))
            boxes = np.stack((starts, starts + chance.integers(1, 4, starts.shape)), -1)
            every = itertools.combinations(range(len(boxes)), 2)
            pairs = [[i, j] for i, j in every if len(overlaps(boxes[[i]], boxes[j])[0])]
            found = _overlapping(boxes)
            assert found in pairs if pairs else not found
    monkeypatch.setitem(
        _overlapping.__globals__, "overlaps", lambda boxes, box: (compared.append(len(boxes)), overlaps(boxes, box))[1]
    )
    rows, columns = np.indices((50, 40)).reshape(2, -1) * 8
    _overlapping(np.stack((np.stack((rows, columns), -1), np.stack((rows + 8, columns + 8), -1)), -1))
    assert max(compared) < 50  # of 2000
