from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from ops.contract import (
    DEVICE,
    DTYPES,
    SHAPES,
    assert_compiles,
    assert_deterministic,
    assert_equal,
    assert_near_truth,
    assert_no_worse,
    doubles,
    gradients,
    layouts,
    on_gpu,
    randn,
)
from tilewright.ops import dropout_add_norm
from tilewright.ops.dropout_add_norm import kernels
from tilewright.ops.dropout_add_norm import launch as launches
from tilewright.ops.dropout_add_norm.op import _registered, cost, reference
from tilewright.runtime import dispatch

NAMES = ("x", "residual", "weight", "bias", "second", "rowscale", "layerscale", "x_bias")
OPTIONS = (
    {},
    {"p": 0.25},
    {"norm": "rms", "p": 0.25, "without": ("bias",)},
    {"norm": "rms", "zero_centered": True, "without": ("bias",)},
    {"without": ("weight", "bias")},
    {"without": ("residual",), "p": 0.25},
    {"with": ("second",), "p": 0.25},
    {"with": ("second",), "without": ("residual",)},
    {"with": ("rowscale", "layerscale"), "p": 0.25},
    {"with": ("x_bias",)},
    {"with": ("x_bias",), "p": 0.25, "norm": "rms", "without": ("bias", "residual")},
    {"with": ("second", "rowscale", "layerscale", "x_bias"), "p": 0.25, "norm": "rms", "without": ("bias",)},
)


OP = sys.modules["tilewright.ops.dropout_add_norm.op"]


def arguments(shape, dtype, options, parameter_dtype=None, residual_dtype=None):
    """Tensors by name, as many as the options ask for, and the keywords."""
    kept = {"x", "residual", "weight", "bias", *options.get("with", ())} - set(options.get("without", ()))
    parameters = ("weight", "bias", "layerscale", "x_bias")
    shapes = {"rowscale": shape[:-1], **dict.fromkeys(parameters, shape[-1:])}
    dtypes = dict.fromkeys(parameters, parameter_dtype or dtype)
    dtypes["residual"] = residual_dtype or dtype
    tensors = {n: randn(*shapes.get(n, shape), dtype=dtypes.get(n, dtype)) if n in kept else None for n in NAMES}
    return tensors, {k: v for k, v in options.items() if k not in ("with", "without")}


def call(function, tensors, keywords, **more):
    x, residual, weight, bias, *rest = tensors.values()
    return function(x, residual, weight, bias, **dict(zip(NAMES[4:], rest, strict=True)), **keywords, **more)


def torch_ops(
    x, residual, weight, bias, *, second, rowscale, layerscale, x_bias, masks, p=0.0, norm="layer", zero_centered=False
):
    """The same in PyTorch's own ops, in the dtype of the tensors: what a user has instead."""
    z = x if x_bias is None else x + x_bias
    if rowscale is not None:
        z = z * rowscale.unsqueeze(-1)
    if layerscale is not None:
        z = z * layerscale
    z = torch.where(masks[0], z / (1 - p), 0.0)
    if second is not None:
        z = z + torch.where(masks[1], second / (1 - p), 0.0)
    if residual is not None:
        z = z + residual
    if norm == "rms":
        return F.rms_norm(z, z.shape[-1:], weight + 1.0 if zero_centered else weight, 1e-5), z
    return F.layer_norm(z, z.shape[-1:], weight, bias, 1e-5), z


def forward_and_gradients(tensors, keywords):
    """(out, residual_out, every gradient), the float64 truth of each, the masks and the upstream gradients."""
    out, residual_out, *masks = call(dropout_add_norm, tensors, keywords, prenorm=True, return_mask=True)
    upstream = [torch.randn_like(out), torch.randn_like(residual_out)]
    leaves = list(tensors.values())
    actual = [out, residual_out, *gradients((out, residual_out), leaves, upstream)]
    truth_leaves = doubles(leaves)
    truth_out = call(reference, dict(zip(NAMES, truth_leaves, strict=True)), keywords, masks=masks)
    truth = [*truth_out, *gradients(truth_out, truth_leaves, upstream)]
    return actual, truth, masks, upstream


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_every_gradient_match_float64_and_are_no_worse_than_torch(dtype, options):
    # Rows for more than one round of backward's programs; but the interpreter draws masks slowly, so once is enough.
    shape = (3, 23, 96) if DEVICE == "cpu" and "p" in options and len(options) > 1 else (4, 65, 96)
    tensors, keywords = arguments(shape, dtype, options)
    actual, truth, masks, upstream = forward_and_gradients(tensors, keywords)
    assert_near_truth(actual, truth, reduced=260 + 96)
    peer_out = call(torch_ops, tensors, keywords, masks=masks)
    peer = [*peer_out, *gradients(peer_out, list(tensors.values()), upstream)]
    assert_no_worse(actual, peer, truth)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_odd_shapes(shape, norm):
    options = {"p": 0.3, "norm": norm, "with": ("rowscale", "second"), "without": ("bias",) if norm == "rms" else ()}
    tensors, keywords = arguments(shape, torch.float32, options)
    actual, truth, _, _ = forward_and_gradients(tensors, keywords)
    # A row of one or two elements can cancel to nothing: LayerNorm then divides by sqrt(eps), about 300.
    slack = 300 if shape[-1] < 8 else 1
    assert_near_truth(actual, truth, reduced=slack**2 * 1000)


