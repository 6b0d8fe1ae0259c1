"""Trials are queued, taken and ended once each, whichever worker is killed, and whatever is found in the storage."""

import contextlib
import errno
import json
import os
import random
import resource
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from light import HEAD, point, record, start

from slowness import soon
from tilewright.errors import UserError
from tilewright.train.signals import Signals
from tilewright.tune.store import journal
from tilewright.tune.store import lease as leases
from tilewright.tune.store import storage as storages
from tilewright.tune.store.ledger import AGAIN, Ledger, StorageLost
from tilewright.tune.store.record import Measurement, Record

KILLS = 50


@pytest.fixture
def book(tmp_path):
    """Open a ledger; those that a test leaves open are closed after it."""
    opened = []

    def open_(folder=tmp_path / "here", resume=True, head=HEAD, name="study", **more):
        url = f"sqlite:///{tmp_path}/study.db"
        opened.append(Ledger.open(url, name, head, folder, resume=resume, **more))
        return opened[-1]

    yield open_
    for ledger in opened:
        ledger.close()


def keys(ledger):
    return Counter(json.dumps(record.point, sort_keys=True) for record in ledger.records())


def run_all(ledger):
    while claim := ledger.take():
        ledger.finish(claim, record(claim))


def rows(tmp_path, statement, *values):
    with sqlite3.connect(tmp_path / "study.db", timeout=60) as connection:
        return connection.execute(statement, values).fetchall()


# What a ledger is


def test_a_trial_waits_runs_and_ends(book):
    ledger = book(worker="me")
    assert ledger.take() is None
    assert ledger.propose([(point(1), "search"), (point(2), "ablation")]) == 2
    claim = ledger.take()
    assert (claim.point, claim.purpose) == (point(1), "search")
    (running,) = ledger.running()
    assert running["point"] == point(1) and running["worker"] == "me" and abs(running["since"] - time.time()) < 60
    assert ledger.records() == []
    ended = record(claim, log="last words\x00\ud800", worker="me")
    ledger.finish(claim, ended)
    assert ledger.records() == [ended] and ledger.running() == []
    assert ledger.take().point == point(2)
    assert ledger.take() is None


def test_a_point_is_queued_once_and_a_reference_as_often_as_wanted(book):
    ledger = book()
    assert ledger.propose([(point(1), "search"), (point(1), "ablation"), (point(1), "reference")]) == 2
    assert ledger.propose([(point(1), "search"), (point(1), "reference")]) == 1
    run_all(ledger)
    assert ledger.propose([({"compile": "none", "micro_batch": 1}, "search")]) == 0
    assert Counter(record.purpose for record in ledger.records()) == {"search": 1, "reference": 2}


def test_what_is_handed_back_is_taken_again(book):
    ledger, other = book(), book()
    ledger.propose([(point(1), "search")])
    claim = ledger.take()
    assert other.take() is None
    ledger.release(claim)
    again = other.take()
    assert (again.id, again.number) == (claim.id, claim.number)
    assert ledger.recover() == 0


@pytest.mark.parametrize(("outcome", "state"), [("done", "COMPLETE"), ("crashed", "FAIL"), ("does not fit", "PRUNED")])
def test_optunas_own_tools_show_the_study(book, tmp_path, outcome, state):
    import optuna

    ledger = book(levers={"micro_batch": [1, 2], "compile": ["none", "default"]})
    ledger.propose([(point(2), "search")])
    claim = ledger.take()
    ledger.finish(claim, record(claim, outcome, error="a reason"))
    (trial,) = optuna.load_study(study_name="study", storage=f"sqlite:///{tmp_path}/study.db").trials
    assert trial.params == point(2) and trial.state.name == state
    assert trial.value == (10_000.0 if outcome == "done" else None)
    assert trial.user_attrs["record"]["error"] == "a reason"


def test_records_come_in_the_order_in_which_they_began(book):
    import dataclasses

    ledger = book()
    ledger.propose([(point(n), "search") for n in range(3)])
    for began in (30.0, 10.0, 20.0):
        claim = ledger.take()
        ledger.finish(claim, dataclasses.replace(record(claim), began=began))
    assert [record.began for record in ledger.records()] == [10.0, 20.0, 30.0]


