"""Attention with a backward of its own. What lies around its kernel runs under Triton's interpreter too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ops.contract import (
    DEVICE,
    assert_deterministic,
    assert_equal,
    assert_near_truth,
    assert_no_worse,
    doubles,
    gradients,
    on_hopper,
)
from tilewright.measure.work import Observation
from tilewright.ops import attention as module
from tilewright.ops import attention_kernels as kernels
from tilewright.ops.attention import attention, reference

BF16 = torch.bfloat16
# Of one tile, of several, of a number that is odd, of more blocks than there are processors, of a long one.
SHAPES = [(1, 128, 1, 64), (2, 256, 3, 64), (3, 640, 2, 64), (16, 512, 12, 64), (1, 4096, 2, 64)]


def leaves(shape, how="packed", scale=1.0):
    """Queries, keys and values, as one product gives them or each by itself."""
    torch.manual_seed(sum(shape))
    batch, sequence, heads, width = shape
    if how == "packed":
        parts = (scale * torch.randn(batch, sequence, 3, heads, width, device=DEVICE)).to(BF16).unbind(2)
    elif how == "alone":
        parts = [(scale * torch.randn(shape, device=DEVICE)).to(BF16) for _ in range(3)]
    else:  # heads first
        parts = [torch.randn(batch, heads, sequence, width, device=DEVICE).to(BF16).transpose(1, 2) for _ in range(3)]
    return [part.requires_grad_() for part in parts]


def run(function, inputs, upstream):
    out = function(*inputs)
    return [out.detach(), *gradients([out], inputs, [upstream])]


def upstream_of(shape):
    return torch.randn(shape, device=DEVICE).to(BF16)


def plain(q, k, v):
    """Written out, for float64."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch):
    monkeypatch.setattr(module, "HOST_BOUND", 0)


@pytest.fixture
def launched(monkeypatch):
    """How often the kernel was started."""
    calls, real = [], module._backward
    monkeypatch.setattr(module, "_backward", lambda *tensors: calls.append(1) or real(*tensors))
    return calls


