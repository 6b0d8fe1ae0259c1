"""The kernels need a Hopper. Elsewhere plain PyTorch takes their place, so that what is around them, which gradient
goes where and in which dtype, is held against float64 on every machine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F

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
from ops.matmul_stand_ins import gelu_gradient, gelu_value
from tilewright.measure.work import Observation
from tilewright.models import GPT
from tilewright.nn import GeluMLP
from tilewright.ops.gelu_mlp.op import fused_gelu_mlp, gelu_mlp, reference
from tilewright.plan.gpt import GPTConfig
from tilewright.runtime import cublaslt, hopper

op = sys.modules["tilewright.ops.gelu_mlp.op"]
linear = sys.modules["tilewright.ops.linear.op"]
linear_launch = sys.modules["tilewright.ops.linear.launch"]
BF16, FP32 = torch.bfloat16, torch.float32
# Tiles are 256 x 192, and what a stage holds of the inner dimension is 64: whole, cut short, less than one.
TILES = [(256, 64, 192), (512, 128, 384), (300, 72, 200), (129, 8, 8), (1, 768, 3072), (1000, 520, 1000)]
SHAPES = TILES if HOPPER else [(256, 64, 192), (129, 8, 8), (1, 72, 200)]


def gelu_mlp_by_erf(*leaves):
    return gelu_mlp(*leaves, approximate="none")


def reference_by_erf(*leaves):
    return reference(*leaves, approximate="none")


def lean_gelu_mlp(*leaves):
    return fused_gelu_mlp(*leaves, lean=True)


def lean_gelu_mlp_by_erf(*leaves):
    return fused_gelu_mlp(*leaves, lean=True, approximate="none")


WAYS = {
    "keeps its slopes": gelu_mlp, "lean": lean_gelu_mlp,
    "by erf": gelu_mlp_by_erf, "lean, by erf": lean_gelu_mlp_by_erf,
}  # fmt: skip
REFERENCES = {gelu_mlp_by_erf: reference_by_erf, lean_gelu_mlp_by_erf: reference_by_erf}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def biased(x, weight, bias, out):
    assert x.numel()  # TMA has no matrix without rows
    out.copy_(F.linear(x, weight, bias.to(x.dtype)))


@pytest.fixture
def fused(monkeypatch):
    """Every size is fused, by the kernels or by what stands for them here; the list fills with what was called."""
    called = []
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 0)
    monkeypatch.setattr(op, "_LEAST_BUSY", 0.0)
    if not HOPPER:
        monkeypatch.setattr(linear, "_DEVICES", (DEVICE,))
        monkeypatch.setattr(hopper, "ready", lambda device, *names: True)
        monkeypatch.setattr(op, "_value", gelu_value)
        monkeypatch.setattr(op, "_gradient", gelu_gradient)
        monkeypatch.setattr(linear_launch, "matmul_with_bias", biased)
    for name in ("_value", "_gradient"):
        kernel = getattr(op, name)
        monkeypatch.setattr(op, name, lambda *inputs, n=name, k=kernel: called.append(n) or k(*inputs))
    return called


def leaves_of(rows, width, inner, *, parameter=FP32, biases=(True, True), out=None):
    def randn(*shape, dtype, scale=1.0):
        return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()

    out = width if out is None else out
    return [
        randn(rows, width, dtype=BF16),
        randn(inner, width, dtype=parameter, scale=width**-0.5),
        randn(inner, dtype=parameter) if biases[0] else None,
        randn(out, inner, dtype=parameter, scale=inner**-0.5),
        randn(out, dtype=parameter) if biases[1] else None,
    ]


def run(function, leaves, upstream, autocast=True):
    with torch.autocast(DEVICE, BF16, enabled=autocast):
        out = function(*leaves)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return [out, *torch.autograd.grad(out, wanted, upstream.to(out.dtype))]


def truth(leaves, upstream, plain=reference):
    """In float64, of what the matmuls see: all but the biases in 16 bits."""
    seen = [None if t is None else t.detach().to(BF16 if t.ndim > 1 else t.dtype) for t in leaves]
    seen = [None if t is None else t.requires_grad_(leaf.requires_grad) for t, leaf in zip(seen, leaves, strict=True)]
    return run(plain, doubles(seen), upstream.double(), autocast=False)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("parameter", [FP32, BF16], ids=str)
@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, False)], ids=str)
@ways
def test_output_and_gradients(shape, parameter, biases, way, fused):
    rows, width, inner = shape
    leaves = leaves_of(rows, width, inner, parameter=parameter, biases=biases)
    upstream = torch.randn(rows, width, device=DEVICE).to(BF16)
    actual = run(way, leaves, upstream, autocast=parameter == FP32)
    assert fused == ["_value", "_gradient"]
    definition = REFERENCES.get(way, reference)
    expected = truth(leaves, upstream, definition)
    assert [t.dtype for t in actual] == [BF16, *(t.dtype for t in leaves if t is not None)]
    # What lies between the matmuls has 16 bits, whatever the dtype of a gradient is.
    assert_near_truth([t.to(BF16) for t in actual], expected, reduced=max(shape))
    plain = run(definition, leaves, upstream, autocast=parameter == FP32)
    # Who is nearer is a question of chance where there are few elements to ask.
    many = [trio for trio in zip(actual, plain, expected, strict=True) if trio[0].numel() >= 10_000]
    assert many or min(shape) < 64, "no tensor is large enough to ask"
    for trio in many:
        assert_no_worse(*([one] for one in trio))


@ways
def test_more_dimensions_and_another_width_out(way, fused):
    leaves = leaves_of(24, 16, 40, out=32)
    x = leaves[0].detach().view(2, 3, 4, 16).requires_grad_()
    upstream = torch.randn(24, 32, device=DEVICE)
    flat = run(way, leaves, upstream)
    actual = run(way, [x, *leaves[1:]], upstream.view(2, 3, 4, 32))
    assert actual[0].shape == (2, 3, 4, 32) and actual[1].shape == x.shape
    assert_equal([t.flatten() for t in flat], [t.flatten() for t in actual])
    assert len(fused) == 4


@ways
def test_a_transposed_input_and_a_strided_gradient(way, fused):
    leaves = leaves_of(64, 16, 40)
    x = leaves[0].detach().t().contiguous().t().requires_grad_()
    wide = torch.randn(64, 32, device=DEVICE).to(BF16)
    assert_equal(run(way, leaves, wide[:, ::2].clone()), run(way, [x, *leaves[1:]], wide[:, ::2]))


@ways
@pytest.mark.parametrize("frozen", [(0,), (2,), (4,), (0, 2, 4)], ids=str)
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen, way, fused):
    leaves, upstream = leaves_of(24, 16, 40), torch.randn(24, 16, device=DEVICE)
    expected = [t for i, t in enumerate(run(way, leaves, upstream)) if i - 1 not in frozen]
    for index in frozen:
        leaves[index].requires_grad_(False)
    assert_equal(run(way, leaves, upstream), expected)
    assert len(fused) == 4


@pytest.mark.parametrize("large", [30.0, 1e4, 1e18])
@ways
def test_far_from_zero_the_gelu_is_0_or_z_and_its_slope_0_or_1(large, way, fused):
    up = torch.tensor([[1.0], [-1.0]], device=DEVICE).repeat(4, 8).requires_grad_()
    down = torch.ones(8, 8, device=DEVICE).requires_grad_()
    x = torch.zeros(256, 8, device=DEVICE, dtype=BF16)
    x[:, 0] = large
    x.requires_grad_()
    y, dx, *_ = run(way, [x, up, None, down, None], torch.ones(256, 8, device=DEVICE))
    seen = float(x[0, 0])
    assert (y == 4 * seen).all() and (dx == 32.0).all()


@ways
def test_what_is_not_a_number_comes_out(way, fused):
    leaves = leaves_of(256, 64, 192)
    leaves[0].data[7] = float("nan")
    y, dx, *_ = run(way, leaves, torch.ones(256, 64, device=DEVICE))
    assert y[7].isnan().all() and y[8:].isfinite().all() and dx[7].isnan().all() and dx[:7].isfinite().all()


@pytest.mark.parametrize(
    "change",
    [
        {"frozen": 1},
        {"frozen": 3},
        {"width": 12},
        {"inner": 44},
        {"out": 12},
        {"autocast": torch.float16},
        {"grad": False},
        {"rows": 0},
    ],
    ids=str,
)
def test_what_the_kernels_cannot_do_is_done_without_them(change, fused):
    leaves = leaves_of(change.get("rows", 24), change.get("width", 16), change.get("inner", 40), out=change.get("out"))
    if "frozen" in change:
        leaves[change["frozen"]].requires_grad_(False)
    with torch.autocast(DEVICE, change.get("autocast", BF16)), torch.set_grad_enabled(change.get("grad", True)):
        y = gelu_mlp(*leaves)
        torch.testing.assert_close(y, reference(*leaves), rtol=0.02, atol=0.02)
        assert fused_gelu_mlp(*leaves, lean=True) is None
    assert not fused


def test_where_its_tiles_leave_processors_idle_it_is_done_without_them(fused, monkeypatch):
    monkeypatch.setattr(op, "_LEAST_BUSY", 0.83)
    share = iter((0.82, 0.84, 0.1))
    monkeypatch.setattr(hopper, "busy_share", lambda rows, columns, device: next(share))
    for expected in (0, 2):
        gelu_mlp(*leaves_of(24, 16, 40, parameter=BF16)).sum().backward()
        assert len(fused) == expected
    assert lean_gelu_mlp(*leaves_of(24, 16, 40, parameter=BF16)) is not None  # to keep less is what it is for


@pytest.mark.parametrize(("rows", "columns", "share"), [(512, 14336, 0.754), (1024, 14336, 0.905), (16896, 192, 1.0)])
def test_the_busy_share_is_that_of_whole_waves(rows, columns, share, monkeypatch):
    monkeypatch.setattr(hopper.dispatch, "multiprocessors", lambda device: 132)
    assert hopper.busy_share(rows, columns, torch.device(DEVICE)) == pytest.approx(share, abs=1e-3)


def test_under_compile_it_is_one_graph(fused):
    leaves = leaves_of(24, 16, 40)
    with torch.autocast(DEVICE, BF16):
        y = torch.compile(gelu_mlp, backend="aot_eager", fullgraph=True)(*leaves)
    torch.testing.assert_close(y, run(reference, leaves, torch.ones(24, 16, device=DEVICE))[0], rtol=0.02, atol=0.02)
    assert not fused


@ways
def test_it_has_no_second_derivative(way, fused):
    leaves = leaves_of(24, 16, 40)
    with torch.autocast(DEVICE, BF16), pytest.raises(RuntimeError, match="gelu_mlp has no second derivative"):
        torch.autograd.grad(way(*leaves).sum(), leaves[0], create_graph=True)


@pytest.mark.parametrize(
    ("index", "shape", "sentence"),
    [
        (0, (), "x must be a tensor whose last dimension holds the features"),
        (1, (40, 24), "up has shape"),
        (1, (), "up must be a matrix"),
        (2, (24,), "up_bias has shape"),
        (3, (16, 24), "down has shape"),
        (3, None, "down must be a matrix"),
        (4, (24,), "down_bias has shape"),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(index, shape, sentence, fused):
    leaves = leaves_of(24, 16, 40)
    leaves[index] = None if shape is None else torch.zeros(shape, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, BF16), pytest.raises(ValueError, match=f"gelu_mlp: {sentence}"):
        gelu_mlp(*leaves)
    assert not fused


def test_other_dtypes_and_an_unknown_gelu_are_refused(fused):
    leaves = leaves_of(24, 16, 40)
    with pytest.raises(TypeError, match="gelu_mlp: down_bias has dtype torch.int64"):
        gelu_mlp(*leaves[:4], torch.zeros(16, device=DEVICE, dtype=torch.int64))
    with pytest.raises(ValueError, match="gelu_mlp: approximate is 'erf'; choose tanh or none"):
        gelu_mlp(*leaves, approximate="erf")
    assert not fused


def kept_by(function, *inputs):
    """How many bytes autograd keeps for a backward, and what comes out."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(*inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), out