@pytest.mark.parametrize("seconds", [[], [0.0], [-1.0], [float("nan")], "fast", [[1.0]]])
def test_figures_that_make_no_sense_are_an_error(book, seconds):
    ledger = book()
    ledger.propose([(point(1), "search")])
    claim = ledger.take()
    measured = Measurement(1000, seconds, 1.0, 0.0, [2.0], 10)
    ledger.finish(claim, Record(claim.point, claim.purpose, "done", measurement=measured))
    (found,) = ledger.records()
    assert found.outcome == "error" and "no measurement" in found.error and ledger.take() is None


# Beginning and going on


def test_a_study_that_exists_is_gone_on_with_only_when_asked_to(book):
    first = book(resume=False)
    first.propose([(point(1), "search")])
    run_all(first)
    with pytest.raises(UserError, match="study exists; continue it with --resume, or choose another --study"):
        book(resume=False)
    assert keys(book()) == keys(first)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tilewright": "9"}, "made by Tilewright 0 and this is 9; choose another --study"),
        (
            {"space": "x"},
            "of another configuration or of other levers; give the arguments it was begun with, or choose another",
        ),
        ({"device": "cuda"}, "made with device None and this is cuda; choose"),
    ],
)
def test_a_study_with_another_head_is_refused(book, change, sentence):
    book()
    with pytest.raises(UserError, match=sentence):
        book(head={**HEAD, **change})


def test_a_study_of_something_else_is_refused(book, tmp_path):
    import optuna

    storage = f"sqlite:///{tmp_path}/study.db"
    optuna.create_study(study_name="study", storage=storage).enqueue_trial({"x": 1})
    with pytest.raises(UserError, match="not made by tilewright tune"):
        book()


def test_a_storage_that_cannot_be_is_refused_in_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "no database").write_text("hello" * 1000)
    cases = {
        "nonsense": "no URL that can be read",
        "postgresql://u:p@h:port/d": "no URL that can be read",
        "mysql://u:secret@h/d": "of a kind that does not keep studies",
        "sqlite://": "names no file",
        "sqlite:///:memory:": "names no file",
        f"sqlite:///{tmp_path}/no database": "not a database",
        f"sqlite:///{tmp_path}/no database/study.db": "Cannot write",
        "postgres://u:secret@127.0.0.1:1/d": "start its server or choose another --storage",
    }
    for url, sentence in cases.items():
        with pytest.raises(UserError, match=sentence) as caught:
            Ledger.open(url, "study", HEAD, tmp_path / "here", resume=True)
        assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UserError, match=r"pip install 'tilewright\[postgresql\]'"):
        Ledger.open("postgresql://u@127.0.0.1:1/d", "study", HEAD, tmp_path / "here", resume=True)
    assert not (tmp_path / "here").exists()  # no trace of a study that never began


