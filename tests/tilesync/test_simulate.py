"""Schedules: every tile once, after what it waits for, and never better than the ideal."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tilesync.graphs import chain, graphs
from tilewright.tilesync import Attention, Gemm, Graph, Work, chains, check, check_queues
from tilewright.tilesync.simulate import Machine, cost_of, predict, simulate, simulate_serial

# One second a byte and SM, nothing else.
PLAIN = Machine(sms=1, bytes_per_second=1.0, flops=1.0, launch_gap=0.0, hop=0.0, prefetch_bytes=0.0, tile_overhead=0.0,
                group_overhead=0.0)  # fmt: skip


def plain(sms, **more):
    return Machine(**{**PLAIN.__dict__, "sms": sms, "bytes_per_second": float(sms), "flops": float(sms), **more})


@settings(max_examples=40)
@given(graphs(), st.integers(1, 9))
def test_a_schedule_keeps_every_wait_and_no_worker_runs_two_tiles_at_once(graph, sms):
    program, machine = check(graph), plain(sms, hop=0.5, launch_gap=1.0, prefetch_bytes=50.0)
    for timeline in (simulate(program, machine), simulate_serial(program, machine)):
        events = {event.task: event for event in timeline.events}
        assert sorted(events) == list(range(len(program.tasks)))
        for number, needed in enumerate(program.needs()):
            for other in needed:
                assert events[number].end >= events[other].end
                assert events[number].ready >= events[other].end or events[number].end > events[other].end
        for queue in timeline.queues():
            ends = [events[task].end for task in queue]
            assert all(events[task].start >= end for task, end in zip(queue[1:], ends, strict=False))
        check_queues(program, timeline.queues())
        works = [machine.seconds(work) for work in cost_of(program)]
        assert timeline.seconds >= max(sum(works) / sms, max(works)) * 0.999 and 0 < timeline.busy <= 1


def test_the_tail_of_one_stage_is_filled_by_the_next():
    """Nine tiles and nine tiles on four SMs take three rounds each, but five together."""
    program = check(chain(3, 3, 3))
    works = [Work(0.0, 1.0)] * 18
    assert simulate_serial(program, plain(4), works).seconds == 6.0
    assert simulate(program, plain(4), works).seconds == 5.0
    assert simulate_serial(program, plain(4, launch_gap=0.5), works).seconds == 6.5
    assert simulate(check(chain(1, 1, 1)), plain(4, hop=0.25), works).seconds == 2.25


def test_weights_that_are_fetched_before_the_wait_shorten_what_follows_it():
    program = check(chain(1, 1, 1))
    works = [Work(0.0, 4.0), Work(0.0, 4.0, weight_bytes=3.0)]
    assert simulate(program, plain(2), works).seconds == 8.0
    assert simulate(program, plain(2, prefetch_bytes=2.0), works).seconds == 6.0
    assert simulate(program, plain(2, prefetch_bytes=9.0), works).seconds == 5.0


def test_a_wide_tile_begins_once_and_meets_for_each_group():
    narrow = [Gemm("y", "x", "w", (1, 256, 64), tile=(8, columns)) for columns in (16, 256)]
    one, all_sixteen = (stage.work(stage.tiles[0]) for stage in narrow)
    machine = plain(1, tile_overhead=5.0, group_overhead=0.25)
    assert (one.groups, all_sixteen.groups) == (1, 16)
    bare = plain(1)
    assert machine.seconds(one) == 5.0 + bare.seconds(one)
    assert machine.seconds(all_sixteen) == 5.0 + 15 * 0.25 + bare.seconds(all_sixteen)


def test_keys_are_fetched_early_only_where_no_stage_writes_them():
    attention = Attention("y", "x", "k", "v", rows=1, context=64, heads=2, head_dim=8)
    inputs = {"x": (1, 16), "k": (64, 16), "v": (64, 16)}
    cached = Graph(inputs, [attention], ["y"])
    assert [work.weight_bytes for work in cost_of(check(cached))] == [2 * 64 * 8 * 2] * 2
    written = Gemm("k", "h", "w", (64, 16, 8), tile=(64, 16))
    computed = Graph({"x": (1, 16), "v": (64, 16), "h": (64, 8), "w": (16, 8)}, [written, attention], ["y"])
    assert [work.weight_bytes for work in cost_of(check(computed))][1:] == [0.0, 0.0]


def test_a_decode_step_of_a_1b_model_is_predicted_below_720_us():
    """By steps of one layer and of two: each further one takes as long."""
    one, two = (
        predict(check(chains.decode_step(layers, 2048, 8192, 32, 8, 64, 128256, 1024))).synchronised
        for layers in (1, 2)
    )
    assert one + 15 * (two - one) < 720e-6


def test_a_prediction_names_the_saving_and_the_most_there_is():
    prediction = predict(check(chain(3, 3, 3)), Machine())
    assert 0 < prediction.saving <= prediction.tail < 1
