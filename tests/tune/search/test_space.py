import dataclasses
import functools
import itertools
import os
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.errors import UserError
from tilewright.plan import gpt
from tilewright.plan.lever import NUMERICS, Lever
from tilewright.train.fields import fields
from tilewright.train.load_config import read
from tilewright.train.schema import PRECISIONS, Train
from tilewright.tune.search.space import Space, label, open_space
from tilewright.tune.store.record import key

LEVERS = {name: field.lever for name, field in fields().items() if field.lever is not None}


@functools.cache
def whole(device="cuda", numerics="rule"):
    """Everything there is to try, on a machine of several cores."""
    with mock.patch.object(os, "cpu_count", lambda: 8):
        return open_space(read(None, ["global_batch=16"]), device=device, numerics=numerics)


points = st.builds(dict, st.fixed_dictionaries({name: st.sampled_from(v) for name, v in whole().levers.items()}))


# A lever is declared once


@pytest.fixture
def declared():
    """Fields are found once a process; look again after a declaration has changed, and when it is as it was."""
    fields.cache_clear()
    yield
    fields.cache_clear()


def test_every_lever_is_in_the_space_by_itself():
    found = whole("cuda").levers.keys() | whole("cpu").levers.keys()
    silent = {name for name, lever in LEVERS.items() if lever.values == ()}  # for who knows which number
    theirs = open_space(read(None, []), device="cpu", of_any_model=True).levers.keys()
    assert found | theirs == LEVERS.keys() - silent and theirs - found == {"rules"}
    assert {
        "model.gpt_block",
        "model.loss",
        "model.attention",
        "model.mlp",
        "model.recompute",
        "model.residual",
    } <= found
    assert {"precision", "compile", "cuda_graphs", "micro_batch", "optimizer.name", "threads"} <= found


def test_a_new_choice_of_a_lever_appears_without_a_change_of_the_search(monkeypatch, declared):
    monkeypatch.setitem(gpt.CHOICES, "gpt_block", (*gpt.GPT_BLOCKS, "tile_synchronised"))
    found = open_space(read(None, []), device="cpu")
    assert found.levers["model.gpt_block"] == ("standard", "optimized", "tile_synchronised")
    assert found.at({"model.gpt_block": "tile_synchronised"}).model.gpt_block == "tile_synchronised"


def test_a_new_attention_of_one_device_appears_there_alone(monkeypatch, declared):
    monkeypatch.setitem(gpt.CHOICES, "attention", (*gpt.CHOICES["attention"], "tiles"))
    old = gpt.LEVERS["attention"]
    new = dataclasses.replace(old, values=("auto", "flash", "tiles"), devices={**old.devices, "tiles": "cuda"})
    monkeypatch.setitem(gpt.LEVERS, "attention", new)
    assert "tiles" in open_space(read(None, []), device="cuda").levers["model.attention"]
    assert "tiles" not in open_space(read(None, []), device="cpu").levers["model.attention"]


def test_a_field_that_becomes_a_lever_appears(monkeypatch, declared):
    assert "model.norm" not in open_space(read(None, []), device="cpu", numerics="rule").levers
    fields.cache_clear()
    monkeypatch.setitem(gpt.LEVERS, "norm", Lever(numerics={"rms": "rule"}))
    assert open_space(read(None, []), device="cpu", numerics="rule").levers["model.norm"] == ("layer", "rms")
    assert "model.norm" not in open_space(read(None, []), device="cpu", numerics="state").levers


# What is open


def test_the_run_as_given_comes_first_and_is_the_origin():
    given = read(None, ["global_batch=12", "micro_batch=3"])
    found = open_space(given, device="cuda", search=["all"])
    assert found.levers["micro_batch"] == (3, 12, 6)
    assert found.at(found.baseline) == found.start
    assert (found.start.precision, found.start.global_batch, found.start.micro_batch) == ("bf16", 12, 3)
    assert open_space(given, device="cpu").start.precision == "fp32"