def test_a_module_that_recomputes_keeps_one_tensor_of_the_inner_width(fused):
    rows, width, inner = 64, 16, 64
    x = torch.randn(rows, width, device=DEVICE, dtype=BF16, requires_grad=True)
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        mlp = GeluMLP(width, inner, recompute=recompute).to(DEVICE)
        with torch.autocast(DEVICE, BF16):
            kept, y = kept_by(mlp, x)
        found.append((kept, y, *torch.autograd.grad(y, [x, *mlp.parameters()], torch.ones_like(y), retain_graph=True)))
        again = torch.autograd.grad(y, [x, *mlp.parameters()], torch.ones_like(y))  # nothing that is kept has changed
        assert_equal(again, found[-1][2:])
    assert fused == ["_value", "_gradient", "_gradient"] * 2
    assert found[0][0] - found[1][0] == 2 * rows * inner
    for a, b in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_a_block_that_recomputes_selectively_gives_up_what_its_mlp_takes(fused):
    config = GPTConfig(width=32, layers=1, heads=2, vocabulary=64, sequence=16, gpt_block="optimized")
    tokens, found = torch.arange(64, device=DEVICE).view(4, 16), []
    for changes in ({}, {"mlp": "recompute"}, {"recompute": "selective"}):
        torch.manual_seed(0)
        model, taken = GPT(dataclasses.replace(config, **changes)).to(DEVICE), []
        mlp = model.blocks[0].mlp
        mlp.register_forward_pre_hook(lambda _, inputs, taken=taken: taken.append(weakref.ref(inputs[0])))
        with torch.autocast(DEVICE, BF16):
            loss = model(tokens, tokens)
        assert (taken[0]() is None) == ("recompute" in changes)
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert fused == ["_value", "_gradient"] * 3
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=2e-3)