@on_hopper
@pytest.mark.parametrize("how", ["packed", "alone"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_near_the_truth_and_no_worse_than_pytorchs(shape, how, launched):
    inputs, upstream = leaves(shape, how), upstream_of(shape)
    actual = run(attention, inputs, upstream)
    assert len(launched) == 1
    truth = run(plain, doubles(inputs), upstream.double())
    assert_no_worse(actual, run(reference, inputs, upstream), truth)
    assert_near_truth(actual, truth, shape[1])


@on_hopper
@pytest.mark.parametrize("shape", SHAPES[2:4], ids=str)
def test_gradients_are_the_same_on_every_run(shape):
    inputs, upstream = leaves(shape), upstream_of(shape)
    assert_deterministic(lambda: run(attention, inputs, upstream), times=20)


@on_hopper
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_flat_and_very_sharp_attention(scale):
    inputs, upstream = leaves((2, 384, 2, 64), scale=scale), upstream_of((2, 384, 2, 64))
    truth = run(plain, doubles(inputs), upstream.double())
    assert_no_worse(run(attention, inputs, upstream), run(reference, inputs, upstream), truth)


@on_hopper
def test_what_is_not_a_number_stays_in_its_head(launched):
    inputs, upstream = leaves((2, 256, 3, 64), "alone"), upstream_of((2, 256, 3, 64))
    expected = run(attention, inputs, upstream)
    with torch.no_grad():
        inputs[2][1, 7, 1] = float("nan")
    for got, whole in zip(run(attention, inputs, upstream)[1:3], expected[1:3], strict=True):
        assert got[1, :, 1].isnan().any() and not got[0].isnan().any()
        assert_equal([got[1, :, 0], got[1, :, 2], got[0]], [whole[1, :, 0], whole[1, :, 2], whole[0]])


@on_hopper
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_gradient_alone(which):
    inputs, upstream = leaves((1, 256, 2, 64)), upstream_of((1, 256, 2, 64))
    expected = run(attention, inputs, upstream)[1 + which]
    alone = [t.detach().requires_grad_(index == which) for index, t in enumerate(inputs)]
    assert_equal(run(attention, alone, upstream)[1:], [expected])


@on_hopper
def test_a_gradient_that_lies_otherwise(launched):
    inputs = leaves((2, 256, 3, 64))
    expected = run(attention, inputs, torch.ones(2, 256, 3, 64, device=DEVICE, dtype=BF16))
    attention(*inputs).sum().backward()  # whose gradient is one number, everywhere
    assert len(launched) == 2
    assert_equal([t.grad for t in inputs], expected[1:])


@on_hopper
def test_a_captured_graph_replays_forward_and_backward():
    inputs, upstream = leaves((2, 512, 3, 64)), upstream_of((2, 512, 3, 64))
    expected = run(attention, inputs, upstream)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(attention, inputs, upstream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run(attention, inputs, upstream)
        for _ in range(3):
            for tensor in captured:
                tensor.detach().zero_()
            graph.replay()
            stream.synchronize()
            assert_equal(captured, expected)


@on_hopper
def test_an_observer_sees_what_backward_has_to_do():
    inputs, upstream = leaves((2, 512, 3, 64)), upstream_of((2, 512, 3, 64))
    run(attention, inputs, upstream)
    observation = Observation(compiled=False)
    observation.begin()
    run(attention, inputs, upstream)
    torch.cuda.synchronize()
    seen = {work.op: work for work in observation.end()}
    kernel = seen["tilewright::attention_backward"]
    assert kernel.category == "attention" and kernel.flops == 5 * 2 * 3 * 512 * 512 * 64
    assert kernel.kernel == "attention_backward"


@on_hopper
def test_a_second_derivative_is_refused():
    inputs = leaves((1, 128, 1, 64))
    with pytest.raises(RuntimeError, match="no second derivative.*scaled_dot_product_attention"):
        torch.autograd.grad(attention(*inputs).sum(), inputs, create_graph=True)


@on_hopper
def test_what_a_user_forbids_is_not_done(launched):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = leaves((1, 128, 2, 64))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attention(*inputs).sum().backward()
    assert not launched


@on_hopper
def test_what_the_host_takes_longer_for_is_pytorchs(launched, monkeypatch):
    inputs = leaves((2, 256, 3, 64))
    monkeypatch.setattr(module, "HOST_BOUND", 2 * 3 * 256 * 256)
    attention(*inputs).sum().backward()
    assert not launched
    monkeypatch.setattr(module, "HOST_BOUND", 2 * 3 * 256 * 256 - 1)
    attention(*inputs).sum().backward()
    assert len(launched) == 1


def fewer_heads(inputs):
    return [inputs[0], *[t[:, :, :1].detach().requires_grad_() for t in inputs[1:]]]


OTHERS = {
    "narrow heads": lambda: [t[..., :32].detach().requires_grad_() for t in leaves((2, 128, 2, 64))],
    "a short tile": lambda: leaves((2, 100, 2, 64)),
    "float32": lambda: [t.detach().float().requires_grad_() for t in leaves((2, 128, 2, 64))],
    "shared keys": lambda: fewer_heads(leaves((2, 128, 2, 64))),
    "heads first": lambda: leaves((2, 128, 2, 64), "heads first"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_everything_else_is_pytorchs(case, launched):
    inputs = OTHERS[case]()
    upstream = torch.randn_like(inputs[0])
    actual = run(attention, inputs, upstream)
    assert not launched and actual[0].shape == inputs[0].shape
    truth = run(lambda q, k, v: plain(q, *(t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))),
                doubles(inputs), upstream.double())  # fmt: skip
    assert_near_truth(actual, truth, inputs[0].shape[1])


def test_gradcheck():
    inputs = [torch.randn(1, 5, 2, 4, dtype=torch.float64, device=DEVICE).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(attention, inputs)


def test_a_compiler_sees_pytorchs():
    inputs = leaves((1, 128, 2, 64))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    upstream = upstream_of((1, 128, 2, 64))
    assert_near_truth(run(compiled, inputs, upstream), run(plain, doubles(inputs), upstream.double()), 128)


def test_what_scores_and_slopes_start_from():
    """By the kernel: on the CPU through the interpreter."""
    batch, sequence, heads = 2, 128, 3
    out, dout = (torch.randn(batch * sequence, 5 * 192, device=DEVICE).to(BF16)[:, :192] for _ in range(2))
    lse = torch.randn(batch, heads, sequence, 1, device=DEVICE)
    starts, slope_starts, counts = kernels.prepare(out, dout, lse, heads, sequence, 0.125)
    by_head = (out.double() * dout.double()).view(batch, sequence, heads, 64).sum(3).transpose(1, 2)
    assert_near_truth([slope_starts.view(by_head.shape)], [-by_head], 64)
    assert_equal([starts.view(lse.shape)], [-lse / 0.125])
    assert counts.tolist() == [0] * (batch * heads * 2)


def test_the_order_of_registers_is_put_right():
    """By the kernel: on the CPU through the interpreter."""
    batch, sequence, heads = 2, 128, 3
    tokens = torch.randint(-128, 128, (batch, sequence, heads, 64), device=DEVICE).float()
    parts = tokens.transpose(1, 2).reshape(-1, 64, 64)  # of 64 queries of a head
    # Thread t of a warp has rows t // 4 and the one 8 below of its 16; of every 8 columns 2 (t % 4) and the next.
    i, thread, down, right = torch.meshgrid(*map(torch.arange, (8, 128, 2, 2)), indexing="ij")
    row, column = thread // 32 * 16 + thread % 32 // 4 + 8 * down, 8 * i + thread % 4 * 2 + right
    sums = parts[:, row, column].contiguous()
    padded = torch.zeros(batch * sequence, 3 * 192, device=DEVICE, dtype=BF16)
    kernels.finish(sums, padded[:, 192:384], heads, sequence, 0.5)
    assert_equal([padded[:, 192:384]], [(tokens * 0.5).reshape(-1, 192).to(BF16)])
    assert not padded[:, :192].any() and not padded[:, 384:].any()


def test_attention_as_a_model_has_it():
    q, k, v = (torch.randn(2, 7, 4, 8, device=DEVICE) for _ in range(3))
    by_head = (t.transpose(1, 2) for t in (q, k, v))
    assert_equal([attention(q, k, v)], [F.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2)])
