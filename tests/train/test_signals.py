import os
import signal

import pytest

from tilewright.train.signals import Signals, uninterrupted

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@BOTH
def test_the_first_is_noted_and_the_second_interrupts(number):
    before = signal.getsignal(number)
    with Signals() as signals:
        os.kill(os.getpid(), number)
        assert signals.came
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_under_torchrun_the_second_is_the_agents_and_does_not_interrupt(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.came


@BOTH
def test_where_it_may_the_first_interrupts_and_is_noted_too(number):
    with Signals(at_once=True) as signals, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    assert signals.came


@BOTH
def test_a_job_in_the_background_is_ended_so_too(number):
    """A shell lets those that it starts by `&` ignore Ctrl-C; who sends them one all the same means it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), number)
        assert signals.came and signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


@BOTH
def test_what_must_not_be_interrupted_is_not_unless_somebody_insists(number):
    done = []
    with Signals(at_once=True) as signals, pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), number)
        done.append(signals.came)
    assert done == [True]
    with Signals(at_once=True), pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        done.append("too late")
    assert done == [True]
    with uninterrupted():  # and nothing of it is left over
        pass
