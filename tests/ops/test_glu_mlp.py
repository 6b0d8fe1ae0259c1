"""The kernels need a Hopper. Elsewhere plain PyTorch takes their place, so that what is around them, which gradient
goes where and in which dtype, is held against float64 on every machine."""

from __future__ import annotations

import sys

import pytest
import torch

from ops.contract import (
    DEVICE,
    HOPPER,
    assert_deterministic,
    assert_equal,
    assert_near_truth,
    assert_no_worse,
    doubles,
    on_hopper,
)
from ops.matmul_stand_ins import glu_gradient, glu_value
from tilewright.nn import GatedMLP
from tilewright.ops import explain
from tilewright.ops.glu_mlp.op import ACTIVATIONS, glu_mlp, reference
from tilewright.runtime import cublaslt, hopper, paths

op = sys.modules["tilewright.ops.glu_mlp.op"]
linear = sys.modules["tilewright.ops.linear.op"]
BF16, FP32 = torch.bfloat16, torch.float32
# Tiles are 256 rows by 96 of gate and of up, in backward by 192: whole, cut short, less than one.
TILES = [(256, 64, 192), (512, 128, 384), (300, 72, 200), (129, 8, 8), (1, 768, 3072), (1000, 520, 1000)]
SHAPES = TILES if HOPPER else [(256, 64, 192), (129, 8, 8), (1, 72, 200)]
kinds = pytest.mark.parametrize("kind", ACTIVATIONS)


@pytest.fixture
def fused(monkeypatch):
    """Every size is fused, by the kernels or by what stands for them here; the list fills with what was called."""
    called = []
    monkeypatch.setattr(op, "IS_ON", True)
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 0)
    if not HOPPER:
        monkeypatch.setattr(linear, "_DEVICES", (DEVICE,))
        monkeypatch.setattr(hopper, "ready", lambda device, *names: names[0].startswith("tilewright_glu_mlp"))
        monkeypatch.setattr(op, "_value", glu_value)
        monkeypatch.setattr(op, "_gradient", glu_gradient)
    for name in ("_value", "_gradient"):
        kernel = getattr(op, name)
        monkeypatch.setattr(op, name, lambda *inputs, n=name, k=kernel: called.append(n) or k(*inputs))
    return called


def leaves_of(rows, width, inner, *, parameter=FP32, bias=True, out=None):
    def randn(*shape, dtype=parameter, scale=1.0):
        return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()

    out = width if out is None else out
    return [
        randn(rows, width, dtype=BF16),
        randn(inner, width, scale=width**-0.5),
        randn(inner, width, scale=width**-0.5),
        randn(out, inner, scale=inner**-0.5),
        randn(out) if bias else None,
    ]


def run(function, leaves, upstream, autocast=True, **options):
    with torch.autocast(DEVICE, BF16, enabled=autocast):
        out = function(*leaves, **options)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, upstream.to(out.dtype))]


def assert_alike(actual, expected):
    """But for elements that are rounded another way."""
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype and (one - other).norm() <= 0.005 * other.norm()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("parameter", "bias"), [(FP32, True), (BF16, False)], ids=str)
@kinds
def test_output_and_gradients(shape, parameter, bias, kind, fused):
    rows, width, inner = shape
    leaves = leaves_of(rows, width, inner, parameter=parameter, bias=bias)
    upstream = torch.randn(rows, width, device=DEVICE).to(BF16)
    actual = run(glu_mlp, leaves, upstream, autocast=parameter == FP32, activation=kind)
    assert fused == ["_value", "_gradient"]
    seen = [None if t is None else t.detach().to(BF16 if t.ndim > 1 else t.dtype).requires_grad_() for t in leaves]
    expected = run(reference, doubles(seen), upstream.double(), autocast=False, activation=kind)
    assert [t.dtype for t in actual] == [BF16, *(t.dtype for t in leaves if t is not None)]
    # What lies between the matmuls has 16 bits, whatever the dtype of a gradient is.
    assert_near_truth([t.to(BF16) for t in actual], expected, reduced=max(shape))
    plain = run(reference, leaves, upstream, autocast=parameter == FP32, activation=kind)
    for trio in zip(actual, plain, expected, strict=True):
        if trio[0].numel() >= 10_000:  # who is nearer is a question of chance where there are few elements to ask
            assert_no_worse(*([one] for one in trio))


