"""Formulas that look like a site and differ in one thing: each is left alone, or computed rightly."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.optimize import optimized
from tilewright.optimize.rewrite import count
from tilewright.runtime import dispatch

WIDTH, CLASSES = 16, 12


@pytest.fixture(autouse=True)
def _by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here is which call is made: the ops run in plain PyTorch."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    torch._dynamo.reset()


class _Model(nn.Module):
    """A formula between two linear layers, with some vectors to use."""

    def __init__(self, formula: Callable[[_Model, Tensor], Tensor], p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.w, self.b = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.cos, self.sin = nn.Parameter(torch.rand(4, 4)), nn.Parameter(torch.rand(4, 4))
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.drop = nn.Dropout(p)
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def _rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float = 1.0) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - sign * (two * sin), two * cos + one * sin), -1)


def _tables(model: _Model) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(4.0), 10.0 ** -torch.arange(4.0)).to(model.w.dtype)
    return angle.cos(), angle.sin()


def _heads(model: _Model, x: Tensor) -> Tensor:
    return model.inp(x).view(2, 4, 4, 8).transpose(1, 2)


def _loss(model: _Model, x: Tensor, **options: Any) -> Tensor:
    targets = torch.arange(8).remainder(CLASSES)
    return F.cross_entropy(model.head(x).view(-1, CLASSES), targets, **options)


def _two_epsilons(model: _Model, x: Tensor) -> Tensor:
    return _rms(_rms(x, 1e-2) * model.w, 1e-5) * model.b


def _two_drops(model: _Model, x: Tensor) -> Tensor:
    a, b = model.out(x), model.out(x.sin())
    return model.norm(F.dropout(a, 0.0, True) + F.dropout(b, 0.0, False) + x)


def _in_place(model: _Model, x: Tensor) -> Tensor:
    y = model.out(x)
    y += x
    return _rms(y) * model.w + y


def _swapped(model: _Model, x: Tensor) -> Tensor:
    up, gate = model.inp(x).chunk(2, -1)
    return F.silu(gate) * up


def _z_loss(model: _Model, x: Tensor) -> Tensor:
    logits = model.head(x).view(-1, CLASSES)
    return F.cross_entropy(logits, torch.arange(8)) + 1e-2 * logits.logsumexp(-1).square().mean()


def _root_without_gradient(model: _Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * root * model.w


def _gate_without_gradient(model: _Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = F.silu(x)
    return gate * model.out(x)


def _head_without_gradient(model: _Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model.head(x)
    return F.cross_entropy(logits.view(-1, CLASSES), torch.arange(8)) + model.out(x).square().mean()


# The formula, and the rules that must have changed something, in order; "" for a formula to leave alone.
CASES: dict[str, tuple[Callable[[_Model, Tensor], Tensor], str]] = {
    "two norms of different eps": (_two_epsilons, "norm"),
    "rms of the wrong dimension": (lambda m, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * m.w, ""),
    "rms without the mean": (lambda m, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * m.w, ""),
    "unbiased variance": (
        lambda m, x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5) * m.w + m.b, "",
    ),
    "biased variance": (
        lambda m, x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5),
        "norm",
    ),
    "eps outside of the root": (lambda m, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3) * m.w, ""),
    "norm of the cube": (lambda m, x: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6), ""),
    "another tensor's root": (lambda m, x: m.out(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), ""),
    "two minus weight": (lambda m, x: _rms(x) * (2 - m.w), ""),
    "weight before the norm": (lambda m, x: _rms(x * m.w), "norm"),
    "one norm's weight in two": (lambda m, x: _rms(_rms(x) * m.w + m.out(x)) * m.w, "add_norm, norm"),
    "sum of other shapes": (lambda m, x: m.norm(m.out(x) + x[:1]), "norm"),
    "sum in place": (_in_place, "norm"),
    "a root without a gradient": (_root_without_gradient, ""),
    "a gate without a gradient": (_gate_without_gradient, ""),
    "a head without a gradient": (_head_without_gradient, "cross_entropy"),
    "a clamp beyond what is tried": (lambda m, x: _rms(x) * (m.w + 9).clamp(-5, 5), ""),
    "a cast to 8 bits": (lambda m, x: _rms(x).to(torch.float8_e4m3fn).to(x.dtype) * m.w, ""),
    "two branches with dropout in one": (_two_drops, "add_norm"),
    "quick gelu": (lambda m, x: x * torch.sigmoid(1.702 * x), ""),
    "gelu by tanh": (lambda m, x: F.gelu(x, approximate="tanh"), "gelu"),
    "gelu by erf": (lambda m, x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), "gelu"),
    "gelu of another cubic": (lambda m, x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.0447 * x**3))), ""),
    "up in front of gate": (_swapped, "glu"),
    "gate times itself": (lambda m, x: F.silu(x) * x, ""),
    "rope of the other sign": (lambda m, x: _turn(_heads(m, x), *_tables(m), -1.0), ""),
    "rope with learned tables": (lambda m, x: _turn(_heads(m, x), m.cos, m.sin), ""),
    "rope": (lambda m, x: _turn(_heads(m, x), *_tables(m)), "rope"),
    "class weights": (lambda m, x: _loss(m, x, weight=torch.linspace(0.5, 2, CLASSES).to(x)), "linear_cross_entropy"),
    "label smoothing": (lambda m, x: _loss(m, x, label_smoothing=0.2), "linear_cross_entropy"),
    "sum of losses": (lambda m, x: _loss(m, x, reduction="sum") / 7, "linear_cross_entropy"),
    "losses one by one": (lambda m, x: (_loss(m, x, reduction="none") ** 2).mean(), "linear_cross_entropy"),
    "an ignored class": (lambda m, x: _loss(m, x, ignore_index=3), "linear_cross_entropy"),
    "a temperature": (
        lambda m, x: F.cross_entropy(m.head(x).view(-1, CLASSES) / 0.7, torch.arange(8)), "cross_entropy",
    ),
    "a cap of two constants": (
        lambda m, x: F.cross_entropy((5 * torch.tanh(m.head(x) / 4)).view(-1, CLASSES), torch.arange(8)),
        "cross_entropy",
    ),
    "logits read twice": (_z_loss, "cross_entropy"),
    "targets that are probabilities": (
        lambda m, x: F.cross_entropy(m.head(x).view(-1, CLASSES), torch.full((8, CLASSES), 1 / CLASSES).to(x)), "",
    ),
}  # fmt: skip


def _step(model: _Model, x: Tensor) -> tuple[list[Tensor], Tensor]:
    x = x.detach().clone().requires_grad_()
    out = model(x)
    loss = out if out.numel() == 1 else (out * torch.linspace(-1, 1, out.numel()).to(out).view(out.shape)).sum()
    model.zero_grad()
    loss.backward()
    grads = [x.grad, *(each.grad for each in model.parameters())]
    return [out.detach(), *(each.clone() for each in grads if each is not None)], loss


def _error(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    size = max(each.norm().item() for each in truth)
    pairs = zip(found, truth, strict=True)
    return [((ours.double() - true).norm() / max(true.norm().item(), 1e-3 * size)).item() for ours, true in pairs]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [1.0, 1e-3], ids=["", "small"])
def test_a_near_miss_is_left_alone_or_computed_rightly(name: str, scale: float) -> None:
    formula, expected = CASES[name]
    model = _Model(formula)
    x = torch.randn(2, 4, WIDTH) * scale
    truth, _ = _step(copy.deepcopy(model).double(), x.double())
    plain, _ = _step(model, x)
    with optimized(model) as report:
        found, _ = _step(model, x)
    wanted = set(filter(None, expected.split(", ")))
    assert set(count(report.sites)) == wanted, f"{report}"
    for ours, theirs in zip(_error(found, truth), _error(plain, truth), strict=True):
        assert ours <= 2 * theirs + 1e-6, f"{name}: {ours:.1e} from float64, the model itself {theirs:.1e}\n{report}"
    again, _ = _step(model, x)
    assert all(map(torch.equal, again, plain)), "undo does not give the same bits"


@pytest.mark.parametrize("changes", [True, False], ids=["changing", "recording"])
def test_a_hook_on_a_norm_sees_and_changes_what_it_would(changes: bool) -> None:
    seen: list[Tensor] = []

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        seen.append(output.detach())
        return output * 2 if changes else None

    model = _Model(lambda m, x: m.norm(m.out(x) + x) + x)
    model.norm.register_forward_hook(hook)
    x = torch.randn(2, 4, WIDTH)
    truth, _ = _step(copy.deepcopy(model).double(), x.double())
    with optimized(model):
        seen.clear()
        found, _ = _step(model, x)
    assert max(_error(found, truth)) < 1e-5
    assert len(seen) == 1 and torch.allclose(seen[0].mean(-1), model.norm.bias.mean().expand(2, 4), atol=1e-5)


def test_statistics_in_16_bits_are_computed_no_worse() -> None:
    model = _Model(lambda m, x: _rms(x) * m.w).bfloat16()
    x = torch.randn(2, 4, WIDTH).bfloat16()
    truth, _ = _step(copy.deepcopy(model).double(), x.double())
    plain, _ = _step(model, x)
    with optimized(model) as report:
        found, _ = _step(model, x)
    assert count(report.sites) == {"norm": 1}
    assert all(a <= b + 0.004 for a, b in zip(_error(found, truth), _error(plain, truth), strict=True))
    assert found[0].dtype == torch.bfloat16


def test_dropout_of_the_residual_stream_is_still_there_and_gone_in_eval() -> None:
    model = _Model(lambda m, x: m.norm(m.drop(m.out(x)) + x) + x, p=0.5)
    x = torch.randn(2, 4, WIDTH)
    with optimized(model) as report:
        one, other = model(x), model(x)
        assert count(report.sites) == {"add_norm": 1} and "dropout" in report.changed[0].detail
        assert not torch.equal(one, other)
        model.eval()
        assert torch.equal(model(x), model(x))
        assert torch.allclose(model(x), model.norm(model.out(x) + x) + x, atol=1e-6)


def test_a_branch_without_dropout_beside_one_with_it_is_no_pair() -> None:
    def formula(model: _Model, x: Tensor) -> Tensor:
        return model.norm((F.dropout(model.out(x), 0.9, True) + model.out(x.cos())) + x)

    model = _Model(formula)
    x = torch.zeros(2, 4, WIDTH)
    with torch.no_grad():
        model.out.bias.zero_()
    with optimized(model) as report:
        branch = torch.stack([model(x) for _ in range(20)])
    expected = model.norm(model.out(x.cos()))
    assert torch.allclose(branch, expected.expand_as(branch), atol=1e-5), f"{report}"


def test_a_dropout_inside_of_a_norm_is_still_there() -> None:
    model = _Model(lambda m, x: _rms(x) * F.dropout(m.w, 0.5, True))
    x = torch.randn(2, 4, WIDTH)
    with optimized(model) as report:
        found = [model(x) for _ in range(4)]
    assert not all(torch.equal(found[0], each) for each in found[1:]), f"{report}"


def test_a_stream_that_is_written_to_later_is_no_fused_sum() -> None:
    def formula(model: _Model, x: Tensor) -> Tensor:
        h = model.out(x) + x
        h += _rms(h.float()).to(h.dtype) * model.w
        return h

    model = _Model(formula)
    with optimized(model) as report:
        model(torch.randn(2, 4, WIDTH))
    assert "add_norm" not in count(report.sites)
