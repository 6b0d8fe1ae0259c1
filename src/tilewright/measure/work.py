"""What every op of a step was asked to do, FLOPs and bytes, beside the time that its kernels took.

A trace has kernels and their times, and says nothing of the work in them. So one step runs observed twice at once: by
a dispatch mode, which sees the tensors that go into each op and come out of it, and by torch's profiler, which sees
what each op launched. The two meet in windows: the mode opens one around each op, and whatever is launched in it is
that op's. Ops that launch kernels past the dispatcher say so through `launching`. A compiled step would not run as
such under a mode: of that, the profiler tells the ops and the kernels, with the shapes of their arguments.

    bytes    each tensor that goes in is read once, each that comes out, or is changed, is written once
    FLOPs    of matmuls and attention as torch's own formulas have them, half of that under a causal mask; of all other
             ops one for each element that they read or write

What an op does more than that, an intermediate that it writes and reads again say, shows as a kernel below its limit.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewright.measure.checked import Amount, Count
from tilewright.measure.profile import category, device_work, interval, synchronize

_WINDOW = "tilewright.work."
_MOST = 80  # kinds of work that are told apart
# These do not read what they change, and those not what they are called on.
_OVERWRITE = re.compile(r"(copy|fill|zero|normal|uniform|bernoulli|random|_foreach_zero|_foreach_copy)_$")
_SHAPE_ONLY = re.compile(r"\w+_like$|new_\w+$|nll_loss_backward$")
# Of a table these read what comes out, and no more; the others write what goes in.
_GATHER = ("embedding", "index", "index_select", "gather", "nll_loss_forward")
_SCATTER = ("index_put_", "index_add_", "index_copy_", "index_fill_", "scatter_", "scatter_add_")
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_SIZES = {  # bytes of an element, and what matmuls of them run as; by the names that a trace has for dtypes
    "c10::BFloat16": (2, "bf16"), "c10::Half": (2, "bf16"), "float": (4, "fp32"), "double": (8, "fp64"),
    "long int": (8, ""), "int": (4, ""), "short": (2, ""), "unsigned char": (1, ""), "signed char": (1, ""),
    "bool": (1, ""),
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What one call has to do. `dtype` is that of a matmul's operands, and empty where nothing is multiplied."""

    op: str
    shapes: str
    dtype: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class Work:
    """All calls of an op with the same shapes in one step; where nobody knows what was asked, FLOPs and bytes are 0."""

    op: str
    shapes: str
    dtype: str
    kernel: str  # the one that took longest
    category: str
    calls: Count
    seconds: Amount
    flops: Amount
    bytes: Amount

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Watch(TorchDispatchMode):
    """Opens a window around each launch that it is told of and, as a mode, around each op; keeps what was asked."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self.is_mode = False
        self._inside = False

    def __enter__(self) -> Watch:
        self.is_mode = True
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_schema = isinstance(op, torch._ops.OpOverload)  # and is no op of ops
        if self._inside or (has_schema and _only_looks(op)):
            return op(*args, **kwargs)
        with self.window():
            out = op(*args, **kwargs)
        asked = Asked(str(op), "", "", 0.0, 0.0)
        if has_schema:
            with contextlib.suppress(Exception):  # whatever somebody's op takes, the step goes on
                asked = _asked(op, args, kwargs, out)
        self.asked.append(asked)
        return out

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """What is launched here is the work of what is next in `asked`."""
        self._inside = True
        try:
            with torch._C._profiler._RecordFunctionFast(f"{_WINDOW}{len(self.asked)}"):
                yield
        finally:
            self._inside = False

    @contextlib.contextmanager
    def launch(
        self, kernel: str, tensors: Sequence[torch.Tensor | None], flops: float = 0.0, changed: Sequence[int] = ()
    ) -> Iterator[None]:
        """Observe the launch of a kernel that no dispatcher knows; a context manager around it.

        Args:
            tensors: all that it reads or writes.
            flops: of its matmuls; 0 where it has none.
            changed: which of the tensors it reads and writes.
        """
        if self._inside:  # an op whose window is open
            yield
            return
        with self.window():
            yield
        some = [tensor for tensor in tensors if tensor is not None]
        moved = [*some, *(tensor for index in changed if (tensor := tensors[index]) is not None)]
        dtype = _dtype(some[0]) if flops else ""
        self.asked.append(
            Asked(kernel, _shapes(some), dtype, flops or sum(map(_elements, moved)), sum(map(_bytes, moved)))
        )


watching: Watch | None = None  # who is looking, if anybody


def launching(
    kernel: str, tensors: Sequence[torch.Tensor | None], flops: float = 0.0, changed: Sequence[int] = ()
) -> contextlib.AbstractContextManager[None]:
    """`Watch.launch`, if anybody is looking."""
    return contextlib.nullcontext() if watching is None else watching.launch(kernel, tensors, flops, changed)


class Observation:
    """One step between `begin` and `end`, of which it has to be said whether it is compiled.

    >>> observation = Observation(compiled=False)
    >>> observation.begin()
    >>> _ = torch.ones(8, 4) @ torch.ones(4, 2)
    >>> [(work.op, work.shapes, work.flops, work.bytes) for work in observation.end() if work.flops > 100]
    [('aten::mm', '8x4, 4x2', 128.0, 224.0)]
    """

    def __init__(self, compiled: bool) -> None:
        self._compiled, self._watch, self._stack = compiled, Watch(), contextlib.ExitStack()

    def begin(self) -> None:
        global watching
        synchronize()
        self._profiler = self._stack.enter_context(profile(record_shapes=True))
        if not self._compiled:
            self._stack.enter_context(self._watch)
        watching = self._watch

    def close(self) -> None:
        """Stop observing, whatever came of it."""
        global watching
        watching = None
        self._stack.close()

    def end(self) -> list[Work]:
        """The work of the step, what took longest first."""
        synchronize()
        self.close()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            text = path.read_text(encoding="utf-8", errors="replace")
        return read_work(json.loads(text, strict=False)["traceEvents"], self._watch.asked, self._compiled)


def read_work(events: Sequence[dict[str, Any]], asked: Sequence[Asked], compiled: bool) -> list[Work]:
    """What the windows of a trace were asked to do, and the time of what was launched in them.

    On a machine without a device it is the time of the windows themselves.
    """
    windows: list[tuple[int, int, Asked]] = []
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            name = event["name"]
            if name.startswith(_WINDOW):
                index = int(name.removeprefix(_WINDOW))
                if index < len(asked):  # an op that raised was asked for nothing
                    windows.append((*interval(event), asked[index]))
            elif compiled and (told := _told(event)) is not None:
                windows.append((*interval(event), told))
    windows.sort(key=lambda window: window[:2])
    starts = [start for start, _, _ in windows]

    def window_at(time: int) -> str:
        index = bisect.bisect_right(starts, time) - 1
        return str(index) if index >= 0 and time < windows[index][1] else ""

    spent: dict[Asked, list[tuple[str, int, str]]] = {}  # kernel, nanoseconds, call
    for piece in device_work(events, window_at):
        known = piece.phase.isdecimal()
        one = windows[int(piece.phase)][2] if known else Asked(piece.name, "", "", 0.0, 0.0)
        spent.setdefault(one, []).append((piece.name, piece.own, piece.phase if known else f"launch {piece.launch}"))
    if not spent:
        for index, (start, end, one) in enumerate(windows):
            spent.setdefault(one, []).append((one.op, end - start, str(index)))
    found = sorted((_work(one, runs) for one, runs in spent.items()), key=lambda work: -work.seconds)
    return found[:_MOST] + _rest(found[_MOST:])


def _work(one: Asked, runs: list[tuple[str, int, str]]) -> Work:
    kernels: dict[str, int] = {}
    for kernel, nanoseconds, _ in runs:
        kernels[kernel] = kernels.get(kernel, 0) + nanoseconds
    longest = max(kernels, key=lambda kernel: kernels[kernel])
    calls = len({call for _, _, call in runs})
    return Work(
        one.op, one.shapes, one.dtype, longest, category(longest), calls, sum(kernels.values()) / 1e9,
        calls * one.flops, calls * one.bytes,
    )  # fmt: skip


def _rest(found: Sequence[Work]) -> list[Work]:
    if not found:
        return []
    calls, seconds = sum(work.calls for work in found), sum(work.seconds for work in found)
    return [Work(f"{len(found)} others", "", "", "", "various", calls, seconds, 0.0, 0.0)]


def _only_looks(op: Any) -> bool:
    """Whether an op moves nothing: it returns a view, or memory with nothing in it."""
    if op.name().startswith(("aten::empty", "aten::new_empty", "profiler::", "prim::")):
        return True
    return any(each.alias_info is not None and not each.alias_info.is_write for each in op._schema.returns)


def _asked(op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Asked:
    name = op.name().split(".")[0]
    short = name.split("::")[1]
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    given = list(zip(op._schema.arguments, args, strict=False))
    given += [(argument, kwargs[argument.name]) for argument in op._schema.arguments if argument.name in kwargs]
    for argument, value in given:
        changes = argument.alias_info is not None and argument.alias_info.is_write
        if changes:
            written += _tensors(value)
        unread = argument.name == "self" and _SHAPE_ONLY.match(short)
        if not unread and not (changes and (argument.is_out or _OVERWRITE.match(short))):
            read += _tensors(value)
    for returned, value in zip(op._schema.returns, out if isinstance(out, tuple) else (out,), strict=False):
        if returned.alias_info is None:
            written += _tensors(value)
    shapes, flops = _shapes(read or written), _flops(op, args, kwargs, out)
    operands = [tensor for tensor in read if tensor.ndim > 1]
    dtype = _dtype(operands[0]) if flops and operands else ""
    if short in _GATHER and read and written:
        read[0] = min(read[0], written[0], key=_bytes)
    elif short in _SCATTER and len(read) > 1:
        source = max(read[1:], key=_bytes)
        read[0], written[0] = (min(table, source, key=_bytes) for table in (read[0], written[0]))
    moved = (*read, *written)
    return Asked(name, shapes, dtype, flops or sum(map(_elements, moved)), sum(map(_bytes, moved)))


def _flops(op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of a matmul or of attention, and 0 for anything else."""
    if "scaled_dot_product" in op.name():
        shapes = [tensor.shape for tensor in args if isinstance(tensor, torch.Tensor)]
        given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
        return _attention(op.name(), shapes, bool(given.get("is_causal")))
    from torch.utils.flop_counter import flop_registry  # which imports Triton

    formula = flop_registry.get(op._overloadpacket)
    args = [each for each in args if not isinstance(each, torch.dtype)]  # of a matmul's result: no formula knows it
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))


