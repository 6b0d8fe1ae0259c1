"""The call of an optimized model: by other compilers, copies and threads, and what it raises."""

import copy
import gc
import io
import logging
import pickle
import threading
from importlib.metadata import entry_points

import pytest
import torch
from torch import nn

from tilewright.optimize import optimize, optimized, tilewright_backend
from tilewright.runtime import dispatch

WIDTH = 8


class Model(nn.Module):
    """A norm and a layer, and a limit of rows."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, words=""):
        if x.shape[0] > 100:
            raise ValueError(f"too many rows: {x.shape[0]}")
        return self.layer(self.norm(x)) + len(words)


class Lookup(nn.Module):
    """A table in front of a norm."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(4, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        return self.norm(self.table(tokens))


@pytest.fixture(autouse=True)
def _plain_ops(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    yield
    torch._dynamo.reset()


@pytest.fixture
def warned(caplog):
    caplog.set_level(logging.WARNING, "tilewright")
    return lambda: [each.getMessage() for each in caplog.records if each.name == "tilewright"]


def rows(number):
    return torch.randn(number, WIDTH)


def raised(call):
    with pytest.raises(Exception) as found:
        call()
    return type(found.value), str(found.value)


def test_a_compiler_around_it_gets_the_model_as_it_was_and_says_so_once(warned):
    model, x = Model(), rows(3)
    expected = model(x)
    with optimized(model) as report:
        outer = torch.compile(model, backend="eager")
        torch.testing.assert_close(outer(x), expected)
        outer(rows(5)), outer(rows(7))
        assert not report.sites
    assert len([each for each in warned() if "torch.compile was put around" in each]) == 1


def test_a_compiled_function_around_it_may_ask_for_one_graph():
    model, x = Model(), rows(3)
    expected = model(x)
    with optimized(model):
        whole = torch.compile(lambda x: model(x) + 1.0, backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(x) - 1.0, expected)
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_backend_itself_takes_one_whole_graph(dynamic):
    model, x = Model(), rows(3)
    options = {"mode": "none", "rules": "norm"}
    fast = torch.compile(model, backend=tilewright_backend, fullgraph=True, dynamic=dynamic, options=options)
    torch.testing.assert_close(fast(x), model(x))


def test_the_backend_is_known_by_its_name():
    if not list(entry_points(group="torch_dynamo_backends", name="tilewright")):
        pytest.skip("the installed metadata is older than the entry point: pip install -e .")
    model, x = Model(), rows(3)
    fast = torch.compile(model, backend="tilewright", options={"mode": "none"})
    torch.testing.assert_close(fast(x), model(x))


def test_the_backend_refuses_an_option_it_does_not_know():
    fast = torch.compile(Model(), backend=tilewright_backend, options={"rule": "norm"})
    with pytest.raises(Exception, match="the options rule are not known; give rules, mode"):
        fast(rows(3))


def _saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model)), _saved])
def test_a_copy_is_the_plain_model(copied):
    model, x = Model(), rows(3)
    keys = list(model.state_dict())
    with optimized(model) as report:
        expected = model(x)
        again = copied(model)
        assert again._compiled_call_impl is None and type(again) is Model and list(again.state_dict()) == keys
        torch.testing.assert_close(again(x), expected)
        assert len(report.captured.graphs) == 1
        model(x)
        assert model._compiled_call_impl is not None and len(report.captured.graphs) == 1


def test_two_of_a_class_have_their_own_sites_and_weights():
    one, other, x = Model(), Model(), rows(3)
    expected = one(x), other(x)
    first, second = optimize(one), optimize(other, rules=["cross_entropy"])
    torch.testing.assert_close((one(x), other(x)), expected)
    assert [site.rule for site in first.changed] == ["norm"] and not second.changed
    first.undo()
    assert one._compiled_call_impl is None and other._compiled_call_impl is not None


class Dropped(nn.Module):
    """A norm behind a residual add with dropout."""

    def __init__(self, p):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(p)

    def forward(self, x):
        return self.norm(x + self.drop(x.sin()))


def test_what_dynamo_learns_of_one_model_stays_with_it():
    for p in (0.1, 0.2, 0.3, 0.4):
        model = Dropped(p)  # at the place of the one before, which is gone
        with optimized(model) as report:
            model(rows(3))
        assert [site.detail for site in report.changed] == ["layer, eps 1e-05, dropout, residual"], p
        del model, report
        gc.collect()


