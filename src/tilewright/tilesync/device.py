"""A program as `run.cu` takes it: stages, tasks, waits and posts as numbers, and what the kernel is compiled for."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from ctypes import c_int, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewright.tilesync.check import Program
from tilewright.tilesync.graph import Graph, GraphError, Stage
from tilewright.tilesync.stages import (
    ACTIVATIONS,
    Attention,
    Combined,
    Conv2d,
    Custom,
    Elementwise,
    Gemm,
    Norm,
    Normed,
    QuantizedGemm,
    Reduction,
)
from tilewright.tilesync.stages.common import MOST_FEW_ROWS

SOURCE = Path(__file__).with_name("run.cu")
KERNEL, BEGIN = "tilewright_tilesync_run", "tilewright_tilesync_begin"
THREADS = 256
APART = 32  # numbers of 4 bytes from a semaphore to the next
X_BYTES = 160 * 1024  # of shared memory, for x of few rows
FEW, MANY, COMBINE, NORM, ATTEND, USER = range(6)
WAITS, DEPENDENT, TIMES, STREAMS = 1, 2, 4, 8
NORMED, COMBINED = 1, 2  # prologues of a matmul
LAYOUTS = ("", "int8", "fp8", "int4-32", "int4-64", "int4-128")  # of weights of few rows: 16 bits first
_SCALES = (torch.bfloat16, torch.float16, torch.float32)
_HEAD_BYTES = 128
_MOST_TENSORS = 400  # of a launch's arguments

STAGE = np.dtype(
    [(name, "i4") for name in (
        "kind", "rows", "columns", "inner", "tile_rows", "tile_columns", "splits", "activation", "x", "weight", "bias",
        "residual", "y", "gated", "height", "width", "channels", "kernel")]
    + [("eps", "f4"), ("more", "i4", 5), ("extra", "i4", 3)]
    + [(name, "i4") for name in (
        "early", "prologue", "norm", "heads", "parts", "layout", "unit", "scale", "zero",
        "scale_kind", "head", "rotated", "cos", "sin", "place")]
)  # fmt: skip
TASK = np.dtype([(name, "i4") for name in (
    "stage", "split", "row", "column", "first_wait", "waits", "first_post", "posts")])  # fmt: skip
WAIT = np.dtype([(name, "u4") for name in ("semaphore", "value", "total", "unused")])
POST = np.dtype([(name, "u4") for name in ("semaphore", "amount")])
TIME = np.dtype([("processor", "u4"), ("unused", "u4"), ("start", "u8"), ("ready", "u8"), ("end", "u8")])
FAILURE = np.dtype([(name, "u4") for name in ("is_there", "task", "semaphore", "wanted", "found")])


class ProgramArgument(ctypes.Structure):
    """As the kernel has it."""

    _fields_ = (
        *((name, c_void_p) for name in ("stages", "tasks", "waits", "posts", "control", "failure", "report", "times")),
        ("patience", c_uint64),
        *((name, c_int) for name in ("first", "count", "semaphores", "flags", "cell", "cells", "blocks")),
    )


@dataclass(frozen=True, eq=False)
class DeviceProgram:
    """The tables of a program, which names its tensors by slots."""

    program: Program
    stages: np.ndarray
    tasks: np.ndarray
    waits: np.ndarray
    posts: np.ndarray
    slots: tuple[str, ...]  # the tensor of each slot
    macros: dict[str, int]
    headers: tuple[tuple[str, str], ...]  # with the user's own stages
    shared_bytes: int

    @property
    def control_words(self) -> int:
        """Numbers of 4 bytes for the control block, the semaphores and a cell for each stage."""
        return APART * (1 + len(self.program.semaphores) + len(self.stages))

    def ranges(self) -> list[tuple[int, int]]:
        """Return the first task and the number of tasks of each stage, where each stage's tasks follow each other."""
        numbers = self.tasks["stage"]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        if len(starts) != len(self.stages):
            raise GraphError("Stages whose tiles are interleaved cannot run one after the other; leave out `order`.")
        return list(zip(starts.tolist(), np.diff(starts, append=len(numbers)).tolist(), strict=True))

    def failure_sentence(self, found: np.ndarray) -> str:
        """Say which wait took too long."""
        task, number, names = self.program.label(int(found["task"])), int(found["semaphore"]), self.program.semaphores
        if number < len(names):
            semaphore = names[number]
        else:
            semaphore = f"of the blocks of stage {self.program.stages[number - len(names)].name} that have begun"
        return (
            f"{task[0].upper()}{task[1:]} waited too long: semaphore {semaphore} stands at {int(found['found'])} of "
            f"{int(found['wanted'])}. Nothing was computed after that; the next call starts anew."
        )


