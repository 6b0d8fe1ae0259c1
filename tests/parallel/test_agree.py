"""What a problem of all ranks leads to: one sentence, by rank zero."""

import threading
import time

import pytest
import torch.distributed as dist

from tilewright.errors import UserError
from tilewright.parallel import agree


def test_rank_zero_stays_until_the_others_have_read_its_problem(monkeypatch):
    """The store may live in its process: one that ended sooner would have them tell the problem again."""
    of_thread, store, raised = threading.local(), dist.HashStore(), {}
    monkeypatch.setattr(agree, "_PATIENCE", 60.0)
    monkeypatch.setattr(agree, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: of_thread.rank)

    def be(rank, sentence):
        of_thread.rank = rank
        with pytest.raises((UserError, agree.Silent)) as caught, agree.told_once():
            raise UserError(sentence)
        raised[rank] = caught.value

    ranks = [
        threading.Thread(target=be, args=(rank, "All have it." if rank < 2 else "I have it.")) for rank in range(3)
    ]
    for rank in ranks:
        rank.start()
        if rank is not ranks[2]:
            time.sleep(0.8)
            assert ranks[0].is_alive()
    for rank in ranks:
        rank.join(60.0)
    assert str(raised[0]) == "All have it." and isinstance(raised[1], agree.Silent)
    assert str(raised[2]) == "Rank 2: I have it."
