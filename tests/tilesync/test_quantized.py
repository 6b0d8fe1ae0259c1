"""Matmuls with packed weights: the kernel's own source on the CPU against float64, what is refused, gradients."""

import shutil
import subprocess

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilesync.emulated import MACROS, Emulated, build
from tilesync.graphs import ACTIVATIONS, tensors
from tilewright.runtime import nvrtc
from tilewright.tilesync import (
    Combined,
    Graph,
    GraphError,
    Packing,
    QuantizedGemm,
    Reduction,
    chains,
    check,
    compile,
    device,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EIGHT_BITS = Packing("int8"), Packing("fp8", scale=FP16), Packing("int8", scale=BF16), Packing("fp8")
FOUR_BITS = [
    Packing("int4", group, zeros, scale)
    for (group, zeros, scale) in (
        (128, False, BF16), (64, True, FP16), (32, True, FP32), (32, False, BF16), (128, True, BF16), (64, False, FP32),
    )
]  # fmt: skip
SMALL = {"MANY_ROWS": 0, "MANY_COLUMNS": 0, "NORMS": 0, "ATTENTION": 64, "HAS_USER_STAGES": 0}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """The kernel for each dtype of x: of bfloat16 for 8 rows, with 8 steps on their way, of float16 for 32, with 4."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which compiles the kernel's source for the CPU")
    folders = {half: tmp_path_factory.mktemp(f"half{half}") for half in (0, 1)}
    return {
        (BF16, FP16)[half]: build(folder, **SMALL, HALF=half, FEW_TILES=(1, 4)[half])
        for half, folder in folders.items()
    }


def matmul(inputs, output, x, sizes, packing, *, columns=16, gated=False, most=8, **options):
    """A matmul whose weight is entered among the inputs of a graph; without a packing it has 16 bits."""
    rows, outputs, width = sizes
    chains.enter(inputs, f"{output}w", outputs * (1 + gated), width, packing)
    tile = -(-min(rows, most) // 8) * 8, columns
    return chains.gemm(output, x, f"{output}w", sizes, packing=packing, tile=tile, gated=gated, **options)


@st.composite
def graphs(draw, most):
    """A chain of matmuls with weights of several layouts, whose first bytes are fetched while others are multiplied."""
    packings = draw(st.lists(st.sampled_from([None, *EIGHT_BITS, *FOUR_BITS]), min_size=1, max_size=3))
    rows = draw(st.integers(1, 12) | st.integers(13, 40))
    units = [8 if each is None else each.unit if each.group else 16 for each in packings]
    width = units[0] * draw(st.integers(1, max(2, (2600 if len(packings) == 1 else 1100) // units[0])))
    inputs, stages, x = {"x": (rows, width)}, [], "x"
    for place, packing in enumerate(packings):
        gated, last = draw(st.booleans()), place + 1 == len(packings)
        columns = draw(st.integers(1, 40)) if last else units[place + 1] * draw(st.integers(1, 2))
        more = {}
        if not gated and draw(st.booleans()):
            more["bias"] = f"bias{place}"
            inputs[more["bias"]] = (columns,)
        if draw(st.booleans()):
            more["residual"] = f"residual{place}"
            inputs[more["residual"]] = (rows, columns)
        stages.append(matmul(inputs, f"y{place}", x, (rows, columns, width), packing, gated=gated, most=most,
                             columns=draw(st.sampled_from((8, 12, 16, 24, 40))),
                             activation=draw(st.sampled_from(ACTIVATIONS)), **more))  # fmt: skip
        x, width = f"y{place}", columns
    return Graph(inputs, stages, [x])


def compare(graph, values, dtype):
    """Each stage by itself, of what those before it have computed: within one rounding and that of float32 sums."""
    for stage in graph.ordered:
        given_tensors = (values[name] for name in stage.inputs)
        wide = [
            x.double() if name not in graph.packed else x for name, x in zip(stage.inputs, given_tensors, strict=True)
        ]
        truth, y = stage.compute(*wide), values[stage.name].double()
        unit = torch.finfo(dtype).eps / 2 if graph.specs[stage.name].dtype != "float32" else 0.0
        close = 1.05 * unit * truth.abs() + 1e-5 * truth.abs().max().clamp(min=1)
        assert torch.isfinite(y).all() and bool(((y - truth).abs() <= close).all()), stage.name


@settings(max_examples=16, suppress_health_check=list(HealthCheck))
@given(
    st.tuples(graphs(8), st.just(BF16)) | st.tuples(graphs(32), st.just(FP16)), st.integers(1, 3), st.integers(0, 99)
)
def test_each_matmul_is_that_of_what_its_weight_stands_for(libraries, given_graph, blocks, seed):
    graph, dtype = given_graph
    values = Emulated(libraries[dtype], check(graph), dtype)(tensors(graph, seed, dtype), blocks, seed=seed)
    compare(graph, values, dtype)


@pytest.mark.parametrize("packing", [EIGHT_BITS[3], *FOUR_BITS[:3]], ids=lambda each: f"{each.format}-{each.group}")
def test_more_inputs_than_are_on_their_way(libraries, packing):
    """The slots of weights, scales and zero points are filled again, and x comes in panels."""
    inputs = {"x": (8, 11264)}
    graph = Graph(inputs, [matmul(inputs, "y", "x", (8, 24, 11264), packing, columns=24)], ["y"])
    compare(graph, Emulated(libraries[BF16], check(graph))(tensors(graph, 1, BF16), blocks=1), BF16)


@pytest.mark.parametrize(
    "packing", [EIGHT_BITS[0], FOUR_BITS[0], FOUR_BITS[2]], ids=lambda each: f"{each.format}-{each.group}"
)
def test_launches_follow_each_other_and_splits_are_added_up(libraries, packing):
    """A matmul behind the sum of another's splits, none of which divides a group; bit-equal in any interleaving."""
    inputs = {"x": (3, 640)}
    sums = matmul(inputs, "s", "x", (3, 128, 640), packing, splits=2)
    up = Reduction("h", "s", (3, 128), splits=2, tile=(8, 16), like="x", activation="silu")
    graph = Graph(inputs, [sums, up, matmul(inputs, "y", "h", (3, 40, 128), packing)], ["y"])
    assert sums.part(0)[1] % packing.unit == 0
    given_tensors, run = tensors(graph, 1, BF16), Emulated(libraries[BF16], check(graph))
    first = run(given_tensors, seed=1)
    compare(graph, first, BF16)
    for seed in (2, 3):
        assert torch.equal(run(given_tensors, blocks=3, seed=seed)["y"], first["y"])


SIZES = 2, 64, 128, 4, 2, 16, 48, 200, 2  # of a decode step: layers, widths, heads, vocabulary, context, rows
NAMES = [f"{name}{layer}" for layer in range(2) for name in ("qkv", "o", "up", "down")]
PACKINGS = dict(zip(NAMES, [*EIGHT_BITS[:2], *FOUR_BITS[1:4]], strict=False)) | {
    "up1": FOUR_BITS[5], "down1": FOUR_BITS[0], "head": EIGHT_BITS[0],
}  # fmt: skip


def test_a_decode_step_of_packed_weights_is_that_of_what_they_stand_for():
    """In plain PyTorch, which is the definition: each weight in a format of its own, or in 16 bits."""
    packed, plain = (chains.decode_step(*SIZES, packings=each) for each in (tuple(PACKINGS.items()), ()))
    given_tensors, wide = tensors(packed, 1), {}
    stages = {getattr(stage, "weight", ""): stage for stage in packed.stages}
    for name in plain.inputs:
        whole = name.replace("gate", "up")
        if whole in PACKINGS:
            matrix = stages[whole].matrix(given_tensors, FP32)
            wide[name] = matrix.chunk(2)[name.startswith("up")] if whole.startswith("up") else matrix
        else:
            wide[name] = given_tensors[name]
    for ours, truth in zip(compile(packed)(**given_tensors), compile(plain)(**wide), strict=True):
        torch.testing.assert_close(ours, truth)
    with pytest.raises(GraphError, match="packings names gate0, which is no matmul"):
        chains.decode_step(*SIZES, packings=(("gate0", EIGHT_BITS[0]),))


def test_norms_rotations_and_combined_splits_of_packed_matmuls(libraries):
    graph = chains.decode_step(*SIZES, packings=tuple(PACKINGS.items()))
    assert any(isinstance(getattr(stage, "prologue", None), Combined) for stage in graph.stages)
    values = Emulated(libraries[BF16], check(graph))(tensors(graph, 1, BF16), blocks=3, seed=1)
    for stage in graph.stages:
        truth, y = stage.compute(*(values[name] for name in stage.inputs)).float(), values[stage.name].float()
        assert torch.isfinite(y).all() and (y - truth).abs().max() <= 0.01 * truth.abs().max(), stage.name
    with pytest.raises(GraphError, match="do not say the dtype of what is combined; give a residual"):
        chains.gemm("y", "x", "w", (1, 16, 64), packing=EIGHT_BITS[0], tile=(8, 16), prologue=Combined(4, 2))


@pytest.mark.parametrize("packing", [EIGHT_BITS[0], EIGHT_BITS[3], FOUR_BITS[1]], ids=lambda each: each.format)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_x_gets_the_gradient_and_the_weight_none(packing, dtype):
    graph = chains.mlp(3, 64, 128, packing=packing)
    given_tensors = tensors(graph, 1, dtype)
    x = given_tensors["x"].requires_grad_()
    op = compile(graph)
    (dx,) = torch.autograd.grad(op(**given_tensors).sum(), x)
    wide = {name: each.double() if name not in graph.packed else each for name, each in given_tensors.items()}
    leaf = wide["x"].detach().requires_grad_()
    values = {**wide, "x": leaf}
    for stage in graph.ordered:
        values[stage.name] = stage.compute(*(values[name] for name in stage.inputs))
    (truth,) = torch.autograd.grad(values["y"].sum(), leaf)
    torch.testing.assert_close(
        dx.double(), truth, rtol=0.02, atol=0.02 * truth.abs().max().item() if dtype == BF16 else 1e-6
    )
    if dtype == FP32 and packing.format != "fp8":  # of which PyTorch's checks can multiply no numbers
        torch.library.opcheck(
            torch.ops.tilewright.tilesync,
            ([*given_tensors.values()], op.name),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_what_does_not_go_together_is_a_sentence():
    for arguments, words in ((("int3",), "'int3'; choose one of int8, fp8, int4"), (("int4",), "groups of 0"),
                             (("int8", 64), "only int4 has these"), (("int4", 48), "in groups of 32, 64, 128"),
                             (("int8", 0, True), "only int4"), (("fp8", 0, False, torch.int8), "scales")):  # fmt: skip
        with pytest.raises(GraphError, match=words):
            Packing(*arguments)

    def stage(packing, sizes=(8, 16, 128), weight="w", zero=None, tile=(8, 16)):
        return QuantizedGemm("y", "x", weight, sizes, packing=packing, scale="s", zero=zero, tile=tile)

    with pytest.raises(GraphError, match="64 inputs are no multiple of 128"):
        stage(FOUR_BITS[0], (8, 16, 64))
    with pytest.raises(GraphError, match="zero is None, but its packing has zero points: True"):
        stage(FOUR_BITS[1])
    with pytest.raises(GraphError, match="a packed weight is one tensor"):
        stage(EIGHT_BITS[0], weight=("w", "v"))

    def why_not(**options):
        made = stage(EIGHT_BITS[0], **options)
        rows, columns, width = made.sizes
        return device.why_not(
            check(Graph({"x": (rows, width), "w": (columns, width), "s": (columns,)}, [made], ["y"])), BF16
        )

    assert why_not() == ""
    assert "136 inputs are no multiple of 16" in why_not(sizes=(8, 16, 136))
    assert "up to 32 rows" in why_not(tile=(64, 64))
    graph = chains.mlp(1, 64, 64, packing=EIGHT_BITS[0])
    with pytest.raises(GraphError, match=r"up is torch.uint8, but torch.int8 is needed"):
        compile(graph)(**{**tensors(graph), "up": torch.zeros(128, 64, dtype=torch.uint8)})


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
@pytest.mark.parametrize("layouts", [("", "int8", "int4-128"), ("", "int8", "int4-32")], ids=str)
def test_the_compiler_spills_nothing_with_32_rows(tmp_path, layouts):
    """All layouts with fewer rows: see `test_persistent.py`."""
    bits = sum(1 << device.LAYOUTS.index(each) for each in layouts)
    macros = {**MACROS, **SMALL, "X_BYTES": device.X_BYTES, "FEW_TILES": 4, "LAYOUTS": bits}
    command = ["nvcc", "-std=c++17", "-arch=sm_90a", "-cubin", "-Xptxas", "-v", "-o", tmp_path / "run.cubin"]
    command += [f"-I{nvrtc._HEADERS}", *(f"-D{name}={value}" for name, value in macros.items()), device.SOURCE]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert said.count("0 bytes spill stores, 0 bytes spill loads") == said.count("spill stores") == 2, said
