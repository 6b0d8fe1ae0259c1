"""The parts of a model's parameters that lie on this rank: what the optimizer steps, clipping sums and DCP saves.

FSDP2 makes DTensors of parameters. An optimizer of ours takes plain tensors, all of them by one kernel: so each DTensor
has a plain parameter beside it, of the same memory, which is what the optimizer knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tilewright.parallel.mesh import Mesh


@dataclass(frozen=True)
class Part:
    """A parameter of the model, and the plain one that the optimizer steps; the same where there is nothing to cut."""

    name: str
    whole: nn.Parameter
    local: nn.Parameter
    copies: int  # ranks that have this very part
    cut: frozenset[str]  # dimensions of the mesh among whose ranks it is cut


class Shards:
    """All parts of this rank.

    >>> from tilewright.parallel.layout import Layout
    >>> [part.name for part in Shards(nn.Linear(2, 3), Mesh(Layout(), "cpu")).parts]
    ['weight', 'bias']
    """

    def __init__(self, model: nn.Module, mesh: Mesh, twice: str = "") -> None:
        self.mesh, self.twice = mesh, twice  # `twice` is the name of what two stages of a pipeline have
        self.parts = [self._part(name, p) for name, p in model.named_parameters()]

    def _part(self, name: str, parameter: nn.Parameter) -> Part:
        layout, cuts, cut = self.mesh.layout, 1, set()
        data: Any = parameter.data
        if isinstance(data, DTensor):
            for dimension, placement in enumerate(data.placements):
                if not placement.is_replicate():  # of a dimension that is cut twice, one cut is no plain Shard
                    cuts *= data.device_mesh.size(dimension)
                    cut.add((data.device_mesh.mesh_dim_names or ())[dimension])
            local = nn.Parameter(data.to_local().detach(), requires_grad=parameter.requires_grad)
        else:
            local = parameter
        copies = layout.ranks // layout.pp // cuts * (2 if name == self.twice else 1)
        return Part(name, parameter, local, copies, frozenset(cut))

    def gradients(self, *, of_experts: bool = False) -> list[Tensor]:
        """The gradients of experts that ranks share, or of all else."""
        gradients = (part.local.grad for part in self.parts if ("ep" in part.cut) == of_experts)
        return [gradient for gradient in gradients if gradient is not None]

    def gradient(self, name: str) -> Tensor:
        """The gradient of a parameter's part."""
        found = next(part.local.grad for part in self.parts if part.name == name)
        assert found is not None
        return found

    def take_gradients(self) -> None:
        """Give each local parameter its gradient."""
        for part in self.parts:
            gradient: Any = part.whole.grad
            if gradient is not None and part.local is not part.whole:
                part.local.grad = gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def drop_gradients(self) -> None:
        """Set all gradients to None."""
        for part in self.parts:
            part.whole.grad = part.local.grad = None

    def norm(self) -> Tensor:
        """Return the norm of all gradients of the model, each element once, by one message of one number."""
        due = [(part, part.local.grad) for part in self.parts if part.local.grad is not None]
        norms = torch._foreach_norm([gradient for _, gradient in due], 2, dtype=torch.float32)
        if self.mesh.layout.is_alone:
            return torch.linalg.vector_norm(torch.stack(norms))
        squares = torch.stack(norms).square()
        total = (squares / torch.tensor([part.copies for part, _ in due], device=squares.device)).sum()
        dist.all_reduce(total)
        return total.sqrt()

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """The optimizer's states by parameter, those with the shape of a part as DTensors where the parameter is."""
        return {
            part.name: dict(_like(part, key, value) for key, value in optimizer.state[part.local].items())
            for part in self.parts
            if part.local in optimizer.state
        }


def _like(part: Part, key: str, value: Tensor) -> tuple[str, Any]:
    """A state under its name for a checkpoint; one that goes by blocks of this very part is of this part alone."""
    whole: Any = part.whole.data
    if not isinstance(whole, DTensor) or value.dim() == 0:
        return key, value
    if value.shape == part.local.shape:
        return key, DTensor.from_local(
            value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    number = count = 1
    for dimension, placement in enumerate(whole.placements):
        if not placement.is_replicate():
            size = whole.device_mesh.size(dimension)
            number, count = (number - 1) * size + whole.device_mesh.get_local_rank(dimension) + 1, count * size
    return f"{key}.{number}-of-{count}", value
