"""quantized.json: what a folder of ours says of itself, and whether its files are those that were written.

    {"schema": 2, "files": {NAME: {"bytes", "sha256"}}, "layers": {NAME: options of its format},
     "aliases": {NAME: the name of the tensor that it shares}, "report": ..., "quality": ...}

The hash finds what a disk or a copy broke, and not malice: what a reader takes from the tensors is checked besides.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.measure.results import write_json
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.plan.huggingface.config import shorten
from tilewright.quantize.formats import FORMATS, Format, format_of

SCHEMA = 2
FACTS = "quantized.json"
METHOD = "tilewright"  # as config.json names it
_LARGEST = 1 << 26


def describe(layer: QuantizedLinear) -> dict[str, Any]:
    """The options of a layer's format."""
    kind = next(kind for kind in FORMATS.values() if kind.weight_dtype == layer.weight.dtype)
    if kind.name != "int4":
        return kind().options()
    options: dict[str, Any] = {"group": layer.in_features // len(layer.scale), "zeros": layer.zero is not None}
    described: Format = format_of({"format": kind.name, "version": kind.version, **options})
    return described.options()


def versions(layers: dict[str, Any]) -> dict[str, Any]:
    """The version of each format that layers have, which the metadata of each file says, too."""
    options = [each for each in layers.values() if isinstance(each, dict)]
    return {
        str(each.get("format")): each.get("version") for each in sorted(options, key=lambda o: str(o.get("format")))
    }


def metadata(layers: dict[str, Any]) -> dict[str, str]:
    """What a safetensors file says of itself."""
    return {"format": "pt", "tilewright": json.dumps(versions(layers))}


def finite(value: Any) -> Any:
    """Return a result with null for a number that JSON has not, such as the error of a layer that overflowed."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_facts(folder: Path, layers: dict[str, Any], **more: Any) -> None:
    """Write quantized.json for the safetensors files that are there."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hash_of(path)}
        for path in sorted(folder.glob("*.safetensors"))
    }
    facts = {"schema": SCHEMA, "files": files, "layers": layers, "aliases": {}, **more}
    write_json(folder / FACTS, finite(facts))


def read_facts(folder: Path) -> dict[str, Any]:
    """What quantized.json says, once it says all that is needed."""
    if not (folder / FACTS).is_file():
        raise UserError(f"{folder} has no {FACTS}; give a folder that Tilewright has quantized.")
    try:
        with (folder / FACTS).open("rb") as file:
            facts = json.loads(file.read(_LARGEST))
    except OSError as error:
        raise UserError(f"Cannot read {folder / FACTS}: {error.strerror}; give a folder that you can read.") from error
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        raise UserError(f"{folder / FACTS} is no JSON that was written here; copy the folder again.")
    if facts.get("schema") != SCHEMA:
        raise UserError(
            f"{folder / FACTS} has schema {shorten(facts.get('schema'))}, and this Tilewright reads {SCHEMA}; quantize "
            "the model again."
        )
    layers, aliases, files = (facts.get(name) for name in ("layers", "aliases", "files"))
    sound = isinstance(layers, dict) and isinstance(aliases, dict) and isinstance(files, dict)
    if not sound or not all(isinstance(name, str) for name in aliases.values()):  # type: ignore[union-attr]
        raise UserError(f"{folder / FACTS} does not say which layers are quantized; copy the folder again.")
    return facts


def check_files(folder: Path, facts: dict[str, Any]) -> None:
    """Refuse a folder whose safetensors files are not those that were written."""
    found = {path.name for path in folder.glob("*.safetensors")}
    for name in sorted(found | facts["files"].keys()):
        path, said = folder / name, facts["files"].get(name)
        if name not in found:
            raise UserError(f"There is no file {path}; copy the folder again.")
        try:
            same = isinstance(said, dict) and path.is_file() and path.stat().st_size == said.get("bytes")
            same = same and hash_of(path) == said.get("sha256")
        except OSError as error:
            raise UserError(f"Cannot read {path}: {error.strerror}; give a folder that you can read.") from error
        if not same:
            raise UserError(f"{path} is not the file that was written, by its size or SHA-256; copy the folder again.")


def hash_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
