"""Several workers on one study in the real PostgreSQL: half the time, no trial twice, none lost, whatever goes down."""

import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from light import HEAD, point, record, start
from postgres import server  # noqa: F401

from tilewright.errors import UserError
from tilewright.tune.store.ledger import Ledger, StorageLost
from tilewright.tune.store.storage import reach

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def book(server, tmp_path, request):  # noqa: F811
    """Open the study of this test; those that it leaves open are closed after it."""
    opened = []

    def open_(folder="here", **more):
        opened.append(Ledger.open(server.url, request.node.name, HEAD, tmp_path / folder, resume=True, **more))
        return opened[-1]

    yield open_
    for ledger in opened:
        ledger.close()


@pytest.fixture
def worker(server, tmp_path, request):  # noqa: F811
    """Start a worker in a process of its own, with its own folder as on another machine, and wait till it is up."""
    started = []

    def start_(**more):
        process = start(server.url, request.node.name, tmp_path / f"worker {len(started)}", **more)
        started.append(process)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        return process

    yield start_
    for process in started:
        process.kill()
        process.wait()


def go(*processes):
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


def said(process, code=0):
    """What a worker said to its end, the trials it took and those it finished."""
    out, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    if code == 0:
        assert errors == ""
    return [[int(line.split()[1]) for line in out.splitlines() if line.startswith(w)] for w in ("took", "done")]


def each_once(ledger, count):
    points = Counter(record.point["micro_batch"] for record in ledger.records())
    assert points == dict.fromkeys(range(count), 1)
    ledger.recover()
    assert ledger.running() == [] and ledger.take() is None


def test_two_workers_take_at_most_six_tenths_of_the_time_of_one(book, worker):
    ledger, queued, ratios = book(), 0, []
    while not ratios or (min(ratios) > 0.6 and len(ratios) < 3):  # others on these cores may be in the way
        seconds = {}
        for workers in (1, 2):
            ledger.propose([(point(n), "search") for n in range(queued, queued + 12)])
            queued += 12
            processes = [worker(seconds=0.6) for _ in range(workers)]
            began = time.time()
            go(*processes)
            took = [number for process in processes for number in said(process)[0]]
            assert len(took) == len(set(took)) == 12
            seconds[workers] = max(record.ended for record in ledger.records()) - began
        ratios.append(seconds[2] / seconds[1])
    assert min(ratios) <= 0.6
    each_once(ledger, queued)


def test_nothing_is_lost_or_doubled_when_a_worker_is_killed(book, worker):
    ledger = book()
    ledger.propose([(point(n), "search") for n in range(12)])
    killed, other = worker(seconds=0.3), worker(seconds=0.3)
    go(killed, other)
    assert killed.stdout.readline().startswith("took")
    time.sleep(0.1)
    killed.send_signal(signal.SIGKILL)
    said(killed, code=-signal.SIGKILL)
    took, done = said(other)
    assert took == done
    assert ledger.recover() == 1
    assert said(worker())[1] == [12]
    each_once(ledger, 12)


def test_a_restart_in_the_middle_is_waited_for(server, book, worker):  # noqa: F811
    ledger = book()
    ledger.propose([(point(n), "search") for n in range(16)])
    workers = [worker(seconds=0.2), worker(seconds=0.2)]
    go(*workers)
    for _ in range(2):
        time.sleep(0.5)
        server.stop()
        time.sleep(0.5)
        server.start()
    both = [said(process) for process in workers]
    done = [number for _, finished in both for number in finished]
    assert all(took == finished for took, finished in both) and len(set(done)) == len(done)
    # A trial whose taking was committed and never confirmed is nobody's: it waits again.
    ledger.recover()
    while claim := ledger.take():
        ledger.finish(claim, record(claim))
    each_once(ledger, 16)


def test_a_storage_that_stays_away_is_a_sentence_and_what_was_done_is_merged(server, book, worker):  # noqa: F811
    ledger = book(patience=1.0)
    ledger.propose([(point(n), "search") for n in range(6)])
    claim, other = ledger.take(), worker(seconds=0.5, patience=1.0)
    go(other)
    assert other.stdout.readline().startswith("took")
    server.stop()
    try:
        with pytest.raises(
            StorageLost, match=r"out of reach for 1 s .*saved in .*trials.jsonl, and is merged .*--resume"
        ):
            ledger.finish(claim, record(claim))
        out, errors = other.communicate(timeout=60)
        assert other.returncode == 2 and out == "" and "Traceback" not in errors
        assert len(errors.splitlines()) == 1 and "--resume" in errors
        with pytest.raises(UserError, match="Cannot open the storage .*; start its server or choose another --storage"):
            book()
    finally:
        server.start()
    assert len(book("elsewhere").records()) == 0
    again = book("worker 0")
    assert len(again.records()) == 1
    again = book()
    assert len(again.records()) == 2
    again.recover()
    while claim := again.take():
        again.finish(claim, record(claim))
    each_once(again, 6)


