import sys

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ops.contract import (
    DEVICE,
    DTYPES,
    assert_compiles,
    assert_deterministic,
    assert_equal,
    assert_near_truth,
    assert_no_worse,
    doubles,
    gradients,
    on_gpu,
    randn,
)
from tilewright.ops.rope.op import cost, reference, rope, rope_tables

OP = sys.modules["tilewright.ops.rope.op"]
POSITIONS = 40
LAYOUTS = [(interleaved, heads_first) for interleaved in (False, True) for heads_first in (False, True)]


def problem(batch, sequence, heads, kv_heads, head_dim, rotary_dim=None, dtype=torch.float32, heads_first=False):
    torch.manual_seed(batch * 1000 + sequence * 100 + heads * 10 + head_dim)
    order = (lambda h: (batch, h, sequence, head_dim)) if heads_first else (lambda h: (batch, sequence, h, head_dim))
    tables = rope_tables(
        POSITIONS, rotary_dim or head_dim, base=100.0, device=DEVICE,
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
    )  # fmt: skip
    k = randn(*order(kv_heads), dtype=dtype) if kv_heads else None
    return randn(*order(heads), dtype=dtype), k, *tables


def ids_for(q, heads_first=False):
    return torch.randint(POSITIONS, (q.shape[0], q.shape[2 if heads_first else 1]), device=DEVICE)


