"""Random graphs of small stages, and tensors for them."""

import itertools

import torch
from hypothesis import strategies as st

from tilewright.tilesync import (
    Attention,
    Combined,
    Conv2d,
    Elementwise,
    Gemm,
    Graph,
    GroupSync,
    Norm,
    Normed,
    Reduction,
    Rotation,
    RowSync,
    StageSync,
    StridedSync,
    TileSync,
)

POLICIES = (None, StageSync(), RowSync(), TileSync(), StridedSync(2), GroupSync(2))
KINDS = ("gemm", "gated", "split", "elementwise", "norm", "attention", "conv", "normed", "rotated", "combined")
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")


@st.composite
def graphs(draw, stages=5, kinds=KINDS, for_gpu=False):
    """Chains with fan-out and fan-in; every stage reads tensors that were made before it."""
    rows = draw(st.integers(1, 24))
    small = st.integers(1, 8).map(lambda count: 8 * count) if for_gpu else st.integers(1, 24)
    inputs, made, columns, found = {"x": (rows, draw(small))}, [], {}, []
    columns["x"] = inputs["x"][1]
    used = set()

    def weight(*shape):
        name = f"w{len(inputs)}"
        inputs[name] = shape
        return name

    def tile(gated=False, few=False):
        if not for_gpu:
            return draw(st.integers(3, 17)), draw(st.integers(5, 17))
        many = () if few else ((40, 48), (64, 64))
        down, across = draw(st.sampled_from(((8, 16), (32, 16), (24, 56), *many)))
        return down, across // (1 + gated)

    def sync(*names):
        used.update(names)
        return {name: policy for name in names if name in made and (policy := draw(st.sampled_from(POLICIES)))}

    order = st.sampled_from(("rows", "columns", _reversed))
    for number in range(draw(st.integers(1, stages))):
        name, kind = f"t{number}", draw(st.sampled_from(kinds))
        x = draw(st.sampled_from(["x", *made]))
        width, count = columns[x], draw(small)
        same = [other for other in columns if columns[other] == count]
        residual = draw(st.sampled_from([None, *same])) if same else None
        policies = sync(x, *([residual] if residual and kind in ("gemm", "gated", "split") else []))
        more = {"order": draw(order), "sync": policies}
        activation = draw(st.sampled_from(ACTIVATIONS))
        if kind in ("gemm", "gated"):
            gated = kind == "gated"
            w = weight(count * (1 + gated), width)
            bias = None if gated else draw(st.sampled_from([None, "bias"]))
            bias = weight(count) if bias else None
            stage = Gemm(name, x, w, (rows, count, width), tile=tile(gated), activation=activation, gated=gated,
                         bias=bias, residual=residual, **more)  # fmt: skip
        elif kind == "split":
            splits, gated = draw(st.integers(2, 3)), draw(st.booleans())
            partial = f"{name}s"
            wide = count * (1 + gated)
            more["sync"].pop(residual, None)
            found.append(Gemm(partial, x, weight(wide, width), (rows, wide, width), tile=tile(), splits=splits, **more))
            stage = Reduction(name, partial, (rows, count), splits=splits, tile=tile(), like="x", gated=gated,
                              activation=activation, residual=residual)  # fmt: skip
        elif kind == "elementwise":
            count = width
            both = [x, *([other for other in columns if columns[other] == width][-1:])]
            used.update(both)
            stage = Elementwise(name, both, (rows, width), tile=tile(), function=activation, **more)
        elif kind == "norm":
            count = width
            stage = Norm(name, x, weight(width), (rows, width), tile=draw(st.integers(2, 9)), **more)
        elif kind in ("normed", "rotated"):
            normed = Normed(weight(width)) if kind == "normed" or draw(st.booleans()) else None
            rotation, (down, across) = None, tile(few=normed is not None)
            if kind == "rotated":
                count += count % 2
                size = draw(st.sampled_from([each for each in range(2, count + 1, 2) if count % each == 0]))
                tables = [f"{name}{size}" for name in ("cos", "sin")]
                inputs |= dict.fromkeys(tables, (7 + rows, size // 2)) | {"length": (1,)}
                rotation = Rotation(*tables, "length", size, size * draw(st.integers(0, count // size)))
                across += across % 2
            bias = weight(count) if draw(st.booleans()) else None
            more["sync"] = sync(x)
            stage = Gemm(name, x, weight(count, width), (rows, count, width), tile=(down, across), bias=bias,
                         prologue=normed, rotation=rotation, **more)  # fmt: skip
        elif kind == "combined":
            size = 8 if for_gpu else next(size for size in (4, 3, 2, 1) if width % size == 0)
            splits, heads = draw(st.integers(2, 3)), width // size
            splits = min(splits, rows)
            combined = Combined(heads, splits) if splits > 1 else None
            found.append(Attention(f"{name}s", x, x, x, rows=rows, context=rows, heads=heads, head_dim=size,
                                   splits=splits, tile=draw(st.integers(2, 9)), **more))  # fmt: skip
            stage = Gemm(name, f"{name}s", weight(count, width), (rows, count, width), tile=tile(few=True),
                         prologue=combined)  # fmt: skip
        elif kind == "attention":
            heads = next(heads for heads in (6, 4, 3, 2, 1) if width % heads == 0)
            shared, causal = (
                draw(st.sampled_from([each for each in range(1, heads + 1) if heads % each == 0])),
                draw(st.booleans()),
            )
            count = width
            stage = Attention(name, x, x, x, rows=rows, context=rows, heads=heads, key_heads=shared,
                              head_dim=width // heads, causal=causal, tile=draw(st.integers(2, 9)), **more)  # fmt: skip
        else:
            height = draw(st.sampled_from([each for each in range(1, rows + 1) if rows % each == 0]))
            images = draw(st.sampled_from([each for each in range(1, height + 1) if height % each == 0]))
            kernel = draw(st.sampled_from((1, 3)))
            stage = Conv2d(name, x, weight(count, kernel, kernel, width), images=images, height=height // images,
                           width=rows // height, channels=(width, count), kernel=kernel, activation=activation,
                           tile=tile(), **more)  # fmt: skip
        found.append(stage)
        made.append(name)
        columns[name] = count
    read = {name for stage in found for name in stage.inputs}
    return Graph(inputs, draw(st.permutations(found)), [name for name in made if name not in read])


def _reversed(grid):
    return list(itertools.product(*map(range, grid)))[::-1]


def packed(name, shape, dtype, generator):
    """A part of a packed weight: bits without NaN, zero points, or scales such that no sum grows."""
    if name.endswith("_scale"):
        return ((torch.rand(shape, generator=generator) + 0.1) / 1024).to(dtype)
    bits = torch.randint(0, 16 if name.endswith("_zero") else 256, shape, generator=generator, dtype=torch.uint8)
    return bits if dtype == torch.uint8 else torch.where(bits & 127 == 127, 0, bits).view(dtype)


def tensors(graph, seed=0, dtype=torch.float32, device="cpu"):
    """Random inputs of a graph; weights are scaled so that nothing grows."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in graph.inputs.items():
        if name in graph.packed:
            made[name] = packed(name, shape, graph.packed[name], generator).to(device)
            continue
        x = torch.randn(shape, generator=generator) / (1.0 if name == "x" else max(1, shape[-1]) ** 0.5)
        if name not in graph.floats:
            x = torch.full(shape, 7, dtype=torch.int32) if name in graph.integers else x.to(dtype)
        made[name] = x.to(device)
    return made


def chain(rows=4, middle=6, columns=3, sync=None, **more):
    """Two matmuls, the first of ``rows x middle`` tiles, the second of ``rows x columns``."""
    m, n, k = rows * 4, middle * 4, 8
    up = Gemm("h", "x", "w", (m, n, k), tile=(4, 4))
    down = Gemm("y", "h", "v", (m, columns * 4, n), tile=(4, 4), sync={"h": sync} if sync else None, **more)
    return Graph({"x": (m, k), "w": (n, k), "v": (columns * 4, n)}, [up, down], ["y"])
