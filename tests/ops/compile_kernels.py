"""Compile kernels for a GPU that is not there, and print what each takes of it: run as a script, outside the
interpreter, by tests that want to know that the real compiler takes what the interpreter does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewright.bench import lltm as lltm_bench
from tilewright.ops.activation import kernels as activation_kernels
from tilewright.ops.attention import kernels as attention_kernels
from tilewright.ops.attention import launch as attention_launch
from tilewright.ops.attention import packed_kernels as attention_packed
from tilewright.ops.cross_entropy import kernels as cross_entropy_kernels
from tilewright.ops.decode_attention import kernels as decode_attention_kernels
from tilewright.ops.dropout_add_norm import launch as launches
from tilewright.ops.embedding import kernels as embedding_kernels
from tilewright.ops.few_rows_linear import kernels as few_rows_linear_kernels
from tilewright.ops.few_rows_linear.op import MOST_ROWS
from tilewright.ops.quantized_linear import launch as quantized_launches
from tilewright.ops.rope import kernels as rope_kernels
from tilewright.optim import update as optimizer_update
from tilewright.runtime import dispatch

H200 = torch.device("cuda", 0)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64", None: None}
DTYPES = ("float", "bfloat", "int8", "uint8")
SCALARS = ["i64", "i64", "i32", "fp64"]  # seed, rows, threshold, scale
IN_CHAIN = "in_chain"  # in front of a case: its kernels as part of a chain, and what they are made of


def compiled(launch: dispatch.Launch, types: list[str | None], **options: Any) -> Any:
    """A kernel compiled for compute capability 9.0."""
    names = launch.kernel.arg_names
    signature = {n: t or "constexpr" for n, t in zip(names, types, strict=False)}
    constants = {n: None for n, t in zip(names, types, strict=False) if t is None}
    constants |= dict(zip(names[len(types) :], launch.constants, strict=True))
    signature |= dict.fromkeys(names[len(types) :], "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t and t.startswith("*")}
    source = ASTSource(launch.kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": launch.warps, **options})


def look_into(binary: Any, *options: str) -> str:
    """What `cuobjdump` prints of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def usage_of(binary: Any, printed: str) -> dict[str, int]:
    """Registers, spilled bytes and shared memory."""
    usage = dict(part.split(":")[:2] for part in printed.split() if part.startswith(("REG:", "STACK:")))
    return {"registers": int(usage["REG"]), "spilled": int(usage["STACK"]), "shared": binary.metadata.shared}


def code(launch: dispatch.Launch, types: list[str | None]) -> dict[str, Any]:
    """The PTX of a kernel in a chain, the names of its arguments there, None for those that are no tensors, and the
    instructions on global memory that the assembler has put before the wait.
    """
    names = [n for n, t in zip(launch.kernel.arg_names, types, strict=False) if t]
    pointers = [name if t.startswith("*") else None for name, t in zip(names, filter(None, types), strict=True)]
    binary = compiled(launch.in_chain, types, launch_pdl=True)
    printed = look_into(binary, "--dump-resource-usage", "--dump-sass")
    early = re.findall(r"\b(LDG\w*|STG|UBLKPF|ATOM\w*|RED\w*)\b", printed.partition("ACQBULK")[0])
    known = {"name": launch.name, "arguments": pointers, "ptx": binary.asm["ptx"], **usage_of(binary, printed)}
    return {**known, "early": early, "pdl": binary.metadata.launch_pdl}


def resources(launch: dispatch.Launch, types: list[str | None], vectors: bool = False) -> dict[str, Any]:
    """Registers, spilled bytes, shared memory of a kernel, and whether it has code of PDL; its loads of 16 bytes too
    where `vectors`, for which it is disassembled.
    """
    if asked[0] == IN_CHAIN:
        return code(launch, types) if launch.is_chained else {}
    binary = compiled(launch, types)
    printed = look_into(binary, "--dump-resource-usage", *["--dump-sass"][:vectors])
    numbers = {**usage_of(binary, printed), "pdl": "griddepcontrol" in binary.asm["ptx"]}
    return numbers | ({"vectors": printed.count("LDG.E.128")} if vectors else {})


