"""A decoder out of a Hugging Face folder or a GPT of ours.

Before the first byte of a tensor is read, the names and shapes of all of them are those that config.json calls for,
neither more nor fewer. Then one tensor after the other goes to the device: the host never holds the model twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.generate.config import MOST_POSITIONS, DecoderConfig, of_gpt, of_huggingface
from tilewright.generate.decoder import Decoder
from tilewright.generate.quantized import make_layer, open_folder
from tilewright.measure.machine import host_memory_bytes
from tilewright.models import GPT
from tilewright.models.folder import TABLES, Saved
from tilewright.plan.huggingface.config import read_json, shorten
from tilewright.quantize.folder import Stored

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ADVICE = "give the folder as it was saved"

_Kind = TypeVar("_Kind")
Parts = dict[str, list[str]]  # of ours: the tensors of theirs that lie behind each other in it


def _llama_names(config: DecoderConfig) -> Parts:
    shape = config.shape
    found = {"token.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    for layer in range(shape.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        found[f"{ours}.norm1.weight"] = [f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.norm2.weight"] = [f"{theirs}.post_attention_layernorm.weight"]
        matmuls = {
            "attention.qkv": ([f"self_attn.{name}_proj" for name in "qkv"], shape.qkv_bias),
            "attention.out": (["self_attn.o_proj"], shape.out_bias),
            "mlp.up": (["mlp.gate_proj", "mlp.up_proj"], shape.mlp_bias),
            "mlp.down": (["mlp.down_proj"], shape.mlp_bias),
        }
        for name, (parts, bias) in matmuls.items():
            for kind in ("weight", "bias") if bias else ("weight",):
                found[f"{ours}.{name}.{kind}"] = [f"{theirs}.{part}.{kind}" for part in parts]
        if shape.qk_norm:
            for each in "qk":
                found[f"{ours}.attention.{each}_norm.weight"] = [f"{theirs}.self_attn.{each}_norm.weight"]
    return found


def _gpt2_names(config: DecoderConfig) -> Parts:
    found = {"token.weight": ["transformer.wte.weight"], "position.weight": ["transformer.wpe.weight"]}
    names = {
        "norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "norm2": "ln_2",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }  # fmt: skip
    for kind in ("weight", "bias"):
        found[f"norm.{kind}"] = [f"transformer.ln_f.{kind}"]
        for layer in range(config.shape.layers):
            for ours, theirs in names.items():
                found[f"blocks.{layer}.{ours}.{kind}"] = [f"transformer.h.{layer}.{theirs}.{kind}"]
    return found


@dataclass(frozen=True)
class Opened:
    """A Hugging Face folder whose tensors are those that its config.json calls for.

    Attributes:
        raw: the parsed config.json.
        names: for each tensor of ours, those of theirs that lie behind each other in it.
        saved: the tensors of theirs that are not of a quantized layer.
        stored: the quantized layers.
        dtype: of all tensors of `saved`.
        is_transposed: their weights of blocks are (in, out), as the first GPT-2's were.
    """

    raw: dict[str, Any]
    config: DecoderConfig
    names: Parts
    saved: Mapping[str, Saved]
    stored: Mapping[str, Stored]
    dtype: torch.dtype
    is_transposed: bool

    def load(self, name: str) -> Tensor:
        """A tensor of ours, in the dtype and the memory of the file where it is one of theirs."""
        parts = [self.saved[part].load() for part in self.names[name]]
        if self.is_transposed and _is_matmul(name):
            parts = [part.t() for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def open_huggingface(folder: Path, opened: contextlib.ExitStack) -> tuple[Opened, Decoder]:
    """A folder whose files stay open as long as `opened`, and its decoder without values."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give one with config.json and model.safetensors.")
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} has no config.json; give a folder that transformers has saved.")
    raw = read_json(folder / "config.json")
    config, is_gpt2 = of_huggingface(raw), raw["model_type"] == "gpt2"
    names = (_gpt2_names if is_gpt2 else _llama_names)(config)
    if not config.shape.tied:
        names["head.weight"] = ["lm_head.weight"]
    expected = {part for parts in names.values() for part in parts}
    is_quantized = bool(raw.get("quantization_config")) or (folder / "quantize_config.json").is_file()
    found, stored = open_folder(folder, is_quantized, expected, opened)
    prefix, every = "transformer." if is_gpt2 else "model.", [*found, *stored]
    saved, stored = _named(found, prefix, every), _named(stored, prefix, every)
    model = _on_meta(config, len(saved) + len(stored))
    _compare(folder, model, names, saved, stored, is_gpt2)
    dtype = _one_dtype(folder, saved)
    _refuse_other_head(config, names, saved)
    return Opened(raw, config, names, saved, stored, dtype, is_gpt2), model


