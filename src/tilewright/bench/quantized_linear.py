"""int8_linear, fp8_linear and int4_linear against bf16 by cuBLAS, torch.compile, PyTorch's own packed matmuls and
torchao, in one run with the GPU's own ceilings.

Every call has the next of several weights, which together are larger than any L2: decoding finds each weight in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import ops
from tilewright.bench.protocol import Ask, Case, Pass, Prepared, build, run_cases
from tilewright.ops.quantized_linear import few_rows
from tilewright.ops.quantized_linear.op import cost
from tilewright.ops.quantized_linear.reference import dequantize
from tilewright.plan.cost import Cost

GROUP = 128
COPIES = 5  # as many as a graph has calls
# Features out and in: the two shapes that others publish, and the layers of Llama-3.1-8B and 70B.
SHAPES = (
    (8192, 8192), (4096, 14336), (6144, 4096), (4096, 4096), (28672, 4096), (10240, 8192), (57344, 8192), (8192, 28672),
)  # fmt: skip
ROWS = (1, 2, 8, 16, 32, 64)
FORMATS = ("int8", "fp8", "int4")


def cases(quick: bool) -> Iterator[Case]:
    """Every case measured."""
    for out, width in SHAPES[:1] if quick else SHAPES:
        for kind in FORMATS:
            rows = (1, 32) if quick else ROWS if (out, width) != SHAPES[0] else (*ROWS, 128, 256, 512)
            yield from ({"format": kind, "rows": count, "width": width, "out": out} for count in rows)


def _packed(kind: str, out: int, width: int) -> tuple[Tensor, Tensor]:
    """(weight, scale) of random numbers."""
    if kind == "int4":
        scale = (torch.rand(width // GROUP, out, device="cuda") + 0.5).bfloat16() * width**-0.5 / 8
        return torch.randint(256, (out, width // 2), dtype=torch.uint8, device="cuda"), scale
    scale = (torch.rand(out, device="cuda") + 0.5) * width**-0.5 / 64
    if kind == "fp8":
        return (torch.randn(out, width, device="cuda") * 64).clamp(-448, 448).to(torch.float8_e4m3fn), scale
    return torch.randint(-127, 128, (out, width), dtype=torch.int8, device="cuda"), scale


def prepare(case: Case) -> Prepared:
    """The forward pass of each implementation."""
    kind, out, width = case["format"], case["out"], case["width"]
    x = torch.randn(case["rows"], width, device="cuda", dtype=torch.bfloat16)
    weights = [_packed(kind, out, width) for _ in range(COPIES)]
    ours = getattr(ops, f"{kind}_linear")

    def in_turn(function: Callable[..., Any], each: list[Any]) -> dict[str, Pass]:
        following = itertools.cycle(each)
        return {"forward": lambda: function(x, *next(following))}

    def dense() -> dict[str, Pass]:
        return in_turn(F.linear, [(dequantize(weight, scale, None, x.dtype),) for weight, scale in weights])

    def compiled(mode: str | None) -> dict[str, Pass]:
        torch.compiler.reset()
        return in_turn(torch.compile(_unpack_and_multiply, dynamic=False, mode=mode), weights)

    makers: dict[str, Callable[[], dict[str, Pass]]] = {
        "tilewright": partial(in_turn, ours, weights),
        "bf16": dense,
        "compile": partial(compiled, None),
        "compile-max": partial(compiled, "max-autotune-no-cudagraphs"),
    }
    if case["rows"] <= few_rows.MOST_ROWS:
        makers["tilewright-cuda"] = partial(in_turn, partial(_in_cuda, ours), weights)
    if kind == "int8":
        scales = [(weight, scale.bfloat16()) for weight, scale in weights]
        makers["int8pack"] = partial(in_turn, torch.ops.aten._weight_int8pack_mm, scales)
    if kind == "int4":
        makers["tinygemm"] = lambda: in_turn(torch.ops.aten._weight_int4pack_mm, [_tinygemm(*some) for some in weights])
    makers["torchao"] = lambda: in_turn(_torchao(kind, out, width), [(each,) for each in range(COPIES)])
    return build(makers)


def _in_cuda(function: Callable[..., Any], *arguments: Any) -> Any:
    """A call whose kernel is the one in CUDA C++."""
    few_rows.IS_ON = True
    try:
        return function(*arguments)
    finally:
        few_rows.IS_ON = False


def _unpack_and_multiply(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """What torch.compile may fuse: per channel, the scale behind the matmul."""
    if weight.dtype == torch.uint8:
        return F.linear(x, dequantize(weight, scale, dtype=x.dtype))
    return F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)


def _tinygemm(weight: Tensor, scale: Tensor) -> tuple[Any, ...]:
    """The same codes as PyTorch's own int4 matmul takes them: (weight, group, scales and zeros)."""
    pairs = torch.stack((scale, torch.zeros_like(scale)), -1)  # it takes its 8 for the middle, too
    return torch.ops.aten._convert_weight_to_int4pack(weight, 8), GROUP, pairs


def _torchao(kind: str, out: int, width: int) -> Callable[..., Any]:
    """A function of x and the number of a layer, of torchao's weight-only layers with weights of their own."""
    from torchao import quantization as ao

    configs: dict[str, Callable[[], Any]] = {
        "int8": lambda: ao.Int8WeightOnlyConfig(),
        "fp8": lambda: ao.Float8WeightOnlyConfig(),
        "int4": lambda: ao.Int4WeightOnlyConfig(group_size=GROUP),
    }
    layers = torch.nn.ModuleList(torch.nn.Linear(width, out, bias=False) for _ in range(COPIES)).to("cuda").bfloat16()
    ao.quantize_(layers, configs[kind]())

    def call(x: Tensor, number: int) -> Tensor:
        with torch.no_grad():
            return functions[number](x)

    functions = [torch.compile(layer, dynamic=False) for layer in layers]
    return call


def _limits(case: Case) -> dict[str, Cost]:
    kind = case["format"]
    group = GROUP if kind == "int4" else None
    sizes = case["rows"], case["width"], case["out"]
    return {"forward": cost(*sizes, bits=4 if group else 8, group=group, scale_bytes=2 if group else 4)}


def _label(case: Case) -> str:
    return f"{case['format']} {case['out']} x {case['width']}, {case['rows']} rows"


def run(ask: Ask) -> Case:
    """Measure every case."""
    return run_cases(
        "quantized_linear", cases(ask.quick), prepare, _limits, _label, peers=("torch", "torchao"), ask=ask
    )
