"""The book of a study: which trials wait, who runs which, and what came of them, shared by any number of workers.

It is an Optuna study, so `optuna-dashboard` shows it, but it is used trial by trial. A trial waits, is taken by one
worker, and ends with a `Record`. Who takes one holds it by a lease that is renewed for as long as the process lives; a
lease that has run out, or whose process is seen to be gone, makes the trial lost, and its point is queued again.

What must not happen twice has a slot: the key of its point, with a number where it is run once more to be sure; or for
a reference, which is run again and again, a name of its own. Nothing is locked to keep slots unique. Two workers may
queue the same point at once, and a worker that was taken for dead may still finish: so the one that takes a trial
withdraws if its slot has an earlier one, and of the records of a slot the first counts.

A record is first written to a journal, a file of this machine, then told to the storage. What the storage does not
have, because it was away or the process died in between, is merged when the study is opened again.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from tilewright.errors import UserError
from tilewright.measure.checked import Point
from tilewright.tune.store import journal
from tilewright.tune.store import lease as leases
from tilewright.tune.store.entry import Entry, comes_before, ending_of, entry_of, records_of
from tilewright.tune.store.held import Held
from tilewright.tune.store.record import CONFIRMATION, Record, key
from tilewright.tune.store.storage import Storage, StorageLost

__all__ = ["Claim", "Ledger", "StorageLost"]
AGAIN = 3  # times that a lost trial is queued again


@dataclass(frozen=True)
class Claim:
    """A trial that is this worker's to run."""

    id: str
    number: int
    point: Point
    purpose: str
    slot: str


