"""What `torch.compile` calls with a captured graph: the rules run, and what they leave goes to Inductor or runs eager.

`torch.compile(model, backend="tilewright")` is the same by name, for those who compile themselves.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tilewright.optimize.deferred import DeferredTensor
from tilewright.optimize.graph import State, bodies, calls, current_state
from tilewright.optimize.rewrite import Deferral, Kind, Rewritten, Site, rewrite
from tilewright.optimize.rule import Rule
from tilewright.optimize.rules import chosen
from tilewright.runtime.log import log

MODES = ("none", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclasses.dataclass
class Captured:
    """What became of the graphs of one model: every one that Dynamo captured, with its sites."""

    graphs: list[list[Site]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    kinds: dict[Site, Kind] = dataclasses.field(default_factory=dict)

    @property
    def sites(self) -> list[Site]:
        """The sites of all graphs; those of a graph that was captured again, for other shapes say, once."""
        most = dict[Site, int]()
        for sites in self.graphs:
            counts = dict[Site, int]()
            for site in sites:
                counts[site] = counts.get(site, 0) + 1
            for site, number in counts.items():
                most[site] = max(number, most.get(site, 0))
        return [site for site, number in most.items() for _ in range(number)]


class Backend:
    """A backend of `torch.compile` with some rules.

    Args:
        rules: what to look for.
        mode: "none" runs the graph as it is, op by op; any other is a mode of Inductor's.
        captured: where the sites go.
    """

    def __init__(self, rules: Sequence[Rule], mode: str = "none", captured: Captured | None = None) -> None:
        self.rules, self.mode = list(rules), mode
        self.captured = captured if captured is not None else Captured()
        self.lock = threading.Lock()

    def __call__(self, module: GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        device = _device(inputs)
        try:
            done = rewrite(module, self.rules, device, _state(device))
        except Exception as error:  # a graph that no rule can read runs as it is, and the report says so
            log.warning("optimize: the rules could not be applied: %r", error)
            self.captured.failures.append(f"{type(error).__name__}: {error}")
            done = Rewritten(module)
            if self.rules and log.isEnabledFor(10):
                raise
        with self.lock:
            self.captured.graphs.append(done.sites)
            self.captured.failures.extend(done.failures)
            self.captured.kinds.update(done.kinds)
        run = _inner(done.module, inputs, self.mode)
        return _with_deferred(run, done) if done.deferrals else run


def _state(device: str) -> State:
    return current_state(device)


def _device(inputs: Sequence[Any]) -> str:
    found = [each.device.type for each in inputs if isinstance(each, torch.Tensor)]
    return "cuda" if "cuda" in found else "cpu"


def _inner(module: GraphModule, inputs: Sequence[Any], mode: str) -> Callable[..., Any]:
    if mode == "none":
        _checkpoint_eagerly(module)
        return module.forward
    if mode == "aot_eager":  # what a compiler is given, run op by op
        return torch._dynamo.lookup_backend(mode)(module, list(inputs))
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs, config_patches=list_mode_options(mode))  # type: ignore[arg-type, return-value]


def _checkpoint_eagerly(module: GraphModule) -> None:
    """Checkpoint what the model checkpoints: run op by op, the wrapper of a captured region would keep everything."""
    for body in bodies(module):
        for node in list(body.graph.nodes):
            if calls(node, torch.ops.higher_order.tag_activation_checkpoint):
                node.target = _checkpointed
                node.kwargs = {}
        body.recompile()


def _checkpointed(function: Callable[..., Any], *inputs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *inputs, use_reentrant=False)


def _with_deferred(run: Callable[..., Any], done: Rewritten) -> Callable[..., Any]:
    """Put deferred tensors where the graph has left outputs out."""

    def call(*arguments: Any) -> list[Any]:
        outputs = list(run(*arguments))
        for each in done.deferrals:
            outputs[each.index] = _deferred(each, outputs)
        return outputs[: done.outputs]

    return call


def _deferred(deferral: Deferral, outputs: Sequence[Any]) -> DeferredTensor:
    inputs = [outputs[place] for place in deferral.inputs]
    shape = (*inputs[0].shape[:-1], deferral.last)

    def make(*given: Tensor) -> Tensor:
        with torch.autocast(given[0].device.type, deferral.autocast, enabled=deferral.autocast is not None):
            return deferral.make(*given)[0]  # type: ignore[no-any-return]

    return DeferredTensor.of(make, inputs, shape, deferral.dtype)


def tilewright_backend(
    module: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend `"tilewright"` of `torch.compile`: the rules, then Inductor.

    Args:
        module, inputs: the captured graph, as `torch.compile` gives it.
        mode: a mode of Inductor's.
        options: `rules`, the names of those to use, and `mode`, "none" for op by op.

    >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    >>> fast = torch.compile(model, backend="tilewright", options={"mode": "none"})
    >>> fast(torch.randn(2, 8)).shape
    torch.Size([2, 8])
    """
    given = dict(options or {})
    unknown = set(given) - {"rules", "mode"}
    if unknown:
        raise ValueError(
            f"backend tilewright: the options {', '.join(sorted(unknown))} are not known; give rules, mode."
        )
    return Backend(chosen(given.get("rules")), given.get("mode") or mode or "default")(module, inputs)