@pytest.fixture
def fresh(server):  # noqa: F811
    """The URL of a database without tables."""
    import psycopg

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS fresh WITH (FORCE)")
        connection.execute("CREATE DATABASE fresh")
    return server.url.replace("/postgres", "/fresh")


def tables(url):
    import psycopg

    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    return {name for (name,) in found}


def test_workers_that_begin_at_once_make_one_study(fresh, tmp_path, request):
    workers = start(fresh, request.node.name, tmp_path / "here", mode=6)
    took, done = said(workers)
    assert sorted(took) == sorted(done) and len(done) == 13


def test_nobody_who_looks_first_is_refused_while_others_make_the_tables(fresh, tmp_path):
    """As `tune` begins: it sees whether the storage can be reached, and opens it later; here without a second try."""
    errors, barrier = [], threading.Barrier(6)

    def begin(number):
        try:
            barrier.wait()
            reach(fresh, "--storage")
            ledger = Ledger.open(fresh, "study", HEAD, tmp_path / str(number), resume=True, patience=0.0)
            ledger.close()
        except UserError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=begin, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_to_look_makes_nothing_in_a_database_of_somebody_else(fresh):
    import psycopg

    with psycopg.connect(fresh) as connection:
        connection.execute("CREATE TABLE studies (patient text)")  # of another kind
    reach(fresh, "--storage")
    with pytest.raises(UserError, match="There is no study nightly in postgresql"):
        Ledger.read(fresh, "nightly")
    assert tables(fresh) == {"studies"}


def test_a_password_comes_from_the_url_the_environment_or_a_file_and_is_never_shown(
    server, tmp_path, monkeypatch  # noqa: F811
):  # fmt: skip
    import psycopg

    rules = server.data / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"host all locked 127.0.0.1/32 scram-sha-256\n{before}")
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE locked LOGIN PASSWORD 'tops3cret'")
        connection.execute("CREATE DATABASE locked OWNER locked")  # the tables of other tests are not his to read
        connection.execute("SELECT pg_reload_conf()")
    try:
        where = f"127.0.0.1:{server.port}/locked"
        file = tmp_path / "pgpass"
        file.write_text(f"127.0.0.1:{server.port}:*:locked:tops3cret\n")
        file.chmod(0o600)
        for url in (f"postgresql://locked:tops3cret@{where}", f"postgresql://locked@{where}?password=tops3cret"):
            reach(url, "--storage")
        for name, value in (("PGPASSWORD", "tops3cret"), ("PGPASSFILE", str(file))):
            with monkeypatch.context() as patched:
                patched.setenv(name, value)
                reach(f"postgresql://locked@{where}", "--storage")
        for url in (f"postgresql://locked:wr0ng@{where}", f"postgresql://locked@{where}?password=wr0ng"):
            with pytest.raises(UserError, match="Cannot open the storage") as refused:
                reach(url, "--storage")
            assert "wr0ng" not in str(refused.value) and "***" in str(refused.value)
            with pytest.raises(UserError, match="There is no study x") as refused:
                Ledger.read(url.replace("wr0ng", "tops3cret"), "x")
            assert "tops3cret" not in str(refused.value)
    finally:
        rules.write_text(before)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("SELECT pg_reload_conf()")


def test_threads_queue_and_take_each_point_once(book):
    ledgers, taken = [book() for _ in range(4)], []

    def run(ledger):
        ledger.propose([(point(n), "search") for n in range(10)])
        while claim := ledger.take():
            taken.append(claim.point["micro_batch"])
            ledger.finish(claim, record(claim))

    threads = [threading.Thread(target=run, args=(ledger,)) for ledger in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(10))
    each_once(ledgers[0], 10)


def test_clocks_of_machines_need_not_agree(book, monkeypatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 5000.0)
    ahead = book("ahead")
    monkeypatch.undo()
    ledger = book()
    ledger.propose([(point(0), "search")])
    ledger.take()
    monkeypatch.setattr(time, "time", lambda: real() + 5000.0)
    assert ahead.recover() == 0
