"""Attention with a backward of its own.

Without a Hopper what lies around its kernel runs under Triton's interpreter, and arithmetic stands for the kernel, as
strict about how tensors lie; `test_attention_hopper_backward.py` runs the kernel itself.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from ops.contract import (
    DEVICE,
    HOPPER,
    assert_deterministic,
    assert_equal,
    assert_near_truth,
    assert_no_worse,
    doubles,
    gradients,
    on_hopper,
)
from tilewright import ops
from tilewright.measure.work import Observation
from tilewright.ops.attention import backends, hopper_forward, kernels
from tilewright.ops.attention import hopper as backend
from tilewright.ops.attention import hopper_backward as module
from tilewright.ops.attention.backends import by_pytorch
from tilewright.ops.attention.op import attention

BF16 = torch.bfloat16
# Of one tile, of several, of a number that is odd, of more blocks than there are processors, of a long one.
SHAPES = [(1, 128, 1, 64), (2, 256, 3, 64), (3, 640, 2, 64), (16, 512, 12, 64), (1, 4096, 2, 64)]


def leaves(shape, how="packed", scale=1.0):
    """Queries, keys and values, as one matmul gives them or each by itself."""
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


# Thread t of a warp has rows t // 4 and the one 8 below of its 16; of every 8 columns 2 (t % 4) and the next.
EIGHT, THREAD, DOWN, RIGHT = torch.meshgrid(*map(torch.arange, (8, 128, 2, 2)), indexing="ij")
ROW, COLUMN = THREAD // 32 * 16 + THREAD % 32 // 4 + 8 * DOWN, 8 * EIGHT + THREAD % 4 * 2 + RIGHT


def in_order_of_registers(by_head):
    """What is (..., sequence, head_dim), as the kernel adds it up: panels of 64 queries and 64 columns."""
    panels = by_head.unflatten(-1, (-1, 64)).unflatten(-3, (-1, 64)).transpose(-3, -2)
    return panels.reshape(-1, 64, 64)[:, ROW, COLUMN]


@torch.autocast(DEVICE, enabled=False)
def forward(q, k, v):
    dtype = q.dtype
    q, k, v = (t.detach().float().repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).to(dtype), scores.logsumexp(-1)


def start(inputs, starts, slope_starts, gradients, sums, counts, span, section, tiles):
    for t in (*inputs, *gradients):
        assert t.data_ptr() % 16 == 0 and t.stride(3) == 1 and all(stride % 8 == 0 for stride in t.stride()[:3])
    assert span.left == -1 and span.right == 0 and tiles is None
    q, k, v, dout = (t.float() for t in inputs)
    (batch, sequence, heads, width), key_heads = q.shape, k.shape[2]
    k, v = (t.repeat_interleave(heads // key_heads, 2) for t in (k, v))
    visible = torch.ones(sequence, sequence).tril()
    starts, slope_starts = (t.view(batch, heads, -1, 1)[:, :, :sequence] for t in (starts, slope_starts))
    p = ((torch.einsum("bqhd,bkhd->bhqk", q, k) + starts) * span.scale).exp() * visible
    ds = p * (torch.einsum("bqhd,bkhd->bhqk", dout, v) + slope_starts)
    dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q) * span.scale, torch.einsum("bhqk,bqhd->bkhd", p, dout)
    for into, gradient in zip(gradients, (dk, dv), strict=True):
        into.copy_(gradient.unflatten(2, (key_heads, -1)).sum(3))
    tile = module.launch_config(width, inputs[0].dtype).queries
    dq = F.pad(torch.einsum("bhqk,bkhd->bhqd", ds, k), (0, 0, 0, -sequence % tile))
    sums.copy_(in_order_of_registers(dq).flatten())
    counts.fill_(1)


@pytest.fixture
def launched(monkeypatch):
    """How often the kernel was started; `auto` takes it at every length."""
    monkeypatch.setattr(backends, "FEWEST_KEYS", 0)
    if not HOPPER:
        monkeypatch.setattr(backend, "_DEVICES", (DEVICE,))
        monkeypatch.setattr(backend, "is_cudnns", lambda inputs: True)
        monkeypatch.setattr(hopper_forward, "is_there", lambda *kind: True)
        monkeypatch.setattr(hopper_forward, "forward", lambda q, k, v, *options: forward(q, k, v))
        monkeypatch.setattr(module, "_kernel", lambda device, config: start)
        monkeypatch.setattr(module, "_start", start)
    calls, real = [], module._start
    monkeypatch.setattr(module, "_start", lambda *arguments: calls.append(1) or real(*arguments))
    return calls


@pytest.mark.parametrize("how", ["packed", "alone"])
@pytest.mark.parametrize("shape", SHAPES if HOPPER else SHAPES[:2], ids=str)
def test_gradients_are_near_the_truth_and_no_worse_than_pytorchs(shape, how, launched):
    inputs, upstream = leaves(shape, how), upstream_of(shape)
    actual = run(attention, inputs, upstream)
    assert len(launched) == 1
    truth = run(plain, doubles(inputs), upstream.double())
    assert_no_worse(actual, run(by_pytorch, inputs, upstream), truth)
    assert_near_truth(actual, truth, shape[1])


@on_hopper
@pytest.mark.parametrize("shape", SHAPES[2:4], ids=str)
def test_gradients_are_the_same_on_every_run(shape, launched):
    inputs, upstream = leaves(shape), upstream_of(shape)
    assert_deterministic(lambda: run(attention, inputs, upstream), times=20)
    assert len(launched) == 21


@on_hopper
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_flat_and_very_sharp_attention(scale, launched):
    inputs, upstream = leaves((2, 384, 2, 64), scale=scale), upstream_of((2, 384, 2, 64))
    truth = run(plain, doubles(inputs), upstream.double())
    assert_no_worse(run(attention, inputs, upstream), run(by_pytorch, inputs, upstream), truth)
    assert len(launched) == 1


@on_hopper
def test_what_is_not_a_number_stays_in_its_head(launched):
    inputs, upstream = leaves((2, 256, 3, 64), "alone"), upstream_of((2, 256, 3, 64))
    expected = run(attention, inputs, upstream)
    with torch.no_grad():
        inputs[2][1, 7, 1] = float("nan")
    assert len(launched) == 1
    for got, whole in zip(run(attention, inputs, upstream)[1:3], expected[1:3], strict=True):
        assert got[1, :, 1].isnan().any() and not got[0].isnan().any()
        assert_equal([got[1, :, 0], got[1, :, 2], got[0]], [whole[1, :, 0], whole[1, :, 2], whole[0]])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_gradient_alone(which, launched):
    inputs, upstream = leaves((1, 256, 2, 64)), upstream_of((1, 256, 2, 64))
    expected = run(attention, inputs, upstream)[1 + which]
    alone = [t.detach().requires_grad_(index == which) for index, t in enumerate(inputs)]
    assert_equal(run(attention, alone, upstream)[1:], [expected])
    assert len(launched) == 2


def misaligned(shape):
    return torch.randn(torch.Size(shape).numel() + 1, device=DEVICE).to(BF16)[1:].view(shape)


LIES = {
    "one number": lambda shape: torch.ones((), device=DEVICE, dtype=BF16).expand(shape),
    "one row": lambda shape: torch.randn(shape[2:], device=DEVICE).to(BF16).expand(shape),
    "misaligned": misaligned,
    "heads first": lambda shape: torch.randn(2, 3, 256, 64, device=DEVICE).to(BF16).transpose(1, 2),
    "a part of a longer one": lambda shape: torch.randn(2, 300, 3, 64, device=DEVICE).to(BF16)[:, :256],
    "wide apart": lambda shape: torch.randn(2, 256, 5, 64, device=DEVICE).to(BF16)[:, :, 1:4],
}


@pytest.mark.parametrize("lies", LIES)
def test_a_gradient_may_lie_anyhow(lies, launched):
    inputs, upstream = leaves((2, 256, 3, 64)), LIES[lies]((2, 256, 3, 64))
    expected = run(attention, inputs, upstream.clone(memory_format=torch.contiguous_format))
    assert_equal(run(attention, inputs, upstream), expected)
    assert len(launched) == 2


# What PyTorch's own kernels on a GPU make of the first three is theirs.
@pytest.mark.parametrize("lies", list(LIES)[3:] if DEVICE == "cuda" else LIES)
def test_so_may_inputs(lies, launched):
    shape = (2, 256, 3, 64)
    inputs = [LIES[lies](shape).detach().requires_grad_(), *leaves(shape)[1:]]
    upstream = upstream_of(shape)
    assert_near_truth(run(attention, inputs, upstream), run(plain, doubles(inputs), upstream.double()), 256)
    assert len(launched) == 1


def test_saved_tensors_may_come_back_elsewhere(launched):
    inputs, upstream = leaves((2, 256, 3, 64)), upstream_of((2, 256, 3, 64))
    expected = run(attention, inputs, upstream)

    def elsewhere(kept):
        there = torch.empty(kept.numel() + 1, dtype=kept.dtype, device=DEVICE)[1:].view(kept.shape)
        return there.copy_(kept)

    with torch.autograd.graph.saved_tensors_hooks(elsewhere, lambda kept: kept):
        assert_equal(run(attention, inputs, upstream), expected)
    assert len(launched) == 2


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_it_computes_in_the_dtype_of_autocast(dtype, launched):
    """What rope leaves in float32 beside values in 16 bits, say."""
    q, k, v = leaves((1, 128, 2, 64))
    inputs = [q.detach().to(dtype).requires_grad_(), k.detach().to(dtype).requires_grad_(), v]
    with torch.autocast(DEVICE, BF16):
        out = attention(*inputs)
    found = gradients([out], inputs, [torch.ones_like(out)])
    assert out.dtype == BF16 and [t.dtype for t in found] == [dtype, dtype, BF16] and len(launched) == 1
    assert_equal([out], [attention(q, k, v)])


@on_hopper
def test_a_captured_graph_replays_forward_and_backward(launched):
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
    assert len(launched) == 3


@on_hopper
def test_an_observer_sees_what_backward_has_to_do():
    inputs, upstream = leaves((2, 512, 3, 64)), upstream_of((2, 512, 3, 64))
    function = functools.partial(attention, backend="hopper")
    run(function, inputs, upstream)
    observation = Observation(compiled=False)
    observation.begin()
    run(function, inputs, upstream)
    torch.cuda.synchronize()
    seen = {work.op: work for work in observation.end()}
    kernel = seen["tilewright_attention_backward"]
    assert kernel.category == "attention" and kernel.flops == 10 * 2 * 3 * 512 * 64 * 256.5
    assert kernel.kernel == "tilewright_attention_backward"


def test_a_second_derivative_is_refused(launched):
    inputs = leaves((1, 128, 1, 64))
    with pytest.raises(RuntimeError, match="no second derivative.*scaled_dot_product_attention"):
        torch.autograd.grad(attention(*inputs).sum(), inputs, create_graph=True)


@pytest.mark.parametrize("forbidden", ["flash", "cudnn", "mem_efficient", "math"])
def test_pytorchs_kernels_stay_where_a_user_has_forbidden_one(forbidden, launched):
    inputs, kernels_of = leaves((1, 128, 2, 64)), torch.backends.cuda
    getattr(kernels_of, f"enable_{forbidden}_sdp")(False)
    try:
        with ops.explain() as paths:
            attention(*inputs).sum().backward()
    finally:
        getattr(kernels_of, f"enable_{forbidden}_sdp")(True)
    assert not launched and [path.why for path in paths] == ["PyTorch was told which of its kernels to take"]
    attention(*inputs).sum().backward()
    assert len(launched) == 1


@on_hopper
def test_pytorchs_kernels_stay_where_a_user_prefers_another(launched):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = leaves((1, 128, 2, 64))
    names = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    with sdpa_kernel([getattr(SDPBackend, name) for name in names], set_priority=True):
        attention(*inputs).sum().backward()
    assert not launched


def test_deterministic_algorithms_leave_ours(launched):
    inputs = leaves((1, 128, 2, 64))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with ops.explain() as paths:
            attention(*inputs).sum().backward()
            with torch.no_grad():
                attention(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [path.ran for path in paths] == ["hopper"] and sum(paths.calls.values()) == 2 and len(launched) == 1


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_heads_that_share_keys_are_ours_at_any_length(dtype, launched):
    q, k, v = (t.detach().to(dtype) for t in leaves((2, 100, 4, 128)))
    inputs = [t.requires_grad_() for t in (q, k[:, :, :2], v[:, :, :2])]
    upstream = upstream_of(q.shape).to(dtype)
    actual = run(lambda *parts: attention(*parts, backend="hopper"), inputs, upstream)

    def shared(q, k, v):
        return plain(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))

    assert_near_truth(actual, run(shared, doubles(inputs), upstream.double()), 100)
    assert len(launched) == 1


def test_what_the_host_takes_longer_for_is_pytorchs(launched, monkeypatch):
    inputs = leaves((2, 256, 3, 64))
    monkeypatch.setattr(backend, "HOST_BOUND", 2 * 3 * 256 * 256)
    attention(*inputs).sum().backward()
    assert not launched
    monkeypatch.setattr(backend, "HOST_BOUND", 2 * 3 * 256 * 256 - 1)
    attention(*inputs).sum().backward()
    assert len(launched) == 1


OTHERS = {
    "narrow heads": lambda: [t[..., :32].detach().requires_grad_() for t in leaves((2, 128, 2, 64))],
    "float32": lambda: [t.detach().float().requires_grad_() for t in leaves((2, 128, 2, 64))],
}


@pytest.mark.parametrize("case", OTHERS)
def test_everything_else_has_another_backward(case, launched):
    inputs = OTHERS[case]()
    upstream = torch.randn_like(inputs[0])
    actual = run(attention, inputs, upstream)
    assert not launched and actual[0].shape == inputs[0].shape
    assert_near_truth(actual, run(plain, doubles(inputs), upstream.double()), inputs[0].shape[1])


def test_gradcheck_of_what_is_pytorchs():
    inputs = [torch.randn(1, 5, 2, 4, dtype=torch.float64, device=DEVICE).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(attention, inputs)


def test_a_compiler_sees_the_registered_op(launched):
    inputs, graphs = leaves((1, 128, 2, 64)), []

    def look(module, given):
        graphs.append(module.code)
        return torch._dynamo.lookup_backend("aot_eager")(module, given)

    compiled = torch.compile(attention, fullgraph=True, backend=look)
    upstream = upstream_of((1, 128, 2, 64))
    assert_near_truth(run(compiled, inputs, upstream), run(plain, doubles(inputs), upstream.double()), 128)
    assert "tilewright.attention_hopper" in graphs[0] and len(launched) == 1


def test_a_compiler_with_symbols_for_sizes_compiles_the_registered_op_once(launched, monkeypatch):
    counter, compiled_at_first = CompileCounterWithBackend("aot_eager"), 0
    torch.compiler.reset()
    if not HOPPER:  # what a compiler calls at once, with numbers
        monkeypatch.setattr(hopper_forward, "is_there", torch.compiler.assume_constant_result(lambda *kind: True))
    compiled = torch.compile(attention, dynamic=True, fullgraph=True, backend=counter)
    for length in (70, 128):
        inputs, upstream = leaves((2, length, 4, 64)), upstream_of((2, length, 4, 64))
        actual = run(compiled, inputs, upstream)
        assert_near_truth(actual, run(plain, doubles(inputs), upstream.double()), length)
        compiled_at_first = compiled_at_first or counter.frame_count
    assert counter.frame_count == compiled_at_first > 0 and len(launched) == 2


@pytest.mark.parametrize(("queries", "width", "tile"), [(128, 64, 128), (100, 64, 128), (100, 128, 64)])
def test_what_scores_and_slopes_start_from(queries, width, tile):
    """By the kernel: on the CPU through the interpreter."""
    batch, heads, rows = 2, 3, -(-queries // tile) * tile
    out = torch.randn(batch, queries, 5, width, device=DEVICE).to(BF16)[:, :, 1:4]
    dout = torch.randn(heads, batch, queries, width, device=DEVICE).to(BF16).permute(1, 2, 0, 3)
    lse = torch.randn(batch, heads, queries, device=DEVICE)
    lse[0, 0, :7] = -torch.inf  # sees no key
    starts, slope_starts, counts = kernels.prepare(out, dout, lse, tile, 0.125)
    starts, slope_starts = starts.view(batch, heads, rows), slope_starts.view(batch, heads, rows)
    by_head = (out.double() * dout.double()).sum(3).transpose(1, 2)
    assert_near_truth([slope_starts[:, :, :queries]], [-by_head], width)
    assert_equal([starts[:, :, :queries]], [-lse.abs().where(lse == -torch.inf, lse) / 0.125])
    assert not slope_starts[:, :, queries:].any() and (starts[:, :, queries:] == -torch.inf).all()
    assert counts.tolist() == [0] * (batch * heads * rows // 64 * (width // 64))


@pytest.mark.parametrize(("queries", "width", "tile"), [(128, 64, 128), (100, 64, 128), (100, 128, 64)])
def test_the_order_of_registers_is_put_right(queries, width, tile):
    """By the kernel: on the CPU through the interpreter. What nobody has added to is 0."""
    batch, heads, rows = 2, 3, -(-queries // tile) * tile
    tokens = torch.randint(-128, 128, (batch, rows, heads, width), device=DEVICE).float()
    sums = in_order_of_registers(tokens.transpose(1, 2)).contiguous()
    counts = torch.ones(len(sums), dtype=torch.int32, device=DEVICE)
    counts[0], sums[0] = 0, torch.nan
    tokens[0, :64, 0, :64] = 0
    dq = torch.full((batch, queries, heads, width), torch.nan, device=DEVICE, dtype=BF16)
    kernels.finish(sums, counts, dq, tile, 0.5)
    assert_equal([dq], [(tokens * 0.5)[:, :queries].to(BF16)])


def test_attention_as_a_model_has_it():
    q, k, v = (torch.randn(2, 7, 4, 8, device=DEVICE) for _ in range(3))
    by_head = (t.transpose(1, 2) for t in (q, k, v))
    assert_equal([attention(q, k, v)], [F.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2)])


@pytest.mark.parametrize("causal", [True, False])
def test_shared_heads_in_float32_are_repeated_for_pytorchs_fused_kernel(causal: bool, monkeypatch) -> None:
    asked: list[tuple[torch.Size, bool]] = []

    def note(q, k, v, *arguments, enable_gqa, **options):
        asked.append((k.shape, enable_gqa))
        return fused(q, k, v, *arguments, enable_gqa=enable_gqa, **options)

    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(backends, "_FUSED_FLOAT32", ("cpu", "cuda"))
    monkeypatch.setattr(backends.F, "scaled_dot_product_attention", note)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, 37, heads, 24, generator=generator, requires_grad=True) for heads in (6, 2, 2)]
    upstream = torch.randn(2, 37, 6, 24, generator=generator)
    out = backends._call_pytorch(*inputs, causal)
    assert asked == [((2, 6, 37, 24), False)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = fused(*(t.transpose(1, 2) for t in wide), is_causal=causal, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    ours, theirs = torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(exact, wide, upstream.double())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
