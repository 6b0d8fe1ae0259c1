import itertools
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slowness import soon
from tilewright.errors import UserError
from tilewright.measure.corpus import corpus
from tilewright.train import data as data_module
from tilewright.train.data import Batches, first_samples, open_batches, permute, window_of
from tilewright.train.schema import Data
from tilewright.train.tokens import write_tokens

CPU = torch.device("cpu")


def opened(data, **changes):
    fields = dict(sequence=8, vocabulary=256, micro_batch=2, accumulation=1, device=CPU)
    return open_batches(data, **{**fields, **changes})


def take(data, count, **changes):
    batches = opened(data, **changes)
    try:
        return [batches.next() for _ in range(count)]
    finally:
        batches.close()


def order(size, seed=0, epoch=0):
    return permute(np.arange(size, dtype=np.uint64), size, seed, epoch).tolist()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


# --- order


@given(size=st.integers(1, 3000) | st.sampled_from([1023, 1024, 1025]), seed=st.integers(), epoch=st.integers(0))
@settings(max_examples=100, deadline=None)
def test_the_order_is_a_permutation(size, seed, epoch):
    assert sorted(order(size, seed, epoch)) == list(range(size))


@given(seed=st.integers(0, 2**40), epoch=st.integers(0, 2**40), size=st.integers(100, 2000))
@settings(max_examples=50, deadline=None)
def test_two_seeds_and_two_epochs_differ(seed, epoch, size):
    orders = [order(size, *key) for key in ((seed, epoch), (seed, epoch + 1), (seed + 1, epoch))]
    for one, other in itertools.combinations(orders, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < size / 10


def test_every_window_is_as_likely_at_every_place():
    size, trials = 5, 4000
    counts = np.zeros((size, size))
    for seed in range(trials):
        counts[np.arange(size), order(size, seed)] += 1
    expected = trials / size
    assert ((counts - expected) ** 2 / expected).sum() < 50  # chi squared, 16 degrees of freedom: one in 40,000


def test_a_large_order_takes_no_table_and_does_not_repeat():
    size = 10**12
    found = permute(np.arange(size - 10000, size, dtype=np.uint64), size, 0, 3)
    assert len(np.unique(found)) == 10000 and found.max() < size and abs(found.mean() / size - 0.5) < 0.02


@given(
    windows=st.integers(1, 300), micro=st.integers(1, 4), accumulation=st.integers(1, 4), ranks=st.integers(1, 4),
    start=st.integers(0, 1000), steps=st.integers(1, 4), more=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_ranks_and_micro_batches_share_out_exactly_the_samples_of_a_step(
    windows, micro, accumulation, ranks, start, steps, more
):
    batch = micro * accumulation * ranks
    stop = start + steps * batch + min(more, batch - 1)  # what is left of a step is not taken
    taken = {rank: list(first_samples(micro, accumulation, rank, ranks, start, stop)) for rank in range(ranks)}
    for step in range(steps):
        mine = slice(step * accumulation, (step + 1) * accumulation)
        samples = [first + i for rank in range(ranks) for first in taken[rank][mine] for i in range(micro)]
        assert sorted(samples) == list(range(start + step * batch, start + (step + 1) * batch))
    assert all(len(firsts) == steps * accumulation for firsts in taken.values())
    whole = range(windows * 2)
    assert sorted(window_of(n, windows, 0, True) for n in whole) == sorted(n // 2 for n in whole)


def test_order_goes_on_over_blocks_and_epochs(monkeypatch):
    monkeypatch.setattr(data_module, "_BLOCK", 7)
    data_module._block.cache_clear()
    found = [window_of(n, 40, 5, True) for n in range(80)]
    data_module._block.cache_clear()
    assert found == order(40, 5, 0) + order(40, 5, 1)


# --- packing


def test_every_token_but_the_first_is_a_target_once(tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.arange(1, 42)], 50)  # 41 tokens are 5 windows of 8 + 1
    for shuffle in (False, True):
        data = Data(kind="tokens", paths=[str(path)], shuffle=shuffle, workers=0)
        rows = torch.cat(take(data, 5, micro_batch=1))
        assert rows.dtype == torch.int64 and rows.shape == (5, 9)
        assert sorted(rows[:, 1:].flatten().tolist()) == list(range(2, 42))
        assert (rows[:, 1:] == rows[:, :-1] + 1).all()
        assert (rows[0, 0] == 1) == (not shuffle) or shuffle


def test_without_paths_it_is_the_standard_library():
    first = take(Data(shuffle=False, workers=0), 1, micro_batch=1, sequence=999)[0]
    assert bytes(first[0].tolist()) == corpus(1000)


def test_text_of_several_files_is_one_stream(tmp_path):
    for name, text in (("a", "one "), ("b", ""), ("c", "two "), ("d", "three")):
        (tmp_path / name).write_text(text)
    rows = take(Data(paths=[str(tmp_path)], shuffle=False, workers=0), 1, micro_batch=1, sequence=12)[0]
    assert bytes(rows[0].tolist()) == b"one two three"


@pytest.mark.parametrize("kind", ["text", "tokens", "synthetic"])
def test_a_run_that_resumes_sees_what_it_would_have_seen(tmp_path, kind):
    write_tokens(tmp_path / "a.tokens", [np.random.default_rng(0).integers(0, 256, 1000)], 256)
    data = Data(kind=kind, paths=[str(tmp_path)] if kind == "tokens" else [], seed=3, workers=0)
    whole = take(data, 100, accumulation=2)
    again = take(data, 60, accumulation=2, start=80)
    assert all(torch.equal(a, b) for a, b in zip(whole[40:], again, strict=True))
    # and so it does on twice the ranks, and with workers
    halves = [take(Data(**{**vars(data), "workers": 2}), 30, rank=rank, ranks=2, start=80) for rank in (0, 1)]
    interleaved = [batch for pair in zip(*halves, strict=True) for batch in pair]
    assert all(torch.equal(a, b) for a, b in zip(whole[40:], interleaved, strict=True))


def test_synthetic_tokens_are_uniform_and_their_own_for_every_sample_and_seed():
    one, other = (torch.cat(take(Data(kind="synthetic", seed=s, workers=0), 50, sequence=99)) for s in (0, 1))
    assert one.min() >= 0 and one.max() <= 255 and len(torch.unique(one, dim=0)) == 100
    counts = torch.bincount(one.flatten(), minlength=256).double()
    expected = one.numel() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 370  # chi squared, 255 degrees of freedom: one in 400,000
    assert (one == other).double().mean() < 0.01
    large = take(Data(kind="synthetic", workers=0), 1, vocabulary=2**31, start=2**40)[0]
    assert large.min() >= 0 and large.max() > 2**30


@pytest.mark.parametrize(
    ("data", "changes", "sentence"),
    [
        (Data(kind="tokens"), {}, "needs data.paths"),
        (Data(paths=["nowhere"]), {}, "There is no file or folder 'nowhere'"),
        (Data(), {"vocabulary": 255}, "set model.vocabulary=256"),
        (Data(), {"sequence": 10**9}, "give more data or a smaller model.sequence"),
    ],
)
def test_what_the_user_can_put_right_is_one_sentence(data, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        opened(data, **changes)


def test_an_empty_file_and_a_token_file_taken_for_text_are_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="The data has 0 tokens"):
        opened(Data(paths=[str(tmp_path / "empty")]))
    write_tokens(tmp_path / "a.tokens", [np.arange(100)], 100)
    with pytest.raises(UserError, match="data.kind=tokens"):
        opened(Data(paths=[str(tmp_path / "a.tokens")]))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_token_beyond_the_vocabulary_does_not_reach_the_device(tmp_path, workers):
    path = tmp_path / "a.tokens"
    write_tokens(path, [np.zeros(1000, np.int64)], 70000)
    with open(path, "r+b") as file:
        file.seek(64)
        file.write(b"\xff" * 4)
    batches = opened(Data(kind="tokens", paths=[str(path)], shuffle=False, workers=workers), vocabulary=70000)
    with pytest.raises(UserError, match="^The data has a token 4294967295 and .* `tilewright data check`.$"):
        batches.next()
    batches.close()


# --- loading


@pytest.mark.parametrize("workers", [0, 3])
def test_loading_leaves_the_random_state_and_ends_at_stop(workers):
    before = torch.random.get_rng_state()
    batches = opened(Data(workers=workers), stop=11, micro_batch=2, accumulation=2)
    rows = [batches.next() for _ in range(4)]
    assert batches.waited > 0 and len(torch.unique(torch.cat(rows), dim=0)) == 8
    with pytest.raises(StopIteration):
        batches.next()
    batches.close()
    batches.close()
    assert torch.equal(before, torch.random.get_rng_state())


def pids(batches):
    return [worker.pid for worker in batches._iterator._workers]


def test_closing_leaves_no_process(monkeypatch):
    batches = opened(Data(workers=2))
    batches.next()
    workers = pids(batches)
    assert all(map(alive, workers))
    began = time.monotonic()
    batches.close()
    assert not any(map(alive, workers)) and soon(5, began)  # the loader's own patience


@pytest.mark.parametrize("workers", [1, 3])
def test_a_killed_worker_is_a_sentence_within_seconds(workers):
    batches = opened(Data(workers=workers))
    batches.next()
    others = pids(batches)
    handler = signal.getsignal(signal.SIGCHLD)
    os.kill(others[0], signal.SIGKILL)
    time.sleep(0.2)  # nothing is raised where nobody asks for data
    began = time.monotonic()
    with pytest.raises(UserError, match="A data worker died .SIGKILL.*data.workers=0") as caught:
        for _ in range(100):
            batches.next()
    assert soon(20, began) and "\n" not in str(caught.value)
    assert not any(map(alive, others)) and signal.getsignal(signal.SIGCHLD) is handler


def test_signals_for_the_whole_job_do_not_end_a_worker():
    batches = opened(Data(workers=2))
    for pid in pids(batches):  # at once: they may not have come further than the fork
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    workers = pids(batches)
    for _ in range(50):
        batches.next()
    assert all(map(alive, workers))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()  # the run itself still listens
    batches.close()
    assert not any(map(alive, workers))


class Broken(torch.utils.data.Dataset):
    def __init__(self, error):
        self.error = error

    def __getitem__(self, first):
        if self.error is None:
            time.sleep(1000)
        raise self.error


def test_an_error_in_a_worker_is_a_sentence_and_without_workers_the_error_itself():
    batches = Batches(Broken(KeyError("nothing here")), itertools.count(), 1, CPU)
    workers = pids(batches)
    with pytest.raises(UserError, match="failed with KeyError: 'nothing here'.*data.workers=0") as caught:
        batches.next()
    assert "\n" not in str(caught.value) and not any(map(alive, workers))
    batches = Batches(Broken(KeyError("nothing here")), itertools.count(), 0, CPU)
    with pytest.raises(KeyError):
        batches.next()
    batches.close()


def test_a_worker_that_hangs_is_waited_for_so_long_and_then_ended(monkeypatch):
    monkeypatch.setattr(data_module, "PATIENCE", 3.0)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)  # its own patience on closing
    batches = Batches(Broken(None), itertools.count(), 1, CPU)
    workers = pids(batches)
    began = time.monotonic()
    with pytest.raises(UserError, match="No data came for 3 s"):
        batches.next()
    assert time.monotonic() - began >= 3 and soon(12, began) and not any(map(alive, workers))


SCRIPT = """
import os, signal, sys, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background inherits it ignored
from tilewright.train.schema import Data
from tilewright.train.data import open_batches
batches = open_batches(Data(workers=2), sequence=8, vocabulary=256, micro_batch=2, accumulation=1,
                       device=torch.device("cpu"))
print(*[worker.pid for worker in batches._iterator._workers], flush=True)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "number", "code"),
    [
        ("pass", None, 0),
        ("raise RuntimeError", None, 1),
        ("while True: batches.next()", signal.SIGINT, -signal.SIGINT),
        ("while True: batches.next()", signal.SIGKILL, -signal.SIGKILL),
        ("while True: batches.next()", signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_however_a_run_ends_its_workers_end(ending, number, code):
    """Also where nobody closed anything; Ctrl-C goes to the whole group, as a terminal sends it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(ending=ending)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    elif number is not None:
        process.send_signal(number)
    assert process.wait(timeout=20) == code
    assert until(lambda: not any(map(alive, workers)), 4)
    if number == signal.SIGINT:
        assert process.stderr.read().count("Traceback") == 1  # the run's own, and none of a worker
    process.stdout.close()
    process.stderr.close()
