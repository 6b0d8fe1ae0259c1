import dataclasses
import itertools
import json
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tilewright.errors import UserError
from tilewright.models import GPT
from tilewright.optim.states import new_state
from tilewright.plan.gpt import GPTConfig
from tilewright.train import optimizers
from tilewright.train.load_config import read
from tilewright.train.schema import OPTIMIZERS, PRECISIONS, Model, Optimizer, Train
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.reread import space_of
from tilewright.tune.search.choose import latest
from tilewright.tune.search.predict import BEYOND, PROCESS_BYTES, misfit, predict
from tilewright.tune.store.record import Prediction

RESULTS = Path(__file__).parents[3] / "results" / "h200"


def committed(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


TRAINED = (
    "train_125m",
    "train_125m_dropout",
    "train_1b",
    "train_1b_dropout",
    "train_350m",
    "train_350m_schedule",
    "train_7b",
)
MEASURED = [committed(name) for name in TRAINED]
CEILINGS = committed("cross_entropy")["ceilings"]  # of the same card; `bench train` measures none
H200 = {
    "device": "cuda", "host": {"cores": 16}, "memory_bytes": MEASURED[0]["machine"]["gpu"]["memory_bytes"],
    "copy_bytes_per_second": CEILINGS["copy_bytes_per_second"], "launch_seconds": 13e-6, "kernel_seconds": 2e-6,
    "flops": {"bf16": CEILINGS["bf16_flops"], "tf32": 400e12, "fp32": 50e12},
}  # fmt: skip
XEON = {
    "device": "cpu", "host": {"cores": 4}, "memory_bytes": 16 * 2**30, "copy_bytes_per_second": 12e9,
    "launch_seconds": 4e-6, "kernel_seconds": 3e-6, "flops": {"fp32": 1e11, "bf16": 1e12},
}  # fmt: skip

CASES = [
    {
        **case, "run": read(None, case["overrides"]).train, "seconds": statistics.median(case["step_seconds"]),
        "commit": result["machine"]["commit"],
    }
    for result in MEASURED
    for case in result["cases"]
    if "error" not in case
]  # fmt: skip


# How long an eager op took the host of a run, as "micro batch 4", which is nothing else, says; that row proves nothing.
LAUNCH_SECONDS = {
    case["commit"]: H200["launch_seconds"] * case["seconds"] / predict(case["run"], H200).seconds
    for case in CASES
    if case["case"] == "micro batch 4"
}


def tau(pairs):
    """Kendall's rank correlation of (predicted, measured)."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(pairs, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs)


def expected(case):
    seconds = LAUNCH_SECONDS.get(case["commit"], H200["launch_seconds"])
    return predict(case["run"], {**H200, "launch_seconds": seconds})


def named(case):
    return f"{case['commit']} {case['group']}: {case['case']}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_peak_agrees_with_an_h200(case):
    assert expected(case).bytes == pytest.approx(case["peak_allocated"], rel=0.08)


def studied(name):
    """Of a study on an H200: (the run, what is predicted of it, what was measured), each run once."""
    tree = committed(name)
    answer, space = Answer.from_dict(tree), space_of(tree)
    runs = [record for record in latest(answer.records).values() if record.outcome == "done"]
    return [(run.point, predict(space.at(run.point), tree["ceilings"]), run.measurement) for run in runs]


@pytest.mark.parametrize("name", ["tune_125m", "tune_1b"])
def test_so_do_the_runs_of_a_study(name):
    for point, expected, found in studied(name):
        assert expected.bytes == pytest.approx(found.bytes, rel=0.02), point
        # They were measured while norms added the biases of the matmuls in front of them. Now the matmuls do, which the
        # plan counts as 0.5 % more: 5 % before that, for one run.
        assert expected.seconds == pytest.approx(found.seconds, rel=0.055), point


TIMED = [case for case in CASES if case["case"] != "micro batch 4"]


@pytest.mark.parametrize("case", TIMED, ids=named)
def test_the_step_agrees_with_an_h200(case):
    # Most are within 3 %. Furthest off is float32, whose matmuls reach more of their rate than those in 16 bits do.
    found = expected(case)
    assert found.seconds == pytest.approx(case["seconds"], rel=0.2)
    assert found.floor < min(case["step_seconds"])


def test_most_steps_agree_closely():
    errors = [abs(expected(case).seconds / case["seconds"] - 1) for case in TIMED]
    assert statistics.median(errors) < 0.05
    assert sum(error < 0.1 for error in errors) >= 0.8 * len(errors)


GROUPS = {f"{case['commit']} {case['group']}": [] for case in CASES}
for _case in CASES:
    GROUPS[f"{_case['commit']} {_case['group']}"].append(_case)


@pytest.mark.parametrize("group", [name for name, cases in GROUPS.items() if len(cases) >= 5])
def test_configurations_come_in_the_measured_order(group):
    assert tau([(expected(case).seconds, case["seconds"]) for case in GROUPS[group]]) >= 0.7


def test_all_of_them_together_do_too():
    distinct = [case for cases in GROUPS.values() for case in cases]
    assert tau([(expected(case).seconds, case["seconds"]) for case in distinct]) >= 0.85


def test_the_ten_most_different_come_in_the_measured_order():
    """Of one model, chosen one after the other to be as far as can be from those that are there."""
    cases = max(GROUPS.values(), key=len)

    def apart(a, b):
        levers = [set(case["overrides"]) for case in (a, b)]
        return len(levers[0] ^ levers[1]) + abs(a["seconds"] / b["seconds"] - 1)

    chosen = [cases[0]]
    while len(chosen) < 10:
        rest = [case for case in cases if case not in chosen]
        chosen.append(max(rest, key=lambda case: min(apart(case, other) for other in chosen)))
    assert tau([(expected(case).seconds, case["seconds"]) for case in chosen]) >= 0.7


@st.composite
def configurations(draw):
    batch, precision = draw(st.sampled_from((2, 8))), draw(st.sampled_from(PRECISIONS))
    model = Model(
        width=draw(st.sampled_from((64, 768))), layers=draw(st.sampled_from((4, 12))), heads=4,
        vocabulary=draw(st.sampled_from((256, 50368))), sequence=draw(st.sampled_from((128, 1024))),
        gpt_block=draw(st.sampled_from(("standard", "optimized"))), dropout=draw(st.sampled_from((0.0, 0.1))),
        loss=draw(st.sampled_from(("plain", "fused", "linear_fused"))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        mlp=draw(st.sampled_from(("auto", "recompute"))), attention=draw(st.sampled_from(("auto", "flash", "math"))),
    )  # fmt: skip
    return Train(
        model=model, global_batch=batch, micro_batch=draw(st.sampled_from((batch, 1))), precision=precision,
        compile=draw(st.sampled_from(("none", "default"))), cuda_graphs=draw(st.booleans()),
        optimizer=Optimizer(name=draw(st.sampled_from(OPTIMIZERS))), threads=draw(st.sampled_from((0, 1, 4))),
    )  # fmt: skip


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(run=configurations(), machine=st.sampled_from((H200, XEON)))
def test_parts_add_up_for_every_run_and_machine(run, machine):
    assume(machine is H200 or (not run.cuda_graphs and run.precision != "tf32"))
    found = predict(run, machine)
    assert found.floor <= found.seconds == pytest.approx(sum(found.parts.values()), rel=1e-12)
    assert min(found.parts.values()) >= 0 and min(found.memory.values()) > 0
    inside = sum(value for name, value in found.memory.items() if name not in BEYOND)
    assert found.bytes == pytest.approx(inside, rel=1e-12)
    assert set(BEYOND) <= set(found.memory) if machine is H200 else found.bytes > PROCESS_BYTES


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["bf16", "bf16_kahan", "bf16_stochastic"])
def test_states_are_as_many_bytes_as_optimizers_keep(optimizer, precision):
    model = Model(width=512, layers=1, heads=4, vocabulary=4096)
    dtype, rounding = optimizers.PRECISIONS[precision]
    with torch.device("meta"):
        parameters = [parameter.to(dtype) for parameter in GPT(GPTConfig(512, 1, 4, 4096, model.sequence)).parameters()]
    states = [new_state(parameter, *optimizers.KINDS[optimizer], rounding) for parameter in parameters]
    weights = sum(parameter.nbytes for parameter in parameters)
    kept = sum(value.nbytes for state in states for value in state.values())
    found = predict(Train(model=model, optimizer=Optimizer(name=optimizer), precision=precision), H200)
    assert found.memory["weights"] == weights
    # What Adafactor keeps is next to nothing, and the plan has it roughly.
    assert found.memory["optimizer"] == pytest.approx(kept, abs=0.03 * (weights if optimizer == "adafactor" else kept))


def test_a_budget_lies_between_what_it_chooses_from():
    def of(**options):
        shape = {"width": 1024, "layers": 24, "heads": 16, "vocabulary": 50368, "sequence": 2048}
        return predict(Train(model=Model(**shape, gpt_block="optimized", **options), micro_batch=16), H200)

    none, selective, budget = of(), of(recompute="selective"), of(recompute="budget", recompute_budget=20.0)
    assert selective.bytes < budget.bytes < none.bytes
    assert none.seconds < budget.seconds < selective.seconds


def test_bfloat16_is_worth_what_the_probe_says_it_is():
    run = Train(model=Model(width=512, layers=8, heads=8, sequence=512), micro_batch=8)

    def seconds(precision, bf16):
        machine = {**XEON, "flops": {"fp32": 1e11, "bf16": bf16}}
        return predict(dataclasses.replace(run, precision=precision), machine).seconds

    assert seconds("bf16", 1e12) < seconds("fp32", 1e12)
    assert seconds("bf16", 5e10) > seconds("fp32", 5e10)  # a CPU without the instructions for it


def test_fewer_threads_take_longer():
    run = Train(model=Model(width=256), micro_batch=8)
    seconds = [predict(dataclasses.replace(run, threads=count), XEON).seconds for count in (0, 4, 2, 1)]
    assert seconds[0] == seconds[1] < seconds[2] < seconds[3]
    assert predict(dataclasses.replace(run, threads=1), H200) == predict(run, H200)


def test_a_batch_that_does_not_divide_is_one_sentence():
    with pytest.raises(UserError, match="global batch 5"):
        predict(Train(global_batch=5, micro_batch=2), H200)


def of_bytes(count):
    return Prediction(1.0, 1.0, {}, count, {"activations": count, "fragmentation": 2**40, "CUDA context": 2**30})


@pytest.mark.parametrize(
    ("gib", "cap", "why"),
    [
        (8, None, None), (9.2, None, None),  # nearly: torch may still find the room
        (12, None, "It needs about 14.0 GB, and the GPU has 10.7."), (4, 4 * 2**30, None),
        (5, 4 * 2**30, "It needs about 5.4 GB, and the cap is 4.3."), (5, 0, None),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_told(gib, cap, why):
    assert misfit(of_bytes(gib * 2**30), {"memory_bytes": 10 * 2**30, "device": "cuda"}, cap) == why


def test_what_fits_on_an_h200_is_not_discarded():
    assert all(misfit(expected(case), H200) is None for case in CASES)
    large = next(case for case in CASES if case["run"].model.width == 2048)["run"]
    over = dataclasses.replace(large, micro_batch=64, global_batch=64)
    assert "the GPU has 150.1" in misfit(predict(over, H200), H200)
