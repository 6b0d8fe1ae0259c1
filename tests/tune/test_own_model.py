"""A user's own model trains as it is, under every lever it can have; every mistake is one sentence."""

import dataclasses
import functools
import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tilewright
from tilewright.errors import UserError
from tilewright.runtime import dispatch
from tilewright.train.load_config import read
from tilewright.train.schema import OPTIMIZERS, Optimizer, Schedule, Train
from tilewright.train.shown import Shown
from tilewright.tune import study
from tilewright.tune.model_name import arguments_of, check_name, check_source, name_of, with_arguments
from tilewright.tune.own_model import Batch, check_step, draws, load, loss_of, train
from tilewright.tune.report.code import script
from tilewright.tune.search.space import open_space
from tilewright.tune.worker import forkserver
from tune import factories

TESTS = str(Path(__file__).parents[1])
RUN = Train(
    steps=6, device="cpu", precision="fp32", schedule=Schedule(name="constant", warmup=0),
    optimizer=Optimizer(learning_rate=1e-2),
)  # fmt: skip
RATES = {"lion": 1e-3, "sgd": 1e-1, "adafactor": 1e-1}


def metrics(name, *, shown=None, **changes):
    found = []
    own = load(f"tune.factories:{name}", [TESTS])
    train(own, dataclasses.replace(RUN, **changes), Shown(step=lambda one, steps: found.append(one), **(shown or {})))
    return found


def losses(name, **changes):
    return [one.loss for one in metrics(name, **changes)]


@pytest.mark.parametrize(
    ("name", "rows", "unit", "count"),
    [
        ("tensor", 8, "samples", 8), ("pair", 8, "samples", 8), ("named", 8, "samples", 8),
        ("with_attribute", 4, "tokens", 36), ("half", 8, "samples", 8), ("logits_and_loss", 8, "samples", 8),
        ("images", 4, "samples", 4),
    ],
)  # fmt: skip
def test_every_kind_of_batch_and_loss_is_trained(name, rows, unit, count):
    facts = load(f"tune.factories:{name}", [TESTS]).facts()
    assert (facts["global_batch"], facts["unit"], facts["count"], facts["splits"]) == (rows, unit, count, True)
    found = metrics(name)
    assert [one.step for one in found] == [1, 2, 3, 4, 5, 6] and found[-1].samples == 6 * rows
    assert found[-1].loss < found[0].loss
    assert found[0].tokens_per_second == pytest.approx(count / found[0].seconds)


def test_by_position_and_by_name_are_the_same_run():
    assert losses("pair") == losses("named") == losses("pair")


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "bf16_kahan", "bf16_stochastic"])
@pytest.mark.parametrize("name", ["pair", "with_attribute", "half"])
def test_every_precision_learns_about_the_same(name, precision):
    found, plain = losses(name, precision=precision), losses(name)
    assert found == pytest.approx(plain, rel=0.02)
    assert (found == plain) == (precision in ("fp32", "tf32"))  # it was in fewer bits, where it should be


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_lowers_the_loss(name):
    found = losses("pair", optimizer=Optimizer(name=name, learning_rate=RATES.get(name, 1e-2)))
    assert found[-1] < found[0]


@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_micro_batches_learn_what_the_whole_batch_does(micro_batch):
    assert losses("pair", micro_batch=micro_batch) == pytest.approx(losses("pair"), rel=1e-4)


def test_compiled_it_learns_the_same():
    assert losses("named", compile="default") == pytest.approx(losses("named"), rel=1e-4)


def test_threads_are_set_for_the_run_alone():
    seen, before = [], torch.get_num_threads()
    metrics("pair", threads=before + 1, shown={"begin": lambda facts: seen.append(torch.get_num_threads())})
    assert seen == [before + 1] and torch.get_num_threads() == before


def test_a_profile_is_of_its_own_steps_and_says_where_they_went():
    profiles = []
    profiled = losses("pair", steps=12, profile=True, shown={"profile": profiles.append}, micro_batch=4)
    assert profiled == losses("pair", steps=12, micro_batch=4)
    time, memory = profiles[0]["time"], profiles[0]["memory_measured"]
    assert {"forward", "backward", "optimizer"} <= {phase["name"] for phase in time["phases"]}
    bytes_of_weights = sum(p.nbytes for p in load("tune.factories:pair", [TESTS]).module.parameters())
    assert memory["weights"] == memory["gradients"] == bytes_of_weights


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cuda_graphs": True}, "cuda_graphs needs a GPU"),
        ({"micro_batch": 3}, "global batch 8 is not micro batch 3"),
        ({"compile": "max-autotune", "micro_batch": 4}, "one micro batch a step"),
    ],
)
def test_levers_that_do_not_go_together_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        metrics("pair", **changes)


