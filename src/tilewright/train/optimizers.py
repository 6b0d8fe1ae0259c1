"""The optimizer of a run, from its configuration.

SGD of float32 parameters is torch's own, and AdamW of those is `optim.AdamW`; all else is `optim.FusedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from tilewright.errors import UserError
from tilewright.optim.optimizers import AdamW, FusedOptimizer, increment_versions
from tilewright.train.schema import Optimizer as Config

# The rule of a name, and the dtype it keeps its moments in: int8 for 8-bit codes, None for the parameter's own.
KINDS: dict[str, tuple[str, torch.dtype | None]] = {
    "adamw": ("adamw", torch.float32), "adamw_8bit": ("adamw", torch.int8), "adamw_bf16": ("adamw", torch.bfloat16),
    "lion": ("lion", None), "adafactor": ("adafactor", torch.float32), "sgd": ("sgd", torch.float32),
}  # fmt: skip
# The dtype of parameters, and how it is rounded.
PRECISIONS = {
    "fp32": (torch.float32, "nearest"), "tf32": (torch.float32, "nearest"), "bf16": (torch.float32, "nearest"),
    "bf16_kahan": (torch.bfloat16, "kahan"), "bf16_stochastic": (torch.bfloat16, "stochastic"),
}  # fmt: skip


def build(
    model: nn.Module | Iterable[torch.Tensor], config: Config, *, precision: str, seed: int = 0
) -> torch.optim.Optimizer:
    """The optimizer of a configuration over the parameters of a model that are trained.

    Matrices and embeddings decay, vectors do not: two groups. The learning rate is each group's `lr`.

    >>> optimizer = build(nn.Linear(4, 4), Config(name="adamw_8bit"), precision="fp32")
    >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
    [(1, 0.1), (1, 0.0)]
    """
    if precision not in PRECISIONS:
        raise UserError(f"precision is {precision!r}; choose {', '.join(PRECISIONS)}.")
    wanted, rounding = PRECISIONS[precision]
    parameters = [p for p in (model.parameters() if isinstance(model, nn.Module) else model) if p.requires_grad]
    # Beside bfloat16 weights a float32 one is welcome: it needs no rounding.
    for parameter in parameters:
        if parameter.dtype not in (wanted, torch.float32):
            name = str(wanted).removeprefix("torch.")
            raise UserError(f"precision {precision} needs {name} parameters and one is {parameter.dtype}; convert it.")
    if not parameters:
        raise UserError("The model has no parameter to train; set requires_grad on some.")
    groups = [
        {"params": members, "weight_decay": decay}
        for members, decay in (
            ([p for p in parameters if p.dim() >= 2], config.weight_decay),
            ([p for p in parameters if p.dim() < 2], 0.0),
        )
        if members
    ]
    rule, dtype = KINDS[config.name]
    if wanted == torch.float32 and config.name == "adamw":
        betas = (config.beta1, config.beta2)
        adamw = AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)
        return _with_state(adamw, ("exp_avg", "exp_avg_sq"), counts=True)
    if wanted == torch.float32 and rule == "sgd":
        sgd = torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1, fused=True)
        sgd.register_step_post_hook(lambda optimizer, *_: increment_versions(optimizer))
        return _with_state(sgd, ("momentum_buffer",) if config.beta1 > 0 else ())
    return FusedOptimizer(
        groups, rule=rule, dtype=dtype, rounding=rounding, lr=config.learning_rate,
        betas=(config.beta1, config.beta2), eps=config.epsilon, seed=seed,
    )  # fmt: skip


def _with_state(
    optimizer: torch.optim.Optimizer, names: tuple[str, ...], counts: bool = False
) -> torch.optim.Optimizer:
    """The states that torch would make in its first step, so that a checkpoint can be loaded before that.

    And because torch's SGD leaves its momentum unwritten where that first step is skipped.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if counts:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update({name: torch.zeros_like(parameter) for name in names})
    return optimizer
