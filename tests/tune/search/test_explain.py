import math
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.measure.profile import CATEGORIES as MEASURED
from tilewright.plan.step import CATEGORIES
from tilewright.train.loop import train
from tilewright.train.schema import Data, Model, Train
from tilewright.train.shown import Shown
from tilewright.tune.search.explain import explain
from tilewright.tune.search.predict import BEYOND, predict
from tilewright.tune.store.record import Measurement, Prediction

WORK = {"matmul": 0.3, "attention": 0.1, "fused": 0.05, "pointwise": 0.02, "optimizer": 0.01}
HELD = {"weights": 4e9, "optimizer": 8e9, "activations": 50e9, "logits and loss": 1e9, "temporary buffers": 75e6}
OUTSIDE = {"fragmentation": 1e9, "CUDA context": 650e6}
EXPECTED = Prediction(sum(WORK.values()), 0.3, {**WORK, "copy": 0.0, "idle": 0.0}, sum(HELD.values()), HELD | OUTSIDE)
MARKS = ("weights", "gradients", "optimizer", "temporary buffers", "kept for backward")


def profile(spent, idle, device="cuda", overlap=0.0):
    busy = sum(spent.values()) - overlap
    categories = [{"name": name, "seconds": seconds, "calls": 1.0, "share": 0.0} for name, seconds in spent.items()]
    return {
        "device": device, "seconds": busy + idle, "busy_seconds": busy, "idle_seconds": idle, "categories": categories,
    }  # fmt: skip


def measured(seconds, found=None, *, wait=0.0, held=63 * 10**9, memory=None):
    return Measurement(1024, [seconds] * 3, 1.0, wait, [], held, memory or {}, found)


def by_part(differences, unit):
    return {each.part: each for each in differences if each.unit == unit}


seconds = st.floats(0.0, 10.0)
sizes = st.integers(0, 10**12)


@given(
    expected=st.fixed_dictionaries(dict.fromkeys((*CATEGORIES, "idle"), seconds)),
    spent=st.dictionaries(st.sampled_from(MEASURED), seconds), idle=seconds, step=st.floats(1e-3, 20.0), wait=seconds,
    overlap=st.floats(0.0, 0.5), device=st.sampled_from(("cuda", "cpu")),
    memory=st.fixed_dictionaries({}, optional=dict.fromkeys(MARKS, sizes)),
    beyond=st.tuples(sizes, sizes), held=sizes, plan=st.dictionaries(st.sampled_from([*HELD, "gradients"]), sizes),
)  # fmt: skip
def test_differences_add_up(expected, spent, idle, step, wait, overlap, device, memory, beyond, held, plan):
    prediction = Prediction(
        sum(expected.values()), 0.0, expected, float(sum(plan.values())), plan | dict(zip(BEYOND, beyond, strict=True))
    )
    found = profile(spent, idle + 1e-3, device, overlap * sum(spent.values()))
    if memory and device == "cuda":
        memory |= {"total": held + sum(beyond), "CUDA context": beyond[1]}
    result = explain(prediction, measured(step, found, wait=wait, held=held, memory=memory), device)
    time, space = ([each for each in result if each.unit == unit] for unit in ("s", "B"))
    assert math.fsum(each.more for each in time) == pytest.approx(step - prediction.seconds, rel=1e-9, abs=1e-9)
    more = held - prediction.bytes  # beyond the peak, both have the same
    assert math.fsum(each.more for each in space) == pytest.approx(more, rel=1e-9, abs=1e-2)
    assert all(each.why for each in result) and len({(each.part, each.unit) for each in result}) == len(result)


def test_slow_kernels_and_gaps_are_told_apart():
    spent = {**WORK, "matmul": 0.36, "communication": 0.02}
    found = by_part(explain(EXPECTED, measured(0.66, profile(spent, 0.1), wait=0.03), "cuda"), "s")
    assert found["matmul kernels"].more == pytest.approx(0.06) and "by 20%" in found["matmul kernels"].why
    assert found["attention kernels"].why == "as expected"
    assert found["data wait"].more == pytest.approx(0.03) and found["launch gaps"].more == pytest.approx(0.07)
    assert found["communication"].more == pytest.approx(0.02)
    assert found["unexplained"].more == pytest.approx(0.0, abs=1e-12)
    assert "copy kernels" not in found  # neither expected nor seen