# The four ways through backward: chunks, two programs a row, several slices, and one program for everything.
WIDEST = (2 if DEVICE == "cuda" else 1, 65536)  # by the interpreter a row takes seconds


WIDE = ((9, 2560), (7, 5120), (5, 4608), (3, 8200), (3, 10240), (3, 16384), (2, 16400), WIDEST)
WIDEST_ALONE = (torch.bfloat16, WIDEST) if DEVICE == "cuda" else (torch.float64, (3, 8200))
SOME = WIDE if DEVICE == "cuda" else ((9, 2560), (3, 10240), (3, 16384), (2, 16400))  # a shape for each way


@pytest.mark.parametrize(
    ("norm", "p", "shape"),
    [
        *(("layer", 0.1, shape) for shape in WIDE),
        *(("rms", 0.0, shape) for shape in SOME),
        *((norm, p, shape) for norm, p in (("layer", 0.0), ("rms", 0.1)) for shape in WIDE if DEVICE == "cuda"),
    ],
    ids=str,
)
def test_wide_rows(norm, p, shape):
    check_scaled_rows(norm, p, shape)


# A width for each launch config of rows that begin anywhere in a vector of 8.
APART = (5, 67, 133, 203, 301, 389, 519, 701, 1027, 1603, *((2049, 4097, 6145, 12289) if DEVICE == "cuda" else ()))


@pytest.mark.parametrize("width", APART)
@pytest.mark.parametrize(("norm", "p"), [("layer", 0.1), ("rms", 0.0)])
def test_rows_that_begin_anywhere(norm, p, width):
    check_scaled_rows(norm, p, (19, width))


@pytest.mark.parametrize(("norm", "p"), [("layer", 0.1), ("rms", 0.0)])
def test_rows_of_few_columns_have_no_idle_lanes(norm, p):
    """In three blocks forward, and three or five backward."""
    for width, lanes in ((40, 48), (80, 96), (152, 160)):
        check_scaled_rows(norm, p, (70, width))
        for element in (2, 4):
            tile = launches._narrow_backward(width, element, False, False)
            assert tile.block * tile.chunks == lanes


def check_scaled_rows(norm, p, shape):
    options = {
        "p": p,
        "norm": norm,
        "with": ("layerscale", "rowscale"),
        "without": ("bias",) if norm == "rms" else (),
    }
    tensors, keywords = arguments(shape, torch.float32, options)
    tensors["residual"] = (tensors["residual"].detach() + 100.0).requires_grad_()  # a mean that would cancel
    actual, truth, _, _ = forward_and_gradients(tensors, keywords)
    # The sum is rounded to float32 near 100 before it is normalised: relative to its spread, 100 roundings.
    assert_near_truth(actual, truth, reduced=200**2)


@pytest.mark.parametrize("width", [768, 800, 1024, 1280, 1700, 2048])
def test_the_bias_of_a_matmul_has_ways_of_its_own(width):
    rows = 1000 if DEVICE == "cuda" else 21  # more than programs
    tensors, keywords = arguments((rows, width), torch.float32, {"with": ("x_bias",)})
    actual, truth, _, _ = forward_and_gradients(tensors, keywords)
    assert_near_truth(actual, truth, reduced=rows + width)


