"""The best run as code: the command that generates so; of a user's own model the lines to paste, and a whole script."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.tune.search.generating import SAVED, Generating, GeneratingSpace, saved_weights
from tilewright.tune.search.space import Space
from tilewright.tune.store.record import Record

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


def generate_command(run: Generating, folder: Path) -> str:
    """The `tilewright generate` of a run; with its quantized weights where the study's folder has them.

    >>> generate_command(Generating("llama", device="cuda", weights="int4", graph=True, speculate=4), Path("nowhere"))
    'tilewright generate llama "Once upon a time" --device cuda --weights int4 --graph --no-pdl --speculate 4'
    """
    saved = saved_weights(run, folder)
    has_saved = saved.is_dir()
    words = ["tilewright generate", shlex.quote(str(saved if has_saved else run.model)), '"Once upon a time"']
    words.append(f"--device {run.device}")
    given = {
        "dtype": run.dtype, "weights": "" if has_saved or run.weights == SAVED else run.weights,
        "kv-cache": "" if run.kv_cache == SAVED else run.kv_cache,
    }  # fmt: skip
    words += [f"--{name} {value}" for name, value in given.items() if value]
    if run.device == "cuda":
        words.append("--graph" if run.graph else "--no-graph")
    if run.device == "cuda" and run.graph and run.decode == "graph":
        words.append("--pdl" if run.pdl else "--no-pdl")
    if run.compile != "none":
        words.append("--compile")
    if run.decode != "graph":
        words.append(f"--decode {run.decode}")
    if run.speculate:
        words += [f"--draft {shlex.quote(run.draft)}"] if run.draft else []
        words.append(f"--speculate {run.speculate}")
    return " ".join(words)


def command_of(space: Space, best: Record | None, folder: Path) -> str:
    """The command of the best run of a study of generating, or on several ranks; nothing for another study."""
    if best is not None and space.ranks > 1:
        return f"tilewright train {shlex.quote(str(folder / 'best.yaml'))} --nproc {space.ranks}"
    if best is None or not isinstance(space, GeneratingSpace):
        return ""
    return generate_command(space.at(best.point), folder)


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
