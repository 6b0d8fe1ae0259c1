"""Optimizers that step all tensors by one kernel.

AdamW is torch's in its arguments and its states; `FusedOptimizer` has the other rules, and states and parameters in
fewer bits. Both take two tensors of one element from the loop, as attributes, and never wait for the device:
`grad_scale` divides the gradients, and a `found_inf` of 1 makes `step` change nothing, not even the count of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tilewright.errors import UserError
from tilewright.optim import update
from tilewright.optim.states import MOMENTS, ROUNDINGS, new_state
from tilewright.runtime import dispatch


class AdamW(torch.optim.AdamW):
    """torch's AdamW. On a GPU a kernel of ours takes all tensors at once, where they are float32 and as torch makes
    them; what it does not know, an argument or a kind of tensor, is torch's to do."""

    _device = "cuda"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss = _evaluated(closure)  # first: it makes the gradients
        if not all(self._takes(group) for group in self.param_groups):
            plain: Any = torch.optim.AdamW.step
            plain = plain.__wrapped__ if getattr(plain, "hooked", False) else plain  # hooks are called around this one
            plain(self)
            increment_versions(self)
            return loss
        given = _given(self)
        for group in self.param_groups:
            due = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in due]
            _count([state["step"] for state in states], given["found_inf"])
            moments = [{"mean": s["exp_avg"], "square": s["exp_avg_sq"], "step": s["step"]} for s in states]
            beta1, beta2 = group["betas"]
            _update(
                due, moments, rule="adamw", lr=group["lr"], beta1=beta1, beta2=beta2, epsilon=group["eps"],
                weight_decay=group["weight_decay"], **given,
            )  # fmt: skip
        return loss

    def _takes(self, group: dict[str, Any]) -> bool:
        """Whether the kernel does what torch would do with a group."""
        numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        if group["amsgrad"] or group["maximize"] or any(isinstance(number, torch.Tensor) for number in numbers):
            return False
        known: dict[int, Any] = self.__dict__.setdefault("_known", {})  # what was looked at, for that takes its time
        for parameter in group["params"]:
            state = self.state[parameter] if parameter.grad is not None else {}
            tensors = [parameter, *[state.get(name) for name in ("step", "exp_avg", "exp_avg_sq")]]
            key = (parameter.data_ptr(), *map(id, tensors))
            if parameter.grad is None or known.get(id(parameter)) == key:
                continue
            if not all(map(self._is_plain, tensors)):
                return False
            known[id(parameter)] = key
        return True

    def _is_plain(self, tensor: Any) -> bool:
        own = type(tensor) in dispatch.PLAIN and tensor.dtype == torch.float32 and tensor.device.type == self._device
        return own and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


