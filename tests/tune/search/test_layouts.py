"""The layouts that a study tries: all that the ranks, the model and the batch allow, and what is predicted of them."""

import dataclasses
import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.plan import memory
from tilewright.plan.decoder import from_gpt
from tilewright.plan.parallel import Cluster
from tilewright.plan.step import How, step
from tilewright.train.check_ranks import check_ranks
from tilewright.train.load_config import read
from tilewright.train.memory_plan import planned
from tilewright.train.schema import Parallel
from tilewright.tune.facts import digest_of
from tilewright.tune.rehearsal import find_gpu, machine_of, rehearsal
from tilewright.tune.search.layouts import with_layout, word_of
from tilewright.tune.search.predict import COMMUNICATION, misfit, predict
from tilewright.tune.search.search import Search
from tilewright.tune.search.space import open_space

TINY = ("model.width=64", "model.heads=4", "model.layers=4", "model.sequence=64", "global_batch=16", "device=cpu")


@functools.cache
def space(ranks, *given, device="cpu", **limits):
    return open_space(read(None, [*TINY, *given]), device=device, ranks=ranks, **limits)


def words(ranks, *given, **limits):
    """The layouts but for those with interleaved stages."""
    found = space(ranks, *given, **limits).levers.get("parallel", ())
    return {word for word in found if "pieces" not in word}


def test_two_ranks_have_every_layout_and_ddp_is_the_baseline():
    found = space(2)
    assert found.levers["parallel"][0] == "dp2" and found.start.parallel.dp == 2
    dp, cp = ({f"{name}2", f"{name}2+zero2", f"{name}2+zero3"} for name in ("dp", "cp"))
    assert words(2) == dp | cp | {"tp2", "tp2+sp", "pp2"}
    assert found.at(found.baseline) == found.start


def test_one_rank_is_the_study_that_it_was():
    alone = open_space(read(None, TINY), device="cpu")
    assert "parallel" not in alone.levers and alone.start.parallel == Parallel()
    assert space(1) == alone and digest_of(space(1), "") != digest_of(space(2), "")


@given(
    st.sampled_from([2, 3, 4, 6, 8]), st.sampled_from([1, 2, 3, 4]), st.sampled_from([2, 3, 4, 6]),
    st.sampled_from([4, 6, 12, 16]), st.sampled_from(["adamw", "adafactor"]),
)  # fmt: skip
def test_the_layouts_are_those_that_a_run_may_have(ranks, layers, heads, batch, optimizer):
    """By the code that refuses them when they are started, for one of the micro batches."""
    run = [f"model.layers={layers}", f"model.heads={heads}", f"model.width={heads * 16}", f"global_batch={batch}"]
    try:
        found = open_space(read(None, [*TINY, *run, f"optimizer.name={optimizer}"]), device="cpu", ranks=ranks)
    except UserError as refusal:
        assert "divide" in str(refusal) and batch % ranks
        return
    assert not batch % ranks
    allowed, sizes = set(), [size for size in range(1, ranks + 1) if ranks % size == 0]
    choices = itertools.product(sizes, sizes, sizes, (0, 2, 3), (False, True), (1, 2, 4))
    for pp, cp, tp, zero, sp, pieces in choices:
        dp = ranks // (pp * cp * tp)
        does_nothing = (sp and tp == 1) or (zero and dp * cp == 1) or (pieces > 1 and pp == 1)
        layout = Parallel(dp=dp, zero=zero, tp=tp, sp=sp, pp=pp, pieces=pieces, cp=cp)
        if dp * pp * cp * tp != ranks or does_nothing:
            continue
        if any(runs(found.start, layout, micro, ranks) for micro in found.levers["micro_batch"]):
            allowed.add(word_of(layout))
    assert set(found.levers.get("parallel", [word_of(found.start.parallel)])) == allowed


def runs(run, layout, micro, ranks):
    try:
        check_ranks(dataclasses.replace(run, parallel=layout, micro_batch=micro), ranks)
    except UserError:
        return False
    return True


