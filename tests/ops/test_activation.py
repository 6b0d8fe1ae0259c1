import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

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
from tilewright.ops.activation import op
from tilewright.ops.activation.op import bias_gelu, cost, geglu, reference, swiglu
from tilewright.runtime import dispatch

FUNCTIONS = {
    "swiglu": swiglu,
    "geglu tanh": geglu,
    "geglu erf": lambda gate, up=None, *, bias=None: geglu(gate, up, bias=bias, approximate="none"),
    "bias_gelu tanh": lambda x, up=None, *, bias=None: bias_gelu(x, bias),
    "bias_gelu erf": lambda x, up=None, *, bias=None: bias_gelu(x, bias, approximate="none"),
}
ACTIVATIONS = {"swiglu": "silu", "tanh": "gelu_tanh", "erf": "gelu"}
FORMS = [
    (name, form, has_bias)
    for name, has_bias in itertools.product(FUNCTIONS, (False, True))
    for form in (("plain",) if name.startswith("bias") else ("separate", "packed"))
]


def problem(form, has_bias, shape, dtype, bias_dtype=None, scale=2.0):
    """[gate, up, bias], None where the form has it not; `shape` is that of the output."""
    torch.manual_seed(sum(shape))
    width = shape[-1] if form == "plain" else 2 * shape[-1]
    gate = randn(*shape[:-1], width if form == "packed" else shape[-1], dtype=dtype, grad=False)
    gate = (scale * gate).requires_grad_()
    up = randn(*shape, dtype=dtype) if form == "separate" else None
    return [gate, up, randn(width, dtype=bias_dtype or dtype) if has_bias else None]


def run(function, leaves, upstream):
    out = function(*leaves)
    return [out, *gradients([out], leaves, [upstream])]


def ours(name):
    return lambda gate, up, bias: FUNCTIONS[name](gate, up, bias=bias)


def definition(name):
    activation, gated = ACTIVATIONS[name.split()[-1]], not name.startswith("bias")
    return lambda gate, up, bias: reference(gate, up, bias, activation=activation, gated=gated)


def torch_ops(name):
    """The same in PyTorch's own ops, in the dtype of the tensors: what a user has instead."""
    kind = name.split()[-1]

    def function(gate, up, bias):
        if name.startswith("bias"):
            x = gate if bias is None else gate + bias
            return F.gelu(x, approximate="tanh" if kind == "tanh" else "none")
        gate, up = gate.chunk(2, -1) if up is None else (gate, up)
        if bias is not None:
            gate, up = gate + bias.chunk(2)[0], up + bias.chunk(2)[1]
        return (
            F.silu(gate) if name == "swiglu" else F.gelu(gate, approximate="tanh" if kind == "tanh" else "none")
        ) * up

    return function


def truth(name, leaves, upstream):
    return run(definition(name), doubles(leaves), upstream)