def test_what_the_profiler_costs_a_host_is_no_gap():
    found = by_part(explain(EXPECTED, measured(EXPECTED.seconds, profile(WORK, 0.2)), "cuda"), "s")
    assert found["launch gaps"].more == pytest.approx(0.0, abs=1e-12) and "200.0 ms" in found["launch gaps"].why
    assert found["unexplained"].more == pytest.approx(0.0, abs=1e-12)
    # On a CPU every op is longer by it.
    found = by_part(explain(EXPECTED, measured(EXPECTED.seconds, profile(WORK, EXPECTED.seconds, "cpu")), "cpu"), "s")
    assert found["matmul kernels"].measured == pytest.approx(0.15)
    assert found["unexplained"].more == pytest.approx(0.0, abs=1e-12)


def test_without_a_profile_nothing_is_made_up():
    (found,) = by_part(explain(EXPECTED, measured(0.5), "cuda"), "s").values()
    assert (found.part, found.why, found.measured) == ("unexplained", "not profiled", 0.5)


def test_memory_is_taken_apart():
    memory = {
        "weights": 4 * 10**9, "gradients": 4 * 10**9, "optimizer": 9 * 10**9, "kept for backward": 5 * 10**10,
        "temporary buffers": 10**8, "allocated": 66 * 10**9, "fragmentation": 3 * 10**9, "CUDA context": 6 * 10**8,
        "total": 66 * 10**9 + 36 * 10**8,
    }  # fmt: skip
    found = by_part(explain(EXPECTED, measured(0.5, held=66 * 10**9, memory=memory), "cuda"), "B")
    assert "gradients" not in found  # the plan has none at the peak
    assert found["weights"].more == 0 and found["optimizer"].more == 1e9
    # What is allocated at the peak and nobody else's: predicted, activations and loss.
    assert found["activations"].predicted == pytest.approx(51e9)
    assert found["activations"].measured == 66e9 - 4e9 - 9e9 - 1e8
    assert found["fragmentation"].more == 2e9 and found["CUDA context"].more == -5e7


def test_the_peak_of_a_recording_is_not_fragmentation():
    """A replay allocates nothing: the watch saw a small peak, and all that the graph holds as lost."""
    memory = {
        "weights": 4 * 10**9, "optimizer": 8 * 10**9, "allocated": 13 * 10**9, "fragmentation": 52 * 10**9,
        "CUDA context": 6 * 10**8, "total": 65 * 10**9 + 6 * 10**8,
    }  # fmt: skip
    found = by_part(explain(EXPECTED, measured(0.5, held=63 * 10**9, memory=memory), "cuda"), "B")
    assert found["fragmentation"].measured == 2e9


def test_a_real_run_on_the_cpu():
    with tempfile.TemporaryDirectory() as folder:
        model = Model(width=32, layers=2, heads=2, sequence=32)
        run = Train(out=folder, steps=9, profile=True, device="cpu", model=model, data=Data("synthetic", workers=0))
        profiles = []
        train(run, Shown(profile=profiles.append))
    found = profiles[0]["time"]
    measurement = measured(found["seconds"] / 1.1, found, held=5 * 10**8, memory=profiles[0]["memory_measured"])
    machine = {
        "device": "cpu", "host": {"cores": 1}, "memory_bytes": 2**34, "copy_bytes_per_second": 1e10,
        "launch_seconds": 5e-6, "kernel_seconds": 2e-6, "flops": {"fp32": 5e10, "bf16": 5e10},
    }  # fmt: skip
    prediction = predict(run, machine)
    result = explain(prediction, measurement, "cpu")
    time, space = by_part(result, "s"), by_part(result, "B")
    assert sum(each.more for each in time.values()) == pytest.approx(measurement.seconds - prediction.seconds)
    assert time["matmul kernels"].measured > 0 and time["pointwise kernels"].measured > 0
    assert abs(time["unexplained"].more) < 0.05 * measurement.seconds
    assert space["weights"].more == 0 and space["optimizer"].more == pytest.approx(0, abs=1000)
