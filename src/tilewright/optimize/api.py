"""`tilewright.optimize(model)`: the fused kernels in a model somebody else wrote, in place, and back.

Nothing of the model changes but who answers its call: parameters, buffers, classes, `forward`, hooks and state_dict
keys stay. The call is captured by `torch.compile`'s front end, Dynamo, whatever module a residual add and the norm
behind it are in; `optimize.rules` say what is replaced, and `optimize.probe` proves each replacement.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from tilewright.errors import UserError
from tilewright.optimize.backend import MODES, Backend, Captured
from tilewright.optimize.report import Report
from tilewright.optimize.rule import Rule
from tilewright.optimize.rules import chosen
from tilewright.runtime.log import log

_CACHED = ("past_key_values", "cache_params", "past_key_value")  # of a model that generates: as it was
_CAPTURES = 64  # of one model: by shapes, dtypes, options, with gradients and without
_ATTEMPTS = 8  # at a call that raised
_numbers = itertools.count(1)
_said: set[str] = set()  # the models that an outer torch.compile was reported of
_OUTER = (
    "torch.compile was put around a model that tilewright.optimize had changed: it captures the model as it was, and "
    "none of the rules apply. Compile with backend='tilewright', or call optimize(model, compile='default') alone."
)


def optimize(
    model: nn.Module,
    batch: Any = None,
    rules: Sequence[str] | str | None = None,
    *,
    compile: str = "none",
    dynamic: bool | None = None,
) -> Report:
    """Make a model faster in place, by the fused kernels that fit it.

    Args:
        model: any module. Its parameters, class, `forward`, hooks and state_dict keys stay as they are.
        batch: what it is called with in training: a tensor, a tuple, or a dictionary of arguments. With one, every
            rule's gain is measured, and what does not gain is undone. Without, sites are found at the first call.
        rules: the names of those to use, such as ``["add_norm", "glu"]``; all of them if left out.
        compile: ``"none"`` runs everything else op by op, as it was; a mode of ``torch.compile`` hands it to Inductor.
        dynamic: as in ``torch.compile``.

    Returns:
        A `Report`: the sites that were changed and those that were not, with reasons; `report.undo()` takes all back.

    >>> from tilewright.optimize import optimize
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    >>> report = optimize(model)
    >>> _ = model(torch.randn(2, 8))
    >>> [(site.rule, site.where) for site in report.changed], report.undo()
    ([('norm', '1')], None)
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"optimize takes a torch.nn.Module, not {type(model).__name__}.")
    if compile not in MODES:
        raise UserError(f"compile is {compile!r}; choose {', '.join(MODES)}.")
    found = chosen(rules)
    _check(model)
    if batch is None:
        return install(model, found, compile, dynamic)
    from tilewright.optimize.gain import keep_what_gains

    return keep_what_gains(model, batch, found, compile, lambda kept: install(model, kept, compile, dynamic))


@contextlib.contextmanager
def optimized(
    model: nn.Module, batch: Any = None, rules: Sequence[str] | str | None = None, **options: Any
) -> Iterator[Report]:
    """A model is optimized inside of the context, and as it was behind it.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    >>> with optimized(model) as report:
    ...     _ = model(torch.randn(2, 8))
    >>> len(report.changed), model._compiled_call_impl
    (1, None)
    """
    report = optimize(model, batch, rules, **options)
    try:
        yield report
    finally:
        report.undo()


