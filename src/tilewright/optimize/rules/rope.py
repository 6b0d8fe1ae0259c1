"""Rotary position embeddings of queries and keys in one kernel: by halves, as Llama has them, or by neighbours.

A site is found by its `cat` or `stack`. What is multiplied and does not depend on the tensor that is rotated are the
tables; that both halves of a table are alike, where it is as wide as a head, is read off the graph that made it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tilewright.ops import rope as rope_op
from tilewright.optimize import graph as g
from tilewright.optimize.rule import Candidate, Choice, Declined, Rule, View

_NEGATED = (operator.neg, torch.neg, "neg")
_FLAT = ("flatten", torch.flatten, "view", "reshape", "contiguous", "unsqueeze", "squeeze")
_SPLITS = (operator.getitem, "chunk", torch.chunk, "split", torch.split, "unbind", torch.unbind, *_FLAT)
_INNER = (*_SPLITS, *_NEGATED, *g.MULS, *g.ADDS, *g.SUBS, torch.cat, torch.stack, *g.CASTS, torch.flatten)
_TABLE_STEPS = (
    *g.CASTS, *g.MULS, "unsqueeze", "cos", "sin", torch.cos, torch.sin, operator.getitem, "expand", "view", "reshape",
    "contiguous",
)  # fmt: skip


@dataclass(frozen=True)
class _Rotated:
    """One tensor and its rotated form."""

    anchor: Node
    x: Node
    out: Node
    tables: tuple[Node, Node]


def _find(view: View) -> Iterator[Candidate | Declined]:
    sites = list(_sites(view))
    for first, second in itertools.pairwise([*sites, None]):
        if first is None or not first.out.users:  # it is replaced, as the second of a pair
            continue
        pair = second is not None and set(first.tables) == set(second.tables) and first.x is not second.x
        if pair and second is not None:
            yield from _candidate(view, first, second)
        if first.out.users:
            yield from _candidate(view, first, None)


def _sites(view: View) -> Iterator[_Rotated]:
    taken = set[Node]()
    for node in view.graph.nodes:
        if (
            g.calls(node, torch.cat, torch.concat, torch.stack)
            and len(g.shape_of(node) or ()) >= 4
            and g.is_float(node)
        ):
            found = _around(node)
            if found is not None and found.out not in taken and found.out.users:
                taken.add(found.out)
                yield found


def _around(anchor: Node) -> _Rotated | None:
    """The widest rotation around a `cat`: with the part of a head that is passed through, if there is one."""
    ends = [anchor, *g.chain(anchor, lambda step: g.calls(step, *_INNER) and len(g.shape_of(step) or ()) == 4)]
    sources = [
        each for each in g.ancestors(anchor, 24, lambda step: g.calls(step, *_INNER))
        if len(g.shape_of(each) or ()) == 4 and g.is_float(each)
    ]  # fmt: skip
    for end in reversed(ends[:6]):
        for source in reversed(sources):
            if g.is_same_shape(source, end):
                tables = _tables(source, end)
                if tables is not None:
                    return _Rotated(anchor, source, end, tables)
    return None


def _tables(x: Node, out: Node) -> tuple[Node, Node] | None:
    """The two tensors that parts of `x` are multiplied by on the way to `out`; None where there are others."""
    depends: dict[Node, bool] = {x: True}

    def reaches(node: Node, depth: int) -> bool:
        if node not in depends:
            depends[node] = False
            if depth and g.calls(node, *_INNER):
                reached = [reaches(each, depth - 1) for each in node.all_input_nodes]  # all of them are visited
                depends[node] = any(reached)
        return depends[node]

    if not reaches(out, 10):
        return None
    found = dict[Node, None]()
    for node, is_inner in depends.items():
        if not is_inner or node is x:
            continue
        for each in node.all_input_nodes:
            if not depends.get(each, False):
                if not g.calls(node, *g.MULS) or g.tensor_of(each) is None:
                    return None
                found[each] = None
    return tuple(found) if len(found) == 2 else None  # type: ignore[return-value]


def _candidate(view: View, first: _Rotated, second: _Rotated | None) -> Iterator[Candidate | Declined]:
    xs, outs = [first.x], [first.out]
    if second is not None:
        xs, outs = [*xs, second.x], [*outs, second.out]
    own, table = g.tensor_of(first.x), g.tensor_of(first.tables[0])
    assert own is not None and table is not None
    width, rows = own.shape[-1], _layout(table)
    if any(not _is_of(each, own.dtype, view) for each in (*xs, *outs)):
        if second is None:
            yield Declined(first.anchor, f"its result is not of the dtype of what it rotates, {own.dtype}")
        return
    if rows is None or not isinstance(width, int) or width % 2 or width > 8192:
        yield Declined(first.anchor, f"tables of shape {tuple(table.shape)} are not one row a position")
        return
    choices = tuple(
        Choice(
            rotate, (xs[0], xs[1] if second is not None else None, *tables),
            {"heads_first": rows == 2, "layout": layout}, f"{'queries and keys' if second else 'one tensor'}, {layout}",
            constants=(2, 3),
        )
        for tables in (first.tables, first.tables[::-1])
        for layout in _layouts(view, first.tables, width)
    )  # fmt: skip
    if not choices:
        yield Declined(first.anchor, "the halves of its tables cannot be seen to be alike")
        return
    shapes = [g.tensor_of(each) for each in (xs[0], xs[1] if second else None, *first.tables)]
    layouts = {choice.options["layout"] for choice in choices}

    def sample(generator: torch.Generator) -> list[Tensor | None]:
        return _sample(shapes, rows, layouts, generator)

    yield Candidate(first.anchor, tuple(outs), choices, sample=sample)


def _is_of(node: Node, dtype: torch.dtype, view: View) -> bool:
    """Whether a node has a dtype, or its readers cast it to that, as attention does under autocast."""
    tensor = g.tensor_of(node)
    if tensor is None or tensor.dtype == dtype:
        return tensor is not None
    return view.state[node].autocast == dtype and g.becomes(node, dtype, dict(view.state))


def _layout(table: Tensor) -> int | None:
    """Which dimension of a rotated tensor holds the positions: 2, heads first, or 1; None where that is not clear."""
    shape = (*(1,) * (4 - table.dim()), *table.shape)
    if len(shape) != 4:
        return None
    is_one = [isinstance(size, int) and size == 1 for size in shape]
    return {(True, False): 2, (False, True): 1}.get((is_one[1], is_one[2]))


def _layouts(view: View, tables: tuple[Node, Node], width: int) -> list[str]:
    """How a head's elements may be paired, given what the tables are made of."""
    found = {_kind(table, view.sources) for table in tables}
    last = {g.shape_of(table)[-1] for table in tables}  # type: ignore[index]
    if len(last) == 1 and found == {""}:
        return ["halves, tables of one half", "neighbours, tables of one half"] if max(last) * 2 <= width else []
    if len(found) == 1 and "" not in found:
        return [*found]
    return []