def test_no_lever_has_one_value_or_the_same_twice():
    for values in whole().levers.values():
        assert len(values) == len(set(values)) > 1


SETTABLE = {
    "model.gpt_block": "optimized", "model.loss": "fused", "model.recompute": "full", "compile": "default",
    "precision": "fp32", "optimizer.name": "sgd", "cuda_graphs": "false", "micro_batch": "4",
}  # fmt: skip


@given(st.sets(st.sampled_from(sorted(SETTABLE)), min_size=1), st.data())
@settings(max_examples=25, deadline=None)
def test_what_was_set_stays_and_search_opens_it(names, data):
    given = read(None, ["global_batch=8", *(f"{name}={SETTABLE[name]}" for name in sorted(names))])
    found = open_space(given, device="cuda", numerics="rule")
    assert not names & found.levers.keys()
    assert found.levers.keys() | names == whole().levers.keys()
    reopened = data.draw(st.sets(st.sampled_from(sorted(names))))
    again = open_space(given, device="cuda", numerics="rule", search=reopened)
    assert again.levers.keys() - found.levers.keys() == reopened
    assert open_space(given, device="cuda", numerics="rule", search=["all"]).levers.keys() == whole().levers.keys()
    for name in names:  # wherever the search goes, they are as set
        for _, point in found.neighbours(found.baseline):
            assert str(_of(found.at(point), name)).lower() == SETTABLE[name]


def _of(run, name):
    return functools.reduce(getattr, name.split("."), run)


def test_a_default_that_was_written_down_is_set_too():
    assert "model.loss" not in open_space(read(None, ["model.loss=plain"]), device="cpu").levers


def test_a_preset_fixes_no_lever():
    assert (
        open_space(read(None, ["model.preset=125m"]), device="cpu").levers.keys()
        == whole("cpu", "rounding").levers.keys()
    )


def test_a_configuration_that_fixes_every_lever_is_one_sentence():
    given = read(None, [f"{name}={str(_of(Train(), name)).lower()}" for name in LEVERS])
    with pytest.raises(UserError, match="fixes every lever.*--search all") as caught:
        open_space(given, device="cpu")
    assert str(caught.value).count(". ") == 0
    assert open_space(given, device="cpu", search=["compile"]).levers.keys() == {"compile"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"numerics": "exact"}, "numerics is 'exact'; choose same, rounding, state, rule"),
        ({"precision_floor": "fp8"}, "precision floor is 'fp8'; choose fp32"),
        ({"precision_floor": "auto"}, "precision floor is 'auto'"),
        ({"search": ["model.width"]}, "'model.width' is no lever; choose all, or "),
    ],
)
def test_a_word_that_is_none_is_refused_in_a_sentence(options, words):
    with pytest.raises(UserError, match=words):
        open_space(read(None, []), device="cpu", **options)


def test_a_users_own_model_has_only_the_levers_that_need_to_know_nothing_of_it():
    found = open_space(read(None, ["global_batch=4"]), device="cuda", of_any_model=True).levers
    assert found.keys() == {"precision", "compile", "rules", "cuda_graphs", "micro_batch"}


# What the numbers allow


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("numerics", NUMERICS)
def test_no_value_moves_the_numbers_further_than_allowed(device, numerics):
    words = list(NUMERICS)
    found = whole(device, numerics)
    for name, (own, *others) in found.levers.items():
        assert LEVERS[name].runs_on(own, device)
        for value in others:
            assert words.index(LEVERS[name].moves(value)) <= words.index(numerics), (name, value)
            assert LEVERS[name].runs_on(value, device), (name, value)


