"""Chains that are ready: the graphs of an MLP, of an attention block and of convolutions, with tiles for their sizes.

Tiles are chosen by `predict`: of the candidates that the kernel has, those with the shortest synchronised schedule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from tilewright.tilesync.check import check
from tilewright.tilesync.graph import Graph, GraphError, Stage, Work
from tilewright.tilesync.policies import Conv2DSync, NoSync, Policy
from tilewright.tilesync.simulate import Machine, predict
from tilewright.tilesync.stages import Attention, Combined, Conv2d, Gemm, Normed, Packing, QuantizedGemm, Rotation
from tilewright.tilesync.stages.attention import QUERIES
from tilewright.tilesync.stages.common import FEW_COLUMNS, L2_SHARE, MOST_FEW_ROWS

Tile2 = tuple[int, int]
LEAST_KEYS = 64  # of a split: 16 for each of 4 warps
_MOST_TILES = 100_000  # of a graph, which take a minute to check
_MANY_TILES = 20_000  # of which every SM has so many that smaller ones gain nothing


def tiles(rows: int, gated: bool = False, packing: Packing | None = None) -> list[Tile2]:
    """Return the tiles that the kernel has for so many rows; gated, a tile has half as many columns.

    Of packed weights those of few rows, several below each other where there are more.

    >>> tiles(1), tiles(1, gated=True)[0], tiles(100)[0]
    ([(8, 16), (64, 64)], (8, 8), (64, 64))
    """
    share = 1 + gated
    few = [(min(-(-rows // 8) * 8, MOST_FEW_ROWS), 16 // share)] if rows <= MOST_FEW_ROWS or packing else []
    if packing:
        return few
    many = [(64, 64 // share)] if rows <= 64 else [(64, 64 // share), (128, 64 // share), (128, 128 // share)]
    return few + many


def enter(
    inputs: dict[str, tuple[int, ...]], weight: str | tuple[str, str], outputs: int, width: int,
    packing: Packing | None = None,
) -> None:  # fmt: skip
    """Enter a weight, or each of two, among the inputs of a graph; a packed one has several parts.

    >>> enter(inputs := {}, "w", 4, 8, Packing("int8"))
    >>> inputs
    {'w': (4, 8), 'w_scale': (4,)}
    """
    if packing is None or isinstance(weight, tuple):
        inputs |= dict.fromkeys([weight] if isinstance(weight, str) else weight, (outputs, width))
    else:
        inputs |= {_part(weight, part): shape for part, shape in packing.shapes(outputs, width).items()}


def _part(weight: str, part: str) -> str:
    return weight if part == "weight" else f"{weight}_{part}"


def gemm(
    output: str, x: str, weight: str | tuple[str, str], sizes: tuple[int, int, int], *, packing: Packing | None = None,
    **options: Any,
) -> Gemm:  # fmt: skip
    """Return a matmul by a weight of 16 bits, or by a packed one as `enter` names its parts."""
    if packing is None or isinstance(weight, tuple):
        return Gemm(output, x, weight, sizes, **options)
    zero = _part(weight, "zero") if packing.zeros else None
    return QuantizedGemm(output, x, weight, sizes, packing=packing, scale=_part(weight, "scale"), zero=zero, **options)


def few_rows_gemm(
    output: str, x: str, weight: str | tuple[str, str], sizes: tuple[int, int, int], *, machine: Machine, **options: Any
) -> Gemm:
    """Return a matmul of few rows whose tiles are as wide as gives the shortest schedule of the stage alone.

    Tiles are of equal width, by half a group, so that no SM has more than its share; a wide one begins and ends once.

    >>> few_rows_gemm("y", "x", "w", (1, 3072, 2048), machine=Machine()).tile
    (8, 24)
    """
    share = 1 + options.get("gated", False)

    def stage(columns: int) -> Gemm:
        return gemm(output, x, weight, sizes, tile=(-(-sizes[0] // 8) * 8, columns), **options)

    def seconds(stage: Gemm) -> float:
        waves = -(-math.prod(stage.grid) // machine.sms)
        return waves * machine.seconds(stage.work(stage.tiles[0]))

    most = -(-sizes[1] * share // FEW_COLUMNS // machine.sms) + 1  # groups of one tile for each SM
    widths = range(FEW_COLUMNS // share, (most + 1) * FEW_COLUMNS // share, FEW_COLUMNS // share // 2)
    return min(map(stage, widths), key=seconds)


def attention_rows(heads: int, key_heads: int) -> int:
    """Return the rows of attention's tiles: as many as the kernel computes together, of all heads that share keys.

    >>> attention_rows(32, 8)
    4
    """
    return -(-QUERIES * key_heads // heads)


def attention_splits(
    rows: int, context: int, heads: int, key_heads: int, head_dim: int, machine: Machine | None = None
) -> int:
    """Return into how many parts to split a context, by the time of attention and of the matmul that adds them up.

    The kernel adds up heads of a multiple of 8; others are not split.

    >>> attention_splits(1, 1024, 32, 8, 64), attention_splits(1, 64, 32, 8, 64), attention_splits(1, 1024, 32, 8, 60)
    (8, 1, 1)
    """
    machine = machine or Machine()
    most = 1 if head_dim % 8 else max(1, context // LEAST_KEYS)

    def seconds(splits: int) -> float:
        stage = Attention("y", "q", "k", "v", rows=rows, context=context, heads=heads, key_heads=key_heads,
                          head_dim=head_dim, tile=attention_rows(heads, key_heads), splits=splits)  # fmt: skip
        waves = -(-math.prod(stage.grid) // machine.sms)
        added = Combined(heads, splits).bytes(rows, heads * head_dim, heads * head_dim) if splits > 1 else 0.0
        return waves * machine.seconds(stage.work(stage.tiles[0])) + machine.seconds(Work(0.0, L2_SHARE * added))

    return min((2**power for power in range(7) if 2**power <= most), key=seconds)


def _best(candidates: list[Graph], machine: Machine) -> Graph:
    counts = {graph: sum(math.prod(stage.grid) for stage in graph.stages) for graph in candidates}
    least = min(candidates, key=counts.__getitem__)
    if counts[least] > _MOST_TILES:
        raise GraphError(
            f"{least.name} has {counts[least]:,} tiles, which would take minutes to check; take fewer rows than make "
            f"{_MOST_TILES:,}."
        )
    candidates = [graph for graph in candidates if graph is least or counts[graph] <= _MANY_TILES]
    return min(candidates, key=lambda graph: predict(check(graph), machine).synchronised)


@functools.lru_cache(256)
def mlp(
    rows: int, width: int, inner: int, activation: str = "silu", gated: bool = True, bias: bool = False,
    machine: Machine | None = None, packing: Packing | None = None,
) -> Graph:  # fmt: skip
    """Return ``down(activation(x @ gate^T) * (x @ up^T))``, or ``down(activation(up(x)))`` where it is not gated.

    With a `packing` the weights have 8 or 4 bits. The gate's rows then lie before the other's in `up`.

    >>> [stage.tile for stage in mlp(1, 8192, 2752).stages]
    [(8, 8), (8, 16)]
    >>> list(mlp(1, 256, 512, packing=Packing("int8")).inputs.items())[1:3]
    [('up', (1024, 256)), ('up_scale', (1024,))]
    """
    inputs: dict[str, tuple[int, ...]] = {"x": (rows, width)}
    weight = ("gate", "up") if gated and packing is None else "up"
    enter(inputs, weight, inner * (2 if gated and packing else 1), width, packing)
    enter(inputs, "down", width, inner, packing)
    inputs |= {"up_bias": (inner,), "down_bias": (width,)} if bias else {}
    names = {name: name if bias else None for name in ("up_bias", "down_bias")}
    candidates = []
    for up_tile, down_tile in zip(tiles(rows, gated, packing), tiles(rows, packing=packing), strict=True):
        up = gemm("h", "x", weight, (rows, inner, width), packing=packing, tile=up_tile, activation=activation,
                  gated=gated, bias=names["up_bias"])  # fmt: skip
        down = gemm("y", "h", "down", (rows, width, inner), packing=packing, tile=down_tile, bias=names["down_bias"])
        kind = f"{packing.format}-" if packing else ""
        candidates.append(Graph(inputs, [up, down], ["y"], f"{kind}mlp-{rows}x{width}x{inner}"))
    return _best(candidates, machine or Machine())


@functools.lru_cache(256)
def attention_block(
    rows: int, width: int, heads: int, head_dim: int, context: int, key_heads: int | None = None,
    machine: Machine | None = None,
) -> Graph:  # fmt: skip
    """Return queries of x, attention over a cache of keys and values, projection, and x added: for short queries.

    >>> [type(stage).__name__ for stage in attention_block(1, 256, 4, 64, 128).stages]
    ['Gemm', 'Attention', 'Gemm']
    """
    key_heads, machine = key_heads or heads, machine or Machine()
    inner, shared = heads * head_dim, key_heads * head_dim
    inputs = {"x": (rows, width), "query": (inner, width), "k": (context, shared), "v": (context, shared),
              "project": (width, inner)}  # fmt: skip

    def block(matmul: Callable[..., Gemm], splits: int) -> Graph:
        q = matmul("q", "x", "query", (rows, inner, width))
        attention = Attention("a", "q", "k", "v", rows=rows, context=context, heads=heads, head_dim=head_dim,
                              key_heads=key_heads, tile=attention_rows(heads, key_heads), splits=splits)  # fmt: skip
        combined = {"prologue": Combined(heads, splits)} if splits > 1 else {}
        y = matmul("y", "a", "project", (rows, width, inner), residual="x", **combined)
        return Graph(inputs, [q, attention, y], ["y"], f"attention-{rows}x{width}-{context}")

    candidates = [block(functools.partial(Gemm, tile=tile), 1) for tile in tiles(rows) if tile[0] > MOST_FEW_ROWS]
    if rows <= MOST_FEW_ROWS:
        splits = attention_splits(rows, context, heads, key_heads, head_dim, machine)
        candidates.append(block(functools.partial(few_rows_gemm, machine=machine), splits))
    return _best(candidates, machine)


@functools.lru_cache(256)
def attention_step(
    rows: int, width: int, heads: int, head_dim: int, context: int, key_heads: int | None = None,
    machine: Machine | None = None,
) -> Graph:  # fmt: skip
    """Return q, k and v of some new tokens, attention over a cache and over themselves, projection, and x added.

    The cache lies head by head, and its first `length` tokens are filled. Outputs: y, and the new tokens' q, k and v,
    of which the caller appends the latter two to the cache.

    >>> [type(stage).__name__ for stage in attention_step(1, 256, 4, 64, 128).stages]
    ['Gemm', 'Attention', 'Gemm']
    """
    if rows > MOST_FEW_ROWS:
        raise GraphError(f"A step has up to {MOST_FEW_ROWS} new tokens, not {rows}; more of them are a prefill.")
    key_heads, machine = key_heads or heads, machine or Machine()
    q, kv = heads * head_dim, key_heads * head_dim
    splits = attention_splits(rows, context, heads, key_heads, head_dim, machine)
    inputs: dict[str, tuple[int, ...]] = {"x": (rows, width), "length": (1,), "qkv": (q + 2 * kv, width)}
    inputs |= dict.fromkeys(("k", "v"), (key_heads * context, head_dim)) | {"out": (width, q)}
    attention = Attention("c", "r", "k", "v", rows=rows, context=context, heads=heads, key_heads=key_heads,
                          head_dim=head_dim, length="length", new=(q, q + kv), by_head=True, splits=splits,
                          tile=attention_rows(heads, key_heads))  # fmt: skip
    combined = {"prologue": Combined(heads, splits)} if splits > 1 else {}
    stages = [
        few_rows_gemm("r", "x", "qkv", (rows, q + 2 * kv, width), machine=machine), attention,
        few_rows_gemm("y", "c", "out", (rows, width, q), machine=machine, residual="x", **combined),
    ]  # fmt: skip
    return Graph(inputs, stages, ["y", "r"], f"attention-step-{rows}x{width}-{context}")


@functools.lru_cache(256)
def decode_step(
    layers: int, width: int, inner: int, heads: int, key_heads: int, head_dim: int, vocabulary: int, context: int,
    rows: int = 1, eps: float = 1e-5, machine: Machine | None = None,
    packings: tuple[tuple[str, Packing], ...] = (),
) -> Graph:  # fmt: skip
    """Return a step of a Llama-shaped decoder for some new tokens of one sequence, the last norm and the head included.

    Inputs, beside x and the weights: tables of cosines and sines (`Rope`), and for each layer a cache of `context` keys
    and values, head by head, of which the first `length` are filled. Outputs: the logits, and for each layer the new
    tokens' queries, keys and values, of which the caller appends the latter two to the cache.

    `packings` has weights of 8 or 4 bits by name: qkv0, o0, up0, down0 and so on, and head. The gate's rows then lie
    before the other's in up0.

    >>> graph = decode_step(2, 64, 96, 4, 2, 16, 100, 32)
    >>> len(graph.stages), graph.outputs
    (11, ['logits', 'r0', 'r1'])
    """
    if rows > MOST_FEW_ROWS:
        raise GraphError(f"A step has up to {MOST_FEW_ROWS} new tokens, not {rows}; more of them are a prefill.")
    machine = machine or Machine()
    q, kv = heads * head_dim, key_heads * head_dim
    splits = attention_splits(rows, context, heads, key_heads, head_dim, machine)
    inputs: dict[str, tuple[int, ...]] = {"x": (rows, width), "length": (1,)}
    inputs |= {"cos": (context + rows, head_dim // 2), "sin": (context + rows, head_dim // 2)}
    packing = dict(packings)

    def matmul(output: str, x: str, weight: str | tuple[str, str], sizes: tuple[int, int, int], **options: Any) -> Gemm:
        found = packing.pop(weight if isinstance(weight, str) else weight[1], None)
        weight = weight if isinstance(weight, str) or found is None else weight[1]
        enter(inputs, weight, sizes[1] * (2 if found and options.get("gated") else 1), sizes[2], found)
        return few_rows_gemm(output, x, weight, sizes, machine=machine, packing=found, **options)

    rotation = Rotation("cos", "sin", "length", head_dim, q + kv)
    stages: list[Stage] = []
    x = "x"

    def implied(residual: str) -> dict[str, Policy]:
        """What a tile reads besides was finished before the whole stages that it waits for: one wait does."""
        return {} if residual == "x" else {residual: NoSync()}

    for layer in range(layers):
        names = "norm_a norm_b qkv o gate up down k v r c y h x"
        n = {name: f"{name}{layer}" for name in names.split()}
        inputs |= {n["norm_a"]: (width,), n["norm_b"]: (width,)}
        inputs |= dict.fromkeys((n["k"], n["v"]), (key_heads * context, head_dim))
        stages += [
            matmul(n["r"], x, n["qkv"], (rows, q + 2 * kv, width), prologue=Normed(n["norm_a"], eps),
                   rotation=rotation),
            Attention(n["c"], n["r"], n["k"], n["v"], rows=rows, context=context, heads=heads, key_heads=key_heads,
                      head_dim=head_dim, length="length", new=(q, q + kv), by_head=True, splits=splits,
                      tile=attention_rows(heads, key_heads)),
            matmul(n["y"], n["c"], n["o"], (rows, width, q), prologue=Combined(heads, splits) if splits > 1 else None,
                   residual=x, sync=implied(x)),
            matmul(n["h"], n["y"], (n["gate"], n["up"]), (rows, inner, width), prologue=Normed(n["norm_b"], eps),
                   activation="silu", gated=True),
            matmul(n["x"], n["h"], n["down"], (rows, width, inner), residual=n["y"], sync=implied(n["y"])),
        ]  # fmt: skip
        x = n["x"]
    inputs["norm"] = (width,)
    stages.append(matmul("logits", x, "head", (rows, vocabulary, width), prologue=Normed("norm", eps)))
    if packing:
        raise GraphError(f"packings names {next(iter(packing))}, which is no matmul of the step.")
    return Graph(inputs, stages, ["logits", *(f"r{layer}" for layer in range(layers))], f"decode-{layers}x{width}")


@functools.lru_cache(256)
def convolutions(
    images: int, side: int, channels: int, layers: int = 2, kernel: int = 3, machine: Machine | None = None
) -> Graph:
    """Return convolutions of one size after each other, a ReLU behind each, as in ResNet and VGG.

    >>> len(convolutions(1, 14, 256).stages)
    2
    """
    pixels = images * side * side
    inputs: dict[str, tuple[int, ...]] = {"x": (pixels, channels)}
    inputs |= {f"w{layer}": (channels, kernel, kernel, channels) for layer in range(layers)}
    candidates = []
    for tile in [(64, 64), (128, 64), (128, 128)]:
        stages = []
        for layer in range(layers):
            x, last = "x" if layer == 0 else f"h{layer - 1}", layer == layers - 1
            stages.append(Conv2d("y" if last else f"h{layer}", x, f"w{layer}", images=images, height=side, width=side,
                                 channels=(channels, channels), kernel=kernel, activation="relu", tile=tile,
                                 sync={x: Conv2DSync()} if layer else None))  # fmt: skip
        candidates.append(Graph(inputs, stages, ["y"], f"convolutions-{images}x{side}x{channels}"))
    return _best(candidates, machine or Machine())


# By the name that `tilewright tilesync show` takes: a function of the rows (of images, for convolutions).
CHAINS: dict[str, Callable[[int], Graph]] = {
    "llama-mlp": lambda rows: mlp(rows, 8192, 2752),
    "llama-mlp-2816": lambda rows: mlp(rows, 8192, 2816),
    "gpt3-mlp": lambda rows: mlp(rows, 12288, 6144, "gelu_tanh", gated=False),
    "attention": lambda rows: attention_block(rows, 2048, 32, 64, 1024, 8),
    "decode-1b": lambda rows: decode_step(16, 2048, 8192, 32, 8, 64, 128256, 1024, rows),
    "conv-56": lambda images: convolutions(images, 56, 64),
    "conv-28": lambda images: convolutions(images, 28, 128),
    "conv-14": lambda images: convolutions(images, 14, 256),
    "conv-7": lambda images: convolutions(images, 7, 512),
}
