"""Does a layout train what one process does? A few steps in float32 on all ranks, beside the same steps in one process.

Both runs have the same weights, sequences and dropout, which is drawn by each token's place, and the levers of the run
that is proved but for those that move numbers: in float32 nothing hides what a layout does wrong. The norm of the
gradients is compared as well, because AdamW learns the same from gradients that are all twice too large.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tilewright.plan.gpt import OWN_ATTENTION
from tilewright.train.fields import fields
from tilewright.train.schema import Parallel, Train
from tilewright.tune.search.layouts import LAYOUT, word_of
from tilewright.tune.search.space import with_values
from tilewright.tune.search.standard import moves
from tilewright.tune.store.proof import VERDICTS, Proof

STEPS = 6
# Of a loss or a norm, what another order of additions in float32 makes of it: before the first update, and after.
_FIRST, _LATER = 1e-4, 1e-3


def together_and_alone(run: Train) -> tuple[Train, Train]:
    """The steps as the run's ranks take them, and as one process does: few sequences, eager, in float32.

    >>> run = Train(precision="bf16", compile="default", global_batch=64, micro_batch=8, parallel=Parallel(dp=2, pp=2))
    >>> shared, whole = together_and_alone(run)
    >>> shared.global_batch, whole.global_batch, shared.micro_batch, shared.precision, whole.parallel.pp
    (8, 8, 2, 'fp32', 1)
    """
    levers = [name for name, each in fields().items() if each.lever is not None]
    plain = {name: fields()[name].default for name in levers if moves(run, name) != "same"}
    plain |= {"precision": "fp32", "compile": "none", "cuda_graphs": False, "parallel.dropout": "position"}
    if run.model.attention in ("flash", "cudnn", *OWN_ATTENTION):  # which take 16 bits
        plain["model.attention"] = "auto"
    if run.model.mlp == "tilesync":
        plain["model.mlp"] = "auto"
    layout, sizes = run.parallel, run.batch_sizes(run.parallel.dp)
    micro, parts = min(2, sizes.micro), max(layout.pp, min(2, sizes.accumulation))
    batch = {"micro_batch": micro, "global_batch": micro * parts * layout.dp, "accumulation": 0}
    shared = with_values(run, plain | batch)
    return shared, dataclasses.replace(shared, parallel=Parallel(dropout="position"))


def judge_layout(
    proof: Proof, run: Train, shared: Mapping[str, Sequence[float]], whole: Mapping[str, Sequence[float]]
) -> Proof:
    """The proof of a run, with what its layout does; or that the layout is wrong.

    Args:
        proof: of the run in one process.
        run: whose ranks share it.
        shared, whole: "losses" and "norms" of the first steps on all ranks, and in one process.
    """
    if proof.verdict not in VERDICTS[:3]:
        return proof
    layout = word_of(run.parallel)
    for kind, what in (("losses", "loss"), ("norms", "norm of the gradients")):
        for step, (ours, theirs) in enumerate(zip(shared[kind], whole[kind], strict=True), 1):
            if not abs(ours - theirs) <= (_FIRST if step == 1 else _LATER) * abs(theirs):
                why = (
                    f"with parallel={layout} the {what} of step {step} is {ours:.6g}, and {theirs:.6g} in one process."
                )
                return dataclasses.replace(proof, verdict="wrong", why=why, at_fault=LAYOUT)
    same = f"with parallel={layout} losses and gradients in float32 are those of one process."
    return dataclasses.replace(proof, why=f"{proof.why.rstrip('.')}; {same}")


def without_layout(proof: Proof, error: str | None) -> Proof:
    """The proof of a run whose layout could not be compared with one process."""
    if proof.verdict not in VERDICTS[:3]:
        return proof
    why = f"its ranks were not compared with one process: {error}"
    return dataclasses.replace(proof, verdict="not proven", why=why)


def steps_of(found: Mapping[str, Any] | None) -> bool:
    """Whether a job has brought all of its steps."""
    return found is not None and all(len(found.get(kind, ())) == STEPS for kind in ("losses", "norms"))
