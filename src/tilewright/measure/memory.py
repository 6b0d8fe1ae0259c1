"""Where the memory of a training step went.

`MemoryWatch` takes marks in a step and says who holds what; `against_plan` sets that beside the plan. Torch's own
memory snapshots are pickles and are not written.
"""

from __future__ import annotations

import torch

from tilewright.plan.memory import Anatomy


class MemoryWatch:
    """Who holds the memory of a step: the loop sets the marks, in as many steps and micro batches as it likes.

    Parts have the names that `plan` gives them. The peak is that of all steps since the watch was made, which makes
    torch's count of it start anew. What a captured CUDA graph keeps is held all the time, and no mark sees it come.

    >>> model = torch.nn.Linear(2, 2, bias=False)
    >>> MemoryWatch(model, torch.optim.SGD(model.parameters())).table()
    {'weights': 16, 'gradients': 0, 'optimizer': 0}
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._device = next(model.parameters()).device
        self._before = self._kept = self._gradients = self._rest = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def before_forward(self) -> None:
        self._before = self._allocated()

    def after_forward(self) -> None:
        self._kept = max(self._kept, self._allocated() - self._before)

    def after_backward(self) -> None:
        self._gradients = max(self._gradients, self._gradients_now())

    def after_optimizer(self) -> None:
        """Count the rest: now that only gradients of the step are left, it is workspaces, buffers and data."""
        self._rest = self._allocated() - self._weights() - self._states() - self._gradients_now()

    def table(self) -> dict[str, int]:
        """Bytes by part: of weights, gradients and optimizer; and on a GPU of all that torch and the driver know of.

        `kept for backward` is what forward leaves; `fragmentation` has all that torch's allocator holds and nobody
        uses; `CUDA context` is what the driver counts beyond that, other processes on the same GPU with it.
        """
        parts = {"weights": self._weights(), "gradients": self._gradients, "optimizer": self._states()}
        if self._device.type != "cuda":
            return parts
        peak = torch.cuda.max_memory_allocated(self._device)
        free, capacity = torch.cuda.mem_get_info(self._device)
        lost = torch.cuda.max_memory_reserved(self._device) - peak
        context = capacity - free - torch.cuda.memory_reserved(self._device)
        return parts | {
            "kept for backward": self._kept, "temporary buffers": self._rest, "allocated": peak,
            "fragmentation": lost, "CUDA context": context, "total": peak + lost + context,
        }  # fmt: skip

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _weights(self) -> int:
        return sum(parameter.nbytes for parameter in self._model.parameters())

    def _gradients_now(self) -> int:
        return sum(parameter.grad.nbytes for parameter in self._model.parameters() if parameter.grad is not None)

    def _states(self) -> int:
        states = (value for state in self._optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in states if isinstance(value, torch.Tensor))


def against_plan(measured: dict[str, int], predicted: Anatomy) -> list[tuple[str, int, int, int]]:
    """(part, bytes predicted, bytes measured, measured less predicted), of every part that was measured.

    The plan is of one moment, the peak. Gradients are compared where the plan has them there; `activations` are all
    that is allocated at the peak and nobody else's, so 16-bit copies of weights, logits and loss are among them.
    """
    found = dict(measured)
    if not predicted["gradients"]:
        found.pop("gradients")
    if "allocated" in found:
        held = ("weights", "gradients", "optimizer", "temporary buffers")
        found["activations"] = found["allocated"] - sum(found.get(name, 0) for name in held)
    plan = {"allocated": predicted.allocated, "total": predicted.total}
    plan["activations"] = sum(predicted[name] for name in ("activations", "16-bit copies", "logits and loss"))
    order = (
        "weights", "gradients", "optimizer", "activations", "temporary buffers", "allocated", "fragmentation",
        "CUDA context", "total",
    )  # fmt: skip
    pairs = [(name, round(plan.get(name, predicted[name])), found[name]) for name in order if name in found]
    return [(name, expected, actual, actual - expected) for name, expected, actual in pairs]