@given(st.data())
def test_the_global_batch_is_the_same_in_every_run(data):
    here = space(data.draw(st.sampled_from([2, 4, 8])), device=data.draw(st.sampled_from(["cpu", "cuda"])))
    point = {name: data.draw(st.sampled_from(values)) for name, values in here.levers.items()}
    run = here.at(point)
    assert word_of(run.parallel) == point["parallel"] and with_layout(Parallel(), point["parallel"]).dp >= 1
    if here.refusal(point) is None:
        layout, sizes = check_ranks(run, here.ranks)
        assert sizes.global_ == here.start.global_batch == 16 and layout.ranks == here.ranks


def test_a_size_that_the_user_has_set_stays():
    assert words(4, "parallel.zero=3", "parallel.cp=1") == {
        "dp4+zero3", "dp2+tp2+zero3", "dp2+tp2+sp+zero3", "dp2+pp2+zero3",
    }  # fmt: skip
    assert space(4, "parallel.tp=4").levers["parallel"] == ("tp4", "tp4+sp")
    assert "parallel" not in space(2, "parallel.tp=2", "parallel.sp=true").levers
    assert words(2, "parallel.tp=2", search=("parallel",)) == words(2)
    assert words(2, "parallel.tp=2", search=("all",)) == words(2)
    assert words(2, "parallel.dp=0") == words(2)


def test_settings_beside_the_sizes_stay_and_rule_out_what_they_do_not_go_with():
    found = space(2, "parallel.zero=3", "parallel.gradients=bf16", search=("parallel",))
    assert set(found.levers["parallel"]) == {"dp2+zero2", "dp2+zero3", "cp2+zero2", "cp2+zero3"}
    assert all(found.at({**found.baseline, "parallel": word}).parallel.gradients == "bf16"
               for word in found.levers["parallel"])  # fmt: skip


