"""The tensors and the tokenizer of a Hugging Face folder, which may come from a stranger and is read as data.

Weights are safetensors, one file or several with an index; a pickle is never read. Of a tensor nothing but name, shape
and dtype is looked at until somebody loads it.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewright.errors import UserError
from tilewright.plan.huggingface.config import read_json, shorten

INDEX = "model.safetensors.index.json"
# Tables that older versions of transformers saved, and every version makes by itself.
TABLES = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors")
_PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")
_LARGEST_HEADER = 1 << 25  # bytes of a safetensors file's list of tensors; large ones have 100,000
_LARGEST_TOKENIZER = 1 << 27


@dataclass(frozen=True)
class Saved:
    """A tensor of an open file."""

    file: Any
    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def load(self) -> Tensor:
        """Its values, in the file's memory for as long as that is open."""
        try:
            return self.file.get_tensor(self.name)
        except Exception as error:  # safetensors' own, and what PyTorch says
            raise _damaged(self.path, error) from error


def open_tensors(folder: Path, opened: contextlib.ExitStack, *, any_name: bool = False) -> dict[str, Saved]:
    """Every tensor of a folder by its name; its files stay open as long as `opened`.

    With `any_name`, a folder with neither a model.safetensors nor an index has its weights in all its safetensors.
    """
    found: dict[str, Saved] = {}
    has_usual = any((folder / name).exists() for name in ("model.safetensors", INDEX))
    others = {} if has_usual or not any_name else {path.name: None for path in sorted(folder.glob("*.safetensors"))}
    listed: dict[str, set[str] | None] = {**others} or _shards(folder)
    for file, names in listed.items():
        here = {saved.name: saved for saved in _open(folder / file, opened)}
        missing = sorted((names or here.keys()) - here.keys())
        if missing:
            raise UserError(f"{folder / file} lacks {shorten(missing[0])}, which {INDEX} says it has; copy it again.")
        twice = sorted(here.keys() & found.keys())
        if twice:
            other = found[twice[0]].path.name
            raise UserError(f"{file} and {other} of {folder} both have {shorten(twice[0])}; copy the folder again.")
        unlisted = sorted(here.keys() - names) if names is not None else []
        if unlisted:
            raise UserError(f"{folder / file} has {shorten(unlisted[0])}, which {INDEX} does not list; copy it again.")
        found |= here
    return found


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """The files that have the weights, and of each the tensors that the index says it has."""
    if (folder / "model.safetensors").exists():
        return {"model.safetensors": None}
    if not (folder / INDEX).exists():
        pickle = next((path.name for path in sorted(folder.iterdir()) if _PICKLES.fullmatch(path.name)), None)
        if pickle is not None:
            raise UserError(
                f"{folder} has its weights in {shorten(pickle)}, a pickle, which can run code and is not read; save "
                "the model as safetensors."
            )
        raise UserError(f"{folder} has no model.safetensors; give a folder that transformers has saved.")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{folder / INDEX} has no weight_map; copy the folder again.")
    shards: dict[str, set[str] | None] = {}
    for name, file in places.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise UserError(
                f"{folder / INDEX} names {shorten(file)}, which is no safetensors file of the folder; copy the folder "
                "again."
            )
        names = shards.setdefault(file, set())
        assert names is not None
        names.add(name)
    return shards


def _open(path: Path, opened: contextlib.ExitStack) -> Iterator[Saved]:
    """The tensors of a file, which stays open as long as `opened`."""
    from safetensors import safe_open

    try:
        if not path.is_file():  # a pipe would be waited for
            raise UserError(f"There is no file {path}; copy the folder again.")
        with open(path, "rb") as file:
            start = file.read(8)
        if len(start) == 8 and struct.unpack("<Q", start)[0] > _LARGEST_HEADER:
            raise UserError(f"{path} is no whole safetensors file (its header is too large); copy it again.")
        found = opened.enter_context(safe_open(path, "pt"))
        saved = []
        for name in found.keys():  # noqa: SIM118 - no dictionary
            tensor = found.get_slice(name)
            saved.append(Saved(found, path, name, tuple(tensor.get_shape()), tensor.get_dtype()))
    except UserError:
        raise
    except Exception as error:  # safetensors' own, the system's, and what PyTorch says of an empty file
        raise _damaged(path, error) from error
    yield from saved


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is no whole safetensors file ({_short(error)}); copy it again.")


def _short(error: Exception) -> str:
    """An error on one line."""
    return (str(error) or type(error).__name__).splitlines()[0][:200].rstrip(".")


def read_tokenizer(folder: Path) -> bytes | None:
    """The content of a folder's tokenizer.json, if it has one."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_TOKENIZER:
            raise ValueError
        content = path.read_bytes()
        sound = isinstance(json.loads(content).get("model"), dict)
    except (OSError, ValueError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise UserError(f"{path} is no tokenizer; copy it again, or take it out of the folder.")
    return content
