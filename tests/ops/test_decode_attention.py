import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.contract import (
    DEVICE,
    DTYPES,
    assert_deterministic,
    assert_near_truth,
    assert_no_worse,
    on_gpu,
    randn,
)
from tilewright.ops.decode_attention import eight_bits, kernels
from tilewright.ops.decode_attention.op import cost, decode_attention, reference
from tilewright.runtime import pdl

OP = sys.modules["tilewright.ops.decode_attention.op"]


def problem(batch, tokens, heads, kv_heads, head_dim, capacity, dtype=torch.float32, lengths=None):
    torch.manual_seed(batch * 1000 + tokens * 100 + heads * 10 + head_dim)
    if lengths is None:
        lengths = [tokens + int(torch.randint(max(1, capacity - tokens), ())) for _ in range(batch)]
    q = randn(batch, tokens, heads, head_dim, dtype=dtype, grad=False)
    k, v = (randn(batch, kv_heads, capacity, head_dim, dtype=dtype, grad=False) for _ in range(2))
    return q, k, v, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def truth(q, k, v, lengths, **options):
    return reference(q.double(), k.double(), v.double(), lengths, **options)


def in_eight_bits(inputs, cache):
    """The arguments of a call over a cache of codes, its scales by name, and the truth about what they stand for."""
    q, k, v, lengths = inputs
    (keys, k_scale), (values, v_scale) = (eight_bits.quantize(x, cache) for x in (k, v))
    wide = [eight_bits.dequantize(codes, scale, torch.float64) for codes, scale in ((keys, k_scale), (values, v_scale))]
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return (q, keys, values, lengths), scales, reference(q.double(), *wide, lengths)


def by_torch(q, k, v, lengths):
    """scaled_dot_product_attention with the mask, in the dtype of q."""
    tokens = q.shape[1]
    places = torch.arange(tokens, device=q.device) - tokens + lengths[:, None]
    mask = (torch.arange(k.shape[2], device=q.device) <= places[..., None])[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True)
    return out.transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(1, 4, 4), (1, 8, 2), (3, 6, 2)], ids=str)
def test_matches_float64_and_is_no_worse_than_torch(dtype, tokens, heads, kv_heads):
    inputs = problem(2, tokens, heads, kv_heads, 32, 150, dtype, lengths=[150, 71])
    actual, expected = decode_attention(*inputs), truth(*inputs)
    assert actual.dtype == dtype and actual.is_contiguous()
    assert_near_truth([actual], [expected], reduced=150)
    if DEVICE == "cuda" or dtype != torch.bfloat16:  # Triton's interpreter cuts bfloat16 off
        assert_no_worse([actual], [by_torch(*inputs)], [expected])


def test_the_reference_is_the_formula():
    q, k, v, lengths = problem(2, 2, 4, 2, 8, 9, torch.float64, lengths=[9, 4])
    out = reference(q, k, v, lengths, scale=0.3)
    for batch in range(2):
        for token in range(2):
            for head in range(4):
                there = int(lengths[batch]) - 2 + 1 + token
                keys, values = k[batch, head // 2, :there], v[batch, head // 2, :there]
                expected = (0.3 * keys @ q[batch, token, head]).softmax(0) @ values
                torch.testing.assert_close(out[batch, token, head], expected)


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_heads", "head_dim", "capacity"),
    [
        (1, 1, 1, 1, 16, 1), (1, 1, 3, 1, 80, 17), (2, 5, 5, 5, 1, 33), (1, 1, 32, 1, 256, 40), (3, 2, 4, 2, 96, 16),
        (1, 8, 64, 4, 20, 64), (0, 1, 2, 2, 16, 8), (2, 0, 2, 2, 16, 8), (1, 1, 7, 7, 24, 200),
    ],
    ids=str,
)  # fmt: skip
def test_any_size(batch, tokens, heads, kv_heads, head_dim, capacity):
    inputs = problem(batch, tokens, heads, kv_heads, head_dim, capacity)
    assert_near_truth([decode_attention(*inputs)], [truth(*inputs)], reduced=capacity * head_dim)


