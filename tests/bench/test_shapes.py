import json
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import drawn_ops
from tilewright.bench import compare, drawing, shapes, verdict, workers
from tilewright.bench.protocol import Ask
from tilewright.errors import UserError
from tilewright.measure.ceilings import Ceilings
from tilewright.plan.cost import Cost

TABLE = "bench.drawn_ops:OPS"


def run(groups, peers=("eager",), table=TABLE, **ask):
    said, saved = [], []
    asked = Ask(said.append, lambda result: saved.append(json.dumps(result)), **ask)
    result = compare.compare("shapes", table, groups, asked, device="cpu", peers=peers)
    assert json.loads(saved[-1]) == result
    return result, said


@pytest.mark.parametrize("name", shapes.OPS)
def test_a_seed_draws_the_same_cases_and_another_others(name):
    first = drawing.draw(shapes.OPS, [name], 1, 200, drawing.BENCH)
    assert first == drawing.draw(shapes.OPS, [name], 1, 200, drawing.BENCH)
    assert first != drawing.draw(shapes.OPS, [name], 2, 200, drawing.BENCH)
    # What is drawn for one op does not depend on which others are.
    assert first == [g for g in drawing.draw(shapes.OPS, list(shapes.OPS), 1, 200, drawing.BENCH) if g[0]["op"] == name]


@pytest.mark.parametrize("name", shapes.OPS)
def test_the_drawn_cases_are_many_of_few_shapes_in_bounds_and_mostly_odd(name):
    op = shapes.OPS[name]
    groups = drawing.draw(shapes.OPS, [name], 0, 200, drawing.BENCH)
    cases = [case for group in groups for case in group]
    assert len(cases) == 200 and len(groups) <= 60
    for group in groups:
        rows = [case["rows"] for case in group]
        assert rows == sorted(set(rows), reverse=True)
        assert len({json.dumps({**case, "rows": 0}) for case in group}) == 1
    costs = [(op.drawn_by or op.cost)(case) for case in cases]
    moved = [cost.bytes for cost in costs]
    assert max(moved) <= op.size * 1e9 and max(cost.flops for cost in costs) <= op.size * 3e12
    assert max(moved) > 3e8 and min(moved) < 1e7
    assert sum(case["dtype"] == "bf16" for case in cases) > 80
    assert sum(op.neighbour(case) is not None for case in cases) > 60


def test_every_norm_with_and_without_dropout_and_the_vocabularies_that_models_have_are_drawn():
    cases = [c for g in drawing.draw(shapes.OPS, list(shapes.OPS), 0, 200, drawing.BENCH) for c in g]
    norms = {(c["norm"], c["p"]) for c in cases if c["op"] == "dropout_add_norm"}
    assert norms == {(norm, p) for norm in ("layer", "rms") for p in (0.0, 0.1)}
    assert {c["rows"] for c in cases} & {1}
    for name in ("cross_entropy", "linear_cross_entropy"):
        assert {50257, 100277, 262208} <= {c["vocabulary"] for c in cases if c["op"] == name}


@pytest.mark.parametrize("name", shapes.OPS)
def test_ours_and_eager_are_the_same_function(name):
    op = shapes.OPS[name]
    rng = random.Random(3)
    for _ in range(3):
        shape = {**op.draw(rng, drawing.TINY), "dtype": "fp32", **({"p": 0.0} if name == "dropout_add_norm" else {})}
        case = {**shape, "rows": rng.randint(2, 9)}
        inputs = op.make(case, "cpu")
        for ours, eager in zip(*(f(shape, *inputs) for f in (op.ours, op.eager)), strict=True) if name in (
            "dropout_add_norm", "rope"
        ) else [(op.ours(shape, *inputs), op.eager(shape, *inputs))]:  # fmt: skip
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
        beside = op.neighbour(case)
        assert beside is None or op.cost(beside).bytes > op.cost(case).bytes


def test_a_neighbour_is_the_next_round_shape_and_a_round_shape_has_none():
    case = {"op": "dropout_add_norm", "dtype": "bf16", "width": 769, "norm": "rms", "p": 0.1, "rows": 3}
    assert shapes.OPS["dropout_add_norm"].neighbour(case) == {**case, "width": 896}
    assert shapes.OPS["dropout_add_norm"].neighbour({**case, "width": 896}) is None


def test_an_error_a_crash_and_a_hang_are_errors_of_their_cases_and_the_others_are_measured(monkeypatch):
    run_groups = workers.run_groups
    monkeypatch.setattr(
        workers, "run_groups", lambda *args, **options: run_groups(*args, **{**options, "limit_seconds": 15.0})
    )
    groups = [drawn_ops.cases("faulty", 8, (6, 5, 4, 3, 2, 1)), drawn_ops.cases("plain", 5, (4, 2))]
    result, said = run(groups)
    by_rows = {each["case"]["rows"]: each for each in result["cases"] if each["case"]["op"] == "faulty"}
    assert set(by_rows) == {1, 2, 3, 4, 5, 6} and not result["not_reached"]
    assert by_rows[2]["errors"] == {"tilewright": "ValueError: no such kernel"} and "eager" in by_rows[2]["device"]
    assert by_rows[3]["errors"] == {"tilewright": "the process ended with exit code 7 at tilewright"}
    assert by_rows[5]["errors"] == {"tilewright": "took more than 15 s at tilewright"}
    for rows in (1, 4, 6):
        assert set(by_rows[rows]["device"]) == {"tilewright", "eager"} and "errors" not in by_rows[rows]
    assert sum("neighbour" in each["device"] for each in result["cases"] if each["case"]["op"] == "plain") == 2
    text = "\n".join(said)
    assert "faulty fp32 width=8 rows=3: the process ended with exit code 7" in text
    assert "faulty: 6 cases, 3 failed" in text and "plain: 2 cases, 0 failed" in text