def test_a_batch_that_cannot_be_cut_is_trained_whole():
    facts = load("tune.factories:has_rows_that_differ", [TESTS]).facts()
    assert facts["global_batch"] == 8 and not facts["splits"]
    with pytest.raises(UserError, match=r"\(8, 6\), \(8,\), \(3,\).*set micro_batch=8\."):
        metrics("has_rows_that_differ", micro_batch=4)


@given(st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_slices_are_the_batch(rows, micro, named):
    batch = Batch([torch.rand(rows, 3), torch.arange(rows)], ("a", "b") if named else ())
    pieces = batch.split(micro)
    for index, whole in enumerate(batch.tensors):
        assert torch.equal(torch.cat([piece.tensors[index] for piece in pieces]), whole)
    assert all(piece.names == batch.names and piece.rows <= micro for piece in pieces)
    copy = batch.clone()
    copy.copy_(Batch([torch.zeros(rows, 3), torch.zeros(rows, dtype=torch.long)], batch.names))
    assert not any(tensor.any() for tensor in copy.tensors) and batch.tensors[0].any()


MISTAKES = {
    "tune.factories": "write package.module:factory",
    "tune.factories:": "write package.module:factory",
    ":pair": "write package.module:factory",
    "tune/factories.py:pair": "write package.module:factory",
    "../factories:pair": "write package.module:factory",
    "no_such_package.model:make": "cannot be imported.*No module named 'no_such_package'",
    "tune.factories:paire": "has no 'paire'; did you mean pair?",
    "tune.factories:zzzzzzzz": "has no 'zzzzzzzz'; give the name of a function",
    "tune.factories:nothing_to_call": "nothing_to_call is no function",
    "tune.factories:raises": "raised RuntimeError: no such file; put",
    "tune.factories:leaves": "raised SystemExit: 3",
    "tune.factories:returns_nothing": "returned None; let it return a torch.nn.Module and a batch",
    "tune.factories:returns_one": "returned an object of type Classifier; let it return",
    "tune.factories:returns_them_the_wrong_way_round": r"returned \(tuple, Classifier\); let it return",
    "tune.factories:returns_a_number_as_batch": "returned an object of type int as batch; let it be a tensor",
    "tune.factories:returns_names_of_numbers": "returned a dictionary of Tensor, int as batch",
    "tune.factories:has_no_parameters": "a model without parameters",
    "tune.factories:is_frozen": "a model whose parameters are all frozen; set requires_grad on those to train",
    "tune.factories:is_nowhere": "a model without memory, on the device meta; make it on the CPU or the GPU",
    "tune.factories:has_no_batch": "an empty batch",
    "tune.factories:has_no_rows": "an empty batch",
    "tune.factories:has_its_batch_elsewhere": "a model on cpu and a batch on meta; put both on the same device",
    "tune.factories:is_in_two_places": "a model on cpu and meta; put all of it on one device",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_every_mistake_is_one_sentence(text):
    with pytest.raises(UserError, match=MISTAKES[text]) as refused:
        load(text, [TESTS])
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("returns_logits", r"a loss of shape \(8,\)"),
        ("returns_no_loss", "returned a dictionary of Tensor, which is no loss"),
        ("returns_a_loss_without_gradient", "has no gradient"),
        ("returns_two_losses", "returned 2 numbers with a gradient; let it return one loss"),
        ("returns_logits_in_a_tuple", r"returned \(Tensor, NoneType\), which is no loss"),
    ],
)
def test_what_is_no_loss_is_one_sentence(name, words):
    with pytest.raises(UserError, match=words):
        metrics(name)
    with pytest.raises(UserError, match=words):
        check_step(load(f"tune.factories:{name}", [TESTS]), RUN)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails_at_once", "The model raised RuntimeError: mat1 and mat2 shapes cannot be multiplied .* put that right"),
        ("is_not_a_number_at_once", "loss is not finite in its first training step; check the batch"),
        ("has_rows_that_differ", "raised TypeError: .*takes 3 positional arguments"),
    ],
)
def test_one_step_finds_what_every_trial_would_refuse(name, words):
    with pytest.raises(UserError, match=words) as refused:
        check_step(load(f"tune.factories:{name}", [TESTS]), RUN)
    assert "\n" not in str(refused.value)


