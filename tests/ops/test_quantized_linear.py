import functools

import pytest
import torch
import torch.nn.functional as F

from ops.contract import (
    DEVICE,
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
from tilewright import ops
from tilewright.ops.quantized_linear import launch
from tilewright.ops.quantized_linear.op import _OP, _UNPACK, Inputs, Packed
from tilewright.ops.quantized_linear.reference import dequantize, reference
from tilewright.runtime import paths

BF16, FP16 = torch.bfloat16, torch.float16
# (kind, outputs, inputs, group, zero points): ragged, whole steps, more steps than are in flight, several splits
LAYERS = (
    ("int8", 33, 70, 0, False), ("int8", 1, 1, 0, False), ("int8", 140, 2048, 0, False), ("fp8", 19, 130, 0, False),
    ("fp8", 16, 1024, 0, False), ("int4", 17, 192, 32, True), ("int4", 40, 256, 64, False), ("int4", 9, 64, 32, False),
    ("int4", 70, 640, 128, True),
)  # fmt: skip


def layer(kind, outputs, inputs, group=0, zeros=False):
    """(weight, scale, zero) of random bits, but for NaN."""
    if kind == "int8":
        weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=DEVICE)
    elif kind == "fp8":
        bits = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
        weight = torch.where(bits & 127 == 127, 0, bits).view(torch.float8_e4m3fn)
    else:
        weight = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=DEVICE)
        scale = (torch.rand(inputs // group, outputs, device=DEVICE) + 0.1).to(BF16)
        zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, device=DEVICE) if zeros else None
        return weight, scale, zero
    return weight, torch.rand(outputs, device=DEVICE) + 0.1, None


def call(kind, x, packed, *added, **options):
    weight, scale, zero = packed
    if kind == "int4":
        return ops.int4_linear(x, weight, scale, zero, *added, **options)
    return getattr(ops, f"{kind}_linear")(x, weight, scale, *added, **options)


def check(kind, packed, x, bias=None, residual=None):
    """Forward and gradients against float64, and no further from it than PyTorch on an unpacked weight."""
    leaves = [x, bias, residual]
    truth_leaves = doubles(leaves)
    truth = reference(truth_leaves[0], *packed, *truth_leaves[1:])
    y = call(kind, x, packed, bias, residual)
    peer_leaves = [None if t is None else t.detach().clone().requires_grad_() for t in leaves]
    peer = F.linear(peer_leaves[0], dequantize(*packed, x.dtype), peer_leaves[1])
    peer = peer if residual is None else peer + peer_leaves[2]
    assert y.dtype == x.dtype
    assert_near_truth([y], [truth], x.shape[-1])
    several = min(y.numel(), x.numel()) >= 256  # of few numbers chance decides whose are rounded the better way
    if several:
        assert_no_worse([y], [peer], [truth])
    upstream = [torch.randn_like(y)]
    actual, exact, theirs = (
        gradients([out], some, upstream) for out, some in ((y, leaves), (truth, truth_leaves), (peer, peer_leaves))
    )
    assert_near_truth(actual, exact, y.shape[-1])
    # The interpreter cuts the bfloat16 of an unpacked weight off, and that of its matmul.
    if several and (DEVICE != "cpu" or x.dtype == FP16):
        assert_no_worse(actual, theirs, exact)


@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_forward_and_gradients_are_near_the_truth(case, dtype):
    kind, outputs, inputs, *_ = case
    packed = layer(*case)
    for rows in (1, 9) if inputs < 600 else (33,):
        check(kind, packed, randn(rows, inputs, dtype=dtype))
    bias, residual = randn(outputs, dtype=torch.float32 if dtype == FP16 else dtype), randn(2, 9, outputs, dtype=dtype)
    check(kind, packed, randn(2, 9, inputs, dtype=dtype), bias.to(dtype), residual)


@pytest.mark.parametrize("kind", ("int8", "fp8", "int4"))
def test_more_rows_than_the_kernels_take_are_multiplied_by_pytorch(kind, monkeypatch):
    monkeypatch.setattr(launch, "MOST_ROWS", 4)
    packed = layer(kind, 24, 128, 64, kind == "int4")
    for added in ((None, None), (randn(24, dtype=FP16), None), (None, randn(5, 24, dtype=FP16))):
        check(kind, packed, randn(5, 128, dtype=FP16), *added)
    check(kind, packed, randn(5, 128, dtype=FP16), randn(24, dtype=FP16), randn(5, 24, dtype=FP16))


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ("int8", "int4"))
@pytest.mark.parametrize("most", (4, launch.MOST_ROWS), ids=("PyTorch", "kernel"))
def test_an_activation_is_no_further_from_float64_than_one_behind_the_layer(kind, activation, most, monkeypatch):
    monkeypatch.setattr(launch, "MOST_ROWS", most)
    packed, x, apply = layer(kind, 140, 512, 64, True), randn(5, 512, dtype=FP16, grad=False), ACTIVATIONS[activation]
    x *= 0.003 if kind == "int8" else 0.05
    bias, residual = randn(140, dtype=FP16, grad=False), randn(5, 140, dtype=FP16, grad=False)
    truth = apply(reference(x.double(), *packed, bias.double()))
    y = call(kind, x, packed, bias, activation=activation)
    peer = apply(F.linear(x, dequantize(*packed, FP16), bias))
    assert_near_truth([y], [truth], 512)
    assert_no_worse([y], [peer], [truth])
    y = call(kind, x, packed, bias, residual, activation=activation)
    assert_near_truth([y], [truth + residual], 512)
    assert torch.allclose(
        reference(x.double(), *packed, bias.double(), residual.double(), activation), truth + residual
    )