@kinds
def test_what_is_not_kept_is_computed_again(kind, fused):
    leaves, upstream = leaves_of(24, 16, 40), torch.randn(24, 16, device=DEVICE)
    expected = run(glu_mlp, leaves, upstream, activation=kind)
    actual = run(glu_mlp, leaves, upstream, activation=kind, keep=False)
    assert_alike(actual, expected)
    held = []
    for keep in (True, False):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t.numel()) or t, lambda t: t):
            run_forward = torch.autocast(DEVICE, BF16)(lambda keep=keep: glu_mlp(*leaves, activation=kind, keep=keep))
            run_forward()
        held.append(sum(saved))
    assert held[0] - held[1] == 24 * 40


def test_more_dimensions_another_width_out_and_a_strided_gradient(fused):
    leaves = leaves_of(24, 16, 40, out=32)
    x = leaves[0].detach().view(2, 3, 4, 16).requires_grad_()
    wide = torch.randn(24, 64, device=DEVICE).to(BF16)
    flat = run(glu_mlp, leaves, wide[:, ::2].clone())
    actual = run(glu_mlp, [x, *leaves[1:]], wide[:, ::2].view(2, 3, 4, 32))
    assert actual[0].shape == (2, 3, 4, 32) and actual[1].shape == x.shape
    assert_equal([t.flatten() for t in flat], [t.flatten() for t in actual])


def test_gradients_that_nobody_wants_are_none_and_the_rest_the_same(fused):
    leaves, upstream = leaves_of(24, 16, 40), torch.randn(24, 16, device=DEVICE)
    y, dx, *_ = run(glu_mlp, leaves, upstream)
    leaves[4].requires_grad_(False)
    x = leaves[0].detach()
    with torch.autocast(DEVICE, BF16):
        out = glu_mlp(x, *leaves[1:])
    assert_equal([out], [y])
    with torch.autocast(DEVICE, BF16):
        out = glu_mlp(*leaves)
    assert_equal(torch.autograd.grad(out, leaves[0], upstream.to(out.dtype)), [dx])


@pytest.mark.parametrize(
    "change",
    [{"frozen": 1}, {"frozen": 2}, {"frozen": 3}, {"width": 12}, {"inner": 44}, {"out": 12}, {"rows": 0},
     {"autocast": torch.float16}, {"grad": False}, {"off": True}],
    ids=str,
)  # fmt: skip
def test_what_the_kernels_cannot_do_is_done_by_parts_that_say_why(change, fused, monkeypatch):
    leaves = leaves_of(change.get("rows", 24), change.get("width", 16), change.get("inner", 40), out=change.get("out"))
    if "frozen" in change:
        leaves[change["frozen"]].requires_grad_(False)
    monkeypatch.setattr(op, "IS_ON", "off" not in change)
    with torch.autocast(DEVICE, change.get("autocast", BF16)), torch.set_grad_enabled(change.get("grad", True)):
        with explain() as explained:
            y = glu_mlp(*leaves)
        torch.testing.assert_close(y, reference(*leaves), rtol=0.02, atol=0.02)
    assert not fused
    assert [path.why for path in explained if path.op == "glu_mlp" and path.ran == paths.PARTS] != [""]


def test_the_registered_op_is_what_compilers_expect(fused):
    leaves = leaves_of(6, 16, 24)
    casts = [leaf.detach().to(BF16) for leaf in leaves[1:4]]
    names = ["test_schema", "test_autograd_registration", "test_faketensor"]
    torch.library.opcheck(torch.ops.tilewright.glu_mlp.default, (*leaves, *casts, "silu", True), test_utils=names)
    y, g, u, activated = op._launch(op.Inputs(*(t.detach() for t in leaves), *casts, "silu", True))
    inputs = y, leaves[0].detach(), g, u, activated, *casts, [True] * 4, [True] * 5, "silu"
    torch.library.opcheck(torch.ops.tilewright.glu_mlp_backward.default, inputs, test_utils=names)


