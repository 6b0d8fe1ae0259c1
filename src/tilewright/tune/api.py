"""`tilewright.tune(...)`: what the command line does, as a function."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import UserError
from tilewright.train.fields import fields
from tilewright.train.load_config import Configuration, read, split_arguments
from tilewright.train.schema import Train
from tilewright.tune.report.answer import Answer
from tilewright.tune.search.layouts import LAYOUT

if TYPE_CHECKING:
    from tilewright.tune.search.space import Space

_MOST_ON_A_CPU = 8  # ranks, or as many as there are cores
DEFAULT_BUDGET, REHEARSAL_BUDGET = "4m", "2m"  # on a GPU, and without one
# What `tune` takes on a GPU where nothing is given: what `train` takes keeps no GPU busy.
ON_A_GPU = ("model.preset=125m", "global_batch=32")

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def tune(
    *arguments: str,
    budget: str | float | None = None,
    model: str | Callable[[], Any] = "",
    study: str | None = None,
    storage: str | None = None,
    resume: bool = False,
    search: Collection[str] = (),
    numerics: str = "rounding",
    precision_floor: str | None = None,
    memory: str | float | None = None,
    first: Sequence[str] = (),
    fresh: bool = False,
    gpu: str | None = None,
    nproc: int = 1,
    out: str | Path = "runs/tune",
    shown: Any = None,
) -> Answer:
    """Find the fastest way to train a model on this machine, and show that it is the same model.

    Args:
        arguments: a configuration file, and `name=value` for fields that differ from it. What is set stays so; levers
            that are left out are searched. With none at all an embedded default is tuned.
        budget: time for all of it: seconds, or text such as "20m". By default 4 minutes, or 2 without a GPU.
        model: a function without arguments that returns a module and a batch of your own, or its
            "package.module:name". Trials import it by that name, so it has to be at the top of a module or a script.
        study: its name, and that of its folder; by default the time it began.
        storage: URL of a database that several machines share; by default a SQLite file in the study's folder.
        resume: go on with a study, the newest of `out` where none is named; with no arguments, as it was begun. A study
            of a model of your own needs `model` again: a study never decides what code runs.
        search: levers to try although they are set; "all" for every one.
        numerics: how far the numbers may move: same, rounding, state or rule.
        precision_floor: no precision below this one.
        memory: the most that a run may take: bytes, or text such as "80GB".
        first: runs to try before any other: `name=value` of levers, several with commas between.
        fresh: measure again what was measured before.
        gpu: an accelerator to predict the same run for. By default an H100 where the study itself has no GPU.
        nproc: ranks that every run is on, a GPU each; how they share the work is a lever, `parallel`.
        out: the folder of studies.
        shown: a `tune.settings.Shown`, told what happens.

    Example::

        answer = tilewright.tune("model.preset=1b", "global_batch=16", budget="8m")
        print(answer.sentences)
    """
    from tilewright.tune.model_name import check_source, name_of
    from tilewright.tune.own_model import refuse_while_importing
    from tilewright.tune.rehearsal import find_gpu, nearest_recorded, rehearsal
    from tilewright.tune.report.reread import prediction_in
    from tilewright.tune.search.space import open_space
    from tilewright.tune.settings import Settings, Shown
    from tilewright.tune.store.ledger import Ledger
    from tilewright.tune.store.storage import checked, in_folder, reach
    from tilewright.tune.study import run
    from tilewright.tune.worker import forkserver
    from tilewright.tune.worker.jobs import probe, probe_links

    began = time.monotonic()
    refuse_while_importing()
    if nproc != 1 and model:
        raise UserError("A model of your own is tuned in one process; leave nproc out.")
    accelerator = find_gpu(gpu)
    own, folders = name_of(model) if callable(model) else (model, [])
    if own:
        check_source(own, [*folders, str(Path.cwd())])
    limit, cap = None if budget is None else seconds(budget), None if memory is None else amount(memory)
    name = study_name(study, Path(out), resume, storage is not None)
    folder = Path(out) / name
    place = storage or in_folder(folder)
    checked(place)
    forkserver.start()  # it imports torch while this process does
    limits: dict[str, Any] = {"numerics": numerics, "precision_floor": precision_floor, "search": search}
    continued = resume and not arguments
    predicted: dict[str, Any] = {}
    if continued:  # as it was begun
        facts = Ledger.read(place, name)[0].get("facts") or {}
        if not facts:
            raise UserError(f"The study {name} ended before its first trial; begin it again under another name.")
        space, begun_with_cap = _as_begun(name, facts, own)
        if nproc not in (1, space.ranks):
            raise UserError(f"The study {name} has --nproc {space.ranks}; leave --nproc out, or begin another study.")
        check_ranks_here(space.ranks, space.device)
        cap = cap or begun_with_cap
        predicted = prediction_in(facts)
    else:
        configuration, device = _configuration(arguments, own)
        check_ranks_here(nproc, device)
        space = open_space(configuration, device=device, of_any_model=bool(own), ranks=nproc, **limits)
        if own and device == "cpu":
            predicted = {"gpu": accelerator.name, "rates": "", "rows": [], "recorded": nearest_recorded(0)}
        elif not own and (device == "cpu" or gpu is not None):
            predicted = rehearsal(_on_a_gpu(configuration, arguments, nproc), accelerator, ranks=nproc, **limits)
    path = (*folders, str(Path.cwd()), *(entry for entry in sys.path if entry)) if own else ()
    told = shown or Shown()
    told.rehearse(predicted, space.device == "cpu")
    if space.device == "cuda" and space.ranks == 1 and not own and (gpus := _gpus()) > 1:
        told.say(f"This machine has {gpus} GPUs, and every run is on one; --nproc {gpus} uses them all.")
    points = tuple(space.parse(text) for text in first)
    reach(place, "--out" if storage is None else "--storage")
    if storage is None:
        check_begun(folder, name, space, own, resume=resume, of_any_model=bool(own))
    told.say("measuring what this machine can do")
    asked = space.start.device
    if limit is None:
        limit = seconds(DEFAULT_BUDGET if space.device == "cuda" else REHEARSAL_BUDGET)
    micro_batch = space.start.micro_batch if continued else configuration.train.micro_batch  # 0: the whole batch
    first_step = dataclasses.replace(space.start, micro_batch=micro_batch)
    machine = probe(space.device if asked == "auto" else asked, own_model=own, path=path, run=first_step)
    if space.ranks > 1:
        machine["links"] = probe_links(space.ranks, space.start)
    if own and not continued:
        configuration = _with_batch(configuration, machine["own_model"])
        space = open_space(configuration, device=device, of_any_model=True, **limits)
        points = tuple(space.parse(text) for text in first)
    settings = Settings(
        space=space, machine=machine, folder=folder, name=name, storage=place,
        budget=max(1.0, limit - (time.monotonic() - began)), resume=resume or storage is not None, memory_cap=cap,
        own_model=own, path=path, fresh=fresh, first=points, on_gpu=predicted,
    )  # fmt: skip
    return run(settings, told)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def check_ranks_here(ranks: int, device: str) -> None:
    """Refuse ranks that this machine has no room for."""
    if ranks < 1:
        raise UserError(f"--nproc is {ranks}; it is a number of ranks, 1 or more.")
    if ranks == 1:
        return
    if device == "cuda" and ranks > (gpus := _gpus()):
        has = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        raise UserError(f"--nproc is {ranks}, and this machine has {has}; start at most as many ranks, or device=cpu.")
    if device == "cpu" and ranks > (most := max(_MOST_ON_A_CPU, os.cpu_count() or 1)):
        raise UserError(f"--nproc is {ranks}, and this machine has no room for them; start at most {most} ranks.")


def check_begun(folder: Path, name: str, space: Any, own_model: str, *, resume: bool, of_any_model: bool) -> None:
    """Refuse a study that exists, or that is of another configuration, before the machine is measured for it."""
    from tilewright.tune.facts import digest_of
    from tilewright.tune.store.ledger import Ledger
    from tilewright.tune.store.storage import in_folder

    journal = folder / "trials.jsonl"
    if not journal.is_file() or not (folder / "study.db").is_file():
        return
    if not resume:
        raise UserError(f"The study {name} exists; continue it with --resume, or choose another --study.")
    head = Ledger.read(in_folder(folder), name)[0].get("head")
    known = head.get("space") if isinstance(head, Mapping) else None
    if known is not None and not of_any_model and known != digest_of(space, own_model):
        raise UserError(
            f"The study {name} is of another configuration or of other levers; give the arguments it was begun with, "
            "or choose another --study."
        )


def seconds(text: str | float) -> float:
    """A time: seconds, or numbers with s, m or h.

    >>> seconds("20m"), seconds("1.5h"), seconds("6m 30s"), seconds(30)
    (1200.0, 5400.0, 390.0, 30.0)
    """
    number = r"([0-9]+(?:\.[0-9]+)?)\s*"
    match = re.fullmatch(rf"(?:{number}h)?\s*(?:{number}m)?\s*(?:{number}s?)?", str(text).strip().lower())
    hours, minutes, rest = (float(part or 0) for part in match.groups()) if match else (0.0, 0.0, 0.0)
    found = 3600 * hours + 60 * minutes + rest
    if not 0 < found < 1e9:
        raise UserError(f"The budget is {str(text)[:40]!r}; give a time above 0, such as 90s, 20m or 2h.")
    return found


def amount(text: str | float) -> float:
    """A size in bytes, or a number with kB, MB, GB or KiB, MiB, GiB.

    >>> amount("80GB"), amount("1.5 GiB")
    (80000000000.0, 1610612736.0)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?", str(text).strip().lower())
    if match is None or match[2] not in _BYTES or not 0 < (found := float(match[1]) * _BYTES[match[2]]) < 1e18:
        raise UserError(f"The memory cap is {str(text)[:40]!r}; give a size above 0, such as 80GB or 64GiB.")
    return found