def test_a_gradient_goes_through_an_activation():
    packed, leaves = layer("int8", 24, 64), [randn(3, 64), randn(24), randn(3, 24)]
    for dtype in (torch.float32, FP16):
        given = [t.detach().to(dtype).requires_grad_() for t in leaves]
        y = ops.int8_linear(given[0] * 0.01, *packed[:2], *given[1:], activation="silu")
        exact = doubles(given)
        truth = F.silu(reference(exact[0] * 0.01, *packed, exact[1])) + exact[2]
        upstream = [torch.randn_like(y)]
        assert_near_truth([y, *gradients([y], given, upstream)], [truth, *gradients([truth], exact, upstream)], 64)


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_a_packed_weight_is_unpacked_to_the_numbers_it_stands_for(case):
    packed = layer(*case)
    assert torch.equal(launch.dequantize(Packed(*packed, FP16)), dequantize(*packed, FP16))


@pytest.mark.parametrize("code", range(0, 256, 51))
def test_every_byte_of_fp8_and_every_nibble_of_int4_is_read_as_what_it_is(code):
    """One-hot inputs select single weights, so that no sum hides one. float16 has all values of e4m3, and int4's."""
    some = (torch.arange(256, device=DEVICE) + code) % 256
    weight = torch.where(some & 127 == 127, 0, some).to(torch.uint8).view(torch.float8_e4m3fn)[None]
    eye, one = torch.eye(256, dtype=FP16, device=DEVICE)[code : code + 51], torch.ones(1, device=DEVICE)
    assert torch.equal(ops.fp8_linear(eye, weight, one)[:, 0], weight[0, code : code + 51].half())
    nibbles, scale = some[:128].to(torch.uint8)[None], torch.ones(4, 1, device=DEVICE)
    exact = dequantize(nibbles, scale)[0, code : code + 51].half()
    assert torch.equal(ops.int4_linear(eye, nibbles, scale)[:, 0], exact)


