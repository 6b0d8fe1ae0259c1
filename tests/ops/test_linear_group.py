"""Layers of one input against float64, and how often their gradients are added: by the emulator of cuBLASLt."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops.contract import (
    DEVICE,
    assert_compiles,
    assert_deterministic,
    assert_near_truth,
    assert_no_worse,
    doubles,
    on_gpu,
)
from ops.test_linear import BF16, FP32, emulator, numbers  # noqa: F401  (a fixture)
from tilewright.ops import explain, linear_group
from tilewright.optimize import optimized
from tilewright.optimize.rules import linear as rule

FEATURES = (16, 8, 32)


def leaves_of(shape, count, dtype, parameter, has_bias, device="cpu"):
    found = [numbers(*shape, dtype=dtype, device=device)]
    for features in FEATURES[:count]:
        found.append(numbers(features, shape[-1], dtype=parameter, device=device))
        found.append(numbers(features, dtype=parameter, device=device) if has_bias else None)
    return found


def grouped(x, *parameters):
    return linear_group(x, list(zip(parameters[::2], parameters[1::2], strict=True)))


def apart(x, *parameters):
    return [F.linear(x, weight, bias) for weight, bias in zip(parameters[::2], parameters[1::2], strict=True)]


def joined(function, used, *leaves):
    outputs = function(*leaves)
    return torch.cat([outputs[index] for index in used], -1)


def run(function, leaves, upstream, dtype=None):
    with torch.autocast(leaves[0].device.type, dtype, enabled=dtype is not None):
        out = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = torch.autograd.grad(out, wanted, upstream, allow_unused=True)
    return [out, *(torch.zeros_like(a) if b is None else b for a, b in zip(wanted, found, strict=True))]


def truth(function, leaves, upstream):
    """In float64, of what the matmuls see: all operands in 16 bits."""
    seen = [None if t is None else t.detach().to(BF16).requires_grad_(t.requires_grad) for t in leaves]
    return run(function, doubles(seen), upstream.double())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("only", [None, 1], ids=["all", "one alone"])
@pytest.mark.parametrize("autocast", [False, True], ids=["16 bits", "autocast"])
def test_a_group_and_its_gradients(count, has_bias, only, autocast, emulator):  # noqa: F811
    used = range(count) if only is None else (only,)
    leaves = leaves_of((2, 5, 24), count, BF16, FP32 if autocast else BF16, has_bias)
    ours, plain = (functools.partial(joined, function, used) for function in (grouped, apart))
    upstream = numbers(2, 5, sum(FEATURES[index] for index in used), grad=False)
    actual = run(ours, leaves, upstream, BF16 if autocast else None)
    assert [each.dtype for each in actual[1:]] == [each.dtype for each in leaves if each is not None]
    assert_near_truth(actual, truth(plain, leaves, upstream), reduced=sum(FEATURES[:count]))
    assert emulator.epilogues


@pytest.mark.parametrize("frozen", [0, 1, 3], ids=["input", "first", "second"])
def test_what_is_frozen_gets_no_gradient(frozen, emulator):  # noqa: F811
    leaves = leaves_of((6, 24), 2, BF16, BF16, True)
    leaves[frozen].requires_grad_(False)
    upstream = numbers(6, sum(FEATURES[:2]), grad=False)
    ours, plain = (functools.partial(joined, function, range(2)) for function in (grouped, apart))
    assert_near_truth(run(ours, leaves, upstream), truth(plain, leaves, upstream), reduced=24)


def test_the_gradient_of_the_input_is_summed_by_the_matmuls(emulator):  # noqa: F811
    leaves = leaves_of((6, 24), 3, BF16, BF16, False)
    out = joined(grouped, range(3), *leaves)
    with torch.profiler.profile(record_shapes=True) as profile:
        out.sum().backward()
    names = [event.name for event in profile.events() if event.input_shapes[:1] == [[6, 24]]]
    assert names.count("aten::addmm") == 2 and not {"aten::add_", "aten::add"} & set(names)


def test_a_group_has_two_or_three_layers_and_no_second_derivative(emulator):  # noqa: F811
    x, weight, *_ = leaves_of((6, 24), 1, BF16, BF16, False)
    for count in (1, 4):
        with pytest.raises(ValueError, match=f"2 or 3 layers, not {count}; call linear"):
            linear_group(x, [(weight, None)] * count)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(linear_group(x, [(weight, None)] * 2)[0].sum(), x, create_graph=True)
    with pytest.raises(ValueError, match="weight"):
        linear_group(x, [(weight, None), (weight.t(), None)])


def test_small_and_evaluated_layers_are_linear_one_by_one():
    leaves = leaves_of((6, 24), 2, FP32, FP32, True)
    with explain() as paths:
        found = grouped(*leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, apart(*leaves), strict=True))
    assert "PyTorch" in str(paths)


def test_compiles_into_one_graph():
    leaves = [each for each in leaves_of((6, 24), 3, FP32, FP32, False, DEVICE) if each is not None]
    assert_compiles(lambda x, *weights: grouped(x, *(p for weight in weights for p in (weight, None))), leaves)


class _Reads(nn.Module):
    """Three layers of one input, one of another, as a block of a decoder has them."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(24, 16), nn.Linear(24, 8), nn.Linear(24, 8, bias=False)
        self.out = nn.Linear(16, 24)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        k.mul_(2.0)  # as rotary embeddings are put in place
        return {"loss": (x + self.out(q.tanh() + torch.cat([k, v], -1).sin())).square().mean()}


