"""Run what only a GPU can show, the most valuable first, within a budget of seconds.

    python tools/gpu_round.py --budget 570                        begin a round in runs/gpu_round, or go on with it
    python tools/gpu_round.py --budget 570 --resume there/round   go on with one elsewhere, or with its archive alone
    python tools/gpu_round.py --list --only "tests|models"        say what there is

A step is a command with a time limit, in a process group of its own. `round.json` says of each what came of it, `logs`
has what it printed and `results` what it recorded, for `results/<gpu>`. After each step all of this but weights goes to
one archive too, so that a machine that is taken away loses no more than a step. A step that the budget ended is run
again by the next call, and so is one that made a folder for others, where that is on another machine. One that failed,
outlasted its own limit or ended the round itself, as one may that hangs the GPU, is not: take it out of round.json for
that.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRATCH = Path(tempfile.gettempdir()) / "gpu_round"
RESERVE = 25.0  # seconds that remain for a step to end, and for the archive
LEAST = 20.0  # a step is not begun with fewer
LARGEST = 8 * 2**20  # bytes of a file in the archive
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_GRACE = (12.0, 5.0)  # seconds to end by itself after SIGINT, and after SIGTERM
STATES = ("passed", "failed", "outlasted its limit", "no such program", "ended by the budget")
BEGUN = "ended the round"  # unless it says later what came of it


@dataclass(frozen=True)
class Step:
    """A command: {python}, {results}, {scratch} and {seconds} stand for what is known when it runs."""

    name: str
    limit: float  # seconds
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    copied: str = ""  # the recorded result that it goes on with
    makes: str = ""  # in the scratch folder, which another machine has not
    resumes: str = ""  # among the results: where it is, the step goes on with --resume


def _tests(name: str, limit: float, *files: str, options: tuple[str, ...] = ()) -> Step:
    """Tests whose kernels trap where they would hang."""
    options += ("-vv", "-rfE", "--tb=short", "--durations=5", "--maxfail=40", "-p", "no:cacheprovider")
    workers = ("-n", "6", "--dist", "worksteal") if importlib.util.find_spec("xdist") else ()
    command = ("{python}", "-m", "pytest", *options, *workers, *(f"tests/{file}" for file in files))
    return Step(f"tests {name}", limit, command, {"TILEWRIGHT_BOUNDED_WAITS": "1"})


def _gpu_tests(name: str, limit: float, *files: str) -> Step:
    """Tests that only a GPU can run, but for those by the clock, which others beside them would disturb."""
    options = "--gpu-alone", "--deselect=tests/ops/test_host_bound.py"
    return _tests(f"of a GPU alone, {name}", limit, *files, options=options)


def _tilewright(name: str, limit: float, *arguments: str, copied: str = "") -> Step:
    return Step(name, limit, ("{python}", "-m", "tilewright", *arguments), {}, copied)


def _tune(name: str, limit: float, study: str, *arguments: str) -> Step:
    options = "--study", study, "--out", "{results}/tune", "--budget", "{seconds}s"
    command = ("{python}", "-m", "tilewright", "tune", *arguments, *options)
    return Step(f"tune {name}", limit, command, resumes=f"tune/{study}/trials.jsonl")


def _bench(name: str, limit: float, *options: str, label: str = "") -> Step:
    out = f"{{results}}/{f'{name} {label}'.strip().replace(' ', '_')}.json"
    return _tilewright(f"bench {name} {label}".strip(), limit, "bench", name, *options, "--out", out)


def _sanitized(tool: str, test: str) -> Step:
    """One test of few launches, whose memory is its own: a cache would hide what lies behind a tensor."""
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "{python}", "-m", "pytest", "-rfE")
    arguments = ("-p", "no:cacheprovider", f"tests/{test}")
    return Step(f"{tool} {test}", 120, (*command, *arguments), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


_FOLDER = """
import sys, torch
from tilewright.bench.models import build_model
with torch.device("cuda"):
    build_model({"model": "Llama-3.2-1B"}).bfloat16().save_pretrained(sys.argv[1])