def test_a_step_that_runs_out_of_memory_is_no_refusal():
    """A smaller micro batch may fit."""
    check_step(load("tune.factories:starves_in_its_first_step", [TESTS]), RUN)


def test_a_function_is_given_by_itself(tmp_path, monkeypatch):
    assert name_of(factories.pair) == ("tune.factories:pair", [])
    script = tmp_path / "my_script.py"
    script.write_text("def build():\n    return None\n")
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(script.read_text(), str(script), "exec"), main.__dict__)
    assert name_of(main.build) == ("my_script:build", [str(tmp_path)])
    main.__file__ = str(tmp_path / "my-script.py")
    del main.__spec__
    for other in (main.build, lambda: None, factories.Classifier().forward, functools.partial(factories.pair)):
        with pytest.raises(UserError, match="cannot import; define a function at the top of a module"):
            name_of(other)


def test_a_script_that_tunes_when_it_is_imported_is_told_so(tmp_path, monkeypatch):
    (tmp_path / "tunes_itself.py").write_text(
        "import tilewright\ndef build():\n    return None\ntilewright.tune(model=build)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError, match="put the call under `if __name__ == '__main__':`"):
        load("tunes_itself:build", [str(tmp_path)])


def test_a_module_that_raises_while_it_is_imported_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "broken_on_import.py").write_text("1 / 0\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError, match="cannot be imported .ZeroDivisionError: division by zero."):
        load("broken_on_import:make", [str(tmp_path)])


def test_a_loss_may_have_a_dimension_of_one():
    assert loss_of(torch.ones(1, 1, requires_grad=True)).shape == ()


@given(st.text(max_size=20))
def test_any_text_is_a_name_or_a_sentence(text):
    try:
        where, name = check_name(text)
    except UserError as error:
        assert "package.module:factory" in str(error)
    else:
        assert text.startswith(f"{where}:{name}")


def test_a_factory_takes_arguments_behind_a_second_colon():
    text = with_arguments("tune.factories:sized", ["rows=3", "name=a,b:c=d", "flag=true"])
    assert check_name(text) == ("tune.factories", "sized")
    assert arguments_of(text) == {"rows": 3, "name": "a,b:c=d", "flag": True}
    own = load(text)
    assert own.batch.rows == 3


@pytest.mark.parametrize("wrong", ["tune.factories:sized:rows", "tune.factories:sized:rows=1,rows=2", "a:b:=3"])
def test_a_wrong_argument_of_a_factory_is_a_sentence(wrong):
    with pytest.raises(UserError, match="write name=value, each name once"):
        check_name(wrong)


def test_a_factory_that_does_not_take_an_argument_says_so():
    with pytest.raises(UserError, match="unexpected keyword argument 'colour'"):
        load("tune.factories:sized:colour=3")


def test_a_first_step_counts_what_it_asks_for_and_whether_it_draws():
    own = load("tune.factories:sized:rows=4")
    counted = check_step(own, RUN)
    assert counted["matmul"] >= 3 * 2 * 4 * 8 * 8 and counted["bytes"] > 0 and counted["ops"] > 5
    assert not draws(own, torch.device("cpu"))
    assert draws(load("tune.factories:sized:rows=4,p=0.5"), torch.device("cpu"))


def test_rules_are_a_lever_of_a_users_model_and_of_no_gpt():
    theirs = open_space(read(None, []), device="cpu", of_any_model=True)
    assert theirs.levers["rules"] == ("none", "all")
    assert "rules" not in open_space(read(None, []), device="cpu").levers


def test_a_run_with_rules_has_the_losses_of_one_without(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)

    def losses(**levers):
        found = []
        config = dataclasses.replace(RUN, steps=3, precision="fp32", **levers)
        train(load("tune.factories:sized:rows=4"), config, Shown(step=lambda metrics, _: found.append(metrics.loss)))
        return found

    assert losses(rules="all") == pytest.approx(losses(), rel=1e-5)


def test_the_answer_is_a_script_that_runs_the_factory_and_holds_no_text_of_others(tmp_path, monkeypatch, capsys):
    text = script("tune.factories:sized:rows=4", {"rules": "all", "micro_batch": 2, "precision": "fp32"}, "cpu")
    names = {"__name__": "best"}
    exec(compile(text, "best.py", "exec"), names)
    names["run"](names["MODEL"], names["LEVERS"], steps=2)
    assert "step 2: loss" in capsys.readouterr().out and "report = tilewright.optimize(model)" in text
    hostile = script('a:b:x="""\nimport os', {"threads": 0}, "cpu")
    assert compile(hostile, "best.py", "exec") and "\nimport os" not in hostile


def test_a_study_takes_the_function_itself(tmp_path, monkeypatch):
    """With a real probe, which imports the function in another process."""
    begun = []
    monkeypatch.setattr(study, "run", lambda settings, shown: begun.append(settings))
    try:
        tilewright.tune("device=cpu", model=factories.logits_and_loss, out=tmp_path, budget="75s")
    finally:
        forkserver.stop()
    settings = begun[0]
    assert settings.own_model == "tune.factories:logits_and_loss"
    assert settings.machine["own_model"]["count"] == 8 and settings.space.start.global_batch == 8
    assert settings.budget < 75.0 and settings.on_gpu["rows"] == []  # the probe's time is the budget's


def test_the_model_on_the_first_page_of_the_readme_runs(tmp_path, monkeypatch):
    text = (Path(TESTS).parent / "README.md").read_text(encoding="utf-8")
    block = next(part for part in text.split("```python\n")[1:] if "def build" in part).split("```")[0]
    (tmp_path / "my_model.py").write_text(block)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = load("my_model:build", [str(tmp_path)])
    check_step(own, RUN)
    assert own.facts()["unit"] == "samples"


SOURCES = {
    "mine:buidl": "has no 'buidl'; did you mean build?",
    "mine:zzzzzzzz": "has no 'zzzzzzzz'; give the name of a function",
    "mine:build:lauers=2": "The factory mine:build takes no argument 'lauers'; did you mean layers?",
    "mine:plain:rows=2": "takes no argument 'rows'; it takes none",
    "mine:needs": "The factory mine:needs needs 'rows'; give --model-arg rows=VALUE",
    "mind:build": "No module named 'mind'; did you mean mine..; check",
    "folder/mine.py:build": "write package.module:factory, such as folder.mine:build",
    "mine.py:build": "such as mine:build",
    "no_such_thing:make": "cannot be imported .ModuleNotFoundError: No module named 'no_such_thing'.; check its name",
    "package.nothing:make": "No module named 'package.nothing'",
    "mine.build:make": "No module named 'mine.build'",
    "broken:make": "broken cannot be imported .SyntaxError: .*, line 2.; check",
}


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Modules that write a file when they are imported."""
    ran = "open('ran', 'w')\n"
    build = "def build(layers=1, *, name=''):\n    pass\ndef plain():\n    pass\ndef needs(rows):\n    pass\n"
    (tmp_path / "mine.py").write_text(f"{ran}{build}if True:\n    other = build\n")
    (tmp_path / "broken.py").write_text("import torch\ndef make(:\n")
    (tmp_path / "unknown.py").write_text(f"{ran}from torch import *\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text(ran)
    (tmp_path / "package/model.py").write_text(f"{ran}class Made:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    yield [str(tmp_path)]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", SOURCES)
def test_a_model_that_cannot_be_there_is_refused_without_running_anything(sources, text):
    with pytest.raises(UserError, match=SOURCES[text]) as refused:
        check_source(text, sources)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "mine:build:layers=2", "mine:other", "mine:needs:rows=1", "unknown:make", "package.model:Made",
        "package:anything", "tune.factories:sized:rows=3",
        "tilewright.optimize.huggingface:build:folder=x,batch=2", "math:sin",
    ],
)  # fmt: skip
def test_a_model_that_may_be_there_is_left_to_its_import(sources, text):
    if text == "package:anything":
        Path("package/__init__.py").write_text("def __getattr__(name):\n    return None\n")
    check_source(text, sources)
