"""Graphs of tiles against cuBLAS with gate and up merged, torch.compile and our own serial kernels, in one run.

Every call has the next of several sets of weights, together larger than any L2: decoding finds each in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import tilesync
from tilewright.bench.bars import Bar
from tilewright.bench.protocol import OURS, Ask, Case, Checked, Pass, Prepared, build, run_cases
from tilewright.measure.numerics import relative_error
from tilewright.ops.quantized_linear import reference
from tilewright.plan.cost import Cost
from tilewright.tilesync import chains
from tilewright.tilesync.simulate import predict

COPIES = 5  # as many as a graph has calls
FEW = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384)
MANY = tuple(range(512, 3073, 256))
# Width and inner dimension of one of eight ranks: LLaMA-65B with either split, GPT-3.
MLPS = (("llama", 8192, 2752), ("llama", 8192, 2816), ("gpt3", 12288, 6144))
PACKINGS = {"int8": tilesync.Packing("int8"), "fp8": tilesync.Packing("fp8"),
            "int4": tilesync.Packing("int4", group=128, scale=torch.bfloat16)}  # fmt: skip
CONTEXTS = (512, 1024, 2048)
CONVOLUTIONS = ((56, 64), (28, 128), (14, 256), (7, 512))  # side and channels, of ResNet and VGG
IMAGES = (1, 4, 16)


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for kind, width, inner in MLPS[:1] if quick else MLPS:
        for rows in (1, 64, 512) if quick else (*FEW, *MANY):
            yield {"chain": kind, "rows": rows, "width": width, "inner": inner}
    if quick:
        return
    for weights, rows in itertools.product(PACKINGS, (1, 8, 32)):
        yield {"chain": "llama", "rows": rows, "width": 8192, "inner": 2816, "weights": weights}
    for rows, context, key_heads in itertools.product((1, 2, 4), CONTEXTS, (32, 8)):
        yield {
            "chain": "attention",
            "rows": rows,
            "width": 2048,
            "heads": 32,
            "key_heads": key_heads,
            "context": context,
        }
    for (side, channels), images in itertools.product(CONVOLUTIONS, IMAGES):
        yield {"chain": "convolutions", "rows": images, "side": side, "channels": channels}


def graph_of(case: Case) -> tilesync.Graph:
    """Return the graph of a case."""
    if case["chain"] == "attention":
        return chains.attention_step(case["rows"], case["width"], case["heads"], 64, case["context"], case["key_heads"])
    if case["chain"] == "convolutions":
        return chains.convolutions(case["rows"], case["side"], case["channels"])
    gated = case["chain"] == "llama"
    packing = PACKINGS.get(case.get("weights", ""))
    activation = "silu" if gated else "gelu_tanh"
    return chains.mlp(case["rows"], case["width"], case["inner"], activation, gated, packing=packing)


def _llama(x: Tensor, both: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, both).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def _gpt3(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down)


def _attention(x: Tensor, qkv: Tensor, k: Tensor, v: Tensor, project: Tensor) -> Tensor:
    """The new tokens are the last of the cache, which is full behind them."""
    (key_heads, context, size), rows, inner = k.shape, len(x), project.shape[1]
    each = F.linear(x, qkv).split([inner, key_heads * size, key_heads * size], -1)
    q, new_k, new_v = (part.unflatten(-1, (-1, size)).transpose(0, 1) for part in each)
    k[:, context - rows :], v[:, context - rows :] = new_k, new_v
    mask = torch.ones(rows, context, dtype=torch.bool, device=x.device).tril(context - rows) if rows > 1 else None
    y = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)[0]
    return x + F.linear(y.transpose(0, 1).flatten(1), project)


def _convolutions(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = F.conv2d(x, weight, padding=1).relu()
    return x


def _as_pytorch_takes(case: Case, inputs: dict[str, Tensor]) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The peers' function and its inputs: gate and up merged, weights of 16 bits, images with their channels last."""
    x, *weights = inputs.values()
    if "weights" in case:
        scales = (inputs[f"{name}_scale"] for name in ("up", "down"))
        packed = zip((inputs["up"], inputs["down"]), scales, strict=True)
        return _llama, [x, *(reference.dequantize(*each, dtype=x.dtype) for each in packed)]
    if case["chain"] == "llama":
        return _llama, [x, torch.cat(weights[:2]), weights[2]]
    if case["chain"] == "convolutions":
        side = case["side"]
        image = x.view(-1, side, side, x.shape[1]).permute(0, 3, 1, 2)
        return _convolutions, [image, *(weight.permute(0, 3, 1, 2) for weight in weights)]
    if case["chain"] == "attention":
        _, qkv, k, v, project = weights
        k, v = (cache.view(case["key_heads"], case["context"], -1) for cache in (k, v))
        return _attention, [x, qkv, k, v, project]
    return _gpt3, [x, *weights]


def _as_graphs_have(case: Case, y: Tensor) -> Tensor:
    """A peer's result as the graphs' is: a row a pixel."""
    return y.permute(0, 2, 3, 1).flatten(0, 2) if case["chain"] == "convolutions" else y


def _exact(case: Case, inputs: dict[str, Tensor]) -> Tensor:
    """The result in float64."""
    function, arguments = _as_pytorch_takes(case, inputs)
    return _as_graphs_have(case, function(*(each.double() for each in arguments)))