def dropout_add_norm(x: torch.dtype, residual: torch.dtype, weight: torch.dtype, width: int, norm: str, full: bool):
    """Forward and backward of one case, with every option where `full`."""
    rms = norm == "rms"
    extra, bias = (weight if full else None), (None if rms else weight)
    float32 = torch.float32 if full else None
    tensors = (x, x if full else None, residual, float32, extra, weight, bias, weight, torch.int64, x, residual)
    *_, launch = launches.forward_launch(H200, width, tensors, rms, False, True)
    types = [{**POINTER, torch.int64: "*i64"}[t] for t in tensors]
    yield "forward", resources(launch, [*types, "*fp32", *SCALARS, "fp64"])

    inputs = (x, residual, residual, x if full else None, float32, extra, weight, weight)
    plan = launches.backward_plan(H200, width, inputs, torch.float32, x, (True,) * 8, rms, False, True)
    types = [POINTER[t] for t in inputs]
    scale, sums = "*fp32" if full else None, "*fp32" if plan.row_sums else None
    outputs = [POINTER[x], POINTER[x] if full else None, POINTER[residual], scale, scale]
    outputs += ["*fp32", bias and "*fp32", "*fp32"]
    yield "backward", resources(plan.main, [*types, "*fp32", sums, "*i64", *outputs, *SCALARS])
    if plan.row_sums:
        types = [POINTER[x], POINTER[residual], POINTER[weight], "*fp32", "*fp32", "i64"]
        yield "row_sums", resources(plan.row_sums, types)
    yield (
        "add_partials",
        resources(plan.add_partials, ["*fp32", None, *[POINTER[t] for t in (weight, bias, weight)], "i64"]),
    )


def cross_entropy(dtype: torch.dtype, vocabulary: int, full: bool):
    """Loss and gradient in one launch, the gradient alone, and its scaling."""
    weight, single = dtype if full else None, torch.float32
    tensors = (dtype, torch.int64, weight, single, None, single, single, dtype)
    types = [{**POINTER, torch.int64: "*i64"}[t] for t in tensors]
    for name, given in (("forward", False), ("gradient", True)):
        arrived = None if given else torch.int32
        arguments = (vocabulary, vocabulary, vocabulary, (*tensors, arrived), given, False, full, full)
        tiles, _, launch = cross_entropy_kernels.tiles_launch(H200, *arguments)
        statistics = "*fp32" if given or tiles > 1 else None
        scratch = [statistics, statistics, arrived and "*i32"]
        yield name, resources(launch, [*types, *scratch, *["i64"] * 5, *["fp64"] * 3])
    launch = cross_entropy_kernels.scale_launch(H200, dtype, single)
    yield "scale_all", resources(launch, [POINTER[dtype], "*fp32", "i64"])


def activation(dtype: torch.dtype, width: int, kind: str, form: str, bias: torch.dtype | None):
    """Forward and backward of one case; `form` is separate, packed or plain."""
    up, single = dtype if form == "separate" else None, torch.float32
    inputs, vector = (dtype, up, bias), 16 // dtype.itemsize
    arguments = (H200, width, inputs, vector, kind, form != "plain")
    flat = bias is None and form != "packed"
    types, scalars = [POINTER[t] for t in inputs], ["i64", "i32", "i64", "i64"]
    plan = activation_kernels.plan(activation_kernels.tilewright_activation_forward, *arguments, (), flat)
    yield "forward", resources(plan.launch, [*types, POINTER[dtype], *scalars])
    needs = (True, up is not None, bias is not None)
    plan = activation_kernels.plan(activation_kernels.tilewright_activation_backward, *arguments, needs, flat)
    outputs = [POINTER[dtype], POINTER[up], POINTER[bias and single]]
    yield "backward", resources(plan.launch, [POINTER[dtype], *types, *outputs, *scalars])


