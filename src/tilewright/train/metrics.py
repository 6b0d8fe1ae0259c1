"""What a step shows of itself: loss, speed, utilisation, memory, the wait for data. One JSON object a line, for good.

MFU counts the FLOPs that the model needs, HFU those that the device does: what backward computes again counts there.
Both by the convention `flops.DEFAULT`, which every record names.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright.errors import UserError
from tilewright.measure.results import write_text
from tilewright.plan.decoder import Decoder
from tilewright.plan.flops import DEFAULT, attention_flops, conventions


@dataclass(frozen=True)
class Metrics:
    """The metrics of one step. `loss` and `gradient_norm` are None where they are not finite; memory is in bytes."""

    step: int
    loss: float | None
    gradient_norm: float | None
    skipped: bool
    learning_rate: float
    samples: int
    seconds: float
    tokens_per_second: float
    tflops: float  # of each device, by the model's FLOPs
    mfu: float | None
    hfu: float | None
    convention: str
    memory_allocated: int | None  # the peak of the step
    memory_reserved: int | None
    memory_device: int | None  # in use on the device, by anybody
    data_wait: float  # seconds
    validation_loss: float | None = None  # where one was due
    slowest_rank: int | None = None  # by its own work, now and then
    slowest_times: float | None = None  # the median of the others
    largest_share: float | None = None  # of the tokens of a layer, that one of its experts got

    def columns(self) -> list[tuple[str, int, str]]:
        """(title, width, value) as a person reads them; 80 characters with memory, which a CPU does not count."""

        def shown(value: float | None, form: str) -> str:
            return "n/a" if value is None else format(value, form)

        columns = [
            ("step", 5, str(self.step)),
            ("loss", 7, shown(self.loss, ".4f")),
            ("norm", 6, shown(self.gradient_norm, ".3g")),
            ("rate", 7, f"{self.learning_rate:.1e}"),
            ("tokens/s", 9, f"{self.tokens_per_second:,.0f}"),
            ("TFLOPS", 6, f"{self.tflops:.3g}"),
            ("MFU", 5, shown(self.mfu, ".1%")),
            ("HFU", 5, shown(self.hfu, ".1%")),
        ]
        if self.largest_share is not None:  # in the place of HFU, for 80 characters
            columns[-1] = ("share", 5, shown(self.largest_share, ".1%"))
        if self.memory_allocated is not None and self.memory_reserved is not None and self.memory_device is not None:
            sizes = [size / 1e9 for size in (self.memory_allocated, self.memory_reserved, self.memory_device)]
            columns.append(("memory GB", 14, "/".join(f"{size:.{1 if size < 100 else 0}f}" for size in sizes)))
        return [*columns, ("data ms", 7, f"{self.data_wait * 1e3:.1f}")]

    def header(self) -> str:
        return " ".join(title.rjust(width) for title, width, _ in self.columns())

    def line(self) -> str:
        values = [value.rjust(width) for _, width, value in self.columns()]
        return " ".join([*values, "skipped"] if self.skipped else values)


class Rates:
    """The FLOPs a token of a model: those it needs, and those a device does with each block's recompute policy."""

    def __init__(self, decoder: Decoder, policies: list[str], peak_flops: float | None, ranks: int) -> None:
        convention = conventions(decoder)[DEFAULT]
        self.formula, self.model, self.peak, self.ranks = convention.formula, convention.model, peak_flops, ranks
        # A block's forward pass; of PyTorch's own the last matmul does not run again, whose result nobody needs.
        # A mixture's does: its output is what the gradient of the router's weights needs.
        last = 2 * decoder.width * decoder.active_experts * decoder.ffn if decoder.gpt_block == "standard" else 0
        mixed = decoder.experts > 1
        block = 2 * (decoder.active_parameters - decoder.embedding_parameters) + attention_flops(decoder)
        block = block / decoder.layers - (0 if mixed else last)
        # The matmul that "selective" runs again, unless a fused block's dropout stands behind it.
        fused_dropout = decoder.dropout > 0 and decoder.gpt_block == "optimized"
        output = 0 if fused_dropout else 2 * decoder.width * decoder.heads * decoder.head_dim
        again = {"none": 0.0, "selective": output + (last if mixed else 0), "full": block}
        self.hardware = self.model + sum(again[policy] for policy in policies)

    def at_speed(self, tokens_per_second: float) -> dict[str, Any]:
        rate = tokens_per_second / self.ranks
        return {
            "tokens_per_second": tokens_per_second,
            "tflops": rate * self.model / 1e12,
            "mfu": rate * self.model / self.peak if self.peak else None,
            "hfu": rate * self.hardware / self.peak if self.peak else None,
            "convention": self.formula,
        }


def memory(device: torch.device) -> dict[str, Any]:
    """Peak allocated since the last call, reserved, and in use on the device by anybody."""
    if device.type != "cuda":
        return {"memory_allocated": None, "memory_reserved": None, "memory_device": None}
    free, total = torch.cuda.mem_get_info(device)
    found = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device), total - free
    torch.cuda.reset_peak_memory_stats(device)
    return dict(zip(("memory_allocated", "memory_reserved", "memory_device"), found, strict=True))


class Journal:
    """The records of a run: a line of JSON a step, and TensorBoard's files where asked for.

    A run that goes on from step n forgets what it had written beyond n: those steps come again.
    """

    def __init__(self, folder: Path, step: int, tensorboard: bool) -> None:
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("log.tensorboard needs a package: pip install tensorboard.") from None
        self.path = folder / "metrics.jsonl"
        kept = [record for record in read(self.path) if record["step"] <= step]
        write_text(self.path, "".join(f"{json.dumps(record)}\n" for record in kept))
        self._file = self.path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, metrics: Metrics) -> None:
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in asdict(metrics).items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(name, value, metrics.step)

    def sync(self) -> None:
        """Block until everything written is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a run; a last line that a kill has cut off does not count."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records