def _attention(name: str, shapes: Sequence[Sequence[int]], causal: bool) -> float:
    """Two matmuls forward and five backward, of every head of the queries."""
    backward = "backward" in name
    query, key = shapes[1:3] if backward else shapes[:2]
    return (10.0 if backward else 4.0) * math.prod(query) * key[-2] / (2 if causal else 1)


def _told(event: dict[str, Any]) -> Asked | None:
    """What a compiled step's op or kernel was asked, by the shapes of its arguments, what it writes among them."""
    name, arguments = event["name"], event.get("args", {})
    known = re.match(r"triton_|aten::(addmm|mm|baddbmm|bmm)$|aten::_scaled_dot_product_\w+$", name)
    given = list(zip(arguments.get("Input Dims", ()), arguments.get("Input type", ()), strict=False))
    pairs = [(shape, *_SIZES[kind]) for shape, kind in given if shape and kind in _SIZES]
    if known is None or not pairs:
        return None
    elements = [float(math.prod(shape)) for shape, _, _ in pairs]
    moved = sum(count * size for count, (_, size, _) in zip(elements, pairs, strict=True))
    flops = 0.0
    if name.startswith(("triton_tem", "triton_mm")):
        flops = _of_template([shape for shape, _, _ in pairs])
        if not flops:
            return None
    elif name.endswith("mm"):
        left, right = (shape for shape, _ in (given[1:3] if "add" in name else given[:2]))
        flops = 2.0 * math.prod(left) * right[-1]
    elif "scaled_dot_product" in name:  # whose results are not among its arguments
        flops = _attention(name, [shape for shape, _ in given], _is_causal(name, arguments.get("Concrete Inputs", ())))
        moved += (3 if "backward" in name else 1) * elements[0] * pairs[0][1]
    shapes = _joined([shape for shape, _, _ in pairs])
    return Asked(name, shapes, _runs_as(pairs[0][2]) if flops else "", flops or sum(elements), moved)


