"""What a rule is: it nominates sites of a graph, and says by which call of ours each could be replaced.

A rule only nominates. `probe` decides, in float64, forward and gradients, whether a site computes what the rule says;
`rewrite` puts the call in its place. So a rule may guess: at the kind of a norm, at its eps, at what its weight means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from tilewright.optimize.graph import State


@dataclass(frozen=True)
class Choice:
    """A call that may replace a site: `target(*inputs, **options)`."""

    target: Callable[..., Any]
    inputs: tuple[Node | None, ...]
    options: Mapping[str, Any]
    detail: str  # what it is, for the report: "rms, eps 1e-06"
    # What `target` takes in the probe instead of `options`: without dropout, in float64.
    probe_options: Mapping[str, Any] = field(default_factory=dict)
    constants: tuple[int, ...] = ()  # which of its inputs get no gradient


@dataclass(frozen=True)
class Candidate:
    """A site as a rule nominates it: the nodes that a call would replace, and the calls that it could be."""

    anchor: Node  # says where it is, in the report
    outputs: tuple[Node, ...]
    choices: tuple[Choice, ...]
    # An output of the graph that nobody computes any more, by its node, and what it is made from when it is asked for.
    deferred: tuple[Node, ...] = ()
    # Integers of the site and smaller ones that stand for them in the probe: the size of a vocabulary.
    literals: Mapping[int, int] = field(default_factory=dict)
    exact: frozenset[int] = frozenset()  # sizes that the probe's inputs keep, since the site has them as numbers
    # Nodes that are not looked into, for the rule knows what they are; and what stands for each in the probe.
    known: Mapping[Node, torch.Tensor] = field(default_factory=dict)
    # The probe's inputs where random tensors of the inputs' shapes will not do.
    sample: Callable[[torch.Generator], list[torch.Tensor | None]] | None = None
    is_writable: bool = False  # its call reads none of its outputs in backward, so anybody may write to them
    is_guess: bool = False  # nothing names it as a site: where no choice proves right, nobody needs to hear of it


@dataclass(frozen=True)
class Declined:
    """A place that looks like a site and is none."""

    anchor: Node
    why: str


@dataclass(frozen=True)
class View:
    """What a rule sees: the graph, the state of each node, and the nodes that other rules have replaced."""

    graph: Graph
    state: Mapping[Node, State]
    has_gradients: bool
    sources: Mapping[Node, Node] = field(default_factory=dict)  # of the inputs of a body: what they are outside


def draw(generator: torch.Generator, shapes: Sequence[tuple[int, ...] | None]) -> list[torch.Tensor | None]:
    """Return random inputs of the probe of these shapes; None where there is none."""
    drawn = (None if each is None else torch.randn(each, generator=generator) for each in shapes)
    return [None if each is None else each.double() for each in drawn]


Find = Callable[[View], Iterator[Candidate | Declined]]


@dataclass(frozen=True)
class Rule:
    """A named way to find sites.

    Args:
        name: what users call it in `optimize(model, rules=[...])`, and the report.
        summary: one line for the report and the docs.
        find: nominates sites of a graph, those first that should be replaced first.
    """

    name: str
    summary: str
    find: Find
