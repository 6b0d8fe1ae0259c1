"""A run that takes a second: what the tests of the loop train."""

import dataclasses

import pytest

from tilewright.runtime import dispatch
from tilewright.train.loop import train
from tilewright.train.schema import Data, Model, Optimizer, Schedule, Train
from tilewright.train.shown import Shown

MODEL = Model(width=32, layers=2, heads=2, sequence=32)
RUN = Train(
    steps=12, device="cpu", micro_batch=4, model=MODEL, data=Data(workers=0),
    optimizer=Optimizer(learning_rate=3e-3), schedule=Schedule(warmup=2),
)  # fmt: skip


@pytest.fixture(scope="module")
def as_on_a_cpu():
    """Run the ops as a user's CPU does, not under Triton's interpreter, which is slow and has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "INTERPRETED", False)
        yield


def tiny(folder, **changes):
    """RUN in a folder with fields changed; those of a section by a dictionary of them."""
    for name, value in changes.items():
        if isinstance(value, dict):
            changes[name] = dataclasses.replace(getattr(RUN, name), **value)
    return dataclasses.replace(RUN, out=str(folder), **changes)


def trained(config, **shown):
    """The metrics of every step of a run, as they are shown."""
    metrics = []
    train(config, Shown(step=lambda one, steps: metrics.append(one), **shown))
    return metrics


def losses(config, **shown):
    return [one.loss for one in trained(config, **shown)]
