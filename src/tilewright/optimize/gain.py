"""Which rules pay, on a batch of the user's: each is measured in place, and what gives nothing is undone.

A training step is timed with all rules and without each of them, in turns. A rule stays where the step without it is
slower by more than the spread, or takes at least a hundredth more memory at the same speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from tilewright.errors import UserError
from tilewright.measure.clock import turns
from tilewright.optimize.report import Gain, Report, Step
from tilewright.optimize.rule import Rule
from tilewright.optimize.site_time import time_sites

_ROUNDS = 8
_WORTH = 0.01  # of peak memory


def keep_what_gains(
    model: nn.Module, batch: Any, rules: Sequence[Rule], mode: str, install: Callable[[Sequence[Rule]], Report]
) -> Report:
    """Install the rules that gain on this batch, and report what every one of them gives."""
    steps = _Steps(model, batch, install)
    try:
        steps.add_none(mode)
        whole, found = steps.add_each(rules)
        steps.measure()
        kept, gains = steps.judge(found)
        report = whole if len(kept) == len(found) else steps.add("kept", kept)
        if report is whole:
            steps.activate("all")
        else:
            steps.measure("kept")
        report.before, report.gains = steps.summary("none"), gains
        report.site_times = time_sites(whole.captured, steps.device)
        report.after = steps.summary("all" if report is whole else "kept")
    except BaseException:
        model._compiled_call_impl = None
        raise
    finally:
        steps.restore()
    if not kept:
        report.undo()
        report.after = report.before
        report.notes.append("No rule gains on this batch: the model runs as it did.")
    return report


def measure_gains(
    model: nn.Module,
    batch: Any,
    rules: Sequence[Rule],
    mode: str,
    install: Callable[[Sequence[Rule]], Report],
    within: float,
) -> tuple[list[Gain], list[str]]:
    """What each rule gives; the model is left as it was.

    Args:
        within: seconds; a rule whose step cannot be prepared and timed by then is not measured.

    Returns:
        The gains, and the rules that have sites and were not measured.
    """
    steps = _Steps(model, batch, install)
    try:
        whole, found = steps.add_each(rules, time.monotonic() + within)
        left = [rule.name for rule in _with_sites(rules, whole) if rule not in found]
        if len(found) == 1 and not left:
            steps.add_none(mode)
        steps.measure()
        return steps.judge(found)[1], left
    finally:
        model._compiled_call_impl = None
        steps.restore()


def _with_sites(rules: Sequence[Rule], report: Report) -> list[Rule]:
    return [rule for rule in rules if any(site.rule == rule.name for site in report.changed)]


class _Steps:
    """Training steps of one model under different rules, measured in turns."""

    def __init__(self, model: nn.Module, batch: Any, install: Callable[[Sequence[Rule]], Report]) -> None:
        self.model, self.batch, self.install = model, batch, install
        self.device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self.gradients = {name: each.grad for name, each in model.named_parameters()}
        model.zero_grad(set_to_none=True)  # the steps would add to them
        self.buffers = {name: each.detach().clone() for name, each in model.named_buffers()}
        devices = [self.device] if self.device.type == "cuda" else []
        self.random = torch.random.get_rng_state(), [torch.cuda.get_rng_state(each) for each in devices]
        self.reports: dict[str, Report] = {}
        self.calls: dict[str, Any] = {}
        self.times: dict[str, list[float]] = {}
        self.peaks: dict[str, int | None] = {}
        self.takes = 0.0  # seconds of a step of the last that was added

    def add(self, name: str, rules: Sequence[Rule] | None) -> Any:
        """Prepare a step: install its rules, and run it until nothing is compiled any more."""
        self.model._compiled_call_impl = None
        report = self.install(rules) if rules is not None else None
        self.calls[name] = self.model._compiled_call_impl
        if report is not None:
            self.reports[name] = report
        for _ in range(2):
            self._step()
        self.takes = self._timed()
        self.peaks[name] = self._peak()
        self.times[name] = []
        return report

    def add_none(self, mode: str) -> None:
        """Prepare the step without rules: as the model was, or as Inductor alone has it."""
        self.add("none", None if mode == "none" else ())

    def add_each(self, rules: Sequence[Rule], until: float = math.inf) -> tuple[Report, list[Rule]]:
        """Prepare the step with all rules, and one without each that has sites, as far as time allows."""
        began = time.monotonic()
        whole = self.add("all", rules)
        found = _with_sites(rules, whole)
        for index, rule in enumerate(found if len(found) > 1 else ()):
            each = (time.monotonic() - began) / (index + 1)
            if time.monotonic() + each + (index + 2) * _ROUNDS * self.takes > until:
                return whole, found[:index]
            self.add(rule.name, [other for other in rules if other is not rule])
        return whole, found

    def activate(self, name: str) -> None:
        self.model._compiled_call_impl = self.calls[name]

    def measure(self, *names: str) -> None:
        """Time steps in turns: those of these names, or all."""
        for order in turns(names or self.calls, _ROUNDS):
            for name in order:
                self.activate(name)
                self.times[name].append(self._timed())

    def summary(self, name: str) -> Step:
        return Step(median(self.times[name]), _spread(self.times[name]), self.peaks[name])

    def judge(self, found: Sequence[Rule]) -> tuple[list[Rule], list[Gain]]:
        """The rules that stay, and what each gives."""
        kept, gains = [], []
        whole = self.times["all"]
        for rule in found:
            name = rule.name if rule.name in self.times else "none"  # of a single rule that is the same
            without = self.times[name]
            lost = median(one - other for one, other in zip(without, whole, strict=True))
            spread = max(_spread(without), _spread(whole))
            memory, least = self.peaks[name], self.peaks["all"]
            saved = memory - least if memory is not None and least is not None else None
            stays = lost > spread or (abs(lost) <= spread and saved is not None and saved > _WORTH * (least or 1))
            gains.append(Gain(rule.name, lost, spread, saved, stays))
            if stays:
                kept.append(rule)
        return kept, gains

    def restore(self) -> None:
        """Leave gradients, buffers and random numbers as they were."""
        for name, parameter in self.model.named_parameters():
            parameter.grad = self.gradients.get(name)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.buffers and buffer.shape == self.buffers[name].shape:
                    buffer.copy_(self.buffers[name])
        torch.random.set_rng_state(self.random[0])
        for state in self.random[1]:
            torch.cuda.set_rng_state(state, self.device)

    def _step(self) -> None:
        from tilewright.optimize.api import call_with

        output = call_with(self.model, self.batch)
        loss = _loss(output)
        if loss.requires_grad:
            loss.backward()
        self.model.zero_grad(set_to_none=True)

    def _timed(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        self._step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def _peak(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        self._step()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_allocated(self.device))


def _spread(times: Sequence[float]) -> float:
    """Half the distance between the quartiles of repeated steps."""
    ordered = sorted(times)
    return (ordered[(3 * len(ordered)) // 4] - ordered[len(ordered) // 4]) / 2


def _loss(output: Any) -> torch.Tensor:
    """What a step differentiates: the loss in an output, or the sum of a tensor that is none."""
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else output.float().square().mean()
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    tensors = [each for each in parts if isinstance(each, torch.Tensor) and each.is_floating_point()]
    scalar = next((each for each in tensors if each.numel() == 1), None)
    if scalar is not None:
        return scalar
    if not tensors:
        raise UserError(
            f"The model returned {type(output).__name__} without a tensor of floats; give a batch with labels, or let "
            "it return its loss."
        )
    return tensors[0].float().square().mean()
