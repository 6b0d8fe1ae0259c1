import dataclasses
import time

import pytest

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.plan.calibration import FITTED
from tilewright.plan.decoder import Decoder, load
from tilewright.plan.flops import matmuls
from tilewright.plan.memory import train
from tilewright.plan.parallel import Cluster, estimate, search
from tilewright.plan.traffic import Links
from tilewright.plan.training import Training, check_parallel

H100 = hardware.find("H100-SXM5")
LLAMA_405B = Decoder(16384, 126, 128, 8, 128, 53248, 128256, 8192, gated=True, tied=False, norm="rms", positions="rope")


def test_sixteen_thousand_gpus_take_seconds_and_every_plan_fits():
    began = time.process_time()
    plans = search(LLAMA_405B, Cluster(H100, 16384), 2048)
    assert time.process_time() - began < 10
    for plan in plans:
        t = plan.training
        assert t.tensor * t.pipeline * t.data == 16384
        assert t.micro_batch * t.accumulation * t.data == 2048
        assert train(LLAMA_405B, t).total == plan.memory <= H100.usable_bytes
        assert 0 < plan.mfu < 1
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    best = plans[0]
    assert best.training.tensor == 8 and best.training.pipeline in (16, 32) and best.training.recompute != "full"
    # Its makers: tensor 8, pipeline 16, 41 %, by an engine of their own. PyTorch's buffers leave less for the rest.
    layout = {"tensor": 8, "pipeline": 16}
    how = Training(precision="fsdp", loss="fused")
    theirs = dataclasses.replace(how, releases=True)
    made, here = (search(LLAMA_405B, Cluster(H100, 16384), 2048, 1, base, layout)[0] for base in (theirs, how))
    assert 0.75 < made.mfu / 0.41 < 1.1 and here.mfu < made.mfu


def test_a_hundred_thousand_gpus_too():
    began = time.process_time()
    assert search(LLAMA_405B, Cluster(H100, 98304), 12288)
    assert time.process_time() - began < 10


def test_one_gpu_needs_no_split_and_more_are_faster():
    one = search(load("350m"), Cluster(H100, 1), 64)[0]
    eight = search(load("350m"), Cluster(H100, 8), 64)[0]
    assert one.training.data == one.training.tensor == one.training.pipeline == 1 and one.data_traffic == 0
    assert one.seconds / 8.001 < eight.seconds < one.seconds / 4
    assert eight.training.data == 8 and eight.training.micro_batch == 8


def test_the_bubble_is_the_formula():
    few, many = (Training(pipeline=4, micro_batch=16, accumulation=steps) for steps in (16, 64))
    plan, more = (estimate(load("1b"), training, Cluster(H100, 4)) for training in (few, many))
    one = (more.compute - plan.compute) / 48  # of a micro batch, and of what adds its gradients up
    assert plan.bubble == more.bubble == pytest.approx(3 * one, rel=0.03)
    halved = estimate(load("1b"), dataclasses.replace(few, interleave=2), Cluster(H100, 4))
    assert halved.bubble == pytest.approx(plan.bubble / 2)


def test_slower_links_make_slower_steps():
    model, training = load("7b"), Training(tensor=8, sequence_parallel=True, micro_batch=1, accumulation=8)
    fast, slow = (estimate(model, training, Cluster(H100, 8, link=rate)) for rate in (450e9, 45e9))
    assert slow.seconds > fast.seconds
    # A ring sends 7/8 of the tensor twice for each of four reductions a layer, 32 bits an element, in 7 rounds each.
    ring, rounds = 8 * 32 * 4 * 2 * 7 / 8 * 2048 * 4096 * 2, 8 * 32 * 4 * 2 * 7 * FITTED["round seconds"] / 3
    assert fast.tensor_traffic == pytest.approx(ring / (0.75 * 450e9) + rounds)
    assert slow.tensor_traffic == pytest.approx(ring / (0.75 * 45e9) + rounds)


