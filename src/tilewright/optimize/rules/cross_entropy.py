"""Cross-entropy of logits that are there anyway: loss and gradient in one pass, read in the dtype they come in."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.ops import cross_entropy
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View

_SIGNATURE = inspect.signature(F.cross_entropy)
SMALL = 97  # classes that stand for a large vocabulary in the probe


@dataclass(frozen=True)
class Loss:
    """A cross-entropy with class indices, its arguments by name."""

    node: Node
    logits: Node
    targets: Node
    class_weight: Node | None
    options: dict[str, Any]  # ignore_index, reduction, label_smoothing

    @property
    def classes(self) -> int:
        return int(g.shape_of(self.logits)[-1])  # type: ignore[index]

    @property
    def dtype(self) -> torch.dtype:
        found = g.tensor_of(self.node)
        assert found is not None
        return found.dtype


def losses(view: View) -> Iterator[Loss | Declined]:
    """Every cross-entropy of a graph that somebody reads."""
    for node in view.graph.nodes:
        if not g.calls(node, F.cross_entropy, torch._C._nn.cross_entropy_loss) or not node.users:
            continue
        try:
            given = _SIGNATURE.bind(*node.args, **node.kwargs)
        except TypeError:
            continue
        given.apply_defaults()
        found = dict(given.arguments)
        logits, targets = found["input"], found["target"]
        if found["size_average"] is not None or found["reduce"] is not None:
            yield Declined(node, "it uses size_average or reduce; write reduction")
        elif g.is_float(targets):
            yield Declined(node, "its targets are probabilities")
        elif len(g.shape_of(logits) or ()) != 2:
            yield Declined(node, "its logits are no matrix of rows and classes")
        elif not isinstance(g.shape_of(logits)[-1], int):  # type: ignore[index]
            yield Declined(node, "the number of its classes is known at run time only")
        else:
            options = {name: found[name] for name in ("ignore_index", "reduction", "label_smoothing")}
            yield Loss(node, logits, targets, found["weight"], options)


def _find(view: View) -> Iterator[Candidate | Declined]:
    for loss in losses(view):
        if isinstance(loss, Declined):
            continue  # the rule linear_cross_entropy says so
        logits = g.before_casts(loss.logits)
        words = f"{loss.classes:,} classes, {loss.options['reduction']}"

        def sample(generator: torch.Generator, loss: Loss = loss) -> list[Tensor | None]:
            logits = torch.randn((7, loss.classes), generator=generator, dtype=torch.float64)
            return [
                logits,
                targets_like(7, loss, loss.classes, generator),
                class_weights(loss, loss.classes, generator),
            ]

        choice = Choice(
            loss_of_logits, (logits, loss.targets, loss.class_weight), {**loss.options, "out_dtype": loss.dtype}, words,
            {"out_dtype": torch.float64}, constants=(1, 2) if loss.class_weight is not None else (1,),
        )  # fmt: skip
        yield Candidate(loss.node, (loss.node,), (choice,), sample=sample)


def targets_like(rows: int, loss: Loss, classes: int, generator: torch.Generator) -> Tensor:
    """Random targets, one of them ignored where the loss's ignored index is none of the classes."""
    found = torch.randint(0, classes, (rows,), generator=generator)
    found[rows // 2] = loss.options["ignore_index"]
    return found


def class_weights(loss: Loss, classes: int, generator: torch.Generator) -> Tensor | None:
    """Random weights of classes where the loss has some."""
    return None if loss.class_weight is None else torch.rand(classes, generator=generator, dtype=torch.float64) + 0.5


def loss_of_logits(
    logits: Tensor, targets: Tensor, class_weight: Tensor | None = None, *, out_dtype: torch.dtype, **options: Any
) -> Tensor:
    """The loss of logits that exist, in the dtype that the site has."""
    return cross_entropy(logits, targets, weight=class_weight, **options).to(out_dtype)


RULE = Rule("cross_entropy", "cross-entropy and its gradient in one pass over the logits", _find)
