"""A GPT-2 or Llama of Hugging Face as one of ours: the way back from `export`.

A folder from a stranger is data: its config.json is JSON, its weights are safetensors. A pickle is never read, code
that the folder brings or names never run, and transformers is not needed. Before the first byte of a tensor is read,
the names and shapes of all of them are those that config.json calls for, neither more nor fewer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from tilewright.errors import UserError
from tilewright.measure.machine import describe, host_memory_bytes
from tilewright.measure.results import write_text
from tilewright.models import GPT
from tilewright.plan.gpt import LEVERS, GPTConfig
from tilewright.plan.huggingface import read_json, shorten
from tilewright.train.checkpoint import WEIGHTS_ALONE, Checkpoints
from tilewright.train.checkpoint_format import short
from tilewright.train.export import MOST_POSITIONS, refuse_taken, write_whole
from tilewright.train.huggingface import Part, from_json, parts, prefix_of
from tilewright.train.load_config import from_dict

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors")
_PICKLES = re.compile(r".*\.(bin|pt|pth|ckpt|pkl)")
_LARGEST_HEADER = 1 << 25  # bytes of a safetensors file's list of tensors; large ones have 100,000
_LARGEST_TOKENIZER = 1 << 27
_DTYPES = ("F64", "F32", "F16", "BF16")
# Tables that older versions of transformers saved, and every version makes by itself.
_TABLES = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Imported:
    """What `import_run` has made, and sentences about what it left out."""

    model: GPT
    notes: list[str]


def import_huggingface(folder: Path) -> GPT:
    """The model of a Hugging Face folder, in the dtype it was saved in.

    >>> import tempfile
    >>> from tilewright.plan.gpt import LLAMA
    >>> from tilewright.train.export import export_huggingface
    >>> model = GPT(GPTConfig(width=16, layers=1, heads=2, vocabulary=32, sequence=8, **LLAMA))
    >>> folder = Path(tempfile.mkdtemp()) / "llama"
    >>> export_huggingface(model, folder)
    >>> tokens = torch.arange(8)[None]
    >>> torch.equal(import_huggingface(folder)(tokens), model(tokens))
    True
    """
    return _read(folder)[0]


def import_run(folder: Path, out: Path) -> Imported:
    """Make a run's folder of a Hugging Face folder: config.yaml, and a checkpoint of step 0 that has weights alone.

    `tilewright train OUT/config.yaml` begins there, with an optimizer of its own.
    """
    refuse_taken(out)
    model, notes = _read(folder)
    tokenizer = _tokenizer(folder)
    fields = {name: value for name, value in dataclasses.asdict(model.config).items() if name not in LEVERS}
    data = {"kind": "tokens"}
    if tokenizer is None:
        notes = [*notes, f"{folder} has no tokenizer.json: train on token files that its own tokenizer has made."]
    else:
        data = {"kind": "text", "tokenizer": str(out / "tokenizer.json")}
    tree = {"out": str(out), "model": fields, "data": data}
    try:
        configuration = dataclasses.asdict(from_dict(tree))
    except UserError as error:  # the one text in it that nobody has looked at
        raise UserError(f"A configuration cannot name {shorten(str(out))}; choose another out.") from error
    facts = {
        "step": 0, "samples": 0, "data": {}, "configuration": configuration, "recent_losses": [],
        "skipped_in_a_row": 0, "machine": describe(), WEIGHTS_ALONE: True,
    }  # fmt: skip

    def write(temporary: Path) -> None:
        with contextlib.closing(Checkpoints(temporary / "checkpoints", keep=1, asynchronous=False)) as checkpoints:
            checkpoints.save(0, {"model": model.state_dict()}, facts)
        if tokenizer is not None:
            (temporary / "tokenizer.json").write_bytes(tokenizer)
        write_text(temporary / "config.yaml", yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))

    write_whole(out, write)
    return Imported(model, notes)


def _read(folder: Path) -> tuple[GPT, list[str]]:
    try:
        return _read_folder(folder)
    except OSError as error:
        raise UserError(f"Cannot read {folder}: {short(error)}; give a folder that you can read.") from error


def _read_folder(folder: Path) -> tuple[GPT, list[str]]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give one with config.json and model.safetensors.")
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json; give a folder that transformers has saved.")
    config, notes = from_json(read_json(folder / "config.json"))
    with contextlib.ExitStack() as opened:
        tensors = _tensors(folder, config, opened)
        model = _on_meta(config, len(tensors))
        _compare(folder, model, tensors)
        model.load_state_dict(_state(config, tensors), assign=True)
    if model.rope is not None:
        model.rope.to_empty(device="cpu")  # which makes its tables anew
    return model, notes


def _on_meta(config: GPTConfig, tensors: int) -> GPT:
    """The model without weights; refuse one that so many tensors cannot fill, for a block takes memory even so."""
    if config.layers > tensors:
        raise UserError(
            f"config.json calls for {config.layers} layers and there are {tensors} tensors; give the folder as it was "
            "saved."
        )
    if config.sequence * config.head_dim > MOST_POSITIONS:
        raise UserError(
            f"config.json calls for {config.sequence} positions of {config.head_dim}, which is no model's; give the "
            "folder as it was saved."
        )
    try:
        with torch.device("meta"):
            return GPT(config)
    except (RuntimeError, TypeError) as error:  # a size overflows
        raise UserError("config.json calls for tensors that cannot be; give the folder as it was saved.") from error


# The tensors, of which nothing but names, shapes and dtypes is looked at before they are known to be the model's


@dataclass(frozen=True)
class _Saved:
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


def _tensors(folder: Path, config: GPTConfig, opened: contextlib.ExitStack) -> dict[str, _Saved]:
    """Every tensor of the folder by the full name of it, but tables that a model makes by itself."""
    found: dict[str, _Saved] = {}
    listed = _shards(folder)
    for file, names in listed.items():
        here = {saved.name: saved for saved in _open(folder / file, opened)}
        missing = sorted((names or here.keys()) - here.keys())
        if missing:
            raise UserError(f"{folder / file} lacks {shorten(missing[0])}, which {_INDEX} says it has; copy it again.")
        twice = sorted(here.keys() & found.keys())
        if twice:
            other = found[twice[0]].path.name
            raise UserError(f"{file} and {other} of {folder} both have {shorten(twice[0])}; copy the folder again.")
        unlisted = sorted(here.keys() - names) if names is not None else []
        if unlisted:
            raise UserError(f"{folder / file} has {shorten(unlisted[0])}, which {_INDEX} does not list; copy it again.")
        found |= here
    prefix = prefix_of(config)
    if not any(name.startswith(prefix) for name in found):  # saved without its head
        found = {name if name == "lm_head.weight" else prefix + name: saved for name, saved in found.items()}
    return {name: saved for name, saved in found.items() if not _TABLES.fullmatch(name)}


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """The files that have the weights, and of each the tensors that the index says it has."""
    if (folder / "model.safetensors").exists():
        return {"model.safetensors": None}
    if not (folder / _INDEX).exists():
        pickle = next((path.name for path in sorted(folder.iterdir()) if _PICKLES.fullmatch(path.name)), None)
        if pickle is not None:
            raise UserError(
                f"{folder} has its weights in {shorten(pickle)}, a pickle, which can run code and is not read; save "
                "the model as safetensors."
            )
        raise UserError(f"{folder} has no model.safetensors; give a folder that transformers has saved.")
    places = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{folder / _INDEX} has no weight_map; copy the folder again.")
    shards: dict[str, set[str] | None] = {}
    for name, file in places.items():
        if not isinstance(file, str) or not _SHARD.fullmatch(file):
            raise UserError(
                f"{folder / _INDEX} names {shorten(file)}, which is no safetensors file of the folder; copy the folder "
                "again."
            )
        names = shards.setdefault(file, set())
        assert names is not None
        names.add(name)
    return shards


def _open(path: Path, opened: contextlib.ExitStack) -> Iterator[_Saved]:
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
            saved.append(_Saved(found, path, name, tuple(tensor.get_shape()), tensor.get_dtype()))
    except UserError:
        raise
    except Exception as error:  # safetensors' own, the system's, and what PyTorch says of an empty file
        raise _damaged(path, error) from error
    yield from saved


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is no whole safetensors file ({short(error).rstrip('.')}); copy it again.")


def _compare(folder: Path, model: GPT, tensors: dict[str, _Saved]) -> None:
    """Refuse a folder whose tensors are not the model's."""
    advice = "give the folder as it was saved"
    expected, state = parts(model.config), model.state_dict()
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise UserError(f"{folder} lacks {_listed(missing)}, which config.json calls for; {advice}.")
    more = sorted(tensors.keys() - expected.keys() - ({"lm_head.weight"} if model.config.tied else set()))
    if more:
        raise UserError(f"{folder} has {_listed(more)}, for which config.json has no place; {advice}.")
    for name, saved in tensors.items():
        part = expected.get(name, Part("token.weight"))
        wanted = tuple(part.of(state).shape)
        if saved.shape != wanted:
            raise UserError(
                f"{saved.path}: {shorten(name)} has shape {shorten(saved.shape)} and config.json calls for {wanted}; "
                f"{advice}."
            )
        if saved.dtype not in _DTYPES:
            raise UserError(
                f"{saved.path}: {shorten(name)} is {saved.dtype}; save the model in one of {', '.join(_DTYPES)}."
            )
    dtypes = sorted({saved.dtype for saved in tensors.values()})
    if len(dtypes) > 1:
        raise UserError(f"{folder} has tensors of {' and '.join(dtypes)}; save the model in one dtype.")
    size = {"F64": 8, "F32": 4}.get(dtypes[0], 2) * model.config.parameters
    if size > host_memory_bytes():
        raise UserError(
            f"The weights of {folder} take {size / 1e9:,.1f} GB and this machine has {host_memory_bytes() / 1e9:,.1f} "
            "GB of memory; import it on a larger one."
        )


def _listed(names: list[str]) -> str:
    return shorten(names[0]) + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")


def _state(config: GPTConfig, tensors: dict[str, _Saved]) -> dict[str, Tensor]:
    """The state of our model, in memory of its own."""
    pieces: dict[str, list[Tensor]] = {}
    for name, part in parts(config).items():
        tensor = tensors[name].load()
        pieces.setdefault(part.name, []).append(tensor.t() if part.transposed else tensor)
    head = tensors.get("lm_head.weight")
    if config.tied and head is not None and not torch.equal(head.load(), pieces["token.weight"][0]):
        raise UserError(
            f"{head.path} has an lm_head.weight of its own, and by config.json it is the embedding's; set "
            "tie_word_embeddings to false, or give the folder as it was saved."
        )
    return {name: torch.cat(found).contiguous() for name, found in pieces.items()}


def _tokenizer(folder: Path) -> bytes | None:
    """The content of its tokenizer.json, if it has one."""
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