def lower(program: Program, dtype: torch.dtype) -> DeviceProgram:
    """Make the tables of a program; raise a `GraphError` where the kernel has no such stage."""
    if why := why_not(program, dtype):
        raise GraphError(why)
    graph = program.graph
    slots = tuple(dict.fromkeys([*graph.inputs, *(name for stage in program.stages for name in stage.outputs)]))
    slot = {name: number for number, name in enumerate(slots)}
    stages = np.zeros(len(program.stages), STAGE)
    for row, stage in zip(stages, program.stages, strict=True):
        for field, value in _describe(stage, slot, graph).items():
            row[field] = value
    totals = np.zeros(len(program.semaphores), np.int64)
    tasks: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    posts: list[tuple[int, ...]] = []
    for task in program.tasks:
        for post in task.posts:
            totals[post.semaphore] += post.amount
    for task in program.tasks:
        split, down, across = task.tile if len(task.tile) == 3 else (0, *task.tile, 0)[:3]
        first = len(waits), len(task.waits), len(posts), len(task.posts)
        tasks.append((task.stage, split, down, across, *first))
        waits += [(wait.semaphore, wait.value, totals[wait.semaphore], 0) for wait in task.waits]
        posts += [(post.semaphore, post.amount) for post in task.posts]
    sources = _sources(program)
    for row, stage in zip(stages, program.stages, strict=True):
        if isinstance(stage, Custom):
            row["kind"] = USER + sources.index(stage.source)
    macros, tables = _macros(stages, dtype, len(slots)), (np.array(tasks, TASK), np.array(waits, WAIT))
    own = max((stage.shared_bytes for stage in program.stages if isinstance(stage, Custom)), default=0)
    shared_bytes = max(_shared_bytes(macros), _HEAD_BYTES + own)
    headers = (("user_stages.cuh", _user_stages(sources)),) if sources else ()
    return DeviceProgram(program, stages, *tables, np.array(posts, POST), slots, macros, headers, shared_bytes)


def _sources(program: Program) -> list[str]:
    """The different sources of the user's own stages."""
    return list(dict.fromkeys(stage.source for stage in program.stages if isinstance(stage, Custom)))


def _user_stages(sources: list[str]) -> str:
    """The header that `run.cu` includes, with a function for each source."""
    functions = "".join(
        f"__device__ void user_stage_{number}(const UserTile& tile) {{\n{source}\n}}\n"
        for number, source in enumerate(sources)
    )
    cases = "".join(f"    case {number}: return user_stage_{number}(tile);\n" for number in range(len(sources)))
    call = f"void compute_user_tile(int number, const UserTile& tile) {{\n  switch (number) {{\n{cases}  }}\n}}\n"
    return f"#pragma once\n{functions}__device__ {call}"


