import math

import pytest
import torch
from safetensors.torch import load_file

from tilewright.errors import UserError
from tilewright.train.guard import WINDOW, Watch
from tilewright.train.schema import Guard


def watch(folder, losses=(), **rules):
    found = Watch(Guard(**rules), folder)
    for step, loss in enumerate(losses, 1):
        assert found.take(step, loss, 1.0, False, []) is None
    return found


def test_nothing_is_a_spike_before_there_are_enough_losses_or_without_a_rule(tmp_path):
    assert watch(tmp_path, [1.0, 2.0] * 9, spike=1.0).limit(19) == math.inf
    assert watch(tmp_path, [1.0, 2.0] * 50).limit(101) == math.inf


def test_the_limit_is_so_many_deviations_above_the_recent_mean(tmp_path):
    assert watch(tmp_path, [9.0] * 100 + [1.0, 3.0] * 25, spike=4.0).limit(152) == pytest.approx(2.0 + 4.0)


def test_the_limit_does_not_know_the_step_before(tmp_path):
    """It is known after a checkpoint and not else: a run that resumes must judge as one that did not stop."""
    losses = [2.0 + math.sin(step) for step in range(WINDOW + 30)]
    for steps in (21, WINDOW, WINDOW + 1, WINDOW + 20):
        behind, ahead = (watch(tmp_path, losses[:known], spike=1.0) for known in (steps - 1, steps))
        assert behind.limit(steps + 1) == ahead.limit(steps + 1) != ahead.limit(steps + 2)


def test_a_step_that_was_skipped_does_not_count_among_the_losses(tmp_path):
    found = watch(tmp_path, [2.0, 2.1] * 15, spike=3.0, on_spike="skip", nan="skip")
    before = found.limit(40)
    assert "jumped to 50, the recent ones allow 2.198" in found.take(31, 50.0, 1.0, True, [])
    assert "is nan" in found.take(32, math.nan, math.nan, True, [])
    assert found.limit(40) == before and found.in_a_row == 2
    found.take(33, 2.0, 1.0, False, [])
    assert found.in_a_row == 0


@pytest.mark.parametrize(
    ("loss", "norm", "field"),
    [
        (math.nan, 1.0, "guard.nan"), (2.0, math.inf, "guard.nan"), (9.0, math.nan, "guard.nan"),
        (9.0, 1.0, "guard.on_spike"),
    ],
)  # fmt: skip
def test_each_kind_of_bad_step_has_its_rule(tmp_path, loss, norm, field):
    skips = {"nan": "skip"} if field == "guard.on_spike" else {"on_spike": "skip"}
    found = watch(tmp_path, [2.0] * 30, spike=3.0, **skips)
    with pytest.raises(UserError, match=f"{field}=skip"):
        found.take(31, loss, norm, True, [])


def test_the_batch_is_kept_of_each_rank(tmp_path):
    for rank in (0, 1):
        batches = [torch.arange(6).view(2, 3) + rank, torch.ones(2, 3, dtype=torch.int64)]
        Watch(Guard(nan="skip"), tmp_path, rank).take(7, math.nan, math.nan, True, batches)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bad-step-00000007-rank-1.safetensors", "bad-step-00000007.safetensors"
    ]  # fmt: skip
    kept = load_file(tmp_path / "bad-step-00000007-rank-1.safetensors")
    assert kept["micro_batch_0"].tolist() == [[1, 2, 3], [4, 5, 6]] and len(kept) == 2
