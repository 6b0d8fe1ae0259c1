"""Compile kernels for a GPU that is not there, and print what each takes of it: run as a script, outside the
interpreter, by tests that want to know that the real compiler takes what the interpreter does."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewright.ops import _op, cross_entropy_kernels
from tilewright.ops import dropout_add_norm_kernels as kernels

H200 = torch.device("cuda", 0)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64", None: None}
SCALARS = ["i64", "i64", "i32", "fp64"]  # seed, rows, threshold, scale


def resources(launch: _op.Launch, types: list[str | None]) -> dict[str, Any]:
    """Registers, spilled bytes and shared memory of a kernel compiled for compute capability 9.0."""
    names = launch.kernel.arg_names
    signature = {n: t or "constexpr" for n, t in zip(names, types, strict=False)}
    constants = {n: None for n, t in zip(names, types, strict=False) if t is None}
    constants |= dict(zip(names[len(types) :], launch.constants, strict=True))
    signature |= dict.fromkeys(names[len(types) :], "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types) if t and t.startswith("*")}
    source = ASTSource(launch.kernel, signature, constants, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": launch.warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(part.split(":")[:2] for part in printed.split() if part.startswith(("REG:", "STACK:")))
    return {"registers": int(usage["REG"]), "spilled": int(usage["STACK"]), "shared": binary.metadata.shared}


def dropout_add_norm(x: torch.dtype, residual: torch.dtype, weight: torch.dtype, width: int, norm: str, full: bool):
    """Forward and backward of one case, with every option where `full`."""
    rms = norm == "rms"
    extra, bias = (weight if full else None), (None if rms else weight)
    float32 = torch.float32 if full else None
    tensors = (x, x if full else None, residual, float32, extra, weight, bias, torch.int64, x, residual)
    _, launch = kernels.forward_launch(H200, width, tensors, rms, False, True)
    types = [{**POINTER, torch.int64: "*i64"}[t] for t in tensors]
    yield "forward", resources(launch, [*types, "*fp32", *SCALARS, "fp64"])

    inputs = (x, residual, residual, x if full else None, float32, extra, weight)
    plan = kernels.backward_plan(H200, width, inputs, torch.float32, x, (True,) * 7, rms, False, True)
    types = [POINTER[t] for t in inputs]
    scale, sums = "*fp32" if full else None, "*fp32" if plan.row_sums else None
    outputs = [POINTER[x], POINTER[x] if full else None, POINTER[residual], scale, scale, "*fp32", bias and "*fp32"]
    yield "backward", resources(plan.main, [*types, "*fp32", sums, "*i64", *outputs, *SCALARS])
    if plan.row_sums:
        types = [POINTER[x], POINTER[residual], POINTER[weight], "*fp32", "*fp32", "i64"]
        yield "row_sums", resources(plan.row_sums, types)
    yield "add_partials", resources(plan.add_partials, ["*fp32", None, POINTER[weight], POINTER[bias], "i64"])


def cross_entropy(dtype: torch.dtype, vocabulary: int, full: bool):
    """Loss and gradient in one launch, and the scaling of the gradient."""
    weight, single = dtype if full else None, torch.float32
    tensors = (dtype, torch.int64, weight, single if full else None, single, None, single, single, dtype)
    launch = cross_entropy_kernels.forward_launch(H200, vocabulary, tensors, full, full)
    types = [{**POINTER, torch.int64: "*i64"}[t] for t in tensors]
    yield "forward", resources(launch, [*types, "i64", "i64", "fp64", "fp64", "fp64"])
    launch = cross_entropy_kernels.scale_launch(H200, vocabulary, dtype, single)
    yield "scale_rows", resources(launch, [POINTER[dtype], "*fp32", "i64"])


if __name__ == "__main__":
    _op.multiprocessors = lambda device: 132
    _op.shared_memory = lambda device: 232_448
    for line in sys.stdin:
        op, *arguments = json.loads(line)
        arguments = [getattr(torch, a, a) if isinstance(a, str) and "float" in a else a for a in arguments]
        for name, usage in {"dropout_add_norm": dropout_add_norm, "cross_entropy": cross_entropy}[op](*arguments):
            print(json.dumps({"kernel": name, **usage}), flush=True)
