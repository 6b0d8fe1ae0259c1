"""What `optimize` promises of any model: it is the same model, it says what it did, and it refuses in a sentence."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from tilewright.errors import UserError
from tilewright.optimize import optimize, optimized
from tilewright.optimize.deferred import DeferredTensor
from tilewright.optimize.report import Gain, Step
from tilewright.runtime import dispatch


@pytest.fixture(autouse=True)
def _by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    torch._dynamo.reset()


class _Head(nn.Module):
    """Returns loss and logits, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.norm(x))
        found = {"logits": logits}
        if targets is not None:
            found["loss"] = F.cross_entropy(logits.float().view(-1, 12), targets.view(-1))
        return found


X, TARGETS = torch.randn(2, 3, 8), torch.arange(6).view(2, 3)


def test_the_package_is_the_function() -> None:
    model = _Head()
    report = tilewright.optimize(model)
    model(X)
    assert [site.rule for site in report.changed] == ["norm"] and report.changed[0].where == "norm"


def test_a_model_stays_what_it_was_to_everybody_who_asks(tmp_path: Any) -> None:
    model = _Head()
    keys, forward, plain = list(model.state_dict()), type(model).forward, model(X)["logits"]
    report = optimize(model)
    model(X)
    twin = copy.deepcopy(model)
    assert twin._compiled_call_impl is None and torch.equal(twin(X)["logits"], plain)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert list(model.state_dict()) == keys and type(model).forward is forward and "forward" not in vars(model)
    assert model.train() is model and model.eval() is model and not model.training
    report.undo()
    report.undo()
    assert model._compiled_call_impl is None and torch.equal(model(X)["logits"], plain)


def test_logits_are_there_when_somebody_asks_with_their_gradient() -> None:
    model, plain = _Head(), _Head()
    with optimized(model) as report:
        found = model(X, TARGETS)
        logits = found["logits"]
        assert isinstance(logits, DeferredTensor) and not logits.is_computed
        assert logits.shape == (2, 3, 12) and logits.dtype == torch.float32 and logits.requires_grad
        assert not logits.float().is_computed if isinstance(logits.float(), DeferredTensor) else True
        (found["loss"] + logits.square().mean()).backward()
    expected = plain(X, TARGETS)
    (expected["loss"] + expected["logits"].square().mean()).backward()
    assert logits.is_computed and torch.allclose(logits, expected["logits"], atol=1e-6)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)
    assert "logits deferred" in str(report)


def test_logits_of_weights_that_are_gone_are_an_error_and_no_wrong_number() -> None:
    model = _Head()
    with optimized(model):
        found = model(X, TARGETS)
        found["loss"].backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with pytest.raises(RuntimeError, match=r"read them before optimizer\.step"):
            found["logits"].sum()


def test_without_gradients_logits_are_computed_once() -> None:
    model = _Head()
    with optimized(model) as report, torch.no_grad():
        found = model(X, TARGETS)
    assert type(found["logits"]) is Tensor
    assert any("no gradient to save memory for" in site.declined for site in report.declined)