TILES = (
    launch.Tiles(16, 16, 64, 1, 4, 3, 3), launch.Tiles(32, 8, 64, 4, 1, 2, 4), launch.Tiles(32, 32, 64, 1, 2, 1, 2, 2),
)  # fmt: skip


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize(("kind", "inputs"), (("int8", 700), ("int8", 768), ("int4", 704), ("int4", 768)))
def test_any_tiles_give_the_same_numbers(kind, inputs, tiles):
    packed, x = layer(kind, 70, inputs, 64, True), randn(35, inputs, dtype=FP16, grad=False)
    bias, residual = randn(70, grad=False), randn(35, 70, dtype=FP16, grad=False)
    y = torch.full((35, 70), float("nan"), dtype=FP16, device=DEVICE)
    for activation in ("", "gelu_tanh"):
        launch.multiply(Inputs(x, *packed, bias, residual, activation), y, tiles)
        truth = reference(x.double(), *packed, bias.double(), residual.double(), activation)
        assert_near_truth([y], [truth], inputs)


def test_many_rows_and_few_programs_split_the_inner_dimension():
    chosen = launch.tiles(32, 4096, 14336, None, 132)
    assert chosen.splits == 4 and chosen.columns == 128 and launch.tiles(1, 4096, 14336, None, 132).splits == 1
    assert launch.tiles(32, 128, 256, None, 132).splits == 1, "too short to be split"


