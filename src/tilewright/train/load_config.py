"""A run's configuration: defaults, a preset, YAML files and the command line, one above the other.

    defaults  <  model.preset  <  the file's `base:`, and its base  <  the file  <  name=value on the command line

A preset fills in what no file and no override sets, wherever the preset itself was set.

YAML is read as a stream of events and never as objects: a scalar is text, and the type of its field alone says what
it means. So nothing can be constructed, `no` is no boolean in a field of text, and every value knows its line. What
has no use here and could do harm (tags, anchors, resolvers, deep nesting, huge files) is refused by name.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
import math
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tilewright.errors import UserError
from tilewright.measure.results import write_text
from tilewright.plan.gpt import PRESETS
from tilewright.train.fields import REFERENCE, WHOLE, Field, fields, find_field, sections
from tilewright.train.schema import Train
from tilewright.train.yaml_tree import Node, document, read_text, shown, word

COMMAND_LINE = "command line"
PRESET_FIELDS = ("width", "layers", "heads", "vocabulary", "sequence")
# The highest rate that a model of a preset's width learns at. In its first steps all blocks of a wide model move the
# residual stream the same way, and a rate that rises within ten steps makes the loss rise before it falls: so a preset
# warms up over so many steps that the first has a rate of 1e-6.
PRESET_RATES = {
    "125m": 3e-4, "350m": 3e-4, "760m": 2.5e-4, "1b": 2e-4, "3b": 1.6e-4, "7b": 1.2e-4, "13b": 1e-4, "30b": 8e-5,
    "70b": 6e-5,
}  # fmt: skip
_FIRST_RATE = 1e-6

_MOST_BASES = 16  # files above each other
_MOST_PATH = 1000  # characters of a base's name, which a message repeats
_MOST_TEXT = 4096  # characters of a value, so that references do not grow without end

_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_TRUTH = r"(?i:true|false|yes|no|on|off)"
_KINDS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list of text, such as [a, b]"
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """A run, and for each of its fields by dotted name where its value was set."""

    train: Train
    origins: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The run as it would stand in a file."""
        return dataclasses.asdict(self.train)


def read(path: Path | None, overrides: Sequence[str]) -> Configuration:
    """The configuration of a file, or of none, with `name=value` overrides.

    >>> found = read(None, ["model.preset=125m", "steps=2k"])
    >>> found.train.model.width, found.origins["model.width"], found.train.steps
    (768, 'preset 125m', 2000)
    """
    explicit = {} if path is None else _layers(path, ())
    for override in overrides:
        explicit.update(_override(override))
    given = _preset(explicit) | explicit
    config = copy.deepcopy(_defaults())  # a sixth of the time that building it takes, and a study reads thousands
    _resolve_references(config, given)
    origins = {name: given[name].where if name in given else "default" for name in fields()}
    try:
        return Configuration(typing.cast(Train, OmegaConf.to_object(config)), origins)
    except UserError as error:  # fields that do not go together: point at the first of them that was set
        words = re.findall(r"[\w.]+", str(error))
        where = [explicit[name].where for word in words for name in (word, f"model.{word}") if name in explicit]
        raise UserError(": ".join((*where[:1], str(error)))) from None


