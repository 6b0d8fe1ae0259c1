"""The trials that one worker holds: a lease of each in the storage, renewed for as long as the worker lives."""

from __future__ import annotations

import threading
import uuid

from optuna.trial import TrialState

from tilewright.errors import UserError
from tilewright.tune.store import lease as leases
from tilewright.tune.store.entry import LEASE
from tilewright.tune.store.storage import Storage


class Held:
    """A worker's leases, and the thread that renews them.

    Args:
        storage: of the study.
        worker: how it is called.
        seconds: after which a lease that is not renewed has run out.
    """

    def __init__(self, storage: Storage, worker: str, seconds: float) -> None:
        self._storage, self._worker, self._seconds = storage, worker, seconds
        self.name = LEASE + uuid.uuid4().hex  # of the attribute of a trial that has this worker's lease
        self._since: dict[int, float] = {}  # when each was taken, by the number of the trial
        self._lock = threading.Lock()  # of _since and the writing of leases
        self._closed = threading.Event()
        self._renewer = threading.Thread(target=self._renew, daemon=True)
        self._renewer.start()

    def __contains__(self, number: int) -> bool:
        return number in self._since

    def claim(self, number: int, since: float) -> bool:
        """Take a trial; False where somebody was quicker."""
        # The lease is there before the trial is taken: who dies between the two is found all the same.
        if not self._storage.attach(number, self.name, self._terms(since)):
            return False
        if not self._storage.move(number, TrialState.RUNNING):
            self._storage.attach(number, self.name, None)
            return False
        with self._lock:
            self._since[number] = since
        return True

    def drop(self, number: int) -> None:
        """Renew the lease of a trial no more."""
        with self._lock:
            self._since.pop(number, None)

    def withdraw(self, number: int) -> None:
        """Take a lease out of the storage; an error where that is away, for which nothing waits."""
        self._storage.attach(number, self.name, None, patient=False)

    def close(self) -> None:
        """Renew no lease any more."""
        self._closed.set()
        self._renewer.join()

    def _terms(self, since: float) -> leases.Lease:
        return leases.write(self._worker, since, self._storage.now() + self._seconds)

    def _renew(self) -> None:
        while not self._closed.wait(self._seconds / 4):
            with self._lock:
                for number, since in self._since.items():
                    try:
                        self._storage.attach(number, self.name, self._terms(since), patient=False)
                    except UserError:
                        break  # the storage is away; the next time will do
