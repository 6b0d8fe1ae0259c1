"""The C++ layer: float64 truth, gradients, masks, threads; on a GPU its kernels."""

import random

import pytest
import torch

from ops.contract import DEVICE, assert_deterministic, assert_near_truth, assert_no_worse, doubles, on_gpu
from tilewright import ops
from tilewright.ops.self_attention import op as module
from tilewright.ops.self_attention.op import reference, self_attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32, torch.float64)


@pytest.fixture(autouse=True, scope="module")
def library():
    """Compiled once for all tests."""
    why = [extension.why_missing() for extension in module.EXTENSIONS[DEVICE]]
    if any("was found" in each for each in why):
        pytest.skip(f"no compiler: {why}")
    assert not any(why)


def layer(batch, sequence, width, dtype=torch.float32, bias=True, seed=0):
    torch.manual_seed(seed)
    shapes = (batch, sequence, width), (3 * width, width), (3 * width,), (width, width), (width,)
    scales = 1.0, width**-0.5, 0.3, width**-0.5, 0.3
    made = [
        (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_()
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    return made if bias else [each if each.ndim > 1 else None for each in made]


def run(function, inputs, heads, **options):
    """The output and all gradients, for an upstream gradient that depends on the shape alone."""
    out = function(*inputs, heads, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    return [out.detach(), *torch.autograd.grad(out, [t for t in inputs if t is not None], upstream)]


def ran_in_cpp(call):
    with ops.explain() as paths:
        result = call()
    assert [path.ran for path in paths] == ["kernel"], str(paths)
    return result


def draw(seed):
    rng = random.Random(seed)
    heads, head_dim = rng.choice((1, 2, 3, 8)), rng.choice((1, 3, 8, 16, 17, 40, 64, 100, 128))
    sequence = rng.choice((1, 2, 7, 10, 16, 17, 30, 33, 64))
    return rng.choice((1, 2, 5)), sequence, heads, head_dim, rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.7


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_float64_at_drawn_shapes(dtype, seed):
    batch, sequence, heads, head_dim, causal, masked, bias = draw(seed)
    inputs = layer(batch, sequence, heads * head_dim, dtype, bias, seed)
    mask = torch.rand(batch, sequence, device=DEVICE) < 0.6 if masked else None
    options = {"causal": causal, "key_mask": mask}
    ours = ran_in_cpp(lambda: run(self_attention, inputs, heads, **options))
    truth = run(reference, doubles(inputs), heads, **options)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    assert_near_truth(ours, truth, 3 * heads * head_dim + batch * sequence, compute)
    if dtype == torch.float32 and DEVICE == "cpu":
        worst = [2.0 * error for error in errors(run(reference, inputs, heads, **options), truth)]
        assert all(a <= b + 2.0**-22 for a, b in zip(errors(ours, truth), worst, strict=True))


def errors(actual, truth):
    return [((a.double() - t).norm() / t.norm().clamp_min(1e-30)).item() for a, t in zip(actual, truth, strict=True)]


@pytest.mark.skipif(DEVICE == "cuda", reason="there is no float64 on a GPU; above, gradients are compared with it")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal, masked):
    inputs = layer(2, 5, 9, torch.float64)
    mask = torch.tensor([[True, False, True, True, False], [False, False, True, True, True]]) if masked else None
    call = lambda *tensors: self_attention(*tensors, 3, causal=causal, key_mask=mask)  # noqa: E731
    ran_in_cpp(lambda: call(*inputs))
    assert torch.autograd.gradcheck(call, inputs)


def test_a_query_that_sees_no_key_gets_the_bias_and_sends_no_gradient_to_attention():
    inputs = layer(2, 4, 8)
    mask = torch.tensor([[False] * 4, [False, True, True, True]], device=DEVICE)
    out, dx, *_ = ran_in_cpp(lambda: run(self_attention, inputs, 2, causal=True, key_mask=mask))
    bias = inputs[4].detach()
    assert torch.equal(out[0], bias.expand(4, 8)) and torch.equal(out[1, 0], bias)
    assert not torch.equal(out[1, 1], bias)
    assert not dx[0].any() and dx[1].any()


def test_what_is_not_a_number_stays_one_in_its_own_sequence():
    x, *weights = layer(3, 5, 8)
    with torch.no_grad():
        clean = ran_in_cpp(lambda: self_attention(x, *weights, 2))
        x[1] = float("nan")  # all scores of the sequence: none of them may count as masked
        found = ran_in_cpp(lambda: self_attention(x, *weights, 2))
    assert found[1].isnan().all() and torch.equal(found[0], clean[0]) and torch.equal(found[2], clean[2])


@pytest.mark.parametrize("bias", [True, False])
def test_only_what_is_asked_for_gets_a_gradient(bias):
    whole = run(self_attention, layer(2, 5, 12, bias=bias), 3)[1:]
    there = [index for index, each in enumerate(layer(2, 5, 12, bias=bias)) if each is not None]
    for wanted in range(len(there)):
        inputs = layer(2, 5, 12, bias=bias)
        for index in there:
            inputs[index].requires_grad_(index == there[wanted])
        out = self_attention(*inputs, 3)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
        out.backward(upstream)
        assert torch.equal(inputs[there[wanted]].grad, whole[wanted])
        assert all(inputs[index].grad is None for index in there if index != there[wanted])
    with torch.no_grad():
        assert not self_attention(*layer(2, 5, 12), 3).requires_grad
    with torch.inference_mode():
        assert self_attention(*layer(2, 5, 12), 3).is_inference()


def test_a_second_derivative_is_refused():
    inputs = layer(1, 3, 4)
    with pytest.raises(RuntimeError, match="self_attention has no second derivative: leave out create_graph=True"):
        torch.autograd.grad(self_attention(*inputs, 2).sum(), inputs[0], create_graph=True)


def test_an_input_changed_before_backward_is_an_error():
    inputs = layer(1, 3, 4)
    x = inputs[0] * 1
    out = self_attention(x, *inputs[1:], 2)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_strides_do_not_matter():
    inputs = layer(2, 6, 12)
    strided = [torch.stack((each, each), -1)[..., 0].detach().requires_grad_() for each in inputs]
    assert not any(each.is_contiguous() for each in strided)
    expected = run(self_attention, inputs, 3)
    for a, b in zip(run(self_attention, strided, 3), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_reruns_are_bit_equal_in_poisoned_memory():
    assert_deterministic(lambda: run(self_attention, layer(3, 17, 40), 5, causal=True))


@pytest.mark.parametrize("batch,sequence", [(0, 5), (2, 0)])
def test_no_tokens(batch, sequence):
    out, *gradients = run(self_attention, layer(batch, sequence, 8), 2)
    assert out.shape == (batch, sequence, 8)
    assert [each.shape for each in gradients] == [each.shape for each in layer(batch, sequence, 8)]
    assert not any(each.any() for each in gradients)


@pytest.mark.skipif(DEVICE == "cuda", reason="of the CPU's threads")
def test_the_number_of_threads_changes_no_bits_where_matmuls_have_none_changed():
    threads, results, matmuls = torch.get_num_threads(), [], []
    for sequence, width in ((10, 64), (30, 128), (17, 40)):
        inputs = layer(16, sequence, width)
        for count in (1, 2):
            torch.set_num_threads(count)
            try:
                results.append(run(self_attention, inputs, 8))
                matmuls.append(inputs[0].detach() @ inputs[1].detach().t())
            finally:
                torch.set_num_threads(threads)
        for one, two in zip(*results[-2:], strict=True):
            assert torch.equal(one, two)
        assert torch.equal(*matmuls[-2:])


REFUSED = [
    ({"x": torch.zeros(3, 4)}, "x has shape .3, 4., but .batch, sequence, width. is needed"),
    ({"x": torch.zeros(1, 3, 4, dtype=torch.int64)}, "convert it to bfloat16"),
    ({"heads": 3}, "heads is 3; give a divisor of the width, 4"),
    ({"heads": 0}, "heads is 0"),
    ({"qkv_weight": torch.zeros(4, 4)}, "qkv_weight has shape .4, 4., but .12, 4. is needed"),
    ({"out_weight": None}, "out_weight must be a tensor, not NoneType"),
    ({"out_bias": torch.zeros(3)}, "out_bias has shape"),
    ({"qkv_bias": torch.zeros(12, dtype=torch.bfloat16)}, "qkv_bias is torch.bfloat16, but x is torch.float32"),
    ({"key_mask": torch.ones(1, 3)}, "key_mask is torch.float32; give a bool tensor"),
    ({"key_mask": torch.ones(1, 4, dtype=torch.bool)}, "key_mask has shape .1, 4."),
]


@pytest.mark.parametrize("change,sentence", REFUSED, ids=[sentence[:20] for _, sentence in REFUSED])
def test_bad_input_is_one_sentence(change, sentence):
    good = {
        "x": torch.zeros(1, 3, 4), "qkv_weight": torch.zeros(12, 4), "qkv_bias": None,
        "out_weight": torch.zeros(4, 4), "out_bias": None, "heads": 2,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=sentence):
        self_attention(**(good | change))


def test_the_registered_op_keeps_memory_safe_by_itself():
    x, qkv_weight, _, out_weight, _ = (each.detach() for each in layer(2, 3, 8))
    call = torch.ops.tilewright.self_attention
    for arguments in (
        (x, qkv_weight[:8], None, out_weight, None, 2, False, None),
        (x, qkv_weight, None, out_weight[:, :4], None, 2, False, None),
        (x, qkv_weight, None, out_weight, x[0, 0, :3], 2, False, None),
        (x, qkv_weight, None, out_weight, None, 3, False, None),
        (x, qkv_weight, None, out_weight, None, 2, False, x[:1, :, 0] > 5),
    ):
        with pytest.raises(RuntimeError):
            call(*arguments)


def paths_of(call):
    with ops.explain() as paths:
        call()
    return [(path.ran, path.why) for path in paths]


def test_what_cpp_cannot_take_runs_by_pytorch_and_says_why(monkeypatch):
    inputs, other = layer(1, 3, 8), torch.float64 if DEVICE == "cuda" else torch.float16
    ((ran, why),) = paths_of(lambda: self_attention(*[each.to(other) for each in inputs], 2))
    assert ran == "PyTorch" and f"no C++ for {other}" in why
    with torch.autocast(DEVICE, torch.bfloat16):
        ((ran, why),) = paths_of(lambda: self_attention(*inputs, 2))
    assert ran == "PyTorch" and "autocast" in why
    monkeypatch.setitem(module.LONGEST, DEVICE, 2)
    ((ran, why),) = paths_of(lambda: self_attention(*inputs, 2))
    assert ran == "PyTorch" and "at most 2 tokens" in why
    monkeypatch.undo()
    call = lambda x: self_attention(x, *inputs[1:], 2).sum()  # noqa: E731
    ((ran, why),) = paths_of(lambda: torch.func.grad(call)(inputs[0].detach()))
    assert ran == "reference" and "torch.func" in why


def test_a_compiler_sees_one_graph_of_pytorchs_ops():
    inputs = layer(2, 5, 8)
    compiled = torch.compile(lambda *tensors: self_attention(*tensors, 2, causal=True), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), self_attention(*inputs, 2, causal=True))


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 512, 1024])
def test_on_a_gpu_no_further_from_float64_than_eager(width, dtype):
    inputs = layer(16, 30, width, dtype)
    truth = run(reference, doubles(inputs), 8)
    ours, eager = (run(function, inputs, 8) for function in (self_attention, reference))
    assert_no_worse(ours[:1], eager[:1], truth[:1])
    assert_near_truth(ours, truth, 3 * width)