@given(
    batch=st.integers(1, 2), tokens=st.integers(1, 4), group=st.integers(1, 3), kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 40), capacity=st.integers(4, 90), data=st.data(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_combination(batch, tokens, group, kv_heads, head_dim, capacity, data):
    lengths = [data.draw(st.integers(tokens, capacity)) for _ in range(batch)]
    inputs = problem(batch, tokens, group * kv_heads, kv_heads, head_dim, capacity, lengths=lengths)
    assert_near_truth([decode_attention(*inputs)], [truth(*inputs)], reduced=capacity * head_dim)


def test_what_lies_behind_the_length_is_not_read():
    q, k, v, lengths = problem(2, 2, 4, 2, 16, 60, lengths=[60, 21])
    k[1, :, 21:], v[1, :, 21:] = float("nan"), float("nan")
    actual = decode_attention(q, k, v, lengths)
    assert actual.isfinite().all()
    assert_near_truth([actual], [truth(q, k, v, lengths)], reduced=60 * 16)


def test_a_query_without_keys_is_zero_and_a_length_beyond_the_cache_is_the_cache():
    q, k, v, lengths = problem(3, 2, 2, 2, 16, 40, lengths=[0, 1, 4000])
    out = decode_attention(q, k, v, lengths)
    assert not out[0].any() and not out[1, 0].any()
    torch.testing.assert_close(out[1, 1], v[1, :, 0])
    whole = torch.full_like(lengths, 40)
    torch.testing.assert_close(out[2], truth(q, k, v, whole)[2].float(), atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow():
    q, k, v, lengths = problem(1, 1, 2, 1, 16, 50)
    inputs = q * 100, k * 100, v, lengths
    assert_near_truth([decode_attention(*inputs)], [truth(*inputs)], reduced=50 * 16 * 1000)


CACHES = (torch.int8, torch.float8_e4m3fn)


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cache_of_eight_bits_is_attended_to_as_what_its_codes_stand_for(dtype, cache):
    for tokens, heads, kv_heads, head_dim, values in ((1, 4, 4, 32, 1.0), (3, 6, 2, 20, 1e-3), (1, 2, 1, 24, 60.0)):
        q, k, v, lengths = problem(2, tokens, heads, kv_heads, head_dim, 90, dtype, lengths=[90, 41])
        arguments, scales, expected = in_eight_bits((q, k, v * values, lengths), cache)
        actual = decode_attention(*arguments, **scales)
        assert actual.dtype == dtype
        # Nothing is rounded but what is rounded over a cache of this dtype: the weights, and the result.
        assert_near_truth([actual], [expected], reduced=90)
        assert_near_truth([reference(*arguments, *scales.values())], [expected], reduced=90)


@given(
    tokens=st.integers(1, 3), group=st.integers(1, 3), kv_heads=st.integers(1, 2), head_dim=st.integers(1, 40),
    capacity=st.integers(3, 70), cache=st.sampled_from(CACHES), data=st.data(),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_a_cache_of_eight_bits_of_any_size(tokens, group, kv_heads, head_dim, capacity, cache, data):
    inputs = problem(1, tokens, group * kv_heads, kv_heads, head_dim, capacity)
    inputs[3].fill_(data.draw(st.integers(tokens, capacity)))
    arguments, scales, expected = in_eight_bits(inputs, cache)
    for name, codes in (("k_scale", arguments[1]), ("v_scale", arguments[2])):  # what lies behind is not read
        scales[name][:, :, inputs[3][0] :] = float("nan")
        eight_bits.as_bytes(codes)[:, :, inputs[3][0] :] = 127
    first = decode_attention(*arguments, **scales)
    assert_near_truth([first], [expected], reduced=capacity * head_dim)
    assert torch.equal(decode_attention(*arguments, **scales), first)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_element_that_is_no_number_shows():
    q, k, v, lengths = problem(1, 1, 2, 2, 16, 40)
    k[0, 1, 3, 5], v[0, 0, 7, 2] = float("inf"), float("nan")
    lengths.fill_(40)
    for cache in CACHES:
        arguments, scales, _ = in_eight_bits((q, k, v, lengths), cache)
        assert not decode_attention(*arguments, **scales)[0, 0].isfinite().all(-1).any()


def test_layouts():
    q, k, v, lengths = problem(2, 1, 4, 2, 16, 37)
    expected = decode_attention(q, k, v, lengths)
    packed = torch.cat((q, q), -1)[..., :16]
    by_token = k.transpose(1, 2).contiguous().transpose(1, 2)
    misaligned = torch.empty(v.numel() + 1, device=DEVICE)[1:].view(v.shape).copy_(v)
    columns = torch.empty(*k.shape[:-1], 32, device=DEVICE)[..., ::2].copy_(k)
    for inputs in ((packed, k, v), (q, by_token, v), (q, k, misaligned), (q, columns, v)):
        torch.testing.assert_close(decode_attention(*inputs, lengths), expected, atol=1e-6, rtol=1e-6)


def test_the_same_bits_on_every_run():
    inputs = problem(2, 2, 4, 2, 32, 120, torch.float16)
    assert_deterministic(lambda: [decode_attention(*inputs)])


def test_one_graph_and_a_registered_op():
    inputs = problem(2, 1, 4, 2, 16, 40)
    torch.library.opcheck(OP._registered, (*inputs, None, None, 0.25))
    arguments, scales, _ = in_eight_bits(inputs, torch.int8)  # of fp8 torch compares nothing
    torch.library.opcheck(
        OP._registered, (*arguments, *scales.values(), 0.25), test_utils=("test_schema", "test_faketensor")
    )
    torch.compiler.reset()
    compiled = torch.compile(lambda *tensors: decode_attention(*tensors) * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), decode_attention(*inputs) * 2)


@pytest.mark.skipif(DEVICE == "cuda", reason="what is fetched is seen by the interpreter alone")
@pytest.mark.parametrize("cache", [None, torch.int8], ids=str)
@pytest.mark.parametrize(("lengths", "parts", "by_token"), [([700, 130, 2], 1, False), ([650], 3, True)], ids=str)
def test_in_a_chain_keys_of_earlier_tokens_are_fetched_and_nothing_else(lengths, parts, by_token, cache, monkeypatch):
    tokens, ahead, found = 2, 128, []
    arguments, scales = problem(len(lengths), tokens, 4, 2, 16, 700, torch.float16, lengths=lengths), {}
    if cache is not None:
        arguments, scales, _ = in_eight_bits(arguments, cache)
    if by_token:
        q, *both, count = arguments
        arguments = (q, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in both), count)

    def note(rows, stride, size, count, *_):
        found.append(
            [int(x.handle.data.item()) if hasattr(x, "handle") else int(x) for x in (rows, stride, size, count)]
        )

    monkeypatch.setattr(kernels, "prefetch_rows", note)
    with pdl.chaining(pdl.Chain()):
        out = decode_attention(*arguments, **scales)
    assert torch.equal(out, decode_attention(*arguments, **scales))
    expected = set()
    for x in arguments[1:3]:
        row, head, token = (stride * x.itemsize for stride in x.stride()[:3])
        for batch, length in enumerate(lengths):
            share = 16 * math.ceil(math.ceil(length / parts) / 16)
            for begin in range(0, length, share):
                keys = range(begin, min(begin + share, begin + ahead, length - tokens))
                expected |= {x.data_ptr() + batch * row + h * head + key * token for h in range(2) for key in keys}
    fetched = [rows + stride * key for rows, stride, _, count in found for key in range(min(count, ahead))]
    assert set(fetched) == expected and len(fetched) == len(expected)
    assert {size for _, _, size, _ in found} == {16 * arguments[1].itemsize}


@on_gpu
@pytest.mark.parametrize("cache", [None, *CACHES], ids=str)
def test_a_captured_graph_follows_the_length(cache):
    q, k, v, lengths = problem(2, 1, 8, 2, 64, 500, torch.bfloat16, lengths=[3, 9])
    scales = {}
    if cache is not None:
        (_, k, v, _), scales, _ = in_eight_bits((q, k, v, lengths), cache)
    decode_attention(q, k, v, lengths, **scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(q, k, v, lengths, **scales)
    for grown in ([3, 9], [400, 1], [500, 499]):
        lengths.copy_(torch.tensor(grown))
        graph.replay()
        assert torch.equal(out, decode_attention(q, k, v, lengths, **scales))


def test_mistakes_are_one_sentence():
    q, k, v, lengths = problem(1, 1, 4, 2, 16, 8)
    for inputs, kind, sentence in (
        ((q[0], k, v, lengths), ValueError, "q has shape"),
        ((q, k.half(), v, lengths), TypeError, "k is torch.float16"),
        ((q, k, v[:, :, :4], lengths), ValueError, "make them equal"),
        ((q[..., :8], k, v, lengths), ValueError, "make batch and head_dim equal"),
        ((q[:, :, :3], k, v, lengths), ValueError, "do not divide"), ((q, k, v, lengths.long()), TypeError, "int32"),
        ((q, k, v, lengths[:0]), ValueError, "lengths have shape"), ((q, k, v, 3), TypeError, "lengths are int"),
        ((q.expand(1, 99, 4, 16), k, v, lengths), ValueError, "fewer tokens at a time"),
        ((q.clone().requires_grad_(), k, v, lengths), ValueError, "torch.no_grad"),
        ((torch.zeros(1, 1, 2, 257), *[torch.zeros(1, 2, 8, 257)] * 2, lengths.cpu()), ValueError, "from 1 to 256"),
    ):  # fmt: skip
        with pytest.raises(kind, match=sentence) as error:
            decode_attention(*inputs)
        assert str(error.value).startswith("decode_attention: ") and "\n" not in str(error.value)


def test_a_cache_and_its_scales_must_fit():
    q, k, v, lengths = problem(1, 1, 4, 2, 16, 8)
    (_, keys, values, _), scales, _ = in_eight_bits((q, k, v, lengths), torch.int8)
    for arguments, options, kind, sentence in (
        ((q, keys, values), {}, ValueError, "a scale goes with int8"), ((q, k, v), scales, ValueError, "k is torch.f"),
        ((q, keys, v), scales, TypeError, "one format"), ((keys, keys, values), scales, TypeError, "q has dtype"),
        ((q, keys, values), {**scales, "v_scale": None}, ValueError, "v is torch.int8; a scale"),
        ((q, keys, values), {**scales, "k_scale": scales["k_scale"].half()}, ValueError, "float32 tensor of shape"),
        ((q, keys, values), {**scales, "k_scale": scales["k_scale"][..., :4]}, ValueError, r"shape \(1, 2, 8\)"),
    ):  # fmt: skip
        with pytest.raises(kind, match=sentence) as error:
            decode_attention(*arguments, lengths, **options)
        assert "\n" not in str(error.value)


def test_cost_counts_the_cache():
    assert cost(2, 1, 8, 2, 64, 100, cache_bytes=1).bytes == 2 * (2 * 2 * 100 * (64 + 4)) + 2 * 2 * (2 * 8 * 64)
    assert cost(2, 1, 8, 2, 64, 100).bytes == 2 * (2 * 2 * 2 * 100 * 64) + 2 * 2 * (2 * 8 * 64)
