import functools
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ops.contract import DEVICE, DTYPES, assert_near_truth, randn
from tilewright import ops
from tilewright.ops.decode_attention import eight_bits
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


def coded(inputs, cache):
    """The same over a cache of codes, and its scales by name."""
    keys, values = (torch.zeros(x.shape, dtype=cache, device=DEVICE) for x in inputs[3:5])
    scales = {name: torch.full(keys.shape[:3], 7.0, device=DEVICE) for name in ("k_scale", "v_scale")}
    return [*inputs[:3], keys, values, *inputs[5:]], scales


@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 4, 2, 16), (3, 5, 3, 1, 10), (1, 4, 7, 7, 2)], ids=str)
def test_codes_are_the_nearest(sizes, dtype, cache):
    inputs = problem(*sizes, dtype)
    inputs[1].mul_(torch.logspace(-7, 0, sizes[-1], device=DEVICE).to(dtype))  # down to what fp8 has no exponent for
    inputs[2][0, 0] = 0.0
    turned = doubles(fresh(inputs))
    expected = [reference(*turned), *turned[3:5]]
    given, scales = coded(inputs, cache)
    with ops.explain() as paths:
        out = append_to_cache(*given, **scales)
    assert [path.ran for path in paths] == ["kernel"]
    assert_near_truth([out], expected[:1], reduced=2)
    untouched = torch.ones(given[3].shape[:3], dtype=torch.bool, device=DEVICE)
    for row, there in enumerate(given[5].tolist()):
        untouched[row, :, there : there + sizes[1]] = False
    for codes, scale, truth in zip(given[3:5], scales.values(), expected[1:], strict=True):
        assert bool((scale[untouched] == 7).all()) and not codes.float()[untouched].any()
        found, x, s = codes.double()[~untouched], truth[~untouched], scale.double()[~untouched][:, None]
        most = eight_bits.LARGEST[cache]
        torch.testing.assert_close(
            s[:, 0], torch.where((x == 0).all(-1), 1.0, x.abs().amax(-1) / most), rtol=1e-6, atol=0
        )
        step = 1.0 if cache == torch.int8 else 2.0 ** (x / s).abs().clamp_min(2.0**-6).log2().floor() / 8
        # Half a step, and what float32 loses of a turned pair of which the larger one is nearly the largest.
        assert bool(((found - x / s).abs() <= step / 2 + 1e-6 * most).all())
    codes, scale = eight_bits.quantize(inputs[2], cache)  # values are not turned: every bit is the definition's
    for row, there in enumerate(given[5].tolist()):
        written = given[4][row, :, there : there + sizes[1]].float()
        assert torch.equal(written, codes[row].float().transpose(0, 1))
        assert torch.equal(scales["v_scale"][row, :, there : there + sizes[1]], scale[row].t())


def test_scales_are_quotients_on_every_device():
    """Divided by a number, PyTorch multiplies by its reciprocal on a GPU: another scale than the kernel's."""
    for cache in eight_bits.LARGEST:
        graph = make_fx(functools.partial(eight_bits.quantize, dtype=cache))(torch.randn(2, 3)).graph
        quotients = [node for node in graph.nodes if node.target == torch.ops.aten.div.Tensor]
        assert len(quotients) == 2 and all(isinstance(node.args[1], torch.fx.Node) for node in quotients)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_an_element_that_is_no_number_and_a_head_of_nearly_nothing():
    inputs = problem(1, 3, 2, 2, 8, turns=False)
    inputs[1][0, 0, 0, 3], inputs[1][0, 1, 1, 2] = float("nan"), float("-inf")
    inputs[1][0, 2] = 1e-40
    for cache in (torch.int8, torch.float8_e4m3fn):
        given, scales = coded(inputs, cache)
        for function in (append_to_cache, reference):
            function(*given, **scales)
            found = scales["k_scale"][0, :, 3:6]
            assert found.isfinite().tolist() == [[False, True, True], [True, False, True]]
            assert found[:, 2].eq(1).all() and not given[3][0, :, 5].float().any()


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
    torch.library.opcheck(OP._registered, (*fresh(inputs), None, None))
    plain = OP._registered._opoverload._schema.arguments
    assert not any(each.has_default_value() for each in plain), "torch 2.11 looks in vain for one that is left out"
    given, scales = coded(fresh(inputs), torch.int8)  # of fp8 torch compares nothing
    torch.library.opcheck(OP._registered, (*given, *scales.values()), test_utils=("test_schema", "test_faketensor"))
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
        ((q, k, v, keys.char(), values, before), "give both in one format|a scale goes"),
        ((q, k, v, keys[..., :1].expand(1, 2, 20, 8), values, before), "stride of 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence) as error:
            append_to_cache(*inputs)
        assert str(error.value).startswith("append_to_cache: ") and "\n" not in str(error.value)
