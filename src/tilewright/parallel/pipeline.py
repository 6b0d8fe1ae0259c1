"""Pipeline parallel: each rank of pp has some of the blocks, and micro batches go through them, by PyTorch's schedules.

The first stage has the embeddings, the last the final norm, the output layer and the loss. A tied table is on both, and
its gradients are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilewright.parallel.mesh import Mesh
from tilewright.parallel.split import SplitGPT
from tilewright.runtime import philox


class StageGPT(SplitGPT):
    """The blocks of one stage; from tokens, or the stream that came, to the stream that goes on, or the loss."""

    positions: Any = None
    seeds: Sequence[int] = ()  # of the dropout of each micro batch of the step

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None, *, targets: Any = None, number: Any = None
    ) -> Any:  # fmt: skip
        positions = self.positions
        if positions is not None and number is not None:
            positions = positions.of(self.seeds[int(number[0])])
        with philox.by_position(positions):
            x, residual = self.run(self.begin(x) if self.mesh.place("pp") == 0 else x, residual)
            return self.finish(x, residual, targets) if self.mesh.has_loss else (x, residual)


def keep_stage(model: Any, mesh: Mesh) -> None:
    """Leave a model, in place, what this stage needs; parameters keep their names."""
    rank, each = mesh.place("pp"), len(model.blocks) // mesh.layout.pp
    own = range(rank * each, (rank + 1) * each)
    model.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in own})
    model.recompute = [model.recompute[number] for number in own]
    model.__class__ = StageGPT
    if rank > 0:
        model.position = None
    if not mesh.has_loss:
        model.norm = model.head = None
    if rank > 0 and not (mesh.has_loss and model.config.tied):
        model.token = None


def ends_group(mesh: Mesh) -> Any:
    """The group of this rank's first and last stage; on a stage between, none of which it is a member."""
    assert mesh.whole is not None
    ends = mesh.whole.mesh[[0, -1]].reshape(2, -1).T.tolist()
    return dist.new_subgroups_by_enumeration(ends)[0]


class Pipeline:
    """A stage, and the schedule that it runs by.

    Args:
        forward: the stage, or what DDP has made of it.
        streams: dtypes of what a sublayer returns and of the residual stream.
    """

    def __init__(
        self, model: StageGPT, forward: Any, mesh: Mesh, device: torch.device, streams: tuple[Any, Any]
    ) -> None:
        self.model, self.forward, self.mesh, self.device, self.streams = model, forward, mesh, device, streams
        self._schedules: dict[tuple[int, int], Any] = {}

    def _stream(self, rows: int, device: Any) -> tuple[Tensor, ...]:
        """Empty tensors as they go from stage to stage."""
        config, layout = self.model.config, self.mesh.layout
        length = config.sequence // layout.cp // (layout.tp if layout.sp else 1)
        shape = rows, length, config.width
        needs = torch.is_grad_enabled()  # PyTorch sends gradients back of what says that it needs them
        return tuple(torch.empty(shape, dtype=dtype, device=device, requires_grad=needs) for dtype in self.streams)

    def _schedule(self, rows: int, count: int) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # a second that only a pipeline pays

        if (rows, count) not in self._schedules:
            place, stages = self.mesh.place("pp"), self.mesh.layout.pp
            tokens = torch.empty(rows, self.model.config.sequence, dtype=torch.int64, device="meta")
            stage = PipelineStage(
                self.forward, place, stages, self.device,
                input_args=tokens if place == 0 else self._stream(rows, "meta"),
                output_args=torch.empty((), device="meta") if self.mesh.has_loss else self._stream(rows, "meta"),
                group=self.mesh.group("pp"),
            )  # fmt: skip
            self._schedules[rows, count] = Schedule1F1B(stage, count, loss_fn=_is_loss, scale_grads=False)
        return self._schedules[rows, count]

    def step(self, batches: list[Tensor], seeds: Sequence[int]) -> list[Tensor]:
        """Forward and backward of all micro batches of a step; their losses, on the last stage."""
        self.model.seeds = seeds
        tokens = torch.cat(batches)
        numbers = torch.arange(len(batches)).repeat_interleave(len(batches[0]))
        schedule, losses = self._schedule(len(batches[0]), len(batches)), []  # type: ignore[var-annotated]
        inputs = (tokens[:, :-1],) if self.mesh.place("pp") == 0 else ()
        given: dict[str, Any] = {"number": numbers}
        if self.mesh.has_loss:
            given |= {"targets": tokens[:, 1:]}
            schedule.step(*inputs, target=tokens, losses=losses, return_outputs=False, **given)
        else:
            schedule.step(*inputs, return_outputs=False, **given)
        return [loss.detach() for loss in losses] or [torch.zeros((), device=self.device)]

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """The mean loss of a batch, on the last stage; 0 on others."""
        place, group = self.mesh.place("pp"), self.mesh.group("pp")
        came = [tokens[:, :-1]]
        if place > 0:
            came = list(self._stream(len(tokens), self.device))
            for tensor in came:
                dist.recv(tensor, group=group, group_src=place - 1)
        found = self.model(*came, targets=tokens[:, 1:] if self.mesh.has_loss else None)
        if self.mesh.has_loss:
            return found
        for tensor, dtype in zip(found, self.streams, strict=True):
            dist.send(tensor.to(dtype).contiguous(), group=group, group_dst=place + 1)
        return torch.zeros((), device=self.device)


def _is_loss(output: Tensor, target: Any) -> Tensor:
    return output
