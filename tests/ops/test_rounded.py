"""16-bit copies of parameters: always what rounding the parameter would give, whoever changed it."""

import copy

import pytest
import torch

from ops.contract import DEVICE
from tilewright.ops import optimizer as op
from tilewright.ops import rounded
from tilewright.ops.rounded import keep, kept

BF16 = torch.bfloat16


def parameter(*shape):
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(*shape, device=DEVICE))


def is_right(weight):
    return torch.equal(kept(weight), weight.detach().to(BF16))


CHANGES = {
    "in place": lambda weight: weight.mul_(3.0),
    "a checkpoint": lambda weight: weight.copy_(torch.zeros_like(weight)),
    "by index": lambda weight: weight[0].fill_(7.0),
    "without its graph": lambda weight: weight.detach().add_(1.0),
    "another memory": lambda weight: setattr(weight, "data", weight.data.clone() * 2.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_parameter_its_copy_is_of_now(change):
    weight = parameter(8, 6)
    keep(weight)
    assert is_right(weight)
    with torch.no_grad():
        CHANGES[change](weight)
    assert is_right(weight)


@pytest.mark.parametrize("rule", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("elements", [op.TILE, 5000, 7])
def test_a_step_writes_both_and_the_copy_is_not_made_anew(rule, elements, monkeypatch):
    with_copy, without = parameter(elements), parameter(elements)
    keep(with_copy)
    kept(with_copy)
    for weight in (with_copy, without):
        state = op.new_state(weight, rule)
        for step in range(3):
            state["step"] += 1
            gradient = torch.sin(torch.arange(elements, device=DEVICE) + step)
            op.update(weight.detach() if weight is without else weight, gradient, state, rule=rule, lr=0.1)
    assert torch.equal(with_copy, without)
    monkeypatch.setattr(torch.Tensor, "copy_", None)  # to make it anew would need this
    assert is_right(with_copy)


@pytest.mark.parametrize("stale", [False, True])
def test_a_step_that_is_taken_back_leaves_the_copy_right(stale):
    weight = parameter(5000)
    keep(weight)
    kept(weight)
    if stale:
        with torch.no_grad():
            weight.mul_(2.0)
    state = op.new_state(weight, "adamw")
    state["step"] += 1
    before = weight.detach().clone()
    found = torch.ones((), device=DEVICE)
    op.update(weight, torch.ones_like(weight), state, rule="adamw", lr=0.1, found_inf=found)
    assert torch.equal(weight, before) and is_right(weight)


def test_autograd_sees_that_a_copy_changed_which_it_needs():
    weight = parameter(64, 80)
    keep(weight)
    x = torch.randn(3, 80, device=DEVICE, dtype=BF16, requires_grad=True)
    y = x @ kept(weight).t()
    state = op.new_state(weight, "sgd")
    state["step"] += 1
    op.update(weight, torch.ones_like(weight), state, rule="sgd", lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_not_kept_is_rounded_each_time():
    weight = parameter(4, 4)
    assert kept(weight) is None
    first, second = (rounded.rounded(weight, BF16) for _ in range(2))
    assert first is not second and torch.equal(first, second) and not first.requires_grad
    assert rounded.rounded(weight, torch.float32) is weight
    keep(weight)
    assert rounded.rounded(weight, torch.float16).dtype == torch.float16  # the copy is of another dtype
    moved = copy.deepcopy(weight)
    assert kept(moved) is None or torch.equal(kept(moved), moved.to(BF16))
