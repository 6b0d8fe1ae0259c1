"""A part of the store that ranks meet at for one start of them.

The store of torchrun's agent outlives the ranks that it starts anew, and PyTorch looks for addresses under the same
keys as before: it would find those of ranks that have ended. So rank zero gives each start a name. It reads what every
rank has drawn for itself, and names all of it again until each has found its own there.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

_START = "tilewright/start"  # its name, and what the ranks behind rank zero have drawn
_PAUSE = 0.02  # seconds between two looks


def own_store(store: Any, rank: int, ranks: int, timeout: float) -> Any:
    """The part of a store that is of this start of the ranks alone; where the store is, too, the store itself."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    drawn = secrets.token_hex(8)
    store.set(_key(rank), drawn)
    find = _name(store, ranks) if rank == 0 else _accept(store, rank, ranks, drawn)
    end = time.monotonic() + timeout
    for name in find:
        if name:
            return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # not in its stub
        if time.monotonic() > end:
            break
        time.sleep(_PAUSE)
    raise dist.DistStoreError(f"not all of {ranks} ranks have come within {timeout:g} s")


def _key(rank: int) -> str:
    return f"tilewright/drawn/{rank}"


def _name(store: Any, ranks: int) -> Iterator[str]:
    """Of rank zero: the name of a start that all others have accepted, and "" until there is one."""
    keys, seen, name = [_key(rank) for rank in range(1, ranks)], None, ""
    while True:
        drawn = store.multi_get(keys) if store.check(keys) else None
        if drawn is not None and drawn != seen:
            seen, name = drawn, f"tilewright/{secrets.token_hex(8)}"
            store.set(_START, json.dumps([name, *[each.decode() for each in drawn]]))
        if name and store.check([f"{name}/{rank}" for rank in range(1, ranks)]):
            store.set(f"{name}/0", "")
            yield name
        yield ""


def _accept(store: Any, rank: int, ranks: int, drawn: str) -> Iterator[str]:
    """Of another rank: the name of a start that has what it has drawn, once all have accepted it, and "" until then."""
    accepted = ""
    while True:
        name, *others = json.loads(store.get(_START)) if store.check([_START]) else ("",)
        if len(others) == ranks - 1 and others[rank - 1] == drawn:
            if name != accepted:
                store.set(f"{name}/{rank}", "")
                accepted = name
            if store.check([f"{name}/0"]):
                yield name
        yield ""