@pytest.mark.parametrize(("name", "form", "has_bias"), FORMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_and_gradients_match_float64_and_are_no_worse_than_torch(dtype, name, form, has_bias):
    leaves = problem(form, has_bias, (40, 264), dtype)
    upstream = randn(40, 264, grad=False)
    actual, expected = run(ours(name), leaves, upstream), truth(name, leaves, upstream.to(dtype))
    assert all(t.dtype == dtype for t in actual)
    assert_near_truth(actual, expected, reduced=40)
    # Triton's interpreter cuts bfloat16 off, and most at just under a number: where the GELU is nearly its input.
    if DEVICE == "cuda" or dtype != torch.bfloat16 or form != "plain":
        assert_no_worse(actual, run(torch_ops(name), leaves, upstream), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_reference_is_torchs_own(name):
    leaves = problem("plain" if name.startswith("bias") else "packed", True, (3, 10), torch.float64)
    torch.testing.assert_close(definition(name)(*leaves), torch_ops(name)(*leaves), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("shape", [*SHAPES, (3, 2500), (700, 3)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("form", ["separate", "packed"])
def test_any_shape(shape, has_bias, form):
    leaves = problem(form, has_bias, shape, torch.float32)
    upstream = randn(*shape, grad=False)
    actual = run(swiglu_of, leaves, upstream)
    assert_near_truth(actual, truth("swiglu", leaves, upstream), reduced=700)


def swiglu_of(gate, up, bias):
    return swiglu(gate, up, bias=bias)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_is_exact_to_float64(name):
    leaves = problem("plain" if name.startswith("bias") else "separate", True, (5, 60), torch.float64)
    upstream = randn(5, 60, dtype=torch.float64, grad=False)
    for a, b in zip(run(ours(name), leaves, upstream), truth(name, leaves, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_gradcheck_of_the_kernel_in_float64(name, has_bias):
    leaves = problem("plain" if name.startswith("bias") else "separate", has_bias, (3, 5), torch.float64, scale=1.0)
    given = [t for t in leaves if t is not None]

    def function(*tensors):
        left = iter(tensors)
        return ours(name)(*(None if t is None else next(left) for t in leaves))

    assert torch.autograd.gradcheck(function, given)


@pytest.fixture
def launched(monkeypatch):
    """The tensors that each launch was given."""
    seen = []
    launch = dispatch.Launch.__call__

    def record(self, grid, tensors, scalars):
        if not dispatch._rehearsing:
            seen.append(tensors)
        launch(self, grid, tensors, scalars)

    monkeypatch.setattr(dispatch.Launch, "__call__", record)
    return seen


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("rows", "width"), [((6,), 64), ((2, 3), 64), ((6,), 13), ((2, 1, 3), 12)], ids=str)
def test_halves_of_one_tensor_are_read_where_they_are(launched, rows, width, has_bias):
    both, _, bias = problem("packed", has_bias, (*rows, width), torch.bfloat16)
    upstream = randn(*rows, width, dtype=torch.bfloat16, grad=False)
    expected = run(lambda both, _, bias: swiglu(both, bias=bias), [both, None, bias], upstream)
    del launched[:]
    actual = run(lambda both, _, bias: swiglu(*both.chunk(2, -1), bias=bias), [both, None, bias], upstream)
    assert_equal(actual, expected)
    for tensors in launched:
        pointers = [t.data_ptr() for t in tensors if t is not None]
        assert {both.data_ptr(), both.data_ptr() + width * both.itemsize} <= set(pointers)
    assert len(launched) == 2


def test_rows_with_gaps_and_blocks_of_rows_with_gaps(launched):
    """One distance between all rows: read in place. Two distances: copied, and as right."""
    whole = randn(4, 3, 32, grad=False)
    for view, copied in ((whole[:, :, :20], False), (whole[:, :2, :20], True), (whole[:, 1, 4:24], False)):
        del launched[:]
        out = swiglu(view, view)
        torch.testing.assert_close(out, F.silu(view) * view)
        assert (launched[0][0].data_ptr() != view.data_ptr()) == copied


def test_packed_rows_that_overlap():
    """As far apart as they are wide without `up`, which a tensor without gaps is, too."""
    base = randn(33 * 64, grad=False)
    rows = base.unfold(0, 128, 64)
    assert rows.shape == (32, 128) and rows.stride() == (64, 1)
    assert_near_truth([swiglu(rows)], [reference(rows.double())], reduced=1)


def test_any_layout():
    for name, gate in layouts(6, 40, torch.float32):
        gate.requires_grad_()
        up, upstream = randn(6, 40), randn(40, 6, grad=False).t()
        actual, expected = (run(f, [gate, up, None], upstream) for f in (swiglu_of, definition("swiglu")))
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, msg=name)


def test_no_load_is_wider_than_the_rows_are_aligned(monkeypatch):
    """The interpreter loads any element from anywhere: what a GPU loads at once is in the launch's constants."""
    vectors = []
    monkeypatch.setattr(dispatch.Launch, "__call__", lambda self, *arguments: vectors.append(self.constants[3]))
    base = torch.zeros(8, 272, dtype=torch.bfloat16, device=DEVICE)
    for first in range(9):
        swiglu(base[:, first : first + 128], base[:, 8:136])
        swiglu(base[:, 8:136], base[:, first : first + 128])
        swiglu(base[:, first : first + 256])
        assert vectors[-3:] == [{0: 8, 1: 1, 2: 2, 3: 1, 4: 4, 5: 1, 6: 2, 7: 1, 8: 8}[first]] * 3
    for width, vector in ((128, 8), (124, 4), (122, 2), (121, 1)):
        swiglu(torch.zeros(8, 2 * width, dtype=torch.bfloat16, device=DEVICE))  # up starts at `width`
        swiglu(base[:, :width], base[:, :width])  # the output's rows are that long
        assert vectors[-2:] == [vector] * 2
    swiglu(torch.zeros(8, 129, dtype=torch.bfloat16, device=DEVICE)[:, :128])  # rows 129 apart
    assert vectors[-1] == 1


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["geglu tanh", "bias_gelu erf"])
def test_a_bias_of_another_dtype(name, bias_dtype):
    form = "plain" if name.startswith("bias") else "separate"
    leaves = problem(form, True, (37, 50), torch.bfloat16, bias_dtype)
    upstream = randn(37, 50, dtype=torch.bfloat16, grad=False)
    actual = run(ours(name), leaves, upstream)
    assert actual[-1].dtype == bias_dtype
    assert_near_truth(actual, truth(name, leaves, upstream), reduced=37)


@pytest.mark.parametrize("form", ["separate", "packed"])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_only_some_inputs_want_a_gradient(form, which, launched):
    leaves = problem(form, True, (5, 24), torch.float32)
    for index, leaf in enumerate(leaves):
        if leaf is not None:
            leaf.requires_grad_(index in which)
    if not any(t is not None and t.requires_grad for t in leaves):
        pytest.skip("packed, there is no up")
    upstream = randn(5, 24, grad=False)
    assert_near_truth(run(swiglu_of, leaves, upstream), truth("swiglu", leaves, upstream), reduced=5)
    dgate, dup, partials = launched[1][4:]
    assert (dgate is not None) == (0 in which)
    assert (dup is not None) == (1 in which and form == "separate")
    assert (partials is not None) == (2 in which)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_huge_and_infinite_input(name, dtype):
    """Finite input has finite results, which PyTorch's gradient of the GELU by tanh has not."""
    large = [-torch.finfo(dtype).max, -6e4, -200.0, -101.0, 101.0, 200.0, 6e4]
    gate = torch.tensor([large], dtype=dtype, device=DEVICE).requires_grad_()
    up = None if name.startswith("bias") else torch.ones_like(gate)
    out, gradient = run(ours(name), [gate, up, None], torch.ones(1, 7, device=DEVICE))
    torch.testing.assert_close(out, gate.detach().clamp_min(0.0), rtol=0.0, atol=1e-40)
    torch.testing.assert_close(gradient, (gate > 0).to(dtype), rtol=0.0, atol=1e-40)
    unbounded = torch.tensor([[float("inf"), float("nan")]], dtype=dtype, device=DEVICE)
    out = ours(name)(unbounded, None if up is None else torch.ones_like(unbounded), None)
    assert out[0, 0] == float("inf") and out[0, 1].isnan()


def test_tails_keep_their_relative_accuracy():
    """Of what is small beside the rest, a norm would not see the loss."""
    x = torch.linspace(-5.0, 5.0, 2001, device=DEVICE)
    for name in FUNCTIONS:
        up = None if name.startswith("bias") else torch.ones_like(x)
        actual, expected = ours(name)(x, up, None).double(), definition(name)(x.double(), up, None)
        error = ((actual - expected).abs() / expected.abs().clamp_min(1e-30)).max()
        assert error < 2.0**-18, f"{name}: {error:.1e}"


def test_no_second_derivative_eager_or_traced():
    gate, up, _ = problem("separate", False, (3, 8), torch.float32)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(swiglu(gate, up).sum(), gate, create_graph=True)
    with FlopCounterMode(display=False):
        out = swiglu(gate, up)
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(out.sum(), gate, create_graph=True)


@pytest.mark.parametrize(("name", "form", "has_bias"), FORMS, ids=str)
def test_opcheck(name, form, has_bias):
    activation = ACTIVATIONS[name.split()[-1]]
    leaves = problem(form, has_bias, (4, 30), torch.float32)
    torch.library.opcheck(torch.ops.tilewright.activation.default, (*leaves, activation, form != "plain"))
    needs = [t is not None for t in leaves]
    arguments = (randn(4, 30, grad=False), *(None if t is None else t.detach() for t in leaves))
    torch.library.opcheck(
        torch.ops.tilewright.activation_backward.default, (*arguments, activation, form != "plain", needs)
    )


@pytest.mark.parametrize(("name", "form", "has_bias"), FORMS, ids=str)
def test_compiles_into_one_graph_with_the_same_result(name, form, has_bias):
    leaves = problem(form, has_bias, (4, 30), torch.float32)
    given = [t for t in leaves if t is not None]

    def function(*tensors):
        up = tensors[1] if form == "separate" else None
        return (ours(name)(tensors[0], up, tensors[-1] if has_bias else None),)

    assert_compiles(function, given)


def test_same_bits_on_every_run_even_in_poisoned_memory():
    leaves = problem("packed", True, (50, 200), torch.bfloat16)
    upstream = randn(50, 200, grad=False)
    assert_deterministic(lambda: run(swiglu_of, leaves, upstream))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_plain_path_agrees_with_the_kernel(name, monkeypatch, launched):
    leaves = problem("plain" if name.startswith("bias") else "separate", True, (5, 77), torch.float32)
    upstream = randn(5, 77, grad=False)
    kernel = run(ours(name), leaves, upstream)
    assert len(launched) == 2
    monkeypatch.setattr(op.dispatch, "runs_kernel", lambda x: False)
    for a, b in zip(run(ours(name), leaves, upstream), kernel, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert len(launched) == 2


def test_the_functions_of_torch_func_work():
    gate, up, _ = problem("separate", False, (4, 9), torch.float32)
    mapped = torch.func.vmap(torch.func.grad(lambda g, u: swiglu(g, u).sum()))(gate.detach(), up.detach())
    expected = gradients([definition("swiglu")(gate, up, None)], [gate], [torch.ones_like(gate)])
    torch.testing.assert_close(mapped, expected[0])


@pytest.mark.parametrize(
    ("function", "arguments", "keywords", "kind", "message"),
    [
        (swiglu, [(3, 8), (3, 7)], {}, ValueError, "up has shape"),
        (swiglu, [(3, 7)], {}, ValueError, "7 columns have no halves"),
        (swiglu, [()], {}, ValueError, "at least 1 wide"),
        (swiglu, [(3, 0)], {}, ValueError, "at least 1 wide"),
        (swiglu, [3], {}, TypeError, "gate must be a tensor"),
        (bias_gelu, [3], {}, TypeError, "x must be a tensor"),
        (swiglu, [torch.zeros(3, 8, dtype=torch.int32)], {}, TypeError, "convert it"),
        (swiglu, [(3, 8), torch.zeros(3, 8, dtype=torch.bfloat16)], {}, TypeError, "up is torch.bfloat16"),
        (swiglu, [(3, 8), (3, 8)], {"bias": (8,)}, ValueError, r"bias has shape \(8,\), but \(16,\)"),
        (swiglu, [(3, 8)], {"bias": (16,)}, ValueError, r"bias has shape \(16,\), but \(8,\)"),
        (bias_gelu, [(3, 8), (16,)], {}, ValueError, "bias has shape"),
        (bias_gelu, [(3, 8), torch.zeros(8, dtype=torch.float64)], {}, TypeError, "float64"),
        (swiglu, [(3, 8), torch.zeros(3, 8, device="meta")], {}, ValueError, "up is on meta"),
        (geglu, [(3, 8)], {"approximate": "erf"}, ValueError, "geglu: approximate is 'erf'"),
        (bias_gelu, [(3, 8)], {"approximate": None}, ValueError, "bias_gelu: approximate is None"),
    ],
)
def test_bad_input_is_one_sentence(function, arguments, keywords, kind, message):
    def tensor(given):
        if isinstance(given, torch.Tensor) and given.device.type != "meta":
            return given.to(DEVICE)
        return torch.zeros(given, device=DEVICE) if isinstance(given, tuple) else given

    with pytest.raises(kind, match=message) as caught:
        function(*map(tensor, arguments), **{k: tensor(v) for k, v in keywords.items()})
    assert "\n" not in str(caught.value)


def test_cost_counts_each_input_and_output_once():
    assert [cost(10, 100, gated=g, backward=b).bytes for g in (True, False) for b in (False, True)] == [
        6000, 10000, 4000, 6000,
    ]  # fmt: skip


@on_gpu
@pytest.mark.parametrize("has_bias", [False, True])
def test_more_than_two_to_the_31_elements(has_bias):
    rows, width = 270_000, 8192
    leaves = [randn(rows, width, dtype=torch.bfloat16), None, randn(width) if has_bias else None]
    upstream = torch.ones(1, 1, device="cuda", dtype=torch.bfloat16).expand(rows, width)
    out, gradient, *rest = run(ours("bias_gelu tanh"), leaves, upstream)
    tail = slice(rows - 8, rows)
    part = [leaves[0].detach()[tail].requires_grad_(), None, leaves[2]]
    assert_near_truth([out[tail], gradient[tail]], truth("bias_gelu tanh", part, upstream[tail])[:2], reduced=1)
    if has_bias:
        torch.testing.assert_close(rest[0], gradient.sum(0, dtype=torch.float32), rtol=2e-3, atol=10.0)


@on_gpu
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_captured_graph_replays_forward_and_backward(has_bias):
    leaves = problem("separate", has_bias, (64, 512), torch.bfloat16)
    upstream = randn(64, 512, dtype=torch.bfloat16, grad=False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = [t.clone() for t in run(swiglu_of, leaves, upstream)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run(swiglu_of, leaves, upstream)
        for t in captured:
            t.detach().zero_()
        graph.replay()
    stream.synchronize()
    assert_equal(captured, expected)
