"""The Triton kernels of `attention`, and the definition they follow, over options that are drawn by TILEWRIGHT_SEED."""

from __future__ import annotations

import itertools
import os
import random

import pytest
import torch

from ops.contract import (
    DEVICE,
    assert_compiles,
    assert_deterministic,
    assert_equal,
    assert_near_truth,
    assert_no_worse,
    gradients,
    on_gpu,
)
from tilewright import ops
from tilewright.ops.attention import reference as definition
from tilewright.ops.attention import triton_op
from tilewright.ops.attention.op import reference
from tilewright.runtime import dispatch, philox

attention = ops.attention
SEED = int(os.environ["TILEWRIGHT_SEED"])
BIG = DEVICE == "cuda"
DRAWS = 60 if BIG else 10
DROP_SEED = 987654321
# Triton's interpreter cuts bfloat16 off where a GPU rounds: several times in a row that is more than any tolerance.
DTYPES = (torch.bfloat16, torch.float16, torch.float32) if BIG else (torch.float16, torch.float32)


def triton(*tensors, **options):
    return attention(*tensors, backend="triton", **options)


def lay(shape, dtype, how):
    """A tensor of (batch, sequence, heads, head_dim) as it comes from somewhere."""
    batch, sequence, heads, width = shape
    if how == "heads first":
        x = torch.randn(batch, heads, sequence, width, device=DEVICE).transpose(1, 2)
    elif how == "part of a matmul":
        x = torch.randn(batch, sequence, heads + 2, width, device=DEVICE)[:, :, 1:-1]
    elif how == "misaligned":
        x = torch.randn(batch * sequence * heads * width + 1, device=DEVICE)[1:].view(shape)
    elif how == "columns apart":
        x = torch.randn(batch, sequence, heads, 2 * width, device=DEVICE)[..., ::2]
    else:
        x = torch.randn(shape, device=DEVICE)
    return x.to(dtype)


LAYOUTS = ("contiguous", "heads first", "part of a matmul", "misaligned", "columns apart")


def draw(number):
    """(q, k, v, bias), options."""
    rng = random.Random(f"{SEED} {number}")
    torch.manual_seed(rng.randrange(2**31))
    longest, width = (700, 8 * rng.randint(2, 32)) if BIG else (40, 8 * rng.randint(2, 5))
    batch, shared, kv_heads = rng.randint(1, 2), rng.choice((1, 1, 2, 3)), rng.randint(1, 2 if BIG else 1)
    queries, keys = rng.randint(1, longest), rng.randint(1, longest)
    if rng.random() < 0.5:
        keys = queries
    dtype = rng.choice(DTYPES)
    sizes = [(batch, queries, shared * kv_heads, width)] + [(batch, keys, kv_heads, width)] * 2
    tensors = [lay(size, dtype, rng.choice(LAYOUTS)).requires_grad_() for size in sizes]
    options = {"causal": rng.random() < 0.6}
    if rng.random() < 0.4:
        options["window"] = rng.choice((rng.randrange(longest), (rng.randrange(longest), None), (None, 3), (5, 2)))
    if rng.random() < 0.3:
        options["scale"] = rng.uniform(0.05, 1.0)
    if rng.random() < 0.3:
        options["softcap"] = rng.uniform(0.5, 20.0)
    if rng.random() < 0.3:
        options["alibi"] = torch.rand(rng.choice((1, batch)), shared * kv_heads, device=DEVICE)
    if rng.random() < 0.5:
        # One number for all keys would not change the weights: its gradient is what rounding leaves of 0.
        shape = [*(rng.choice((1, size)) for size in (batch, shared * kv_heads, queries)), keys]
        if rng.random() < 0.3:
            options["bias"] = torch.rand(shape, device=DEVICE) > 0.3
        else:
            tensors.append(torch.randn(shape, device=DEVICE).to(rng.choice((dtype, torch.float32))).requires_grad_())
    if rng.random() < 0.3:
        options["p"] = rng.uniform(0.05, 0.7)
    return tensors, options


