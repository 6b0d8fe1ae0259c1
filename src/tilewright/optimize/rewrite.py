"""Put the calls that rules know in the place of sites: find, prove, replace, and keep a record of each.

Nothing of the old graph is changed but who reads what: a node that nobody reads any more is dropped at the end, and one
that somebody still reads stays. So a hook, an adapter or an auxiliary loss that reads an inner result keeps it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.fx import GraphModule, Node

from tilewright.optimize import graph as g
from tilewright.optimize.probe import refusal
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View
from tilewright.runtime.dispatch import PLAIN


@dataclass(frozen=True)
class Site:
    """A place in a model: what a rule made of it, or why not."""

    rule: str
    where: str  # the module, such as model.layers.0.mlp
    detail: str  # what it is, such as "rms, eps 1e-06, residual"
    declined: str = ""  # why it stays as it was

    @property
    def is_changed(self) -> bool:
        return not self.declined


@dataclass(frozen=True)
class Deferral:
    """An output of the graph that is made from others when somebody reads it."""

    index: int  # of the output
    make: GraphModule
    inputs: tuple[int, ...]  # of the outputs that `make` takes
    dtype: torch.dtype
    last: int  # size of its last dimension
    autocast: torch.dtype | None  # that it is made under


@dataclass(frozen=True)
class Kind:
    """One kind of site: what it was and what it is, to be timed by themselves."""

    before: GraphModule
    target: Callable[..., Any]
    options: Mapping[str, Any]
    inputs: tuple[Input | None, ...]  # of the call; the site takes those that are there
    autocast: torch.dtype | None


@dataclass(frozen=True)
class Input:
    """A tensor that a site takes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool


@dataclass
class Rewritten:
    """A graph after the rules."""

    module: GraphModule
    sites: list[Site] = field(default_factory=list)
    deferrals: list[Deferral] = field(default_factory=list)
    outputs: int = 0  # how many of its outputs the caller knows
    failures: list[str] = field(default_factory=list)  # of rules that raised
    kinds: dict[Site, Kind] = field(default_factory=dict)  # the first of each kind, its place left out


def rewrite(module: GraphModule, rules: Iterable[Rule], device: str, start: g.State | None = None) -> Rewritten:
    """Replace every site of every rule that proves right, in a graph and in the bodies inside of it."""
    start = start or g.current_state(device)
    done = Rewritten(module)
    rules, sources = list(rules), g.sources(module)
    for body in g.bodies(module):
        for rule in rules:
            orphans = list[Node]()
            try:
                view = View(body.graph, g.states(body.graph, start, device), start.gradients, sources)
                _apply(rule, view, body, done, orphans)
            except Exception as error:  # what the rule has replaced so far is whole
                done.failures.append(f"{rule.name}: {type(error).__name__}: {error}")
            _drop(body, orphans)
        body.graph.lint()
        body.recompile()
    return done


def _drop(body: GraphModule, nodes: Iterable[Node]) -> None:
    """Take out of a graph what replaced sites were made of, as far as nobody reads it; nothing else is ever dropped."""
    order = {node: number for number, node in enumerate(body.graph.nodes)}
    for node in sorted(set(nodes), key=order.__getitem__, reverse=True):
        if not node.users and not g.writes_in_place(node):
            body.graph.erase_node(node)


def _apply(rule: Rule, view: View, body: GraphModule, done: Rewritten, orphans: list[Node]) -> None:
    """Replace the sites of one rule in one graph; what they were made of is added to `orphans`."""
    state = dict(view.state)
    replaced = set[Node]()
    for found in rule.find(view):
        where = g.module_of(found.anchor)
        if isinstance(found, Declined):
            done.sites.append(Site(rule.name, where, "", found.why))
            continue
        if replaced & set(found.outputs):
            continue
        if found.deferred and body is not done.module:
            done.sites.append(Site(rule.name, where, "", "its logits are wanted outside of a checkpointed region"))
            continue
        why, chosen = _choose(found, state)
        if chosen is None and found.is_guess:
            continue
        if chosen is None:
            done.sites.append(Site(rule.name, where, found.choices[0].detail if found.choices else "", why))
            continue
        deferrals = [_deferral(body, found, chosen, node, done, state) for node in found.deferred]
        if None in deferrals:
            done.sites.append(Site(rule.name, where, chosen.detail, "its logits are no plain output of the model"))
            continue
        given = [*(each for each in chosen.inputs if each is not None), *found.known]
        for outputs in (found.outputs, *((node,) for node in found.deferred)):
            orphans += _nodes(outputs, given)
        for node in found.known:
            orphans += _nodes((node,), ())
        name = Site(rule.name, "", chosen.detail)
        if name not in done.kinds and (kind := _kind(found, chosen, state)) is not None:
            done.kinds[name] = kind
        _replace(body, found, chosen, state)
        replaced |= set(found.outputs)
        done.sites.append(Site(rule.name, where, chosen.detail))


