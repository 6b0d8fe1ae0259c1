"""Whether all ranks run the same thing: what differs is found at the start, and not when they wait for each other."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tilewright.errors import UserError

_PATIENCE = 5.0  # seconds that rank zero and another rank wait for each other to have the same problem
_HEARD = "tilewright/heard"  # how many ranks have read rank zero's problem


def require_same(facts: Mapping[str, Any], what: str) -> None:
    """Refuse, on every rank and in the same words, facts that are not those of rank zero.

    >>> require_same({"steps": 100}, "configuration")
    """
    if not dist.is_initialized():
        return
    flat = {name: repr(value)[:200] for name, value in _flat(facts)}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, flat)
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise UserError(
                    f"Rank {rank} has another {what} than rank 0: {name} is {other.get(name, 'not there')} and there "
                    f"{first.get(name, 'not there')}; start all ranks alike."
                )


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class Silent(Exception):
    """A problem that rank zero has told already."""


class Lost(Exception):
    """Another rank is gone, in a sentence; another start may mend it."""


# In the messages of gloo and NCCL.
_GONE = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "remote process exited")


def is_lost(error: BaseException | None) -> bool:
    """Whether an error comes from another rank that is gone, or does not answer."""
    while error is not None:
        network = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
        if network or (isinstance(error, RuntimeError) and any(words in str(error) for words in _GONE)):
            return True
        error = error.__cause__
    return False


@contextlib.contextmanager
def meeting(rank: int, ranks: int) -> Iterator[None]:
    """Say in a sentence that the ranks have not met."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        why = (str(error).splitlines() or [""])[0].rstrip(".")
        raise Lost(
            f"Rank {rank} of {ranks} has not met the others at {where} ({why}); start all ranks within "
            "parallel.timeout, with the address and a free port of the machine of rank 0."
        ) from error


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Let rank zero alone tell a problem that all have; another rank tells what it alone has, and its number."""
    try:
        yield
    except (UserError, RuntimeError) as error:
        if dist.is_initialized() and is_lost(error):
            raise Lost(
                f"Rank {dist.get_rank()} has lost another rank: it ended, or does not answer. See what that printed; "
                "started again, the run goes on from its newest checkpoint."
            ) from error
        if not dist.is_initialized() or not isinstance(error, UserError):
            raise
        rank, sentence, same = dist.get_rank(), str(error), False
        with contextlib.suppress(Exception):  # a store that is gone
            store = _get_default_store()
            if rank == 0:
                store.set("tilewright/problem", sentence)
                end = time.monotonic() + _PATIENCE  # the store may live in this process: others have to read it
                while store.add(_HEARD, 0) < dist.get_world_size() - 1 and time.monotonic() < end:
                    time.sleep(0.02)
            else:
                store.wait(["tilewright/problem"], timedelta(seconds=_PATIENCE))
                same = store.get("tilewright/problem").decode() == sentence
                store.add(_HEARD, 1)
        if same:
            raise Silent from error
        raise UserError(sentence if rank == 0 else f"Rank {rank}: {sentence}") from error
