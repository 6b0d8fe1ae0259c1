"""Policies with names, and those that are derived."""

import pytest
from hypothesis import given, settings

from tilesync.graphs import graphs
from tilewright.tilesync import (
    Attention,
    DerivedSync,
    Edge,
    Gemm,
    Graph,
    GroupSync,
    Reduction,
    RowSync,
    SplitKSync,
    StageSync,
    StridedSync,
    TileSync,
    check,
    derive_policy,
    edges,
)


def up(rows=256, columns=512, tile=(64, 64), **more):
    return Gemm("h", "x", "w", (rows, columns, 128), tile=tile, **more)


def test_the_derived_policy_is_the_one_that_has_a_name():
    down = Gemm("y", "h", "v", (256, 64, 512), tile=(64, 64))
    assert derive_policy(Edge("h", up(), down)) == RowSync()
    taller = Gemm("y", "h", "v", (256, 64, 512), tile=(128, 64))
    assert isinstance(derive_policy(Edge("h", up(), taller)), DerivedSync)  # two rows of tiles share a semaphore
    one_row = Gemm("y", "h", "v", (64, 64, 512), tile=(64, 64))
    assert derive_policy(Edge("h", up(rows=64), one_row)) == StageSync()
    sums = Reduction("y", "h", (256, 512), splits=4, tile=(64, 64), like="x")
    assert derive_policy(Edge("h", up(splits=4), sums)) == SplitKSync()
    gate = Reduction("y", "h", (256, 256), splits=1, tile=(64, 64), like="x", gated=True)
    gate.reads = lambda tile: [r._replace(box=r.box[1:]) for r in Reduction.reads(gate, tile)]
    assert derive_policy(Edge("h", up(), gate)) == StridedSync(4)
    heads = Attention("y", "h", "k", "v", rows=256, context=64, heads=4, head_dim=128)
    assert derive_policy(Edge("h", up(), heads)) == GroupSync(2)
    heads = Attention("y", "h", "k", "v", rows=256, context=64, heads=8, head_dim=64)
    assert derive_policy(Edge("h", up(), heads)) == TileSync()


@settings(max_examples=40)
@given(graphs())
def test_a_derived_policy_waits_for_what_is_read_and_nothing_else(graph):
    check(graph)
    for edge in edges(graph):
        policy = derive_policy(edge)
        names = {tile: policy.semaphore(edge, tile) for tile in edge.producer.tiles}
        for tile in edge.consumer.tiles:
            waited = {name for name, _ in policy.waits(edge, tile)}
            assert {other for other, name in names.items() if name in waited} == set(edge.read_by(tile))
        assert len(set(names.values())) == len(set(edge.readers().values()))  # no two could be one


@pytest.mark.parametrize(("share", "count"), [(True, 4), (False, 8)])
def test_two_readers_with_one_policy_share_semaphores(share, count):
    first = Gemm("y", "h", "v", (256, 64, 512), tile=(64, 64), sync={"h": RowSync()})
    other = type("Other", (RowSync,), {})()
    second = Gemm("z", "h", "v", (256, 64, 512), tile=(64, 64), sync={"h": RowSync() if share else other})
    graph = Graph({"x": (256, 128), "w": (512, 128), "v": (64, 512)}, [up(), first, second], ["y", "z"])
    assert len(check(graph).semaphores) == count
