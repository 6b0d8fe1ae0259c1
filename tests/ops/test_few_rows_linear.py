import sys

import pytest
import torch

from ops.contract import DEVICE, DTYPES, assert_deterministic, assert_near_truth, assert_no_worse, on_gpu, randn
from tilewright import ops
from tilewright.ops.few_rows_linear.op import MOST_ROWS, cost, few_rows_linear

OP = sys.modules["tilewright.ops.few_rows_linear.op"]
LINEAR = torch.nn.functional.linear


def problem(rows, width, features, dtype=torch.float32, bias=True):
    torch.manual_seed(rows * 1000 + width + features)
    x, weight = randn(rows, width, dtype=dtype, grad=False), randn(features, width, dtype=dtype, grad=False)
    return x, weight, randn(features, dtype=dtype, grad=False) if bias else None


def doubles(inputs):
    return [None if each is None else each.double() for each in inputs]


def ran(*inputs):
    with ops.explain() as paths:
        y = few_rows_linear(*inputs)
    (path,) = paths
    return path.ran, y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "none"])
def test_matches_float64_and_is_no_worse_than_torch(dtype, rows, bias):
    inputs = problem(rows, 1000, 40, dtype, bias)
    path, y = ran(*inputs)
    assert path == "kernel" and y.dtype == dtype
    assert_near_truth([y], [LINEAR(*doubles(inputs))], reduced=1000)
    if DEVICE == "cuda" or dtype != torch.bfloat16:  # Triton's interpreter cuts bfloat16 off
        assert_no_worse([y], [LINEAR(*inputs)], [LINEAR(*doubles(inputs))])


ACTIVATIONS = {
    "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_activation_is_no_further_from_float64_than_one_behind_the_layer(dtype, activation):
    apply, inputs = ACTIVATIONS[activation], problem(3, 1000, 80, dtype)
    inputs[0].mul_(0.1)
    y, truth = few_rows_linear(*inputs, activation=activation), apply(LINEAR(*doubles(inputs)))
    assert_near_truth([y], [truth], reduced=1000)
    if DEVICE == "cuda" or dtype != torch.bfloat16:  # Triton's interpreter cuts bfloat16 off
        assert_no_worse([y], [apply(LINEAR(*inputs))], [truth])
    many = [inputs[0].repeat(4, 1), *inputs[1:]]
    assert torch.equal(few_rows_linear(*many, activation=activation), apply(LINEAR(*many))), "of many rows PyTorch's"


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (1, 2048, 5), (1, 2049, 3), (2, 31, 7), (4, 4100, 2), (3, 128, 1), (1, 16, 40), (2, 5000, 1)],
    ids=str,
)
def test_any_size(sizes):
    inputs = problem(*sizes)
    path, y = ran(*inputs)
    assert path == "kernel"
    assert_near_truth([y], [LINEAR(*doubles(inputs))], reduced=sizes[1])


def test_leading_dimensions_and_none():
    x, weight, bias = problem(2, 40, 6)
    for shape in ((2, 1, 40), (1, 1, 2, 40)):
        torch.testing.assert_close(few_rows_linear(x.view(shape), weight, bias), LINEAR(x.view(shape), weight, bias))
    torch.testing.assert_close(few_rows_linear(x[0], weight, bias), LINEAR(x[0], weight, bias))


def test_layouts():
    x, weight, bias = problem(3, 48, 5)
    apart = torch.empty(3, 96, device=DEVICE)[:, ::2].copy_(x)
    misaligned = torch.empty(weight.numel() + 1, device=DEVICE)[1:].view(weight.shape).copy_(weight)
    biases = torch.stack((bias, bias), 1)[:, 0]
    for inputs in ((apart, weight, bias), (x, misaligned, bias), (x, weight, biases), (x[:1].expand(3, 48), weight)):
        path, y = ran(*inputs)
        assert path == "kernel"
        torch.testing.assert_close(y, LINEAR(*inputs))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x, w, b: (x.expand(MOST_ROWS + 1, 8), w, b), "rows"), (lambda x, w, b: (x[:0], w, b), "rows"),
        (lambda x, w, b: (x, w[:0], b[:0]), "rows"), (lambda x, w, b: (x[:, :0], w[:, :0], b), "rows"),
        (lambda x, w, b: (x.double(), w.double(), b.double()), "float64"),
        (lambda x, w, b: (x, w.t().contiguous().t(), b), "contiguous"),
        (lambda x, w, b: (x, w.clone().requires_grad_(), b), "gradient"),
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_take_is_pytorchs(change, why):
    inputs = change(*problem(1, 8, 4))
    with ops.explain() as paths:
        y = few_rows_linear(*inputs)
    (path,) = paths
    assert path.ran == "PyTorch" and why in path.why
    assert torch.equal(y, LINEAR(*inputs)) and y.requires_grad == inputs[1].requires_grad


def test_autocast_is_pytorchs():
    x, weight, bias = problem(1, 8, 4)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert few_rows_linear(x.bfloat16(), weight, bias).dtype == torch.bfloat16


def test_the_same_bits_on_every_run():
    inputs = problem(2, 300, 7, torch.float16)
    assert_deterministic(lambda: [few_rows_linear(*inputs)])


def test_a_row_does_not_depend_on_the_others():
    x, weight, bias = problem(2, 300, 7, torch.float16)
    assert torch.equal(few_rows_linear(x, weight, bias)[:1], few_rows_linear(x[:1], weight, bias))


def test_one_graph_and_a_registered_op():
    inputs = problem(2, 40, 6)
    torch.library.opcheck(OP._registered, (*inputs, "gelu"))
    torch.compiler.reset()
    compiled = torch.compile(lambda *tensors: few_rows_linear(*tensors) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), few_rows_linear(*inputs) * 2)


@on_gpu
def test_wide_layers_of_models():
    for rows, width, features in ((1, 2048, 128256), (4, 14336, 4096), (2, 896, 4864)):
        inputs = problem(rows, width, features, torch.bfloat16, bias=False)
        assert_no_worse([few_rows_linear(*inputs)], [LINEAR(*inputs)], [LINEAR(*doubles(inputs))])


def test_mistakes_are_one_sentence():
    x, weight, bias = problem(1, 8, 4)
    for inputs, kind, sentence in (
        ((x, weight[0], bias), ValueError, "must be a matrix"),
        ((x[:, :4], weight, bias), ValueError, "weight has shape"),
        ((x, weight, bias[:2]), ValueError, "bias has shape"), ((x, weight.half(), bias), TypeError, "convert one"),
        ((3, weight, bias), TypeError, "x must be a tensor"), ((x[0, 0], weight, bias), ValueError, "scalar"),
    ):  # fmt: skip
        with pytest.raises(kind, match=sentence) as error:
            few_rows_linear(*inputs)
        assert str(error.value).startswith("few_rows_linear: ") and "\n" not in str(error.value)


def test_an_unknown_activation_is_one_sentence():
    with pytest.raises(ValueError, match="few_rows_linear: activation is 'relu'; choose 'silu', 'gelu' or 'gelu_tanh'"):
        few_rows_linear(*problem(1, 8, 4), activation="relu")


def test_cost_counts_the_weight():
    assert cost(1, 8, 4).bytes == 2 * (8 * 4 + 8 + 4) and cost(1, 8, 4).flops == 64
