"""What rules ask of a captured graph: regions, shapes, chains of elementwise nodes, and the state a node runs under.

The graph is Dynamo's, before autograd: `F.linear`, `F.layer_norm` and `x.to(...)` are one node each, and every node
carries a fake tensor as `meta["example_value"]`.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

LARGEST = 64  # nodes of a region; what is larger is no site of any rule

CASTS = ("to", "float", "half", "bfloat16", "type_as", "type", "double")
ADDS: tuple[Any, ...] = (operator.add, torch.add, "add")
SUBS: tuple[Any, ...] = (operator.sub, torch.sub, "sub")
MULS: tuple[Any, ...] = (operator.mul, torch.mul, "mul")
DIVS: tuple[Any, ...] = (operator.truediv, torch.div, torch.true_divide, "div")
POWS: tuple[Any, ...] = (operator.pow, torch.pow, "pow", torch.square, "square")
DROPOUTS: tuple[Any, ...] = (F.dropout, torch.dropout)
CONTIGUOUS = ("contiguous", "clone")
VIEWS = ("view", "reshape", "transpose", "permute", "contiguous", "flatten", "unsqueeze", "squeeze", "expand", "t")
# What autocast runs in its own dtype, whatever comes in.
MATMULS: tuple[Any, ...] = (
    F.linear, F.scaled_dot_product_attention, torch.addmm, torch.matmul, operator.matmul, torch.bmm, torch.mm,
    torch.baddbmm, torch._C._nn.linear, "matmul", "bmm", "mm",
)  # fmt: skip
_NORMS_WITH_STATISTICS: tuple[Any, ...] = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)
_KNOWN = ("torch", "_operator", "operator", "math", "builtins")  # modules whose functions say so if they write
_WRITES = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.iand, operator.ior,
    operator.ixor, operator.ipow, operator.imatmul, operator.imod, operator.ilshift, operator.irshift, operator.iconcat,
    operator.setitem, operator.delitem,
)  # fmt: skip


def target_of(node: Node) -> Any:
    """The function that a node calls, or the name of the method."""
    return node.target if node.op in ("call_function", "call_method") else None


def calls(node: Any, *targets: Any) -> bool:
    """Whether a node calls one of these functions, or a method of one of these names."""
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return False
    is_method = node.op == "call_method"
    return any(node.target == target for target in targets if isinstance(target, str) == is_method)


def value_of(node: Any) -> Any:
    """The fake value that capture gave a node."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node that is one."""
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """The shape of a node that is a tensor."""
    tensor = tensor_of(node)
    return None if tensor is None else tuple(tensor.shape)


def is_float(node: Any) -> bool:
    """Whether a node is a tensor of floating point."""
    tensor = tensor_of(node)
    return tensor is not None and tensor.is_floating_point()


def is_wide(node: Any) -> bool:
    """Whether a node is a tensor of floating point of 16 bits or more."""
    tensor = tensor_of(node)
    return tensor is not None and tensor.is_floating_point() and tensor.dtype.itemsize >= 2


def is_same_shape(left: Any, right: Any) -> bool:
    """Whether two nodes are tensors of one shape; sizes that only run time knows must be the same symbol."""
    one, other = shape_of(left), shape_of(right)
    return one is not None and other is not None and len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return str(left) == str(right)


def is_cast(node: Any) -> bool:
    """Whether a node gives a floating-point tensor another dtype, or may; to 8 bits it is a quantisation."""
    return calls(node, *CASTS) and is_wide(node) and is_wide(node.args[0])