@given(
    rows=st.integers(0, 6),
    # On a GPU every width is a compilation: a few stand for all.
    width=st.integers(1, 300) if DEVICE == "cpu" else st.sampled_from([1, 33, 256]),
    p=st.sampled_from([0.0, 0.1, 0.7]),
    norm=st.sampled_from(["layer", "rms"]),
    extra=st.sets(st.sampled_from(["second", "rowscale", "layerscale", "x_bias"])),
    missing=st.sets(st.sampled_from(["residual", "weight", "bias"])),
)
@settings(max_examples=30 if DEVICE == "cpu" else 6, deadline=None)
def test_any_combination_of_options(rows, width, p, norm, extra, missing):
    if "weight" in missing:
        missing = {*missing, "bias"}
    tensors, keywords = arguments(
        (rows, width), torch.float64, {"p": p, "norm": norm, "with": extra, "without": missing}
    )
    actual, truth, _, _ = forward_and_gradients(tensors, keywords)
    for a, t in zip(actual, truth, strict=True):
        torch.testing.assert_close(a, t, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("width", [160, 2048, 8704])
def test_float32_residual_beside_bfloat16_activations_and_float32_parameters(width):
    tensors, keywords = arguments((6, width), torch.bfloat16, {"p": 0.1}, torch.float32, torch.float32)
    actual, truth, _, _ = forward_and_gradients(tensors, keywords)
    assert [t.dtype for t in actual] == [torch.bfloat16, torch.float32, torch.bfloat16, *[torch.float32] * 3]
    assert_near_truth(actual[:4], truth[:4], reduced=width)
    assert_near_truth(actual[4:], truth[4:], reduced=6, compute=torch.bfloat16)  # sums of bfloat16 gradients of out


def test_residual_dtype_without_a_residual():
    x = randn(3, 32, dtype=torch.bfloat16)
    out, residual = dropout_add_norm(x, prenorm=True, residual_dtype=torch.float32)
    assert (out.dtype, residual.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_decides_the_dtype_of_the_output_alone():
    x, residual, weight = randn(4, 32), randn(4, 32), randn(32)
    with torch.autocast(DEVICE, torch.bfloat16):
        out, new_residual = dropout_add_norm(x, residual, weight, prenorm=True)
    assert (out.dtype, new_residual.dtype) == (torch.bfloat16, torch.float32)
    expected, _ = reference(x, residual, weight, out_dtype=torch.bfloat16)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("width", [96, *(pytest.param(width, marks=on_gpu) for width in (768, 2048, 5120, 8192))])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("parameter_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_the_output_is_the_norm_of_the_residual_returned(width, p, residual_dtype, parameter_dtype, norm):
    """To the bit, so that backward may compute it again: sums over a row have one order for a width."""
    options = {"p": p, "norm": norm, "without": ("bias",) if norm == "rms" else ()}
    tensors, keywords = arguments((8, width), torch.bfloat16, options, parameter_dtype, residual_dtype)
    with torch.autocast(DEVICE, torch.bfloat16):
        out, residual = call(dropout_add_norm, tensors, keywords, prenorm=True)
        again = dropout_add_norm(residual.detach(), None, tensors["weight"], tensors["bias"], norm=norm)
    assert residual.dtype == residual_dtype and torch.equal(out, again)


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("rms", [False, True])
def test_the_order_of_a_sum_over_a_row_depends_on_norm_width_and_its_dtype_alone(rms, stored):
    for width in (1, 96, 768, 1024, 2048, 2560, 4096, 5120, 8192, 12288, 16384, 20000, 65536):
        orders = set()
        for x, weight, dropout in itertools.product(DTYPES, (None, *DTYPES), (False, True)):
            tensors = (x, *[None] * 4, weight, *[None] * 4, stored)
            *_, launch = launches.forward_launch.__wrapped__(torch.device("cpu"), width, tensors, rms, False, dropout)
            shape = (
                launch.constants[1:4]
                if launch.kernel is kernels.tilewright_dropout_add_norm_forward
                else launch.constants[1:2]
            )
            orders.add((launch.kernel.fn.__name__, shape, launch.warps))
        assert len(orders) == 1, (width, orders)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_out_dtype_decides_the_output_alone_also_inside_autocast(norm, autocast, out_dtype):
    """Output and gradients are those of float64, rounded once to their dtypes: nothing passes through another dtype."""
    options = {"norm": norm, "without": ("bias",) if norm == "rms" else ()}
    tensors, keywords = arguments((6, 96), torch.bfloat16, options, torch.float32, torch.float32)
    leaves = list(tensors.values())
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        outputs = call(dropout_add_norm, tensors, keywords, prenorm=True, out_dtype=out_dtype)
    assert [t.dtype for t in outputs] == [out_dtype, torch.float32]
    upstream = [torch.randn_like(t) for t in outputs]
    truth_leaves = doubles(leaves)
    truth = call(reference, dict(zip(NAMES, truth_leaves, strict=True)), keywords)
    assert_near_truth(outputs, truth, reduced=96)
    actual = gradients(outputs, leaves, upstream)
    assert [t.dtype for t in actual] == [t.dtype for t in leaves if t is not None]
    assert_near_truth(actual, gradients(truth, truth_leaves, upstream), reduced=96, compute=out_dtype)


def test_out_dtype_is_that_of_the_plain_pytorch_path_too(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert dropout_add_norm(x, out_dtype=torch.float32).dtype == torch.float32


def test_out_dtype_compiles_into_one_graph():
    def function(x, residual):
        return dropout_add_norm(x, residual, prenorm=True, out_dtype=torch.float32)

    assert_compiles(function, [randn(4, 40, dtype=torch.bfloat16), randn(4, 40, dtype=torch.bfloat16)])


def test_postnorm_returns_what_prenorm_does_and_so_do_its_gradients():
    tensors, _ = arguments((8, 96), torch.float32, {})
    leaves = list(tensors.values())
    post = call(dropout_add_norm, tensors, {})
    pre, _ = call(dropout_add_norm, tensors, {}, prenorm=True)
    assert torch.equal(post, pre)
    assert_equal(gradients([post], leaves, [torch.ones_like(post)]), gradients([pre], leaves, [torch.ones_like(pre)]))


ALONE = [(dtype, shape) for dtype in DTYPES for shape in ((4, 65, 96), (19, 133), (0, 16))]


@pytest.mark.parametrize(
    ("dtype", "shape"), [*ALONE, (torch.bfloat16, (5, 8200)), (torch.float32, (2, 16400)), WIDEST_ALONE], ids=str
)
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_norm_alone_saves_x_itself_and_has_the_bits_of_one_that_copies_it(norm, dtype, shape):
    options = {"norm": norm, "without": ("residual", *(("bias",) if norm == "rms" else ()))}
    tensors, keywords = arguments(shape, dtype, options)
    leaves = list(tensors.values())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = call(dropout_add_norm, tensors, keywords)
    assert any(t.data_ptr() == tensors["x"].data_ptr() and t.shape == shape for t in saved)
    assert sum(t.numel() >= out.numel() for t in saved) == 1 or not out.numel() or shape[-1] >= out.numel()
    copied, _ = call(dropout_add_norm, tensors, keywords, prenorm=True)
    upstream = [torch.randn_like(out)]
    actual = [out, *gradients([out], leaves, upstream)]
    assert_equal(actual, [copied, *gradients([copied], leaves, upstream)])
    truth_leaves = doubles(leaves)
    truth, _ = call(reference, dict(zip(NAMES, truth_leaves, strict=True)), keywords)
    assert_near_truth(actual, [truth, *gradients([truth], truth_leaves, upstream)], reduced=1000 + shape[-1])


def test_a_norm_alone_of_any_layout():
    for _, x in layouts(6, 48, torch.float32):
        results = []
        for each in (x, x.contiguous()):
            leaf = each.detach().requires_grad_()
            out = dropout_add_norm(leaf)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaf)])
        assert_equal(*results)


def test_a_norm_alone_notices_that_x_was_overwritten():
    x = randn(2, 8)
    branch = x * 2
    out = dropout_add_norm(branch)
    branch.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_norm_alone_compiles_into_one_graph_and_passes_opcheck():
    assert_compiles(lambda x, weight: [dropout_add_norm(x, None, weight)], [randn(4, 40), randn(40)])
    for rms in (False, True):
        args = (randn(4, 24), *[None] * 4, randn(24), None, None, None, 0.0, 1e-5, rms, False, None, torch.float32)
        torch.library.opcheck(_registered, args)


def test_only_the_residual_has_a_gradient():
    tensors, _ = arguments((8, 96), torch.float32, {"without": ("weight", "bias")})
    _, residual = call(dropout_add_norm, tensors, {}, prenorm=True)
    dx, dresidual = torch.autograd.grad(residual, [tensors["x"], tensors["residual"]], torch.full_like(residual, 2.0))
    assert torch.equal(dx, torch.full_like(dx, 2.0)) and torch.equal(dresidual, dx)


@pytest.mark.parametrize("frozen", NAMES)
def test_frozen_inputs_get_no_gradient_and_change_no_other(frozen):
    torch.manual_seed(0)
    tensors, keywords = arguments((5, 40), torch.float32, {"with": ("second", "rowscale", "layerscale", "x_bias")})
    every = dict(
        zip(
            NAMES,
            gradients(
                [call(dropout_add_norm, tensors, keywords)], tensors.values(), [torch.ones(5, 40, device=DEVICE)]
            ),
            strict=True,
        )
    )
    tensors[frozen] = tensors[frozen].detach()
    rest = gradients([call(dropout_add_norm, tensors, keywords)], tensors.values(), [torch.ones(5, 40, device=DEVICE)])
    assert_equal([g for name, g in every.items() if name != frozen], rest)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck_of_the_kernels_in_float64(options):
    tensors, keywords = arguments((2, 5), torch.float64, options)
    names = [n for n, t in tensors.items() if t is not None]

    def function(*leaves):
        torch.manual_seed(0)  # the same mask on every call
        given = {**dict.fromkeys(NAMES), **dict(zip(names, leaves, strict=True))}
        return call(dropout_add_norm, given, keywords, prenorm=True)

    leaves = [tensors[n] for n in names]
    fast = len(options) > 1  # by a random direction: the interpreter draws masks slowly
    assert torch.autograd.gradcheck(
        function, leaves, eps=1e-6, atol=1e-5, rtol=1e-3, nondet_tol=0.0, fast_mode=fast
    )  # fmt: skip


def test_a_lazily_negated_input_keeps_its_sign():
    x = randn(4, 16, grad=False)
    assert_equal(dropout_add_norm(-x, prenorm=True), dropout_add_norm(torch._neg_view(x), prenorm=True))


def test_the_residual_returned_is_never_the_input_itself(monkeypatch):
    for interpreted in (dispatch.INTERPRETED, False):
        monkeypatch.setattr(dispatch, "INTERPRETED", interpreted)
        x = randn(2, 8, grad=False)
        before = x.clone()
        dropout_add_norm(x, prenorm=True)[1].add_(1)
        assert torch.equal(x, before)


def test_shapes_follow_on_the_meta_device():
    x = torch.ones(3, 8, device="meta", requires_grad=True)
    out, residual = dropout_add_norm(x, x, torch.ones(8, device="meta"), p=0.5, prenorm=True)
    assert out.shape == residual.shape == (3, 8) and out.is_meta


def test_function_transforms_differentiate_the_reference():
    x, weight = randn(3, 8, grad=False), randn(8, grad=False)
    by_transform = torch.func.grad(lambda w: dropout_add_norm(x, x, w).square().sum())(weight)
    leaf = weight.clone().requires_grad_()
    (expected,) = torch.autograd.grad(dropout_add_norm(x, x, leaf).square().sum(), leaf)
    torch.testing.assert_close(by_transform, expected)


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.9999, 1 - 1e-9])
def test_the_mean_survives_any_p(p):
    x = torch.ones(16, 16384, device=DEVICE)
    _, residual, mask = dropout_add_norm(x, p=p, prenorm=True, return_mask=True)
    kept = residual[mask]
    share = 1.0 - OP.quantised(p)
    assert share > 0 and abs(OP.quantised(p) - p) <= 2.0**-16
    torch.testing.assert_close(kept, torch.full_like(kept, 1.0 / share))


