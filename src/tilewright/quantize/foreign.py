"""Folders of 4-bit models that others published: GPTQ and AWQ. They are parsed, and nothing in them is executed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.huggingface import read_json, shorten
from tilewright.quantize.formats.awq import read_awq
from tilewright.quantize.formats.gptq import read_gptq
from tilewright.quantize.formats.words import Read

_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def read_folder(folder: str | os.PathLike[str]) -> Iterator[tuple[str, Read]]:
    """The quantized layers of a folder as Hugging Face has it, one after the other, by the name of the linear layer.

    `config.json`, or the `quantize_config.json` of older ones, says which format it is; weights are safetensors. A
    layer's tensors are read when it is its turn.

    >>> import json, tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = Path(tempfile.mkdtemp())
    >>> settings = {"quant_method": "awq", "bits": 4, "version": "gemm"}
    >>> _ = (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    >>> layer = {"qweight": torch.zeros(64, 2).int(), "qzeros": torch.zeros(1, 2).int(), "scales": torch.ones(1, 16)}
    >>> save_file({f"head.{key}": tensor for key, tensor in layer.items()}, folder / "model.safetensors")
    >>> [(name, read.format.group) for name, read in read_folder(folder)]
    [('head', 64)]
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    reader = _reader(folder)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"{folder} has no safetensors file; download the whole folder.")
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} is no whole safetensors file ({error}); download it again.") from error
            where |= dict.fromkeys(file.keys(), file)
        names = [key.removesuffix(".qweight") for key in where if key.endswith(".qweight")]
        if not names:
            raise UserError(f"{folder} has no layer of GPTQ or AWQ: no tensor is named qweight.")
        for name in sorted(names):
            keys = {part: f"{name}.{part}" for part in _PARTS if f"{name}.{part}" in where}
            tensors = {part: where[key].get_tensor(key) for part, key in keys.items()}
            yield name, reader(tensors, name=shorten(name))


def _reader(folder: Path) -> Callable[..., Read]:
    """How this folder's layers are read."""
    settings = _settings(folder)
    method, bits = settings.get("quant_method", "gptq"), settings.get("bits", settings.get("w_bit"))
    kind = settings.get("version", "gemm") if method == "awq" else settings.get("checkpoint_format", "gptq")
    if bits != 4 or type(bits) is not int:
        raise UserError(f"{folder} has weights of {shorten(bits)} bits; GPTQ and AWQ of 4 bits can be read.")
    if method == "awq" and str(kind).lower() == "gemm":
        return read_awq
    if method == "gptq" and kind in ("gptq", "gptq_v2"):
        return partial(read_gptq, v2=kind == "gptq_v2")
    raise UserError(
        f"{folder} is quantized by {shorten(method)} as {shorten(kind)}; gptq as gptq or gptq_v2, and "
        "awq as gemm, can be read."
    )


def _settings(folder: Path) -> Mapping[str, Any]:
    """What a folder says of how it is quantized."""
    for name in ("config.json", "quantize_config.json"):
        if (folder / name).is_file():
            found = read_json(folder / name)
            settings = found.get("quantization_config") if name == "config.json" else found
            if isinstance(settings, Mapping):
                return settings
    raise UserError(f"{folder} does not say how it is quantized: its config.json has no quantization_config.")
