"""The layouts that a study's ranks may have: the values of its lever `parallel`, each a word.

    dp2         DDP over two ranks            tp2+sp      tensor and sequence parallel
    dp2+zero3   FSDP2                         dp2+pp2     two pipelines of two stages

What a model, its batch and its optimizer do not allow is refused by `train.check_ranks`, as for every run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tilewright.errors import UserError
from tilewright.train.check_ranks import check_ranks
from tilewright.train.load_config import Configuration
from tilewright.train.schema import Parallel, Train

LAYOUT = "parallel"  # the lever
_FIELDS = ("dp", "tp", "sp", "pp", "pieces", "cp", "ep", "zero")
_ALONE: dict[str, Any] = {"dp": 0, "zero": 0, "sp": False, "tp": 1, "pp": 1, "pieces": 1, "cp": 1, "ep": 1}
_PIECES = (1, 2, 4)


def word_of(parallel: Parallel) -> str:
    """The word for a layout whose sizes are all known.

    >>> word_of(Parallel(dp=2, zero=3)), word_of(Parallel(dp=1, tp=2, sp=True))
    ('dp2+zero3', 'tp2+sp')
    """
    found = {name: getattr(parallel, name) for name in _FIELDS}
    found = {name: value for name, value in found.items() if value not in (_ALONE[name], *((1,) * (name == "dp")))}
    return "+".join(name if value is True else f"{name}{value}" for name, value in found.items()) or "dp1"


def with_layout(parallel: Parallel, word: str) -> Parallel:
    """The settings of a run with the layout of a word.

    >>> with_layout(Parallel(prefetch=2), "tp2+sp") == Parallel(dp=1, tp=2, sp=True, prefetch=2)
    True
    """
    return dataclasses.replace(parallel, **sizes_of(word))


def sizes_of(word: str) -> dict[str, Any]:
    """The fields of `parallel` that a word stands for.

    >>> sizes_of("dp2+pp2") | {"zero": 3} == sizes_of("dp2+pp2+zero3")
    True
    """
    found = dict(_ALONE, dp=1)
    for part in str(word).split("+"):
        match = re.fullmatch(r"(?:(dp|zero|tp|pp|pieces|cp|ep)([0-9]{1,6})|sp)", part)
        if match is None:
            raise UserError(f"parallel={str(word)[:40]!r} is no layout; write it as dp2+zero3 or tp2+sp.")
        found |= {match[1]: int(match[2])} if match[1] else {"sp": True}
    return found


def open_layouts(
    configuration: Configuration, start: Train, ranks: int, search: Collection[str], micro_batches: Sequence[int]
) -> tuple[str, ...]:
    """The layouts that so many ranks can have at one of the micro batches, the run's own first.

    Args:
        configuration: where the fields of the run were set: a size that was stays, unless the search opens it.
        start: the run, spelt out.
        ranks: that share it.
        search: levers that are open although they were set.
        micro_batches: that a run may take.
    """
    is_open = LAYOUT in search or "all" in search
    given = [name for name in _FIELDS if not is_open and configuration.origins[f"parallel.{name}"] != "default"]
    given = [name for name in given if name != "dp" or configuration.train.parallel.dp]  # 0: whatever is left
    fixed = {name: getattr(start.parallel, name) for name in given}
    found = [word_of(start.parallel)]
    for layout in _candidates(start.parallel, ranks, start.model.experts):
        if all(getattr(layout, name) == value for name, value in fixed.items()):
            runs = (dataclasses.replace(start, parallel=layout, micro_batch=micro) for micro in micro_batches)
            found += [word_of(layout)] if any(_is_allowed(run, ranks) for run in runs) else []
    return tuple(dict.fromkeys(found))


def _candidates(parallel: Parallel, ranks: int, experts: int) -> Iterator[Parallel]:
    """Every way to arrange so many ranks; a field that would do nothing is left alone."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    for pp, cp, tp in itertools.product(divisors, divisors, divisors):
        dp, rest = divmod(ranks, pp * cp * tp)
        if rest:
            continue
        replicas = dp * cp
        choices = (
            (0, 2, 3) if replicas > 1 else (0,), (False, True) if tp > 1 else (False,), _PIECES if pp > 1 else (1,),
            [size for size in divisors if experts and replicas % size == 0] or [1],
        )  # fmt: skip
        for zero, sp, pieces, ep in itertools.product(*choices):
            yield dataclasses.replace(parallel, dp=dp, zero=zero, tp=tp, sp=sp, pp=pp, pieces=pieces, cp=cp, ep=ep)


def _is_allowed(run: Train, ranks: int) -> bool:
    with contextlib.suppress(UserError):
        check_ranks(run, ranks)
        return True
    return False