def _random(graph: tilesync.Graph, case: Case, name: str) -> Tensor:
    """An input of a graph; packed weights are any bits but those of NaN, and the new tokens end a cache."""
    if name in graph.integers:
        return torch.tensor([case["context"] - case["rows"]], dtype=torch.int32, device="cuda")
    shape, dtype = graph.inputs[name], graph.packed.get(name, torch.bfloat16)
    if dtype.itemsize > 1:
        scale = 2**-10 if name in graph.packed else shape[-1] ** -0.5
        return (torch.randn(shape, device="cuda") * scale).to(dtype)
    bits = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
    return (bits & 0xBF).view(dtype) if dtype == torch.float8_e4m3fn else bits.view(dtype)


def prepare(case: Case) -> Prepared:
    """The forward pass of each implementation."""
    tilesync.raise_if_failed()  # of the case before, whose graphs were replayed
    graph = graph_of(case)
    sets = [{name: _random(graph, case, name) for name in graph.inputs} for _ in range(COPIES)]

    def in_turn(function: Callable[..., Any], each: list[Any]) -> dict[str, Pass]:
        following = itertools.cycle(each)
        found = function(*each[0])
        y = found[0] if isinstance(found, list) else _as_graphs_have(case, found)
        return {"forward": Checked(lambda: function(*next(following)), relative_error(y, truth))}

    def ours(mode: str) -> dict[str, Pass]:
        run = tilesync.compile(graph, mode).run
        return in_turn(run, [(list(inputs.values()),) for inputs in sets])

    def peer(wrap: Callable[..., Any]) -> dict[str, Pass]:
        torch.compiler.reset()
        function = _as_pytorch_takes(case, sets[0])[0]
        return in_turn(wrap(function), [_as_pytorch_takes(case, inputs)[1] for inputs in sets])

    compiled = partial(torch.compile, dynamic=False, mode="max-autotune-no-cudagraphs")
    makers: dict[str, Callable[[], dict[str, Pass]]] = {"tilewright": partial(ours, "auto")}
    makers |= {f"tilewright-{mode}": partial(ours, mode) for mode in ("serial", "pdl", "streams", "persistent")}
    makers |= {"cublas": partial(peer, lambda function: function), "compile-max": partial(peer, compiled)}
    with torch.no_grad():
        truth = _exact(case, sets[0])
        return build(makers)


def _limits(case: Case) -> dict[str, Cost]:
    graph = graph_of(case)
    sizes = {name: torch.Size(shape).numel() for name, shape in graph.inputs.items()}
    read = sum(size * graph.packed.get(name, torch.bfloat16).itemsize for name, size in sizes.items())
    works = [stage.work(tile) for stage in graph.stages for tile in stage.tiles]
    written = torch.Size(graph.shape("y")).numel()
    flops = int(sum(work.flops for work in works))
    # Tiles beyond the last row are no work that has to be done.
    if case["chain"] in ("llama", "gpt3"):
        flops = 2 * case["rows"] * (3 if case["chain"] == "llama" else 2) * case["width"] * case["inner"]
    return {"forward": Cost(flops, read, 2 * written)}


_MODES = ("tilewright-serial", "tilewright-pdl", "tilewright-streams", "tilewright-persistent")
_TAIL = 0.15  # of serial time; where more is idle, tiles that wait for tiles are to save half of it


def _bars(case: Case) -> list[Bar]:
    """What a case is to reach, by the fastest of our modes, beside the peers and our own launches."""
    rows, kind, best = case["rows"], case["chain"], ("cublas", "compile-max")
    closer = Bar((OURS,), ("cublas",), is_about_errors=True)
    if "weights" in case:
        return []
    if kind == "attention":
        return [Bar((OURS,), ("cublas",), 1.2), closer]
    if kind == "convolutions":  # whose peer in PyTorch is cuDNN, and no bar
        return [Bar(_MODES[2:], _MODES[:1], 1.0), closer]
    if rows >= MANY[0]:
        prediction = predict(tilesync.check(graph_of(case)))
        saved = [Bar(_MODES[2:], _MODES[:1], 1 / (1 - prediction.tail / 2))] if prediction.tail > _TAIL else []
        return [Bar((OURS,), best, 0.99), *saved, closer]
    few, middle = (1.2, 1.1) if kind == "llama" else (1.1, 1.05)
    most = 256 if kind == "llama" else 384
    found = [Bar((OURS,), best, few if rows <= 64 else middle)] if rows <= most else []
    return [*found, *([Bar((OURS,), _MODES[1:2], 1.03)] if kind == "llama" and rows <= 64 else []), closer]


def _label(case: Case) -> str:
    if case["chain"] == "convolutions":
        return f"convolutions {case['channels']} of {case['side']} x {case['side']}, {case['rows']} images"
    if case["chain"] == "attention":
        return f"attention over {case['context']}, {case['rows']} rows, {case['key_heads']} key heads"
    weights = f", {case['weights']}" if "weights" in case else ""
    return f"{case['chain']} mlp {case['width']} x {case['inner']}, {case['rows']} rows{weights}"


def run(ask: Ask) -> Case:
    """Measure every case."""
    result = run_cases("tilesync", cases(ask.quick), prepare, _limits, _label, peers=("torch",), ask=ask, bars=_bars)
    tilesync.raise_if_failed()
    return result
