"""Every op at shapes drawn at random, new ones in each run: forward and gradients against float64.

The seed is printed at the start of the run and in every failure; TILEWRIGHT_SEED=... draws the same shapes again.
"""

import dataclasses
import os

import pytest
import torch

from ops.contract import DEVICE
from tilewright.bench.drawing import TINY, Scale, draw
from tilewright.bench.shapes import OPS
from tilewright.bench.verdict import describe_case
from tilewright.measure.numerics import relative_error, ulp
from tilewright.ops import dropout_add_norm
from tilewright.ops.cross_entropy.op import reference as cross_entropy
from tilewright.ops.dropout_add_norm.op import reference as norm_reference
from tilewright.ops.linear_cross_entropy.op import reference as linear_cross_entropy
from tilewright.ops.rope.op import reference as rope

SEED = int(os.environ["TILEWRIGHT_SEED"])  # which conftest.py sees to
SCALE, CASES = (Scale(2**20, (0.0, 1e8), 3e11), 25) if DEVICE == "cuda" else (TINY, 4)
ONE_EACH = {name: dataclasses.replace(op, row_counts=1) for name, op in OPS.items()}


def implementations(shape):
    """Ours, PyTorch in the same dtype, and the definition, for float64."""
    name = shape["op"]
    op = OPS[name]
    ours, eager, truth = (lambda *inputs, f=f: f(shape, *inputs) for f in (op.ours, op.eager, op.eager))
    if name == "dropout_add_norm":
        return norms(shape)
    if name == "rope":  # in the tables that ours takes
        eager = truth = lambda q, k, cos, sin, *_: rope(q, k, cos, sin, interleaved=shape["interleaved"])
    elif name == "cross_entropy":
        truth = lambda *inputs: cross_entropy(*inputs)[0]  # noqa: E731
    elif name == "linear_cross_entropy":
        truth = lambda *inputs: linear_cross_entropy(*inputs)[0]  # noqa: E731
    return ours, eager, truth


def norms(shape):
    """All with the mask that ours has drawn."""
    p, norm, masks = round(shape["p"] * 2**16) / 2**16, shape["norm"], []

    def ours(*inputs):
        out, residual, *masks[:] = dropout_add_norm(*inputs, p=p, norm=norm, prenorm=True, return_mask=True)
        return out, residual

    def eager(x, residual, *parameters):
        residual = torch.where(masks[0], x / (1 - p), 0.0) + residual
        normalise = torch.nn.functional.rms_norm if norm == "rms" else torch.nn.functional.layer_norm
        return normalise(residual, x.shape[-1:], *parameters, eps=1e-5), residual

    return ours, eager, lambda *inputs: norm_reference(*inputs, p=p, norm=norm, masks=masks)


def results(function, inputs, upstream):
    """Outputs and gradients; `upstream` is filled where it is empty."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream[:] = upstream or [torch.randn_like(o) if o.ndim else torch.ones_like(o) for o in outputs]
    leaves = [t for t in inputs if t.requires_grad]
    gradients = torch.autograd.grad(outputs, leaves, [g.to(o.dtype) for g, o in zip(upstream, outputs, strict=True)])
    return [*(o.detach() for o in outputs), *gradients]


def assert_as_near_as_torch(actual, peer, truth):
    """At most twice as far from float64 as PyTorch in the same dtype, and half a unit in the last place.

    Triton's interpreter cuts bfloat16 off where a GPU rounds it, which alone doubles the error.
    """
    for index, (a, p, t) in enumerate(zip(actual, peer, truth, strict=True)):
        assert a.shape == t.shape and a.dtype == p.dtype, f"tensor {index}: {a.shape}, {a.dtype}"
        error, torchs = relative_error(a, t), relative_error(p, t)
        cut = 2.1 if DEVICE == "cpu" and a.dtype == torch.bfloat16 else 1.0
        allowed = cut * (2.0 * torchs + ulp(a.dtype) / 2) + 4 * ulp(torch.float32)
        if a.ndim == 0:  # the mean of many logits that were rounded: by chance torch's may be off by nothing
            allowed += ulp(actual[1].dtype) / 128
        assert error <= allowed, f"tensor {index}: error {error:.2e} > {allowed:.2e}, torch's is {torchs:.2e}"


@pytest.mark.parametrize("index", range(CASES))
@pytest.mark.parametrize("name", OPS)
def test_a_drawn_shape_is_as_near_to_float64_as_torch(name, index):
    case = draw(ONE_EACH, [name], SEED, CASES, SCALE)[index][0]
    torch.manual_seed(SEED + index)
    try:
        ours, eager, truth = implementations(case)
        inputs, upstream = OPS[name].make(case, DEVICE), []
        actual = results(ours, inputs, upstream)
        peer = results(eager, inputs, upstream)
        exact = [t.double().detach().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in inputs]
        assert_as_near_as_torch(actual, peer, results(truth, exact, upstream))
    except Exception as error:
        error.add_note(f"{describe_case(case)}; TILEWRIGHT_SEED={SEED} draws it again")
        raise
