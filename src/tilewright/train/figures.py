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
from tilewright.plan.flops import DEFAULT, conventions


@dataclass(frozen=True)
class Figures:
    """Of one step. `loss` and `gradient_norm` are None where they are not finite; memory is in bytes."""

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
    memory_allocated: int | None  # the peak since the last record
    memory_reserved: int | None
    memory_device: int | None  # in use on the device, by anybody
    data_wait: float  # seconds

    def line(self, steps: int) -> str:
        """As a person reads it."""

        def shown(value: float | None, form: str) -> str:
            return "n/a" if value is None else format(value, form)

        parts = [
            f"step {self.step:>{len(str(steps))}}/{steps}",
            f"loss {shown(self.loss, '.4f')}",
            f"norm {shown(self.gradient_norm, '.3g')}",
            f"lr {self.learning_rate:.2e}",
            f"{self.tokens_per_second:,.0f} tokens/s",
            f"{self.tflops:.3g} TFLOPS",
            f"MFU {shown(self.mfu, '.1%')} HFU {shown(self.hfu, '.1%')}",
        ]
        if self.memory_allocated is not None and self.memory_reserved is not None and self.memory_device is not None:
            sizes = (self.memory_allocated, self.memory_reserved, self.memory_device)
            parts.append(f"memory {'/'.join(f'{size / 2**30:.1f}' for size in sizes)} GiB")
        parts.append(f"data {self.data_wait * 1e3:.1f} ms")
        if self.skipped:
            parts.append("skipped")
        return "  ".join(parts)


class Rates:
    """FLOPs a token of a model, as it needs them and as a device does them under a recompute policy a block."""

    def __init__(self, decoder: Decoder, policies: list[str], peak_flops: float | None, ranks: int) -> None:
        convention = conventions(decoder)[DEFAULT]
        self.formula, self.model, self.peak, self.ranks = convention.formula, convention.model, peak_flops, ranks
        block = (convention.hardware["full"] - convention.model) / decoder.layers  # a whole forward pass, by its blocks
        output = 2 * decoder.width * decoder.heads * decoder.head_dim  # the product that "selective" runs again
        again = {"none": 0.0, "selective": output, "full": block}
        self.hardware = self.model + sum(again[policy] for policy in policies)

    def of(self, tokens_per_second: float) -> dict[str, Any]:
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
        self.path = folder / "figures.jsonl"
        write_text(
            self.path, "".join(f"{json.dumps(record)}\n" for record in read(self.path) if record["step"] <= step)
        )
        self._file = self.path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UserError("log.tensorboard needs a package: pip install tensorboard.") from None
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, figures: Figures) -> None:
        self._file.write(json.dumps(asdict(figures)) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in asdict(figures).items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(name, value, figures.step)

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        if self._board is not None:
            self._board.close()


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