def study_name(study: str | None, out: Path, resume: bool, shared: bool) -> str:
    """The name of a study, or of the one to go on with."""
    if study is not None:
        if resume and not shared and not (out / study / "trials.jsonl").is_file():
            raise UserError(f"There is no study {study} in {out} to go on with; leave --resume out, or see --out.")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", study):
            raise UserError(f"A study cannot be named {study[:100]!r}; use letters, digits, dots and dashes.")
        return study
    if resume:
        return newest(out)
    return datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")


def newest(out: Path) -> str:
    """The name of the study that was begun or continued last."""
    found = [path for path in out.glob("*/trials.jsonl") if path.is_file()]
    if not found:
        raise UserError(f"There is no study in {out} to go on with; run without --resume, or name its folder by --out.")
    return max(found, key=lambda path: path.stat().st_mtime).parent.name


def _as_begun(name: str, facts: Mapping[str, Any], model: str) -> tuple[Space, float | None]:
    """The space and the memory cap of a study that is gone on with.

    A study may come from a stranger, and a model is code: so nothing that a study names is imported. The user names the
    model again, and it must be the study's.
    """
    from tilewright.tune.report.reread import space_of

    begun = facts.get("own_model", "")
    shown = "".join(filter(str.isprintable, str(begun)))[:100]
    if not isinstance(begun, str) or (begun and begun != model):
        advice = f"if you trust that code, give --model {shown} again"
        if model:
            advice = f"and --model is {model}; give the same one, or begin another study"
        raise UserError(f"The study {name} is of the model {shown}{' ' if model else '; '}{advice}.")
    if model and not begun:
        raise UserError(f"The study {name} is not of a model of your own; leave --model out.")
    try:
        space, cap = space_of(dict(facts)), facts["ceilings"]["memory_cap"]
        known = {lever for lever, field in fields().items() if field.lever is not None} | {LAYOUT}
        refused = space.ranks > 1 and space.refusal(space.baseline)
        if not set(space.levers) <= known or refused or not (cap is None or 0 < float(cap) < math.inf):
            raise ValueError
        return space, cap
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"What the study {name} was begun with cannot be read; begin another study.") from error


