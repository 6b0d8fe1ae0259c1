import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import UserError
from tilewright.plan.batches import batch_sizes, solve

small = st.sampled_from([1, 2, 3, 4, 8])


@given(
    small, small, small, small, small, st.sets(st.sampled_from(["micro", "global_", "accumulation", "data", "gpus"]))
)
def test_what_is_left_out_is_found_again(micro, accumulation, data, tensor, pipeline, left_out):
    whole = {
        "micro": micro, "global_": micro * data * accumulation, "accumulation": accumulation, "data": data,
        "gpus": data * tensor * pipeline,
    }  # fmt: skip
    known = {k: v for k, v in whole.items() if k not in left_out}
    found = solve(**known, tensor=tensor, pipeline=pipeline)
    assert found.global_ == found.micro * found.data * found.accumulation
    assert found.gpus == found.data * found.tensor * found.pipeline
    for name, value in known.items():
        assert getattr(found, name) == value
    if len(left_out) == 1:
        assert all(getattr(found, name) == value for name, value in whole.items())


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"global_": 100, "micro": 3, "data": 8}, "does not divide by 8 data ranks"),
        ({"global_": 96, "micro": 5, "data": 8}, "not micro batch 5 x 8 data ranks"),
        ({"global_": 96, "micro": 2, "accumulation": 5, "data": 8}, "are 80, not the global batch 96"),
        ({"gpus": 60, "tensor": 8}, "60 GPUs do not divide"),
        ({"gpus": 64, "tensor": 8, "pipeline": 1, "data": 4}, "are 8 data ranks, not 4"),
        ({"micro": 0}, "at least 1"),
    ],
)
def test_the_impossible_is_one_sentence(numbers, message):
    with pytest.raises(UserError, match=message) as caught:
        solve(**numbers)
    assert "\n" not in str(caught.value)


def test_every_missing_factor_of_the_gpus():
    for tensor, pipeline in itertools.product((1, 2, 4), repeat=2):
        assert solve(gpus=8 * tensor * pipeline, data=8, tensor=tensor).pipeline == pipeline
        assert solve(gpus=8 * tensor * pipeline, data=8, pipeline=pipeline).tensor == tensor


@pytest.mark.parametrize(
    ("run", "ranks", "micro", "whole", "accumulation"),
    [
        ({"micro_batch": 0}, 1, 8, 8, 1),
        ({"micro_batch": 0, "global_batch": 6}, 1, 6, 6, 1),
        ({"micro_batch": 0, "global_batch": 20}, 1, 5, 20, 4),
        ({"micro_batch": 0, "global_batch": 22}, 1, 2, 22, 11),
        ({"micro_batch": 0, "global_batch": 64, "accumulation": 2}, 2, 16, 64, 2),
        ({"micro_batch": 3, "accumulation": 2}, 2, 3, 12, 2),
    ],
)
def test_batch_sizes_follow_from_those_given(run, ranks, micro, whole, accumulation):
    sizes = batch_sizes(**run, ranks=ranks)
    assert (sizes.micro, sizes.global_, sizes.accumulation) == (micro, whole, accumulation)


def test_batch_sizes_that_cannot_be_are_refused():
    for run, ranks in (({"micro_batch": 3, "global_batch": 8}, 1), ({"micro_batch": 0, "global_batch": 3}, 2)):
        with pytest.raises(UserError):
            batch_sizes(**run, ranks=ranks)
