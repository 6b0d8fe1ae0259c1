"""Activation checkpointing stays what it is: the same gradients, the same masks of dropout, and no activations held."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from optimize.zoo import MODELS, _language, step
from tilewright.optimize import optimized
from tilewright.runtime import dispatch

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 16


@pytest.fixture(autouse=True)
def _plain_ops(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


class Block(nn.Module):
    """A branch with dropout, its residual add and a norm."""

    def __init__(self, p):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, x):
        return self.after(x + self.drop(self.down(F.gelu(self.up(self.before(x))))))


class Blocks(nn.Module):
    """Blocks, each of them recomputed in the backward, or not."""

    def __init__(self, p, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Block(p) for _ in range(3))
        self.reentrant = reentrant  # None for no checkpointing

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return (x * torch.linspace(-1.0, 1.0, WIDTH, dtype=x.dtype)).exp().mean()


def gradients(model, x):
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(x)
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}


def held(model, x):
    """Bytes of activations that the forward keeps; weights are there anyway."""
    found = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(size for place, size in found.items() if place not in weights)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_are_right_and_activations_are_not_held(reentrant):
    x = torch.randn(6, WIDTH, requires_grad=True)
    model = Blocks(0.0, reentrant)
    loss, expected = gradients(model, x)
    plain = held(model, x)
    with optimized(model) as report:
        found = gradients(model, x)
        checkpointed = held(model, x)
    assert {site.rule for site in report.changed} == {"add_norm", "norm", "gelu"} and len(report.changed) == 9
    torch.testing.assert_close(found[0], loss)
    for name, each in expected.items():
        torch.testing.assert_close(found[1][name], each, rtol=1e-4, atol=1e-7)
    model.reentrant = None
    with optimized(model):
        model(x)
        everything = held(model, x)
    assert checkpointed <= plain and 3 * checkpointed < everything


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_is_recomputed_with_its_own_mask(reentrant):
    x = torch.randn(6, WIDTH, requires_grad=True)
    model = Blocks(0.4, reentrant)
    with optimized(model) as report:
        loss, found = gradients(model, x)
        again, repeated = gradients(model, x)
    assert any("dropout" in site.detail for site in report.changed), report
    assert loss == again and all(found[name].equal(each) for name, each in repeated.items())
    model.reentrant = None  # one forward, and so one mask
    with optimized(model):
        once, expected = gradients(model, x)
    assert once == loss
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-8)
    model.eval()
    with optimized(model):
        assert gradients(model, x)[0] != loss


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_has_the_gradient_of_its_loss(reentrant):
    """By finite differences in float64 under one seed: another mask in the recompute would be far off."""
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    model = Blocks(0.4, reentrant).double()
    way = {name: torch.randn_like(each) for name, each in model.named_parameters()}
    with optimized(model):
        _, found = gradients(model, x)
        slope, size = sum((found[name] * each).sum() for name, each in way.items()), 1e-6
        values = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                for name, each in model.named_parameters():
                    each += sign * size * way[name]
            torch.manual_seed(5)
            values.append(model(x).item())
            with torch.no_grad():
                for name, each in model.named_parameters():
                    each -= sign * size * way[name]
    assert (values[0] - values[1]) / (2.0 * size) == pytest.approx(slope.item(), rel=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_a_hugging_face_model_with_checkpointing(name, reentrant):
    pytest.importorskip("transformers")
    model = MODELS[name][0]().train()
    loss, expected = step(model, _language)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with optimized(model) as report:
        after, found = step(model, _language)
    torch.testing.assert_close(after, loss)
    assert found.keys() == expected.keys()
    for key, each in expected.items():
        torch.testing.assert_close(found[key], each, rtol=1e-4, atol=1e-6)
    inside = [site for site in report.changed if ".0." in site.where or ".1." in site.where]
    assert {"add_norm"} <= {site.rule for site in inside} and not report.captured.failures
    assert "linear_cross_entropy" in {site.rule for site in report.changed}
