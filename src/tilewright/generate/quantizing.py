"""Quantize a Hugging Face folder block by block, and measure on the way what that costs.

One block is in memory at a time, with what some texts become in it: those that calibrate, and those that check, once as
the model has them and once as the quantized one has. So both models are compared, and neither is in memory.

    FOLDER/config.json             with a quantization_config that names the format of each layer
    FOLDER/model.safetensors       or several and an index; the layers have their names, `weight`, `scale` and `zero`
    FOLDER/quantized.json          sizes and hashes of these, the report and the quality
    FOLDER/tokenizer.json, ...     as they were
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.errors import UserError
from tilewright.generate.blocks import Blocks, State
from tilewright.generate.folder_writer import FolderWriter
from tilewright.generate.load import Parts, open_huggingface
from tilewright.measure.results import write_json
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.quantize.apply import MOST_ERROR, quantize_
from tilewright.quantize.facts import METHOD, describe, metadata, write_facts
from tilewright.quantize.formats import Format
from tilewright.quantize.quality import Comparison, Quality
from tilewright.quantize.report import Layer, Report
from tilewright.quantize.store import refuse_taken, write_folder

Progress = Callable[[str, int, int], None]
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "generation_config.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How a folder is quantized.

    Attributes:
        config: the format of the blocks' matmuls.
        head: the format of the head; None: it stays.
        calibrate, act_order, most_error: as of `quantize_`.
        keep: patterns of names of layers that stay, such as "*.down_proj".
    """

    config: Format
    head: Format | None
    calibrate: str = ""
    act_order: bool = False
    most_error: float = MOST_ERROR
    keep: tuple[str, ...] = ()

    def keeps(self, names: Sequence[str]) -> bool:
        """Whether a matmul of layers with these names stays."""
        return any(fnmatch(name, pattern) for name in names for pattern in self.keep)


def quantize_folder(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], plan: Plan, *, samples: Tensor | None = None,
    check: Tensor | None = None, device: torch.device | str = "cpu", progress: Progress = lambda *_: None,
) -> tuple[Report, Quality | None]:  # fmt: skip
    """Write a quantized folder, whole or not at all; returns what each layer and the whole model have lost.

    transformers' ``from_pretrained``, ``tilewright generate`` and ``tilewright.quantize.load`` read it.

    Args:
        folder: a Llama, Qwen2, Qwen3 or GPT-2 of Hugging Face, not quantized.
        out: the folder to make; it must not be there, or be empty.
        plan: how.
        samples: tokens ``(windows, length)`` to calibrate and to measure the error of outputs on.
        check: tokens ``(windows, length)`` to compare both models on.
        device: where blocks compute: on a CPU in float32, else in the dtype they were saved in.
        progress: called with (label, done, total).
    """
    folder, out = Path(folder), Path(out)
    refuse_taken(out)
    done: list[tuple[Report, Quality | None]] = []

    def write(made: Path) -> None:
        with contextlib.ExitStack() as opened:
            found, model = open_huggingface(folder, opened)
            if found.stored:
                raise UserError(f"{folder} is quantized already; give the folder that it was made from.")
            dtype = torch.float32 if torch.device(device).type == "cpu" else found.dtype
            work = _Work(Blocks(found, model, device, dtype), plan, made)
            done.append(work.run(folder, samples, check, progress))

    with torch.no_grad():
        write_folder(out, write)
    return done[0]