def test_a_batch_measures_each_rule_and_leaves_nothing_behind() -> None:
    model, twin = _Head(), _Head()
    model.register_buffer("seen", torch.zeros(1))
    state = torch.random.get_rng_state()
    report = optimize(model, {"x": X, "targets": TARGETS})
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(each.grad is None for each in model.parameters())
    assert {gain.rule for gain in report.gains} == {"norm", "linear_cross_entropy"}
    assert report.before is not None and report.after is not None and report.before.seconds > 0
    assert {each.rule for each in report.site_times} == {"norm", "linear_cross_entropy"}
    assert all(each.before > 0 and each.after > 0 and each.count == 1 for each in report.site_times)
    assert "one site, forward and backward" in str(report)
    kept = {gain.rule for gain in report.gains if gain.kept}
    assert set(report.rules) >= kept
    model(X, TARGETS)["loss"].backward()
    twin(X, TARGETS)["loss"].backward()
    assert torch.allclose(model.head.weight.grad, twin.head.weight.grad, atol=1e-6)
    report.undo()
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("slower", [True, False])
def test_what_does_not_gain_is_undone(slower: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: the model with rules takes more, or less."""
    from tilewright.optimize import gain

    def timed(self: Any) -> float:
        has_rules = self.model._compiled_call_impl is not None
        return 2.0 if has_rules == slower else 1.0

    monkeypatch.setattr(gain._Steps, "_timed", timed)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    report = optimize(model, torch.randn(3, 8), rules="norm")
    assert [each.kept for each in report.gains] == [not slower]
    assert (model._compiled_call_impl is None) == slower
    assert ("No rule gains" in str(report)) == slower
    report.undo()


def test_the_report_has_three_forms_and_escapes_what_it_shows() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    report = optimize(model)
    assert "nothing captured yet" in str(report)
    model(X)
    report.model = "<script>"
    report.before, report.after = Step(2e-3, 1e-5, 10**9), Step(1e-3, 1e-5, 5 * 10**8)
    report.gains.append(Gain("norm", 1e-3, 1e-5, 10**8, True))
    found = json.loads(report.to_json())
    assert found["sites"][0]["rule"] == "norm" and found["version"] == 1 and found["after"]["seconds"] == 1e-3
    assert "2.00x" in str(report) and "1.0 -> 0.5 GB" in str(report) and "norm: +1.00 ms" in str(report)
    assert "<script>" not in report.to_html() + report._repr_html_() and "&lt;script&gt;" in report.to_html()


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda: 3, "torch.nn.Module"),
        (lambda: torch.compile(nn.Linear(2, 2)), "torch.compile"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "model.module"),
        (lambda: torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), "was made from"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_optimized_is_refused_in_a_sentence(make: Any, word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        optimize(make())
    assert "\n" not in str(caught.value)


def test_a_model_is_optimized_once_and_rules_and_modes_have_names() -> None:
    model = nn.Linear(2, 2)
    report = optimize(model)
    with pytest.raises(UserError, match="optimized already"):
        optimize(model)
    report.undo()
    model.compile(backend="eager")
    with pytest.raises(UserError, match=r"model\.compile"):
        optimize(model)
    with pytest.raises(UserError, match="no rule 'nrom'; did you mean norm"):
        optimize(nn.Linear(2, 2), rules=["nrom"])
    with pytest.raises(UserError, match="choose none, default"):
        optimize(nn.Linear(2, 2), compile="fast")


def test_a_model_with_nothing_to_optimize_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with optimized(model) as report:
        model(torch.randn(2, 4))
    assert "0 sites changed" in str(report) and report.sites == []


def test_errors_of_the_model_are_its_own() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise KeyError("three rows")
            return F.layer_norm(x, (4,))

    model = Broken()
    with optimized(model):
        model(torch.randn(2, 4))
        with pytest.raises(KeyError, match="three rows"):
            model(torch.randn(3, 4))


def test_any_batch_and_length_may_follow() -> None:
    model, plain = _Head(), _Head()
    with optimized(model) as report:
        for rows, columns in ((2, 3), (4, 5), (1, 7), (3, 1), (6, 2), (5, 9), (2, 8), (7, 4), (8, 3), (1, 1), (9, 6)):
            x, targets = torch.randn(rows, columns, 8), torch.randint(12, (rows, columns))
            model.zero_grad(), plain.zero_grad()
            loss, expected = model(x, targets)["loss"], plain(x, targets)["loss"]
            loss.backward(), expected.backward()
            assert torch.allclose(loss, expected, atol=1e-6)
            assert torch.allclose(model.norm.weight.grad, plain.norm.weight.grad, atol=1e-6)
    assert {site.rule for site in report.changed} == {"norm", "linear_cross_entropy"}


@pytest.mark.parametrize(
    "write",
    [
        lambda h: nn.ReLU6(inplace=True)(h), lambda h: F.elu(h, 1.0, True), lambda h: F.relu(h, True),
        lambda h: torch._foreach_mul_([h], 2.0), lambda h: h.mul_(2.0), lambda h: torch.ops.aten.mul_.Tensor(h, 2.0),
    ],
)  # fmt: skip
def test_what_is_written_in_place_and_not_returned_is_kept(write: Any) -> None:
    """Beside a site, in front of it and where there is none."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x) * 3.0
            write(h)
            return self.norm(h) + h

    model = Writes()
    expected = model(X)
    with optimized(model) as report:
        assert torch.allclose(model(X), expected, atol=1e-6)
    assert len(report.changed) == 1
    with optimized(model, rules=[]):
        assert torch.equal(model(X), expected)


def test_a_batch_norm_called_for_its_statistics_keeps_them() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.watch, self.norm = nn.BatchNorm1d(8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            self.watch(x)
            return self.norm(x)

    model = Watched()
    twin = copy.deepcopy(model)
    twin(X[0] + 1)
    with optimized(model):
        model(X[0] + 1)
    assert torch.allclose(model.watch.running_mean, twin.watch.running_mean)


def test_a_rule_that_raises_leaves_what_others_did_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.optimize.rule import Rule
    from tilewright.optimize.rules import ALL

    def broken(_: Any) -> Any:
        raise IndexError("a bug in a rule")
        yield

    monkeypatch.setitem(ALL, "norm", Rule("norm", "", broken))
    model, plain = _Head(), _Head()
    with optimized(model) as report:
        found = model(X, TARGETS)
        assert torch.allclose(found["loss"], plain(X, TARGETS)["loss"])
        assert torch.allclose(found["logits"], plain(X)["logits"])
    assert report.captured.failures == ["norm: IndexError: a bug in a rule"]


def test_a_probability_that_changes_between_calls_is_followed() -> None:
    class Annealed(_Head):
        p = 0.1

        def forward(self, x: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
            return super().forward(F.dropout(x, self.p, True) + x, targets)

    model = Annealed()
    with optimized(model):
        for p in (0.1, 0.2, 0.3, 0.4):
            model.p = p
            found = model(torch.ones(64, 3, 8), torch.arange(192).remainder(12).view(64, 3))
            assert found["logits"].shape == (64, 3, 12) and found["loss"].isfinite()


def test_gradients_that_were_there_are_left_alone() -> None:
    model = _Head()
    model(X, TARGETS)["loss"].backward()
    before = [each.grad.clone() for each in model.parameters()]
    optimize(model, {"x": X, "targets": TARGETS}).undo()
    assert all(torch.equal(each.grad, grad) for each, grad in zip(model.parameters(), before, strict=True))


def test_a_function_with_its_own_backward_gets_the_gradient_of_logits() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x * 2).sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.full((2, 3, 12), 2.0)

    model, plain = _Head(), _Head()
    with optimized(model):
        found = model(X, TARGETS)
        (found["loss"] + Twice.apply(found["logits"])).backward()
    expected = plain(X, TARGETS)
    (expected["loss"] + Twice.apply(expected["logits"])).backward()
    assert torch.allclose(model.head.weight.grad, plain.head.weight.grad, atol=1e-5)
    assert torch.allclose(model.norm.weight.grad, plain.norm.weight.grad, atol=1e-5)


def test_weights_written_past_autograd_are_seen_and_hooks_on_logits_refused() -> None:
    model = _Head()
    with optimized(model):
        found = model(X, TARGETS)
        with pytest.raises(RuntimeError, match="Optimize without the rule"):
            found["logits"].retain_grad()
        model.head.weight.data.add_(0.1)
        with pytest.raises(RuntimeError, match="have changed since"):
            found["logits"].sum()


def test_a_metric_in_inference_mode_spoils_no_gradient() -> None:
    model = _Head()
    with optimized(model):
        found = model(X, TARGETS)
        with torch.inference_mode():
            found["logits"].argmax(-1)
        found["logits"].square().mean().backward()
    assert model.head.weight.grad is not None


_log = logging.getLogger(__name__)


class _Talking(_Head):
    """Logs between its norm and its head."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        y = self.norm(x)
        _log.warning("between norm and head")
        return {"logits": self.head(y), "loss": F.cross_entropy(self.head(y).view(-1, 12), X.new_zeros(6).long())}


def test_a_message_of_the_model_cuts_no_graph_and_dynamo_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    model = _Talking()
    report = optimize(model)
    with caplog.at_level(logging.ERROR):
        model(X)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert len(report.captured.graphs) == 1
