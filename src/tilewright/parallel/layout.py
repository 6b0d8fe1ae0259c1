"""How many ranks share which work: sizes that are left out derived, impossible ones refused. No torch.

    ranks = pp x dp x cp x tp, the last the closest neighbours

What `plan` refuses of a model's split is refused here by the same code.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tilewright.errors import UserError
from tilewright.plan.batches import solve
from tilewright.plan.decoder import Decoder
from tilewright.plan.training import Training, check_parallel


@dataclass(frozen=True)
class Layout:
    """The sizes of a mesh, all of them.

    >>> Layout(dp=2, tp=2).ranks, Layout(dp=4, zero=3).is_sharded
    (4, True)
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    sp: bool = False
    pieces: int = 1  # of a pipeline stage
    dp_replicate: int = 1  # groups of replicas, each of which shares the weights among its ranks
    ep: int = 1  # of the replicas, those that share experts; ranks of tp share them, too
    wrap: bool = False  # one rank runs by DDP or FSDP2 as several do

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def is_alone(self) -> bool:
        """Whether this is one process that needs no other, and no process group."""
        return self.ranks == 1 and not self.wrap

    @property
    def replicas(self) -> int:
        """Ranks that hold, or by FSDP share, the same parameters, and whose gradients are averaged."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Of the replicas, the ranks among which FSDP2 shards the parameters."""
        return self.replicas // self.dp_replicate

    @property
    def sharing(self) -> int:
        """Ranks that share the experts of a mixture, where a model has any."""
        return self.ep * self.tp

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the parameters."""
        return self.zero >= 2 and (self.replicas > 1 or self.wrap)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has the whole model and sequences of its own."""
        return self.ranks == self.dp and not self.is_sharded and self.ep == 1

    def __str__(self) -> str:
        sizes = [f"pp {self.pp}{f' in {self.pieces} pieces' if self.pieces > 1 else ''}"] if self.pp > 1 else []
        sizes += [f"{name} {size}" for name, size in (("dp", self.dp), ("cp", self.cp)) if size > 1]
        sizes += [f"tp {self.tp}{' with sp' if self.sp else ''}"] if self.tp > 1 else []
        found = " x ".join(sizes or ["one rank"]) + (f", zero {self.zero}" if self.is_sharded else "")
        found += f" in {self.dp_replicate} groups" if self.dp_replicate > 1 else ""
        return found + (f", ep {self.ep}" if self.ep > 1 else "")


def derive(
    ranks: int, *, dp: int = 0, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, zero: int = 0, sp: bool = False,
    pieces: int = 1, dp_replicate: int = 1, wrap: bool = False,
) -> Layout:  # fmt: skip
    """The layout of so many processes; `dp` 0 takes those that the other sizes leave.

    >>> derive(8, tp=2, zero=3)
    Layout(dp=4, tp=2, pp=1, cp=1, zero=3, sp=False, pieces=1, dp_replicate=1, ep=1, wrap=False)
    """
    if ranks % (tp * pp * cp):
        raise UserError(
            f"parallel: {_count(ranks)} do not divide by tp {tp} x pp {pp} x cp {cp}; start a multiple of "
            f"{tp * pp * cp} processes, or choose other sizes."
        )
    if dp and dp * tp * pp * cp != ranks:
        raise UserError(
            f"parallel: dp {dp} x tp {tp} x pp {pp} x cp {cp} are {dp * tp * pp * cp} ranks, and there are "
            f"{_count(ranks)}; start as many, or leave parallel.dp out."
        )
    if sp and tp == 1:
        raise UserError("parallel.sp shares the sequence among the ranks of tp, and tp is 1; set tp, or leave it out.")
    if wrap and ranks > 1:
        raise UserError(f"parallel.wrap is for one process, and there are {ranks}, which need no asking; leave it out.")
    dp = solve(gpus=ranks, tensor=tp * cp, pipeline=pp).data
    return Layout(dp, tp, pp, cp, zero, sp, pieces, dp_replicate, ep, wrap)


def check(layout: Layout, decoder: Decoder, training: Training, *, optimizer: str) -> None:
    """Refuse what the model, its batch or its optimizer do not allow.

    Args:
        training: the run as `plan` knows it; its split is replaced by the layout's.
    """
    t, p = layout.tp, layout.pp
    check_parallel(decoder, split(training, layout))
    if decoder.kv_heads % t:
        raise UserError(f"{decoder.kv_heads} key-value heads do not divide by tp {t}; choose a divisor.")
    if decoder.vocabulary % t:
        raise UserError(f"A vocabulary of {decoder.vocabulary:,} does not divide by tp {t}; choose a divisor.")
    if decoder.layers % (p * layout.pieces):
        raise UserError(
            f"{decoder.layers} layers do not divide by pp {p} x {layout.pieces} pieces; choose divisors of them."
        )
    if p > 1 and (training.accumulation or 1) < p:
        raise UserError(
            f"A pipeline of {p} stages needs at least {p} micro batches a step, and accumulation is "
            f"{training.accumulation or 1}; take a smaller micro_batch."
        )
    if optimizer == "adafactor" and (t > 1 or layout.ep > 1 or layout.is_sharded):
        raise UserError(
            "optimizer.name=adafactor takes means over whole rows and columns, and here each rank has a part of them; "
            "choose adamw or lion, or dp alone."
        )


def split(training: Training, layout: Layout) -> Training:
    """The run as `plan` knows it, split by a layout."""
    return dataclasses.replace(
        training, data=layout.dp, context=layout.cp, zero=layout.zero, tensor=layout.tp, sequence_parallel=layout.sp,
        pipeline=layout.pp, interleave=layout.pieces, replicate=layout.dp_replicate, expert=layout.ep,
    )  # fmt: skip


def _count(ranks: int) -> str:
    return f"{ranks} process" + ("es" if ranks != 1 else "")