def _check_place(device: Any, dtype: Any) -> None:
    """Refuse a device that is none here, and a dtype that no decoder computes in."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UserError(f"device is {device!r}; choose cuda or cpu.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {str(device)!r} and PyTorch sees no GPU; `tilewright doctor` says why.")
    if dtype is not None and dtype not in _DTYPES.values():
        raise UserError(f"dtype is {dtype!r}; choose torch.bfloat16, float16 or float32, or leave it out.")


def load_huggingface(
    folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Decoder:  # fmt: skip
    """The decoder of a folder with config.json and safetensors, in `dtype` or the one it was saved in.

    Quantized layers keep their formats: those of `tilewright quantize`, GPTQ, AWQ and compressed-tensors.
    """
    _check_place(device, dtype)
    with contextlib.ExitStack() as opened:
        found, model = open_huggingface(folder, opened)
        if torch.device(device).type == "cpu":
            _refuse_too_large(folder, found)
        dtype = dtype or found.dtype
        for name, parts in found.names.items():
            layers = [part.removesuffix(".weight") for part in parts]
            if name.endswith(".weight") and any(layer in found.stored for layer in layers):
                place = name.removesuffix(".weight")
                has_bias = f"{place}.bias" in found.names
                with _said_if_too_large():
                    layer = make_layer(layers, found.stored, found.saved, has_bias, device, dtype, found.is_transposed)
                model.set_submodule(place, layer)
        return _fill(model, found.load, device, dtype, found.names)


def from_gpt(model: GPT, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Decoder:
    """The decoder that computes what a GPT of ours does; it shares no memory with it.

    >>> from tilewright.plan.gpt import GPTConfig
    >>> decoder = from_gpt(GPT(GPTConfig(width=16, layers=1, heads=2, vocabulary=32, sequence=8)))
    >>> decoder.longest, decoder.blocks[0].attention.qkv.weight.shape
    (8, torch.Size([48, 16]))
    """
    state, config = model.state_dict(), of_gpt(model.config)
    gated = config.shape.gated

    def load(name: str) -> Tensor:
        if gated and ".mlp.up." in name:
            return torch.cat([state[name.replace(".up.", f".{part}_proj.")] for part in ("gate", "up")])
        return state[name.replace(".mlp.down.", ".mlp.down_proj.") if gated else name].clone()

    decoder = _on_meta(config, len(state))
    return _fill(decoder, load, device, dtype or model.token.weight.dtype, decoder.state_dict())


def _is_matmul(name: str) -> bool:
    return name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight"))


def _named(found: Mapping[str, _Kind], prefix: str, every: Sequence[str]) -> dict[str, _Kind]:
    """Tensors or layers by their full names, but tables that a model makes by itself; `every` is of both."""
    if not any(name.startswith(prefix) for name in every):  # saved without its head
        found = {name if name.startswith("lm_head") else prefix + name: saved for name, saved in found.items()}
    return {name: saved for name, saved in found.items() if not TABLES.fullmatch(name)}


def _on_meta(config: DecoderConfig, tensors: int) -> Decoder:
    """The decoder without weights; refuse one that so many tensors cannot fill, for a block takes memory even so."""
    shape = config.shape
    if shape.layers > tensors:
        raise UserError(f"config.json calls for {shape.layers} layers and there are {tensors} tensors; {_ADVICE}.")
    if max(shape.longest, shape.sequence) * shape.head_dim > MOST_POSITIONS:
        raise UserError(f"config.json calls for {shape.longest} positions, which is no model's; {_ADVICE}.")
    try:
        with torch.device("meta"):
            return Decoder(config).requires_grad_(False).eval()
    except (RuntimeError, TypeError) as error:  # a size overflows
        raise UserError(f"config.json calls for tensors that cannot be; {_ADVICE}.") from error


def _compare(
    folder: Path, model: Decoder, names: Parts, saved: Mapping[str, Saved], stored: Mapping[str, Stored], is_gpt2: bool
) -> None:
    """Refuse a folder whose tensors are not the model's."""
    expected = [part for parts in names.values() for part in parts]
    packed = {f"{name}.weight": layer for name, layer in stored.items()}
    missing = [part for part in expected if part not in saved and part not in packed]
    if missing:
        raise UserError(f"{folder} lacks {_listed(missing)}, which config.json calls for; {_ADVICE}.")
    more = sorted((saved.keys() - {"lm_head.weight"} | packed.keys()) - set(expected))
    if more:
        raise UserError(f"{folder} has {_listed(more)}, for which config.json has no place; {_ADVICE}.")
    state = dict(model.named_parameters(remove_duplicate=False))
    for name, parts in names.items():
        for part, wanted in zip(parts, _shapes(model.config, name, state[name], len(parts)), strict=True):
            wanted = wanted[::-1] if is_gpt2 and _is_matmul(name) and part not in packed else wanted
            shape = packed[part].shape if part in packed else saved[part].shape
            if shape != wanted:
                raise UserError(
                    f"{saved[part].path if part in saved else folder}: {shorten(part)} has shape {shorten(shape)} and "
                    f"config.json calls for {wanted}; {_ADVICE}."
                )