def test_it_has_no_second_derivative(fused):
    leaves = leaves_of(24, 16, 40)
    with torch.autocast(DEVICE, BF16), pytest.raises(RuntimeError, match="glu_mlp has no second derivative"):
        torch.autograd.grad(glu_mlp(*leaves).sum(), leaves[0], create_graph=True)


@pytest.mark.parametrize(
    ("index", "shape", "sentence"),
    [
        (0, (), "x must be a tensor whose last dimension holds the features"),
        (1, (), "gate must be a matrix"),
        (1, (40, 24), "gate has shape"),
        (2, (24, 16), "up has shape"),
        (3, (16, 24), "down has shape"),
        (4, (24,), "down_bias has shape"),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(index, shape, sentence, fused):
    leaves = leaves_of(24, 16, 40)
    leaves[index] = torch.zeros(shape, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, BF16), pytest.raises(ValueError, match=f"glu_mlp: {sentence}"):
        glu_mlp(*leaves)
    with pytest.raises(ValueError, match="glu_mlp: activation is 'relu'; choose silu, gelu_tanh, gelu"):
        glu_mlp(*leaves_of(24, 16, 40), activation="relu")
    assert not fused


@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh", "geglu"])
def test_the_module_takes_it_with_and_without_recompute(activation, fused):
    x = torch.randn(24, 16, device=DEVICE, dtype=BF16, requires_grad=True)
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        mlp = GatedMLP(16, 40, activation=activation, recompute=recompute).to(DEVICE)
        with torch.autocast(DEVICE, BF16):
            y = mlp(x)
        found.append([y, *torch.autograd.grad(y.sum(), [x, *mlp.parameters()])])
    assert fused == ["_value", "_gradient"] * 2
    assert_alike(*found)
    heard = []
    mlp.up_proj.register_forward_hook(lambda *_: heard.append(True))
    with torch.autocast(DEVICE, BF16):
        torch.testing.assert_close(mlp(x), y, rtol=0.02, atol=0.02)
    assert heard and len(fused) == 4


# The kernels themselves.


@on_hopper
@kinds
def test_runs_are_bit_equal_and_read_nothing_unwritten(kind, fused):
    leaves = leaves_of(1000, 520, 1000)
    upstream = torch.randn(1000, 520, device=DEVICE)
    assert_deterministic(lambda: run(glu_mlp, leaves, upstream, activation=kind))


@on_hopper
@pytest.mark.parametrize("processors", [2, 4, 10])
@pytest.mark.parametrize("shape", [(1000, 520, 1000), (4096, 768, 3072)], ids=str)
def test_tiles_that_come_after_others_have_the_same_bits(processors, shape, fused, monkeypatch):
    rows, width, inner = shape
    leaves, upstream = leaves_of(rows, width, inner), torch.randn(rows, width, device=DEVICE)
    expected = run(glu_mlp, leaves, upstream)
    monkeypatch.setattr(op.dispatch, "multiprocessors", lambda device: processors)
    assert_equal(run(glu_mlp, leaves, upstream), expected)


@on_hopper
def test_what_is_not_a_number_comes_out(fused):
    leaves = leaves_of(256, 64, 192)
    leaves[0].data[7] = float("nan")
    y, dx, *_ = run(glu_mlp, leaves, torch.ones(256, 64, device=DEVICE))
    assert y[7].isnan().all() and y[8:].isfinite().all() and dx[7].isnan().all() and dx[:7].isfinite().all()


@on_hopper
def test_a_captured_graph_repeats_it(fused):
    leaves, upstream = leaves_of(1024, 256, 768), torch.randn(1024, 256, device=DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = run(glu_mlp, leaves, upstream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            actual = run(glu_mlp, leaves, upstream)
        for tensor in actual:
            tensor.fill_(7.0)
        graph.replay()
    torch.cuda.synchronize()
    assert_equal(actual, expected)