def test_a_folder_that_cannot_be_written_is_refused_at_once(book, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write .*; choose another folder"):
        book(tmp_path / "file" / "folder")


# Who is gone


def test_a_lease_is_renewed_for_as_long_as_the_trial_runs(book):
    ledger, other = book(lease=4.0), book()  # so long that a busy machine renews it in time
    ledger.propose([(point(1), "search")])
    claim = ledger.take()
    time.sleep(4.6)
    assert other.recover() == 0
    ledger.finish(claim, record(claim))
    assert len(other.records()) == 1


def test_a_lease_that_ran_out_makes_the_trial_lost_and_its_point_waits_again(book):
    ledger, other = book(lease=0.5), book()
    ledger.propose([(point(1), "search")])
    late = ledger.take()
    ledger.close()  # alive, and renews nothing
    assert other.recover() == 0
    time.sleep(0.6)
    assert other.recover() == 1 and other.recover() == 0
    claim = other.take()
    assert claim.point == point(1) and claim.id != late.id and other.take() is None
    other.finish(claim, record(claim))
    assert len(other.records()) == 1 and other.running() == []


def test_who_was_taken_for_gone_and_finishes_is_heard_and_counts_once(book):
    ledger, other = book(lease=0.4), book()
    ledger.propose([(point(1), "search"), (point(1), "reference")])
    late = [ledger.take(), ledger.take()]
    ledger._held.close()
    time.sleep(0.6)
    assert other.recover() == 2
    running = other.take()  # the search once more, while the reference waits
    for claim in late:
        ledger.finish(claim, record(claim, worker="late"))
    assert other.take() is None  # what waited is known
    other.finish(running, record(running, worker="again"))
    assert Counter(record.purpose for record in other.records()) == {"search": 1, "reference": 1}
    assert other.recover() == 0 and other.take() is None


def test_what_is_lost_again_and_again_is_recorded_as_such(book):
    ledger = book()
    ledger.propose([(point(1), "search"), (point(1), "reference")])
    for _ in range(AGAIN + 1):
        lost = book(lease=0.05)
        assert lost.take() and lost.take()
        lost.close()
        time.sleep(0.1)
        assert ledger.records() == []
        assert ledger.recover() == 2
    assert ledger.take() is None
    assert [record.outcome for record in ledger.records()] == ["lost", "lost"]
    assert ledger.recover() == 0 and ledger.propose([(point(1), "search")]) == 0


def test_a_worker_that_died_between_its_lease_and_its_trial_is_found(book):
    ledger, other = book(), book()
    ledger.propose([(point(1), "search")])
    number = other._entries()[0].number
    gone = {**leases.write("gone", 0.0, time.time() + 1000), "started": "1"}  # another process of that number
    other._storage.attach(number, "lease x", gone)
    other._storage.move(number, storages.TrialState.RUNNING)
    assert ledger.recover() == 1 and ledger.take().point == point(1)


def test_a_worker_that_died_before_its_last_word_has_finished(book):
    ledger, other = book(), book()
    ledger.propose([(point(1), "search")])
    claim = ledger.take()
    ledger._storage.attach(claim.number, "record", record(claim).as_dict())
    ledger._storage.attach(claim.number, ledger._held.name, None)
    assert other.recover() == 1 and other.take() is None
    assert len(other.records()) == 1


def test_who_marked_a_trial_as_lost_and_died_is_made_up_for(book):
    ledger, other = book(), book()
    ledger.propose([(point(1), "search")])
    ledger._storage.move(ledger.take().number, storages.TrialState.FAIL)
    assert other.recover() == 0 and other.take().point == point(1)


def test_of_a_point_that_was_queued_twice_one_is_run(book):
    ledger, other = book(), book()
    for each in (ledger, other, ledger):  # as if none had seen the others
        each._queue("slot", point(1), "search")
    claim = ledger.take()
    assert other.take() is None
    ledger.finish(claim, record(claim))
    assert len(other.records()) == 1 and other.recover() == 0 and other.take() is None


def test_a_duplicate_does_not_stand_in_for_what_is_lost(book):
    ledger, other = book(lease=0.4), book()
    ledger._queue("slot", point(1), "search")
    ledger._queue("slot", point(1), "search")
    ledger.take()
    ledger.close()
    assert other.take() is None  # withdrawn
    time.sleep(0.5)
    assert other.recover() == 1 and other.take().point == point(1)


# The journal


def test_what_the_storage_does_not_have_is_merged(book):
    ledger = book()
    ledger.propose([(point(n), "search") for n in range(3)] + [(point(0), "reference")])
    claims = [ledger.take() for _ in range(3)]
    for claim in claims[:2]:  # written down, and killed before the storage was told
        line = {"study": "study", "head": HEAD, "id": claim.id, "number": claim.number, "slot": claim.slot}
        journal.append(ledger.journal, {**line, "record": record(claim).as_dict()})
    with open(ledger.journal, "ab") as file:
        file.write(b'{"study": "study", "torn')
    ledger.finish(claims[2], record(claims[2]))  # a line of its own after the torn one
    again = book()
    assert len(again.records()) == 3 and set(keys(again).values()) == {1}
    assert len(again.running()) == 0 and again.recover() == 0
    assert again.take().purpose == "reference"
    assert len(list(journal.read(ledger.journal))) == 3


def test_a_study_whose_storage_is_gone_is_made_again_from_the_journal(book, tmp_path):
    ledger = book()
    ledger.propose([(point(n), "search") for n in range(3)] + [(point(0), "reference")] * 2)
    run_all(ledger)
    before = ledger.records()
    ledger.close()
    for path in tmp_path.glob("study.db*"):
        path.unlink()
    with pytest.raises(UserError, match="exists; continue it with --resume"):
        book(resume=False)
    assert book().records() == before == book().records()


# What the storage may hold


@pytest.mark.filterwarnings("ignore:Trial . of")
def test_anything_in_the_storage_is_passed_over_with_a_warning(book, tmp_path):
    ledger = book()
    ledger.propose([(point(n), "search") for n in range(7)])
    run_all(ledger)
    ledger.propose([(point(7), "search")])
    ids = [row[0] for row in rows(tmp_path, "SELECT trial_id FROM trials ORDER BY number")]
    bad = ["not json", "[" * 100_000, json.dumps({"outcome": "done"}), json.dumps("cos\nsystem\n(S'touch x'\ntR.")]
    change = "UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = ? AND key = ?"
    for trial, value in zip(ids, bad, strict=False):
        rows(tmp_path, change, value, trial, "record")
    rows(tmp_path, change, json.dumps([{"__reduce__": "os.system"}]), ids[4], "point")
    rows(tmp_path, change.replace("?", "CAST(x'fffe' AS TEXT)", 1), ids[5], "record")
    again = book(folder=tmp_path / "elsewhere", patience=5.0)
    with pytest.warns(UserWarning, match="Trial [0-5] of (the )?study cannot be read and is left out"):
        assert [record.point for record in again.records()] == [point(6)]
    with pytest.warns(UserWarning):
        assert again.take().point == point(7)


def test_a_study_that_is_deleted_under_way_is_a_sentence(book, tmp_path):
    import optuna

    ledger = book()
    ledger.propose([(point(1), "search")])
    claim = ledger.take()
    optuna.delete_study(study_name="study", storage=f"sqlite:///{tmp_path}/study.db")
    with pytest.raises(StorageLost, match="no longer in .* saved in .*trials.jsonl.*--resume"):
        ledger.finish(claim, record(claim))
    assert len(book().records()) == 1


# Full disks


def test_a_full_disk_under_the_journal_loses_nothing(book):
    ledger = book()
    ledger.propose([(point(1), "search"), (point(2), "search")])
    run_one = ledger.take()
    ledger.finish(run_one, record(run_one))
    kept = ledger.journal.read_bytes()
    ledger.journal.unlink()
    ledger.journal.symlink_to("/dev/full")
    claim = ledger.take()
    with pytest.raises(UserError, match=f"{os.strerror(errno.ENOSPC)}; make room and go on with --resume"):
        ledger.finish(claim, record(claim))
    ledger.journal.unlink()
    ledger.journal.write_bytes(kept)
    assert len(book().records()) == 2  # the storage had room


def test_a_full_disk_under_sqlite_is_a_sentence(book):
    ledger = book(patience=30.0)
    ledger.propose([(point(1), "search"), (point(2), "search")])
    claim = ledger.take()
    ledger.finish(claim, record(claim))
    claim = ledger.take()
    engine = ledger._storage._database.engine
    with engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()

    def fill(connection, _):
        connection.execute(f"PRAGMA max_page_count={pages}")

    storages.sqlalchemy.event.listen(engine, "connect", fill)
    engine.dispose()
    began = time.monotonic()
    with pytest.raises(UserError, match="The disk of sqlite.* is full; make room and go on with --resume"):
        ledger.finish(claim, record(claim, log="x" * 100_000))
    assert soon(10, began)  # waiting makes no room
    assert len(book().records()) == 2  # the journal had room


def test_no_room_at_all_ends_a_worker_with_a_sentence_and_loses_nothing_that_was_finished(book, tmp_path):
    ledger = book()
    ledger.propose([(point(n), "search") for n in range(60)])
    ledger.close()  # which folds the log of changes into the file
    limit = (tmp_path / "study.db").stat().st_size + 100_000

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    worker = start(f"sqlite:///{tmp_path}/study.db", "study", tmp_path / "here", patience=1.0, preexec_fn=little_room)
    said, errors = worker.communicate(timeout=60)
    assert worker.returncode == 2 and "Traceback" not in errors and "--resume" in errors, errors
    done = said.count("done")
    assert done > 5
    again = book()
    again.recover()
    assert len(again.records()) >= done and set(keys(again).values()) == {1}
    run_all(again)
    assert len(again.records()) == 60


# Many workers, and workers that are killed


def test_a_storage_that_is_locked_for_good_is_a_sentence(book, tmp_path, monkeypatch):
    monkeypatch.setattr(storages, "_BUSY", 0.2)
    ledger = book(patience=0.5)
    ledger.propose([(point(1), "search")])
    claim = ledger.take()
    other = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageLost, match=r"out of reach for 0.5 s \(database is locked\); .*trials.jsonl.*--resume"):
        ledger.finish(claim, record(claim))
    ledger.release(claim)  # gives up at once, and says nothing
    other.close()
    assert len(book().records()) == 1