def _kind(node: Node, sources: Mapping[Node, Node]) -> str:
    """How a table repeats itself: its two halves, its neighbours, or not as far as the graph shows."""
    for _ in range(16):
        node = sources.get(node, node)
        if g.calls(node, torch.cat) or g.calls(node, torch.concat):
            parts = node.args[0]
            same = isinstance(parts, (tuple, list)) and len(parts) == 2 and parts[0] is parts[1]
            dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
            return "halves" if same and dim in (-1, len(g.shape_of(node) or ()) - 1) else ""
        if g.calls(node, "repeat_interleave", torch.repeat_interleave):
            times = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
            dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
            return "neighbours" if times == 2 and dim in (-1, len(g.shape_of(node) or ()) - 1) else ""
        if not g.calls(node, *_TABLE_STEPS) or not _keeps_last(node):
            return ""
        if not node.args or not isinstance(node.args[0], Node):
            return ""
        node = node.args[0]
    return ""


def _keeps_last(node: Node) -> bool:
    """Whether a step leaves the last dimension as it is, but for what it does to each number alike."""
    source, result = g.shape_of(node.args[0] if node.args else None), g.shape_of(node)
    if not source or not result or str(source[-1]) != str(result[-1]):
        return False
    if g.calls(node, *g.MULS):
        return not any(isinstance(each, Node) for each in node.args[1:])
    if g.calls(node, operator.getitem):
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return len(index) < len(source) or index[-1] == slice(None) or index[-1] is None
    return True


def _sample(shapes: Any, rows: int, layouts: set[str], generator: torch.Generator) -> list[Tensor | None]:
    q, k, cos, _ = shapes
    positions, batch = 5, 2
    sizes = {"q": 3, "k": 2}
    found: list[Tensor | None] = []
    for name, x in (("q", q), ("k", k)):
        if x is None:
            found.append(None)
            continue
        shape = (
            (batch, sizes[name], positions, x.shape[-1]) if rows == 2 else (batch, positions, sizes[name], x.shape[-1])
        )
        found.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    lead = [size if isinstance(size, int) and size == 1 else batch for size in cos.shape[:-1]]
    lead[rows - 4 + cos.dim()] = positions
    for _ in range(2):
        table = torch.randn((*lead, cos.shape[-1]), generator=generator, dtype=torch.float64)
        if "halves" in layouts:
            table = torch.cat((table[..., : cos.shape[-1] // 2],) * 2, -1)
        elif "neighbours" in layouts:
            table = table[..., ::2].repeat_interleave(2, -1)
        found.append(table)
    return found


def rotate(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, heads_first: bool, layout: str) -> Any:
    """Rotate queries, and keys where there are any, by tables as the site has them."""
    rows = [_rows(table, heads_first, layout) for table in (cos, sin)]
    batch, positions = rows[0].shape[:2]
    tables = [row.reshape(batch * positions, -1) for row in rows]
    tables = [table if table.dtype in (torch.float32, q.dtype) else table.float() for table in tables]
    ids = None
    if batch > 1:
        ids = torch.arange(batch * positions, device=q.device).view(batch, positions)
    return rope_op(
        q, k, *tables, position_ids=ids, interleaved=layout.startswith("neighbours"), heads_first=heads_first
    )  # fmt: skip


def _rows(table: Tensor, heads_first: bool, layout: str) -> Tensor:
    """A table as (batch, positions, half of what is rotated)."""
    table = table.reshape((1,) * (4 - table.dim()) + tuple(table.shape))
    table = table.squeeze(1 if heads_first else 2)
    if layout == "halves":
        return table[..., : table.shape[-1] // 2]
    return table[..., ::2] if layout == "neighbours" else table


RULE = Rule("rope", "rotary embeddings of queries and keys in one kernel", _find)
