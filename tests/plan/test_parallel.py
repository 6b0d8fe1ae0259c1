import time

import pytest

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.plan.decoder import Decoder, load
from tilewright.plan.memory import Training, train
from tilewright.plan.parallel import Cluster, estimate, padded, search

H100 = hardware.find("H100-SXM5")
LLAMA_405B = Decoder(16384, 126, 128, 8, 128, 53248, 128256, 8192, gated=True, tied=False, norm="rms", positions="rope")


def test_sixteen_thousand_gpus_take_seconds_and_every_plan_fits():
    began = time.perf_counter()
    plans = search(LLAMA_405B, Cluster(H100, 16384), 2048)
    assert time.perf_counter() - began < 10
    for plan in plans:
        t = plan.training
        assert t.tensor * t.pipeline * t.data == 16384
        assert t.micro_batch * plan.accumulation * t.data == 2048
        assert train(padded(LLAMA_405B, t.pipeline), t).total == plan.memory <= 80e9
        assert 0 < plan.mfu < 1
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    best = plans[0].training  # what its makers chose: tensor 8, pipeline 16
    assert (best.tensor, best.pipeline) == (8, 16)


def test_a_hundred_thousand_gpus_too():
    began = time.perf_counter()
    assert search(LLAMA_405B, Cluster(H100, 98304), 12288)
    assert time.perf_counter() - began < 10


def test_one_gpu_needs_no_split_and_more_are_faster():
    one = search(load("350m"), Cluster(H100, 1), 64)[0]
    eight = search(load("350m"), Cluster(H100, 8), 64)[0]
    assert one.training.data == one.training.tensor == one.training.pipeline == 1 and one.data_traffic == 0
    assert one.seconds / 8.001 < eight.seconds < one.seconds / 4
    assert eight.training.data == 8 and eight.training.micro_batch == 8


def test_the_bubble_is_the_formula():
    training = Training(pipeline=4, micro_batch=1)
    plan = estimate(load("1b"), training, 16, Cluster(H100, 4), 0.0)
    assert plan.bubble / plan.compute == pytest.approx(3 / 16)
    halved = estimate(load("1b"), Training(pipeline=4, interleave=2), 16, Cluster(H100, 4), 0.0)
    assert halved.bubble == pytest.approx(plan.bubble / 2)


def test_slower_links_make_slower_steps():
    model, training = load("7b"), Training(tensor=8, sequence_parallel=True, micro_batch=1)
    fast, slow = (estimate(model, training, 8, Cluster(H100, 8, link=rate), 0.0) for rate in (450e9, 45e9))
    assert slow.tensor_traffic == pytest.approx(10 * fast.tensor_traffic) and slow.seconds > fast.seconds


@pytest.mark.parametrize(
    ("cluster", "batch", "message"),
    [
        (Cluster(H100, 8), 8, "Nothing fits"),
        (Cluster(H100, 12), 8, "whole nodes"),
        (Cluster(H100, 512), 7, "No split"),
        (Cluster(hardware.find("RTX-4090"), 8), 8, "--link"),
    ],
)
def test_the_impossible_is_one_sentence(cluster, batch, message):
    with pytest.raises(UserError, match=message) as caught:
        search(
            load("70b", ["layers=3"] if message == "No split" else []) if message != "--link" else load("1b"),
            cluster,
            batch,
        )
    assert "\n" not in str(caught.value)
