"""One optimizer step in one pass over memory, of many tensors at once: AdamW, Lion, SGD or Adafactor.

    adamw      m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  p = p (1 - lr d) - lr m' / (sqrt(v') + eps)
    lion       p = p (1 - lr d) - lr sign(b1 m + (1 - b1) g);    m = b2 m + (1 - b2) g
    sgd        g = g + d p;  m = b1 m + g;  p = p - lr m
    adafactor  as torch.optim.Adafactor: of a matrix, v is kept as the means of its rows and columns

where d is the weight decay, m' = m / (1 - b1^t), v' = v / (1 - b2^t), and all is computed in float32. What is stored:

Parameters. float32 as they are. bfloat16 has eight bits, and an update below 1/512 of its parameter rounds to nothing.
Either a second bfloat16 keeps what rounding lost, to be added next time ("kahan"), or the rounding goes up or down by
chance, up the more often the nearer ("stochastic"), which is right in the mean and needs no memory.

States. float32; bfloat16, rounded stochastically, because a mean that moves by a thousandth a step never leaves its
place when it is rounded to nearest; or 8 bits, in blocks of 256 elements in memory's order that share a float32 scale,
the largest magnitude among them:

    int8    m = scale * sign(q) * (q / 127)^2      q = -127 ... 127     smallest: scale / 16,129
    uint8   v = scale * (q / 255)^4                q =    0 ... 255     smallest: scale / 4.2e9

Powers put many codes near zero, where most moments are, and take two square roots and no table. For m a cube would
reach lower, yet the square has less error: 1.0 to 1.1 % of the root mean square of the moments of a small language
model, against 1.3 %. Between two codes stochastic rounding chooses by a probability that is linear in the value, so
that the mean of what is stored is what was to be stored; only a v above 0 is never stored as 0, because the m above it
would then be divided by nothing but eps. Tensors below 4,096 elements keep float32 states.

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
import torch.nn.functional as F

from tilewright.errors import UserError
from tilewright.measure import work
from tilewright.plan.cost import Cost
from tilewright.runtime import dispatch

__all__ = ["adafactor", "cost", "decode", "encode", "new_state", "reference", "update"]

BLOCK = 256  # elements that share the scale of their 8-bit codes
TILE = 4 * BLOCK  # of a program
SMALL = 4096  # below so many elements 8 bits save nothing worth their noise
MOMENTS = {"adamw": ("mean", "square"), "lion": ("mean",), "sgd": ("mean",), "adafactor": ()}
ROUNDINGS = ("nearest", "kahan", "stochastic")
_CODES = {"mean": torch.int8, "square": torch.uint8}
_STATES = ("mean", "square", "mean_scale", "square_scale", "compensation", "step")
_TABLES = 64  # of addresses, that are kept
_GRADIENTS = (torch.float32, torch.bfloat16)  # as they are; others are widened
_STREAMS = {"parameter": 0, "mean": 1, "square": 2}
_WORD = 0xFFFFFFFF


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


def new_state(
    parameter: torch.Tensor, rule: str, dtype: torch.dtype | None = torch.float32, rounding: str = "nearest"
) -> dict[str, torch.Tensor]:
    """What a rule keeps of a parameter, before its first step; every value is a tensor.

    Args:
        dtype: of the moments: float32, bfloat16, int8 for 8-bit codes, or None for the dtype of the parameter.
        rounding: of a bfloat16 parameter; only "kahan" keeps anything.

    >>> state = new_state(torch.zeros(64, 100), "adamw", torch.int8)
    >>> {name: (str(value.dtype), tuple(value.shape)) for name, value in state.items() if "square" in name}
    {'square': ('torch.uint8', (64, 100)), 'square_scale': ('torch.float32', (25,))}
    """
    if parameter.dtype not in (torch.float32, torch.bfloat16):
        raise UserError(f"optimizer: a parameter is {parameter.dtype}; convert the model to float32 or bfloat16.")
    if type(parameter) not in dispatch.PLAIN:
        raise UserError(f"optimizer: a parameter is a {type(parameter).__name__}; give plain tensors.")
    zeros = functools.partial(torch.zeros, device=parameter.device)
    state = {"step": zeros((), dtype=torch.float32)}
    kind = parameter.dtype if dtype is None else dtype
    if kind == torch.int8 and parameter.numel() < SMALL:
        kind = torch.float32
    for name in MOMENTS[rule]:
        state[name] = zeros(parameter.shape, dtype=_CODES[name] if kind == torch.int8 else kind)
        if kind == torch.int8:
            state[f"{name}_scale"] = zeros(-(-parameter.numel() // BLOCK), dtype=torch.float32)
    if rule == "adafactor" and parameter.dim() > 1:
        *batch, rows, columns = parameter.shape
        state["row"] = zeros((*batch, rows, 1), dtype=torch.float32)
        state["column"] = zeros((*batch, 1, columns), dtype=torch.float32)
    elif rule == "adafactor":
        state["square"] = zeros(parameter.shape, dtype=torch.float32)
    if rounding == "kahan" and parameter.dtype == torch.bfloat16:
        state["compensation"] = zeros(parameter.shape, dtype=torch.bfloat16)
    return state


def random_bits(seed: int, step: torch.Tensor, stream: int, elements: int) -> torch.Tensor:
    """16 random bits an element, those that the kernel draws: Philox-4x32 with seven rounds."""
    group = torch.arange(-(-elements // 8), device=step.device)
    a, b, c, d = group & _WORD, group >> 32, step.long().expand_as(group), torch.full_like(group, stream)
    low, high = seed & _WORD, seed >> 32 & _WORD
    for _ in range(7):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c  # modulo 2**64, which loses no bit
        a, c = (second >> 32 & _WORD) ^ b ^ low, (first >> 32 & _WORD) ^ d ^ high
        b, d = second & _WORD, first & _WORD
        low, high = (low + 0x9E3779B9) & _WORD, (high + 0xBB67AE85) & _WORD
    words = torch.stack((a, b, c, d), -1)
    return torch.stack((words & 0xFFFF, words >> 16), -1).flatten()[:elements]


def _to_bfloat16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Stochastically rounded by 16 random bits an element."""
    cut = (x.view(torch.int32) + bits.view(x.shape).int() >> 16 << 16).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).bfloat16()