class _Work:
    """One folder on its way."""

    def __init__(self, blocks: Blocks, plan: Plan, made: Path) -> None:
        known = [each.options() for each in (plan.config, plan.head) if each is not None]
        self._blocks, self._plan = blocks, plan
        self._writer = FolderWriter(made, metadata({str(place): each for place, each in enumerate(known)}))
        self._formats: dict[str, dict[str, Any]] = {}  # of each layer of theirs
        self._layers: list[Layer] = []
        self._notes: list[str] = []

    def run(
        self, folder: Path, samples: Tensor | None, check: Tensor | None, progress: Progress
    ) -> tuple[Report, Quality | None]:
        """Quantize, compare and write everything."""
        blocks, total = self._blocks, self._blocks.count + 1
        self._refuse_shapes()
        states = [blocks.embed(window) for window in _windows(samples)]
        truth = [blocks.embed(window) for window in _windows(check)]
        found = list(truth)
        for name in blocks.other_tensors():
            self._copy(name)
        for place in range(blocks.count):
            progress("Quantizing", place, total)
            block, parts = blocks.block(place), blocks.parts_of_block(place)
            truth = [block(*state) for state in truth]
            self._quantize(block, parts, self._plan.config, states)
            states = [block(*state) for state in states]
            found = [block(*state) for state in found]
            self._write(block, parts)
        progress("Quantizing", blocks.count, total)
        quality = self._end(states, truth, found, check)
        report = self._finish(folder, quality)
        progress("Quantizing", total, total)
        return report, quality

    def _refuse_shapes(self) -> None:
        """Say what cannot be before any work is done."""
        saved, plan, names = self._blocks.found.saved, self._plan, ["lm_head"]
        for place in range(self._blocks.count):
            for name, parts in self._blocks.parts_of_block(place).items():
                layers = _layers(parts)
                names += layers
                if len(saved[parts[0]].shape) == 2 and name.endswith(".weight") and not plan.keeps(layers):
                    shape = saved[parts[0]].shape
                    inputs = shape[0] if self._blocks.found.is_transposed else shape[1]
                    plan.config.refuse_shape(0, inputs, f"The weight of {_joined(layers)}")
        idle = next((each for each in plan.keep if not any(fnmatch(name, each) for name in names)), None)
        if idle is not None:
            raise UserError(f"--keep {idle} names no layer; give a pattern such as '*.down_proj'.")

    def _quantize(self, module: nn.Module, parts: Parts, config: Format | None, states: Sequence[State]) -> None:
        """Quantize the matmuls of a block, or of the head, in place."""
        plan, names = self._plan, dict[str, list[str]]()
        if config is None:
            return
        for name, tensors in parts.items():
            owner, _, last = name.rpartition(".")
            matmul, layers = module.get_submodule(owner), _layers(tensors)
            if last == "weight" and type(matmul) is nn.Linear and not plan.keeps(layers):
                names[owner] = layers
                config.refuse(matmul.weight, f"The weight of {_joined(layers)}")
        if not names:
            return
        report = quantize_(
            module, config, lambda _, name: name in names, inputs=list(states) or None,
            calibrate=plan.calibrate if states else "", act_order=plan.act_order and bool(states),
            most_error=plan.most_error,
        )  # fmt: skip
        for layer in report.layers:
            size = layer.outputs * layer.inputs * self._blocks.found.dtype.itemsize  # as it is in the folder
            after = size if layer.left_out else layer.bytes_after
            name = _joined(names[layer.name])
            self._layers.append(replace(layer, name=name, bytes_before=size, bytes_after=after))
        for note in report.notes:
            local, _, rest = note.partition(":")
            self._notes.append(f"{_joined(names.get(local, [local]))}:{rest}")

    def _end(
        self, states: Sequence[State], truth: Sequence[State], found: Sequence[State], check: Tensor | None
    ) -> Quality | None:
        """Quantize the head, compare the logits that both models end with, and write the head."""
        whole, head, comparison = self._blocks.head(), self._blocks.head(), Comparison()
        parts = self._blocks.parts_of_head()
        self._quantize(head, parts, self._plan.head, states)
        for window, one, other in zip(_windows(check), truth, found, strict=True):
            comparison.add(whole(*one)[0], head(*other)[0], window[0])
        if self._blocks.is_tied:
            if isinstance(head.head, QuantizedLinear):
                self._notes.append("lm_head shared its weight with the embedding, which stays, and has its own now.")
            else:
                del parts["head.weight"]
        self._write(head, parts)
        return comparison.quality() if truth else None

    def _write(self, module: nn.Module, parts: Parts) -> None:
        """Write the tensors of a block or of the head: quantized layers, and all else as it was."""
        for name, tensors in parts.items():
            owner, _, last = name.rpartition(".")
            layer = module.get_submodule(owner)
            if last == "weight" and isinstance(layer, QuantizedLinear):
                self._split(layer, tensors)
            else:
                for tensor in tensors:
                    self._copy(tensor)

    def _split(self, layer: QuantizedLinear, tensors: Sequence[str]) -> None:
        """Write to each layer of theirs its rows of a quantized one."""
        first, options = 0, describe(layer)
        for name in _layers(tensors):
            rows = slice(first, first + self._outputs(f"{name}.weight", layer))
            first = rows.stop
            self._formats[name] = options
            self._writer.add(f"{name}.weight", layer.weight[rows])
            for key, values in (("scale", layer.scale), ("zero", layer.zero)):
                if values is not None:
                    self._writer.add(f"{name}.{key}", values[rows] if values.ndim == 1 else values[:, rows])

    def _outputs(self, tensor: str, layer: QuantizedLinear) -> int:
        """The outputs of a layer of theirs: all where it is alone."""
        found = self._blocks.found
        if found.is_transposed or tensor not in found.saved:
            return layer.out_features
        return found.saved[tensor].shape[0]

    def _copy(self, tensor: str) -> None:
        self._writer.add(tensor, self._blocks.found.saved[tensor].load())

    def _finish(self, folder: Path, quality: Quality | None) -> Report:
        """Write what goes with the weights."""
        if not self._formats:
            raise UserError("No layer was quantized: each is kept, or errs by more than is allowed.")
        made, found = self._writer.folder, self._blocks.found
        self._writer.finish()
        raw = {**found.raw, "quantization_config": {"quant_method": METHOD, "layers": self._formats}}
        if "lm_head" in self._formats:
            raw["tie_word_embeddings"] = False  # a packed head is no embedding
        write_json(made / "config.json", raw)
        for name in _COPIED:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, made / name)
        before = sum(torch.Size(each.shape).numel() * found.dtype.itemsize for each in found.saved.values())
        report = Report(self._plan.config.name, before, self._writer.bytes, self._layers, self._notes)
        write_facts(
            made, self._formats, report=report.as_dict(), quality=None if quality is None else quality.as_dict()
        )
        return report


def _windows(tokens: Tensor | None) -> Iterator[Tensor]:
    """Tokens (1, length), window by window."""
    yield from () if tokens is None else tokens.split(1)


def _layers(tensors: Sequence[str]) -> list[str]:
    """The layers that weights are of."""
    return [name.removesuffix(".weight") for name in tensors]


def _joined(layers: Sequence[str]) -> str:
    """Layers that are one matmul as a report names them.

    >>> _joined(["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"])
    'model.layers.0.mlp.gate_proj, up_proj'
    """
    return ", ".join([*layers[:1], *(name.rpartition(".")[2] for name in layers[1:])])
