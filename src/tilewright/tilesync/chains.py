"""Chains that are ready: the graphs of an MLP, of an attention block and of convolutions, with tiles for their sizes.

Tiles are chosen by `predict`: of the candidates that the kernel has, those with the shortest synchronised schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewright.tilesync.check import check
from tilewright.tilesync.device import MOST_FEW_ROWS
from tilewright.tilesync.graph import Graph, Stage
from tilewright.tilesync.policies import Conv2DSync, GroupSync
from tilewright.tilesync.simulate import Machine, predict
from tilewright.tilesync.stages import Attention, Conv2d, Gemm, Norm, Rope

Tile2 = tuple[int, int]


def tiles(rows: int, gated: bool = False) -> list[Tile2]:
    """Return the tiles that the kernel has for so many rows; gated, a tile has half as many columns.

    >>> tiles(1), tiles(1, gated=True)[0], tiles(100)[0]
    ([(8, 16), (64, 64)], (8, 8), (64, 64))
    """
    share = 1 + gated
    few = [(-(-rows // 8) * 8, 16 // share)] if rows <= MOST_FEW_ROWS else []
    many = [(64, 64 // share)] if rows <= 64 else [(64, 64 // share), (128, 64 // share), (128, 128 // share)]
    return few + many


def _best(candidates: list[Graph], machine: Machine) -> Graph:
    return min(candidates, key=lambda graph: predict(check(graph), machine).synchronised)


@functools.lru_cache(256)
def mlp(
    rows: int, width: int, inner: int, activation: str = "silu", gated: bool = True, bias: bool = False,
    machine: Machine | None = None,
) -> Graph:  # fmt: skip
    """Return ``down(activation(x @ gate^T) * (x @ up^T))``, or ``down(activation(up(x)))`` where it is not gated.

    >>> [stage.tile for stage in mlp(1, 8192, 2752).stages]
    [(8, 8), (8, 16)]
    """
    inputs: dict[str, tuple[int, ...]] = {"x": (rows, width)}
    inputs |= {"gate": (inner, width)} if gated else {}
    inputs |= {"up": (inner, width), "down": (width, inner)}
    inputs |= {"up_bias": (inner,), "down_bias": (width,)} if bias else {}
    names = {name: name if bias else None for name in ("up_bias", "down_bias")}
    candidates = []
    for up_tile, down_tile in zip(tiles(rows, gated), tiles(rows), strict=True):
        weight = ("gate", "up") if gated else "up"
        up = Gemm("h", "x", weight, (rows, inner, width), tile=up_tile, activation=activation, gated=gated,
                  bias=names["up_bias"])  # fmt: skip
        down = Gemm("y", "h", "down", (rows, width, inner), tile=down_tile, bias=names["down_bias"])
        candidates.append(Graph(inputs, [up, down], ["y"], f"mlp-{rows}x{width}x{inner}"))
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
    inner, shared = heads * head_dim, (key_heads or heads) * head_dim
    inputs = {"x": (rows, width), "query": (inner, width), "k": (context, shared), "v": (context, shared),
              "project": (width, inner)}  # fmt: skip
    candidates = []
    for tile in tiles(rows):
        q = Gemm("q", "x", "query", (rows, inner, width), tile=tile)
        whole = rows <= tile[0] and head_dim % tile[1] == 0
        sync = {"q": GroupSync(head_dim // tile[1])} if whole and head_dim > tile[1] else None
        attention = Attention("a", "q", "k", "v", rows=rows, context=context, heads=heads, head_dim=head_dim,
                              key_heads=key_heads, tile=tile[0], sync=sync)  # fmt: skip
        y = Gemm("y", "a", "project", (rows, width, inner), tile=tile, residual="x")
        candidates.append(Graph(inputs, [q, attention, y], ["y"], f"attention-{rows}x{width}-{context}"))
    return _best(candidates, machine or Machine())


@functools.lru_cache(256)
def decode_step(
    layers: int, width: int, inner: int, heads: int, key_heads: int, head_dim: int, vocabulary: int, context: int,
    rows: int = 1, eps: float = 1e-5,
) -> Graph:  # fmt: skip
    """Return a step of a Llama-shaped decoder for some new tokens of one sequence, the last norm and the head included.

    Inputs, beside x and the weights: tables of cosines and sines (`Rope`), and for each layer a cache of `context` keys
    and values, head by head, of which the first `length` are filled. Outputs: the logits, and for each layer the new
    tokens' queries, keys and values, of which the caller appends the latter two to the cache.

    >>> graph = decode_step(2, 64, 96, 4, 2, 16, 100, 32)
    >>> len(graph.stages), graph.outputs
    (18, ['logits', 'r0', 'r1'])
    """
    q, kv = heads * head_dim, key_heads * head_dim
    height = -(-rows // 8) * 8
    one, gated = (height, 16), (height, 8)
    inputs: dict[str, tuple[int, ...]] = {"x": (rows, width), "length": (1,)}
    inputs |= {"cos": (context + rows, head_dim // 2), "sin": (context + rows, head_dim // 2)}
    stages: list[Stage] = []
    x = "x"
    for layer in range(layers):
        names = "norm_a norm_b qkv o gate up down k v a p r c y b h x"
        n = {name: f"{name}{layer}" for name in names.split()}
        inputs |= {n["norm_a"]: (width,), n["qkv"]: (q + 2 * kv, width), n["k"]: (key_heads * context, head_dim)}
        inputs[n["v"]] = (key_heads * context, head_dim)
        inputs |= {n["o"]: (width, q), n["norm_b"]: (width,), n["gate"]: (inner, width), n["up"]: (inner, width)}
        inputs[n["down"]] = (width, inner)
        stages += [
            Norm(n["a"], x, n["norm_a"], (rows, width), eps=eps),
            Gemm(n["p"], n["a"], n["qkv"], (rows, q + 2 * kv, width), tile=one),
            Rope(n["r"], n["p"], "cos", "sin", "length", (rows, q + 2 * kv), head_dim=head_dim, rotated=q + kv,
                 tile=height),
            Attention(n["c"], n["r"], n["k"], n["v"], rows=rows, context=context, heads=heads, key_heads=key_heads,
                      head_dim=head_dim, length="length", new=(q, q + kv), by_head=True, tile=height),
            Gemm(n["y"], n["c"], n["o"], (rows, width, q), tile=one, residual=x),
            Norm(n["b"], n["y"], n["norm_b"], (rows, width), eps=eps),
            Gemm(n["h"], n["b"], (n["gate"], n["up"]), (rows, inner, width), tile=gated, activation="silu", gated=True),
            Gemm(n["x"], n["h"], n["down"], (rows, width, inner), tile=one, residual=n["y"]),
        ]  # fmt: skip
        x = n["x"]
    inputs |= {"norm": (width,), "head": (vocabulary, width)}
    stages += [
        Norm("last", x, "norm", (rows, width), eps=eps),
        Gemm("logits", "last", "head", (rows, vocabulary, width), tile=one),
    ]
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