def _shapes(config: DecoderConfig, name: str, whole: Tensor, parts: int) -> Iterator[tuple[int, ...]]:
    """Of each part of one of our tensors."""
    shape = config.shape
    rows = {1: [len(whole)], 2: [shape.ffn] * 2, 3: [shape.head_dim * n for n in (shape.heads, *[shape.kv_heads] * 2)]}
    for size in rows[parts]:
        yield (size, *whole.shape[1:])


def _one_dtype(folder: Path, saved: Mapping[str, Saved]) -> torch.dtype:
    """The one dtype of all tensors; refuse others."""
    for each in saved.values():
        if each.dtype not in _DTYPES:
            raise UserError(
                f"{each.path}: {shorten(each.name)} is {each.dtype}; save the model in one of {', '.join(_DTYPES)}."
            )
    kinds = sorted({each.dtype for each in saved.values()})
    if len(kinds) != 1:
        raise UserError(f"{folder} has tensors of {' and '.join(kinds) or 'no dtype'}; save the model in one dtype.")
    return _DTYPES[kinds[0]]


def _refuse_too_large(folder: Path, found: Opened) -> None:
    """Refuse more than the host has memory for."""
    size = sum(torch.Size(each.shape).numel() for each in found.saved.values()) * found.dtype.itemsize
    size += sum(torch.Size(layer.shape).numel() for layer in found.stored.values()) // 2
    if size > host_memory_bytes():
        raise UserError(
            f"The weights of {folder} take {size / 1e9:,.1f} GB and this machine has {host_memory_bytes() / 1e9:,.1f} "
            "GB of memory; give a smaller model."
        )


def _refuse_other_head(config: DecoderConfig, names: Parts, saved: Mapping[str, Saved]) -> None:
    head = saved.get("lm_head.weight")
    if config.shape.tied and head is not None and not torch.equal(head.load(), saved[names["token.weight"][0]].load()):
        raise UserError(
            f"{head.path} has an lm_head.weight of its own, and by config.json it is the embedding's; set "
            "tie_word_embeddings to false, or give the folder as it was saved."
        )


def _fill(
    model: Decoder, load: Callable[[str], Tensor], device: torch.device | str, dtype: torch.dtype, names: Container[str]
) -> Decoder:
    """Give a decoder those weights that it has not yet, one after the other."""
    with _said_if_too_large():
        for name, empty in model.state_dict().items():
            if name not in names or not empty.is_meta or (name == "head.weight" and model.config.shape.tied):
                continue
            owner, _, last = name.rpartition(".")
            tensor = load(name).to(device=device, dtype=dtype, copy=True).contiguous()
            setattr(model.get_submodule(owner), last, torch.nn.Parameter(tensor, requires_grad=False))
    if model.config.shape.tied:
        model.head.weight = model.token.weight
    return model


@contextlib.contextmanager
def _said_if_too_large() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError("The weights do not fit the memory of the GPU; give a smaller model.") from None


def _listed(names: list[str]) -> str:
    return shorten(names[0]) + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
