"""The storage by which torch.distributed.checkpoint (DCP) writes and reads the files of checkpoint_format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tilewright.train.checkpoint_format import TENSORS, File, SavedTensor, write_file


class Writer(StorageWriter):
    """Writes what a rank saves, in several files at once; `files` has their sizes and hashes."""

    def __init__(self, folder: Path, rank: int, threads: int) -> None:
        self.folder, self.rank, self.threads = folder, rank, threads
        self.files: dict[str, File] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        self.files = {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        shares: list[list[WriteItem]] = [[] for _ in range(self.threads)]
        sizes = [0] * self.threads
        for item in sorted(plan.items, key=_size, reverse=True):
            least = sizes.index(min(sizes))
            shares[least].append(item)
            sizes[least] += _size(item)
        with ThreadPoolExecutor(self.threads) as pool:
            written = pool.map(lambda number: self._write_share(number, shares[number], planner), range(self.threads))
            results = [result for part in written for result in part]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_share(self, number: int, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        name, results, end = f"{self.rank}-{number}.bin", [], 0

        def pieces() -> Iterator[Any]:
            nonlocal end
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                results.append(WriteResult(item.index, data.nbytes, (name, end)))
                end += data.nbytes
                yield data

        if items:
            self.files[name] = write_file(self.folder / name, pieces())
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for part in results for result in part}
        tree = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            chunks = []
            for chunk in tensor.chunks:
                if math.prod(chunk.sizes):
                    file, offset = places[MetadataIndex(name, chunk.offsets)]
                    chunks.append({"at": [*chunk.offsets], "shape": [*chunk.sizes], "file": file, "offset": offset})
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tree[name] = {"dtype": dtype, "shape": [*tensor.size], "chunks": chunks}
        self.files[TENSORS] = write_file(self.folder / TENSORS, [json.dumps(tree).encode()])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _size(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class Reader(StorageReader):
    """Reads chunks of a list that was checked; remembers which file it reads."""

    def __init__(self, folder: Path, tensors: dict[str, SavedTensor]) -> None:
        self.folder, self.tensors, self.reading = folder, tensors, TENSORS
        self.chunks = {
            MetadataIndex(name, chunk.at): chunk for name, tensor in tensors.items() for chunk in tensor.chunks
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({
            name: TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape),
                [ChunkStorageMetadata(torch.Size(chunk.at), torch.Size(chunk.shape)) for chunk in tensor.chunks],
            )
            for name, tensor in self.tensors.items()
        })  # fmt: skip

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            chunk, dtype = self.chunks[item.storage_index], self.tensors[item.storage_index.fqn].dtype
            self.reading = chunk.file
            raw = np.fromfile(self.folder / chunk.file, np.uint8, chunk.bytes, offset=chunk.offset)
            tensor = torch.from_numpy(raw).view(dtype).reshape(chunk.shape)
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dimension, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(tensor)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