def _configuration(arguments: Sequence[str], model: str) -> tuple[Configuration, str]:
    import torch

    file, overrides = split_arguments(list(arguments))
    given = read(file, overrides)
    device = given.train.device.partition(":")[0]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if model:
        if any(origin != "default" for name, origin in given.origins.items() if name.startswith(("model.", "data."))):
            raise UserError("A model of your own has its own shape and batch; leave model.* and data.* out.")
        if any(given.origins[name] != "default" for name in ("global_batch", "accumulation")):
            raise UserError("A model of your own comes with its batch; leave global_batch and accumulation out.")
        return given, device
    if file is None and not overrides and device == "cuda":
        return _as_if_by_default(read(None, ON_A_GPU)), device
    return given, device


def _on_a_gpu(configuration: Configuration, arguments: Sequence[str], ranks: int) -> dict[str, Configuration]:
    """The runs to predict for a GPU: this one, and where nothing is given what `tune` takes on a GPU."""
    found = {_describe(configuration.train, ranks): configuration}
    if not arguments:
        on_gpu = _as_if_by_default(read(None, ON_A_GPU))
        found.setdefault(_describe(on_gpu.train, ranks), on_gpu)
    return found


def _describe(run: Train, ranks: int) -> str:
    shape = run.model.preset or f"{run.model.layers} layers of {run.model.width}"
    return f"{shape}, {run.batch_sizes(run.layout(ranks).dp).global_} x {run.model.sequence}"


def _with_batch(configuration: Configuration, facts: Mapping[str, Any]) -> Configuration:
    """Return the run with the batch that a user's model came with."""
    rows, given, origins = facts["global_batch"], configuration.train, dict(configuration.origins)
    if not facts["splits"]:
        origins["micro_batch"] = "the batch, which has no rows to split"
    train = dataclasses.replace(given, global_batch=rows, micro_batch=given.micro_batch or rows)
    return Configuration(train, origins)


def _as_if_by_default(configuration: Configuration) -> Configuration:
    """Mark every field as left at its default, so that none of them fixes a lever."""
    return Configuration(configuration.train, dict.fromkeys(configuration.origins, "default"))