class Ledger:
    """A study's trials, as one worker sees them. `Ledger.open` makes it."""

    def __init__(
        self, storage: Storage, head: Mapping[str, Any], folder: Path, worker: str, lease: float,
        levers: Mapping[str, Sequence[Any]],
    ) -> None:  # fmt: skip
        self.worker, self.journal = worker, folder / "trials.jsonl"
        self._storage, self._head = storage, dict(head)
        self._distributions = {name: CategoricalDistribution(tuple(values)) for name, values in levers.items()}
        self._ended: dict[int, Entry | None] = {}  # what cannot change any more
        self._held = Held(storage, worker, lease)

    @classmethod
    def open(
        cls, storage: str, name: str, head: Mapping[str, Any], folder: Path, *, resume: bool,
        worker: str | None = None, lease: float = 60.0, patience: float = 60.0,
        levers: Mapping[str, Sequence[Any]] | None = None,
    ) -> Ledger:  # fmt: skip
        """Begin a study, or go on with it.

        Args:
            storage: URL of a database: `sqlite:///FILE`, or `postgresql://...` for several machines.
            name: of the study.
            head: what a study must be equal in to be gone on with: versions, and the digest of what is searched.
            folder: of the journal `trials.jsonl`, on this machine.
            resume: whether the study may exist already.
            worker: how this worker is called; by default by its machine and process.
            lease: seconds after which a worker that is not heard of is taken for gone.
            patience: seconds for which a storage that is away is waited for.
            levers: the values each lever may take, so that Optuna's own tools show points as parameters.
        """
        path = folder / "trials.jsonl"
        saved = [line for line in journal.read(path) if line.get("study") == name] if path.exists() else []
        exists = UserError(f"The study {name} exists; continue it with --resume, or choose another --study.")
        if saved and not resume:
            raise exists
        found = Storage(storage, name, patience, path)
        try:
            if not found.created and not resume:
                raise exists
            found.settle(head)
            _touch(path)
            worker = worker or f"{socket.gethostname()}:{os.getpid()}"
            ledger = cls(found, head, folder, worker, lease, levers or {})
        except BaseException:
            found.close()
            raise
        try:
            ledger._merge(saved)
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def read(cls, storage: str, name: str) -> tuple[dict[str, Any], list[Record]]:
        """What was noted of a study that exists, and its records; nothing of it is changed."""
        found = Storage(storage, name, 10.0, Path(), exists=True)
        try:
            entries = [entry for trial in found.trials() if (entry := entry_of(trial)) is not None]
            return found.notes(), records_of(entries)
        finally:
            found.close()

    def propose(self, wanted: Iterable[tuple[Point, str]]) -> int:
        """Queue points nobody has queued, run or finished, each with its purpose; the number of those."""
        entries = self._entries()
        slots, queued = {entry.slot for entry in entries}, 0
        for point, purpose in wanted:
            slot = uuid.uuid4().hex if purpose == "reference" else key(point)
            if purpose == CONFIRMATION:
                slot += f" {sum(e.slot.startswith(slot) and e.record is not None for e in entries)}"
            if slot not in slots:
                slots.add(slot)
                self._queue(slot, point, purpose)
                queued += 1
        return queued

    def take(self, purpose: str = "", fits: Callable[[Point], bool] = lambda point: True) -> Claim | None:
        """The next that waits, for this worker to run, one of a purpose first; None where none does.

        Args:
            purpose: of those to prefer.
            fits: whether there is time for a point; one without goes on waiting.
        """
        while True:
            entries, now = self._entries(), self._storage.now()
            waiting = [entry for entry in entries if entry.state == TrialState.WAITING and fits(entry.point)]
            if not waiting:
                return None
            # What somebody is about to take comes last.
            waiting.sort(
                key=lambda entry: (any(leases.holds(one, now) for one in entry.leases), entry.purpose != purpose)
            )
            entry = waiting[0]
            if not self._held.claim(entry.number, now):
                continue
            if not any(comes_before(other, entry) for other in entries):
                return Claim(entry.id, entry.number, entry.point, entry.purpose, entry.slot)
            self._storage.attach(entry.number, "outcome", "duplicate")
            self._storage.move(entry.number, TrialState.PRUNED)
            self._held.drop(entry.number)

    def finish(self, claim: Claim, record: Record) -> None:
        """Write down what came of a trial; one whose figures make no sense is an error."""
        if journal.parse(record.as_dict()) is None:
            sentence = "what it reported is no measurement."
            record = Record(claim.point, claim.purpose, "error", error=sentence, began=time.time(), ended=time.time())
        head = {"study": self._storage.name, "head": self._head}
        line = {**head, "id": claim.id, "number": claim.number, "slot": claim.slot, "record": record.as_dict()}
        full: OSError | None = None
        try:
            try:
                journal.append(self.journal, line)
            except OSError as error:
                full = error  # the storage may be elsewhere, and have room
            self._tell(claim.number, claim.id, claim.slot, record)
        finally:
            self._held.drop(claim.number)
        if full is not None:
            raise UserError(
                f"Cannot write {self.journal}: {full.strerror}; make room and go on with --resume: nothing that was "
                "finished is lost."
            ) from full

    def release(self, claim: Claim) -> None:
        """Hand a trial back unfinished. Where the storage is away its lease runs out instead."""
        self._held.drop(claim.number)
        try:
            self._held.withdraw(claim.number)
            self._storage.move(claim.number, TrialState.WAITING, patient=False)
        except UserError:
            pass

    def records(self) -> list[Record]:
        """What came of everything that ended, each once, in the order in which they began."""
        return records_of(self._entries())

    def running(self) -> list[dict[str, Any]]:
        """What runs: point, purpose, worker, and since when."""
        found = []
        for entry in self._entries():
            if entry.state == TrialState.RUNNING:
                lease = max(entry.leases, key=lambda lease: lease["until"], default={})
                found.append(
                    {
                        "point": entry.point, "purpose": entry.purpose, "worker": lease.get("worker", ""),
                        "since": lease.get("since", 0.0),
                    }
                )  # fmt: skip
        return found

    def recover(self) -> int:
        """End what nobody runs any more and queue it again; the number of trials that were found so."""
        count, now = 0, self._storage.now()
        for entry in self._entries():
            if entry.state != TrialState.RUNNING or entry.number in self._held:
                continue
            if any(leases.holds(lease, now) for lease in entry.leases):
                continue
            if entry.record is not None:  # its worker died before the last word
                count += self._storage.move(entry.number, *ending_of(entry.record))
            else:
                count += self._storage.move(entry.number, TrialState.FAIL)
        self._queue_lost()
        return count

    def note(self, name: str, value: Any) -> None:
        """Keep something with the study that is no trial."""
        self._storage.note(name, value)

    def noted(self, name: str) -> Any:
        """What was kept so, or None."""
        return self._storage.notes().get(name)

    def close(self) -> None:
        """Renew no lease any more and close the storage."""
        self._held.close()
        self._storage.close()

    # Entries

    def _entries(self) -> list[Entry]:
        found = []
        for trial in self._storage.trials():
            if trial.number not in self._ended:
                entry = entry_of(trial)
                if trial.state.is_finished():
                    self._ended[trial.number] = entry
            else:
                entry = self._ended[trial.number]
            if entry is not None:
                found.append(entry)
        return found

    def _queue(self, slot: str, point: Point, purpose: str) -> None:
        self._add(TrialState.WAITING, None, uuid.uuid4().hex, slot, point, purpose)

    def _queue_lost(self) -> None:
        """Queue each slot again of which nothing is left but what was lost; after a few times, leave it at that.

        It goes by what the storage has, so it does not matter who marked a trial as lost and died before this.
        """
        slots = defaultdict(list)
        for entry in self._entries():
            slots[entry.slot].append(entry)
        for slot, entries in slots.items():
            lost = [entry for entry in entries if entry.lost]
            if not lost or any(entry.open or entry.record for entry in entries):
                continue
            first = lost[0]
            if len(lost) <= AGAIN:
                self._queue(slot, first.point, first.purpose)
            else:
                error = f"its worker was gone before its end, {len(lost)} times."
                record = Record(first.point, first.purpose, "lost", error=error, began=time.time(), ended=time.time())
                self._add_record(uuid.uuid4().hex, slot, record)

    def _add_record(self, id: str, slot: str, record: Record) -> None:
        state, value = ending_of(record)
        self._add(state, value, id, slot, record.point, record.purpose, record=record.as_dict())

    def _add(
        self, state: TrialState, value: float | None, id: str, slot: str, point: Point, purpose: str, **more: Any
    ) -> None:
        shown = {n: d for n, d in self._distributions.items() if n in point and point[n] in d.choices}
        attributes = {"id": id, "slot": slot, "purpose": purpose, "point": point, **more}
        trial = create_trial(
            state=state, value=value, params={name: point[name] for name in shown}, distributions=dict(shown),
            user_attrs=attributes,
        )  # fmt: skip
        self._storage.add(trial)

    def _tell(self, number: int, id: str, slot: str, record: Record) -> None:
        if self._storage.attach(number, "record", record.as_dict()) and self._storage.move(number, *ending_of(record)):
            return
        # It has ended already: somebody has merged the journal, or has taken this worker for gone.
        if not any(entry.slot == slot and entry.record for entry in self._entries()):
            self._add_record(id, slot, record)

    def _merge(self, lines: Iterable[Mapping[str, Any]]) -> int:
        """Add records of a journal that are of this study, and not in it."""
        count, entries = 0, self._entries()
        done = {entry.slot for entry in entries if entry.record is not None and not entry.open}
        waiting = {entry.id: entry.number for entry in entries if entry.open}
        for line in lines:
            record, id, slot = journal.parse(line.get("record")), line.get("id"), line.get("slot")
            if line.get("head") != self._head:
                continue
            if record is None or not isinstance(id, str) or not isinstance(slot, str):
                warnings.warn("A line of the journal cannot be read and is left out.", stacklevel=3)
                continue
            if slot in done:
                continue
            done.add(slot)
            count += 1
            if id in waiting:
                self._tell(waiting[id], id, slot, record)
            else:
                self._add_record(id, slot, record)
        return count


def _touch(path: Path) -> None:
    """Check that a file can be written, before the work rather than after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab"):
            pass
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}; choose another folder.") from error
