"""What an attention mask of a graph is: causal, a window, or no mask at all, and beside it padding, hidden keys.

A captured graph has its sizes as numbers. A mask that is made of them alone, by `arange` and comparisons, has the same
value in every call: it is computed here once, on the CPU, and looked at. Of one that is such a mask *and* another that
has a row of keys for each sequence of the batch, all but that other is looked at.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx import Node

from tilewright.optimize import graph as g

LARGEST = 2**28  # elements of a mask that is looked at, in 8 bytes each at most
_NODES = 200

# What masks are made of. All of it is a function of its arguments alone.
_KNOWN = frozenset({
    "arange", "ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like",
    "add", "sub", "mul", "neg", "abs", "floordiv", "diff", "cumsum", "eq", "__eq__", "ne", "le", "lt", "ge", "gt",
    "and_", "or_", "not_", "invert", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or",
    "bitwise_not", "__and__", "__or__", "__invert__", "where", "masked_fill", "tril", "triu", "getitem", "view",
    "reshape", "unsqueeze", "squeeze", "expand", "transpose", "contiguous", "clone", "to", "bool", "float", "type_as",
    "finfo",
})  # fmt: skip
_ANDS: tuple[Any, ...] = (operator.and_, torch.logical_and, torch.bitwise_and, "logical_and", "bitwise_and", "__and__")
_SAME: tuple[Any, ...] = ("expand", "contiguous", "clone", "to", "bool", torch.clone)  # of booleans


def read(mask: Node) -> tuple[Kind, Node | None] | str:
    """The kind of a mask, and what hides keys beside it, `(batch, 1, 1, keys)`; or, in a sentence, why it has none."""
    hiding = _list_hiding(mask)
    if len(hiding) > 1:
        return "its mask hides keys by more than one tensor"
    keys = hiding[0] if hiding else None
    value = evaluate(mask, keys)
    if isinstance(value, str):
        return value
    kind = kind_of(value)
    return "its mask is neither causal nor a window, and hides something" if kind is None else (kind, keys)


def _list_hiding(mask: Node) -> list[Node]:
    """What, joined to the rest by `and` alone, hides a key from all queries and heads, and is known at run time only.

    Whatever such a tensor contains, it hides keys and nothing else, for it has no other dimension but the batch.
    """
    found, stack = dict[Node, None](), [mask]
    while stack:
        node = stack.pop()
        tensor = g.tensor_of(node)
        if tensor is None or tensor.dtype != torch.bool:
            continue
        if tensor.dim() == 4 and tensor.shape[1] == tensor.shape[2] == 1:
            if isinstance(_ancestors(node), str):
                found[node] = None
        elif g.calls(node, *_ANDS) or (g.calls(node, *_SAME) and _has_four(node.args[0])) or _is_whole_slice(node):
            stack += node.all_input_nodes
    return list(found)


def _has_four(node: Any) -> bool:
    """Whether a node has the four dimensions of a mask, which broadcasting then leaves where they are."""
    shape = g.shape_of(node)
    return shape is not None and len(shape) == 4


def _is_whole_slice(node: Node) -> bool:
    """Whether a node is all of another, by slices."""
    if not g.calls(node, operator.getitem) or g.shape_of(node) != g.shape_of(node.args[0]):
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return len(node.all_input_nodes) == 1 and all(each is Ellipsis or isinstance(each, slice) for each in index)


def evaluate(mask: Node, hiding: Node | None = None) -> Tensor | str:
    """The mask's value where `hiding` hides nothing; or, in a sentence, why it has none before the model is called."""
    shape = g.shape_of(mask)
    if shape is None or not all(isinstance(size, int) for size in shape):
        return "its mask has a size that is known at run time only"
    if torch.Size(shape).numel() > LARGEST:
        return f"its mask has more than {LARGEST:,} elements"
    nodes = _ancestors(mask, hiding)
    if isinstance(nodes, str):
        return nodes
    values = dict[Node, Any]()
    if hiding is not None:
        values[hiding] = torch.ones(g.shape_of(hiding) or (), dtype=torch.bool, device="cpu")
    last = {each: node for node in nodes for each in node.all_input_nodes}

    def valued(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu"):
            return "cpu"
        return values[value] if isinstance(value, Node) else value

    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes(), torch.device("cpu"):
        for node in nodes:
            args = torch.fx.node.map_aggregate(node.args, valued)
            kwargs = torch.fx.node.map_aggregate(node.kwargs, valued)
            try:
                if node.op == "call_method":
                    values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                else:
                    values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            except Exception as error:
                return f"its mask could not be computed: {type(error).__name__}"
            for each in node.all_input_nodes:
                if last[each] is node:
                    values.pop(each, None)
    found = values[mask]
    return found if isinstance(found, Tensor) and tuple(found.shape) == shape else "its mask is no tensor"


def _ancestors(mask: Node, hiding: Node | None = None) -> list[Node] | str:
    """Everything that a mask is computed from, in order; but for what computes `hiding`."""
    found, stack = dict[Node, None](), [mask]
    while stack:
        node = stack.pop()
        if node in found or node is hiding:
            continue
        if node.op not in ("call_function", "call_method"):
            return "its mask depends on what the model is called with"
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        if name not in _KNOWN or g.writes_in_place(node):
            return f"its mask is made by {name}"
        found[node] = None
        if len(found) > _NODES:
            return "its mask takes too many steps"
        stack += node.all_input_nodes
    if is_written(mask, *found, *filter(None, [hiding])):
        return "its mask is written to in place"
    order = {node: number for number, node in enumerate(mask.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def is_written(*nodes: Node) -> bool:
    """Whether a graph writes to one of these in place, or to what shares its memory."""
    written = set[int]()
    for node in nodes[0].graph.nodes:
        if g.writes_in_place(node):
            written.update(filter(None, map(_storage, node.all_input_nodes)))
    return any(_storage(node) in written for node in nodes)


def _storage(node: Node) -> int | None:
    """What a tensor shares with its views."""
    tensor = g.tensor_of(node)
    return None if tensor is None else tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Kind:
    """What a mask lets a query see: as many keys before its own and behind it; None is all of them."""

    before: int | None = None
    behind: int | None = None

    @property
    def is_window(self) -> bool:
        return self.before is not None or self.behind not in (None, 0)

    def draw(self, rows: int, columns: int) -> Tensor:
        """The mask itself, of booleans."""
        seen = torch.ones(rows, columns, dtype=torch.bool)
        seen = seen if self.behind is None else seen.tril(self.behind)
        return seen if self.before is None else seen.triu(-self.before)

    def __str__(self) -> str:
        """
        >>> [str(kind) for kind in (Kind(), Kind(None, 0), Kind(511, 0), Kind(64, 64), Kind(0, None))]
        ['nothing hidden', 'causal', 'window of 512', 'window of 64 + 1 + 64', 'window of 0 + 1 + all']
        """
        if not self.is_window:
            return "nothing hidden" if self.behind is None else "causal"
        if self.behind == 0 and self.before is not None:
            return f"window of {self.before + 1}"
        before, behind = ("all" if side is None else side for side in (self.before, self.behind))
        return f"window of {before} + 1 + {behind}"


def kind_of(mask: Tensor) -> Kind | None:
    """The kind of a mask; None for any other.

    >>> kind_of(torch.ones(3, 3).tril().bool()), kind_of(torch.ones(2, 3).bool()), kind_of(torch.zeros(3, 3).bool())
    (Kind(before=None, behind=0), Kind(before=None, behind=None), None)
    >>> kind_of(torch.full((2, 2), float("-inf")).triu(1)), kind_of(torch.eye(3).bool())
    (Kind(before=None, behind=0), Kind(before=0, behind=0))
    """
    if mask.dtype == torch.bool:
        seen = mask
    elif mask.is_floating_point():
        hidden = mask <= torch.finfo(mask.dtype).min
        if not torch.equal(mask.masked_fill(hidden, 0.0), torch.zeros_like(mask)):
            return None
        seen = ~hidden
    else:
        return None
    while seen.dim() > 2:  # a batch or a head of which the others are copies
        if not torch.equal(seen, seen[:1].expand_as(seen)):
            return None
        seen = seen[0]
    rows, columns = seen.shape
    if not rows or not columns:
        return None
    behind, before = int(seen[0].sum()) - 1, int(seen[:, 0].sum()) - 1  # of a band, by its first row and column
    kind = Kind(None if before >= rows - 1 else before, None if behind >= columns - 1 else behind)
    is_one = before >= 0 and behind >= 0 and torch.equal(seen, kind.draw(rows, columns))
    return kind if is_one else None