def attention(head_dim: int, is_packed: bool = False):
    """What goes before the kernel of backward, and behind it; and of packed sequences, the tables of tiles."""
    prepare, finish = attention_kernels._launches(H200, torch.bfloat16, head_dim, 8192 // head_dim, is_packed)
    sums, scalars = ["*fp32", "*fp32", "*fp32", "*i32"], ["i32", "i64", "i64", "i32"]
    bounds = "*i32" if is_packed else None
    yield "forward", resources(prepare, ["*bf16", "*bf16", *sums, bounds, *scalars, *["i64"] * 6, "fp32"])
    yield "finish", resources(finish, ["*fp32", "*i32", "*bf16", bounds, *scalars, "fp32"])
    for of_keys in (False, True) if is_packed else ():
        yield "tiles", resources(attention_packed._launch(H200, 128, of_keys), ["*i32"] * 4 + ["i32"] * 4)


def attention_triton(dtype: torch.dtype, head_dim: int):
    """Forward and backward under a causal mask."""
    single = torch.float32
    inputs, more = (dtype, dtype, dtype, None, None, None, None, None), (dtype, single, single)
    scalars = ["i64", *["i32"] * 12, "fp32", "fp32", "fp32", *["i64"] * 14]
    strides = ["i64"] * 3
    flags = attention_launch.Flags(False, True, False, False)
    for part, outputs, extra in (
        ("forward", (dtype, single), []),
        ("keys", (*more, dtype, dtype), strides),
        ("queries", (*more, dtype), strides),
    ):
        tensors = (*inputs, *outputs)
        _, launch = attention_launch.launch(part, H200, tensors, head_dim, flags)
        yield part, resources(launch, [*(POINTER[t] for t in tensors), *scalars, *extra])


def embedding(stored: torch.dtype, dtype: torch.dtype, width: int):
    """Token and position tables in one dtype, the result and its gradient in another."""
    tensors = (torch.int64, stored, stored, dtype)
    _, _, launch = embedding_kernels._gather(H200, width, tensors)
    yield "forward", resources(launch, ["*i64", *[POINTER[t] for t in tensors[1:]], *["i64"] * 3])
    single = torch.float32
    for add, key, position in ((False, torch.int32, None), (True, torch.int16, stored)):
        dtypes = (dtype, key, torch.int64, stored, single, single, position)
        _, main, join = embedding_kernels._scatter(H200, width, add, dtypes)
        keys, numbers = {torch.int32: "*i32", torch.int16: "*i16"}[key], ["i64", "i64"]
        tables = [POINTER[stored], "*fp32", "*fp32", POINTER[position], *numbers]
        yield "backward", resources(main, [POINTER[dtype], keys, "*i64", *tables])
        yield "join", resources(join, [keys, POINTER[stored], "*fp32", "*fp32", *numbers])
    yield "rank", resources(embedding_kernels._rank(H200, (torch.int64,)), ["*i64", "*i32", "*i64", *numbers])
    add_batch = embedding_kernels._add_batch(H200, width, (dtype, stored))
    yield "add_batch", resources(add_batch, [POINTER[dtype], POINTER[stored], *numbers])


def rope(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, interleaved: bool):
    """Out of place and in place, with position ids."""
    tensors = (*[dtype] * 4, torch.float32, torch.float32, torch.int64)
    types = [{**POINTER, torch.int64: "*i64"}[t] for t in tensors]
    for name, inplace in (("forward", False), ("inplace", True)):
        _, _, launch = rope_kernels.rotate_launch(
            H200, tensors, (True, True), heads, kv_heads, head_dim, head_dim // 2, 16 // dtype.itemsize, interleaved,
            inplace,
        )  # fmt: skip
        yield name, resources(launch, [*types, "i64", "i32", "i64", "fp64", *["i64"] * 12])


def quantized_linear(
    weight: torch.dtype, dtype: torch.dtype, rows: int, group: int | None, zeros: bool, activation: str = ""
):  # fmt: skip
    """The matmul of so many rows by an 8192 x 8192 weight, the sum of its splits, and the unpacking."""
    tiles = quantized_launches.tiles(rows, 8192, 8192, group, 132, zeros)
    scale, zero = torch.bfloat16 if group else torch.float32, torch.uint8 if zeros else None
    added = (None, None) if tiles.splits > 1 else (dtype, dtype)
    out = torch.float32 if tiles.splits > 1 else dtype
    tensors = (dtype, weight, scale, zero, *added, out)
    pointers = {**POINTER, torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*u8"}
    types = [pointers[t] for t in tensors]
    if not group:
        del types[3]
    launch = quantized_launches.matmul_launch(H200, tensors, 16, True, tiles, group, activation)
    yield "forward", resources(launch, [*types, *["i64"] * 5])
    join = quantized_launches.join_launch(H200, (dtype, dtype, dtype), max(2, tiles.splits), activation)
    yield "join", resources(join, ["*fp32", *[POINTER[dtype]] * 3, *["i64"] * 3])
    launch = quantized_launches.dequantize_launch(H200, (weight, scale, zero, dtype), 16, group)
    middle = [pointers[zero]] if group else []
    sizes = ["i64"] * (2 if group else 1)
    yield "dequantize", resources(launch, [pointers[weight], pointers[scale], *middle, POINTER[dtype], *sizes])


CODES = {torch.int8: "*i8", torch.float8_e4m3fn: "*u8"}


def decode_attention(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, cache: torch.dtype | None = None
):  # fmt: skip
    """Split and joined, and the whole in one part."""
    for batch in (1, 1000):
        keys = cache or dtype
        plan = decode_attention_kernels.plan(
            H200, (dtype, keys), (True,) * 3, batch, tokens, heads, kv_heads, head_dim, 4096,
            (16 // dtype.itemsize, 16 // keys.itemsize),
        )  # fmt: skip
        kept = [None, "*fp32", "*fp32"] if plan.join else [POINTER[dtype], None, None]
        scale = None if cache is None else "*fp32"
        inputs = [POINTER[dtype], *[CODES.get(keys, POINTER[dtype])] * 2, scale, scale]
        types = [*inputs, "*i32", *kept, "fp64", *["i64"] * 11]
        yield ("forward" if plan.join else "whole"), resources(plan.split, types)
        if plan.join:
            yield "join", resources(plan.join, ["*fp32", "*fp32", POINTER[dtype], "i64"])


def append_to_cache(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, cache: torch.dtype | None = None):
    """With tables and without."""
    for name, table in (("forward", torch.float32), ("plain", None)):
        kinds = (dtype, cache or dtype, torch.int32, table)
        _, launch = decode_attention_kernels.append_launch(H200, kinds, (True,) * 5, heads, kv_heads, head_dim)
        x, cos, scale = POINTER[dtype], POINTER[table], None if cache is None else "*fp32"
        types = [*[x] * 4, *[CODES.get(cache, x)] * 2, "*i32", cos, cos, scale, scale, *["i64"] * 18]
        yield name, resources(launch, types)


def few_rows_linear(dtype: torch.dtype, width: int, activation: str = ""):
    """One row, and the most."""
    for rows in (1, MOST_ROWS):
        launch = few_rows_linear_kernels.launch(H200, (dtype, dtype), True, rows, width, activation)
        name = "forward" if rows == 1 else "rows"
        yield name, resources(launch, [*[POINTER[dtype]] * 4, "i64"])


def optimizer(rule: str):
    """As the training loop has it, and without what may take a step back."""
    single = torch.float32
    square = single if rule == "adamw" else None
    for name, given in (("forward", "*fp32"), ("alone", None)):
        tensors = (single, single, single, square, None, None, None, single)
        numbers = (None, *[None if given is None else single] * 2)
        launch = optimizer_update._launch(H200, tensors, numbers, rule, False, True)
        yield name, resources(launch, ["*i64", "*i32", None, given, given] + ["fp32"] * 9, vectors=True)


def lltm(dtype: torch.dtype, state: int):
    """The kernels of the guide's example, which turns the interpreter on where there is no GPU."""
    os.environ["TRITON_INTERPRET"] = "0"
    example = lltm_bench._example()
    for step, tensors in (("forward", 4), ("backward", 6)):
        launch = example._launch(getattr(example, f"tilewright_lltm_{step}"), H200, (dtype,), state)
        yield step, resources(launch, [POINTER[dtype]] * tensors + ["i64"], vectors=True)


if __name__ == "__main__":
    dispatch.multiprocessors = lambda device: 132
    dispatch.shared_memory = lambda device: 232_448
    for line in sys.stdin:
        asked = json.loads(line)
        op, *arguments = asked[asked[0] == IN_CHAIN :]
        arguments = [getattr(torch, a, a) if isinstance(a, str) and a.startswith(DTYPES) else a for a in arguments]
        ops = {
            f.__name__: f
            for f in (
                activation, append_to_cache, attention, attention_triton, cross_entropy, decode_attention,
                dropout_add_norm, embedding, few_rows_linear, lltm, optimizer, quantized_linear, rope,
            )
        }  # fmt: skip
        for name, usage in ops[op](*arguments):
            print(json.dumps({"kernel": name, **usage}))
        print(flush=True)  # all of a case