def test_data_traffic_hides_behind_computing_and_grows_with_zero_and_micro_batches():
    model, far = load("7b"), Cluster(H100, 64, network=1e9)
    how = Training(data=64, accumulation=4, precision="mixed")
    sent = 2 * 2 * model.parameters * 63 / 64 / (0.75 * 8e9)  # two rings of gradients; eight cards a node
    exposed = {zero: estimate(model, dataclasses.replace(how, zero=zero), far).data_traffic for zero in (0, 1, 2, 3)}
    assert exposed[0] == exposed[1] == pytest.approx(sent, rel=0.2)  # the backward of one micro batch hides little
    assert exposed[1] < exposed[2] < exposed[3]
    near = Cluster(H100, 64)
    large, small = (dataclasses.replace(how, zero=3, micro_batch=size, accumulation=8 // size) for size in (8, 1))
    assert estimate(model, large, near).data_traffic < estimate(model, small, near).data_traffic / 4
    hidden = estimate(model, large, near)
    # Each way of a layer's weights and gradients costs the computing beside it a part of its own time.
    assert hidden.data_traffic < 0.1 * hidden.compute


def test_groups_of_fsdp_gather_in_their_node_and_add_up_gradients_once_between_nodes():
    model, how = load("7b"), Training(data=64, zero=3, accumulation=4, precision="fsdp", loss="fused")
    groups, alone = (dataclasses.replace(how, **few) for few in ({"replicate": 8}, {"data": 8}))
    near, far = Cluster(H100, 64, network=12.5e9), Cluster(H100, 64)
    times = {name: estimate(model, one, near).data_traffic for name, one in (("groups", groups), ("all", how))}
    assert times["groups"] < times["all"] / 2  # a slow network
    more = estimate(model, groups, far).data_traffic - estimate(model, alone, Cluster(H100, 8)).data_traffic
    # A card for each of the eight ranks of a node: two rings of an eighth of the gradients over 8 nodes.
    assert more == pytest.approx(2 * 4 * model.parameters / 8 * 7 / 8 / (0.75 * 50e9), rel=0.1)


def test_rings_over_many_ranks_are_late():
    links = Links()
    seconds = [links.ring(1e6, ranks) for ranks in (8, 64, 512)]
    assert seconds[2] > 4 * seconds[1] > 8 * seconds[0]  # rounds, and not bytes
    assert links.ring(1e12, 512) == pytest.approx(links.ring(1e12, 64), rel=0.02)


def test_a_given_layout_is_estimated_and_no_other():
    cluster, given = Cluster(H100, 64), {"tensor": 4, "pipeline": 2, "micro_batch": 3}
    found = search(load("13b"), cluster, 192, 100, given=given)
    assert found and all((t.tensor, t.pipeline, t.data, t.micro_batch) == (4, 2, 8, 3)
                         for t in (plan.training for plan in found))  # fmt: skip
    large = search(load("70b"), Cluster(H100, 8), 8, given={"tensor": 8})  # does not fit, and is estimated
    assert not large[0].fits and large[0].seconds > 0
    with pytest.raises(UserError, match="64 heads do not divide by tensor parallel 3"):
        search(load("70b"), Cluster(H100, 24), 24, given={"tensor": 3})
    with pytest.raises(UserError, match="No split of 64 GPUs with pipeline 3"):
        search(load("13b"), cluster, 192, given={"pipeline": 3})


MIXTURE = Decoder(2048, 16, 16, 16, 128, 1024, 50304, 4096, gated=True, tied=False, norm="rms", positions="rope",
                  experts=64, active_experts=8)  # fmt: skip


def test_ranks_that_share_a_sequence_share_its_work_and_memory():
    model = load("7b", ["sequence=32768"])
    one, four = (Training(data=8 // ranks, context=ranks, zero=3, precision="fsdp", loss="fused") for ranks in (1, 4))
    alone, shared = (estimate(model, how, Cluster(H100, 8), train(model, how).total) for how in (one, four))
    assert shared.parts["matmul"] == pytest.approx(alone.parts["matmul"] / 4, rel=0.05)
    assert shared.parts["attention"] == pytest.approx(alone.parts["attention"] / 4, rel=0.01)
    assert train(model, four)["activations"] == pytest.approx(train(model, one)["activations"] / 4)
    assert train(model, four)["weights"] == train(model, one)["weights"]  # over all eight ranks either way
    # Three times a layer the keys and values of a sequence, 16 bits each, in three rounds.
    ring = 32768 * 2 * 4096 * 2 * 3 / 4 / (0.75 * 450e9) + 3 * FITTED["round seconds"] / 3
    assert shared.context_traffic == pytest.approx(32 * 3 * ring) and alone.context_traffic == 0
    assert shared.tokens_per_second * shared.seconds == 2 * 32768
    with pytest.raises(UserError, match="two pieces a rank"):
        check_parallel(load("7b", ["sequence=100"]), Training(context=8))


def test_ranks_that_share_experts_keep_fewer_and_send_tokens():
    base = Training(data=8, precision="mixed", micro_batch=2)
    whole, eighth = (dataclasses.replace(base, expert=ranks) for ranks in (1, 8))
    experts = MIXTURE.expert_parameters(MIXTURE.layers)
    assert experts == 16 * 64 * 3 * 2048 * 1024
    assert train(MIXTURE, whole)["weights"] - train(MIXTURE, eighth)["weights"] == 2 * experts * 7 / 8
    sharded = [train(MIXTURE, dataclasses.replace(how, zero=3))["weights"] for how in (whole, eighth)]
    assert sharded[0] == sharded[1] == 2 * MIXTURE.parameters / 8
    alone, shared = (estimate(MIXTURE, how, Cluster(H100, 8)) for how in (whole, eighth))
    assert shared.expert_traffic > 0 == alone.expert_traffic
    assert shared.parts["matmul"] < alone.parts["matmul"]  # as many FLOPs, in fewer and larger matmuls
    assert shared.data_traffic < alone.data_traffic
    for many, message in ((3, "64 experts do not divide"), (16, "8 data and context ranks do not divide")):
        with pytest.raises(UserError, match=message):
            check_parallel(MIXTURE, dataclasses.replace(base, expert=many))
    # Ranks of tensor share whole experts and the tokens: as many rows, in fewer matmuls of the same size.
    in_both = dataclasses.replace(base, data=4, tensor=2, sequence_parallel=True, expert=4)
    both = estimate(MIXTURE, in_both, Cluster(H100, 8))
    experts_of = [[op for op in matmuls(MIXTURE, 4096, *ranks) if op.name == "expert up"] for ranks in ((1, 4), (2, 4))]
    assert [(op.m, op.n, op.count) for (op,) in experts_of] == [(2048, 2048, 16 * 16), (2048, 2048, 16 * 8)]
    assert 0 < both.expert_traffic < shared.expert_traffic
    with pytest.raises(UserError, match="64 experts do not divide by tensor parallel 16 x expert parallel 8"):
        check_parallel(MIXTURE, dataclasses.replace(base, tensor=16, expert=8))
    given = {"expert": 4, "tensor": 1, "pipeline": 1}
    assert all(plan.training.expert == 4 for plan in search(MIXTURE, Cluster(H100, 64), 256, 5, given=given))
    found = search(MIXTURE, Cluster(H100, 64), 256, 1000, given={"tensor": 1, "pipeline": 1})
    assert {plan.training.expert for plan in found} == {1, 8, 64}


def test_compiled_is_a_flag_of_a_plan():
    model, training = load("7b"), Training(data=8, zero=3, precision="fsdp", micro_batch=4)
    eager, compiled = (
        estimate(model, dataclasses.replace(training, compiled=c), Cluster(H100, 8)) for c in (False, True)
    )
    assert compiled.parts["pointwise"] < 0.6 * eager.parts["pointwise"]
    assert compiled.parts["matmul"] == eager.parts["matmul"]


@pytest.mark.parametrize(
    ("cluster", "batch", "message"),
    [
        (Cluster(H100, 8), 8, "Nothing fits"),
        (Cluster(H100, 12), 8, "whole nodes"),
        (Cluster(H100, 512), 7, "No split"),
        (Cluster(hardware.find("RTX-4090"), 8), 8, "--link"),
        (Cluster(H100, 8, network=0.0), 8, "network is 0"),
        (Cluster(H100, 8, link=-1.0), 8, "link is -1"),
        (Cluster(H100, 10**9), 8, "1,000,000"),
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
