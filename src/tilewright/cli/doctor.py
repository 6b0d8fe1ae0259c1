"""`tilewright doctor`: what this machine has, what will work, what will not and what to do about it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tilewright
from tilewright import hardware
from tilewright.measure.machine import gpu_facts, package_version


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was found, and where it falls short, what to do."""

    what: str
    found: str
    ok: bool
    advice: str = ""


def doctor(as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table.")) -> None:
    """Say what this machine has, what will therefore work, and what to do about the rest.

    Exit code 1 when something that every command needs is missing.
    """
    findings = examine()
    if as_json:
        print(json.dumps({"findings": [asdict(f) for f in findings], "works": works(findings)}))
    else:
        _show(findings)
    if not all(f.ok for f in findings if f.what in ("Python", "torch")):
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """Look at everything once."""
    findings = [Finding("tilewright", tilewright.__version__, True), _python(), _package("torch", "2.11")]
    if findings[-1].ok:
        findings += [_accelerator(), _package("triton", "3.6", "; without it no kernel runs"), *_nvrtc()]
    findings += [_compiler(), _memory(), *_optional()]
    return findings


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding("Python", platform.python_version(), ok, "" if ok else "install Python 3.11 or later")


def _package(name: str, least: str, without: str = "") -> Finding:
    """A package that is needed in this release or a later one."""
    version = package_version(name)
    if version is None:
        return Finding(name, "missing", False, f"pip install '{name}>={least}'{without}")
    ok = _release(version) >= _release(least)
    return Finding(name, version, ok, "" if ok else f"pip install --upgrade '{name}>={least}'")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def _accelerator() -> Finding:
    import torch

    if not torch.cuda.is_available():
        advice = "this torch is a CPU build: install one with CUDA"
        if torch.version.cuda:
            advice = f"torch is built for CUDA {torch.version.cuda}: check the driver with nvidia-smi"
        return Finding("accelerator", "none", False, f"{advice}; on the CPU, kernels run their plain PyTorch reference")
    facts = gpu_facts() or {}
    known = hardware.by_driver_name(facts["name"])
    found = f"{facts['name']}, {facts['memory_bytes'] / 1e9:.0f} GB, driver {facts.get('driver', 'unknown')}"
    if "power_limit_watts" in facts:
        found += f", {facts['power_limit_watts']:.0f} W"
    if known is None:
        return Finding("accelerator", found, True, "not in the table of peaks: MFU needs --peak-tflops")
    return Finding("accelerator", f"{found} ({known.name})", True)


def _compiler() -> Finding:
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)]
    nvcc = shutil.which("nvcc")
    found = ", ".join([*compilers[:1], *(["nvcc"] if nvcc else [])]) or "none"
    advice = "" if compilers else "install g++: torch.compile on a CPU, and Triton's first launch, need a C compiler"
    return Finding("compilers", found, bool(compilers), advice)


def _nvrtc() -> list[Finding]:
    """The compiler that torch brings for GPUs, and that our kernels in CUDA C++ take."""
    import torch

    from tilewright.runtime import nvrtc

    if torch.version.cuda is None:
        return []
    package = f"nvidia-cuda-nvrtc{'-cu12' if torch.version.cuda.startswith('12') else ''}"
    advice = f"optional: pip install {package}; without it attention, gelu_mlp and losses are slower on a Hopper"
    found = nvrtc.can_compile()
    return [Finding("nvrtc", "found" if found else "missing", True, "" if found else advice)]


def _memory() -> Finding:
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return Finding("host", f"{os.cpu_count()} CPUs, {gigabytes:.0f} GB", True)


def _optional() -> list[Finding]:
    version = package_version("liger-kernel")
    advice = "" if version else "optional: pip install liger-kernel to have it as a peer in benchmarks"
    return [Finding("liger-kernel", version or "missing", True, advice)]


def works(findings: list[Finding]) -> dict[str, str]:
    """Return "yes" for each capability that this machine has, and otherwise the reason why not."""
    state = {f.what: f for f in findings}
    gpu = state.get("accelerator")
    has_gpu = gpu is not None and gpu.ok
    has_triton = "triton" in state and state["triton"].ok
    kernels = "yes" if has_gpu and has_triton else "no GPU" if not has_gpu else "no Triton"
    if not has_gpu and has_triton:
        kernels += "; TRITON_INTERPRET=1 runs them slowly on the CPU, for tests"
    return {
        "tune": "yes" if state["torch"].ok else "no torch",
        "fused kernels": kernels,
        "bench": "yes" if has_gpu and has_triton else "no GPU" if not has_gpu else "no Triton",
        "torch.compile": "yes" if state["compilers"].ok else "no C++ compiler",
    }


def _show(findings: list[Finding]) -> None:
    console = Console()
    table = Table("", "found", "what to do", title="This machine", title_justify="left")
    for f in findings:
        table.add_row(("[green]ok[/] " if f.ok else "[yellow]!![/] ") + f.what, escape(f.found), escape(f.advice))
    console.print(table)
    answers: dict[str, Any] = works(findings)
    table = Table("", "works", title="What will work", title_justify="left")
    for what, answer in answers.items():
        table.add_row(what, answer)
    console.print(table)