def why_not(program: Program, dtype: torch.dtype) -> str:
    """Say why the kernel does not take a program; nothing where it does."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"The kernel computes in bfloat16 and float16, and the tensors are {dtype}."
    graph = program.graph
    if sum(len(stage.outputs) for stage in program.stages) + len(graph.inputs) > _MOST_TENSORS:
        return f"The graph has more than {_MOST_TENSORS} tensors."
    if changed := [name for name in graph.inputs if name in graph.producers]:
        return f"The graph changes its input {changed[0]} in place."
    return next(filter(None, (_why_no_stage(stage, graph.producers) for stage in program.stages)), "")


def _why_no_stage(stage: Stage, produced: Iterable[str]) -> str:
    if isinstance(stage, Custom):
        if not stage.source:
            return f"Stage {stage.name} has no source for the GPU; give `source`."
        return f"Stage {stage.name} has more than 5 inputs." if len(stage.inputs) > 5 else ""
    if type(stage) not in (Gemm, QuantizedGemm, Conv2d, Reduction, Elementwise, Norm, Attention):
        return f"The kernel has no stage such as {stage.name} ({type(stage).__name__})."
    if isinstance(stage, Elementwise) and (not isinstance(stage.function, str) or len(stage.inputs) > 2):
        return f"Stage {stage.name}: the kernel has activations of one or two inputs, no other functions."
    if isinstance(stage, Attention) and stage.head_dim > 256:
        return f"Stage {stage.name}: the kernel has heads of up to 256, not {stage.head_dim}."
    if isinstance(stage, Gemm | Conv2d):
        inner = stage.sizes[2] if isinstance(stage, Gemm) else stage.channels[0]
        is_packed = isinstance(stage, QuantizedGemm)
        if inner % (8 << is_packed):
            return f"Stage {stage.name}: {inner} inputs are no multiple of {8 << is_packed}."
        if {stage.weight, getattr(stage, "second", None), *stage.packed} & set(produced):
            return f"Stage {stage.name}: its weight {stage.weight} is computed by another stage."
        if is_packed and not _is_few(stage):
            return f"Stage {stage.name}: a tile of a packed weight has up to {MOST_FEW_ROWS} rows."
        if isinstance(stage, Gemm) and stage.prologue and not _is_few(stage):
            return f"Stage {stage.name}: x is normed or combined in tiles of up to {MOST_FEW_ROWS} rows only."
        if isinstance(stage, Gemm) and isinstance(stage.prologue, Combined) and inner // stage.prologue.heads % 8:
            return f"Stage {stage.name}: combined heads of {inner // stage.prologue.heads} are no multiple of 8."
        if not _is_few(stage) and (
            stage.tile[0] > 128 or stage.tile[1] * (1 + _gated(stage)) > 128 or stage.tile[1] % 8
        ):
            return f"Stage {stage.name}: a tile has up to 128 rows and 128 columns (gated: 64), by 8."
    return ""


def _gated(stage: Gemm | Conv2d) -> bool:
    return isinstance(stage, Gemm) and stage.gated


def _is_few(stage: Stage) -> bool:
    """Whether the tile is one of `few_rows.cuh`, as wide as it may be."""
    return isinstance(stage, Gemm) and stage.tile[0] <= MOST_FEW_ROWS


def _describe(stage: Stage, slot: dict[str, int], graph: Graph) -> dict[str, Any]:
    """Return the fields of a stage that are not 0."""
    row: dict[str, Any] = {"y": slot[stage.name], "splits": getattr(stage, "splits", 1)}
    slots = ("x", "weight", "bias", "residual", "scale", "zero")
    row |= {name: slot.get(getattr(stage, name, None) or "", -1) for name in slots}
    row["unit"] = getattr(stage, "unit", 64)
    row["activation"] = list(ACTIVATIONS).index(getattr(stage, "activation", "none"))
    tile = stage.tile if isinstance(stage.tile, tuple) else (stage.tile, 1)  # type: ignore[attr-defined]
    row["tile_rows"], row["tile_columns"] = tile
    if isinstance(stage, Gemm):
        row["kind"], row["gated"] = FEW if _is_few(stage) else MANY, stage.gated
        row["rows"], row["columns"], row["inner"] = stage.sizes
        if stage.second:
            row["more"] = (slot[stage.second] + 1, 0, 0, 0, 0)
        if isinstance(stage, QuantizedGemm):
            row["layout"], row["scale_kind"] = _layout(stage), _SCALES.index(stage.packing.scale)
        row |= _describe_prologue(stage, slot)
        if stage.rotation:
            turn = stage.rotation
            row |= {"gated": 1, "tile_columns": stage.tile[1] // 2, "head": turn.head_dim, "rotated": turn.rotated}
            row |= {"cos": slot[turn.cos], "sin": slot[turn.sin], "place": slot[turn.length]}
    elif isinstance(stage, Conv2d):
        row |= {"kind": MANY, "rows": stage.pixels, "columns": stage.channels[1]}
        row |= {"inner": stage.kernel**2 * stage.channels[0], "channels": stage.channels[0], "kernel": stage.kernel}
        row |= {"height": stage.height, "width": stage.width}
    elif isinstance(stage, Reduction):
        row |= {"kind": COMBINE, "gated": stage.gated, "x": slot[stage.sums], "more": (1, 0, 0, 0, 0)}
        row["rows"], row["columns"] = stage.sizes
    elif isinstance(stage, Elementwise):
        row |= {"kind": COMBINE, "gated": len(stage.inputs) == 2, "x": slot[stage.inputs[0]]}
        row["weight"] = slot[stage.inputs[1]] if len(stage.inputs) == 2 else -1
        row["rows"], row["columns"] = stage.sizes
        row["activation"] = list(ACTIVATIONS).index(str(stage.function))
    elif isinstance(stage, Norm):
        row |= {"kind": NORM, "eps": stage.eps}
        row["rows"], row["columns"] = stage.sizes
    elif isinstance(stage, Attention):
        row |= {"kind": ATTEND, "rows": stage.rows, "columns": stage.heads * stage.head_dim, "inner": stage.context}
        row["x"], row["weight"], row["bias"] = (slot[name] for name in stage.names)
        row["height"], row["width"], row["gated"] = (graph.shape(name)[1] for name in stage.names)
        row |= {"channels": stage.head_dim, "kernel": stage.heads // stage.key_heads, "eps": stage.scale}
        row["more"] = (stage.causal, *stage.offsets, stage.head_dim * (stage.context if stage.by_head else 1))
        row["early"] = not set(stage.early) & set(graph.producers)
        row["extra"] = (slot[stage.length] if stage.length else -1, *stage.new)
    elif isinstance(stage, Custom):
        row["rows"], row["columns"] = stage.sizes
        row["more"] = tuple(([slot[name] for name in stage.inputs] + [-1] * 5)[:5])
    return row


def _layout(stage: QuantizedGemm) -> int:
    packing = stage.packing
    return LAYOUTS.index(f"{packing.format}-{packing.group}" if packing.group else packing.format)


def _describe_prologue(stage: Gemm, slot: dict[str, int]) -> dict[str, Any]:
    if isinstance(stage.prologue, Normed):
        return {"prologue": NORMED, "norm": slot[stage.prologue.weight], "eps": stage.prologue.eps}
    if stage.prologue:
        return {"prologue": COMBINED, "heads": stage.prologue.heads, "parts": stage.prologue.splits}
    return {}


def _macros(stages: np.ndarray, dtype: torch.dtype, tensors: int) -> dict[str, int]:
    kinds = set(stages["kind"].tolist())
    few, many = stages[stages["kind"] == FEW], stages[stages["kind"] == MANY]
    rows = np.minimum(few["tile_rows"], few["rows"])
    columns = many["tile_columns"] * (1 + many["gated"])  # of pairs, two each
    return {
        "TENSORS": tensors, "HALF": int(dtype == torch.float16), "X_BYTES": X_BYTES,
        "FEW_TILES": next(count for count in (1, 2, 4) if rows.max() <= 8 * count) if len(few) else 0,
        "LAYOUTS": sum(1 << layout for layout in set(few["layout"].tolist())),
        "MANY_ROWS": (64 if many["tile_rows"].max() <= 64 else 128) if len(many) else 0,
        "MANY_COLUMNS": (64 if columns.max() <= 64 else 128) if len(many) else 0,
        "COMBINES": int(COMBINE in kinds), "NORMS": int(NORM in kinds),
        "ATTENTION": _head_size(stages["channels"][stages["kind"] == ATTEND]),
        "HAS_USER_STAGES": int(any(kind >= USER for kind in kinds)),
    }  # fmt: skip


def _head_size(sizes: np.ndarray) -> int:
    """Return the size of heads that attention is compiled for; 0 without any."""
    return next(size for size in (64, 128, 256) if sizes.max() <= size) if len(sizes) else 0


def _shared_bytes(macros: dict[str, int]) -> int:
    rows = 8 * macros["FEW_TILES"]
    few = 2 * 8 * rows * 16 * 4 + 8 * rows * 4 + X_BYTES + 64 * 64 if rows else 0
    many_rows, many_columns = macros["MANY_ROWS"], macros["MANY_COLUMNS"]
    many = 4 * (many_rows + many_columns) * (64 * 2 + 16) + many_rows * (many_columns + 8) * 4
    head = macros["ATTENTION"]
    line, keys, slots = 2 * head + 16, 64 if head > 128 else 128, 2 if head > 64 else 3
    attention = (slots * 2 * keys + 16) * line if head else 0
    return _HEAD_BYTES + max(few, many, attention)


@functools.cache
def tensors_argument(count: int) -> type[ctypes.Structure]:
    """Return the structure that has the address of each slot."""
    return type("Tensors", (ctypes.Structure,), {"_fields_": (("at", c_void_p * count),)})


def fill_tensors(addresses: Sequence[int]) -> ctypes.Structure:
    """Return the kernel's argument of these addresses."""
    kind = tensors_argument(len(addresses))
    return kind((c_void_p * len(addresses))(*addresses))