def test_threads_of_one_ledger_take_no_trial_twice(book):
    ledger = book()
    ledger.propose([(point(n), "search") for n in range(24)])
    taken, lock = [], threading.Lock()

    def take():
        while (claim := ledger.take()) is not None:
            with lock:
                taken.append(claim.number)
            ledger.finish(claim, record(claim))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(24)) and len(ledger.records()) == 24


def test_32_workers_on_one_file(tmp_path, book):
    # They begin before there is a file, race for its tables, and all want one point beside their own.
    workers = start(f"sqlite:///{tmp_path}/study.db", "study", tmp_path / "here", mode=32, patience=60.0)
    said, errors = workers.communicate(timeout=200)
    assert workers.returncode == 0 and errors == "" and said.count("ready") == 32
    took = Counter(line for line in said.splitlines() if line.startswith("took"))
    assert len(took) == 65 and set(took.values()) == {1}
    ledger = book()
    assert len(ledger.records()) == 65 and set(keys(ledger).values()) == {1}
    assert ledger.running() == [] and ledger.recover() == 0 and ledger.take() is None


def test_50_kills_lose_and_double_nothing(tmp_path, book):
    chance, said = random.Random(17), []
    ledger = book()
    with start(f"sqlite:///{tmp_path}/study.db", "study", tmp_path / "here", seconds=0.02, mode="nursery") as nursery:
        for _ in range(KILLS):
            # More than can be done in a life: nobody is to end for want of work.
            first = len(ledger.records())
            ledger.propose([(point(n), "search") for n in range(first, first + 30)])
            nursery.stdin.write("\n")
            nursery.stdin.flush()
            _, pid = nursery.stdout.readline().split()
            if chance.random() < 0.7:  # or while it opens the study
                said.append(nursery.stdout.readline())
                assert said[-1] == "ready\n"
                while chance.random() < 0.7 and not said[-1].startswith("done"):  # on a machine that is slow, too
                    said.append(nursery.stdout.readline())
            time.sleep(chance.uniform(0.0, 0.3))
            os.kill(int(pid), signal.SIGKILL)
            while (line := nursery.stdout.readline()) != "dead\n":
                said.append(line)
        nursery.stdin.close()
        assert nursery.wait(30) == 0 and nursery.stderr.read() == ""
    ledger.recover()
    assert ledger.running() == [] and ledger.recover() == 0
    took, done = ([int(line.split()[1]) for line in said if line.startswith(word)] for word in ("took", "done"))
    assert len(done) > KILLS / 5 and len(took) - len(done) > KILLS / 20  # or nothing was put to the test
    records = {entry.number: entry.record for entry in ledger._entries()}
    assert len(set(done)) == len(done) and all(records[number] is not None for number in done)
    assert len(ledger.records()) >= len(done) and set(keys(ledger).values()) == {1}
    queued = {entry.slot for entry in ledger._entries()}
    run_all(ledger)
    assert len(ledger.records()) == len(queued) and set(keys(ledger).values()) == {1} and ledger.running() == []