def test_second_derivatives_are_refused():
    x = randn(2, 8)
    out = dropout_add_norm(x)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_opcheck(rms, p):
    tensors, _ = arguments((4, 24), torch.float32, {"with": ("second", "rowscale", "layerscale", "x_bias")})
    seed = torch.tensor([12345], device=DEVICE) if p else None
    x, residual, weight, bias, second, rowscale, layerscale, x_bias = tensors.values()
    bias = None if rms else bias
    args = (
        x,
        second,
        residual,
        rowscale,
        layerscale,
        weight,
        bias,
        x_bias,
        seed,
        p,
        1e-5,
        rms,
        False,
        x.dtype,
        x.dtype,
    )
    torch.library.opcheck(_registered, args)
    torch.library.opcheck(_registered, (x, *[None] * 7, seed, p, 1e-5, rms, False, x.dtype, x.dtype))
    torch.library.opcheck(_registered, (x, *[None] * 7, seed, p, 1e-5, rms, False, x.dtype, torch.bfloat16))


def test_compiles_into_one_graph_with_the_same_result():
    tensors, _ = arguments((4, 40), torch.float32, {})
    function = lambda x, residual, weight, bias: dropout_add_norm(x, residual, weight, bias, prenorm=True)  # noqa: E731
    assert_compiles(function, [t for t in tensors.values() if t is not None])


