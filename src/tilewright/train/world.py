"""The processes that train together: one, unless torch.distributed has been started.

What parallelism needs of the loop goes through here: which rank this is, whether it is rank zero, and its mesh.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from tilewright.errors import UserError
from tilewright.parallel.agree import meeting, told_once
from tilewright.parallel.alive import alive, watched
from tilewright.parallel.layout import Layout
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.own_store import own_store


@dataclass(frozen=True)
class World:
    """This process among those that train together.

    >>> World().is_rank_zero
    True
    """

    rank: int = 0
    ranks: int = 1
    mesh: Mesh = field(default_factory=lambda: Mesh(Layout(), "cpu"), compare=False)

    @classmethod
    def current(cls, layout: Layout | None = None, device_type: str = "cpu") -> World:
        """The processes there are; by `layout`, or each with batches of its own."""
        if dist.is_available() and dist.is_initialized():
            ranks = dist.get_world_size()
            return cls(dist.get_rank(), ranks, Mesh(layout or Layout(dp=ranks), device_type))
        return cls()

    @staticmethod
    def size() -> int:
        """How many processes there are."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the one process that shows and writes metrics."""
        return self.rank == 0

    @staticmethod
    @contextlib.contextmanager
    def joined(timeout: float = 600.0, device: str = "auto") -> Iterator[None]:
        """Join those that torchrun has started, if it has: each its own GPU, or processes on a CPU.

        Args:
            timeout: seconds after which a rank that waits for others gives up.
            device: as a run has it; with cpu, GPUs are let alone.
        """
        ranks = _number("WORLD_SIZE", 1, least=1)
        if ranks == 1 or dist.is_initialized():
            yield
            return
        rank, local = _number("RANK", None, least=0), _number("LOCAL_RANK", 0, least=0)
        if rank >= ranks:
            raise UserError(f"RANK is {rank} and WORLD_SIZE {ranks}; start with torchrun, or unset both.")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise UserError(
                    f"WORLD_SIZE is {ranks} and {name} is not set; start with torchrun, or unset WORLD_SIZE."
                )
        _number("MASTER_PORT", None, least=0)
        on_gpu = torch.cuda.is_available() and device != "cpu"
        if on_gpu:
            if local >= torch.cuda.device_count():
                raise UserError(
                    f"LOCAL_RANK is {local} and there are {torch.cuda.device_count()} GPUs; start fewer processes."
                )
            torch.cuda.set_device(local)
        with alive(rank):
            with meeting(rank, ranks):
                limit = timedelta(seconds=timeout)
                store, _, _ = next(rendezvous("env://", timeout=limit))
                store = own_store(store, rank, ranks, timeout)
                backend = "nccl" if on_gpu else "gloo"
                dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
            try:
                with watched(rank, ranks), told_once():
                    yield
            finally:
                dist.destroy_process_group()

    @staticmethod
    @contextlib.contextmanager
    def of_one(device: torch.device) -> Iterator[None]:
        """A process group of this process alone, unless there is one: DDP and FSDP2 do not run without."""
        if dist.is_initialized():
            yield
            return
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            dist.destroy_process_group()


def _number(name: str, default: int | None, *, least: int) -> int:
    """A number that torchrun has put into the environment."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise UserError(
            f"{name} is {text!r}, and torchrun sets a whole number from {least} on; start with it, or unset {name}."
        )
    return int(text)
