import sys

import pytest
import torch

from ops.contract import DEVICE, DTYPES, assert_near_truth, randn
from tilewright import ops
from tilewright.ops.decode_attention.append import append_to_cache, reference

OP = sys.modules["tilewright.ops.decode_attention.append"]


def problem(batch, tokens, heads, kv_heads, head_dim, dtype=torch.float32, before=None, turns=True):
    torch.manual_seed(batch * 1000 + tokens * 100 + heads * 10 + head_dim)
    q, k, v = (randn(batch, tokens, n, head_dim, dtype=dtype, grad=False) for n in (heads, kv_heads, kv_heads))
    keys, values = (randn(batch, kv_heads, 20, head_dim, dtype=dtype, grad=False) for _ in range(2))
    before = torch.tensor(before or [3, 0, 15][:batch], dtype=torch.int32, device=DEVICE)
    tables = ops.rope_tables(20, head_dim, device=DEVICE) if turns else ()
    return q, k, v, keys, values, before, *tables


def fresh(inputs):
    return [*inputs[:3], inputs[3].clone(), inputs[4].clone(), *inputs[5:]]


def doubles(inputs):
    return [each if each.dtype == torch.int32 else each.double() for each in inputs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turns", [True, False], ids=["turned", "plain"])
@pytest.mark.parametrize("sizes", [(1, 1, 4, 2, 16), (3, 5, 3, 1, 10), (2, 2, 9, 9, 64), (1, 4, 7, 7, 2)], ids=str)
def test_writes_what_the_definition_does_and_nothing_else(dtype, turns, sizes):
    inputs = fresh(problem(*sizes, dtype, turns=turns))
    truth = doubles(fresh(inputs))
    expected = [reference(*truth), *truth[3:5]]
    with ops.explain() as paths:
        out = append_to_cache(*inputs)
    (path,) = paths
    assert path.ran == "kernel"
    assert_near_truth([out, *inputs[3:5]], expected, reduced=2)
    assert torch.equal(inputs[4].double(), expected[2])
    untouched = torch.ones(inputs[3].shape, dtype=torch.bool, device=DEVICE)
    for row, there in enumerate(inputs[5].tolist()):
        untouched[row, :, there : there + sizes[1]] = False
    assert torch.equal(inputs[3][untouched].double(), expected[1][untouched])


def test_turns_as_rope_does():
    q, k, v, keys, values, before, cos, sin = problem(2, 3, 4, 2, 16)
    places = before[:, None].long() + torch.arange(3, device=DEVICE)
    turned, turned_k = ops.rope(q, k, cos, sin, position_ids=places)
    torch.testing.assert_close(append_to_cache(q, k, v, keys, values, before, cos, sin), turned)
    torch.testing.assert_close(keys[0, :, 3:6], turned_k[0].transpose(0, 1))


def test_parts_of_one_matmul_and_a_cache_by_token():
    q, k, v, keys, values, *rest = problem(2, 3, 4, 2, 16)
    packed = torch.cat((q.flatten(2), k.flatten(2), v.flatten(2)), -1)
    parts = [part.unflatten(-1, (-1, 16)) for part in packed.split((64, 32, 32), -1)]
    by_token = keys.transpose(1, 2).contiguous().transpose(1, 2)
    out = append_to_cache(q, k, v, keys, values, *rest)
    assert torch.equal(append_to_cache(*parts, by_token, values.clone(), *rest), out)
    assert torch.equal(by_token, keys)


def test_nothing_is_written_outside_of_the_cache():
    q, k, v, _, values, before, cos, sin = problem(1, 2, 2, 2, 8)
    whole = torch.zeros(3, 2, 20, 8, device=DEVICE)
    for there in (20, 19, -2, 10**9):
        before.fill_(there)
        append_to_cache(q, k, v, whole[1:2], values, before, cos, sin)
    assert not whole[[0, 2]].any() and whole[1, :, 19].all() and not whole[1, :, :19].any()


def test_no_tokens_and_no_batch():
    for batch, tokens in ((1, 0), (0, 2)):
        inputs = problem(batch, tokens, 2, 2, 8, before=[0] * batch)
        assert append_to_cache(*inputs).shape == (batch, tokens, 2, 8)


def test_one_graph_and_a_registered_op():
    inputs = problem(2, 1, 4, 2, 16)
    torch.library.opcheck(OP._registered, fresh(inputs))
    torch.compiler.reset()
    compiled = torch.compile(lambda *tensors: append_to_cache(*tensors) * 2, fullgraph=True, backend="aot_eager")
    one, two = fresh(inputs), fresh(inputs)
    assert torch.equal(compiled(*one), append_to_cache(*two) * 2) and torch.equal(one[3], two[3])


def test_mistakes_are_one_sentence():
    q, k, v, keys, values, before, cos, sin = problem(1, 2, 4, 2, 8)
    for inputs, sentence in (
        ((q[0], k, v, keys, values, before), "q must have 4"), ((q, k.half(), v, keys, values, before), "k must have"),
        ((q, k[:, :1], v, keys, values, before), "k has shape"), ((q, k, v[..., :4], keys, values, before), "v has"),
        ((q, k, v, keys, values[:, :1], before), "values has shape"), ((q, k, v, keys, values, before.long()), "int32"),
        ((q, k, v, keys[:, :, :1], values[:, :, :1], before), "do not fit"),
        ((q, k, v, keys, values, before, cos), "give both"),
        ((q, k, v, keys, values, before, cos[:, :2], sin), "cos must be"),
        ((q.clone().requires_grad_(), k, v, keys, values, before), "torch.no_grad"),
        ((q, k, v, keys[..., :1].expand(1, 2, 20, 8), values, before), "stride of 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence) as error:
            append_to_cache(*inputs)
        assert str(error.value).startswith("append_to_cache: ") and "\n" not in str(error.value)
