"""Threads for compilers, which leave Python's lock to other threads for most of their time.

A job runs once: in a thread of the pool, or, if none has begun it when its result is wanted, where it is wanted. So
nobody waits in a queue. When the program ends, jobs that have begun are finished and the others are dropped.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
_MOST_THREADS = max(2, min(16, len(os.sched_getaffinity(0))))
_queue: deque[Callable[[], None]] = deque()
_threads = 0  # that work on the queue; each ends when it is empty
_lock = threading.Lock()


class Job(Generic[T]):
    """A function and, later, its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._prepare()

    def _prepare(self) -> None:
        self._process, self._claim = os.getpid(), threading.Lock()
        self._done: Future[T] = Future()

    def start(self) -> Job[T]:
        """Lets a thread of the pool run the function."""
        _enqueue(self._run)
        return self

    def result(self) -> T:
        """Returns what the function returned, or raises what it raised."""
        if self._process != os.getpid() and not self._done.done():
            self._prepare()  # after a fork: the thread that was at it is the parent's
        self._run()
        return self._done.result()

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return  # another thread has begun
        try:
            self._done.set_result(self._function())
        except Exception as error:
            self._done.set_exception(error)
        except BaseException:  # Ctrl-C is no result: the next to ask runs it again
            waited_for = self._done
            self._prepare()
            waited_for.set_exception(RuntimeError("the thread that ran it was interrupted"))
            raise


def _enqueue(function: Callable[[], None]) -> None:
    global _threads
    with _lock:
        _queue.append(function)
        if _threads < _MOST_THREADS:
            _threads += 1
            # Not a daemon, which what a thread of autograd's starts would be: a compiler does not survive that at exit.
            try:
                threading.Thread(target=_work, name=f"tilewright-compile-{_threads}", daemon=False).start()
            except RuntimeError:  # the system has no more threads; who wants the result runs the job
                _threads -= 1


def _work() -> None:
    global _threads
    while True:
        with _lock:
            # At the end of a program the interpreter waits for threads when the main one has stopped.
            if not _queue or not threading.main_thread().is_alive():
                _threads -= 1
                return
            function = _queue.popleft()
        function()


def _forget_threads() -> None:
    """A forked process has none of its parent's threads, and may have inherited a lock that one of them held."""
    global _threads, _lock
    _threads, _lock = 0, threading.Lock()
    _queue.clear()


os.register_at_fork(after_in_child=_forget_threads)