def run(function, q, k, cos, sin, upstream_dtype=None, **options):
    """Outputs and gradients, for gradients from above that are the same numbers on every call."""
    outputs = function(q, k, cos, sin, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [o.detach() for o in outputs] + gradients(outputs, (q, k), upstream_for(outputs, upstream_dtype or q.dtype))


def upstream_for(outputs, dtype):
    generator = torch.Generator(DEVICE).manual_seed(3)
    return [torch.randn(o.shape, generator=generator, device=DEVICE).to(dtype) for o in outputs]


def truth(q, k, cos, sin, **options):
    return run(reference, *doubles((q, k)), cos.double(), sin.double(), upstream_dtype=q.dtype, **options)


@pytest.mark.parametrize("with_ids", [False, True], ids=["in order", "position_ids"])
@pytest.mark.parametrize("rotary_dim", [16, 10], ids=["whole", "partial"])
@pytest.mark.parametrize(("interleaved", "heads_first"), LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64_and_is_no_worse_than_torch(dtype, interleaved, heads_first, rotary_dim, with_ids):
    inputs = problem(2, 7, 6, 2, 16, rotary_dim, dtype, heads_first)
    options = {"interleaved": interleaved, "heads_first": heads_first}
    options["position_ids"] = ids_for(inputs[0], heads_first) if with_ids else None
    actual, expected = run(rope, *inputs, **options), truth(*inputs, **options)
    assert all(t.dtype == dtype for t in actual)
    assert_near_truth(actual, expected, reduced=2)
    if DEVICE == "cuda" or dtype != torch.bfloat16:  # Triton's interpreter cuts bfloat16 off
        assert_no_worse(actual, run(reference, *inputs, **options), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("batch", "sequence", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (1, 1, 1, 1, 2, 2), (3, 1, 5, 1, 6, 6), (1, 40, 1, 0, 80, 80), (2, 3, 17, 3, 96, 96), (1, 2, 2, 2, 112, 28),
        (1, 5, 33, 8, 64, 2), (2, 33, 3, 3, 128, 128), (1, 1, 2, 1, 1030, 1030), (0, 4, 2, 2, 8, 8), (2, 0, 2, 2, 8, 8),
    ],
    ids=str,
)  # fmt: skip
def test_any_size(batch, sequence, heads, kv_heads, head_dim, rotary_dim, interleaved):
    inputs = problem(batch, sequence, heads, kv_heads, head_dim, rotary_dim)
    actual, expected = (f(*inputs, interleaved=interleaved) for f in (lambda *a, **o: run(rope, *a, **o), truth))
    assert len(actual) == (4 if kv_heads else 2)
    assert_near_truth(actual, expected, reduced=2)


@given(
    batch=st.integers(1, 2), sequence=st.integers(1, 9), heads=st.integers(1, 9), kv_heads=st.integers(0, 5),
    half=st.integers(1, 20), rest=st.integers(0, 6), layout=st.sampled_from(LAYOUTS), with_ids=st.booleans(),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_combination(batch, sequence, heads, kv_heads, half, rest, layout, with_ids):
    interleaved, heads_first = layout
    inputs = problem(batch, sequence, heads, kv_heads, 2 * (half + rest), 2 * half, heads_first=heads_first)
    options = {"interleaved": interleaved, "heads_first": heads_first}
    options["position_ids"] = ids_for(inputs[0], heads_first) if with_ids else None
    assert_near_truth(run(rope, *inputs, **options), truth(*inputs, **options), reduced=2)


def test_half_rotated_is_hugging_faces_formula():
    q, k, cos, sin = problem(2, 7, 4, 2, 16, heads_first=True)

    def rotate_half(x):
        return torch.cat((-x[..., 8:], x[..., :8]), -1)

    wide_cos, wide_sin = torch.cat((cos, cos), -1)[:7], torch.cat((sin, sin), -1)[:7]
    for ours, x in zip(rope(q, k, cos, sin, heads_first=True), (q, k), strict=True):
        torch.testing.assert_close(ours, x * wide_cos + rotate_half(x) * wide_sin)


def test_interleaved_is_a_matmul_of_complex_numbers():
    q, _, cos, sin = problem(2, 7, 4, 0, 16)
    turned = torch.view_as_complex(q.detach().view(2, 7, 4, 8, 2)) * torch.complex(cos, sin)[:7, None]
    torch.testing.assert_close(rope(q, None, cos, sin, interleaved=True), torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_is_the_inverse_and_lengths_stay(interleaved):
    q, k, cos, sin = problem(2, 7, 4, 2, 16, dtype=torch.float64)
    turned = rope(q, k, cos, sin, interleaved=interleaved)
    assert not torch.allclose(turned[0], q)
    torch.testing.assert_close(turned[0].norm(dim=-1), q.norm(dim=-1))
    for back, x in zip(torch.autograd.grad(turned, (q, k), turned), (q, k), strict=True):
        torch.testing.assert_close(back, x)


def test_scores_depend_on_distance_alone():
    q, k, cos, sin = problem(1, 1, 1, 1, 16, dtype=torch.float64)

    def score(q_position, k_position):
        at = (torch.tensor([[p]], device=DEVICE) for p in (q_position, k_position))
        turned = [rope(x, None, cos, sin, position_ids=p) for x, p in zip((q, k), at, strict=True)]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(3, 8), score(31, 36))
    assert not torch.allclose(score(3, 8), score(3, 9))


@pytest.mark.parametrize(("interleaved", "heads_first"), LAYOUTS[1:3], ids=str)
def test_first_and_second_derivative_of_the_kernel_in_float64(interleaved, heads_first):
    q, k, cos, sin = problem(1, 2, 2, 1, 4, 2, torch.float64, heads_first)
    ids = ids_for(q, heads_first)

    def function(q, k):
        return rope(q, k, cos, sin, position_ids=ids, interleaved=interleaved, heads_first=heads_first)

    assert torch.autograd.gradcheck(function, (q, k))
    assert torch.autograd.gradgradcheck(function, (q, k), fast_mode=True)


def test_the_gradient_of_one_output_alone_and_of_one_input_alone():
    q, k, cos, sin = problem(2, 5, 3, 2, 8)
    both = run(rope, q, k, cos, sin)[2:]
    upstream = upstream_for((q, k), torch.float32)
    for index, (x, g) in enumerate(zip((q, k), upstream, strict=True)):
        alone = torch.autograd.grad(rope(q, k, cos, sin)[index], (q, k), g, allow_unused=True)
        assert torch.equal(alone[index], both[index]) and alone[1 - index] is None
        frozen = [x if x is y else y.detach() for y in (q, k)]
        (gradient,) = torch.autograd.grad(rope(*frozen, cos, sin), x, upstream)
        assert torch.equal(gradient, both[index])


def test_the_incoming_gradient_is_left_as_it_was():
    q, k, cos, sin = problem(2, 5, 3, 2, 8)
    turned = rope(q * 1.0, k * 1.0, cos, sin, inplace=True)
    upstream = [torch.randn_like(t) for t in turned]
    kept = [g.clone() for g in upstream]
    torch.autograd.grad(turned, (q, k), upstream)
    assert_equal(upstream, kept)


def test_tables_in_the_dtype_of_q_are_taken_as_they_are():
    q, k, cos, sin = problem(2, 5, 3, 2, 8, dtype=torch.bfloat16)
    cos, sin = cos.bfloat16(), sin.bfloat16()
    assert_near_truth(run(rope, q, k, cos, sin), truth(q, k, cos, sin), reduced=2)
    assert_equal(rope(q, k, cos, sin), rope(q, k, cos.float(), sin.float()))


def packed_qkv(q, k):
    """The same numbers as parts of one tensor, as one projection gives them, and that tensor."""
    packed = torch.cat((q.detach(), k.detach(), torch.zeros_like(k)), 2)
    return (*packed.split([q.shape[2], k.shape[2], k.shape[2]], 2)[:2], packed)


VIEWS = {
    "packed": lambda q, k: packed_qkv(q, k)[:2],
    "heads first in memory": lambda q, k: [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)],
    "misaligned": lambda q, k: [torch.nn.functional.pad(x.detach(), (1, 2))[..., 1:-2] for x in (q, k)],
    "batches next to each other": lambda q, k: [torch.stack(x.detach().unbind(0), 2).movedim(2, 0) for x in (q, k)],
}  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_rotated_without_a_copy(view, interleaved, monkeypatch):
    q, k, cos, sin = problem(2, 5, 4, 2, 16)
    expected = rope(q, k, cos, sin, interleaved=interleaved)
    views = VIEWS[view](q, k)
    assert not views[0].is_contiguous()
    for name in ("clone", "contiguous"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, **__: pytest.fail("copied"))
    turned = rope(*views, cos, sin, interleaved=interleaved)
    first = rope(*(x.transpose(1, 2) for x in views), cos, sin, interleaved=interleaved, heads_first=True)
    monkeypatch.undo()
    assert_equal(turned, expected)
    assert all(t.is_contiguous() for t in turned)
    assert_equal([t.transpose(1, 2) for t in first], expected)
    in_memory = first[0] if view == "heads first in memory" else first[0].transpose(1, 2)
    assert in_memory.is_contiguous()


@pytest.mark.parametrize("heads_first", [False, True])
def test_other_layouts_are_copied(heads_first):
    q, k, cos, sin = problem(2, 5, 3, 2, 8, heads_first=heads_first)
    expected = run(rope, q, k, cos, sin, heads_first=heads_first)
    strided = [torch.stack((x.detach(), x.detach()), -1)[..., 0].requires_grad_() for x in (q, k)]
    assert strided[0].stride(-1) == 2
    assert_equal(run(rope, *strided, cos, sin, heads_first=heads_first), expected)
    negative = torch._neg_view(q.detach())
    torch.testing.assert_close(rope(negative, None, cos, sin, heads_first=heads_first), -expected[0])
    gradient = torch.autograd.grad(rope(q, None, cos, sin, heads_first=heads_first).sum(), q)  # an expanded 1 comes in
    torch.testing.assert_close(
        gradient, torch.autograd.grad(reference(q, None, cos, sin, heads_first=heads_first).sum(), q)
    )


@pytest.mark.parametrize("rotary_dim", [16, 6])
@pytest.mark.parametrize(("interleaved", "heads_first"), LAYOUTS, ids=str)
def test_in_place_equals_out_of_place(interleaved, heads_first, rotary_dim):
    q, k, cos, sin = problem(2, 5, 4, 2, 16, rotary_dim, heads_first=heads_first)
    options = {"interleaved": interleaved, "heads_first": heads_first}
    expected = run(rope, q, k, cos, sin, **options)
    assert_equal(
        run(lambda q, k, *a, **o: rope(q * 1.0, k * 1.0, *a, **o), q, k, cos, sin, **options, inplace=True), expected
    )
    copies = [x.detach().clone() for x in (q, k)]
    turned = rope(*copies, cos, sin, **options, inplace=True)
    assert all(t.data_ptr() == c.data_ptr() for t, c in zip(turned, copies, strict=True))
    assert_equal(copies, expected[:2])


def test_in_place_in_a_packed_tensor_leaves_the_rest_alone():
    q, k, cos, sin = problem(2, 5, 4, 2, 16, 12)
    part_q, part_k, packed = packed_qkv(q, k)
    with torch.inference_mode():
        rope(part_q, part_k, cos, sin, inplace=True)
    expected = torch.cat((*rope(q, k, cos, sin), torch.zeros_like(k)), 2)
    assert torch.equal(packed, expected)
    with torch.inference_mode():  # a tensor of inference mode counts no versions
        inferred = q.clone()
        assert torch.equal(rope(inferred, None, cos, sin, inplace=True), expected[:, :, :4])


def test_in_place_in_training_by_index_into_packed_values():
    leaf = randn(2, 5, 3, 4, 8)
    cos, sin = rope_tables(POSITIONS, 8, device=DEVICE)

    def loss(inplace):
        packed = leaf * 1.0
        q, k, v = (packed[:, :, part] for part in range(3))
        turned = rope(q, k, cos, sin, inplace=inplace)
        return torch.autograd.grad((turned[0] * turned[1] * v).sum(), leaf)

    torch.testing.assert_close(loss(True), loss(False))


def test_in_place_is_refused_where_it_cannot_be():
    leaf, k, cos, sin = problem(2, 5, 3, 3, 8)
    plain = leaf.detach()
    packed = torch.stack((leaf, k), 2) * 1.0
    for q, key, message in (
        (leaf, None, "autograd still needs q"),
        (leaf.view(2, 5, 3, 8), None, "autograd still needs q"),
        (torch.tanh(leaf), None, "autograd still needs q"),
        (plain, leaf, "autograd still needs k"),
        (packed.unbind(2)[0], None, "unbind, split or chunk"),
        (plain.transpose(1, 3).contiguous().transpose(1, 3), None, "stride of 1"),
        (plain[:1].expand(2, 5, 3, 8), None, "share memory"),
        (plain, plain, "same memory"),
    ):
        with pytest.raises(ValueError, match=message):
            rope(q, key, cos, sin, inplace=True)


def test_who_saved_what_was_overwritten_is_told():
    leaf, _, cos, sin = problem(2, 5, 3, 0, 8)
    q = leaf * 1.0
    other = q.square().sum()  # keeps q for its own backward
    turned = rope(q, None, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="inplace"):
        (turned.sum() + other).backward()


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_position_out_of_range_is_loud_and_reads_nothing(heads_first, monkeypatch):
    q, k, cos, sin = problem(2, 5, 3, 2, 8, 6, heads_first=heads_first)
    ids = ids_for(q, heads_first)
    ids[0, 1], ids[0, 3], ids[1, 0] = POSITIONS, -1, 2**62
    bad = torch.zeros(2, 5, dtype=torch.bool, device=DEVICE)
    bad[0, 1] = bad[0, 3] = bad[1, 0] = True
    for function in (rope, reference):
        for x in run(function, q, k, cos, sin, position_ids=ids, heads_first=heads_first):
            x = x.transpose(1, 2) if heads_first else x
            assert torch.equal(x[..., :6].isnan(), bad[:, :, None, None].expand_as(x[..., :6]))
            assert x[..., 6:].isfinite().all()
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pytest.raises(ValueError, match=f"position id {POSITIONS} is not in the {POSITIONS} of cos"):
        rope(q, k, cos, sin, position_ids=ids, heads_first=heads_first)


@pytest.mark.parametrize("keys", [0, 2])
@pytest.mark.parametrize(("interleaved", "heads_first"), LAYOUTS, ids=str)
def test_opcheck(interleaved, heads_first, keys):
    q, k, cos, sin = problem(2, 5, 3, keys, 8, 6, heads_first=heads_first)
    arguments = (q, k, cos, sin, ids_for(q, heads_first), interleaved, heads_first, False)
    torch.library.opcheck(torch.ops.tilewright.rope.default, arguments)
    transposed = [None if x is None else x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    torch.library.opcheck(torch.ops.tilewright.rope.default, (*transposed, *arguments[2:]))


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_into_one_graph_with_the_same_result(inplace):
    q, k, cos, sin = problem(2, 5, 3, 2, 8)
    ids = ids_for(q)
    assert_compiles(lambda q, k: rope(q * 1.0, k * 1.0, cos, sin, position_ids=ids, inplace=inplace), [q, k])
    assert_compiles(lambda q: (rope(q.transpose(1, 2), None, cos, sin, heads_first=True),), [q])


def test_seen_by_a_dispatch_mode_it_has_a_second_derivative_too():
    q, _, cos, sin = problem(1, 3, 2, 0, 8)
    with FlopCounterMode(display=False):
        (gradient,) = torch.autograd.grad(rope(q, None, cos, sin).square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), q)
    torch.testing.assert_close(second, torch.full_like(q, 2.0))


def test_same_bits_on_every_run_even_in_poisoned_memory():
    inputs = problem(2, 7, 6, 2, 20, 12, torch.bfloat16)
    assert_deterministic(lambda: run(rope, *inputs, position_ids=torch.arange(14, device=DEVICE).view(2, 7)))


def test_the_plain_path_agrees_with_the_kernel(monkeypatch):
    q, k, cos, sin = problem(2, 7, 6, 2, 20, 12)
    kernel = run(rope, q, k, cos, sin)
    monkeypatch.setattr(OP.dispatch, "runs_kernel", lambda x: False)
    for a, b in zip(run(rope, q, k, cos, sin), kernel, strict=True):
        torch.testing.assert_close(a, b)


def test_tables_are_right_to_the_last_bit_of_float32_at_position_one_million():
    positions, rotary_dim = 1_000_001, 6
    cos, sin = rope_tables(positions, rotary_dim)
    steps = numpy.arange(0, rotary_dim, 2, dtype=numpy.longdouble) / rotary_dim
    angles = numpy.longdouble(positions - 1) * numpy.longdouble(10000.0) ** -steps
    for table, function in ((cos, numpy.cos), (sin, numpy.sin)):
        expected = torch.tensor([float(function(angle)) for angle in angles], dtype=torch.float64)
        torch.testing.assert_close(table[-1].double(), expected, rtol=2.0**-24, atol=1e-9)
    assert rope_tables(3, 8, dtype=torch.float64)[0].dtype == torch.float64
    torch.testing.assert_close(rope_tables(3, 4, base=16.0)[1][2], torch.sin(torch.tensor([2.0, 0.5])))


@pytest.mark.parametrize("change", [{"positions": -1}, {"rotary_dim": 7}, {"rotary_dim": 0}, {"base": 0.0}], ids=str)
def test_bad_tables_are_one_sentence(change):
    arguments = {"positions": 4, "rotary_dim": 8, "base": 10.0, **change}
    with pytest.raises(ValueError, match=next(iter(change))):
        rope_tables(arguments.pop("positions"), arguments.pop("rotary_dim"), **arguments)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"q": 3}, TypeError, "q must be a tensor"),
        ({"q": torch.zeros(2, 5, 3, 8, dtype=torch.int32)}, TypeError, "dtype"),
        ({"q": torch.zeros(5, 3, 8)}, ValueError, r"\(batch, sequence, heads, head_dim\) is needed"),
        ({"q": torch.zeros(2, 5, 3, 7)}, ValueError, "even"),
        ({"q": torch.zeros(2, 5, 3, 8194)}, ValueError, "8192"),
        ({"k": torch.zeros(2, 4, 3, 8)}, ValueError, "heads alone"),
        ({"k": torch.zeros(2, 5, 8)}, ValueError, "heads alone"),
        ({"k": torch.zeros(2, 5, 3, 8, dtype=torch.float64)}, TypeError, "convert one of them"),
        ({"k": torch.zeros(2, 5, 3, 8, device="meta")}, ValueError, "k is on meta"),
        ({"cos": None}, TypeError, "cos must be a tensor, not NoneType"),
        ({"cos": torch.zeros(5, 4, 1)}, ValueError, r"\(positions, rotary_dim / 2\)"),
        ({"cos": torch.zeros(5, 4, dtype=torch.float64)}, TypeError, "float32 or in q's dtype"),
        ({"cos": torch.zeros(5, 4, device="meta")}, ValueError, "cos is on meta"),
        ({"sin": torch.zeros(5, 4).requires_grad_()}, ValueError, "detach"),
        ({"sin": torch.zeros(6, 4)}, ValueError, "make them equal"),
        ({"cos": torch.zeros(5, 5), "sin": torch.zeros(5, 5)}, ValueError, "rotates 10 elements of a head of 8"),
        ({"cos": torch.zeros(5, 0), "sin": torch.zeros(5, 0)}, ValueError, "rotates 0 elements"),
        ({"cos": torch.zeros(4, 4), "sin": torch.zeros(4, 4)}, ValueError, "fewer than the sequence of 5"),
        ({"position_ids": torch.zeros(2, 5)}, TypeError, "int64"),
        ({"position_ids": [1]}, TypeError, "int64"),
        ({"position_ids": torch.zeros(5, dtype=torch.int64)}, ValueError, r"\(2, 5\) is needed"),
        ({"position_ids": torch.zeros(2, 5, dtype=torch.int64, device="meta")}, ValueError, "position_ids are on meta"),
        (
            {"cos": torch.zeros(0, 4), "sin": torch.zeros(0, 4), "position_ids": torch.zeros(2, 5, dtype=torch.int64)},
            ValueError,
            "no positions",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_bad_input_is_one_sentence(change, kind, message):
    arguments = {"q": torch.zeros(2, 5, 3, 8), "k": torch.zeros(2, 5, 1, 8), "cos": torch.zeros(5, 4)}
    arguments = {**arguments, "sin": torch.zeros(5, 4), "position_ids": None, **change}
    arguments = {
        k: v.detach().to(DEVICE).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) and not v.is_meta else v
        for k, v in arguments.items()
    }
    with pytest.raises(kind, match=message) as caught:
        rope(**arguments)
    assert "\n" not in str(caught.value)


def test_cost_is_one_read_and_one_write():
    assert cost(10, 72, 128).bytes == 10 * 72 * 128 * 4


@on_gpu
@pytest.mark.parametrize("heads_first", [False, True])
def test_more_than_two_to_the_31_elements(heads_first):
    shape = (2, 32, 270000, 128) if heads_first else (2, 270000, 32, 128)
    cos, sin = rope_tables(270000, 128, device="cuda")
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    tail = (slice(1, 2), slice(None), slice(-8, None)) if heads_first else (slice(1, 2), slice(-8, None))
    kept = q[tail].clone()
    turned = rope(q, None, cos, sin, heads_first=heads_first, inplace=True)
    expected = reference(kept.double(), None, cos[-8:].double(), sin[-8:].double(), heads_first=heads_first)
    assert_near_truth([turned[tail]], [expected], reduced=2)


@on_gpu
def test_runs_in_a_captured_graph():
    q, k, cos, sin = problem(2, 5, 4, 2, 16)
    q, k = q.detach(), k.detach()
    expected = rope(q, k, cos, sin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turned = rope(q, k, cos, sin)
    for t in turned:
        t.zero_()
    graph.replay()
    assert_equal(turned, expected)
