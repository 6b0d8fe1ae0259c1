"""What a whole training run takes: days, GPU-hours, dollars and energy, and what its checkpoints take."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.errors import UserError
from tilewright.plan.decoder import Decoder
from tilewright.plan.memory import optimizer_bytes
from tilewright.plan.training import Training

POWER_OVERHEAD = 1.5  # power of a node and its cooling over that of its GPUs at their limit: a guess for a usual room


@dataclass(frozen=True)
class Budget:
    """A run over so many tokens."""

    tokens: float
    days: float
    gpu_hours: float
    dollars: float | None  # None where nobody has named a price
    megawatt_hours: float


def budget(
    tokens: float, tokens_per_second: float, gpus: int, watts: float, *, price: float | None = None,
    goodput: float = 1.0, power_overhead: float = POWER_OVERHEAD,
) -> Budget:  # fmt: skip
    """What it takes to train on `tokens` tokens.

    Args:
        tokens: of the whole run.
        tokens_per_second: of all `gpus` together, while they train.
        gpus: how many there are.
        watts: the power limit of one.
        price: dollars a GPU-hour.
        goodput: the share of the time in which they train, and do not fail, restart or compute again.
        power_overhead: power of all that runs beside the GPUs, over theirs.

    >>> found = budget(1e12, 1e6, 512, 700, price=2.0)
    >>> round(found.days, 1), round(found.gpu_hours), round(found.dollars), round(found.megawatt_hours)
    (11.6, 142222, 284444, 149)
    """
    if not (tokens > 0 and tokens_per_second > 0 and gpus >= 1 and 0 < goodput <= 1 and power_overhead >= 1):
        raise UserError("Give tokens and a speed above 0, a goodput of 0 to 1, and a power overhead of at least 1.")
    if price is not None and not 0 <= price < float("inf"):
        raise UserError(f"The price of a GPU-hour is {price}; give dollars of at least 0.")
    hours = tokens / (tokens_per_second * goodput) / 3600
    return Budget(
        tokens, hours / 24, hours * gpus, None if price is None else price * hours * gpus,
        hours * gpus * watts * power_overhead / 1e6,
    )  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """Bytes of a whole model, and of what it needs to train on beside that."""

    weights: float
    whole: float  # weights, and the states of the optimizer

    def seconds(self, bytes_per_second: float) -> float:
        """To write or to read it, at the rate of the storage."""
        return self.whole / bytes_per_second


def checkpoint(decoder: Decoder, training: Training) -> Checkpoint:
    """A checkpoint to continue from: each parameter that is trained as it is stored, and its optimizer's states.

    >>> from tilewright.plan.decoder import load
    >>> checkpoint(load("7b"), Training()).whole / load("7b").parameters
    12.0
    """
    n = decoder.adapter_parameters(training.lora) if training.lora else decoder.parameters
    return Checkpoint(training.stored_bytes * n, (training.stored_bytes + optimizer_bytes(decoder, training)) * n)