def test_compiles_without_what_torch_2_11_cannot_trace(monkeypatch):
    def untraceable(kind):
        raise AssertionError("torch 2.11 breaks the graph at is_autocast_available")

    monkeypatch.setattr(torch.amp, "is_autocast_available", untraceable)
    torch.compiler.reset()
    torch.compile(dropout_add_norm, fullgraph=True, backend="eager")(torch.ones(3, 8, device=DEVICE))


def test_compiled_dropout_has_the_right_gradient_for_its_own_mask():
    x = randn(6, 64)
    function = torch.compile(lambda x: dropout_add_norm(x, p=0.375, prenorm=True, return_mask=True), fullgraph=True)
    _, residual, mask = function(x)
    torch.testing.assert_close(residual, torch.where(mask, x / 0.625, 0.0))
    (dx,) = torch.autograd.grad(residual.sum(), x)
    torch.testing.assert_close(dx, mask / 0.625)


def test_traced_by_a_dispatch_mode_the_op_shows_its_name():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Names() as names:
        dropout_add_norm(randn(2, 8), p=0.5)
    assert "tilewright.dropout_add_norm.default" in names.seen


def test_same_bits_on_every_run_even_in_poisoned_memory():
    tensors, keywords = arguments(
        (37, 200), torch.bfloat16, {"p": 0.25, "with": ("second", "rowscale", "layerscale", "x_bias")}
    )

    def run():
        torch.manual_seed(7)
        out = call(dropout_add_norm, tensors, keywords, prenorm=True)
        return [*out, *gradients(out, list(tensors.values()), [torch.ones_like(t) for t in out])]

    assert_deterministic(run)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_the_right_share_independently(p):
    torch.manual_seed(0)
    x = torch.ones(64, 512, device=DEVICE)
    _, mask, other = dropout_add_norm(x, second=x, p=p, return_mask=True)
    deviation = (p * (1 - p) / mask.numel()) ** 0.5
    for m in (mask, other):
        assert abs(m.float().mean().item() - (1 - p)) < 5 * deviation
    # Neighbours along each axis, the two branches, and another call agree only as often as chance has it.
    _, later = dropout_add_norm(x, p=p, return_mask=True)
    chance = p * p + (1 - p) * (1 - p)
    for a, b in (
        (mask[1:], mask[:-1]),
        (mask[:, 1:], mask[:, :-1]),
        (mask[:, 8:], mask[:, :-8]),
        (mask, other),
        (mask, later),
    ):
        assert abs((a == b).float().mean().item() - chance) < 6 * (chance * (1 - chance) / a.numel()) ** 0.5


