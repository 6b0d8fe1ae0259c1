"""The first two gated MLPs before a fused loss keep no activation for their projections, and learn the same."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tilewright.optimize import optimized
from tilewright.optimize.rules import glu

WIDTH, INNER, CLASSES = 16, 48, 40


class _MLP(nn.Module):
    def __init__(self, packed, bias):
        super().__init__()
        self.packed = packed
        self.gate = nn.Linear(WIDTH, 2 * INNER if packed else INNER, bias=bias)
        self.up = nn.Linear(WIDTH, INNER, bias=bias)
        self.down = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x):
        gate, up = self.gate(x).chunk(2, -1) if self.packed else (self.gate(x), self.up(x))
        return x + self.down(F.silu(gate) * up)


class _Model(nn.Module):
    def __init__(self, packed=False, bias=False):
        super().__init__()
        self.layers = nn.ModuleList(_MLP(packed, bias) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@pytest.fixture
def activations(monkeypatch):
    """The memory of each activation that was computed."""
    found, real = [], glu.glu

    def spied(*given, **options):
        result = real(*given, **options)
        found.append(StorageWeakRef(result.untyped_storage()))
        return result

    monkeypatch.setattr(glu, "glu", spied)
    return found


def _step(model, batch):
    loss = model(*batch)["loss"]
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("packed", [False, True], ids=["split", "packed"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_the_first_two_are_computed_again(packed, bias, large, activations, monkeypatch):
    monkeypatch.setattr(glu, "LARGE", 0 if large else 2**60)
    torch.manual_seed(0)
    model = _Model(packed, bias)
    plain = copy.deepcopy(model)
    batch = torch.randn(2, 5, WIDTH), torch.randint(0, CLASSES, (2, 5))
    with optimized(model, rules=["glu", "linear_cross_entropy"]) as report:
        model(*batch)
        activations.clear()  # those of the probe
        loss = model(*batch)["loss"]
        assert [each.expired() for each in activations] == [large, large, False]
        loss.backward()
        assert len(activations) == 3 + 2 * large
        model.zero_grad()
        found = _step(model, batch)
    details = [site.detail for site in report.changed if site.rule == "glu"]
    assert len(details) == 3 and ["computed again" in each for each in details].count(True) == 2 * large
    for one, other in zip(found, _step(plain, batch), strict=True):
        torch.testing.assert_close(one, other)


def _reading_twice(layer, x):
    activated = F.silu(layer.gate(x)) * layer.up(x)
    return x + layer.down(activated) + activated.sum()


@pytest.mark.parametrize("change", ["no loss", "no gradient", "read twice"])
def test_where_nothing_is_gained_it_is_a_site_like_the_others(change, monkeypatch):
    monkeypatch.setattr(glu, "LARGE", 0)
    model = _Model()
    batch = torch.randn(2, 5, WIDTH), torch.randint(0, CLASSES, (2, 5))
    rules = ["glu"] if change == "no loss" else ["glu", "linear_cross_entropy"]
    if change == "read twice":
        for layer in model.layers[:2]:
            layer.forward = functools.partial(_reading_twice, layer)
    with torch.set_grad_enabled(change != "no gradient"), optimized(model, rules=rules) as report:
        model(*batch)
    details = [site.detail for site in report.changed if site.rule == "glu"]
    assert len(details) == 3 and not any("computed again" in each for each in details)


@pytest.mark.parametrize("written", ["gate", "weight"])
def test_what_is_written_to_before_backward_is_an_error(written):
    gate, up, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(4, 8, requires_grad=True)
    (out := glu.project(gate, up, weight, None, kind="silu")).sum().backward(retain_graph=True)
    first = weight.grad.clone()
    out.sum().backward(retain_graph=True)
    torch.testing.assert_close(weight.grad, 2 * first)
    if written == "weight":  # saved for the gradient of an input
        gate.requires_grad_()
        out = glu.project(gate, up, weight, None, kind="silu")
    with torch.no_grad():
        (gate if written == "gate" else weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