@on_hopper
def test_backward_has_the_activation_of_forward_to_the_bit(fused, monkeypatch):
    values = []
    forward, backward = op._value, op._gradient
    monkeypatch.setattr(op, "_value", lambda *inputs: values.append(out := forward(*inputs)) or out)
    monkeypatch.setattr(op, "_gradient", lambda *inputs: values.append(out := backward(*inputs)) or out)
    leaves = leaves_of(300, 72, 200)
    run(lean_gelu_mlp, leaves, torch.randn(300, 72, device=DEVICE))
    (value, _), (_, _, again) = values
    assert_equal([again], [value])


@pytest.mark.parametrize("how", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_module_whose_matmul_somebody_listens_to_runs_that_matmul(how, fused):
    mlp, heard = GeluMLP(16, 40).to(DEVICE), []
    x = torch.randn(24, 16, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, BF16):
        silent = mlp(x)
        assert fused == ["_value"]
        getattr(mlp.down, f"register_{how}")(lambda *_: heard.append(True))
        y = mlp(x)
    torch.testing.assert_close(y, silent, rtol=0.02, atol=0.02)
    y.sum().backward()
    assert heard and fused == ["_value"]


def test_a_matmul_with_another_forward_runs_that(fused):
    mlp = GeluMLP(16, 40).to(DEVICE)
    mlp.down.forward = lambda inner: inner[..., :16] * 0.0
    with torch.autocast(DEVICE, BF16):
        assert not mlp(torch.randn(24, 16, device=DEVICE)).any()


def test_the_registered_op_is_what_compilers_expect(fused):
    for lean, erf in ((False, True), (True, False)):
        leaves = leaves_of(6, 16, 24)
        casts = [leaf.detach().to(BF16) for leaf in (leaves[1], leaves[3])]
        names = ["test_schema", "test_autograd_registration", "test_faketensor"]
        torch.library.opcheck(torch.ops.tilewright.gelu_mlp.default, (*leaves, *casts, lean, erf), test_utils=names)
        y, activated, kept = op._launch(op.Inputs(*leaves, *casts, lean, erf))
        tensors = y, leaves[0].detach(), None if lean else activated, kept, *casts
        inputs = op.Gradient(*tensors, [True] * 4, [True] * 5, erf)
        detached = [each.detach() if isinstance(each, torch.Tensor) else each for each in inputs]
        torch.library.opcheck(torch.ops.tilewright.gelu_mlp_backward.default, tuple(detached), test_utils=names)


# The kernels themselves.


@on_hopper
@ways
def test_runs_are_bit_equal_and_read_nothing_unwritten(way, fused):
    leaves = leaves_of(1000, 520, 1000)
    upstream = torch.randn(1000, 520, device=DEVICE)
    assert_deterministic(lambda: run(way, leaves, upstream))


@on_hopper
@ways
def test_a_row_does_not_depend_on_the_rows_around_it(way, fused):
    """Nor on which of two neighbours computes it, nor in which turn."""
    leaves = leaves_of(2048, 256, 768)
    upstream = torch.randn(2048, 256, device=DEVICE)
    whole = run(way, leaves, upstream)
    for begin, end in ((0, 1), (127, 128), (128, 384), (1000, 1700)):
        part = [leaves[0].detach()[begin:end].clone().requires_grad_(), *leaves[1:]]
        assert_equal(run(way, part, upstream[begin:end])[:2], [t[begin:end] for t in whole[:2]])


@on_hopper
@ways
@pytest.mark.parametrize("processors", [2, 4, 6, 10])
@pytest.mark.parametrize("shape", [(1000, 520, 1000), (2048, 256, 768), (4096, 768, 3072)], ids=str)
def test_tiles_that_come_after_others_have_the_same_bits(processors, shape, way, fused, monkeypatch):
    """Few processors take many tiles each, in turns; all of them take one or none."""
    rows, width, inner = shape
    leaves, upstream = leaves_of(rows, width, inner), torch.randn(rows, width, device=DEVICE)
    expected = run(way, leaves, upstream)
    monkeypatch.setattr(op.dispatch, "multiprocessors", lambda device: processors)
    assert_equal(run(way, leaves, upstream), expected)


@on_hopper
def test_the_first_thing_that_a_thread_does():
    """Autograd's thread has no context before the runtime has done something in it."""
    code = (
        "import sys, torch; from tilewright.ops import explain, gelu_mlp; from tilewright.runtime import cublaslt\n"
        "op = sys.modules['tilewright.ops.gelu_mlp.op']\n"
        "cublaslt.WORTH_CHOOSING = 0; op.HOST_BOUND = op._LEAST_BUSY = -1\n"
        "shapes = (256, 64), (192, 64), (64, 192)\n"
        "x, up, down = (torch.randn(s, device='cuda').bfloat16().requires_grad_() for s in shapes)\n"
        "with explain() as paths: y = gelu_mlp(x, up, None, down)\n"
        "assert [path.ran for path in paths if path.op == 'gelu_mlp'] == ['kernel']; g = torch.randn_like(y)\n"
        "torch.autograd.grad(y, x, g); torch.cuda.synchronize()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@on_hopper
@ways
def test_a_captured_graph_repeats_it(way, fused):
    leaves = leaves_of(1024, 256, 768)
    upstream = torch.randn(1024, 256, device=DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = run(way, leaves, upstream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            actual = run(way, leaves, upstream)
        for tensor in actual:
            tensor.fill_(7.0)
        graph.replay()
    torch.cuda.synchronize()
    assert_equal(actual, expected)


@on_hopper
def test_an_observer_sees_its_matmuls():
    leaves = leaves_of(8192, 1024, 4096)
    observation = Observation(compiled=False)
    observation.begin()
    run(gelu_mlp, leaves, torch.randn(8192, 1024, device=DEVICE))
    torch.cuda.synchronize()
    seen = {work.op: work for work in observation.end()}
    for name in ("value", "gradient"):
        work = seen[f"tilewright_gelu_mlp_matmul_{name}"]
        assert work.flops == 2 * 8192 * 1024 * 4096 and work.seconds > 0


def test_odd_sizes_are_padded_to_whole_vectors_with_the_same_result(monkeypatch):
    linear_op = sys.modules["tilewright.ops.linear.op"]
    monkeypatch.setattr(linear_op, "_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(linear_op, "WORTH_PADDING", 0)
    sizes, real = [], linear_op.reference
    monkeypatch.setattr(linear_op, "reference", lambda x, w, b: (sizes.extend(w.shape), real(x, w, b))[1])
    shapes = ((6, 9), (21, 9), (21,), (9, 21), (9,))
    leaves = [torch.randn(*shape, device=DEVICE).bfloat16().requires_grad_() for shape in shapes]
    y = gelu_mlp(*leaves)
    assert sizes and all(size % 8 == 0 for size in sizes) and y.is_contiguous() and y.shape == (6, 9)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    expected = reference(*doubles)
    upstream = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, leaves, upstream)]
    for a, e in zip(found, [expected, *torch.autograd.grad(expected, doubles, upstream.double())], strict=True):
        assert a.shape == e.shape and (a.double() - e).norm() <= 0.02 * e.norm()
