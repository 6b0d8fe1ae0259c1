"""Jobs in the background: each runs once, nobody waits in a queue, and the end of the program drops the rest."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tilewright.runtime import background
from tilewright.runtime.background import Job


def test_a_job_runs_once_however_many_ask():
    ran = []
    job = Job(lambda: ran.append(threading.current_thread().name) or len(ran)).start()
    found = []
    threads = [threading.Thread(target=lambda: found.append(job.result())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 8 and len(ran) == 1


def test_who_wants_a_result_that_nobody_has_begun_makes_it(monkeypatch):
    monkeypatch.setattr(background, "_enqueue", lambda function: pytest.fail("no thread is needed"))
    assert Job(threading.current_thread).result() is threading.current_thread()


def test_a_queue_of_long_jobs_holds_nobody_up():
    held = threading.Event()
    blocked = [Job(held.wait).start() for _ in range(background._MOST_THREADS + 2)]
    try:
        assert Job(threading.current_thread).start().result() is threading.current_thread()
    finally:
        held.set()
    assert all(job.result() for job in blocked)


def test_an_error_is_raised_where_the_result_is_wanted():
    job = Job(lambda: 1 / 0).start()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            job.result()


PROGRAM = """
import importlib.util, os, sys, threading, time
specification = importlib.util.spec_from_file_location("background", sys.argv[1])
background = importlib.util.module_from_spec(specification)
specification.loader.exec_module(background)
Job = background.Job
"""
SLEEPER = """
began = threading.Event()
def work():
    began.set()
    time.sleep(0.3)
    os.write(1, b"x")
"""


def run(body):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM + body, background.__file__]  # without torch
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_end_of_a_program_waits_for_what_has_begun_and_drops_the_rest():
    done = run(
        SLEEPER
        + """
for _ in range(100 * background._MOST_THREADS):
    Job(work).start()
began.wait()
"""
    )
    assert done.returncode == 0 and 1 <= len(done.stdout) <= background._MOST_THREADS, done


def test_a_forked_process_makes_what_a_thread_of_its_parent_was_at():
    done = run(
        """
began, held = threading.Event(), threading.Event()
def work():
    began.set()
    held.wait()
    return os.getpid()
job, waiting = Job(work).start(), Job(os.getpid)
began.wait()
if (child := os.fork()) == 0:
    held.set()
    ok = job.result() == os.getpid() == waiting.result() == Job(os.getpid).start().result()
    os._exit(not ok)
held.set()
assert job.result() == os.getpid()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert done.returncode == 0, done


def test_a_job_that_a_daemon_starts_is_finished_before_the_program_ends():
    """Autograd's threads are daemons to Python, and what they start would be, too."""
    done = run(
        SLEEPER
        + """
starter = threading.Thread(target=lambda: Job(work).start(), daemon=True)
starter.start()
began.wait()
"""
    )
    assert done.returncode == 0 and done.stdout == "x", done


def test_an_interrupt_is_no_result():
    """Who interrupts a compiler in a notebook may call it again."""
    calls = []

    def work():
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return 7

    job = Job(work)
    with pytest.raises(KeyboardInterrupt):
        job.result()
    assert job.result() == 7 == job.result() and len(calls) == 2
