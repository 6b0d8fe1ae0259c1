"""Pipeline parallel: each rank of pp has some of the blocks, and micro batches go through them, by PyTorch's schedules.

A rank has one stage, or with `pieces` several, each a whole round of the ranks behind the one before:

    pp 2, pieces 2, 8 blocks    rank 0: blocks 0 1 and 4 5    rank 1: blocks 2 3 and 6 7

The first stage has the embeddings, the last the final norm, the output layer and the loss. A tied table is on both, and
its gradients are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.models import GPT
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.split import SplitGPT
from tilewright.runtime import philox

_ENDS = ("token", "position", "norm", "head")


class StageGPT(SplitGPT):
    """A stage, made of modules of a GPT; from tokens, or the stream that came, to the stream that goes on, or the loss.

    Args:
        number: of the stage, among `count`.
    """

    positions: philox.Positions | None = None

    def __init__(self, model: GPT, mesh: Mesh, number: int, count: int) -> None:
        nn.Module.__init__(self)
        self.config, self.mesh, self.rope = model.config, mesh, model.rope
        self.number, self.is_first, self.is_last = number, number == 0, number == count - 1
        each = len(model.blocks) // count
        own = range(number * each, (number + 1) * each)
        self.blocks = nn.ModuleDict({str(block): model.blocks[block] for block in own})  # type: ignore[assignment]
        self.recompute = [model.recompute[block] for block in own]
        ends = ["token", "position"] if self.is_first else []
        if self.is_last:
            ends += ["norm", "token" if model.config.tied else "head"]
        for name in _ENDS:
            setattr(self, name, getattr(model, name) if name in ends else None)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None, *, targets: Any = None, seed: Any = None
    ) -> Any:  # fmt: skip
        positions = self.positions
        if positions is not None and seed is not None:
            positions = positions.of(int(seed[0]))
        with philox.by_position(positions):
            x, residual = self.run(self.begin(x) if self.is_first else x, residual)
            if self.is_last:
                return self.finish(x, residual, targets)
            assert residual is not None
            # What sequence parallel scatters is transposed, and PyTorch sends what is contiguous alone.
            return x.contiguous(), residual.contiguous()


def keep_stages(model: Any, mesh: Mesh) -> list[StageGPT]:
    """The stages of this rank; the model is left, in place, with what they have. Parameters keep their names."""
    ranks, pieces = mesh.layout.pp, mesh.layout.pieces
    stages = [StageGPT(model, mesh, mesh.place("pp") + piece * ranks, ranks * pieces) for piece in range(pieces)]
    model.blocks = nn.ModuleDict({name: block for stage in stages for name, block in stage.blocks.named_children()})
    for name in _ENDS:
        if all(getattr(stage, name) is None for stage in stages):
            setattr(model, name, None)
    return stages


def ends_group(mesh: Mesh) -> Any:
    """The group of this rank's first and last stage; on a stage between, none of which it is a member."""
    assert mesh.whole is not None
    ends = mesh.whole.mesh[[0, -1]].reshape(2, -1).T.tolist()
    return dist.new_subgroups_by_enumeration(ends)[0]


class Pipeline:
    """The stages of this rank, and the schedule that they run by.

    Args:
        forwards: the stages, or what DDP has made of them.
        streams: dtypes of what a sublayer returns and of the residual stream.
        positions: what dropout is drawn by, if by position.
    """

    def __init__(
        self, stages: list[StageGPT], forwards: list[Any], mesh: Mesh, device: torch.device, streams: tuple[Any, Any],
        positions: philox.Positions | None,
    ) -> None:  # fmt: skip
        self.stages, self.forwards, self.mesh, self.device, self.streams = stages, forwards, mesh, device, streams
        for stage in stages:
            stage.positions = positions
        self._schedules: dict[tuple[int, int], Any] = {}

    def _stream(self, rows: int, device: Any) -> tuple[Tensor, ...]:
        """Empty tensors as they go from stage to stage."""
        config, layout = self.stages[0].config, self.mesh.layout
        length = config.sequence // layout.cp // (layout.tp if layout.sp else 1)
        shape = rows, length, config.width
        needs = torch.is_grad_enabled()  # PyTorch sends gradients back of what says that it needs them
        return tuple(torch.empty(shape, dtype=dtype, device=device, requires_grad=needs) for dtype in self.streams)

    def _schedule(self, rows: int, count: int) -> Any:
        from torch.distributed import pipelining  # a second that only a pipeline pays

        if (rows, count) not in self._schedules:
            tokens = torch.empty(rows, self.stages[0].config.sequence, dtype=torch.int64, device="meta")
            stages = [
                pipelining.PipelineStage(
                    forward, stage.number, self.mesh.layout.pp * len(self.stages), self.device,
                    input_args=tokens if stage.is_first else self._stream(rows, "meta"),
                    output_args=torch.empty((), device="meta") if stage.is_last else self._stream(rows, "meta"),
                    group=self.mesh.group("pp"),
                )
                for stage, forward in zip(self.stages, self.forwards, strict=True)
            ]  # fmt: skip
            how: Any = {"loss_fn": _is_loss, "scale_grads": False}
            if len(stages) == 1:
                schedule: Any = pipelining.Schedule1F1B(stages[0], count, **how)
            else:
                schedule = pipelining.ScheduleInterleaved1F1B(stages, count, **how)  # type: ignore[arg-type]
            self._schedules[rows, count] = schedule
        return self._schedules[rows, count]

    def step(self, batches: list[Tensor], seeds: Sequence[int]) -> list[Tensor]:
        """Forward and backward of all micro batches of a step; their losses, on the last stage.

        Args:
            seeds: by which the dropout of each micro batch is drawn, if by position.
        """
        tokens, rows = torch.cat(batches), len(batches[0])
        schedule, losses = self._schedule(rows, len(batches)), []  # type: ignore[var-annotated]
        inputs = (tokens[:, :-1],) if self.stages[0].is_first else ()
        given: dict[str, Any] = {"seed": torch.tensor(seeds).repeat_interleave(rows)}
        if self.mesh.has_loss:
            given |= {"targets": tokens[:, 1:]}
            schedule.step(*inputs, target=tokens, losses=losses, return_outputs=False, **given)
        else:
            schedule.step(*inputs, return_outputs=False, **given)
        return [loss.detach() for loss in losses] or [torch.zeros((), device=self.device)]

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """The mean loss of a batch, on the last stage's rank; 0 on others."""
        place, ranks, group = self.mesh.place("pp"), self.mesh.layout.pp, self.mesh.group("pp")
        for stage in self.stages:
            came = [tokens[:, :-1]]
            if not stage.is_first:
                came = list(self._stream(len(tokens), self.device))
                for tensor in came:
                    dist.recv(tensor, group=group, group_src=(place - 1) % ranks)
            found = stage(*came, targets=tokens[:, 1:] if stage.is_last else None)
            if stage.is_last:
                return found
            for tensor, dtype in zip(found, self.streams, strict=True):
                dist.send(tensor.to(dtype).contiguous(), group=group, group_dst=(place + 1) % ranks)
        return torch.zeros((), device=self.device)


def _is_loss(output: Tensor, target: Any) -> Tensor:
    return output
