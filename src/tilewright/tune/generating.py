"""`tune_generating(...)`: what `tilewright tune --for decode` and `--for prefill` do, as a function."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.tune.api import DEFAULT_BUDGET, REHEARSAL_BUDGET, amount, check_begun, seconds, study_name
from tilewright.tune.report.answer import Answer

UNITS = ("latency", "throughput")


def tune_generating(
    folder: str | Path,
    *arguments: str,
    aim: str = "decode",
    unit: str = "latency",
    quality: str = "1%",
    budget: str | float | None = None,
    study: str | None = None,
    storage: str | None = None,
    resume: bool = False,
    memory: str | float | None = None,
    first: Sequence[str] = (),
    fresh: bool = False,
    out: str | Path = "runs/tune",
    shown: Any = None,
) -> Answer:
    """Find the fastest way to generate with a model on this machine that is good enough.

    Args:
        folder: a Hugging Face folder, or a run of `tilewright train`.
        arguments: `name=value` for fields of `Generating`, such as "prompt=512"; a lever that is set stays so.
        aim: "decode", tokens behind a prompt, or "prefill", the prompt itself.
        unit: "latency" of one text, or "throughput" of a batch, whose size then is a lever.
        quality: how far the perplexity may rise, such as "1%"; or
            "perplexity=1%,divergence=0.02,agreement=95%". Formats that fall below are not tried.
        budget, study, storage, resume, memory, first, fresh, out, shown: as of `tune`.

    Example::

        answer = tune_generating("path/to/llama", "prompt=512", budget="8m")
        print(answer.ready)
    """
    from tilewright.tune.proof.generating import Floor
    from tilewright.tune.search.generating import AIMS, open_generating, parse_fields
    from tilewright.tune.settings import Settings, Shown
    from tilewright.tune.store.storage import checked, in_folder, reach
    from tilewright.tune.study import run
    from tilewright.tune.worker import forkserver
    from tilewright.tune.worker.jobs import probe_generating

    began = time.monotonic()
    if aim not in AIMS:
        raise UserError(f"A study is for {aim!r}; choose {' or '.join(AIMS)}.")
    if unit not in UNITS:
        raise UserError(f"The aim is {unit!r}; choose {' or '.join(UNITS)}.")
    given, floor = parse_fields(arguments), dataclasses.asdict(Floor.parse(quality))
    limit, cap = None if budget is None else seconds(budget), None if memory is None else amount(memory)
    start = _start(Path(folder), given, aim, unit)
    name = study_name(study, Path(out), resume, storage is not None)
    place = storage or in_folder(Path(out) / name)
    checked(place)
    forkserver.start()
    told = shown or Shown()
    told.rehearse({}, start.device == "cpu")
    reach(place, "--out" if storage is None else "--storage")
    told.say("measuring what this machine and the formats of this model can do")
    formats = {lever: [] if lever in given else list(values) for lever, values in _FORMATS.items()}
    machine = probe_generating(start, formats, floor)
    if machine["model"]["quantized_bytes"]:  # as it came, and nothing else is to be had from it
        machine["quality"]["weights"] = {}
    good = {
        lever: [value for value, each in found.items() if "refused" not in each]
        for lever, found in machine["quality"].items()
    }  # fmt: skip
    for lever, found in machine["quality"].items():
        for value, each in found.items():
            if "refused" in each:
                told.say(f"{lever} {value} is left out: {each['refused']}.")
    for lever, value, why in (("decode", "tilesync", machine["no_tilesync"]), ("pdl", True, machine["no_pdl"])):
        good[lever] = [] if why else [value]
        if start.device == "cuda" and why:
            told.say(f"{lever} {str(value).lower()} is left out: {why}.")
    space = open_generating(start, list(given), good)
    if storage is None:
        check_begun(Path(out) / name, name, space, "", resume=resume, of_any_model=False)
    limit = limit or seconds(DEFAULT_BUDGET if start.device == "cuda" else REHEARSAL_BUDGET)
    settings = Settings(
        space=space, machine=machine, folder=Path(out) / name, name=name, storage=place,
        budget=max(1.0, limit - (time.monotonic() - began)), resume=resume or storage is not None, memory_cap=cap,
        fresh=fresh, first=tuple(space.parse(text) for text in first), floor=floor,
    )  # fmt: skip
    return run(settings, told)


_FORMATS = {"weights": ("int8", "fp8", "int4"), "kv_cache": ("int8", "fp8")}


def _start(folder: Path, given: dict[str, Any], aim: str, unit: str) -> Any:
    """The baseline: what the user has set, one launch after the other."""
    import torch

    from tilewright.tune.search.generating import Generating

    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give one of Hugging Face, or a run of `tilewright train`.")
    device = given.pop("device", "cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"device is {device!r}; choose cpu, or cuda where there is a GPU.")
    for name in ("aim", "unit", "content"):
        if name in given:
            raise UserError(f"{name} is not set by NAME=VALUE; use --for, --aim.")
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".json"))
    what = [(str(path.relative_to(folder)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    content = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return Generating(model=str(folder.resolve()), aim=aim, unit=unit, device=device, content=content, **given)
