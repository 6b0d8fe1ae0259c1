"""A trained GPT for others: its weights alone, or a folder that Hugging Face transformers loads without remote code.

`huggingface` has their names of fields and tensors, `import_` the way back. Dropout ends with training and is no part
of a Llama's configuration.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tilewright.errors import UserError
from tilewright.measure.results import write_json
from tilewright.models import GPT
from tilewright.plan.gpt import ADDED, GPTConfig
from tilewright.train.checkpoint import newest, read
from tilewright.train.checkpoint_format import read_facts
from tilewright.train.huggingface import parts, to_json
from tilewright.train.load_config import from_dict

if TYPE_CHECKING:
    from tilewright.generate import Generator

MOST_POSITIONS = 1 << 28  # times the size of a head: two million with heads of 128


def export_safetensors(model: torch.nn.Module, path: Path) -> None:
    """Write a model's weights under its own names, a tied one once.

    >>> from safetensors.torch import load_file
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> export_safetensors(torch.nn.Linear(3, 2), path)
    >>> sorted(load_file(path))
    ['bias', 'weight']
    """
    from safetensors.torch import save_model

    write_whole(path, lambda temporary: save_model(model, str(temporary), metadata={"format": "pt"}))


def export_huggingface(model: GPT, folder: Path, tokenizer: bytes | None = None) -> None:
    """Write `config.json` and `model.safetensors`, which ``AutoModelForCausalLM.from_pretrained`` loads.

    Args:
        model: the model.
        folder: the folder to make.
        tokenizer: the content of its tokenizer.json, which ``AutoTokenizer.from_pretrained`` loads; see `tokenizer_of`.
    """
    from safetensors.torch import save_file

    configuration, state = to_json(model.config), model.state_dict()
    refuse_taken(folder)
    weights = {name: part.of(state) for name, part in parts(model.config).items()}
    configuration["torch_dtype"] = str(model.token.weight.dtype).removeprefix("torch.")

    def write(temporary: Path) -> None:
        temporary.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
        write_json(temporary / "config.json", configuration)
        if tokenizer is not None:
            (temporary / "tokenizer.json").write_bytes(tokenizer)
            write_json(temporary / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})

    write_whole(folder, write)


def generator_of(
    folder: Path, *, device: torch.device | str, dtype: torch.dtype | None = None, weights: str = "", **options: Any
) -> Generator:
    """The generator of a Hugging Face folder, or of a run of `tilewright train` or one of its checkpoints.

    Args:
        folder: of the model.
        device, dtype: where and as what it is loaded.
        weights: "int8", "fp8" or "int4" to quantize it as it is loaded.
        options: of `Generator`.
    """
    from tilewright.generate import Generator, Tokenizer, from_gpt
    from tilewright.generate.weights import narrow

    if not folder.is_dir() or (folder / "config.json").exists():
        generator = Generator.from_folder(folder, device=device, dtype=dtype, **options)
    else:
        model = from_gpt(load_model(folder), device=device, dtype=dtype)
        content, why = tokenizer_of(folder)
        if content is None:
            raise UserError(why)
        generator = Generator(model, Tokenizer(content, model.config.shape.vocabulary), **options)
    if weights:
        narrow(generator.model, weights)
    return generator


def tokenizer_of(source: Path) -> tuple[bytes | None, str]:
    """The tokenizer.json of a run's newest checkpoint; None, and a sentence that says why, where there is none."""
    data = _facts(source)[1].get("configuration", {}).get("data", {})
    kind, name = (data.get(each) for each in ("kind", "tokenizer")) if isinstance(data, dict) else (None, None)
    if kind != "text" or not isinstance(name, str):
        return (
            None,
            "The run was not trained on text: its tokenizer is not known; put tokenizer.json beside the model.",
        )
    if name == "bytes":
        return json.dumps(byte_tokenizer(), ensure_ascii=False).encode(), ""
    try:
        content = Path(name).read_bytes()
        sound = isinstance(json.loads(content).get("model"), dict)  # a checkpoint may name any file: take no other
    except (OSError, ValueError, AttributeError, RecursionError):
        sound = False
    if not sound:
        return None, f"There is no tokenizer.json at {name} any more; put it beside the model."
    return content, ""


def byte_tokenizer() -> dict[str, Any]:
    """A tokenizer.json whose tokens are the 256 bytes.

    >>> byte_tokenizer()["model"]["vocab"]["A"]
    65
    """
    # Byte-level tokenizers write a byte that is no printable character as one of those behind the first 256.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {letters[byte]: byte for byte in range(256)}, "merges": [],
        },
    }  # fmt: skip


def refuse_taken(folder: Path) -> None:
    """Refuse to write where something is."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already and not empty; choose another folder.")


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file or folder, and give it its name once it is there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
            write(Path(folder) / path.name)
            _share(Path(folder))
            os.replace(Path(folder) / path.name, path)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}; choose another place.") from error


def _share(folder: Path) -> None:
    """Give every file the permissions that a new one has here; safetensors makes its own readable by nobody else."""
    new = folder / ".new"
    new.touch()
    mode = new.stat().st_mode & 0o777
    new.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _facts(source: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that is meant, and its facts."""
    if (source / "trials.jsonl").exists() or (source / "study.db").exists():
        raise UserError(
            f"{source} is a study, which keeps no weights; train its answer with `tilewright train "
            f"{source / 'best.yaml'}` and export that run."
        )
    path = next((found for found in (newest(source), newest(source / "checkpoints")) if found), source)
    if source.is_dir() and not (path / "manifest.json").exists():
        if any(source.glob("*.safetensors")):
            raise UserError(f"{source} has weights and no config.json; copy it from the model's folder, too.")
        raise UserError(f"There is no checkpoint in {source}; give a run's folder, or a step-... folder of one.")
    return path, read_facts(path) if path.is_dir() else {}


def load_model(source: Path) -> GPT:
    """The model of a checkpoint, or of the newest one of a run, in the dtypes it was trained in."""
    path, _ = _facts(source)
    state, facts = read(path, "model")
    try:
        fields = {**ADDED, **facts["configuration"]["model"]}
        given = {field.name: fields[field.name] for field in dataclasses.fields(GPTConfig)}
        checked = vars(from_dict({"model": given}).model)
        config = GPTConfig(**{name: checked[name] for name in given})
    except (KeyError, TypeError, UserError) as error:
        raise UserError(f"{path} does not say which GPT it is of; give a checkpoint of `tilewright train`.") from error
    other = UserError(f"The weights of {path} are not of the GPT it names; give another checkpoint.")
    # A forged shape must not be built: a block takes memory even without weights, and so do the tables of positions.
    if config.layers > len(state) or config.sequence * config.head_dim > MOST_POSITIONS:
        raise other
    try:
        with torch.device("meta"):
            model = GPT(config)
        model.load_state_dict(state, assign=True)
    except (RuntimeError, TypeError) as error:  # the latter where a size overflows
        raise other from error
    if model.rope is not None:
        model.rope.to_empty(device="cpu")  # which makes its tables anew
    return model