def run(function, tensors, options, upstream=None):
    """(out, lse, gradients); of a query that sees nothing, the log-sum-exp counts as 0."""
    bias = {"bias": tensors[3]} if len(tensors) > 3 else {}
    out, lse = function(*tensors[:3], **bias, return_lse=True, **options)
    blind = lse.isinf()
    lse = lse.masked_fill(blind, 0.0)
    # A query with one key has no gradient but that of the log-sum-exp, beside what rounding leaves of 0: a large one.
    upstream = [torch.randn_like(out), 8 * torch.randn_like(lse)] if upstream is None else upstream
    return [out, lse, *gradients([out, lse], tensors, upstream)], upstream, blind


def fresh(tensors, dtype=None):
    return [t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad) for t in tensors]


def kept(tensors, p):
    """The mask that the kernels draw for a call."""
    (batch, queries, heads, _), keys = tensors[0].shape, tensors[1].shape[1]
    like = torch.empty(batch, heads, queries, -(-keys // 8) * 8, device=DEVICE)
    return philox.dropout_mask(like, DROP_SEED, p, 0)[..., :keys]


@pytest.fixture
def one_seed(monkeypatch):
    monkeypatch.setattr(triton_op, "draw_seed", lambda x, as_tensor: DROP_SEED)


@pytest.mark.parametrize("number", range(DRAWS))
def test_drawn_options_are_near_the_truth(number, one_seed):
    tensors, options = draw(number)
    described = f"{[(tuple(t.shape), t.dtype) for t in tensors]} {options}; TILEWRIGHT_SEED={SEED} draws it again"
    actual, upstream, blind = run(triton, tensors, options)
    keep = {"keep": kept(tensors, options["p"])} if "p" in options else {}
    truth, _, blind_truth = run(reference, fresh(tensors, torch.float64), {**options, **keep}, upstream)
    try:
        assert_equal([blind], [blind_truth])
        assert not actual[0].transpose(1, 2)[blind].any(), "a query that sees no key has a result"
        # Whatever dtype the bias has, its gradient follows from a result that was rounded to that of q.
        rounded = [*actual[:5], *(gradient.to(tensors[0].dtype) for gradient in actual[5:])]
        # Behind a gradient is a sum over tokens of sums over a head.
        assert_near_truth(rounded, truth, max(tensors[0].shape[1], tensors[1].shape[1]) * tensors[0].shape[3])
        assert actual[0].dtype == tensors[0].dtype and actual[1].dtype == torch.float32
    except AssertionError as error:
        error.add_note(described)
        raise


REALISTIC = [
    (torch.bfloat16, 64, 2048, {}), (torch.bfloat16, 128, 2048, {"causal": False}), (torch.float16, 128, 1500, {}),
    (torch.bfloat16, 256, 1024, {"window": 256, "softcap": 50.0}), (torch.bfloat16, 96, 1111, {}),
    (torch.float32, 128, 777, {}),
] if BIG else [(torch.float16, 24, 40, {"window": 20}), (torch.float32, 16, 40, {"softcap": 5.0})]  # fmt: skip


@pytest.mark.parametrize(("dtype", "width", "length", "options"), REALISTIC, ids=str)
def test_no_further_from_the_truth_than_pytorchs_math(dtype, width, length, options, monkeypatch):
    torch.manual_seed(SEED)
    heads = (8, 2, 2) if BIG else (2, 1, 1)
    tensors = [torch.randn(2, length, count, width, device=DEVICE).to(dtype).requires_grad_() for count in heads]
    actual, upstream, _ = run(triton, tensors, options)
    truth, *_ = run(reference, fresh(tensors, torch.float64), options, upstream)
    # Op by op in its own dtype, as PyTorch does it without a kernel for all of it.
    monkeypatch.setattr(dispatch, "compute_dtype", lambda x: x.dtype)
    peer, *_ = run(reference, fresh(tensors), options, upstream)
    if dtype.itemsize < 4:
        assert_no_worse(actual, peer, truth)
    else:  # between the two it is the order of sums that decides
        assert_near_truth(actual, truth, length * width)


def packed(starts, others, width=16, heads=2, kv_heads=1, dtype=torch.float32):
    torch.manual_seed(SEED)
    tokens = [others, others, starts]
    q, k, v = (
        torch.randn(ends[-1] + 3, count, width, device=DEVICE).to(dtype).requires_grad_()
        for ends, count in zip(reversed(tokens), (heads, kv_heads, kv_heads), strict=True)
    )
    longest = [max(b - a for a, b in itertools.pairwise(ends)) for ends in (starts, others)]
    starts, others = (torch.tensor(ends, dtype=torch.int32, device=DEVICE) for ends in (starts, others))
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return [q, k, v], dict(zip(names, (starts, others, *longest), strict=True))


PACKED = (
    [((0, 700, 700, 701, 2000), (3, 900, 905, 905, 2300), 64)]
    if BIG
    else [((1, 20, 20, 21, 30), (0, 9, 40, 41, 41), 16)]
)


@pytest.mark.parametrize(("starts", "others", "width"), PACKED)
def test_packed_sequences_are_bit_for_bit_what_each_is_alone(starts, others, width):
    tensors, lengths = packed(starts, others, width, 4, 2)
    slopes = torch.rand(len(starts) - 1, 4, device=DEVICE)
    whole, upstream, _ = run(triton, tensors, {**lengths, "window": 12, "alibi": slopes})
    # Tokens of no sequence have no result and no gradient.
    for tensor, ends in zip((whole[0], *whole[2:]), (starts, starts, others, others), strict=True):
        assert not tensor[: ends[0]].any() and not tensor[ends[-1] :].any()
    for index in range(len(starts) - 1):
        rows, columns = (slice(ends[index], ends[index + 1]) for ends in (starts, others))
        cut = [
            t.detach()[part][None].requires_grad_() for t, part in zip(tensors, (rows, columns, columns), strict=True)
        ]
        if rows.stop == rows.start or columns.stop == columns.start:
            assert not whole[0][rows].any()
            continue
        upstream_of_one = [upstream[0][rows][None], upstream[1][:, rows][None]]
        alone, *_ = run(triton, cut, {"window": 12, "alibi": slopes[index]}, upstream_of_one)
        parts = (rows, columns, columns)
        assert_equal([whole[0][rows], whole[1][:, rows]], [alone[0][0], alone[1][0]])
        assert_equal([g[part] for g, part in zip(whole[2:], parts, strict=True)], [g[0] for g in alone[2:]])
    truth, *_ = run(reference, fresh(tensors, torch.float64), {**lengths, "window": 12, "alibi": slopes}, upstream)
    assert_near_truth(whole, truth, max(starts))


def test_whatever_cu_seqlens_contain_nothing_else_is_read_or_written():
    """Beside the tensors lie numbers that would show: on a CPU the public function refuses such starts."""
    tensors, lengths = packed((0, 9, 20), (0, 9, 20))
    for bad in ((-5, 50, 2), (2**30, -(2**31), 2**31 - 1), (20, 9, 0)):
        starts = torch.tensor(bad, dtype=torch.int32, device=DEVICE)
        inputs = triton_op.Inputs(
            *[t.unsqueeze(0) for t in tensors], None, None, starts, starts, None, 11, 11, -1, 0, 0.25, 0.0, 0.0
        )  # fmt: skip
        out, lse = triton_op.run(inputs)
        found = torch.autograd.grad(out.sum(), tensors)
        assert out.isfinite().all() and not lse.isnan().any() and all(each.isfinite().all() for each in found)
    del lengths


def test_dropout_of_packed_sequences_is_that_of_the_definition(one_seed):
    tensors, lengths = packed((0, 5, 21), (0, 9, 20))
    like = torch.empty(2, len(tensors[0]), 16, device=DEVICE)
    keep = philox.dropout_mask(like, DROP_SEED, 0.4, 0)[..., : lengths["max_seqlen_k"]]
    options = {**lengths, "causal": False, "p": 0.4}
    actual, upstream, _ = run(triton, tensors, options)
    truth, *_ = run(reference, fresh(tensors, torch.float64), {**options, "keep": keep}, upstream)
    assert_near_truth(actual, truth, 21)


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_definition_of_packed_sequences_is_the_same_one_by_one_and_together(sequences, monkeypatch):
    tensors, options = packed((2, 9, 9, 20)[: sequences + 1], (1, 5, 20, 26)[: sequences + 1])
    tensors = fresh(tensors, torch.float64)
    keep = torch.rand(2, len(tensors[0]), options["max_seqlen_k"], device=DEVICE) > 0.4
    slopes = torch.rand(sequences, 2, device=DEVICE)
    options |= {"window": 5, "alibi": slopes, "p": 0.25, "keep": keep, "softcap": 3.0}
    apart, upstream, blind = run(reference, tensors, options)
    monkeypatch.setattr(definition.dispatch, "is_traced", lambda *tensors: True)
    together, _, also_blind = run(reference, tensors, options, upstream)
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)
    assert_equal([blind], [also_blind])


def test_a_dropped_weight_is_another_in_each_call_and_follows_the_seed():
    q, k, v = (torch.ones(1, 40, 1, 16, device=DEVICE) for _ in range(3))
    torch.manual_seed(3)
    first, second = (triton(q, k, v, causal=False, p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert_equal([triton(q, k, v, causal=False, p=0.5)], [first])
    assert not torch.equal(first, second) and abs(first.mean().item() - 1.0) < 0.2


@pytest.mark.parametrize("hidden", ["booleans", "-inf", "window"])
def test_a_query_that_sees_no_key_gets_0_and_no_gradient(hidden):
    q, k, v = leaves = [torch.randn(1, 20, 1, 16, device=DEVICE, requires_grad=True) for _ in range(3)]
    bias = torch.zeros(20, 20, device=DEVICE)
    bias[7] = -torch.inf
    options = {"bias": bias if hidden == "-inf" else bias == 0}
    if hidden == "window":
        k, v, options = k[:, :5], v[:, :5], {}  # the first 15 queries are before the first key
    blind = slice(0, 15) if hidden == "window" else slice(7, 8)
    for function in (triton, reference):
        out, lse = function(q, k, v, return_lse=True, **options)
        assert not out[:, blind].any() and (lse[..., blind] == -torch.inf).all()
        assert lse.isinf().sum() == blind.stop - blind.start
        found = torch.autograd.grad(out.square().sum(), leaves)
        assert not found[0][:, blind].any() and all(each.isfinite().all() for each in found)


@pytest.mark.parametrize("backend", ["auto", "triton", "math"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 0, 3), (0, 3, 3), (1, 3, 0), (1, 1, 1), (1, 1, 5)])
def test_nothing_and_one(batch, queries, keys, backend):
    q = torch.randn(batch, queries, 2, 16, device=DEVICE, requires_grad=True)
    k, v = (torch.randn(batch, keys, 1, 16, device=DEVICE, requires_grad=True) for _ in range(2))
    for extra in ({}, {"window": 3, "p": 0.1, "return_lse": True}):
        out = attention(q, k, v, backend=backend, **extra)
        out = out[0] if extra else out
        assert out.shape == q.shape and out.isfinite().all()
        if keys == 0:
            assert not out.any()
        if keys == 1 and not extra:
            torch.testing.assert_close(out, v.expand(out.shape))
        assert all(each.isfinite().all() for each in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False}, {"window": 2}, {"softcap": 1.5}, {"window": (1, 2), "causal": False, "scale": 0.7},
        {"alibi": torch.tensor([0.5, 0.1])}, {"cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32)},
    ],
    ids=lambda options: "+".join(options),
)  # fmt: skip
def test_gradcheck_of_the_definition(options):
    options = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    is_packed = "cu_seqlens_q" in options
    inputs = [torch.randn(1, 5, heads, 4, dtype=torch.float64, device=DEVICE) for heads in (2, 1, 1)]
    inputs = [(x[0] if is_packed else x).requires_grad_() for x in inputs]
    if is_packed:
        options["max_seqlen_q"] = 3
    else:
        options["keep"], options["p"] = torch.rand(1, 2, 5, 5, device=DEVICE) > 0.3, 0.25
        inputs.append(torch.randn(2, 1, 5, dtype=torch.float64, device=DEVICE, requires_grad=True))

    def call(q, k, v, bias=None):
        return reference(q, k, v, bias=bias, return_lse=True, **options)

    assert torch.autograd.gradcheck(call, inputs)


def test_the_same_bits_on_every_run(one_seed):
    torch.manual_seed(SEED)
    sizes = (2, 600, 4, 64) if BIG else (1, 33, 2, 16)
    q, k, v = (torch.randn(sizes, device=DEVICE).half().requires_grad_() for _ in range(3))
    bias = torch.randn(1, sizes[1], sizes[1], device=DEVICE, requires_grad=True)
    tensors, upstream = [q, k[:, :, :2], v[:, :, :2], bias], [torch.randn(sizes, device=DEVICE).half()]

    def again():
        out = triton(*tensors[:3], bias=bias, p=0.2, window=20)
        return [out, *torch.autograd.grad(out, (q, k, v, bias), upstream)]

    assert_deterministic(again, times=20 if BIG else 1)


def test_opcheck():
    q, k, v = (torch.randn(1, 3, heads, 16, device=DEVICE, requires_grad=True) for heads in (2, 1, 1))
    bias = torch.randn(1, 1, 3, 3, device=DEVICE, requires_grad=True)
    seed = torch.tensor([DROP_SEED], device=DEVICE)
    arguments = (q, k, v, bias, None, None, None, seed, 3, 3, -1, 0, 0.25, 0.0, 0.3)
    torch.library.opcheck(torch.ops.tilewright.attention.default, arguments)


@on_gpu
def test_compiles_into_one_graph_with_the_same_result():
    tensors = [torch.randn(2, 130, heads, 64, device=DEVICE).half().requires_grad_() for heads in (4, 2, 2)]
    assert_compiles(lambda q, k, v: (triton(q * 1.0, k * 1.0, v * 1.0, window=50, softcap=5.0),), tensors)
    slopes = torch.rand(4, device=DEVICE)
    assert_compiles(lambda q, k, v: (attention(q * 1.0, k * 1.0, v * 1.0, alibi=slopes),), tensors)


def test_a_second_derivative_is_refused():
    q, k, v = (torch.randn(1, 3, 1, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    with pytest.raises(RuntimeError, match="no second derivative.*backend='math'"):
        torch.autograd.grad(triton(q, k, v).sum(), q, create_graph=True)


def test_autocast_takes_its_dtype():
    q, k, v = (torch.randn(1, 9, 1, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    with torch.autocast(DEVICE, torch.bfloat16):
        out = triton(q, k.bfloat16(), v)
    assert out.dtype == torch.bfloat16 and torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32
    assert_near_truth([out], [definition.reference(q.double(), k.double(), v.double())], 9)


@on_gpu
def test_a_captured_graph_draws_another_mask_at_every_replay():
    q, k, v = (torch.randn(1, 300, 2, 64, device=DEVICE).half().requires_grad_() for _ in range(3))
    upstream = torch.randn_like(q)

    def step():
        out = triton(q, k, v, p=0.3)
        return [out, *torch.autograd.grad(out, (q, k, v), upstream)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        results = []
        for _ in range(2):
            graph.replay()
            stream.synchronize()
            results.append([t.clone() for t in captured])
    assert all(not torch.equal(a, b) and a.isfinite().all() for a, b in zip(*results, strict=True))


@on_gpu
def test_more_than_2_to_the_31_elements():
    shape = (2, 2**17, 70, 128)
    q = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    assert q.numel() > 2**31
    k, v = (torch.randn(2, 2**17, 1, 128, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    out = triton(q, k, v, window=100)
    (dq,) = torch.autograd.grad(out, q, q.detach())
    one = [q.detach()[1:, :, -1:].requires_grad_(), k.detach()[1:], v.detach()[1:]]
    alone = triton(*one, window=100)
    assert_equal([out[1:, :, -1:], dq[1:, :, -1:]], [alone, torch.autograd.grad(alone, one[0], one[0].detach())[0]])