class FusedOptimizer(torch.optim.Optimizer):
    """AdamW, Lion, SGD or Adafactor, one kernel for all tensors, with states and parameters in fewer bits.

    Args:
        parameters: as for every torch optimizer; float32 or bfloat16.
        rule: "adamw", "lion", "sgd" or "adafactor".
        dtype: of the moments: float32, bfloat16, int8 for 8-bit codes, or None for that of the parameter.
        rounding: of bfloat16 parameters: "nearest", "kahan" or "stochastic".
        lr: a number or, to change it between replays of a captured graph, a float32 tensor on the device.
        betas, eps, weight_decay: of the rule; SGD's momentum is the first of the betas.
        seed: of the random bits; kept in `state_dict` with the rest.

    States are made with the optimizer, not in its first step: what does not fit says so early, a checkpoint can be
    loaded into it at once, and a captured graph finds them where they stay.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> optimizer = FusedOptimizer([weight], rule="lion", dtype=None, rounding="kahan", lr=0.5)
    >>> weight.grad = torch.tensor([1.0, -1.0], dtype=torch.bfloat16)
    >>> optimizer.step()
    >>> weight.tolist()
    [0.5, 1.5]
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then sets grad_scale and found_inf

    def __init__(
        self,
        parameters: Iterable[Any],
        *,
        rule: str,
        dtype: torch.dtype | None = torch.float32,
        rounding: str = "nearest",
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        for name, value, known in (("rule", rule, MOMENTS), ("rounding", rounding, ROUNDINGS)):
            if value not in known:
                raise UserError(f"optimizer: {name} is {value!r}; choose {', '.join(known)}.")
        self.rule, self.dtype, self.rounding = rule, dtype, rounding
        numbers = {"lr": lr, **_numbers_of({"betas": betas, "eps": eps}), "weight_decay": weight_decay}
        super().__init__(parameters, {**numbers, "seed": seed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with numbers of their own, as every torch optimizer does."""
        super().add_param_group(_numbers_of(param_group))
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                self._state_of(parameter)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state.update(new_state(parameter, self.rule, self.dtype, self.rounding))
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        loss, given = _evaluated(closure), _given(self)
        index = 0
        for group in self.param_groups:
            due = [(p, index + i) for i, p in enumerate(group["params"]) if p.grad is not None]
            index += len(group["params"])
            states = [self._state_of(p) for p, _ in due]
            _count([state["step"] for state in states], given["found_inf"])
            # Any two parameters draw other bits; the product keeps the seeds 0, 1, 2 ... far apart.
            seeds = [(group["seed"] * 0x9E3779B97F4A7C15 + number) % 2**63 for _, number in due]
            shared: dict[str, Any] = {
                **{name: group[name] for name in ("lr", "weight_decay")},
                "stochastic": self.rounding == "stochastic",
                **given,
            }
            if self.rule == "adafactor":
                for (p, _), state, seed in zip(due, states, seeds, strict=True):
                    own = {name: None if value is None else value.to(p.device) for name, value in given.items()}
                    update.adafactor(p, _gradient(p), state, seed=seed, **{**shared, **own})
            else:
                betas = {name: group[name] for name in ("beta1", "beta2", "epsilon")}
                _update([p for p, _ in due], states, rule=self.rule, seeds=seeds, **betas, **shared)
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, bit for bit and in place.

        torch's own would convert every float to the dtype of its parameter: scales and counters beside bfloat16
        parameters would be rounded. It loads the groups; the states are copied here.
        """
        states, saved = self.state, state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        self.state = states
        for old, new in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, parameter in zip(old["params"], new["params"], strict=True):
                if key in saved:
                    _copy(saved[key], self._state_of(parameter))
                else:
                    self.state.pop(parameter, None)


def _numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group with `betas` and `eps` as numbers: torch.distributed.checkpoint stores tensors and numbers, no tuples.

    >>> _numbers_of({"betas": (0.9, 0.95), "eps": 1e-8})
    {'beta1': 0.9, 'beta2': 0.95, 'epsilon': 1e-08}
    """
    found = {name: value for name, value in group.items() if name not in ("betas", "eps")}
    if "betas" in group:
        found["beta1"], found["beta2"] = group["betas"]
    if "eps" in group:
        found["epsilon"] = group["eps"]
    return found


def _evaluated(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def increment_versions(optimizer: torch.optim.Optimizer) -> None:
    """Tell autograd that parameters were written to: torch's fused kernels do not."""
    members = (p for group in optimizer.param_groups for p in group["params"])
    torch.autograd.graph.increment_version([p for p in members if p.grad is not None])


def _given(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor | None]:
    """Attributes that the loop, or GradScaler, sets and deletes."""
    return {name: getattr(optimizer, name, None) for name in ("grad_scale", "found_inf")}


def _update(parameters: list[torch.Tensor], states: list[dict[str, torch.Tensor]], **options: Any) -> None:
    update.update(parameters, [_gradient(p) for p in parameters], states, **options)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None or gradient.is_sparse:
        raise UserError("optimizer: a gradient is sparse; make its embedding with sparse=False.")
    return gradient


def _count(steps: list[torch.Tensor], found_inf: torch.Tensor | None) -> None:
    """All counters in one launch; a step that `found_inf` takes back is not counted."""
    if steps and found_inf is None:
        torch._foreach_add_(steps, 1.0)
    elif steps and found_inf is not None:
        one = (found_inf.reshape(()) == 0).float()
        torch._foreach_add_(
            steps, [one.to(step.device) for step in steps]
        )  # of one tensor it takes the value, and waits


def _copy(saved: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    for name in sorted(saved.keys() | state.keys()):
        source, target = saved.get(name), state.get(name)
        if source is None or target is None or (source.dtype, source.shape) != (target.dtype, target.shape):
            raise UserError(
                f"The optimizer's state {name!r} is not the saved one in name, dtype or shape; "
                "resume with the optimizer.name, precision and model that it was saved with."
            )
        target.copy_(source)