def before_casts(node: Node) -> Node:
    """What a chain of casts began with."""
    while is_cast(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def tensor_arguments(node: Node) -> list[Node]:
    """The nodes among the arguments that are tensors."""
    return [each for each in node.all_input_nodes if tensor_of(each) is not None]


def is_only_used_by(node: Node, users: Iterable[Node]) -> bool:
    """Whether nobody else reads a node."""
    return set(node.users) <= set(users)


def module_of(node: Node) -> str:
    """The module that a node was captured in, such as `model.layers.0.mlp`; of the root, its class."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "forward"
    path, kind = list(stack.values())[-1]
    path = re.sub(r"^L\['[^']*'\]\.?", "", path)
    path = re.sub(r"\[(?:'([^']*)'|(\d+))\]", lambda match: f".{match[1] or match[2]}", path)
    parts = [part for part in path.split(".") if part not in ("", "_modules", "__dict__")]
    while parts and parts[0] in ("__self__", "__wrapped__", "forward"):  # of what a framework put around
        parts.pop(0)
    path = ".".join(parts)
    return path or getattr(kind, "__name__", str(kind).rpartition(".")[2])


@dataclass(frozen=True)
class Region:
    """The nodes between some inputs and some outputs, in order, and what else they read."""

    nodes: tuple[Node, ...]
    others: tuple[Node, ...]  # parameters, buffers and constants that are not among the inputs


def region(outputs: Sequence[Node], inputs: Sequence[Node | None]) -> Region | None:
    """Collect what computes `outputs` from `inputs`; None where that is too much to be a site."""
    given, found, others, stack = set(inputs), dict[Node, None](), dict[Node, None](), list(outputs)
    while stack:
        node = stack.pop()
        if node in given or node in found:
            continue
        if node.op not in ("call_function", "call_method"):
            others[node] = None
            continue
        found[node] = None
        if len(found) > LARGEST:
            return None
        stack.extend(node.all_input_nodes)
    order = {node: number for number, node in enumerate(outputs[0].graph.nodes)}
    return Region(tuple(sorted(found, key=order.__getitem__)), tuple(others))


def ancestors(node: Node, most: int, follow: Callable[[Node], bool]) -> list[Node]:
    """What a node was computed from, nearest first, through nodes that `follow` is true of."""
    found, stack = dict[Node, None](), [node]
    while stack and len(found) < most:
        step = stack.pop(0)
        for each in step.all_input_nodes:
            if each not in found:
                found[each] = None
                if follow(each):
                    stack.append(each)
    return [each for each in found if tensor_of(each) is not None]


def chain(node: Node, follow: Callable[[Node], bool]) -> list[Node]:
    """The nodes that follow a node one by one, as long as each has one user and `follow` is true of that."""
    found = list[Node]()
    while len(node.users) == 1 and follow(following := next(iter(node.users))):
        found.append(following)
        node = following
    return found


def writes_in_place(node: Node) -> bool:
    """Whether a node may write to a tensor that was there before it."""
    if node.op == "call_method":
        name = str(node.target)
        return (name.endswith("_") and not name.startswith("__")) or name == "__setitem__"
    if node.op != "call_function":
        return node.op == "call_module"
    target = node.target
    if target in _WRITES or node.kwargs.get("out") is not None or calls(node, *_NORMS_WITH_STATISTICS):
        return True
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(getattr(target, name)._schema.is_mutable for name in target.overloads())
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target is not torch.ops.higher_order.tag_activation_checkpoint
    name = getattr(target, "__name__", "")
    module = str(getattr(target, "__module__", None) or "")
    if name.endswith("_") and not name.startswith("__") and module != "_operator":  # which has and_, or_, not_
        return True
    if not module.startswith(_KNOWN):
        return "tilewright" not in node.meta  # a function of the user's: nobody knows
    return _is_told_to_write(node)


def _is_told_to_write(node: Node) -> bool:
    """Whether a function of PyTorch's is asked to work in place, by name or by position."""
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a builtin has no signature
        given = dict(node.kwargs)
    return given.get("inplace", False) is not False or given.get("max_norm") is not None


@dataclass(frozen=True)
class State:
    """What a node runs under: gradients on or off, and autocast's dtype, if any."""

    gradients: bool
    autocast: torch.dtype | None


def states(graph: torch.fx.Graph, start: State, device: str) -> dict[Node, State]:
    """The state that every node runs under."""
    found, state, stack = dict[Node, State](), start, dict[Node, State]()
    for node in graph.nodes:
        found[node] = state
        if calls(node, torch._C._set_grad_enabled):
            state = State(bool(node.args[0]), state.autocast)
        elif calls(node, torch.autograd.grad_mode._enter_inference_mode):
            stack[node] = state
            state = State(state.gradients and not node.args[0], state.autocast)
        elif calls(node, torch.autograd.grad_mode._exit_inference_mode) and node.args[0] in stack:
            state = State(stack[node.args[0]].gradients, state.autocast)
        elif calls(node, torch.amp.autocast_mode._enter_autocast):
            stack[node] = state
            kind, dtype, enabled, *_ = (*node.args, None, True, None)[:3]
            if kind == device:
                dtype = dtype or torch.get_autocast_dtype(device)
                state = State(state.gradients, dtype if enabled in (True, None) else None)
        elif calls(node, torch.amp.autocast_mode._exit_autocast) and node.args[0] in stack:
            state = State(state.gradients, stack[node.args[0]].autocast)
    return found


def current_state(device: str) -> State:
    """The state of the caller."""
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return State(torch.is_grad_enabled(), autocast)


def becomes(node: Node, dtype: torch.dtype, state: dict[Node, State]) -> bool:
    """Whether everybody who reads a node casts it to `dtype` first: matmuls under autocast, behind views and casts."""
    for user in node.users:
        if calls(user, *MATMULS) and state[user].autocast == dtype:
            continue
        looks_through = (calls(user, *VIEWS) and user.args[0] is node) or is_cast(user) or calls(user, operator.getitem)
        if looks_through and is_float(user) and becomes(user, dtype, state):
            continue
        return False
    return bool(node.users)


def bodies(module: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """A graph, and the graphs inside of it: what activation checkpointing wraps, say."""
    yield module
    for child in module.children():
        if isinstance(child, torch.fx.GraphModule):
            yield from bodies(child)


def sources(module: torch.fx.GraphModule) -> dict[Node, Node]:
    """What the inputs of the bodies inside of a graph are outside: by placeholder, the node that is given for it."""
    found, ambiguous = dict[Node, Node](), set[Node]()
    for graph in bodies(module):
        for node in graph.graph.nodes:
            body = node.args[0] if calls(node, torch.ops.higher_order.tag_activation_checkpoint) else None
            inner = getattr(graph, str(body.target), None) if isinstance(body, Node) else None
            if not isinstance(inner, torch.fx.GraphModule):
                continue
            names = [each for each in inner.graph.nodes if each.op == "placeholder"]
            for name, given in zip(names, node.args[1:], strict=False):
                if name in found or not isinstance(given, Node):
                    ambiguous.add(name)
                elif len(names) == len(node.args) - 1:
                    found[name] = given
    return {name: given for name, given in found.items() if name not in ambiguous}