"""
_PACKED = "ops/test_attention_backends.py::test_nothing_waits_for_packed_sequences_to_be_read[hopper]"
_FEW_ROWS = "ops/test_quantized_linear_few_rows.py::test_large_layers_on_a_gpu"
_HF = ("--model-arg", "batch=8", "--model-arg", "sequence=2048", "--model-arg", "dtype=bf16")
STEPS = (
    _tilewright("doctor", 60, "doctor"),
    _gpu_tests("new", 240, "tilesync/test_on_hopper.py", "generate", "ops/test_glu_mlp.py",
               "ops/test_quantized_linear_few_rows.py", "ops/test_attention_backends.py",
               "ops/test_attention_hopper.py", "ops/test_attention_hopper_backward.py"),
    *(_bench("models", 150, "--only", model, label=model) for model in ("plain GPT", "Llama-3.2-1B, bf16")),
    _tests("new kernels", 200, "ops/test_pdl.py", "ops/test_glu_mlp.py", "ops/test_quantized_linear_few_rows.py",
           "ops/test_quantized_linear.py", "ops/test_decode_attention.py", "ops/test_append_to_cache.py",
           "ops/test_few_rows_linear.py", "ops/test_attention_backends.py", "nn/test_fused_mlp.py",
           "optimize/test_matmul_rules.py"),
    _gpu_tests("ops", 240, "ops", "nn", "models", "runtime/test_hopper.py"),
    *(_bench("models", limit, "--only", model, label=model) for model, limit in (("GPT-2", 120), ("Qwen3", 200))),
    _bench("glu_mlp", 120),
    _bench("gelu_mlp", 90),
    _bench("wrappers", 180),
    _bench("quantized_linear", 90, "--quick", label="quick"),
    _tilewright("bench shapes", 280, "bench", "shapes", "--seed", "0", "--resume", "--again", "device", "--budget",
                "{seconds}", "--out", "{results}/shapes.json", copied="shapes"),
    _tilewright("bench all", 200, "bench", "all", "--against", "results/h200"),
    _bench("decode", 150, "--quick"),
    _bench("tilesync", 120, "--quick"),
    *(_bench(name, 90) for name in ("linear", "embedding", "optimizer", "self_attention", "lltm", "decode_attention",
                                    "few_rows_linear")),
    _bench("attention", 180, "--learn"),
    Step("a folder to tune", 60, ("{python}", "-c", _FOLDER, "{scratch}/llama"), makes="llama"),
    _tune("--hf", 260, "llama", "--hf", "{scratch}/llama", *_HF),
    *(_tune(preset, 260, preset, f"model.preset={preset}") for preset in ("125m", "1b", "760m")),
    _tune("--for decode", 200, "decode", "--for", "decode", "{scratch}/llama"),
    _sanitized("memcheck", _PACKED),
    _sanitized("memcheck", "ops/test_glu_mlp.py::test_what_is_not_a_number_comes_out"),
    _sanitized("memcheck", f"{_FEW_ROWS}[int4-8]"),
    _sanitized("racecheck", f"{_FEW_ROWS}[int8-8]"),
    _sanitized("racecheck", "tilesync/test_on_hopper.py::test_a_lost_post_is_an_error_and_the_next_call_is_right"),
    _sanitized("synccheck", _PACKED),
    _tests("all ops", 400, "ops", "runtime", "measure"),
    _tests("modules", 300, "nn", "models", "optim", "optimize"),
    _tests("generating", 240, "generate", "quantize", "bench", "tilesync"),
    _bench("models", 560, "--only", "Gemma3", label="Gemma3"),
    _bench("quantized_linear", 560),
    _bench("decode", 560, label="whole"),
    _bench("tilesync", 560, label="whole"),
)  # fmt: skip


def _archive(folder: Path, to: Path) -> None:
    """Write a round to one file, which is whole at any time, without weights that a study has made."""
    to.parent.mkdir(parents=True, exist_ok=True)
    new = to.with_name(f".{to.name}")
    with tarfile.open(new, "w:gz", compresslevel=3) as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path not in (to, new) and path.stat().st_size <= LARGEST:
                tar.add(path, str(path.relative_to(folder)))
    new.replace(to)


def _open(folder: Path, archive: Path) -> dict[str, dict[str, Any]]:
    """What came of the steps of a round so far; of an archive, where the folder has no more."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    (folder / "results").mkdir(exist_ok=True)
    if not (folder / "round.json").exists() and archive.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    known = folder / "round.json"
    found: dict[str, dict[str, Any]] = json.loads(known.read_text()) if known.exists() else {}
    return {name: each for name, each in found.items() if each["state"] != STATES[4]}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a step and all that it started: an interrupt first, at which tests and studies say what they have."""
    process.send_signal(signal.SIGINT)
    for how, seconds in zip((signal.SIGTERM, signal.SIGKILL), _GRACE, strict=True):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, how)
    process.wait()


def _run(step: Step, seconds: float, folder: Path, log: Path, is_budget: bool) -> dict[str, Any]:
    """Run a step for so many seconds at most; `is_budget`: it is the budget that has no more."""
    known = {
        "python": sys.executable, "results": str(folder / "results"), "seconds": str(max(1, round(seconds - 15))),
        "scratch": str(SCRATCH),
    }  # fmt: skip
    command = [re.sub(r"\{(python|results|seconds|scratch)\}", lambda m: known[m[1]], each) for each in step.command]
    if step.resumes and (folder / "results" / step.resumes).exists():
        command.append("--resume")
    target, recorded = folder / "results" / f"{step.copied}.json", ROOT / "results" / "h200" / f"{step.copied}.json"
    if step.copied and not target.exists():
        shutil.copy(recorded, target)
    inherited = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **step.environment}
    given = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *given])}  # whatever folder a process is started in
    paths["PATH"] = f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    began, state = time.monotonic(), ""
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=inherited | paths, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except FileNotFoundError:
            return {"state": STATES[3], "seconds": 0.0, "failing": [], "last": f"{command[0]} is not installed"}
        try:
            state = STATES[process.wait(seconds) != 0]
        except subprocess.TimeoutExpired:
            state = STATES[4] if is_budget else STATES[2]
        finally:
            if process.returncode is None:
                _stop(process)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has left behind holds the GPU
    text = log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return {
        "state": state, "code": process.returncode, "seconds": round(time.monotonic() - began, 1),
        "failing": list(dict.fromkeys(_FAILED.findall(text))), "last": lines[-1][:160] if lines else "",
    }  # fmt: skip


def _is_gone(step: Step, later: Sequence[Step], found: dict[str, dict[str, Any]]) -> bool:
    """Return whether what a step made is on another machine, and a later step that is left needs it."""
    named = f"{{scratch}}/{step.makes}"
    is_needed = any(each.name not in found and named in each.command for each in later)
    return bool(step.makes) and is_needed and not (SCRATCH / step.makes).exists()


def table(found: dict[str, dict[str, Any]]) -> str:
    """Each step in a line, and the names of its failing tests below."""
    lines = []
    for name, each in found.items():
        lines.append(f"{name:<32.32} {each['state']:<20} {each['seconds']:>6.0f} s  {each['last']}")
        lines += [f"    {test}" for test in each["failing"]]
    return "\n".join(lines)


def _keep(found: dict[str, dict[str, Any]], folder: Path, archive: Path) -> None:
    """Write what came of the steps."""
    (folder / "round.json").write_text(json.dumps(found, indent=1))
    (folder / "summary.txt").write_text(table(found) + "\n")
    _archive(folder, archive)


def main(arguments: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Run the steps that are left; 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds for all of it")
    parser.add_argument("--resume", type=Path, default=ROOT / "runs" / "gpu_round", help="the folder of the round")
    parser.add_argument("--archive", type=Path, help="the file for all of it; the folder's round.tar.gz if left out")
    parser.add_argument("--only", default="", help="the steps with this, a regular expression, in their names")
    parser.add_argument("--list", action="store_true", help="print the steps and run none")
    given = parser.parse_args(arguments)
    chosen = [step for step in steps if re.search(given.only, step.name)]
    if given.list:
        print("\n".join(f"{step.limit:>5.0f} s  {step.name}" for step in chosen))
        return 0
    folder = given.resume.resolve()
    archive, ends = (given.archive or folder / "round.tar.gz").resolve(), time.monotonic() + given.budget - RESERVE
    found = _open(folder, folder / "round.tar.gz")
    for number, step in enumerate(steps):
        left, later = ends - time.monotonic(), [each for each in steps[number + 1 :] if each in chosen]
        if _is_gone(step, later, found):
            found.pop(step.name, None)
        if step not in chosen or step.name in found or left < min(LEAST, step.limit):
            continue
        print(f"{step.name} ...", flush=True)
        found[step.name] = {"state": BEGUN, "seconds": 0.0, "failing": [], "last": ""}
        _keep(found, folder, archive)
        log = folder / "logs" / f"{number:02d}_{re.sub('[^a-zA-Z0-9.]+', '_', step.name)}.log"
        found[step.name] = each = _run(step, min(left, step.limit), folder, log, left < step.limit)
        print(table({step.name: each}), flush=True)
        _keep(found, folder, archive)
    left_over = [step.name for step in chosen if found.get(step.name, {"state": STATES[4]})["state"] == STATES[4]]
    print(f"\n{table(found)}\n\n{len(left_over)} steps are left: {', '.join(left_over) or 'none'}.\n{archive}")
    return int(any(found[step.name]["state"] != STATES[0] for step in chosen if step.name in found))


if __name__ == "__main__":
    sys.exit(main())
