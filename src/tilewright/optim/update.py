"""One optimizer step in one pass over memory, of many tensors at once: AdamW, Lion, SGD or Adafactor.

    adamw      m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p = p (1 - lr d) - lr m' / (sqrt(v') + eps)
    lion       p = p (1 - lr d) - lr sign(b1 m + (1 - b1) g);    m = b2 m + (1 - b2) g
    sgd        g = g + d p;  m = b1 m + g;  p = p - lr m
    adafactor  as torch.optim.Adafactor: of a matrix, v is kept as the means of its rows and columns

where d is the weight decay, m' = m / (1 - b1^t), v' = v / (1 - b2^t), and all is computed in float32. What is stored:

Parameters. float32 as they are. bfloat16 has eight bits, and an update below 1/512 of its parameter rounds to nothing.
Either a second bfloat16 keeps what rounding lost, to be added next time ("kahan"), or the rounding goes up or down by
chance, up the more often the nearer ("stochastic"), which is right in the mean and needs no memory.

States are float32, bfloat16 or 8-bit codes: `optim/states.py` has them.

A launch for each tensor would leave the device idle at the end of each. One launch takes all tensors of the same
dtypes: their addresses lie in a table on the device, a row a tensor, which is kept for as long as they stay where they
are.

Random bits are Philox of (seed, element, step): the same run draws the same ones. The step counter is a tensor on the
device, as are `grad_scale`, by which gradients are divided, and `found_inf`: where that is not 0, nothing changes.

Floor: every tensor once in, all but the gradient once out; `cost` has the bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.measure import work
from tilewright.optim.reference import in_float32, log_of, reference
from tilewright.optim.states import BLOCK, MOMENTS, TILE
from tilewright.plan.cost import Cost
from tilewright.runtime import dispatch

_STATES = ("mean", "square", "mean_scale", "square_scale", "compensation", "step")
_TABLES = 64  # of addresses, that are kept
_GRADIENTS = (torch.float32, torch.bfloat16)  # as they are; others are widened


def cost(
    elements: int, rule: str = "adamw", *, parameter_bytes: int = 4, gradient_bytes: int | None = None,
    state_bytes: int = 4, kahan: bool = False,
) -> Cost:  # fmt: skip
    """Parameter and states read and written, the gradient read; `state_bytes` is that of one moment.

    >>> cost(1).bytes, cost(256, state_bytes=1, parameter_bytes=2).bytes / 256
    (28, 10.0625)
    """
    moments = len(MOMENTS[rule])
    kept = elements * (parameter_bytes + moments * state_bytes + (2 if kahan else 0))
    kept += 4 * moments * -(-elements // BLOCK) if state_bytes == 1 else 0
    gradient = elements * (parameter_bytes if gradient_bytes is None else gradient_bytes)
    return Cost({"adamw": 15, "lion": 9, "sgd": 6}[rule] * elements, kept + gradient, kept)


@functools.cache
def _launch(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], given: tuple[torch.dtype | None, ...], rule: str,
    stochastic: bool, even: bool,
) -> dispatch.Launch:  # fmt: skip
    """The kernel for tensors of these dtypes, None for those that are absent; `given` are not in the table."""
    from tilewright.optim import kernels

    types = [kernels.TYPES[dtype] for dtype in dtypes]
    return dispatch.Launch(kernels.tilewright_optimizer_update, device, (rule, stochastic, even, *types), TILE // BLOCK)


_tables: dict[Any, tuple[torch.Tensor, ...]] = {}
_recorded: list[torch.Tensor] = []  # those on the host that a captured graph copies to the device at every replay


def _kept(device: torch.device, key: tuple[Any, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A table on the device, made on the host where it is not there yet."""
    on_gpu = device.type == "cuda"
    # Of a stream: on another one it may be asked for before it has been copied.
    key = (device, torch._C._cuda_getCurrentRawStream(device.index) if on_gpu else 0, *key)
    captured = on_gpu and torch.cuda.is_current_stream_capturing()
    if not captured and key in _tables:
        return _tables[key][0]
    host = make().pin_memory() if on_gpu else make()
    table = host.to(device, non_blocking=True)
    if captured:
        _recorded.append(host)
        return table
    if len(_tables) >= _TABLES:
        _tables.pop(next(iter(_tables)))
    _tables[key] = (table, host)
    return table