@pytest.mark.parametrize(("point", "words"), [
    ({"parallel": "tp2", "cuda_graphs": True}, "cuda_graphs does not go together with parallel (tp 2)"),
    ({"parallel": "dp2", "micro_batch": 16}, "global batch 16 is not micro batch 16 x 2 data ranks"),
    ({"parallel": "pp2", "micro_batch": 16}, "A pipeline of 2 stages needs at least 2 micro batches"),
    ({"parallel": "cp2", "model.attention": "flash"}, "parallel.cp takes its own attention"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_as_everywhere(point, words):
    here = space(2, device="cuda")
    assert words in here.refusal({**here.baseline, **point})


def test_cores_are_shared_so_threads_are_no_lever():
    assert "threads" in space(1).levers and "threads" not in space(2).levers


@pytest.mark.parametrize(("ranks", "given", "sentence"), [
    (2, ["global_batch=3"], "global batch 3 does not divide by 2 data ranks"),
    (2, ["parallel.tp=3"], "2 processes do not divide by tp 3"),
    (2, ["parallel.dp=4"], "dp 4 x tp 1 x pp 1 x cp 1 are 4 ranks, and there are 2"),
    (2, ["device=cuda:1"], "device is cuda:1, and each of 2 ranks has its own"),
    (1, ["parallel.tp=2"], "1 process do not divide by tp 2"),
])  # fmt: skip
def test_a_baseline_that_the_ranks_cannot_share_is_refused(ranks, given, sentence):
    with pytest.raises(UserError, match=sentence):
        open_space(read(None, [*TINY, *given]), device="cuda", ranks=ranks)


def test_a_layout_can_be_asked_for():
    here = space(2)
    assert here.parse("parallel=tp2+sp, micro_batch=4") == {**here.baseline, "parallel": "tp2+sp", "micro_batch": 4}
    assert here.label(here.parse("parallel=tp2+sp")) == "parallel tp2+sp"
    with pytest.raises(UserError, match="parallel cannot be tp3 here; choose from dp2, dp2[+]zero2"):
        here.parse("parallel=tp3")
    with pytest.raises(UserError, match="is no layout; write it as dp2[+]zero3 or tp2[+]sp"):
        with_layout(Parallel(), "two")


# What is predicted


def machine(ranks, **changes):
    found = {
        "device": "cpu", "flops": {"fp32": 1e11, "bf16": 2e11}, "copy_bytes_per_second": 1e10, "launch_seconds": 5e-6,
        "kernel_seconds": 2e-6, "host": {"cores": 4}, "memory_bytes": 2**34,
    }  # fmt: skip
    return found | {"links": {"bytes_per_second": 1e9, "round_seconds": 1e-4}} | changes


@pytest.mark.parametrize("word", ["dp4", "dp4+zero3", "dp2+tp2+sp", "dp2+pp2", "tp2+cp2"])
def test_time_and_memory_of_a_layout_are_those_of_the_plan(word):
    """On GPUs of the table, whose links the table has, too."""
    gpu = hardware.find("H100-SXM5")
    here = space(4, "model.width=1024", "precision=bf16", device="cuda")
    run, given = here.at({**here.baseline, "parallel": word}), machine_of(gpu, 4)
    found, (layout, sizes) = predict(run, given, 4), check_ranks(run, 4)
    training = dataclasses.replace(planned(run, "bf16", sizes.micro, sizes.accumulation, layout), device="cuda")
    cluster = Cluster(gpu, 4, node=4)
    rates = step_rates(given)
    expected = step(from_gpt(run.model), training, How("bf16", attention=run.model.attention), rates, cluster.links)
    assert found.parts[COMMUNICATION] == pytest.approx(sum(expected.traffic.values())) and expected.traffic
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-3)
    allocated = memory.train(from_gpt(run.model), training)
    assert found.memory["weights"] == {part.name: part.bytes for part in allocated.parts}["weights"]


def step_rates(given):
    from tilewright.tune.search import predict as module

    return module._rates(read(None, TINY).train, given, 4)


def test_a_rank_has_its_share_of_a_processor_and_of_the_hosts_memory():
    run = space(2).start
    fast = predict(run, machine(2), 2)
    assert fast.parts["matmul"] == pytest.approx(predict(run, machine(2), 1).parts["matmul"], rel=0.05)  # half by half
    tight = {**machine(2), "memory_bytes": 1.5 * fast.bytes}
    assert misfit(fast, tight, ranks=1) is None and "a rank has" in misfit(fast, tight, ranks=2)


def test_slow_links_make_what_sends_less_the_better_layout():
    def seconds(word, rate):
        links = {"bytes_per_second": rate, "round_seconds": 1e-6}
        return predict(here.at({**here.baseline, "parallel": word}), machine(2, links=links), 2).seconds

    here = space(2, "model.recompute=none")
    assert seconds("dp2", 1e12) < seconds("tp2+sp", 1e8) and seconds("tp2", 1e12) < seconds("dp2", 1e5)


def test_the_search_goes_to_the_layout_predicted_best_and_leaves_out_what_cannot_fit():
    """DDP takes more memory than there is; FSDP2 fits."""
    here = space(4, "model.width=2048", "model.layers=8", "precision=bf16", "model.recompute=none", device="cuda")
    given = machine_of(find_gpu(None), 4)
    needs = {word: predict(here.at({**here.baseline, "parallel": word}), given, 4) for word in here.levers["parallel"]}
    given["memory_bytes"] = (needs["dp4"].bytes + needs["dp4+zero3"].bytes) / 2
    search = Search(here, lambda point: predict(here.at(point), given, 4), lambda each: misfit(each, given, None, 4))
    best = search.descend(here.baseline)
    assert best["parallel"] != "dp4" and misfit(search.prediction(best), given, None, 4) is None
    there = [word for word in here.levers["parallel"] if search._runs({**best, "parallel": word})]
    times = {word: search.prediction({**best, "parallel": word}).seconds for word in there}
    assert times[best["parallel"]] <= 1.001 * min(times.values())


def test_a_rehearsal_predicts_for_as_many_gpus():
    run = read(None, ["model.preset=125m", "global_batch=32"])
    one, two = (rehearsal({"it": run}, find_gpu(None), ranks=ranks) for ranks in (1, 2))
    assert two["ranks"] == 2 and "links of 450 GB/s" in two["rates"] and "links" not in one["rates"]
    assert 1.5 < two["rows"][0]["tokens_per_second"] / one["rows"][0]["tokens_per_second"] < 2.2
    lonely = next(gpu for gpu in hardware.table().values() if gpu.link_bytes_per_second is None)
    with pytest.raises(UserError, match="has no link of"):
        machine_of(lonely, 2)
