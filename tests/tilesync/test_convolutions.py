"""Convolutions on the emulated GPU against PyTorch's in float64: sizes, kernels, chains, tiles that see their halo."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilesync.emulated import Emulated, build
from tilesync.graphs import tensors
from tilewright.tilesync import Conv2d, Conv2DSync, Graph, chains, check


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """By the rows and columns of a tile; only matmuls of many rows."""
    nothing = dict.fromkeys(("FEW_TILES", "COMBINES", "NORMS", "ATTENTION", "HAS_USER_STAGES"), 0)
    sizes = {size: {"MANY_ROWS": size, "MANY_COLUMNS": size} for size in (64, 128)}
    return {size: build(tmp_path_factory.mktemp(f"rows_{size}"), **nothing, **sizes[size]) for size in sizes}


def oracle(graph, inputs):
    """The chain in float64, each stage's output rounded as the kernel's is."""
    x = inputs["x"]
    for stage in graph.ordered:
        image = x.double().view(stage.images, stage.height, stage.width, -1).permute(0, 3, 1, 2)
        weight = inputs[stage.weight].double().permute(0, 3, 1, 2)
        y = F.conv2d(image, weight, padding=stage.kernel // 2)
        x = (y.relu() if stage.activation == "relu" else y).permute(0, 2, 3, 1).flatten(0, 2).to(x.dtype)
    return x


def compare(graph, run, seed, **options):
    inputs = tensors(graph, seed, torch.bfloat16)
    y, truth = run(inputs, seed=seed, **options)["y"], oracle(graph, inputs)
    assert not run.report["is_there"]
    assert (y.double() - truth.double()).abs().max() <= 0.02 * truth.double().abs().max()
    return y


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_sizes(library, data):
    """Images of any sides, of which a tile has part of one or several, and channels that a step of 64 cuts anywhere."""
    images, height, width = (data.draw(st.integers(1, most)) for most in (3, 7, 7))
    channels = [8 * data.draw(st.sampled_from((1, 2, 3, 5, 8, 9))) for _ in range(data.draw(st.integers(2, 3)))]
    size = data.draw(st.sampled_from((64, 128)))
    inputs, stages = {"x": (images * height * width, channels[0])}, []
    for layer, (count, out) in enumerate(itertools.pairwise(channels)):
        kernel, is_last = data.draw(st.sampled_from((1, 3, 3, 5))), layer == len(channels) - 2
        inputs[f"w{layer}"] = (out, kernel, kernel, count)
        x = f"h{layer - 1}" if layer else "x"
        tile = data.draw(st.integers(24, size)), 8 * data.draw(st.integers(3, size // 8))
        stages.append(Conv2d("y" if is_last else f"h{layer}", x, f"w{layer}", images=images, height=height, width=width,
                             channels=(count, out), kernel=kernel, tile=tile,
                             activation=data.draw(st.sampled_from(("none", "relu"))),
                             sync={x: Conv2DSync()} if layer else None))  # fmt: skip
    graph = Graph(inputs, stages, ["y"])
    blocks, seed = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 99))
    compare(graph, Emulated(library[size], check(graph)), seed, blocks=blocks)


@pytest.mark.parametrize("streams", [False, True])
def test_a_ready_chain_by_any_number_of_blocks_has_the_same_bits(library, streams):
    """Three convolutions, in one launch or on streams of their own."""
    graph = chains.convolutions(2, 7, 24, layers=3)
    kernel, program = library[max(graph.stages[0].tile)], check(graph)
    first = compare(graph, Emulated(kernel, program), 1, blocks=1)
    run, inputs = Emulated(kernel, program), tensors(graph, 1, torch.bfloat16)
    for seed, blocks in ((2, 4), (3, 4)):
        again = run(inputs, blocks, 3, seed=seed, streams=streams)
        assert torch.equal(again["y"], first) and not run.report["is_there"]
