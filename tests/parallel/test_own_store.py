"""Ranks that torchrun starts anew meet in a part of its store that nobody had before."""

import threading

import pytest
import torch.distributed as dist

from tilewright.parallel.agree import is_lost
from tilewright.parallel.own_store import own_store

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
RANKS = 4


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return dist.HashStore()


def met(store, order, ranks=RANKS):
    """The part that each rank gets, which come in this order; all of them are the same part."""
    found = {}
    threads = [threading.Thread(target=lambda rank=rank: found.update({rank: own_store(store, rank, ranks, 300.0)}))
               for rank in order]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.keys() == set(range(ranks))
    for rank, part in found.items():
        part.set(f"from {rank}", str(rank))
    assert all(part.get(f"from {rank}") == str(rank).encode() for rank in found for part in found.values())
    return found


def test_every_start_has_a_part_of_its_own(store):
    starts = [met(store, order) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2])]
    for number, start in enumerate(starts):
        start[0].set("address", str(number))
    assert [start[RANKS - 1].get("address") for start in starts] == [b"0", b"1", b"2"]
    fewer = met(store, [1, 0], ranks=2)  # another number of ranks, whose numbers were others' before
    assert not fewer[1].check(["address"])


def test_a_rank_that_came_and_ended_is_not_waited_for(store):
    """The store has what it drew, and rank zero names a start with that first."""
    for rank in range(RANKS):
        store.set(f"tilewright/drawn/{rank}", "of one that has ended")
    met(store, [0, 3, 1, 2])


def test_one_that_does_not_come_is_an_error(store):
    for rank in (0, 1):
        with pytest.raises(dist.DistStoreError, match="not all of 2 ranks") as error:
            own_store(store, rank, 2, 0.05)
        assert is_lost(error.value)


def test_elsewhere_the_store_is_of_one_start(store, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert own_store(store, 0, 2, 0.0) is store
