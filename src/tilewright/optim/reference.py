"""The rules in plain PyTorch: the definition of a step, and what runs where no kernel does."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tilewright.optim.states import encode, random_bits, to_bfloat16, unpacked

_STREAMS = {"parameter": 0, "mean": 1, "square": 2}


def in_float32(
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
    p, g = in_float32(parameter, gradient, state, grad_scale)
    step = state["step"]
    new: dict[str, torch.Tensor] = {}
    if rule == "sgd":
        g = g + weight_decay * p
    else:
        p = p * (1.0 - lr * weight_decay)
    if rule == "given":
        p = p - g
    elif rule == "adamw":
        new["mean"] = beta1 * unpacked(state, "mean") + (1 - beta1) * g
        new["square"] = beta2 * unpacked(state, "square") + (1 - beta2) * g * g
        root = new["square"].sqrt() * (1.0 / _correction(step, beta2).sqrt())
        p = p - lr / _correction(step, beta1) * (new["mean"] / (root + epsilon))
    elif rule == "lion":
        mean = unpacked(state, "mean")
        p = p - lr * (beta1 * mean + (1 - beta1) * g).sign()
        new["mean"] = beta2 * mean + (1 - beta2) * g
    else:
        new["mean"] = beta1 * unpacked(state, "mean") + g
        p = p - lr * new["mean"]

    def bits(name: str) -> torch.Tensor:
        return random_bits(seed, step, _STREAMS[name], p.numel())

    for name, value in tuple(new.items()):
        dtype = state[name].dtype
        if dtype == torch.bfloat16:
            new[name] = to_bfloat16(value, bits(name))
        elif dtype != torch.float32:
            new[name], new[f"{name}_scale"] = encode(value, dtype, bits(name))
    if stochastic and parameter.dtype == torch.bfloat16:
        new["parameter"] = to_bfloat16(p, bits("parameter"))
    else:
        new["parameter"] = p.to(parameter.dtype)
    if "compensation" in state:
        new["compensation"] = (p - new["parameter"].float()).bfloat16()
    return new


def log_of(beta: float) -> float:
    """The logarithm of a beta, which may be 0."""
    return math.log(beta) if beta > 0.0 else -math.inf


def _correction(step: torch.Tensor, beta: float) -> torch.Tensor:
    """1 - beta ** step, without the cancellation."""
    return -torch.expm1(step * log_of(beta))
