"""Results that were measured before: a trial that is the same in all that matters need not run again.

What matters is the whole configuration less the fields that say where and how long a run goes, the hardware, and the
versions. The files are in a folder of the user's own, `$TILEWRIGHT_CACHE`, else `tilewright` in `$XDG_CACHE_HOME` or
`~/.cache`, and can be deleted at any time; `TILEWRIGHT_CACHE=off` switches the cache off. A file that is not what it
should be is no result; it is never an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tilewright
from tilewright.errors import UserError
from tilewright.measure.folder import ADVICE, RefusedError, cache_root, private_folder
from tilewright.measure.results import write_json
from tilewright.tune.store.journal import parse
from tilewright.tune.store.record import Record

SCHEMA = 1
UNIMPORTANT = ("out", "steps", "checkpoint", "log")
GPU = ("name", "capability", "driver", "multiprocessors", "memory_bytes", "power_limit_watts")
VERSIONS = ("torch", "triton", "python", "tilewright", "commit")


def key(configuration: Mapping[str, Any], machine: Mapping[str, Any], versions: Mapping[str, Any] | None = None) -> str:
    """The name of a result: the same for the same run on the same hardware and versions.

    Args:
        configuration: a `Train` as a dictionary, or several in one, with whatever else a result depends on.
        machine: as a probe gives it: "machine" is of `measure.machine.describe`, "host" has the processor.
        versions: of the packages; by default those of `machine`.

    >>> key({"steps": 1, "compile": "none"}, {}) == key({"steps": 2, "compile": "none"}, {})
    True
    >>> key({"compile": "none"}, {}) == key({"compile": "default"}, {})
    False
    """
    described = machine.get("machine") or {}
    found, gpu, host = versions or described, described.get("gpu") or {}, machine.get("host") or {}
    what = {
        "schema": SCHEMA,
        "configuration": _important(configuration),
        "device": machine.get("device"),
        "gpu": {name: gpu.get(name) for name in GPU},
        "host": {name: host.get(name) for name in ("cpu", "cores")},
        "versions": {name: found.get(name) for name in VERSIONS},
    }
    if str(found.get("commit")).endswith("+"):  # somebody is at work on the sources
        sources = Path(tilewright.__file__).parent.rglob("*")
        what["changed"] = max(path.stat().st_mtime_ns for path in sources if path.suffix in (".py", ".cu", ".cuh"))
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def get(key: str) -> Record | None:
    """What is kept under a key, marked as such, or None."""
    folder = _folder()
    if folder is None:
        return None
    try:
        found = json.loads((folder / f"{key}.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("key") != key or found.get("digest") != _digest(found.get("record")):
        return None  # of something else, or damaged
    record = parse(found.get("record"))
    if record is None or record.outcome != "done":
        return None
    return dataclasses.replace(record, cached=True)


def put(key: str, record: Record) -> None:
    """Keep a result, if it is one."""
    if record.outcome != "done" or record.cached or (folder := _folder()) is None:
        return
    try:
        tree = record.as_dict()
        write_json(folder / f"{key}.json", {"key": key, "digest": _digest(tree), "record": tree})
    except (OSError, UserError, ValueError) as error:
        warnings.warn(f"A result could not be kept in {folder}: {error}", stacklevel=2)


def _digest(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def _important(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    return {name: _important(value) for name, value in tree.items() if name not in UNIMPORTANT}


def _folder() -> Path | None:
    """Return the folder of results, made if need be; None where another user could write to it."""
    try:
        root = cache_root()
        return None if root is None else private_folder(root, "trials")
    except (OSError, RuntimeError) as error:
        advice = ADVICE if isinstance(error, RefusedError) else "Set TILEWRIGHT_CACHE to a folder."
        warnings.warn(f"Results are not cached: {error}. {advice}", stacklevel=3)
        return None