def test_the_mask_follows_torchs_seed():
    x = torch.ones(8, 64, device=DEVICE)
    masks = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        masks.append(dropout_add_norm(x, p=0.5, return_mask=True)[1])
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


def test_without_dropout_the_generator_is_left_alone():
    x = torch.ones(2, 16, device=DEVICE)
    state = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
    _, mask = dropout_add_norm(x, p=0.0, return_mask=True)
    after = torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()
    assert mask.all() and torch.equal(state, after)


def test_checkpoint_recomputes_the_same_mask():
    x, weight = randn(6, 64), randn(64)

    def function(x):
        return dropout_add_norm(torch.tanh(x), x, weight, p=0.5)

    torch.manual_seed(3)
    (plain,) = torch.autograd.grad(function(x).square().sum(), x)
    torch.manual_seed(3)
    (recomputed,) = torch.autograd.grad(
        checkpoint(function, x, use_reentrant=False, preserve_rng_state=True).square().sum(), x
    )
    assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout_of_the_inputs(dtype):
    for (_, x), (_, residual) in zip(layouts(6, 48, dtype), reversed(list(layouts(6, 48, dtype))), strict=True):
        expected = dropout_add_norm(x.contiguous(), residual.contiguous(), prenorm=True)
        assert_equal(expected, dropout_add_norm(x, residual, prenorm=True))


def test_non_contiguous_upstream_gradients():
    x = randn(6, 48)
    out = dropout_add_norm(x)
    upstream = torch.randn(48, 6, device=DEVICE).t()
    (a,) = torch.autograd.grad(out, x, upstream, retain_graph=True)
    (b,) = torch.autograd.grad(out, x, upstream.contiguous())
    assert torch.equal(a, b)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_number_spoils_its_own_row_only(value):
    x, residual = randn(4, 40, grad=False), randn(4, 40, grad=False)
    clean = dropout_add_norm(x, residual)
    x[2, 7] = value
    out = dropout_add_norm(x, residual)
    assert not out[2].isfinite().any()
    assert_equal([clean[[0, 1, 3]]], [out[[0, 1, 3]]])


def test_the_plain_pytorch_path_agrees_with_the_kernel(monkeypatch):
    tensors, keywords = arguments((5, 40), torch.float32, {"with": ("second", "rowscale", "layerscale", "x_bias")})
    kernel = call(dropout_add_norm, tensors, keywords, prenorm=True)
    assert type(kernel[0].grad_fn).__name__ == "_FunctionBackward"
    tensors = {n: t.cpu() for n, t in tensors.items()}
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    plain = call(dropout_add_norm, tensors, keywords, prenorm=True)
    assert type(plain[0].grad_fn).__name__ != "_FunctionBackward"
    for a, b in zip(kernel, plain, strict=True):
        torch.testing.assert_close(a.cpu(), b)
    _, mask, second_mask = call(dropout_add_norm, tensors, {"p": 0.5}, return_mask=True)
    assert 0 < mask.float().mean() < 1 and not torch.equal(mask, second_mask)