@pytest.mark.parametrize("group", (None, 32, 64, 128))
def test_tiles_of_any_sizes_are_whole_warps_and_leave_no_split_empty(group):
    for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65, launch.MOST_ROWS):
        for columns, inner in ((1, 64), (100, 1024), (1024, 8192), (4096, 14336), (8192, 8192), (128256, 4096)):
            for processors in (1, 46, 132):
                tiles = launch.tiles(rows, columns, inner, group, processors, zeros=group == 128)
                assert max(tiles.slices, tiles.chunks) % tiles.warps == 0 and min(tiles.slices, tiles.chunks) == 1
                assert 1 <= tiles.splits <= max(1, inner // tiles.block_k)
                assert tiles.block_m >= min(rows, 8)


def test_explain_says_of_how_many_rows_16_bits_are_faster():
    packed = layer("int8", 8, 64)
    for rows, remark in ((launch.FEW_ROWS, ""), (launch.FEW_ROWS + 1, "above 48 rows a weight of 16 bits is faster")):
        with ops.explain() as found:
            ops.int8_linear(randn(rows, 64, dtype=FP16, grad=False), *packed[:2])
        assert [(path.ran, path.why.partition(":")[0]) for path in found] == [(paths.KERNEL, remark)]


def test_rows_of_any_number_and_stride():
    packed = layer("int8", 12, 48)
    assert ops.int8_linear(randn(0, 48, dtype=BF16), *packed[:2]).shape == (0, 12)
    assert ops.int8_linear(randn(48, dtype=BF16), *packed[:2]).shape == (12,)
    assert ops.int8_linear(randn(2, 0, 48, dtype=BF16), *packed[:2]).shape == (2, 0, 12)
    for name, x in layouts(5, 48, FP16):
        residual = dict(layouts(5, 12, FP16))[name]
        y = ops.int8_linear(x, *packed[:2], None, residual)
        assert_near_truth([y], [reference(x.double(), *packed, None, residual.double())], 48)
    weight = torch.randint(-9, 9, (48, 12), dtype=torch.int8, device=DEVICE).t()
    x = randn(3, 48, dtype=FP16)
    assert_equal([ops.int8_linear(x, weight, packed[1])], [ops.int8_linear(x, weight.contiguous(), packed[1])])


def test_other_dtypes_are_plain_pytorch_and_say_so():
    packed, x = layer("int4", 8, 64, 32, True), randn(3, 64)
    with ops.explain() as found:
        y = ops.int4_linear(x, *packed)
    assert [(path.ran, "float32" in path.why) for path in found] == [(paths.REFERENCE, True)]
    assert_near_truth([y], [reference(x.double(), *packed)], 64)
    with torch.autocast(DEVICE, BF16):
        assert ops.int4_linear(x, *packed).dtype == BF16


def test_gradcheck_of_the_reference():
    packed = layer("int8", 3, 4)
    inputs = [randn(*shape, dtype=torch.float64) for shape in ((2, 4), (3,), (2, 3))]
    assert torch.autograd.gradcheck(lambda x, *added: ops.int8_linear(x, *packed[:2], *added), inputs)


@pytest.mark.parametrize("kind", ("int8", "fp8", "int4"))
def test_bit_equal_in_poisoned_memory(kind):
    packed, x = layer(kind, 40, 256, 64, True), randn(18, 256, dtype=FP16)
    assert_deterministic(lambda: [call(kind, x, packed), *gradients([call(kind, x, packed)], [x], [x[:, :40]])])


def test_compiles_as_one_graph():
    packed = layer("int4", 8, 64, 64)
    assert_compiles(lambda x: (ops.int4_linear(x, *packed),), [randn(3, 64, dtype=FP16)])


def test_opcheck():
    for kind in ("int8", "int4"):
        x, packed = randn(3, 64, dtype=FP16), layer(kind, 8, 64, 32, True)
        torch.library.opcheck(_OP.registered, (x, *packed, randn(8, dtype=FP16), None, "gelu"))
        torch.library.opcheck(_UNPACK.registered, (*packed, FP16))


@on_gpu
def test_a_captured_graph_computes_what_its_inputs_hold_when_it_is_replayed():
    packed, x = layer("int8", 256, 1024), randn(32, 1024, dtype=BF16, grad=False)
    ops.int8_linear(x, *packed[:2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.int8_linear(x, *packed[:2])
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert_equal([y], [ops.int8_linear(x, *packed[:2])])


X, W, S = (torch.zeros(2, 64, device=DEVICE, dtype=dtype) for dtype in (BF16, torch.int8, torch.float32))
S, W4, S4 = S[:, 0], W[:, :32].to(torch.uint8), S[:, :1].t().to(BF16).repeat(2, 1)


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        (ops.int8_linear, (X, W.float(), S), "weight has dtype torch.float32, but int8 is needed"),
        (ops.fp8_linear, (X, W, S), "weight has dtype torch.int8, but float8_e4m3fn is needed"),
        (ops.int8_linear, (X[:, :3], W, S), "x has 3 features and the weight 64"),
        (ops.int8_linear, (X[0, 0], W, S), "x is a scalar"),
        (ops.int8_linear, (X.int(), W, S), "x has dtype torch.int32"),
        (ops.int8_linear, (X, W[0], S), "a matrix is needed"),
        (ops.int8_linear, (X, W[:0], S), "a matrix is needed"),
        (ops.int8_linear, (X, W, S[:1]), r"scale has shape \(1,\), but \(2,\) is needed"),
        (ops.int8_linear, (X, W, None), "scale must be a tensor, not NoneType"),
        (ops.int8_linear, (X, W, S.clone().requires_grad_()), "scale requires a gradient and gets none"),
        (ops.int8_linear, (X, W, S, X[0]), r"bias has shape \(64,\), but \(2,\)"),
        (ops.int8_linear, (X, W, S, None, X), r"residual has shape \(2, 64\), but \(2, 2\)"),
        (ops.int8_linear, (X, W, S, None, X[:, :2].half()), "residual is torch.float16 and x is torch.bfloat16"),
        (ops.int8_linear, (X, W.to("meta"), S), "weight is on meta, but x is on"),
        (ops.int4_linear, (X, W4, S), r"scale has shape \(2,\), but \(2, 2\) or \(1, 2\) is needed"),
        (ops.int4_linear, (X[:, :62], W4[:, :31], S4), "62 features are no multiple of 64"),
        (ops.int4_linear, (X, W4, S4, W4), "zero has shape"),
        (ops.int4_linear, (X, W4, S4, S4), "zero has dtype torch.bfloat16, but uint8 is needed"),
    ],
)
def test_bad_arguments_are_one_sentence(function, arguments, says):
    with pytest.raises((TypeError, ValueError), match=says) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(function.__name__)


@pytest.mark.parametrize("activation", ("relu", None, "tanh"))
def test_an_unknown_activation_is_one_sentence(activation):
    with pytest.raises(ValueError, match="int8_linear: activation is .*; choose 'silu', 'gelu' or 'gelu_tanh'"):
        ops.int8_linear(X, W, S, activation=activation)
