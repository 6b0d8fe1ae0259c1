"""Attention's tiles on the emulated GPU against plain PyTorch: splits, key heads that are shared, caches, any size."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilesync.emulated import Emulated, build
from tilesync.graphs import tensors
from tilewright.tilesync import Attention, Graph, chains, check
from tilewright.tilesync.compiled import compute_plainly
from tilewright.tilesync.stages.attention import NOTHING


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("tilesync"))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """By size: as it is compiled for larger heads, without other stages."""
    nothing = dict.fromkeys(("FEW_TILES", "MANY_ROWS", "COMBINES", "NORMS", "HAS_USER_STAGES"), 0)
    return {size: build(tmp_path_factory.mktemp(f"heads_{size}"), **nothing, ATTENTION=size) for size in (128, 256)}


def of_inputs(rows, context, heads, shared, size, **more):
    """A graph of one attention, whose keys and values are inputs."""
    stage = Attention("y", "x", "k", "v", rows=rows, context=context, heads=heads * shared, key_heads=heads,
                      head_dim=size, **more)  # fmt: skip
    width, by_head = heads * size, more.get("by_head", False)
    inputs = {"x": (rows, width * (shared + 2 * ("length" in more)))}
    inputs |= dict.fromkeys(("k", "v"), (heads * context, size) if by_head else (context, width))
    return Graph(inputs | ({"length": (1,)} if "length" in more else {}), [stage], ["y"])


def combine(y, heads):
    """What all splits are together, in float64."""
    parts, sums = y.double().split((y.shape[-1] - heads, heads), -1)
    return (parts.unflatten(-1, (heads, -1)) * sums.softmax(0)[..., None]).sum(0).flatten(1)


def oracle(graph, inputs, filled):
    """PyTorch's attention, in float64, over the keys that are there."""
    (stage,) = graph.stages
    wide = {name: x.double() for name, x in inputs.items()}
    size, heads, width = stage.head_dim, stage.key_heads, stage.heads * stage.head_dim
    q = wide["x"][:, :width].unflatten(1, (-1, size)).transpose(0, 1)
    k, v = (wide[name] for name in ("k", "v"))
    k, v = (x.view(heads, -1, size) if stage.by_head else x.unflatten(1, (heads, size)).transpose(0, 1) for x in (k, v))
    mask = torch.ones(stage.rows, stage.context, dtype=torch.bool)
    if stage.causal:
        mask = mask.tril(stage.context - stage.rows)
    if stage.length:
        fresh = (wide["x"][:, first : first + heads * size].unflatten(1, (heads, size)).transpose(0, 1)
                 for first in stage.new)  # fmt: skip
        k, v = (torch.cat((old[:, :filled], new), 1) for old, new in zip((k, v), fresh, strict=True))
        mask = torch.ones(stage.rows, k.shape[1], dtype=torch.bool).tril(filled)
    y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True, scale=stage.scale)
    return y[0].transpose(0, 1).flatten(1)


def compare(graph, library, blocks, seed, filled=None):
    (stage,) = graph.stages
    inputs = tensors(graph, seed, torch.bfloat16)
    if filled is not None:
        inputs["length"] = torch.tensor([filled], dtype=torch.int32)
        for name in ("k", "v"):
            of_cache = inputs[name].view(-1, stage.context, inputs[name].shape[1])
            of_cache[:, filled:] = torch.nan  # where nothing was written yet
    program = check(graph)
    y, plain = Emulated(library, program)(inputs, blocks, seed=seed)["y"], stage.compute(*inputs.values())
    truth = oracle(graph, inputs, filled)
    if stage.splits > 1:
        some = plain[..., -stage.heads :] > NOTHING / 2
        assert ((y[..., -stage.heads :] - plain[..., -stage.heads :])[some].abs() < 0.01).all()
        y, plain = combine(y, stage.heads), combine(plain, stage.heads)
    scale = truth.abs().max().clamp(min=1e-3)
    assert (plain.double() - truth).abs().max() < 0.01 * scale
    assert (y.double() - truth).abs().max() < 0.02 * scale


@pytest.mark.parametrize("size", [72, 128, 136, 250, 256])
def test_larger_heads(large, size):
    library = large[128 if size <= 128 else 256]
    compare(of_inputs(3, 290, 2, 3, size, splits=2, tile=2), library, 2, size)
    compare(of_inputs(2, 150, 1, 9, size, causal=True), library, 2, size)


SIZES = st.sampled_from((2, 4, 8, 24, 40, 64))


@settings(max_examples=14, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_keys_and_values_that_are_inputs(library, data):
    rows, context = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 300))
    graph = of_inputs(
        rows, context, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(SIZES),
        causal=context >= rows and data.draw(st.booleans()), tile=data.draw(st.integers(1, 9)),
        splits=data.draw(st.integers(1, min(5, context))),
    )  # fmt: skip
    compare(graph, library, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 99)))


@settings(max_examples=14, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_cache_whose_length_is_on_the_device(library, data):
    rows, context = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 300))
    heads, shared, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(SIZES)
    new = heads * shared * size, heads * (shared + 1) * size
    graph = of_inputs(rows, context, heads, shared, size, length="length", new=new, by_head=data.draw(st.booleans()),
                      tile=data.draw(st.integers(1, 9)), splits=data.draw(st.integers(1, min(5, context))))  # fmt: skip
    compare(
        graph, library, data.draw(st.integers(1, 3)), data.draw(st.integers(0, 99)), data.draw(st.integers(0, context))
    )


@pytest.mark.parametrize(("rows", "context", "filled"), [(1, 200, 150), (3, 24, 0)])
def test_a_step_of_an_attention_block(library, rows, context, filled):
    graph = chains.attention_step(rows, 48, 4, 16, context, 2)
    assert (graph.stages[1].splits > 1) == (context == 200)
    inputs = tensors(graph, 1, torch.bfloat16) | {"length": torch.tensor([filled], dtype=torch.int32)}
    for name in ("k", "v"):
        inputs[name].view(2, context, 16)[:, filled:] = torch.nan  # where nothing was written yet
    values = Emulated(library, check(graph))(inputs, seed=rows)
    exact = dict(zip(graph.outputs, compute_plainly(check(graph), list(inputs.values())), strict=True))
    for name, truth in exact.items():
        assert (values[name].float() - truth.float()).abs().max() < 0.03 * truth.float().abs().max(), name
