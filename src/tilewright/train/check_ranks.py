"""Whether a run can be shared by so many ranks, and how it stays the same run with fewer of them. No torch.

Every rank asks this at its start, and a launcher before it starts any.
"""

from __future__ import annotations

from tilewright.errors import UserError
from tilewright.parallel import layout as layouts
from tilewright.parallel.layout import Layout
from tilewright.plan.batches import Batches
from tilewright.plan.decoder import from_gpt
from tilewright.plan.gpt import OWN_ATTENTION
from tilewright.plan.training import Training
from tilewright.train.schema import RECORDING, Train


def check_ranks(config: Train, ranks: int) -> tuple[Layout, Batches]:
    """How so many ranks share a run; refuses what they cannot.

    >>> check_ranks(Train(global_batch=8), 4)[0].dp
    4
    """
    layout = config.layout(ranks)
    sizes = config.batch_sizes(layout.dp)
    training = Training(micro_batch=sizes.micro, accumulation=sizes.accumulation)
    layouts.check(layout, from_gpt(config.model), training, optimizer=config.optimizer.name)
    _check_together(config, layout)
    _check_sharding(config, layout)
    return layout, sizes


def _check_together(config: Train, layout: Layout) -> None:
    """Refuse what does not go together with the layout of a run."""
    if layout.ranks > 1 and config.device.startswith("cuda:"):
        raise UserError(f"device is {config.device}, and each of {layout.ranks} ranks has its own; choose device=cuda.")
    how = "rules" if config.rules != "none" else f"compile={config.compile}" if config.compile in RECORDING else ""
    how = "cuda_graphs" if config.cuda_graphs else how
    if how and not layout.is_replicated:  # what is recorded does not move, and weights that are gathered do
        raise UserError(f"{how} does not go together with parallel ({layout}); leave it out, or use dp alone.")
    if layout.cp > 1 and config.model.attention not in ("auto", *OWN_ATTENTION):
        raise UserError("parallel.cp takes its own attention to all ranks' keys; choose model.attention=auto.")


def _check_sharding(config: Train, layout: Layout) -> None:
    """Refuse settings of FSDP2 that would do nothing, or more than they say."""
    settings = config.parallel
    for name in ("parameters", "gradients"):
        if getattr(settings, name) != "auto" and layout.zero == 0:
            raise UserError(f"parallel.{name} is for parallel.zero=2 or 3, and zero is 0; set zero, or leave it out.")
    if settings.reshard:
        _check_reshard(settings.reshard, layout)
    # A pipeline's schedule gathers weights for some micro batches alone.
    alone = layout.pp > 1 and layout.pieces == 1 and layout.zero == 3 and layout.is_sharded
    shared = config.model.experts and layout.sharing > 1
    if shared and alone and config.model.recompute in ("selective", "budget"):
        raise UserError(
            f"model.recompute={config.model.recompute} does not go together with parallel.ep or tp, pp and zero 3 yet; "
            "choose zero 2 or recompute=full."
        )
    in_bf16 = config.model.residual == "bf16" or config.precision in ("bf16_kahan", "bf16_stochastic")
    if settings.parameters == "bf16" and not in_bf16:
        raise UserError(
            "parallel.parameters=bf16 makes the residual stream bfloat16; set model.residual=bf16, or leave it out."
        )


def _check_reshard(reshard: int, layout: Layout) -> None:
    """Refuse groups of neighbours that FSDP2 cannot make, or that would do nothing."""
    if layout.zero != 3:
        raise UserError(f"parallel.reshard is for parallel.zero=3, and zero is {layout.zero}; leave it out.")
    if layout.pieces > 1:
        raise UserError(
            "parallel.reshard keeps weights from forward to backward, and with parallel.pieces the pipeline's schedule "
            "says how long they stay; leave one of them out."
        )
    if layout.is_sharded and layout.shards % reshard:
        raise UserError(
            f"parallel.reshard is {reshard}, and {layout.shards} ranks share the weights; choose a divisor."
        )
    # FSDP2 makes these groups by itself, which hangs where not all ranks make them of the same ranks.
    if 1 < reshard < layout.shards and (layout.tp > 1 or layout.pp > 1):
        raise UserError(
            f"parallel.reshard={reshard} among {layout.shards} ranks does not go together with tp and pp; leave it out."
        )
    if 1 < reshard < layout.shards and layout.ep not in (1, reshard):
        raise UserError(f"parallel.reshard is {reshard} and ep {layout.ep}; with ep, choose {layout.ep} for both.")


def with_fewer_ranks(config: Train, ranks: int) -> tuple[str, ...]:
    """What is added to the command line of a run of so many ranks for it to learn the same with fewer."""
    _, sizes = check_ranks(config, ranks)
    found = [f"global_batch={sizes.global_}", f"micro_batch={sizes.micro}", "accumulation=0", "parallel.dp=0"]
    if ranks > 1 and config.parallel.dropout == "auto":
        found.append("parallel.dropout=position")
    if config.checkpoint.resume == "never":
        found.append("checkpoint.resume=auto")
    return tuple(found)


def fewer_groups(config: Train, ranks: int, left: int) -> tuple[str, ...]:
    """What is added beside that for a run of so many ranks in groups that share the weights, when fewer ranks are left.

    Groups go, and none has fewer ranks than before, which would have to hold more: with fewer ranks than a group had,
    all of them are one.

    >>> from tilewright.train.schema import Parallel
    >>> run = Train(global_batch=24, parallel=Parallel(zero=3, dp_replicate=4))
    >>> fewer_groups(run, 8, 6), fewer_groups(run, 8, 1)
    (('parallel.dp_replicate=3',), ('parallel.dp_replicate=1',))
    """
    before, _ = check_ranks(config, ranks)
    if before.dp_replicate == 1:
        return ()
    replicas = left // (before.tp * before.pp)
    possible = range(min(before.dp_replicate, replicas // before.shards), 1, -1)
    return (f"parallel.dp_replicate={next((groups for groups in possible if replicas % groups == 0), 1)}",)


def keeps_its_ranks(config: Train, ranks: int) -> bool:
    """Whether a checkpoint of so many ranks is for as many alone: states in 8 bits have scales of a rank's part."""
    layout, _ = check_ranks(config, ranks)
    return config.optimizer.name == "adamw_8bit" and (layout.is_sharded or layout.tp > 1 or layout.ep > 1)
