"""A graph that can be called: one `torch.library` op, whose mode decides how it runs.

    mlp = compile(graph)
    y = mlp(x=x, up=up, down=down)

    plain       the stages in plain PyTorch, one by one: the definition, and what runs without a Hopper
    serial      a kernel of ours a stage, one after the other
    pdl         the same, each begins while the one before it ends, and fetches its first weights meanwhile
    streams     a kernel a stage, each on a stream of its own: tiles wait for tiles
    persistent  one kernel: tiles wait for tiles
    auto        the fastest of these, measured once for a graph, a dtype, a GPU and these kernels, and kept on disk

Backward computes the stages again in plain PyTorch and differentiates these.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.measure.clock import interleaved_graph_time
from tilewright.runtime import disk_cache, dispatch, nvrtc, paths
from tilewright.runtime.log import log
from tilewright.tilesync import device, launch
from tilewright.tilesync.check import Program, check
from tilewright.tilesync.graph import WIDE, Graph, GraphError, Stage

MODES = ("plain", "serial", "pdl", "streams", "persistent", "auto")
_WAITING = ("streams", "persistent")  # whose tiles wait for tiles
_TOLERANCE = 0.05  # of a candidate's largest error, relative to the largest number: more is a fault, not rounding
_compiled: dict[str, Compiled] = {}  # by name, for the op
_NOT_DECLARED = ("tiles", "_boxes")  # what a stage computes of the rest


def fingerprint(graph: Graph) -> str:
    """Return a name that graphs have in common which compute the same by the same tiles and policies."""

    def describe(stage: Stage) -> list[str]:
        fields = {name: value for name, value in vars(stage).items() if name not in _NOT_DECLARED}
        return [type(stage).__qualname__, repr(sorted(fields.items(), key=lambda item: item[0]))]

    parts = [sorted(map(repr, graph.inputs.items())), list(graph.outputs), [describe(each) for each in graph.stages]]
    return f"{graph.name}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]}"


def compile(graph: Graph, mode: str = "auto") -> Compiled:
    """Check a graph and return what calls it; the same graph and mode give the same.

    >>> from tilewright.tilesync import Gemm, Graph
    >>> double = compile(Graph({"x": (2, 4), "w": (3, 4)}, [Gemm("y", "x", "w", (2, 3, 4), tile=(8, 16))], ["y"]))
    >>> double(x=torch.ones(2, 4), w=torch.ones(3, 4))
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    """
    if mode not in MODES:
        raise GraphError(f"mode is {mode!r}; choose one of {', '.join(MODES)}.")
    name = f"{mode}-{fingerprint(graph)}"
    if name not in _compiled:
        _compiled[name] = Compiled(check(graph), mode, name)
    return _compiled[name]


class Compiled:
    """A checked graph; call it with its inputs by name. It returns its output, or a tuple of several."""

    def __init__(self, program: Program, mode: str, name: str) -> None:
        self.program, self.mode, self.name = program, mode, name
        self.graph = program.graph
        self.packed = self.graph.packed  # found here, for torch.compile traces no lock of a cached property
        if changed := [each for each in self.graph.inputs if each in self.graph.producers]:
            raise GraphError(
                f"The graph changes its input {changed[0]} in place, which a compiled graph cannot; copy it."
            )
        self.fastest: dict[tuple[torch.device, torch.dtype], str] = {}

    def __call__(self, **inputs: Tensor) -> Any:
        outputs = self.run(self._in_order(inputs))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of inputs in the graph's order."""
        wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        if wants_grad or dispatch.is_traced(*inputs):
            return _registered(list(inputs), self.name)
        return self.compute(inputs)

    def _in_order(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        graph = self.graph
        if inputs.keys() != graph.inputs.keys():
            raise GraphError(f"{graph.name} takes the inputs {', '.join(graph.inputs)}, not {', '.join(inputs)}.")
        ordered = [inputs[name] for name in graph.inputs]
        for name, x in zip(graph.inputs, ordered, strict=True):
            if tuple(x.shape) != tuple(graph.inputs[name]):
                raise GraphError(
                    f"{graph.name}: {name} has shape {tuple(x.shape)}, but {graph.inputs[name]} is needed."
                )
            if x.dtype != self.packed.get(name, x.dtype):
                raise GraphError(f"{graph.name}: {name} is {x.dtype}, but {self.packed[name]} is needed.")
            if x.device != ordered[0].device:
                raise GraphError(f"{graph.name}: {name} is on {x.device}, but {ordered[0].device} is needed.")
        return ordered

    def compute(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Compute without autograd."""
        why = launch.why_no_kernel(self.program, inputs)
        if self.mode == "plain" or why:
            if self.mode not in ("plain", "auto") and inputs[0].is_cuda:
                raise GraphError(f"{self.graph.name} cannot run as {self.mode}. {why}")
            if self.mode == "auto" and inputs[0].is_cuda:
                _say_once(f"tilesync: {self.graph.name} runs in plain PyTorch. {why}")
            paths.note("tilesync", paths.REFERENCE, why or "mode is plain")
            return compute_plainly(self.program, inputs)
        mode = self._fastest(inputs) if self.mode == "auto" else self.mode
        paths.note("tilesync", paths.PYTORCH if mode == "plain" else paths.KERNEL, launch.describe(mode))
        return self._run_as(mode, inputs)

    def _run_as(self, mode: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        if mode == "plain":
            return compute_plainly(self.program, inputs)
        runner = launch.runner(self.program, inputs[0].device, inputs[0].dtype)
        return runner.run(mode, dict(zip(self.graph.inputs, inputs, strict=True)))

    def _fastest(self, inputs: Sequence[Tensor]) -> str:
        """Return the fastest mode, measured on these inputs if it is not known; while a graph is captured, plain."""
        key = inputs[0].device, inputs[0].dtype
        if key not in self.fastest:
            if torch.cuda.is_current_stream_capturing():
                log.warning("tilesync: %s is captured as plain; call it once before it is captured", self.graph.name)
                return "plain"
            entry = disk_cache.make_key(
                "tilesync-4", self.name, str(inputs[0].dtype), torch.cuda.get_device_name(key[0]),
                nvrtc.cache_key(device.SOURCE, (), ()),
            )  # fmt: skip
            found = (disk_cache.get(entry) or b"").decode()
            if found not in MODES[:-1]:
                found, is_whole = launch.aside(key[0], lambda: self._measure(inputs))
                if is_whole:
                    disk_cache.put(entry, found.encode())
            self.fastest[key] = found
        return self.fastest[key]

    def _measure(self, inputs: Sequence[Tensor]) -> tuple[str, bool]:
        """Return the fastest mode, and whether no mode failed; on a stream that can be captured."""
        truth = compute_plainly(self.program, inputs)
        if not all(y.isfinite().all() for y in truth):
            log.warning(
                "tilesync: %s is called with numbers that are not finite, by which no mode can be checked, so this "
                "process runs it plainly, and keeps nothing", self.graph.name,
            )  # fmt: skip
            return "plain", False
        right: dict[str, Callable[[], object]] = {"plain": functools.partial(self._run_as, "plain", inputs)}
        failed: dict[str, Exception] = {}
        for mode in MODES[1:-1]:
            try:
                outputs = self._run_as(mode, inputs)
                torch.cuda.synchronize()
                launch.runner(self.program, inputs[0].device, inputs[0].dtype).raise_if_failed()
            except GraphError as error:  # which is so in every process
                log.warning("tilesync: %s cannot run as %s: %s", self.graph.name, mode, error)
                continue
            except RuntimeError as error:
                failed[mode] = error
                continue
            if all(_is_near(*pair) for pair in zip(outputs, truth, strict=True)):
                right[mode] = functools.partial(self._run_as, mode, inputs)
            else:
                log.warning("tilesync: %s computes something else as %s, which is left out", self.graph.name, mode)
        times, errors = interleaved_graph_time(right)
        failed |= errors
        if waiting := [mode for mode in _WAITING if mode in times]:
            try:
                launch.runner(self.program, inputs[0].device, inputs[0].dtype).raise_if_failed()
            except launch.TilesyncError as error:  # of which of them a replayed graph does not say
                failed |= dict.fromkeys(waiting, error)
                times = {mode: timing for mode, timing in times.items() if mode not in waiting}
        for mode, why in failed.items():
            sentence = "tilesync: %s could not be measured as %s, so this process does without, and keeps nothing: %s"
            log.warning(sentence, self.graph.name, mode, why)
        fastest = min(times, key=lambda mode: times[mode].median) if times else "plain"
        measured = ", ".join(f"{mode} {1e6 * timing.median:.1f} us" for mode, timing in times.items())
        log.info("tilesync: %s runs as %s (%s)", self.graph.name, fastest, measured)
        return fastest, not failed


def _is_near(ours: Tensor, truth: Tensor) -> bool:
    error = (ours.double() - truth.double()).abs().max()
    return bool(error <= _TOLERANCE * truth.double().abs().max()) or ours.numel() == 0


@functools.cache
def _say_once(sentence: str) -> None:
    log.warning(sentence)


def compute_plainly(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Compute a graph's outputs by its stages in plain PyTorch, in the dtypes they say; differentiable."""
    values = dict(zip(program.graph.inputs, inputs, strict=True))
    with torch.autocast(inputs[0].device.type, enabled=False):
        for stage in program.stages:
            results = stage.compute(*(values[name] for name in stage.inputs))
            results = results if isinstance(results, tuple) else (results,)
            values.update(zip(stage.outputs, results, strict=True))
    return [values[name] for name in program.graph.outputs]


def find(name: str) -> Compiled:
    """Return the compiled graph of a name."""
    if name not in _compiled:
        raise GraphError(f"The graph {name} was not compiled in this process; call tilesync.compile first.")
    return _compiled[name]


@torch.library.custom_op("tilewright::tilesync", mutates_args=())
def _registered(inputs: list[Tensor], name: str) -> list[Tensor]:
    # A custom op returns nothing that it was given.
    return [y.clone() if any(y is x for x in inputs) else y for y in find(name).compute(inputs)]


def _fake(inputs: list[Tensor], name: str) -> list[Tensor]:
    graph = find(name).graph
    specs = [graph.specs[output] for output in graph.outputs]
    return [
        inputs[0].new_empty(spec.shape, dtype=torch.float32 if spec.dtype == WIDE else inputs[0].dtype)
        for spec in specs
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.name = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, upstream: Sequence[Tensor]) -> tuple[Any, ...]:
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors]
        outputs = compute_plainly(find(ctx.name).program, leaves)
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, list(upstream), allow_unused=True))
    return [next(found) if x.requires_grad else None for x in leaves], None


dispatch.fake_of(_registered)(_fake)
_registered.register_autograd(_differentiate, setup_context=_save)
