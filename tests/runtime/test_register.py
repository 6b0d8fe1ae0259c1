from typing import NamedTuple

import pytest
import torch

from tilewright.runtime import register


class Inputs(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor | None
    factor: float
    inplace: bool = False


class Gradient(NamedTuple):
    dout: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor | None
    factor: float
    needs: list[bool]


def scale(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(factor * weight * x, the weight's square): a second output that may be missing."""
    scaled = inputs.x * inputs.factor
    return (scaled, None) if inputs.weight is None else (scaled * inputs.weight, inputs.weight.square())


def scale_backward(gradient: Gradient) -> list[torch.Tensor | None]:
    dx, dweight = gradient.dout * gradient.factor, None
    if gradient.weight is not None:
        dweight = dx * gradient.x if gradient.needs[1] else None
        dx = dx * gradient.weight
    return [dx if gradient.needs[0] else None, dweight]


def save(ctx, inputs, output):
    ctx.save_for_backward(inputs.x, inputs.weight)
    ctx.factor = inputs.factor
    ctx.set_materialize_grads(False)


def formula(ctx, backward, dout, _):
    return tuple(backward(Gradient(dout, *ctx.saved_tensors, ctx.factor, list(ctx.needs_input_grad[:2]))))


@pytest.fixture(scope="module")
def op():
    """An op of a namespace of its own would be another library: this one is deleted with the process."""
    gradient = register.Op("test_scale_backward", scale_backward, scale_backward)
    made = register.Op("test_scale", scale, scale)
    return made, made.differentiate(save, formula, gradient)


def test_the_schema_names_the_fields_and_leaves_out_what_is_for_the_eager_op(op):
    schema = str(torch.ops.tilewright.test_scale.default._schema)
    assert schema == "tilewright::test_scale(Tensor x, Tensor? weight, float factor) -> (Tensor, Tensor)"
    backward = str(torch.ops.tilewright.test_scale_backward.default._schema)
    assert backward.endswith("(Tensor dout, Tensor x, Tensor? weight, float factor, bool[] needs) -> Tensor[]")


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_eager_op_and_the_registered_one_are_the_same_function(op, has_weight, frozen):
    made, eager = op
    x = torch.randn(4, requires_grad=True)
    weight = torch.randn(4, requires_grad=not frozen) if has_weight else None
    leaves = [x] + [weight] * (has_weight and not frozen)
    inputs = Inputs(x, weight, 3.0)
    first, second = eager(*inputs), made.call_registered(inputs)
    assert torch.equal(first[0], second[0])
    assert (first[1] is None) == (not has_weight) == (second[1].shape == (0,))
    grads = [torch.autograd.grad(out[0].sum(), leaves) for out in (first, second)]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
    torch.library.opcheck(made.registered, (x, weight, 3.0))


def test_a_launch_of_the_first_call_foresees_backward(op, monkeypatch):
    seen = []
    monkeypatch.setattr(register.dispatch, "rehearse", lambda function, *arguments: function(*arguments))

    def launch(inputs: Inputs) -> torch.Tensor:
        register.dispatch.Launch.firsts += len(seen) == 0
        return inputs.x * inputs.factor

    made = register.Op("test_foreseen", launch, launch)
    eager = made.differentiate(save, formula, foresee=lambda ctx, inputs, output: seen.append(inputs.factor))
    x = torch.ones(2, requires_grad=True)
    eager(x.detach(), None, 4.0, False)
    assert not seen  # nothing needs a gradient
    eager(x, None, 4.0, False)
    eager(x, None, 5.0, False)
    assert seen == [4.0]
