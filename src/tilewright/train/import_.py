"""A GPT-2 or Llama of Hugging Face as one of ours: the way back from `export`.

A folder from a stranger is data: its config.json is JSON, its weights are safetensors. A pickle is never read, code
that the folder brings or names never run, and transformers is not needed. Before the first byte of a tensor is read,
the names and shapes of all of them are those that config.json calls for, neither more nor fewer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor

from tilewright.errors import UserError
from tilewright.measure.machine import describe, host_memory_bytes
from tilewright.measure.results import write_text
from tilewright.models import GPT
from tilewright.models.folder import Saved, open_tensors, read_tokenizer
from tilewright.plan.gpt import LEVERS, GPTConfig
from tilewright.plan.huggingface.config import read_json, shorten
from tilewright.train.checkpoint import WEIGHTS_ALONE, Checkpoints
from tilewright.train.export import MOST_POSITIONS, refuse_taken, write_whole
from tilewright.train.huggingface import Part, from_json, parts, prefix_of
from tilewright.train.load_config import from_dict
from tilewright.train.sentences import short

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
    tokenizer = read_tokenizer(folder)
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


def _tensors(folder: Path, config: GPTConfig, opened: contextlib.ExitStack) -> dict[str, Saved]:
    """Every tensor of the folder by the full name of it, but tables that a model makes by itself."""
    found = open_tensors(folder, opened)
    prefix = prefix_of(config)
    if not any(name.startswith(prefix) for name in found):  # saved without its head
        found = {name if name == "lm_head.weight" else prefix + name: saved for name, saved in found.items()}
    return {name: saved for name, saved in found.items() if not _TABLES.fullmatch(name)}


def _compare(folder: Path, model: GPT, tensors: dict[str, Saved]) -> None:
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


def _state(config: GPTConfig, tensors: dict[str, Saved]) -> dict[str, Tensor]:
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