def _check(model: nn.Module) -> None:
    """Refuse a model whose call cannot be replaced rightly."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise UserError(
            "The model is the result of torch.compile; optimize the module that was compiled, with compile='default'."
        )
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise UserError(f"The model is wrapped in {type(model).__name__}; optimize model.module, then wrap it.")
    if isinstance(model, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise UserError(f"The model is a {type(model).__name__}; optimize the module it was made from.")
    own = model._compiled_call_impl
    if isinstance(own, Call):
        raise UserError("The model is optimized already; call report.undo() of that first.")
    if own is not None:
        raise UserError(
            "The model was compiled by model.compile(); optimize(model, compile='default') compiles it with the rules."
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UserError(f"{name} is on the device meta and has no memory; load the weights first, then optimize.")
    homes = {str(each.device) for each in model.parameters()}
    if len(homes) > 1:
        raise UserError(f"The model's weights are on {', '.join(sorted(homes))}; put all of it on one device.")


class Call:
    """What answers the call of an optimized model: the rewritten graph, or the model itself where that must be."""

    def __init__(self, model: nn.Module, backend: Backend, dynamic: bool | None) -> None:
        self.original, self.kind = model._call_impl, type(model).__name__
        self.name = f"{self.kind}_{next(_numbers)}"  # never one of before: Dynamo remembers sizes and floats by it
        self.backend, self.dynamic = backend, dynamic
        self.settings = _settings(backend.mode)
        self.attempts = 0
        self.fast = self._capture()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            _say_outer(self.name)
            return self.original(*arguments, **options)
        if any(options.get(name) is not None for name in _CACHED) or torch._C._are_functorch_transforms_active():
            return self.original(*arguments, **options)
        captures = counters["frames"]["total"]
        try:
            with torch._dynamo.config.patch(**self.settings):
                return self.fast(*arguments, **options)
        except torch._dynamo.exc.TorchDynamoException as error:
            failure = error
        except Exception:
            if counters["frames"]["total"] != captures:
                self._capture_anew()
            raise
        try:
            result = self.original(*arguments, **options)
        except Exception as error:  # the model's own, not what capture made of it
            self._capture_anew()
            raise error from None
        self._give_up(failure)
        return result

    def _capture(self) -> Callable[..., Any]:
        """The call, captured when it is made: by a function of its own, for Dynamo caches by code object."""
        self.attempts += 1
        own = self.original

        def call(*arguments: Any, **options: Any) -> Any:
            return own(*arguments, **options)

        name = f"optimized_{self.name}_{self.attempts}"
        code = call.__code__.replace(co_name=name)
        call = types.FunctionType(code, call.__globals__, name, None, call.__closure__)
        return torch.compile(call, backend=self.backend, dynamic=self.dynamic)

    def _capture_anew(self) -> None:
        """Forget a call that raised while it was captured: Dynamo would never look at it again, or guess from it."""
        if self.attempts < _ATTEMPTS:
            self.fast = self._capture()

    def _give_up(self, failure: Exception) -> None:
        """Leave the model to itself from now on: it runs, and cannot be captured."""
        cause = getattr(failure, "inner_exception", failure)
        words = f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[0]}"
        log.warning("optimize: %s runs as it was, for it could not be captured: %s", self.kind, words)
        self.backend.captured.failures.append(words)
        self.fast = self.original

    def __deepcopy__(self, memo: Any) -> None:
        return None


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def _say_outer(name: str) -> bool:
    if name not in _said:
        _said.add(name)
        log.warning("%s", _OUTER)
    return True


class _Ignored(set[Any]):
    """Functions that Dynamo ignores: it asks whether a logger's method is in it, and iterates for all others.

    torch 2.11 also iterates to write its settings into a log, and fails at functions: those methods are left out.
    """

    def __iter__(self) -> Iterator[Any]:
        return (each for each in super().__iter__() if getattr(logging.Logger, each.__name__, None) is not each)


def _settings(mode: str) -> dict[str, Any]:
    """Dynamo's settings while a model is called."""
    config = torch._dynamo.config
    found: dict[str, Any] = {"recompile_limit": max(config.recompile_limit, _CAPTURES)}
    if mode == "none":
        found["optimize_ddp"] = False  # gradients are there one by one anyway: nothing to split a graph for
    # A log message in a model would cut its graph in two: loss from head, say.
    names = ("ignore_logging_functions", "ignore_logger_methods")
    name = next((each for each in names if hasattr(config, each)), None)
    if name is not None:
        methods = {getattr(logging.Logger, each, None) for each in ("warning_once", "warning", "info", "debug")}
        found[name] = _Ignored({*getattr(config, name), *(methods - {None})})
    return found


def install(model: nn.Module, rules: Sequence[Rule], mode: str, dynamic: bool | None = None) -> Report:
    """Put rules into a model without measuring what they give."""
    captured = Captured()
    call = Call(model, Backend(rules, mode, captured), dynamic)
    model._compiled_call_impl = call  # type: ignore[assignment]

    def undo() -> None:
        if model._compiled_call_impl is call:
            vars(model).pop("_compiled_call_impl")

    return Report(type(model).__name__, [rule.name for rule in rules], mode, captured, undo)


def call_with(model: Callable[..., Any], batch: Any) -> Any:
    """Call a model with a batch: a tensor, a sequence of arguments, or a mapping of them."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