def _table(device: torch.device, rows: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows, addresses first and the number of elements last, each behind its first program; and of each program
    the row. The latter is the larger one, and stays the same where only gradients have other addresses."""
    programs = [-(-row[-1] // TILE) for row in rows]
    first = itertools.accumulate(programs, initial=0)
    return (
        _kept(device, rows, lambda: torch.tensor([(at, *row) for at, row in zip(first, rows, strict=False)])),
        _kept(
            device, tuple(programs), lambda: torch.repeat_interleave(torch.tensor(programs)).to(torch.int32)
        ),
    )  # fmt: skip


def update(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[Mapping[str, torch.Tensor]],
    *,
    rule: str,
    lr: float | torch.Tensor,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    stochastic: bool = False,
    seeds: Sequence[int] = (),
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One step of parameters and their states, in place, without waiting for the device.

    Args:
        gradients: bfloat16 or float32, each of its parameter's shape.
        states: from `new_state`; their "step" counts this step already.
        rule: "adamw", "lion", "sgd", or "given", where the gradient is what is to be subtracted.
        lr: a number, or a tensor on the device, which a captured graph reads at every replay.
        stochastic: how a bfloat16 parameter is rounded; else to nearest, with a compensation where the state has one.
        seeds: of the random bits, from 0 to 2**63 - 1, one a parameter; left out, 0.
        grad_scale: a float32 tensor of one element, by which gradients are divided.
        found_inf: likewise; where it is not 0, nothing changes.

    >>> from tilewright.optim.states import new_state
    >>> parameter = torch.ones(3)
    >>> state = new_state(parameter, "sgd")
    >>> update([parameter], [torch.tensor([0.0, 1.0, 2.0])], [state], rule="sgd", lr=0.5)
    >>> parameter.tolist(), state["mean"].tolist()
    ([1.0, 0.5, 0.0], [0.0, 1.0, 2.0])
    """
    numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "epsilon": epsilon, "weight_decay": weight_decay}
    members = zip(parameters, gradients, states, seeds or [0] * len(parameters), strict=True)
    alike: dict[Any, list[Any]] = {}
    for parameter, gradient, state, seed in members:
        if not parameter.numel():
            continue
        if not dispatch.runs_kernel(parameter):
            _plainly(parameter, gradient, state, found_inf, rule=rule, **numbers, stochastic=stochastic,
                     seed=seed, grad_scale=grad_scale)  # fmt: skip
            continue
        gradient = gradient if gradient.dtype in _GRADIENTS else gradient.float()
        tensors = (*dispatch.packed((parameter, gradient)), *[state.get(name) for name in _STATES])
        key = parameter.device, dispatch.dtypes(tensors), parameter.numel() % 8 == 0
        alike.setdefault(key, []).append((tensors, seed, parameter))
    for (device, dtypes, even), group in alike.items():
        rate, number = (lr, 0.0) if isinstance(lr, torch.Tensor) and lr.is_cuda else (None, float(lr))
        given = [None if t is None else t.to(device) for t in (rate, grad_scale, found_inf)]
        launch = _launch(device, dtypes, dispatch.dtypes(given), rule, stochastic, even)
        rows = tuple(
            (*[0 if t is None else t.data_ptr() for t in tensors], seed, parameter.numel())
            for tensors, seed, parameter in group
        )
        table, owners = _table(device, rows)
        scalars = (number, weight_decay, beta1, beta2, 1 - beta1, 1 - beta2, log_of(beta1), log_of(beta2), epsilon)
        everything = [t for tensors, *_ in group for t in tensors]
        width = len(group[0][0])  # the gradient is only read, and so is the count of steps
        changed = [i for i in range(len(everything)) if i % width not in (1, width - 1)]
        with work.launching(launch.name, everything, changed=changed):
            launch((len(owners), 1), (table, owners, *given), scalars)
        for tensors, _, parameter in group:
            if tensors[0] is not parameter:
                parameter.copy_(tensors[0])
        torch.autograd.graph.increment_version([parameter for *_, parameter in group])


def _plainly(
    parameter: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor],
    found_inf: torch.Tensor | None, **options: Any,
) -> None:  # fmt: skip
    if found_inf is not None and found_inf.item():
        return
    new = reference(parameter, gradient, state, **options)
    parameter.copy_(new.pop("parameter"))
    for name, value in new.items():
        state[name].copy_(value)


def adafactor(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    *,
    lr: float | torch.Tensor,
    weight_decay: float = 0.0,
    stochastic: bool = False,
    seed: int = 0,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """One step by the rule of `torch.optim.Adafactor` with its defaults, in place, without waiting for the device.

    The means are a pass of their own in plain PyTorch, with float32 temporaries of the parameter's size; only the
    parameter itself is written by the kernel, for the sake of its rounding.
    """
    if not parameter.numel():
        return
    p, g = in_float32(parameter, gradient, state, grad_scale)
    step, tiny = state["step"], torch.finfo(torch.float32).eps
    share = step**-0.8
    rate = step.rsqrt().clamp(max=lr) * _root_mean_square(p).clamp(min=1e-3)

    def moved(name: str, towards: torch.Tensor) -> torch.Tensor:
        old = state[name]
        new = torch.lerp(old, towards, share)
        return old.copy_(new if found_inf is None else torch.where(found_inf.reshape(()) == 0, new, old))

    squares = g.square()
    if "row" in state:
        row, column = moved("row", squares.mean(-1, keepdim=True)), moved("column", squares.mean(-2, keepdim=True))
        estimate = row * column / row.mean(-2, keepdim=True).clamp(min=tiny)
    else:
        estimate = moved("square", squares)
    change = g * estimate.clamp(min=tiny * tiny).rsqrt()
    change *= rate / _root_mean_square(change).clamp(min=1.0)
    update(
        [parameter], [change], [state], rule="given", lr=lr, weight_decay=weight_decay, stochastic=stochastic,
        seeds=[seed], found_inf=found_inf,
    )  # fmt: skip


def _root_mean_square(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x) / math.sqrt(x.numel())