def _share(code: torch.Tensor, levels: int) -> torch.Tensor:
    share = code * (1.0 / levels)
    return share.square() if levels == 127 else share.square().square()


def encode(x: torch.Tensor, dtype: torch.dtype, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes of a float32 tensor (int8: with a sign; uint8: of numbers from 0 on) and the scale of each block.

    >>> codes, scale = encode(torch.tensor([0.0, -1.0, 4.0]), torch.int8, torch.zeros(3))
    >>> codes.tolist(), scale.tolist(), decode(codes, scale).tolist()[::2]
    ([0, -64, 127], [4.0], [0.0, 4.0])
    """
    levels = 127 if dtype == torch.int8 else 255
    blocks = F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    draws = F.pad(bits.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    share = blocks.abs() / torch.where(scale > 0, scale, 1.0)
    root = share.sqrt() if levels == 127 else share.sqrt().sqrt()
    low = (root * levels).floor().clamp(max=levels - 1)
    below, above = _share(low, levels), _share(low + 1, levels)
    code = low + (draws < (share - below) / (above - below) * 65536)
    code = torch.where(blocks < 0, -code, code) if levels == 127 else code.clamp(min=1) * (blocks > 0)
    return code.flatten()[: x.numel()].view(x.shape).to(dtype), scale.flatten()


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the codes stand for, in float32."""
    flat = codes.flatten().float()
    share = _share(flat.abs(), 127 if codes.dtype == torch.int8 else 255)
    share = share * scale.repeat_interleave(BLOCK)[: codes.numel()]
    return torch.where(flat < 0, -share, share).view(codes.shape)


def _unpacked(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    codes = state[name]
    return codes.float() if codes.is_floating_point() else decode(codes, state[f"{name}_scale"])


def _in_float32(
    parameter: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], grad_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parameter with what rounding has lost, and the gradient that is meant."""
    p, g = parameter.float(), gradient.float()
    if "compensation" in state:
        p = p + state["compensation"].float()
    return p, g if grad_scale is None else g * (1.0 / grad_scale)


def reference(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    *,
    rule: str,
    lr: float | torch.Tensor,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    stochastic: bool = False,
    seed: int = 0,
    grad_scale: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """One step of one tensor in plain PyTorch: the definition. Returns the new parameter and states; arguments as for
    `update`."""
    p, g = _in_float32(parameter, gradient, state, grad_scale)
    step = state["step"]
    new: dict[str, torch.Tensor] = {}
    if rule == "sgd":
        g = g + weight_decay * p
    else:
        p = p * (1.0 - lr * weight_decay)
    if rule == "given":
        p = p - g
    elif rule == "adamw":
        new["mean"] = beta1 * _unpacked(state, "mean") + (1 - beta1) * g
        new["square"] = beta2 * _unpacked(state, "square") + (1 - beta2) * g * g
        root = new["square"].sqrt() * (1.0 / _correction(step, beta2).sqrt())
        p = p - lr / _correction(step, beta1) * (new["mean"] / (root + epsilon))
    elif rule == "lion":
        mean = _unpacked(state, "mean")
        p = p - lr * (beta1 * mean + (1 - beta1) * g).sign()
        new["mean"] = beta2 * mean + (1 - beta2) * g
    else:
        new["mean"] = beta1 * _unpacked(state, "mean") + g
        p = p - lr * new["mean"]

    def bits(name: str) -> torch.Tensor:
        return random_bits(seed, step, _STREAMS[name], p.numel())

    for name, value in tuple(new.items()):
        dtype = state[name].dtype
        if dtype == torch.bfloat16:
            new[name] = _to_bfloat16(value, bits(name))
        elif dtype != torch.float32:
            new[name], new[f"{name}_scale"] = encode(value, dtype, bits(name))
    if stochastic and parameter.dtype == torch.bfloat16:
        new["parameter"] = _to_bfloat16(p, bits("parameter"))
    else:
        new["parameter"] = p.to(parameter.dtype)
    if "compensation" in state:
        new["compensation"] = (p - new["parameter"].float()).bfloat16()
    return new


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf


def _correction(step: torch.Tensor, beta: float) -> torch.Tensor:
    """1 - beta ** step, without the cancellation."""
    return -torch.expm1(step * _log(beta))


@functools.cache
def _launch(
    device: torch.device, dtypes: tuple[torch.dtype | None, ...], given: tuple[torch.dtype | None, ...], rule: str,
    stochastic: bool, even: bool,
) -> dispatch.Launch:  # fmt: skip
    """The kernel for tensors of these dtypes, None for those that are absent; `given` are not in the table."""
    from tilewright.ops.optimizer import kernels

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
        scalars = (number, weight_decay, beta1, beta2, 1 - beta1, 1 - beta2, _log(beta1), _log(beta2), epsilon)
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
    p, g = _in_float32(parameter, gradient, state, grad_scale)
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