def test_each_level_of_numerics_opens_more():
    spaces = [whole("cpu", numerics).levers for numerics in NUMERICS]
    for less, more in itertools.pairwise(spaces):
        assert less != more and all(set(values) <= set(more[name]) for name, values in less.items())
    same, rounding, state, rule = spaces
    assert "precision" not in same and "optimizer.name" not in rounding
    assert set(rounding["precision"]) == {"fp32", "bf16"}
    assert "adamw_8bit" in state["optimizer.name"] and "lion" not in state["optimizer.name"]
    assert set(rule["optimizer.name"]) == {"adamw", "adamw_8bit", "adamw_bf16", "lion", "adafactor", "sgd"}


@pytest.mark.parametrize("floor", PRECISIONS[1:])
def test_no_precision_is_below_the_floor(floor):
    given = read(None, ["precision=fp32"])
    found = open_space(given, device="cuda", numerics="rule", precision_floor=floor, search=["precision"])
    allowed = PRECISIONS[1 : PRECISIONS.index(floor) + 1]
    assert found.levers.get("precision", ("fp32",)) == allowed


def test_a_run_that_leaves_its_precision_open_begins_at_the_floor():
    for floor, residuals in (("fp32", None), ("tf32", None), ("bf16", ("auto", "bf16"))):
        found = open_space(read(None, []), device="cuda", precision_floor=floor)
        assert found.baseline.get("precision", found.start.precision) == found.start.precision == floor
        assert set(found.levers.get("precision", ())) <= set(PRECISIONS[1 : PRECISIONS.index(floor) + 1])
        assert found.levers.get("model.residual") == residuals
    assert open_space(read(None, []), device="cpu", precision_floor="bf16").start.precision == "fp32"


@pytest.mark.parametrize("given", ["precision=bf16", "model.residual=bf16"])
def test_what_is_set_below_the_floor_is_refused(given):
    name = given.partition("=")[0]
    with pytest.raises(UserError, match=f"{name} is bf16 and the precision floor tf32; leave one of them out."):
        open_space(read(None, [given]), device="cuda", precision_floor="tf32")


