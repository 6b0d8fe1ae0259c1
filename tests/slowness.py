"""How slow this machine is now: a limit in seconds is meant for an idle one, and tests share theirs with others."""

import time

IDLE = 0.06  # seconds of the work below on an idle core of 2024


def slowness():
    """How many times longer a fixed piece of work takes now than on an idle core; at least 1."""
    began = time.perf_counter()
    total = 0
    for number in range(1_000_000):
        total += number
    return max(1.0, (time.perf_counter() - began) / IDLE)


def soon(seconds, began):
    """Whether a moment of `time.monotonic` is less than so many seconds ago, as an idle machine would count them."""
    elapsed = time.monotonic() - began
    return elapsed < seconds or elapsed < seconds * max(slowness(), slowness())