def test_a_slower_op_is_behind_and_is_below_its_round_neighbour():
    result, _ = run([drawn_ops.cases("slow", 7, (4,)), drawn_ops.cases("plain", 7, (4,))])
    summary = result["summary"]["slow"]
    assert [each["case"] for each in summary["device"]["behind"]] == ["slow fp32 width=7 rows=4"]
    assert summary["device"]["worst"]["ratio"] > 10
    assert [each["case"] for each in summary["neighbour"]["below"]] == ["slow fp32 width=7 rows=4"]
    assert next(each for each in result["cases"] if each["case"]["op"] == "slow")["long"]


def test_a_budget_ends_it_names_what_is_missing_and_resume_does_the_rest(monkeypatch):
    run_groups, clock, ahead = workers.run_groups, time.monotonic, [0.0]

    def run_three(*arguments, report, **options):
        """The time is over with the third case."""
        seen = []

        def note(case, figures):
            report(case, figures)
            seen.append(case)
            ahead[0] = 1e6 if len(seen) == 3 else ahead[0]

        return run_groups(*arguments, report=note, **options)

    groups = [drawn_ops.cases("plain", width, (2,)) for width in range(1, 9)]
    with monkeypatch.context() as patch:
        patch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: clock() + ahead[0]))
        patch.setattr(workers, "run_groups", run_three)
        result, said = run(groups, budget=1e5)
    assert [each["case"]["width"] for each in result["cases"]] == [1, 2, 3]
    assert result["not_reached"] == [f"plain fp32 width={width} rows=2" for width in range(4, 9)]
    assert "5 cases were not reached within the budget; the first: plain fp32 width=4 rows=2" in said
    again, _ = run(groups, previous=json.loads(json.dumps(result)))
    assert len(again["cases"]) == 8 and again["cases"][:3] == result["cases"] and not again["not_reached"]
    with pytest.raises(UserError, match="has seed 0, and this run 1"):
        run(groups, previous=result, seed=1)


def measured_before(*groups):
    """A result of these groups, of another commit."""
    result, _ = run(list(groups))
    result["machine"]["commit"] = "old"
    for each in result["cases"]:
        each["commit"] = "old"
    return json.loads(json.dumps(result))


def commits(result):
    return [(each["case"]["op"], each["case"]["rows"], each["commit"]) for each in result["cases"]]


def test_an_op_is_measured_anew_after_a_change_and_the_others_keep_their_commit():
    kept, anew = drawn_ops.cases("slow", 8, (4,)), drawn_ops.cases("plain", 8, (4, 2))
    before = measured_before(kept, anew)
    with pytest.raises(UserError, match="has commit 'old'.*name the --ops to measure"):
        run([kept, anew], previous=before)
    after, _ = run([anew], ops="plain", again="all", previous=before)
    assert commits(after) == [("slow", 4, "old"), ("plain", 4, None), ("plain", 2, None)]
    assert after["summary"]["slow"]["commits"] == ["old"] and after["summary"]["plain"]["commits"] == []
    with pytest.raises(UserError, match="--again is 'some'; choose one of device, behind, all"):
        run([anew], ops="plain", again="some", previous=before)


def test_resume_measures_what_lacks_and_again_what_was_behind(monkeypatch):
    slow, plain, more = (
        drawn_ops.cases("slow", 8, (4,)),
        drawn_ops.cases("plain", 8, (4,)),
        drawn_ops.cases("plain", 8, (2,)),
    )
    before = measured_before(slow, plain)
    for each in before["cases"]:  # whatever a busy machine measured
        ours = 2.0 if each["case"]["op"] == "slow" else 1.0
        each["device"] = {
            name: {"median": ours if name == "tilewright" else 1.0, "spread": 0.0} for name in each["device"]
        }
        each.pop("wall", None)
    monkeypatch.setattr(compare, "_fact", lambda result, name: "old" if result is before else "new")
    after, _ = run([slow, plain, more], ops="slow,plain", previous=json.loads(json.dumps(before)))
    assert commits(after) == [("slow", 4, "old"), ("plain", 4, "old"), ("plain", 2, "new")]
    assert after["summary"]["plain"]["commits"] == ["old (1)", "new (1)"] and not after["not_reached"]
    after, _ = run([slow, plain], ops="slow,plain", again="device", previous=json.loads(json.dumps(before)))
    assert commits(after) == [("slow", 4, "new"), ("plain", 4, "old")]