BAD = [
    (dict(x=[1.0]), TypeError, "x must be a tensor, not list"),
    (dict(x=torch.ones(2, 4, dtype=torch.int32)), TypeError, "x has dtype torch.int32; convert it"),
    (dict(x=torch.ones(2, 0)), ValueError, "must be 1 to 65536 wide"),
    (dict(x=torch.ones(())), ValueError, "must be 1 to 65536 wide"),
    (dict(x=torch.ones(1, 65537)), ValueError, "must be 1 to 65536 wide"),
    (dict(residual=torch.ones(2, 5)), ValueError, r"residual has shape \(2, 5\), but \(2, 4\) is needed"),
    (dict(residual=torch.ones(2, 4, device="meta")), ValueError, "residual is on meta, but x is on"),
    (dict(weight=torch.ones(3)), ValueError, "weight has shape"),
    (dict(bias=torch.ones(4)), TypeError, "a bias needs a weight of the same dtype"),
    (dict(weight=torch.ones(4), bias=torch.ones(4).half()), TypeError, "a bias needs a weight of the same dtype"),
    (dict(rowscale=torch.ones(4)), ValueError, "rowscale has shape"),
    (dict(layerscale=torch.ones(2)), ValueError, "layerscale has shape"),
    (dict(x_bias=torch.ones(2)), ValueError, "x_bias has shape"),
    (dict(second=torch.ones(2, 4).half()), TypeError, "second is torch.float16, but x is torch.float32"),
    (dict(residual=torch.ones(2, 4).double()), TypeError, "float64 mixes with no other dtype"),
    (dict(p=1.0), ValueError, r"p is 1.0; a dropout probability lies in \[0, 1\)"),
    (dict(p=-0.1), ValueError, "dropout probability"),
    (dict(p=float("nan")), ValueError, "dropout probability"),
    (dict(p="0.1"), ValueError, "dropout probability"),
    (dict(eps=-1.0), ValueError, "eps is -1.0; give a number of at least 0"),
    (dict(eps=None), ValueError, "eps is None"),
    (dict(norm="batch"), ValueError, "norm is 'batch'; choose 'layer' or 'rms'"),
    (dict(zero_centered=True), ValueError, "zero_centered needs norm='rms' and a weight"),
    (dict(residual_dtype=torch.int8), TypeError, "residual_dtype is torch.int8; choose"),
    (dict(out_dtype=torch.int8), TypeError, "out_dtype is torch.int8; choose a floating-point dtype"),
    (dict(out_dtype=torch.float64), TypeError, "out_dtype is torch.float64; choose .* float64 for x of float64 alone"),
    (dict(x=torch.ones(2, 4).double(), out_dtype=torch.float32), TypeError, "out_dtype is torch.float32; choose"),
    (dict(out_dtype="float32"), TypeError, "out_dtype is float32; choose"),
    (dict(residual=torch.ones(2, 4), residual_dtype=torch.bfloat16), TypeError, "but residual is torch.float32"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_input_is_one_sentence(wrong, kind, message):
    arguments = {"x": torch.ones(2, 4), **wrong}
    moved = {
        k: v.to(DEVICE) if isinstance(v, torch.Tensor) and v.device.type == "cpu" else v for k, v in arguments.items()
    }
    with pytest.raises(kind, match=message) as caught:
        dropout_add_norm(moved.pop("x"), **moved)
    assert str(caught.value).startswith("dropout_add_norm: ") and "\n" not in str(caught.value)


def test_a_machine_without_triton_is_told_so(monkeypatch):
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    with pytest.raises(RuntimeError, match="pip install 'triton>=3.6'"):
        dropout_add_norm(randn(2, 8))


def test_the_reference_needs_no_triton_at_all():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from tilewright.ops import dropout_add_norm\n"
        "x = torch.ones(2, 8, requires_grad=True); dropout_add_norm(x, p=0.1).sum().backward(); print('ok')"
    )
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "ok", done.stderr


DTYPES_TOGETHER = (  # of x, residual and weight
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.float32, None),
    (torch.float64, torch.float64, torch.float64),
)