def _of_template(shapes: Sequence[Sequence[int]]) -> float:
    """FLOPs of a matmul whose matrices are among these; 0 where no three of them fit together.

    >>> _of_template([(8,), (4, 16), (16, 8), (4, 8)])
    1024.0
    """
    for left, right, out in itertools.permutations((shape for shape in shapes if len(shape) == 2), 3):
        if left[1] == right[0] and (left[0], right[1]) == tuple(out):
            return 2.0 * math.prod(left) * right[1]
    return 0.0


def _is_causal(name: str, values: Sequence[str]) -> bool:
    op = getattr(torch.ops.aten, name.removeprefix("aten::"))
    index = [argument.name for argument in op.default._schema.arguments].index("is_causal")
    return index < len(values) and values[index] == "True"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _dtype(tensor: torch.Tensor) -> str:
    return _runs_as(_DTYPES.get(tensor.dtype, str(tensor.dtype)))


def _runs_as(name: str) -> str:
    return "tf32" if name == "fp32" and torch.backends.cuda.matmul.allow_tf32 and torch.cuda.is_available() else name


def _elements(tensor: torch.Tensor) -> float:
    """Those that are there: what is expanded lies in memory once."""
    return float(math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride))


def _bytes(tensor: torch.Tensor) -> float:
    return _elements(tensor) * tensor.element_size()


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return _joined([tensor.shape for tensor in tensors])


def _joined(shapes: Sequence[Sequence[int]]) -> str:
    """
    >>> _joined([(8, 4), (4,)]), _joined([(2,)] * 9)
    ('8x4, 4', '9 tensors of 18')
    """
    if len(shapes) > 6:
        return f"{len(shapes)} tensors of {sum(map(math.prod, shapes)):,}"
    return ", ".join("x".join(map(str, shape)) for shape in shapes if len(shape))