@functools.cache
def _defaults() -> DictConfig:
    """Every field at its default, to be written to."""
    config = OmegaConf.structured(Train)
    for section in (config, *(config[name] for name in sections())):
        OmegaConf.set_readonly(section, False)
    return config


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The configuration's path, if one is given, and the overrides: what has a `=`.

    >>> split_arguments(["steps=10", "run.yaml", "seed=1"])
    (PosixPath('run.yaml'), ['steps=10', 'seed=1'])
    """
    paths = [argument for argument in arguments if "=" not in argument]
    if len(paths) > 1:
        raise UserError(f"{paths[0]} and {paths[1]} are two configurations; give one, and name the other as its base.")
    return (Path(paths[0]) if paths else None), [argument for argument in arguments if "=" in argument]


def from_dict(tree: Mapping[str, Any]) -> Train:
    """Rebuild a run from `dataclasses.asdict`, checked like a file.

    >>> run = read(None, ["model.preset=125m", "data.paths=[a, b]"]).train
    >>> from_dict(dataclasses.asdict(run)) == run
    True
    """
    flat = {name: value for name, value in tree.items() if name not in sections()}
    for section in sections():
        flat |= {f"{section}.{name}": value for name, value in tree.get(section, {}).items()}
    return read(None, [f"{name}={json.dumps(value)}" for name, value in flat.items()]).train


def write_yaml(configuration: Configuration | Train, path: Path) -> None:
    """Write every field to a file that `read` gives back the same."""
    train = configuration.train if isinstance(configuration, Configuration) else configuration
    write_text(path, yaml.safe_dump(dataclasses.asdict(train), sort_keys=False, allow_unicode=True))


@dataclass(frozen=True)
class _Given:
    """A value as it was written, and where."""

    value: str | list[str]
    where: str


def _layers(path: Path, chain: tuple[str, ...], asked: str = "") -> dict[str, _Given]:
    """Return what a file sets over its base."""
    text = read_text(path, asked)
    node = document(text, lambda line: f"{path}:{line}")
    if node is None or node.value is None:
        return {}
    if not isinstance(node.value, dict):
        raise UserError(f"{path} does not hold fields; write one a line, such as `steps: 100`.")
    own = node.value.pop("own_model", None)
    if own is not None:
        raise UserError(
            f"{own.where}: these are levers that `tilewright tune` chose for a model of your own, {shown(own.value)}; "
            "set them in your own training, for `tilewright train` trains Tilewright's GPT."
        )
    base = node.value.pop("base", None)
    below = {} if base is None else _base(base, path, (*chain, os.path.realpath(path)))
    return below | _flat(node, "")


def _base(node: Node, path: Path, chain: tuple[str, ...]) -> dict[str, _Given]:
    # Any file may be named that its user can read, but only one that is meant to be YAML is opened: the contents of
    # others, credentials say, have no business in a message.
    name = node.value if isinstance(node.value, str) else ""
    if not name.isprintable() or not name.endswith((".yaml", ".yml")) or len(name) > _MOST_PATH:
        raise UserError(f"{node.where}: base must be the path of a file whose name ends in .yaml or .yml.")
    file = path.parent / name
    if os.path.realpath(file) in chain:
        raise UserError(f"{node.where}: base leads back to {file}; take one of the two out.")
    if len(chain) >= _MOST_BASES:
        raise UserError(f"{node.where}: base is the last of {_MOST_BASES} files above each other; join some of them.")
    return _layers(file, chain, f"{node.where}: ")


def _override(text: str) -> dict[str, _Given]:
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise UserError(f"{shown(text)} is no override; write the name of a field, = and its value.")
    node = document(value, lambda line: COMMAND_LINE)
    return _flat(node or Node("", COMMAND_LINE), name)


def _flat(node: Node, name: str) -> dict[str, _Given]:
    """Return the fields that the YAML under `name` sets."""
    value, field = node.value, fields().get(name)
    if field is not None:
        texts = [item.value for item in value if isinstance(item.value, str)] if isinstance(value, list) else None
        if field.kind is list and isinstance(value, list) and texts is not None and len(texts) == len(value):
            return {name: _Given(texts, node.where)}
        if field.kind is not list and isinstance(value, str):
            return {name: _Given(value, node.where)}
        _refuse_type(field, value, node.where)
    if name and name not in sections():
        _refuse_name(name, node.where)
    if value is None and name:
        return {}
    if not isinstance(value, dict):
        example = next(each for each in fields() if each.startswith(name + "."))
        raise UserError(f"{node.where}: {name} is a section; set a field of it, such as {example}.")
    found: dict[str, _Given] = {}
    for key, child in value.items():
        found |= _flat(child, f"{name}.{key}" if name else key)
    return found


def _preset(given: dict[str, _Given]) -> dict[str, _Given]:
    """Return the fields that the preset sets."""
    if "model.preset" not in given:
        return {}
    name = str(given["model.preset"].value)
    _check(fields()["model.preset"], name, given["model.preset"].where)
    if not name:
        return {}
    rate = PRESET_RATES[name]
    values = {f"model.{each}": getattr(PRESETS[name], each) for each in PRESET_FIELDS}
    values |= {"optimizer.learning_rate": rate, "schedule.warmup": round(rate / _FIRST_RATE)}
    return {each: _Given(str(value), f"preset {name}") for each, value in values.items()}


def _resolve_references(config: Any, given: dict[str, _Given]) -> None:
    """Put every value in its field: plain ones first, then those that refer to them, and so on."""
    waiting = dict(given)
    while waiting:
        ready = [name for name, item in waiting.items() if not waiting.keys() & set(_references(item))]
        if not ready:
            name, item = next(iter(waiting.items()))
            raise UserError(f"{item.where}: {name} refers to itself, directly or through another field.")
        settled = {name: _substitute(config, name, waiting.pop(name)) for name in ready}
        for name, item in settled.items():
            _assign(config, fields()[name], item)


def _references(item: _Given) -> list[str]:
    return re.findall(REFERENCE, "\n".join(item.value) if isinstance(item.value, list) else item.value)


def _substitute(config: Any, name: str, item: _Given) -> _Given:
    def referred(match: re.Match[str]) -> str:
        target = fields().get(match[1])
        if target is None:
            _refuse_name(match[1], item.where)
        if target.kind is list:
            raise UserError(f"{item.where}: {name} refers to the list {target.name}; refer to a field of one value.")
        value = OmegaConf.select(config, target.name)
        return str(value).lower() if target.kind is bool else str(value)

    def substitute(text: str) -> str:
        if len(text) <= _MOST_TEXT:
            text = re.sub(REFERENCE, referred, text)
        if "${" in text:
            raise UserError(f"{item.where}: {name} has a ${{ that is no plain reference, such as ${{model.width}}.")
        # OmegaConf would take ??? for a value that is yet to come.
        if len(text) > _MOST_TEXT or not text.isprintable() or text == "???":
            raise UserError(f"{item.where}: {name} must be at most {_MOST_TEXT} printable characters, and not ???.")
        return text

    if isinstance(item.value, list):
        return _Given([substitute(text) for text in item.value], item.where)
    return _Given(substitute(item.value), item.where)


def _assign(config: Any, field: Field, item: _Given) -> None:
    value: Any = item.value
    if field.kind is int:
        value = _whole(value)
    if value is None or (field.kind is bool and not re.fullmatch(_TRUTH, value)):
        _refuse_type(field, item.value, item.where)
    try:
        OmegaConf.update(config, field.name, value)
    except OmegaConfBaseException:
        _refuse_type(field, item.value, item.where)
    _check(field, OmegaConf.select(config, field.name), item.where)


def _whole(text: str) -> int | None:
    """A whole number, with k, M, G or T behind it where it is large.

    >>> _whole("1k"), _whole("1.5M"), _whole("2e3"), _whole("0.5")
    (1000, 1500000, 2000, None)
    """
    match = re.fullmatch(WHOLE, text)
    if match is None:
        return None
    value = Fraction(match[1].replace("_", "")) * _SCALES[match[2].lower()]
    return int(value) if value.denominator == 1 else None


def _check(field: Field, value: Any, where: str) -> None:
    """Refuse a value of the right type that its field rules out."""
    if field.choices and value not in field.choices:
        names = [str(name) for name in field.choices if name != ""]
        near = difflib.get_close_matches(str(value)[:80], names, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else "."
        listed = f"{', '.join(names[:-1])} or {names[-1]}"
        raise UserError(f"{where}: {field.name} is {shown(value)}; choose {listed}{hint}")
    if field.minimum is not None and value < field.minimum:
        raise UserError(f"{where}: {field.name} is {value}; it must be at least {field.minimum:g}.")
    if field.kind is int and not -(2**63) <= value < 2**63:
        raise UserError(f"{where}: {field.name} is too large; it must be below 2^63.")
    if field.kind is float and not math.isfinite(value):
        raise UserError(f"{where}: {field.name} is {value}; it must be a finite number.")


def _refuse_type(field: Field, value: Any, where: str) -> NoReturn:
    raise UserError(f"{where}: {field.name} is {shown(value)}; it must be {_KINDS[field.kind]}.")


def _refuse_name(name: str, where: str) -> NoReturn:
    """Say that there is no such field, and which is the nearest: by its whole name and by its last part."""
    if name == "base":
        raise UserError(f"{where}: base stands at the top of a file; give the file itself, or write one that names it.")

    def likeness(other: str) -> float:
        parts = (name[:80], other), (name[:80].split(".")[-1], other.split(".")[-1])
        return sum(difflib.SequenceMatcher(None, *part).ratio() for part in parts)

    nearest = find_field(name) or max(("base", *sections(), *fields()), key=likeness)
    near = find_field(name) or likeness(nearest) > 1.2
    hint = f"did you mean {nearest}?" if near else "`tilewright config show` lists them all."
    raise UserError(f"{where}: there is no field {word(name)}; {hint}")