@pytest.mark.parametrize("name", shapes.OPS)
def test_resuming_the_recorded_run_measures_no_more_than_what_it_lacks(name):
    """A draw goes by the cost of a call: where its formula changes, `drawn_by` keeps the old, and the cases."""
    recorded = json.loads((Path(__file__).parents[2] / "results" / "h200" / "shapes.json").read_text())
    groups = drawing.draw(shapes.OPS, [name], recorded["seed"], 200, drawing.BENCH)
    drawn = [case for group in groups for case in group]
    assert all(each["case"] in drawn for each in recorded["cases"] if each["case"]["op"] == name)
    there = {json.dumps(each["case"], sort_keys=True) for each in recorded["cases"]}
    lacking = [case for case in drawn if json.dumps(case, sort_keys=True) not in there]
    result = {"machine": recorded["machine"], "seed": recorded["seed"], "cases": []}
    ask = Ask(print, print, ops=name, previous=recorded)
    assert [case for group in compare._left_to_do(groups, ask, result) for case in group] == lacking
    assert len(lacking) <= 3 and len(result["cases"]) == len(recorded["cases"])


def test_torch_compile_runs_beside_ours_with_its_rows_dynamic():
    result, _ = run([drawn_ops.cases("plain", 8, (6, 4, 3))], peers=("eager", "compile"))
    for each in result["cases"]:
        assert set(each["device"]) == {"tilewright", "eager", "compile"}, each


def test_every_op_is_measured_at_tiny_sizes(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # its kernels take seconds a call; plain PyTorch does not
    groups = drawing.draw(shapes.OPS, list(shapes.OPS), 5, 1, drawing.TINY)
    result, _ = run(groups, table="tilewright.bench.shapes:OPS")
    assert {each["case"]["op"] for each in result["cases"]} == set(shapes.OPS)
    for each in result["cases"]:
        assert "errors" not in each and {"tilewright", "eager"} <= set(each["device"]), each


def figures(ours, eager, spread=0.01, clock="device", **more):
    row = lambda median: {"median": median, "spread": spread}  # noqa: E731
    marks = dict.fromkeys(verdict.CLOCKS.values(), True)
    return {"case": {"op": "a", "rows": 1}, clock: {"tilewright": row(ours), "eager": row(eager)}, **marks, **more}


def test_a_difference_within_the_spread_is_a_tie():
    level = [figures(1.0, 1.0, spread=0.002)] * 19
    assert not verdict.summarise([*level, figures(1.008, 1.0, spread=0.01)])["a"]["device"]["behind"]
    behind = verdict.summarise([*level, figures(1.05, 1.0, spread=0.01)])["a"]["device"]["behind"]
    assert behind == [{"case": "a rows=1", "ratio": 1.05}]
    # One clock's noise is not the other's.
    noisy = [figures(1.0, 1.0, spread=0.5, clock="wall")] * 19
    assert verdict.summarise([*noisy, figures(1.05, 1.0, spread=0.01)])["a"]["device"]["behind"] == behind


def test_a_case_in_which_all_wait_for_the_host_is_judged_by_wall_time_alone():
    wall = {name: {"median": 3.0, "spread": 0.0} for name in ("tilewright", "eager")}
    summary = verdict.summarise([figures(2.0, 1.0, wall=wall)])["a"]
    assert not summary["device"]["cases"] and summary["wall"]["cases"] == 1 and not summary["wall"]["behind"]
    wall["tilewright"] = {"median": 2.1, "spread": 0.0}  # which the device takes
    summary = verdict.summarise([figures(2.0, 1.0, wall=wall)])["a"]
    assert len(summary["device"]["behind"]) == 1


def test_a_time_below_the_limit_is_an_error_and_what_the_l2_holds_is_no_part_of_the_limit():
    op = drawn_ops.OPS["plain"]
    case = {"op": "plain", "dtype": "fp32", "width": 7, "rows": 1000}
    assert op.cost(case) == Cost(0, 28000, 28000)
    measured = {"device": {name: {"median": 1e-3, "spread": 0.0} for name in ("tilewright", "eager", "neighbour")}}
    verdict.add_shares(case, measured, op, Ceilings(1e6, 1e6), 0)
    assert set(measured["errors"]) == {"tilewright", "eager", "neighbour"} and not measured["device"]
    measured = {"device": {name: {"median": 1e-3, "spread": 0.0} for name in ("tilewright", "neighbour")}}
    verdict.add_shares(case, measured, op, Ceilings(1e6, 1e6), 32000)
    assert "errors" not in measured
    assert measured["throughput"] == 0.875  # 7 columns in the time of 8
    assert "latency_bound" not in measured


def test_what_cannot_be_asked_is_one_sentence():
    def ask(**options):
        return shapes.run(Ask(print, print, **options))

    with pytest.raises(UserError, match="no op 'softmax' among the shapes; choose from dropout_add_norm"):
        ask(ops="rope,softmax")
    with pytest.raises(UserError, match="--cases is 0"):
        ask(cases=0)
