"""Whether a call computes what a site computes: both run in float64 on small inputs, forward and gradients.

The right formula with the right eps agrees to 1e-12 there, and the nearest wrong one differs by a thousand times the
tolerance: inputs are as small as the square root of eps in one round, where eps decides, and of order 1 in the other.
Casts between floating-point dtypes are left out of the site: our calls compute in float32 or better whatever its are.
Dropout is left out of both: what it does is known by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from tilewright.optimize.graph import CASTS, DROPOUTS, Region, calls, is_wide, region, tensor_of
from tilewright.optimize.rule import Candidate, Choice

TOLERANCE = 1e-9
_SCALES = (1.0, 1e-2, 1e-5)  # of the inputs: a norm's eps decides at its own size, from 1e-5 to 1e-12
_ROWS = (2, 3, 4, 5)  # what stands for the sizes in front of the last

# What a site may be made of: functions that are smooth, and what only arranges numbers. A clamp, say, is what it is
# only beyond the inputs that are tried.
_KNOWN = frozenset({
    "add", "sub", "mul", "truediv", "div", "true_divide", "pow", "square", "neg", "exp", "tanh", "erf", "sigmoid",
    "sqrt", "rsqrt", "reciprocal", "mean", "sum", "var", "silu", "gelu", "layer_norm", "rms_norm", "linear", "dropout",
    "cross_entropy", "cross_entropy_loss", "embedding", "scaled_dot_product_attention", "cat", "concat", "stack",
    "chunk", "split", "unbind", "getitem", "view", "reshape", "flatten", "unsqueeze", "squeeze", "expand", "transpose",
    "permute", "contiguous", "clone", "repeat", "repeat_interleave", *CASTS,
})  # fmt: skip

_verdicts: dict[tuple[Any, ...], str] = {}  # by site and choice: a model has the same one in every layer


def refusal(candidate: Candidate, choice: Choice) -> str:
    """Say why a choice does not compute what the site does; nothing where it does."""
    inputs = [each for each in choice.inputs if each is not None]
    found = region(candidate.outputs, [*inputs, *candidate.known])
    if found is None:
        return "the site is too large"
    if found.others:
        return f"it reads {found.others[0].name}, which the rule does not know"
    strange = next((node for node in found.nodes if _name(node) not in _KNOWN), None)
    if strange is not None:
        return f"it calls {_name(strange)}, which no rule knows"
    if _dropped(found) != _drops(choice):
        return "it has a dropout that the rule does not draw"
    try:
        site = _site(found, inputs, candidate)
        targets = tuple(node.target for node in found.nodes)  # themselves: two functions may have one name
        key = (
            targets, str(site.code), choice.target, repr(dict(choice.options)), repr(dict(choice.probe_options)),
            repr([_description(each) for each in choice.inputs]),
            repr([each.tolist() for each in candidate.known.values()]),
        )  # fmt: skip
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return f"it could not be taken out of the graph: {_short(error)}"
    if key not in _verdicts:
        _verdicts[key] = _compare(site, candidate, choice)
    return _verdicts[key]


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))


def _dropped(found: Region) -> list[float]:
    """The probabilities of the dropouts in a site that drop something."""
    names, probabilities = ("input", "p", "training"), []
    for node in found.nodes:
        if calls(node, *DROPOUTS):
            given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
            if given.get("training", given.get("train", True)) and given.get("p", 0.5) != 0.0:
                probabilities.append(given.get("p", 0.5))
        elif calls(node, F.scaled_dot_product_attention):
            p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            probabilities += [p] if p else []
    return probabilities


def _drops(choice: Choice) -> list[float]:
    """The probabilities that a choice drops by: of each branch, where it has a second."""
    p = choice.options.get("p", choice.options.get("dropout_p", 0.0))
    return [p] * (0 if p == 0.0 else choice.options.get("branches", 1))


def _description(node: Node | None) -> Any:
    tensor = tensor_of(node)
    return None if tensor is None else (tuple(map(str, tensor.shape)), tensor.is_floating_point())


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:120]}"


def _compare(site: torch.fx.GraphModule, candidate: Candidate, choice: Choice) -> str:
    options = {**choice.options, **choice.probe_options}
    generator = torch.Generator().manual_seed(0)
    try:
        with _alone():
            for scale in _SCALES:
                given = _inputs(candidate, choice, generator)
                given = [each * scale if each is not None and each.is_floating_point() else each for each in given]
                present = [each for each in given if each is not None]
                fixed = {id(given[index]) for index in choice.constants}
                leaves = {id(each): each.is_floating_point() and id(each) not in fixed for each in present}
                theirs, gradients = _run(site, present, leaves, generator.manual_seed(1))
                ours, own_gradients = _run(choice.target, given, leaves, generator.manual_seed(1), options)
                names = [f"output {index + 1}" for index in range(len(theirs))]
                names += [f"the gradient of input {index + 1}" for index in range(len(gradients))]
                if len(ours) != len(theirs):
                    return f"it has {len(theirs)} results, the call {len(ours)}"
                for name, one, other in zip(names, (*theirs, *gradients), (*ours, *own_gradients), strict=True):
                    error = _difference(one, other)
                    if not error <= TOLERANCE:
                        return f"{name} differs by {error:.1e} at inputs of size {scale:g}"
    except Exception as error:  # whatever a user's formula raises on small tensors, the site stays as it is
        return f"it could not be run on small tensors: {_short(error)}"
    return ""


class _alone:
    """Runs under gradients, without autocast, default device and modes of the compiler that calls."""

    def __enter__(self) -> None:
        self.contexts: list[Any] = [
            torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"),
            torch.utils._python_dispatch._disable_current_modes(),
        ]  # fmt: skip
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


def _run(
    function: Any, given: Sequence[Tensor | None], leaves: Mapping[int, bool], generator: torch.Generator,
    options: Mapping[str, Any] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Outputs, and the gradients of the inputs that `leaves` says have one, for random gradients of the outputs."""
    made = {id(x): x.detach().clone().requires_grad_(leaves[id(x)]) for x in given if x is not None}
    outputs = function(*(None if each is None else made[id(each)] for each in given), **(options or {}))
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    roots = [each for each in outputs if each.requires_grad]
    ups = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in roots]
    wanted = [each for each in made.values() if each.requires_grad]
    gradients = torch.autograd.grad(roots, wanted, ups, allow_unused=True) if roots and wanted else []
    found = [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(wanted, gradients, strict=False)]
    return [each.detach() for each in outputs], found


