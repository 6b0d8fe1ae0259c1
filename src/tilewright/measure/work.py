"""What every op of a step was asked to do, FLOPs and bytes, beside the time that its kernels took.

A trace has kernels and their times, and says nothing of the work in them. So one step runs observed twice at once: by
a dispatch mode, which sees the tensors that go into each op and come out of it, and by torch's profiler, which sees
what each op launched. The two meet in windows: the mode opens one around each op, and whatever is launched in it is
that op's. Ops that launch kernels past the dispatcher say so through `launching`. A compiled step would not run as
such under a mode: of that, the profiler tells the ops and the kernels, with the shapes of their arguments.

    bytes    each tensor that goes in is read once, each that comes out, or is changed, is written once
    FLOPs    of products and attention as torch's own formulas have them, half of that under a causal mask; of all other
             ops one for each element that they read or write

What an op does more than that, an intermediate that it writes and reads again say, shows as a kernel below its limit.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewright.measure.profile import category, device_work, interval, synchronize

_WINDOW = "tilewright.work."
_MOST = 80  # kinds of work that are told apart
# These do not read what they change.
_OVERWRITE = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_")
_GATHER = ("embedding", "index", "index_select", "gather")  # read of their first argument what comes out, and no more
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_SIZES = {  # bytes of an element, and what products of them run as; by the names that a trace has for dtypes
    "c10::BFloat16": (2, "bf16"), "c10::Half": (2, "bf16"), "float": (4, "fp32"), "double": (8, "fp64"),
    "long int": (8, ""), "int": (4, ""), "short": (2, ""), "unsigned char": (1, ""), "signed char": (1, ""),
    "bool": (1, ""),
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What one call has to do. `dtype` is that of a product's operands, and empty where nothing is multiplied."""

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
    calls: int
    seconds: float
    flops: float
    bytes: float

    def limit(self, bytes_per_second: float, flops_per_second: dict[str, float]) -> float:
        """Seconds below which the same work cannot go at these rates; 0 where it is not known what the work is.

        >>> Work("aten::mm", "", "bf16", "gemm", "product", 1, 2.0, 400.0, 100.0).limit(50.0, {"bf16": 400.0})
        2.0
        """
        rate = flops_per_second.get(self.dtype) or flops_per_second.get("fp32") or math.inf
        return max(self.bytes / bytes_per_second, self.flops / rate)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Watch(TorchDispatchMode):
    """Opens a window around each launch that it is told of and, as a mode, around each op; keeps what was asked."""

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
        if self._inside or _only_looks(op):
            return op(*args, **kwargs)
        with self.window():
            out = op(*args, **kwargs)
        self.asked.append(_asked(op, args, kwargs, out))
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
    def launch(self, kernel: str, tensors: Iterable[torch.Tensor | None], flops: float = 0.0) -> Iterator[None]:
        """Around the launch of a kernel that no dispatcher knows; `tensors` are all that it reads or writes."""
        if self._inside:  # an op whose window is open
            yield
            return
        with self.window():
            yield
        some = [tensor for tensor in tensors if tensor is not None]
        dtype = _dtype(some[0]) if flops else ""
        self.asked.append(
            Asked(kernel, _shapes(some), dtype, flops or sum(map(_elements, some)), sum(map(_bytes, some)))
        )


watching: Watch | None = None  # who is looking, if anybody


def launching(
    kernel: str, tensors: Iterable[torch.Tensor | None], flops: float = 0.0
) -> contextlib.AbstractContextManager[None]:
    """`Watch.launch`, if anybody is looking."""
    return contextlib.nullcontext() if watching is None else watching.launch(kernel, tensors, flops)


class Observation:
    """One step between `begin` and `end`, of which it has to be said whether it is compiled.

    >>> observation = Observation(compiled=False)
    >>> observation.begin()
    >>> _ = torch.ones(8, 4) @ torch.ones(4, 2)
    >>> [(work.op, work.shapes, work.flops, work.bytes) for work in observation.end() if work.flops > 100]
    [('aten::mm', '8x4, 4x2', 128.0, 224.0)]
    """

    def __init__(self, compiled: bool) -> None:
        self._compiled, self._watch = compiled, Watch()

    def begin(self) -> None:
        global watching
        synchronize()
        self._stack = contextlib.ExitStack()
        self._profiler = self._stack.enter_context(profile(record_shapes=True))
        if not self._compiled:
            self._stack.enter_context(self._watch)
        watching = self._watch

    def end(self) -> list[Work]:
        """The work of the step, what took longest first."""
        global watching
        synchronize()
        watching = None
        self._stack.close()
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
                windows.append((*interval(event), asked[int(name.removeprefix(_WINDOW))]))
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
        if not (changes and (argument.is_out or short in _OVERWRITE)):
            read += _tensors(value)
    for returned, value in zip(op._schema.returns, out if isinstance(out, tuple) else (out,), strict=False):
        if returned.alias_info is None:
            written += _tensors(value)
    flops = _flops(op, args, kwargs, out)
    moved = sum(map(_bytes, (*read, *written)))
    if short in _GATHER and read and written:
        moved += min(_bytes(read[0]), _bytes(written[0])) - _bytes(read[0])
    operands = [tensor for tensor in read if tensor.ndim > 1]
    dtype = _dtype(operands[0]) if flops and operands else ""
    return Asked(name, _shapes(read or written), dtype, flops or sum(map(_elements, (*read, *written))), moved)


def _flops(op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    """Of products and attention; 0 of anything else."""
    from torch.utils import flop_counter  # which imports Triton

    formula = flop_counter.flop_registry.get(op._overloadpacket)
    if formula is not None:
        count = float(formula(*args, **kwargs, out_val=out))
    elif "scaled_dot_product" in op.name() or "fused_attention" in op.name():  # those of a CPU are in no registry
        shapes = [tensor.shape for tensor in args if isinstance(tensor, torch.Tensor)]
        backward = "backward" in op.name()
        count_of: Any = flop_counter.sdpa_backward_flop_count if backward else flop_counter.sdpa_flop_count
        count = float(count_of(*shapes[: 4 if backward else 3]))
    else:
        return 0.0
    given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)} | kwargs
    return count / 2 if given.get("is_causal") else count


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
    if name.endswith("mm"):
        left, right = (shape for shape, _ in (given[1:3] if "add" in name else given[:2]))
        flops = 2.0 * math.prod(left) * right[-1]
    elif "scaled_dot_product" in name:  # causal, as all that is trained here; its results are not among its arguments
        backward = "backward" in name
        query, key = (shape for shape, _ in (given[1:3] if backward else given[:2]))
        flops = (5.0 if backward else 2.0) * math.prod(query) * key[-2]
        moved += (3 if backward else 1) * math.prod(query) * pairs[0][1]
    shapes = _joined([shape for shape, _, _ in pairs])
    return Asked(name, shapes, pairs[0][2] if flops else "", flops or sum(elements), moved)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _dtype(tensor: torch.Tensor) -> str:
    name = _DTYPES.get(tensor.dtype, "")
    return "tf32" if name == "fp32" and tensor.is_cuda and torch.backends.cuda.matmul.allow_tf32 else name


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
