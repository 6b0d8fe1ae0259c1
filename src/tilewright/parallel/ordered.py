"""A sharded tensor whose rows are in another order than the model's own, saved and loaded in the model's order.

torch.distributed.checkpoint asks a tensor that is not whole for its chunks: those are answered here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Ordered(NamedTuple):
    """A DTensor, and for each of its rows which one of the model's it is."""

    tensor: Any
    order: Tensor


class _Run(NamedTuple):
    """Rows that lie beside each other in both orders."""

    here: int
    there: int
    rows: int


class Pieces(Tensor):
    """This rank's rows of a tensor, as chunks of the whole."""

    whole: torch.Size
    runs: list[_Run]
    column: int  # the first of those it has

    @classmethod
    def of(cls, ordered: Ordered) -> Pieces:
        """The chunks of a DTensor that is cut along its first dimension, and maybe another one."""
        tensor = ordered.tensor
        assert isinstance(tensor, DTensor)
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        local: Any = tensor.to_local().detach().as_subclass(cls)
        local.whole, local.runs = tensor.shape, _runs(ordered.order[offset[0] : offset[0] + shape[0]].tolist())
        local.column = offset[1] if len(offset) > 1 else 0
        return local

    def size(self, *dimension: int) -> Any:  # type: ignore[override]
        return self.whole[dimension[0]] if dimension else self.whole

    def _chunk(self, run: _Run) -> ChunkStorageMetadata:
        rest = torch.Tensor.size(self)[1:]
        return ChunkStorageMetadata(
            torch.Size((run.there, *[self.column for _ in rest])), torch.Size((run.rows, *rest))
        )  # fmt: skip

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(run) for run in self.runs]

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.whole),
            )
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        run = next(run for run in self.runs if run.there == index.offset[0])
        return self.as_subclass(Tensor)[run.here : run.here + run.rows]


def _runs(rows: list[int]) -> list[_Run]:
    """Rows in the model's order, as runs.

    >>> _runs([0, 1, 4, 5, 2])
    [_Run(here=0, there=0, rows=2), _Run(here=2, there=4, rows=2), _Run(here=4, there=2, rows=1)]
    """
    found: list[_Run] = []
    for here, there in enumerate(rows):
        if found and found[-1].there + found[-1].rows == there:
            found[-1] = found[-1]._replace(rows=found[-1].rows + 1)
        else:
            found.append(_Run(here, there, 1))
    return found