def test_ctrl_c_in_the_middle_of_a_call_leaves_no_lock_behind(tmp_path):
    """Which this very study would wait for, a minute each time."""
    storage = storages.Storage(storages.in_folder(tmp_path), "s", 5.0, tmp_path / "saved")
    chance = random.Random(0)
    before = signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
    try:
        for number in range(30):
            with Signals(at_once=True) as signals, pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.02))
                while not signals.came:  # an interrupt that Python drops is noted all the same
                    storage.note("a", number)
                    storage.notes()
                raise KeyboardInterrupt
            began = time.monotonic()
            storage.note("b", number)
            assert soon(3.0, began) and storage.notes()["b"] == number
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        storage.close()


def test_a_clock_that_is_set_ends_no_lease(book, monkeypatch):
    ledger, other = book(), book()
    ledger.propose([(point(0), "search")])
    assert ledger.take() is not None
    real = time.time
    for jump in (5000.0, -5000.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        monkeypatch.setattr(leases, "_gone", lambda lease: False)
        assert other.recover() == 0 and len(other.running()) == 1


def test_to_look_makes_nothing_in_a_file_of_somebody_else(tmp_path):
    path = tmp_path / "places.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE studies (patient text)")
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(UserError, match="There is no study nightly in sqlite"):
        Ledger.read(f"sqlite:///{path}", "nightly")
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["places.sqlite"]
