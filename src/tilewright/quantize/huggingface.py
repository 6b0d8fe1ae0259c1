"""Quantized models through transformers' `from_pretrained` and `save_pretrained`.

`config_class` imports transformers and registers the method "tilewright"; ``quantize.TilewrightConfig`` calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from tilewright.errors import UserError
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.plan.huggingface.config import shorten
from tilewright.quantize.apply import MOST_ERROR, quantize_
from tilewright.quantize.facts import FACTS, METHOD, check_files, describe, read_facts
from tilewright.quantize.formats import Format, Int8, format_of
from tilewright.quantize.layers import linear_layers


@functools.cache
def config_class() -> Any:
    """`TilewrightConfig`, with which ``from_pretrained`` quantizes; afterwards it reads our folders, too."""
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @register_quantization_config(METHOD)
    class TilewrightConfig(QuantizationConfigMixin):  # type: ignore[misc]
        """How ``from_pretrained`` quantizes a model; and, of a folder, how it was quantized.

        Args:
            config: the format, such as ``Int4(group=64)``; ``Int8()`` where it is left out.
            keep: patterns of names of layers that stay, such as "lm_head".
            inputs, calibrate, act_order, most_error: as of `quantize_`.
            layers: the options of each quantized layer's format, of a folder.
        """

        def __init__(
            self, config: Format | None = None, *, keep: Sequence[str] = (), inputs: Any = None, calibrate: str = "",
            act_order: bool = False, most_error: float = MOST_ERROR, layers: Mapping[str, Any] | None = None,
            **more: Any,
        ) -> None:  # fmt: skip
            method = more.pop("quant_method", METHOD)
            if more or method != METHOD:
                raise UserError(f"quantization_config has {', '.join(sorted(more)) or shorten(method)}, unknown here.")
            if config is not None and not isinstance(config, Format):
                raise UserError(f"The format is {config!r}; give one such as tilewright.quantize.Int8().")
            if isinstance(keep, str):
                raise UserError(f"keep is the string {keep!r}; give a list of patterns.")
            self.quant_method: Any = METHOD
            self.config = Int8() if config is None else config
            self.keep, self.inputs, self.calibrate, self.act_order = tuple(keep), inputs, calibrate, act_order
            self.most_error, self.layers = most_error, layers

        def to_dict(self) -> dict[str, Any]:
            """What config.json says."""
            return {"quant_method": self.quant_method, "layers": dict(self.layers or {})}

    @register_quantizer(METHOD)
    class Quantizer(HfQuantizer):  # type: ignore[misc]
        """Puts quantized layers into a model before weights are read, or quantizes one that has been read."""

        quantization_config: Any

        def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **more: Any) -> Any:
            if self.pre_quantized:
                _put_empty_layers(model, self.quantization_config.layers, [Path(p) for p in checkpoint_files or ()])
            return model

        def _process_model_after_weight_loading(self, model: Any, **more: Any) -> Any:
            if self.pre_quantized:
                _check_layers(model, self.quantization_config.layers)
            else:
                _quantize(model, self.quantization_config)
            return model

        def is_serializable(self) -> bool:
            """``save_pretrained`` writes what ``from_pretrained`` reads."""
            return True

        @property
        def is_trainable(self) -> bool:
            """Packed weights get no gradient."""
            return False

    return TilewrightConfig


def _put_empty_layers(model: torch.nn.Module, layers: Any, files: Sequence[Path]) -> None:
    """Replace the layers that a folder has quantized, if its files have what is needed."""
    if not isinstance(layers, Mapping) or not layers:
        raise UserError("quantization_config does not say which layers are quantized; copy the folder again.")
    made = _empty_layers(model, layers)
    _check_checkpoint(made, files)
    for site, layer in made.values():
        site.replace(model, layer)


def _check_layers(model: torch.nn.Module, layers: Mapping[str, Any]) -> None:
    """Refuse values that no quantized layer can have."""
    for name, module in model.named_modules():
        if type(module) is QuantizedLinear:
            tensors = {key: each for key, each in module._buffers.items() if each is not None}
            format_of(layers[name], name).check(tensors, module.out_features, module.in_features, name)


def _quantize(model: torch.nn.Module, config: Any) -> None:
    """Quantize a model as its configuration says, and write there what has become of it."""
    names = [site.name for site in linear_layers(model)]
    for pattern in config.keep:
        if not any(fnmatch(name, pattern) for name in names):
            raise UserError(f"keep has {pattern!r}, which names no linear layer; give a pattern such as '*.down_proj'.")
    quantize_(
        model, config.config, lambda _, name: not any(fnmatch(name, pattern) for pattern in config.keep),
        inputs=config.inputs, calibrate=config.calibrate, act_order=config.act_order, most_error=config.most_error,
    )  # fmt: skip
    named = model.named_modules()
    config.layers = {name: describe(module) for name, module in named if type(module) is QuantizedLinear}
    _untie(model)


def _empty_layers(model: torch.nn.Module, layers: Mapping[str, Any]) -> dict[str, tuple[Any, QuantizedLinear]]:
    """(the place, a layer without values) for each name."""
    sites = {site.name: site for site in linear_layers(model)}
    made = {}
    for name, options in layers.items():
        site = sites.get(name)
        if site is None:
            raise UserError(f"config.json has {shorten(name)} quantized, which is no linear layer of the model.")
        parts = {
            key: torch.empty(shape, dtype=dtypes[0], device="meta")
            for key, (shape, dtypes) in format_of(options, name).shapes(*site.matrix.shape).items()
        }
        made[name] = site, QuantizedLinear(parts["weight"], parts["scale"], parts.get("zero"), site.bias)
    return made


def _check_checkpoint(made: Mapping[str, tuple[Any, QuantizedLinear]], files: Sequence[Path]) -> None:
    """Refuse files that are not those that were written, or have other tensors for the quantized layers."""
    from safetensors import SafetensorError, safe_open

    if files and (files[0].parent / FACTS).is_file():
        check_files(files[0].parent, read_facts(files[0].parent))
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} is no whole safetensors file; copy the folder again.") from error
    for name, (_, layer) in made.items():
        for key, buffer in layer._buffers.items():
            if files and buffer is not None and shapes.get(f"{name}.{key}") != tuple(buffer.shape):
                raise UserError(
                    f"{key} of {name} is not in the folder with shape {tuple(buffer.shape)}, as config.json says; copy "
                    "the folder again."
                )


def _untie(model: Any) -> None:
    """Have a packed head be no embedding any more, for `save_pretrained` and its readers."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if type(head) is QuantizedLinear and getattr(model.config, "tie_word_embeddings", False):
        model.config.tie_word_embeddings = False
        tied = getattr(model, "all_tied_weights_keys", {})
        for name in [name for name in tied if model.get_submodule(name.rpartition(".")[0]) is head]:
            del tied[name]