@pytest.mark.parametrize("shared_memory", [49_152, 101_376, 166_912, 232_448])
def test_every_width_and_dtype_has_a_shape_that_triton_and_the_gpu_can_take(monkeypatch, shared_memory):
    monkeypatch.setattr(dispatch, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(dispatch, "shared_memory", lambda device: shared_memory)
    device = torch.device("cuda", 0)
    widths = {*range(1, 70), *(2**k + d for k in range(7, 17) for d in (-1, 0, 1)), 768, 2560, 5120, 7168, 12288, 14336}
    for width in sorted(w for w in widths if w <= 65536):
        for x, residual, weight in DTYPES_TOGETHER:
            full = (x, residual, residual, x, x, x, weight, weight)
            plain = (x, residual, residual, None, None, None, weight, weight)
            for dtypes in (full, plain):
                plan = launches.backward_plan.__wrapped__(
                    device, width, dtypes, torch.float32, x, (True,) * 8, False, False, True
                )
                _, rows, block, chunks, paired, stages, *_ = plan.main.constants
                assert plan.programs >= 1 and plan.slices * block * chunks >= width
                assert paired == (plan.slices == 2) and (plan.row_sums is not None) == (plan.slices > 2)
                assert all(n & (n - 1) == 0 for n in (rows, block, plan.main.warps)) and plan.main.warps <= 32
                bias = dtypes[7] if dtypes is full else None
                loaded = sum(d.itemsize for d in (*dtypes[:4], dtypes[5], bias) if d is not None)
                assert stages == 1 or (stages - 1) * rows * block * chunks * loaded < shared_memory
            rows, together, launch = launches.forward_launch.__wrapped__(
                device, width, (x, *[None] * 8, x, residual), False, False, True
            )
            block = launch.constants[1]
            assert all(n & (n - 1) == 0 for n in (rows, block, launch.warps)) and 1 <= launch.warps <= 32
            apart = 1 if width % 8 == 0 else 8
            assert plan.together == apart and plan.programs % apart == 0
            assert together == (apart if launch.kernel is kernels.tilewright_dropout_add_norm_forward else 1)
            assert rows * block <= 2048 or rows == 1


def test_cost_counts_the_bytes_of_the_tensors_it_names():
    n = 6 * 40
    assert cost(6, 40).bytes == 8 * n
    assert cost(6, 40, backward=True).bytes == 10 * n
    assert cost(6, 40, residual_bytes=4).bytes == (2 + 4 + 2 + 4) * n
    assert cost(6, 40, residual_bytes=4, backward=True, dropout=False).bytes == (2 + 4 + 4 + 2 + 4) * n


@on_gpu
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_small_eager_calls_by_torchs_own_ops_are_the_same_function(monkeypatch, norm, p):
    tensors, keywords = arguments(
        (16, 96), torch.float32, {"norm": norm, "without": ("bias",) if norm == "rms" else ()}
    )
    leaves = [t for t in tensors.values() if t is not None]
    fused = call(dropout_add_norm, tensors, keywords, prenorm=True)
    monkeypatch.setattr(OP, "HOST_BOUND", 65536)
    plain = call(dropout_add_norm, tensors, keywords, prenorm=True)
    assert type(plain[1].grad_fn).__name__ == "AddBackward0"  # no Python in backward
    upstream = [torch.randn_like(t) for t in plain]
    for a, b in zip(
        [*fused, *gradients(fused, leaves, upstream)], [*plain, *gradients(plain, leaves, upstream)], strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    _, residual = call(dropout_add_norm, tensors, {**keywords, "p": p}, prenorm=True)
    dropped = (residual == tensors["residual"]).float().mean().item()
    assert abs(dropped - p) < 0.08


@on_gpu
def test_cuda_graph_replays_draw_new_masks_and_follow_the_seed():
    x = torch.ones(16, 256, device="cuda")
    dropout_add_norm(x, p=0.5, return_mask=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, residual, mask = dropout_add_norm(x, p=0.5, prenorm=True, return_mask=True)
    seen = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.cuda.manual_seed(seed)
        graph.replay()
        assert torch.equal(residual != 0, mask)
        seen.append(mask.clone())
    assert not torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


@on_gpu
def test_cuda_graph_of_forward_and_backward_equals_eager():
    # Backward runs on the stream of its forward, so that all of it belongs on the stream that is captured.
    with torch.cuda.stream(torch.cuda.Stream()):
        tensors, _ = arguments((64, 768), torch.bfloat16, {})
        leaves = list(tensors.values())

        def both():
            out = call(dropout_add_norm, tensors, {}, prenorm=True)
            return [t.detach() for t in (*out, *gradients(out, leaves, [torch.ones_like(t) for t in out]))]

        expected = both()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = both()
        for _ in range(3):
            graph.replay()
            torch.cuda.current_stream().synchronize()
            assert_equal(expected, captured)


@on_gpu
@pytest.mark.parametrize("width", [2048, 12288])
def test_a_thousand_launches_are_bit_equal(width):
    tensors, _ = arguments((4096, width), torch.bfloat16, {"p": 0.1})

    def run():
        torch.manual_seed(0)
        out = call(dropout_add_norm, tensors, {"p": 0.1}, prenorm=True)
        return [*out, *gradients(out, list(tensors.values()), [torch.ones_like(t) for t in out])]

    first = run()
    for _ in range(1000):
        for a, b in zip(first, run(), strict=True):
            assert torch.equal(a, b)


@on_gpu
def test_more_than_two_to_the_31_elements():
    rows, width = 2**20 + 3, 2048
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out, residual, mask = dropout_add_norm(x, p=0.5, prenorm=True, return_mask=True)
    tail = slice(rows - 64, rows)
    expected, expected_residual = reference(x.detach()[tail].double(), p=0.5, masks=[mask[tail]])
    assert_near_truth([out[tail], residual[tail]], [expected, expected_residual], reduced=width)
    (dx,) = torch.autograd.grad(residual, x, torch.ones_like(residual))
    assert torch.equal(dx[tail] != 0, mask[tail])
    assert not torch.equal(mask[0], mask[-1])


@on_gpu
def test_the_context_survives_a_refused_call():
    x = torch.ones(4, 8, device="cuda")
    with pytest.raises(ValueError, match="move one of them"):
        dropout_add_norm(x, torch.ones(4, 8))
    assert dropout_add_norm(x).isfinite().all()


def test_a_mean_much_larger_than_the_standard_deviation_costs_no_more_than_torchs():
    errors = {"ours": 0.0, "torch": 0.0}
    for seed in range(3):
        torch.manual_seed(seed)
        x = (torch.randn(64, 256, device=DEVICE) + 1000.0).requires_grad_()
        weight, bias = (torch.randn(256, device=DEVICE, requires_grad=True) for _ in range(2))
        residual, upstream = torch.zeros_like(x), torch.randn_like(x)
        (found,) = torch.autograd.grad(dropout_add_norm(x, residual, weight, bias), weight, upstream)
        (peer,) = torch.autograd.grad(F.layer_norm(x, (256,), weight, bias), weight, upstream)
        doubles = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
        exact = F.layer_norm(doubles[0], (256,), *doubles[1:])
        (exact,) = torch.autograd.grad(exact, doubles[1], upstream.double())
        for name, dweight in (("ours", found), ("torch", peer)):
            errors[name] += float((dweight.double() - exact).norm() / exact.norm())
    assert errors["ours"] <= 1.05 * errors["torch"]
