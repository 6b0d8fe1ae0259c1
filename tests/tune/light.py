"""A worker whose trials do nothing but sleep: what the tests of the ledger run in processes of their own.

A script: `light.py MODE STORAGE NAME FOLDER SECONDS LEASE PATIENCE`. A worker takes and finishes trials until none
waits, says "ready", "took NUMBER" and "done NUMBER" as it goes, and ends with code 2 and one sentence where a user
would. MODE is how many are to work at once: one begins when it is sent a line, of many each queues some trials first.
Or it is `nursery`: then each line forks one.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tilewright.errors import UserError
from tilewright.tune.store.ledger import Ledger
from tilewright.tune.store.record import Measurement, Record

HEAD = {"schema": 1, "tilewright": "0", "space": "00"}


def point(number):
    return {"micro_batch": number, "compile": "none"}


def record(claim, outcome="done", seconds=0.1, **more):
    measured = Measurement(1000, [seconds] * 5, 1.0, 0.0, [2.0], 10) if outcome == "done" else None
    now = time.time()
    return Record(claim.point, claim.purpose, outcome, measurement=measured, began=now, ended=now, **more)


def start(storage, name, folder, seconds=0.0, lease=60.0, patience=30.0, mode=1, **more):
    """Workers in processes of their own."""
    arguments = [str(value) for value in (mode, storage, name, folder, seconds, lease, patience)]
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
    )  # fmt: skip


def wanted(index):
    """What one of many workers queues: two points of its own and one that all want."""
    return [(point(number), "search") for number in (0, 2 * index + 1, 2 * index + 2)]


def say(text):
    os.write(1, f"{text}\n".encode())  # at once, and whole


def work(storage, name, folder, seconds, lease, patience, wanted=(), wait=False):
    ledger = Ledger.open(storage, name, HEAD, Path(folder), resume=True, lease=float(lease), patience=float(patience))
    ledger.recover()
    ledger.propose(wanted)
    say("ready")
    if wait:
        sys.stdin.readline()
    while (claim := ledger.take()) is not None:
        say(f"took {claim.number}")
        time.sleep(float(seconds))
        ledger.finish(claim, record(claim))
        say(f"done {claim.number}")
    ledger.close()


def end(arguments, *more):
    """Work as a command does: the code to exit with."""
    try:
        work(*arguments, *more)
    except UserError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    return 0


def fork(arguments, wanted=()):
    child = os.fork()
    if child == 0:
        sys.exit(end(arguments, wanted))
    return child


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode != "1":  # what a first time imports and prepares is done before the fork
        with tempfile.TemporaryDirectory() as scratch:
            Ledger.open(f"sqlite:///{scratch}/study.db", "study", HEAD, Path(scratch), resume=False).close()
    if mode == "nursery":
        for _ in sys.stdin:
            child = fork(arguments)
            say(f"pid {child}")
            os.waitpid(child, 0)
            say("dead")
    elif mode == "1":
        sys.exit(end(arguments, (), True))
    else:
        children = [fork(arguments, wanted(index)) for index in range(int(mode))]
        sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