def _kind(found: Candidate, choice: Choice, state: dict[Node, g.State]) -> Kind | None:
    """The site and its call by themselves; None where their sizes, or tensors that it shares, are known elsewhere."""
    if found.known:
        return None
    tensors = [g.tensor_of(each) for each in choice.inputs]
    if any(not isinstance(size, int) for each in tensors if each is not None for size in each.shape):
        return None
    inputs = tuple(
        None if each is None else Input(tuple(each.shape), each.dtype, each.requires_grad or each.grad_fn is not None)
        for each in tensors
    )
    given = [each for each in choice.inputs if each is not None]
    before = take_out(_nodes(found.outputs, given), given, found.outputs)
    return Kind(before, choice.target, choice.options, inputs, state[found.outputs[0]].autocast)


def take_out(nodes: Sequence[Node], inputs: Sequence[Node], outputs: Sequence[Node]) -> GraphModule:
    """Some nodes of a graph as a module of their own."""
    graph, made = torch.fx.Graph(), dict[Node, Node]()
    for number, each in enumerate(inputs):
        made[each] = graph.placeholder(f"input_{number}")
    for each in nodes:
        made[each] = graph.node_copy(each, made.__getitem__)
    graph.output(tuple(made[each] for each in outputs))
    return GraphModule(torch.nn.Module(), graph)


def _nodes(outputs: Sequence[Node], inputs: Sequence[Node]) -> tuple[Node, ...]:
    site = g.region(outputs, inputs)
    return () if site is None else site.nodes


def _choose(found: Candidate, state: dict[Node, g.State]) -> tuple[str, Choice | None]:
    """The first choice that may run here and proves right; or why none does."""
    first = ""
    for choice in found.choices:
        why = _obstacle(found, choice, state) or refusal(found, choice)
        if not why:
            return "", choice
        first = first or why
    return first or "no formula of the rule's fits", None


def _obstacle(found: Candidate, choice: Choice, state: dict[Node, g.State]) -> str:
    """Why a call cannot take the place of the site whatever it computes; nothing where it can."""
    inputs = [each for each in choice.inputs if each is not None]
    if len(set(inputs)) < len(inputs):
        return "it takes one tensor twice"
    for each in inputs:
        tensor = g.tensor_of(each)
        if tensor is None:
            return f"{each.name} is no tensor"
        kind = type(tensor)
        if kind not in PLAIN and kind.__name__ != "FakeTensor":
            return f"its weights are {kind.__name__}s"
    learned = (g.tensor_of(choice.inputs[index]) for index in choice.constants)
    if any(each is not None and each.requires_grad for each in learned):
        return "what it takes as constant, a table or a class's weight, has a gradient"
    inputs += found.known
    site = g.region(found.outputs, inputs)
    if site is None:
        return "the site is too large"
    order = {node: number for number, node in enumerate(found.anchor.graph.nodes)}
    first_output = min(found.outputs, key=order.__getitem__)
    late = next((each for each in inputs if order[each] >= order[first_output]), None)
    if late is not None:
        return f"{late.name} is computed behind its first result"
    parts = [*site.nodes, *(node for each in found.deferred for node in _nodes((each,), inputs))]
    if any(not _runs_alike(node, first_output, state) for node in parts):
        return "a part of it runs under another autocast or grad mode"
    if not found.is_writable and any(_is_written(each) for each in found.outputs[1:]):
        return "its sum is written to in place later"
    span = [node for node in order if order[site.nodes[0]] <= order[node] <= max(order[o] for o in found.outputs)]
    if any(g.writes_in_place(node) for node in span):
        return "a tensor is written to in place beside it"
    later = set(parts)
    inner = set(site.nodes) - set(found.outputs)
    for node in inner:
        leaks = [u for u in node.users if u not in later and not (node in found.deferred and u.op == "output")]
        if leaks and not g.is_cast(node):
            return f"an inner result, {node.name}, is read elsewhere"
    return ""