def test_a_dropout_that_changes_from_call_to_call_leaves_the_norm():
    model = Dropped(0.1)
    with optimized(model) as report:
        for p in (0.1, 0.2, 0.3, 0.4):
            model.drop.p = p
            torch.manual_seed(1)
            assert model(rows(50)).isfinite().all() and not report.captured.failures
        assert all({site.rule for site in sites} == {"add_norm"} for sites in report.captured.graphs)


def test_threads_may_call_it_at_once():
    model, results, errors = Model(), {}, []
    inputs = {number: rows(number) for number in range(2, 8)}
    expected = {number: model(x).sum().item() for number, x in inputs.items()}

    def work(number):
        try:
            with torch.set_grad_enabled(number % 2 == 0):
                for _ in range(3):
                    results[number] = model(inputs[number]).sum().item()
        except Exception as error:
            errors.append(error)

    with optimized(model) as report:
        threads = [threading.Thread(target=work, args=(number,)) for number in inputs]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert not errors and results == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert [site.rule for site in report.changed] == ["norm"]


@pytest.mark.parametrize("is_warm", [False, True])
def test_an_exception_of_the_model_arrives_as_it_is_and_the_next_call_is_captured(is_warm):
    model = Model()
    with optimized(model) as report:
        if is_warm:
            model(rows(3))
        captured = len(report.captured.graphs)
        assert raised(lambda: model(rows(101))) == (ValueError, "too many rows: 101")
        model(rows(5))
        assert len(report.captured.graphs) == captured + 1 and report.changed


@pytest.mark.parametrize(
    "make, wrong, right",
    [
        (Model, (torch.ones(4, WIDTH - 1),), (torch.ones(4, WIDTH),)),
        (Model, (torch.ones(4, WIDTH, dtype=torch.int64),), (torch.ones(4, WIDTH),)),
        (Model, (), (torch.ones(4, WIDTH),)),
        (Lookup, (torch.tensor([9]),), (torch.tensor([1]),)),
        (Lookup, (torch.tensor([1.5]),), (torch.tensor([1]),)),
        (Lookup, ("text",), (torch.tensor([1]),)),
    ],
)
def test_a_wrong_input_raises_what_the_model_raises(make, wrong, right, warned):
    model = make()
    expected = raised(lambda: model(*wrong))
    with optimized(model) as report:
        assert raised(lambda: model(*wrong)) == expected
        assert raised(lambda: model(*wrong)) == expected
        model(*right)
        assert report.changed and not warned()


def test_a_model_that_raises_to_stop_early_is_not_captured_for_ever(monkeypatch):
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    model = Model()
    model.layer.register_forward_hook(stop)
    with optimized(model):
        for _ in range(12):
            with pytest.raises(Stop):
                model(rows(3))
        assert model._compiled_call_impl.attempts <= 8


def test_a_model_that_cannot_be_captured_runs_as_it_was_and_says_so(warned, monkeypatch):
    model, x = Model(), rows(3)
    expected = model(x)

    def fail(*_, **__):
        raise AssertionError("no graph for you")

    with optimized(model) as report:
        monkeypatch.setattr(type(model._compiled_call_impl.backend), "__call__", fail)
        torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(model(x), expected)
        assert "no graph for you" in str(report)
    assert len(warned()) == 1 and "Model runs as it was" in warned()[0]


def test_many_kinds_of_call_are_all_captured():
    model, x = Model(), rows(3)
    with optimized(model) as report:
        for number in range(1, 12):
            model(x, "a" * number)
        assert len(report.captured.graphs) == 11


def test_too_many_kinds_of_call_are_not_silent(monkeypatch):
    model, x, records = Model(), rows(3), []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("torch._dynamo.convert_frame")
    with optimized(model) as report:
        model._compiled_call_impl.settings["recompile_limit"] = 2
        logger.addHandler(handler)
        try:
            for number in range(1, 5):
                torch.testing.assert_close(model(x, "a" * number), model._call_impl(x, "a" * number))
        finally:
            logger.removeHandler(handler)
        assert len(report.captured.graphs) >= 2
    text = "\n".join(each.getMessage() for each in records)
    assert "recompile_limit (2)" in text and "optimized_Model" in text


def test_the_settings_of_dynamo_are_as_they_were():
    before = {name: getattr(torch._dynamo.config, name) for name in ("recompile_limit", "optimize_ddp")}
    model = Model()
    with optimized(model):
        model(rows(3))
        with pytest.raises(ValueError):
            model(rows(101))
    assert before == {name: getattr(torch._dynamo.config, name) for name in before}


def test_undo_leaves_nothing_behind():
    model, x = Model(), rows(3)
    before = set(vars(model))
    report = optimize(model)
    model(x)
    report.undo()
    assert set(vars(model)) == before and model._compiled_call_impl is None
