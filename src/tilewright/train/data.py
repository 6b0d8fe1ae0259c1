"""Batches of tokens: which sequence a step takes, and how it gets to the device without the step waiting for it.

Packing. All tokens are one stream, and window i of it is tokens [i * sequence, i * sequence + sequence + 1): windows
overlap by one, so every token but the first is a target once.

Order. Samples are numbered through the whole run, over all epochs and ranks. Sample n is a window of epoch
n // windows, found by a pseudo-random permutation that needs no table, so the state of the data is one integer, the
samples consumed. A step takes the next `global batch` samples, micro batch m of rank r the slice that begins at
(m * ranks + r) * micro_batch of them. So how many ranks there are does not change what a step learns from.

Loading. Workers are forked, and late, when the process has threads. Starting them anew would import torch in each
(seconds, and hundreds of megabytes) and run a user's script again that does not guard its main part. A fork is safe as
long as the child takes no lock that a thread held: ours copies mapped memory into a tensor and passes it on, and never
touches CUDA, OpenMP or the log. Should one hang all the same, the wait for it is bounded.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from tilewright.errors import UserError
from tilewright.train import text
from tilewright.train.schema import Data
from tilewright.train.tokens import SUFFIX, Part, Stream, find_files, open_tokens

PATIENCE = 300.0  # seconds without any data before workers count as stuck; below the time-outs of torch.distributed
_CHECK = 2  # seconds between two looks at whether the workers live
_PREFETCH = 4  # micro batches a worker is ahead
_ROUNDS = 8  # at 6, five windows still have a bias that 20,000 seeds show
_PIECE, _PIECES = 1 << 14, 64  # tokens of a piece of a fingerprint, and pieces
_BLOCK = 4096  # samples whose windows are found at once: NumPy's cost is by the call

Numbers = npt.NDArray[np.uint64]


def _mix(values: Numbers) -> Numbers:
    """The finaliser of SplitMix64: every bit of the input changes half of the bits of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(*parts: int, count: int = 1) -> Numbers:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8 * count).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def permute(values: Numbers, size: int, seed: int, epoch: int) -> Numbers:
    """Where a pseudo-random permutation of range(size) takes `values`; (seed, epoch) says which permutation.

    A Feistel network permutes the numbers below the next power of four whatever its round function is. One that leaves
    range(size) is sent through again until it is back, which keeps the whole a permutation and takes under four passes
    on average.

    >>> permute(np.arange(5, dtype=np.uint64), 5, seed=0, epoch=0).tolist()
    [4, 0, 2, 3, 1]
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = _keys(seed, epoch, count=_ROUNDS)
    out = values.copy()
    outside = np.arange(len(out))
    while len(outside):
        left, right = out[outside] >> shift, out[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        out[outside] = (left << shift) | right
        outside = outside[out[outside] >= size]
    return out


def window_of(sample: int, windows: int, seed: int, shuffle: bool) -> int:
    """The window that a sample of the run is.

    >>> [window_of(sample, 3, seed=0, shuffle=False) for sample in range(7)]
    [0, 1, 2, 0, 1, 2, 0]
    """
    epoch, number = divmod(sample, windows)
    return _block(number // _BLOCK, windows, seed, epoch)[number % _BLOCK] if shuffle else number


@functools.lru_cache(maxsize=4)
def _block(block: int, windows: int, seed: int, epoch: int) -> list[int]:
    first = block * _BLOCK
    return permute(np.arange(first, min(first + _BLOCK, windows), dtype=np.uint64), windows, seed, epoch).tolist()


def first_samples(
    micro_batch: int, accumulation: int, rank: int, ranks: int, start: int, stop: int | None
) -> Iterator[int]:
    """The first sample of each micro batch of a rank, in the order it takes them; whole steps only, up to `stop`.

    >>> list(first_samples(2, 2, rank=1, ranks=2, start=8, stop=24))
    [10, 14, 18, 22]
    """
    step = micro_batch * accumulation * ranks
    steps = itertools.count(start, step) if stop is None else range(start, stop - step + 1, step)
    for first in steps:
        for micro in range(accumulation):
            yield first + (micro * ranks + rank) * micro_batch


class Packed(Dataset[torch.Tensor]):
    """Micro batches of a stream of tokens, by the number of their first sample.

    The last windows may be held out: what is learnt from them is nothing, not even their first target.
    """

    def __init__(
        self, stream: Stream, data: Data, sequence: int, vocabulary: int, micro_batch: int, held_out: float
    ) -> None:
        windows = (stream.tokens - 1) // sequence
        if windows < 1:
            raise UserError(f"The data has {stream.tokens:,} tokens and a sequence takes {sequence + 1:,}; give more "
                            "data or a smaller model.sequence.")  # fmt: skip
        if held_out and windows < 2:
            raise UserError(f"The data has one sequence of {sequence:,} tokens and none to hold out; give more data, a "
                            "smaller model.sequence or eval.every=0.")  # fmt: skip
        self.held = max(1, int(held_out * windows)) if held_out else 0
        self.windows = windows - self.held
        self.stream, self.data, self.vocabulary = stream, data, vocabulary
        self.sequence, self.micro_batch = sequence, micro_batch

    def __getitem__(self, first: int) -> torch.Tensor:
        samples = range(first, first + self.micro_batch)
        return self._read([window_of(sample, self.windows, self.data.seed, self.data.shuffle) for sample in samples])

    def held_out(self, first: int, rows: int) -> torch.Tensor:
        """Return `rows` held-out sequences."""
        return self._read(range(self.windows + first, self.windows + first + rows))

    def fingerprint(self) -> dict[str, Any]:
        """How many tokens there are, and a hash of them: of all where they are few, else of pieces all over the data.

        To read all of it at every start would cost minutes where there is much.
        """
        total, digest = self.stream.tokens, hashlib.blake2b(digest_size=16)
        digest.update(repr([part.tokens for part in self.stream.parts]).encode())
        last = max(0, total - _PIECE)
        for piece in range(_PIECES):
            first = last * piece // (_PIECES - 1) if total > _PIECES * _PIECE else piece * _PIECE
            digest.update(self.stream.read(first, np.empty(max(0, min(_PIECE, total - first)), np.int32)).data)
        return {"tokens": total, "hash": digest.hexdigest()}

    def _read(self, windows: Sequence[int]) -> torch.Tensor:
        out = np.empty((len(windows), self.sequence + 1), np.int32)
        for window, row in zip(windows, out, strict=True):
            self.stream.read(window * self.sequence, row)
        largest = int(out.view(np.uint32).max())
        if largest >= self.vocabulary:  # on a GPU it would end the process without a word about why
            raise UserError(f"The data has a token {largest} and the model's vocabulary is {self.vocabulary:,}; see "
                            "which file is damaged with `tilewright data check`.")  # fmt: skip
        return torch.from_numpy(out)


class Synthetic(Dataset[torch.Tensor]):
    """Micro batches of random tokens, each made from (seed, its number in the run) alone."""

    held = 1 << 31  # as many as anybody wants

    def __init__(self, seed: int, sequence: int, vocabulary: int, micro_batch: int) -> None:
        self.keys, self.vocabulary = _keys(seed), vocabulary
        self.held_keys = _keys(seed, 1)
        self.micro_batch, self.columns = micro_batch, sequence + 1

    def __getitem__(self, first: int) -> torch.Tensor:
        return self._draw(self.keys, first, self.micro_batch)

    def held_out(self, first: int, rows: int) -> torch.Tensor:
        """Return `rows` sequences that no step draws."""
        return self._draw(self.held_keys, first, rows)

    def fingerprint(self) -> dict[str, Any]:
        """Return nothing: the seed determines the data."""
        return {"tokens": None, "hash": None}

    def _draw(self, key: Numbers, first: int, rows: int) -> torch.Tensor:
        columns = self.columns
        numbers = np.arange(first * columns, (first + rows) * columns, dtype=np.uint64)
        # The upper 32 bits as a fraction of 2^32, times the vocabulary: uniform to one part in 2^32 / vocabulary.
        tokens = (_mix(_mix(numbers) + key) >> np.uint64(32)) * np.uint64(self.vocabulary) >> np.uint64(32)
        return torch.from_numpy(tokens.astype(np.int32).reshape(rows, columns))


class Batches:
    """Micro batches on their way to a device, one after the other."""

    def __init__(self, dataset: Dataset[torch.Tensor], firsts: Iterator[int], workers: int, device: torch.device):
        self.waited = 0.0  # seconds, in the last `next`
        self._device, self._workers = device, workers
        loader = DataLoader(
            dataset,
            sampler=firsts,  # type: ignore[arg-type]  # any iterable will do
            batch_size=None,  # an item is a micro batch already
            num_workers=workers,
            prefetch_factor=_PREFETCH if workers else None,
            multiprocessing_context="fork" if workers else None,
            timeout=_CHECK if workers else 0,
            worker_init_fn=functools.partial(_follow, os.getpid()),
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # else the loader draws a number from the run's own random state
        )
        self._iterator: Any = _start(loader)
        atexit.register(self.close)

    def next(self) -> torch.Tensor:
        """The next micro batch, int64 of (micro_batch, sequence + 1); StopIteration at the end."""
        began = time.perf_counter()
        batch = self._wait()
        self.waited = time.perf_counter() - began
        # int32 over the bus, asynchronous where it is pinned, and widened there.
        return batch.to(self._device, non_blocking=True).long()

    def close(self) -> None:
        """End the workers; they also end with the process, and a second later where it is killed."""
        atexit.unregister(self.close)
        if self._workers:
            _end(self._iterator)
        self._workers, self._iterator = 0, iter(())

    def _wait(self) -> torch.Tensor:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return next(self._iterator)
            except StopIteration:
                raise
            except Exception as error:
                if not self._workers:
                    raise
                slow = str(error).startswith("DataLoader timed out")
                if slow and time.monotonic() < deadline:
                    continue
                sentence = _explain(error, slow, self._iterator._workers)
                self.close()
                raise UserError(sentence) from error


def _start(loader: DataLoader[torch.Tensor]) -> Any:
    """Start the workers, which ignore signals that are meant for the run.

    Ctrl-C and SIGTERM reach every process of a terminal or a job: the run decides what they mean and ends its workers
    itself. A mask is inherited from the first instruction on, where a handler would leave a gap. And torch's handler of
    SIGCHLD, which raises wherever the run happens to be, in the middle of a checkpoint for one, is put back: a dead
    worker is noticed in `next`.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return iter(loader)
    except OSError as error:
        count = loader.num_workers
        raise UserError(f"Cannot start {count} data workers: {error.strerror}; lower data.workers.") from error
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _follow(parent: int, worker: int) -> None:
    """End this worker when the run ends, however it ends.

    The loader looks too, but only for a change of parent since the worker was ready: one whose run was killed before
    that would stay for ever.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end(iterator: Any) -> None:
    iterator._shutdown_workers()
    for worker in iterator._workers:
        if worker.is_alive():  # it hangs, and SIGTERM is blocked there
            worker.kill()
        worker.join()


def _explain(error: Exception, slow: bool, workers: list[Any]) -> str:
    """Say in one sentence why there is no data, and what to do."""
    if workers and isinstance(error, (ConnectionError, EOFError)):  # its pipe ends before it does
        multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=2.0)
    ended = [worker.exitcode for worker in workers if worker.exitcode is not None]
    if ended:
        how = signal.Signals(-ended[0]).name if ended[0] < 0 else f"exit code {ended[0]}"
        return (
            f"A data worker died ({how}; SIGKILL often means that memory ran out, SIGBUS that a file was cut short); "
            "run again, with data.workers=0 to see the error itself."
        )
    if slow:
        return f"No data came for {PATIENCE:g} s; see whether the disk answers, or run with data.workers=0."
    what = str(error).strip().splitlines()[-1]
    if isinstance(error, UserError):
        return what.partition(": ")[2]
    return f"A data worker failed with {what}; run with data.workers=0 to see where."


def _parts(data: Data, progress: text.Progress) -> list[Part]:
    if data.kind == "tokens":
        if not data.paths:
            raise UserError("data.kind=tokens needs data.paths: name token files or folders with some.")
        return [open_tokens(path) for path in find_files(data.paths, lambda path: path.suffix == SUFFIX)]
    files = text.text_files(data.paths)
    return text.byte_parts(files) if data.tokenizer == "bytes" else [text.cached(files, data.tokenizer, progress)]


def open_dataset(
    data: Data,
    *,
    sequence: int,
    vocabulary: int,
    micro_batch: int,
    held_out: float = 0.0,
    progress: text.Progress = lambda done, total: None,
) -> Packed | Synthetic:
    """The micro batches of a run by the number of their first sample; `held_out` is a share of the sequences.

    >>> dataset = open_dataset(Data(kind="synthetic"), sequence=8, vocabulary=256, micro_batch=2)
    >>> dataset[0].shape
    torch.Size([2, 9])
    """
    if data.kind == "synthetic":
        return Synthetic(data.seed, sequence, vocabulary, micro_batch)
    parts = _parts(data, progress)
    widest = max((part.vocabulary for part in parts), default=0)
    if widest > vocabulary:
        raise UserError(f"The data's vocabulary is {widest:,} and the model's {vocabulary:,}; set "
                        f"model.vocabulary={widest} or more.")  # fmt: skip
    return Packed(Stream(parts), data, sequence, vocabulary, micro_batch, held_out)


def open_batches(
    data: Data,
    *,
    sequence: int,
    vocabulary: int,
    micro_batch: int,
    accumulation: int,
    rank: int = 0,
    ranks: int = 1,
    start: int = 0,
    stop: int | None = None,
    device: torch.device,
    progress: text.Progress = lambda done, total: None,
) -> Batches:
    """The micro batches of a rank, from sample `start` of the run on, up to `stop` where one is given.

    >>> batches = open_batches(Data(workers=0), sequence=8, vocabulary=256, micro_batch=2, accumulation=1,
    ...                        device=torch.device("cpu"))
    >>> batches.next().shape
    torch.Size([2, 9])
    >>> batches.close()
    """
    dataset = open_dataset(
        data, sequence=sequence, vocabulary=vocabulary, micro_batch=micro_batch, progress=progress
    )  # fmt: skip
    firsts = first_samples(micro_batch, accumulation, rank, ranks, start, stop)
    return Batches(dataset, firsts, data.workers, device)