def _runs_alike(node: Node, other: Node, state: dict[Node, g.State]) -> bool:
    """Whether two nodes run under one grad mode and, where that matters to the first, under one autocast."""
    arranges = g.is_cast(node) or g.calls(node, *g.VIEWS, operator.getitem)
    same = state[node].autocast == state[other].autocast
    return state[node].gradients == state[other].gradients and (same or arranges)


def _is_written(node: Node) -> bool:
    """Whether somebody writes to a node, or to a view of it."""
    return any(
        g.writes_in_place(user) or (g.calls(user, *g.VIEWS, operator.getitem, "detach") and _is_written(user))
        for user in node.users
    )


def _replace(body: GraphModule, found: Candidate, choice: Choice, state: dict[Node, g.State]) -> None:
    order = {node: number for number, node in enumerate(body.graph.nodes)}
    first = min(found.outputs, key=order.__getitem__)
    with body.graph.inserting_before(first):
        call = body.graph.call_function(choice.target, tuple(choice.inputs), dict(choice.options))
        call.meta = {key: value for key, value in found.anchor.meta.items() if key != "example_value"}
        results = [call]
        if len(found.outputs) > 1:
            results = [body.graph.call_function(operator.getitem, (call, i)) for i in range(len(found.outputs))]
            call.meta["example_value"] = tuple(g.value_of(output) for output in found.outputs)
    state[call] = state[first]
    for output, result in zip(found.outputs, results, strict=True):
        result.meta = {**output.meta, "tilewright": True}
        dtype = choice.options.get("out_dtype") if output is found.outputs[0] else None
        tensor = g.tensor_of(output)
        if dtype is not None and tensor is not None and tensor.dtype != dtype:
            result.meta["example_value"] = tensor.to(dtype)
        state[result] = state[first]
        output.replace_all_uses_with(result)


def _deferral(
    body: GraphModule, found: Candidate, choice: Choice, node: Node, done: Rewritten, state: dict[Node, g.State]
) -> Deferral | None:
    """Take a node out of the graph's outputs, and what it is made from into them."""
    output = next(iter(reversed(body.graph.nodes)))
    values = list(output.args[0])  # type: ignore[arg-type]
    if not done.outputs:
        done.outputs = len(values)
    inputs = [each for each in choice.inputs[:3] if each is not None]
    site, tensor = g.region([node], inputs), g.tensor_of(node)
    if site is None or site.others or tensor is None or values.count(node) != 1:
        return None
    order = {each: number for number, each in enumerate(body.graph.nodes)}
    first = min(order[each] for each in site.nodes)
    if any(order[each] >= first and g.writes_in_place(each) for each in body.graph.nodes):
        return None  # what it is made from may be another by then
    lead = g.shape_of(inputs[0])
    if lead is None or list(map(str, lead[:-1])) != list(map(str, tensor.shape[:-1])):
        return None
    index, places = values.index(node), []
    for each in inputs:
        if each not in values:
            values.append(each)
        places.append(values.index(each))
    values[index] = None
    output.args = (tuple(values),)
    make, autocast = take_out(site.nodes, inputs, [node]), state[site.nodes[0]].autocast
    deferral = Deferral(index, make, tuple(places), tensor.dtype, int(tensor.shape[-1]), autocast)
    done.deferrals.append(deferral)
    return deferral


def count(sites: Sequence[Site]) -> dict[str, int]:
    """How many sites each rule has changed."""
    found: dict[str, int] = {}
    for site in sites:
        if site.is_changed:
            found[site.rule] = found.get(site.rule, 0) + 1
    return found