@pytest.mark.parametrize(
    ("given", "own", "expected"),
    [([], 4, (0, 8, 1)), ([], 8, (0, 4, 1)), ([], 3, (0, 8, 4, 1)), (["threads=8"], 8, (8, 4, 1)), ([], 1, (0, 8, 4))],
)
def test_no_threads_are_tried_that_a_run_has_anyway(given, own, expected, monkeypatch):
    """It would be the baseline under another name, and win by chance."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: own)
    space = open_space(read(None, ["global_batch=16", *given]), device="cpu", search=["threads"])
    assert space.levers["threads"] == expected


def test_devices_have_levers_of_their_own():
    gpu, cpu = whole("cuda").levers, whole("cpu").levers
    assert "threads" in cpu and "threads" not in gpu
    assert "cuda_graphs" in gpu and "cuda_graphs" not in cpu
    assert cpu["compile"] == ("none", "default") and "max-autotune" in gpu["compile"]
    assert "tf32" in gpu["precision"] and "tf32" not in cpu["precision"]
    assert gpu["model.attention"] == ("auto", "flash", "cudnn", "efficient")
    assert cpu["model.attention"] == ("auto", "flash")
    own = open_space(
        read(None, ["model.preset=125m", "model.attention=hopper"]), device="cuda", search=["model.attention"]
    )
    assert own.baseline["model.attention"] == "hopper" and "auto" in own.levers["model.attention"]


@given(st.integers(1, 4096))
@settings(deadline=None)
def test_micro_batches_divide_the_global_batch(size):
    found = open_space(read(None, [f"global_batch={size}"]), device="cpu")
    values = found.levers.get("micro_batch", (size,))
    assert size in values and all(size % value == 0 for value in values)


# Points


@given(points)
@settings(deadline=None)
def test_at_and_changes_are_each_others_inverse(point):
    space = whole()
    run = space.at(point)
    assert {name: _of(run, name) for name in point} == point
    moved = space.changes(point)
    assert {**space.baseline, **moved} == point and all(space.baseline[name] != value for name, value in moved.items())
    assert space.at(moved) == run  # what was not moved is the baseline's
    assert Space(run, space.levers, space.device).at(space.baseline) == space.start
    assert (space.label(point) == "baseline") == (not moved) == (run == space.start)


@given(points)
@settings(deadline=None)
def test_only_levers_change(point):
    run, start = (dataclasses.asdict(each) for each in (whole().at(point), whole().start))
    for name in fields():
        if name not in whole().levers:
            section, _, last = name.rpartition(".")
            assert (run[section] if section else run)[last] == (start[section] if section else start)[last]


@given(points, st.randoms())
@settings(deadline=None)
def test_the_key_of_a_point_has_no_order_and_tells_points_apart(point, random):
    items = list(point.items())
    random.shuffle(items)
    assert key(dict(items)) == key(point)
    for name, other in whole().neighbours(point):
        assert key(other) != key(point), name


@given(points)
@settings(deadline=None)
def test_neighbours_are_all_points_that_differ_in_one_lever(point):
    near = list(whole().neighbours(point))
    assert len({key(other) for _, other in near}) == len(near) == sum(len(v) - 1 for v in whole().levers.values())
    for name, other in near:
        assert [each for each in point if point[each] != other[each]] == [name]


def test_a_label_says_what_was_moved():
    assert label({"optimizer.name": "adamw_8bit", "cuda_graphs": False, "model.loss": "fused"}) == (
        "optimizer adamw_8bit, no cuda_graphs, loss fused"
    )


# Levers that do not go together


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        ({"cuda_graphs": True, "compile": "reduce-overhead"}, "records CUDA graphs by itself"),
        ({"model.residual": "bf16", "precision": "fp32"}, "needs matmuls in bfloat16"),
        ({"model.mlp": "tilesync", "precision": "tf32"}, "mlp=tilesync: its kernels take 16 bits"),
        ({"model.mlp": "tilesync"}, None),
        ({"compile": "max-autotune", "micro_batch": 8}, "would overwrite the gradients"),
        ({"compile": "max-autotune"}, None),
        ({"cuda_graphs": True, "micro_batch": 8}, None),
        ({"model.residual": "bf16", "precision": "bf16_kahan"}, None),
    ],
)
def test_levers_that_do_not_go_together_are_refused_with_the_trainers_own_words(moved, words):
    space = whole()
    point = {**space.baseline, "micro_batch": 16, **moved}
    assert words in space.refusal(point) if words else space.refusal(point) is None


@given(points)
@settings(deadline=None)
def test_the_origin_and_what_leaves_the_dangerous_levers_alone_is_never_refused(point):
    dangerous = ["compile", "cuda_graphs", "model.residual"]
    dangerous += ["model.mlp"] * (point["model.mlp"] == "tilesync")  # which takes 16 bits alone
    quiet = {**point, **{name: whole().baseline[name] for name in dangerous}}
    assert whole().refusal(quiet) is None


# The lever itself


@given(st.sampled_from(["a", "b", "c"]), st.sampled_from(["cuda", "cpu"]))
def test_a_value_of_no_device_runs_on_all(value, device):
    assert Lever().runs_on(value, device)
    assert Lever(devices={"a": "cuda"}).runs_on(value, device) == (value != "a" or device == "cuda")
    assert Lever(devices={"": "cpu"}).runs_on(value, device) == (device == "cpu")
    assert Lever(devices={"": "cpu", "a": "cuda"}).runs_on(value, device) == (
        device == ("cuda" if value == "a" else "cpu")
    )


def test_what_a_lever_says_of_numbers_and_devices_are_known_words_and_real_values():
    for name, lever in LEVERS.items():
        values = set(fields()[name].choices or (False, True))
        assert set(lever.numerics) <= values and set(lever.numerics.values()) <= NUMERICS.keys(), name
        assert set(lever.devices) <= values | {""} and set(lever.devices.values()) <= {"cuda", "cpu"}, name
