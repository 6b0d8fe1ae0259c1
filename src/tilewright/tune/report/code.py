"""The best run of a user's own model as code: the lines to paste, and a script that runs exactly what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=..., fused={fused})",
    "sgd": "torch.optim.SGD(model.parameters(), lr=..., momentum=0.9, fused={fused})",
}


def lines(levers: Mapping[str, Any], device: str, rules: Sequence[str] = ()) -> list[str]:
    """What to write into a training script for these levers, by their dotted names.

    Args:
        levers: of the run.
        device: "cuda" or "cpu".
        rules: that the run has; empty for all.

    >>> levers = {"rules": "all", "compile": "default", "precision": "bf16"}
    >>> for line in lines(levers, "cuda", ["add_norm", "glu"]): print(line)
    report = tilewright.optimize(model, rules=["add_norm", "glu"], compile="default")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(...)
    """
    found, compile, precision = [], levers.get("compile", "none"), levers.get("precision", "")
    if precision == "tf32":
        found.append('torch.set_float32_matmul_precision("high")')
    if precision.startswith("bf16_"):
        found.append("model.bfloat16()")
    if levers.get("rules", "none") != "none":
        more = f", rules={json.dumps(list(rules))}" if rules else ""
        more += f", compile={json.dumps(compile)}" if compile != "none" else ""
        found.append(f"report = tilewright.optimize(model{more})")
    elif compile != "none":
        found.append(f"model.compile(mode={json.dumps(compile)})")
    name = levers.get("optimizer.name")
    if name in _OPTIMIZERS:
        found.append("optimizer = " + _OPTIMIZERS[name].format(fused=device == "cuda"))
    elif name:
        found.append(f"optimizer = tilewright.train.optimizers.build(model, Optimizer(name={name!r}), precision=...)")
    if levers.get("threads"):
        found.append(f"torch.set_num_threads({int(levers['threads'])})")
    if precision == "bf16":
        found += [f'with torch.autocast("{device}", torch.bfloat16):', "    loss = model(...)"]
    if levers.get("micro_batch"):
        found.append(f"# micro batches of {int(levers['micro_batch'])} rows, their gradients added up")
    if levers.get("cuda_graphs"):
        found.append("# forward and backward recorded: torch.cuda.make_graphed_callables")
    return found


def script(own_model: str, levers: Mapping[str, Any], device: str, rules: Sequence[str] = ()) -> str:
    """A program that trains the factory's model under these levers, as the study did, and prints its metrics."""
    paste = "\n".join(f"#     {part}" for line in lines(levers, device, rules) for part in line.splitlines())
    return f'''"""The fastest run that `tilewright tune` found, of the model below.

`python best.py` runs it as it was measured.
"""

# In a training script of your own it is:
#
{paste}

from tilewright.tune.own_model import run

MODEL = {own_model!r}
LEVERS = {dict(levers)!r}

if __name__ == "__main__":
    run(MODEL, LEVERS, steps=20)
'''