@pytest.mark.parametrize("gradients_on", [True, False])
def test_the_rule_groups_what_reads_one_input(gradients_on, monkeypatch):
    monkeypatch.setattr(rule, "_LEAST", 0.0)
    model = _Reads().to(BF16)
    x = torch.randn(4, 5, 24, dtype=BF16)
    plain = copy.deepcopy(model)
    with torch.set_grad_enabled(gradients_on), optimized(model, rules=["linear"]) as report:
        loss = model(x)["loss"]
        torch.testing.assert_close(loss, plain(x)["loss"])
        if gradients_on:
            loss.backward()
    details = sorted(site.detail for site in report.changed)
    assert len(details) == (2 if gradients_on else 4), report
    assert [", 3 of one input" in each for each in details].count(True) == gradients_on
    if gradients_on:
        plain(x)["loss"].backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-5)


class _Teaches(_Reads):
    def forward(self, x):
        q = self.q(x)
        with torch.inference_mode():
            k = self.k(x)
        return {"loss": (q.sum(-1) * k.clone().sum(-1)).mean() + self.v(x).sin().mean()}


def test_a_layer_in_inference_mode_is_in_no_group(monkeypatch):
    monkeypatch.setattr(rule, "_LEAST", 0.0)
    model = _Teaches().to(BF16)
    plain, x = copy.deepcopy(model), torch.randn(4, 5, 24, dtype=BF16)
    with optimized(model, rules=["linear"]) as report:
        model(x)["loss"].backward()
    plain(x)["loss"].backward()
    assert model.k.weight.grad is None and plain.k.weight.grad is None
    assert not any(", 3 of one input" in site.detail for site in report.changed)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-4)


@on_gpu
def test_on_a_gpu_it_is_no_further_from_float64_than_autograd_and_bit_equal():
    torch.manual_seed(0)
    shapes = (2048, 2048), (512, 2048), (512, 2048)
    leaves = [numbers(2, 4096, 2048, device=DEVICE)]
    for shape in shapes:
        leaves += [numbers(*shape, device=DEVICE), None]
    upstream = numbers(2, 4096, 3072, grad=False, device=DEVICE)
    ours, plain = (functools.partial(joined, function, range(3)) for function in (grouped, apart))
    with explain() as paths:
        actual = run(ours, leaves, upstream)
    assert "kernel" in str(paths)
    assert_no_worse(actual, run(plain, leaves, upstream), truth(plain, leaves, upstream))
    assert_deterministic(lambda: run(ours, leaves, upstream))