def _difference(truth: Tensor, found: Tensor) -> float:
    if truth.shape != found.shape:
        return float("inf")
    size = truth.double().norm().item()
    error = (truth.double() - found.double()).norm().item()
    return error / size if size > 0.0 else error


def _inputs(candidate: Candidate, choice: Choice, generator: torch.Generator) -> list[Tensor | None]:
    if candidate.sample is not None:
        return candidate.sample(generator)
    sizes: dict[str, int] = {}
    found = list[Tensor | None]()
    for node in choice.inputs:
        tensor = tensor_of(node)
        if tensor is None or node in candidate.known:
            found.append(candidate.known.get(node) if node is not None else None)
            continue
        if not tensor.is_floating_point():
            raise TypeError(f"{node} holds {tensor.dtype}")
        shape = [
            _small(size, sizes, candidate, last=place == tensor.dim() - 1) for place, size in enumerate(tensor.shape)
        ]
        found.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return found


def _small(size: Any, sizes: dict[str, int], candidate: Candidate, last: bool) -> int:
    """A small size that stands for a size, the same wherever it comes again; the last one is itself."""
    if last or size == 1:
        return int(size)
    if isinstance(size, int) and size in candidate.exact:
        return size
    if isinstance(size, int) and size in candidate.literals:
        return candidate.literals[size]
    return sizes.setdefault(str(size), _ROWS[len(sizes) % len(_ROWS)])


def _site(found: Region, inputs: Sequence[Node], candidate: Candidate) -> torch.fx.GraphModule:
    """The site as a module of its own: in float64, without casts and dropout, on the CPU."""
    graph, made, root = torch.fx.Graph(), dict[Node, Any](), torch.nn.Module()
    for number, node in enumerate(inputs):
        made[node] = graph.placeholder(f"input_{number}")
    for number, (node, value) in enumerate(candidate.known.items()):
        root.register_buffer(f"known_{number}", value)
        made[node] = graph.get_attr(f"known_{number}")

    def mapped(value: Any) -> Any:
        if isinstance(value, Node):
            return made[value]
        if isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize >= 2:
            return torch.float64
        if isinstance(value, (torch.device, torch.memory_format)):
            return torch.device("cpu") if isinstance(value, torch.device) else value
        if isinstance(value, int) and not isinstance(value, bool):
            return candidate.literals.get(value, value)
        return value

    for number, node in enumerate(found.nodes):
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and ((calls(node, *CASTS) and _keeps_kind(node)) or calls(node, *DROPOUTS)):
            made[node] = made[source]
            continue
        arguments = torch.fx.node.map_aggregate(node.args, mapped)
        options = torch.fx.node.map_aggregate(node.kwargs, mapped)
        if calls(node, F.scaled_dot_product_attention):
            arguments, options = _without_dropout(arguments, options)
        made[node] = graph.create_node(node.op, node.target, arguments, options, f"node_{number}")
    graph.output(tuple(made[node] for node in candidate.outputs))
    return torch.fx.GraphModule(root, graph)


def _without_dropout(arguments: Any, options: Any) -> tuple[Any, Any]:
    """The arguments of attention, which drops out nothing: its fifth is the probability."""
    if len(arguments) > 4:
        return (*arguments[:4], 0.0, *arguments[5:]), options
    return arguments, {**options, "dropout_p": 0.0}


def _keeps_kind(node: Node) -> bool:
    """Whether a cast keeps floats floats, and integers integers: to another dtype of the kind, or device."""
    source, result = tensor_of(node.args[0]), tensor_of(node)
    if source is None or result is None:
        return False
    return (is_wide(node) and is_wide(node.args[0])) or source.dtype == result.dtype
