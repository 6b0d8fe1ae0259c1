"""What a search may change about a run: the levers of `train`, those the user leaves open, and what they rule out.

A point is a value for every lever of the space, by the field's dotted name; of several ranks it also has their layout.
What a user has set, in a file or on the command line, stays as it is; what they left to its default is open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.errors import UserError
from tilewright.plan.lever import NUMERICS
from tilewright.train.check_ranks import check_ranks
from tilewright.train.fields import fields
from tilewright.train.load_config import Configuration, read
from tilewright.train.schema import PRECISIONS, Train
from tilewright.tune.search.layouts import LAYOUT, open_layouts, with_layout, word_of

Point = dict[str, Any]


@dataclass(frozen=True)
class Space:
    """The baseline, with its batch and precision spelt out, and the values each open lever may take."""

    start: Train
    levers: dict[str, tuple[Any, ...]]  # the run's own value first
    device: str  # "cuda" or "cpu"
    ranks: int = 1  # that every run is on

    @property
    def baseline(self) -> Point:
        """The point that is the baseline."""
        return {name: values[0] for name, values in self.levers.items()}

    def at(self, point: Mapping[str, Any]) -> Train:
        """The run at a point."""
        return with_values(self.start, point)

    def refusal(self, point: Mapping[str, Any]) -> str | None:
        """Why the levers of a point do not go together, or None."""
        import torch

        from tilewright.train.engine import check_levers

        try:
            run = self.at(point)
            _, sizes = check_ranks(run, self.ranks)
            check_levers(run, torch.device(self.device), sizes.accumulation)
        except UserError as error:
            return str(error)
        return None

    def neighbours(self, point: Mapping[str, Any]) -> Iterator[tuple[str, Point]]:
        """Every point that differs in one lever, with that lever's name."""
        for name, values in self.levers.items():
            for value in values:
                if value != point[name]:
                    yield name, {**point, name: value}

    def changes(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """The levers that are not the baseline's."""
        return {name: value for name, value in point.items() if value != self.levers[name][0]}

    def label(self, point: Mapping[str, Any]) -> str:
        """A point in a few words."""
        return label(self.changes(point))

    def parse(self, text: str) -> Point:
        """The point that `name=value`, or several with commas between, makes of the baseline."""
        given = {part.partition("=")[0].strip(): part.strip() for part in text.split(",")}
        run, point = read(None, [part for name, part in given.items() if name != LAYOUT]).train, self.baseline
        for name, part in given.items():
            value = part.partition("=")[2].strip() if name == LAYOUT else value_of(run, name)
            if name not in self.levers:
                raise UserError(f"{name} is not open to the search; choose from {', '.join(self.levers)}.")
            if value not in self.levers[name]:
                values = ", ".join(map(str, self.levers[name]))
                raise UserError(f"{name} cannot be {value} here; choose from {values}, or allow more by --numerics.")
            point[name] = value
        refusal = self.refusal(point)
        if refusal is not None:
            raise UserError(refusal)
        return point


def label(changes: Mapping[str, Any]) -> str:
    """The levers that were moved, in a few words.

    >>> label({"model.gpt_block": "optimized", "cuda_graphs": True, "micro_batch": 4})
    'gpt_block optimized, cuda_graphs, micro_batch 4'
    """
    words = []
    for name, value in changes.items():
        short = name.split(".")[-1] if name != "optimizer.name" else "optimizer"
        words.append(short if value is True else f"no {short}" if value is False else f"{short} {value}")
    return ", ".join(words) or "baseline"


def open_space(
    configuration: Configuration,
    *,
    device: str,
    numerics: str = "rounding",
    precision_floor: str | None = None,
    search: Collection[str] = (),
    of_any_model: bool = False,
    ranks: int = 1,
) -> Space:
    """The space around a run.

    Args:
        configuration: the run, and where each of its values was set.
        device: "cuda" or "cpu".
        numerics: how far a lever may move the numbers, a word of NUMERICS.
        precision_floor: no precision below this one; a run whose precision was left open begins with it.
        search: levers that are open although they were set; "all" for every one.
        of_any_model: leave out the levers that are built into Tilewright's own model.
        ranks: that share every run.

    >>> from tilewright.train.load_config import read
    >>> found = open_space(read(None, ["compile=default", "global_batch=4"]), device="cpu", numerics="same")
    >>> "compile" in found.levers, found.levers["model.loss"], found.levers["micro_batch"]
    (False, ('plain', 'fused', 'linear_fused'), (4, 2, 1))
    """
    if numerics not in NUMERICS:
        raise UserError(f"numerics is {numerics!r}; choose {', '.join(NUMERICS)}.")
    if precision_floor is not None and precision_floor not in PRECISIONS[1:]:
        raise UserError(f"The precision floor is {precision_floor!r}; choose {', '.join(PRECISIONS[1:])}.")
    start, opened = _spelt_out(configuration.train, device, ranks), _opened(configuration, search)
    if precision_floor and configuration.train.precision == "auto" and _is_below(start.precision, precision_floor):
        start = dataclasses.replace(start, precision=precision_floor)
    for name in ("precision", "model.residual"):
        if _is_below(own := value_of(start, name), precision_floor):
            raise UserError(f"{name} is {own} and the precision floor {precision_floor}; leave one of them out.")
    allowed = list(NUMERICS)[: list(NUMERICS).index(numerics) + 1]
    levers = {}
    for name in opened:
        if name == "threads" and ranks > 1:  # each has its share of the cores
            continue
        field, own = fields()[name], value_of(start, name)
        lever = field.lever
        assert lever is not None
        is_of_theirs = name.startswith("model.") if of_any_model else lever.is_of_others
        if is_of_theirs or not lever.runs_on(own, device):
            continue
        listed = lever.values(start) if callable(lever.values) else lever.values
        values = (field.choices or (False, True)) if listed is None else listed
        kept = [v for v in values if lever.runs_on(v, device) and lever.moves(v) in allowed]
        kept = [v for v in kept if not _is_below(v, precision_floor)]
        if len(choices := tuple(dict.fromkeys((own, *kept)))) > 1:
            levers[name] = choices
    if ranks > 1:
        micro_batches = levers.get("micro_batch", (start.micro_batch,))
        layouts = open_layouts(configuration, start, ranks, search, micro_batches)
        levers |= {LAYOUT: layouts} if len(layouts) > 1 else {}
    if not levers:
        raise UserError(
            "The configuration fixes every lever, so there is nothing to try; leave some out of it, or open them with "
            "`--search all`."
        )
    return Space(start, levers, device, ranks)


def _is_below(value: Any, floor: str | None) -> bool:
    """Whether a lever's value is a precision, that of matmuls or of the residual stream, that the floor rules out."""
    return floor is not None and value in PRECISIONS and PRECISIONS.index(value) > PRECISIONS.index(floor)


def _opened(configuration: Configuration, search: Collection[str]) -> list[str]:
    levers = [name for name, field in fields().items() if field.lever is not None]
    for name in search:
        if name not in ("all", LAYOUT, *levers):
            raise UserError(f"{name!r} is no lever; choose all, or {', '.join(levers)}.")
    if "all" in search:
        return levers
    return [name for name in levers if name in search or configuration.origins[name] == "default"]


def _spelt_out(run: Train, device: str, ranks: int) -> Train:
    """A run whose batch, precision and layout say what they are."""
    layout, sizes = check_ranks(run, ranks)
    if ranks > 1:
        run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, dp=layout.dp))
    precision = run.precision if run.precision != "auto" else "bf16" if device == "cuda" else "fp32"
    return dataclasses.replace(
        run, precision=precision, global_batch=sizes.global_, micro_batch=sizes.micro, accumulation=0
    )


def value_of(run: Train, name: str) -> Any:
    """The value of a field, by its dotted name; of `parallel` the word for its layout."""
    if name == LAYOUT:
        return word_of(run.parallel)
    found: Any = run
    for part in name.split("."):
        found = getattr(found, part)
    return found


def with_values(run: Train, point: Mapping[str, Any]) -> Train:
    """A run with other values of fields, by their dotted names."""
    changes: dict[str, Any] = {}
    for name, value in point.items():
        section, _, field = name.rpartition(".")
        if name == LAYOUT:
            changes[name] = with_layout(run.parallel, value)
        elif section:
            changes[section] = dataclasses.replace(changes.get(section, getattr(run, section)), **{field: value})
        else:
            changes[field] = value
    return dataclasses.replace(run, **changes)
