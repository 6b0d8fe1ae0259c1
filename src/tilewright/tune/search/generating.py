"""A study of generating: what a run of it is, its levers, and what the plan predicts of it from bytes.

Decoding reads every weight once a forward, and every key and value so far: bytes over the memory's speed are the floor
of a step, and what is above the best run's time cannot win and is not tried. A prompt multiplies matrices: there FLOPs
are counted as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import UserError
from tilewright.tune.search.space import Point, Space
from tilewright.tune.store.record import Prediction

AIMS = ("decode", "prefill")
SAVED = "saved"  # of weights and of the cache: in the dtype that the model is in
_BITS = {"int8": 8.25, "fp8": 8.25, "int4": 4.3}  # a weight, with its scales
_CACHE_BYTES = {"int8": 1.0, "fp8": 1.0}
_READ = 1.1  # a memory is read so many times as fast as it is copied, at most
_REACHED = 0.8  # of it, by a decoding step
_LAUNCHES = 9  # of a layer
_HOST = 2.0  # launches of a bare op that an op of a model takes the host
_COMPILED = 0.7  # of the launches that are left
_WAITING = 2.4e-5  # seconds of a layer in which tiles wait for tiles, as `tilesync.simulate` has them of a model of 1B
_OVERLAPPED = 0.5  # of the time between kernels, which PDL hides, as a guess
_ACCEPTED = 0.15  # tokens more a forward for each doubling of a draft, as a guess
_UNPACKED = 8.0  # bytes that a CPU, which has no kernel, moves to unpack a weight
PROCESS_BYTES = 500 * 2**20


@dataclass(frozen=True)
class Generating:
    """One way to generate with a model: every field of a run."""

    model: str  # a folder
    aim: str = "decode"  # or "prefill"
    unit: str = "latency"  # of one text; "throughput": of all of a batch
    device: str = "cpu"
    dtype: str = ""  # as it was saved
    draft: str = ""  # the folder of a smaller model
    weights: str = SAVED
    kv_cache: str = SAVED
    graph: bool = False
    compile: str = "none"
    decode: str = "graph"  # or "tilesync": one graph of tiles a step
    pdl: bool = False  # kernels of a graph begin while the one before them ends
    batch: int = 1
    speculate: int = 0
    prompt: int = 128  # tokens
    tokens: int = 64  # that follow, of a step that is timed
    seed: int = 0
    content: str = ""  # of the folder, as a digest


LEVERS = ("weights", "kv_cache", "graph", "compile", "decode", "pdl", "batch", "speculate")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "weights": (SAVED, "int8", "fp8", "int4"), "kv_cache": (SAVED, "int8", "fp8"), "graph": (False, True),
    "compile": ("none", "default"), "decode": ("graph", "tilesync"), "pdl": (False, True), "batch": (1, 8, 32),
    "speculate": (0, 2, 4, 8),
}  # fmt: skip


@dataclass(frozen=True)
class GeneratingSpace(Space):
    """The runs around one way to generate; see `Space`."""

    start: Generating  # type: ignore[assignment]

    def at(self, point: Mapping[str, Any]) -> Generating:  # type: ignore[override]
        """The run at a point."""
        return dataclasses.replace(self.start, **point)

    def refusal(self, point: Mapping[str, Any]) -> str | None:
        """Why the levers of a point do not go together, or None."""
        run = self.at(point)
        if run.speculate and run.batch > 1:
            return "speculate works on one prompt at a time; leave batch at 1."
        plain = Generating("", batch=1)
        if run.decode == "tilesync":
            for name in ("kv_cache", "compile", "pdl", "batch", "speculate"):
                if getattr(run, name) != getattr(plain, name):
                    return f"decode=tilesync goes with {name}={getattr(plain, name)} alone."
        return None

    def parse(self, text: str) -> Point:
        """The point that `name=value`, or several with commas between, makes of the baseline."""
        point = self.baseline
        for name, value in parse_fields(text.split(",")).items():
            if name not in self.levers or value not in self.levers[name]:
                allowed = ", ".join(map(str, self.levers.get(name, self.levers)))
                raise UserError(f"{name} cannot be {value} here; choose from {allowed}.")
            point[name] = value
        if why := self.refusal(point):
            raise UserError(why)
        return point


def parse_fields(arguments: Sequence[str]) -> dict[str, Any]:
    """`name=value` for fields of a run, each of its type.

    >>> parse_fields(["batch=8", "graph=true"])
    {'batch': 8, 'graph': True}
    """
    found: dict[str, Any] = {}
    given = dataclasses.asdict(Generating(""))
    del given["model"], given["content"]
    for argument in arguments:
        name, equals, text = (part.strip() for part in argument.partition("="))
        if name not in given or not equals:
            raise UserError(f"{argument!r} is no field of generating; give NAME=VALUE with {', '.join(given)}.")
        default = given[name]
        try:
            kinds = {"true": True, "false": False}
            value: Any = kinds[text.lower()] if isinstance(default, bool) else type(default)(text)
        except (KeyError, ValueError):
            raise UserError(f"{name} is {text!r}; give a {type(default).__name__}.") from None
        if type(value) is int and value < (0 if name in ("speculate", "seed") else 1):
            raise UserError(f"{name} is {value}; give at least {0 if name in ('speculate', 'seed') else 1}.")
        if name in _CHOICES and isinstance(default, str) and value not in _CHOICES[name]:
            raise UserError(f"{name} is {value!r}; choose {', '.join(_CHOICES[name])}.")
        if name == "dtype" and value not in ("", "bf16", "fp16", "fp32"):
            raise UserError(f"dtype is {value!r}; choose bf16, fp16 or fp32, or leave it out.")
        found[name] = value
    return found


def open_generating(start: Generating, given: Sequence[str], quality: Mapping[str, Any]) -> GeneratingSpace:
    """The space around a run.

    Args:
        start: the run, whose device is "cuda" or "cpu".
        given: fields that the user has set, which stay.
        quality: by lever, the values that are good enough, or that there are on this machine.

    >>> found = open_generating(Generating("m"), ["batch"], {"weights": ["int8"], "kv_cache": []})
    >>> found.levers
    {'weights': ('saved', 'int8'), 'speculate': (0, 2, 4, 8)}
    """
    levers: dict[str, tuple[Any, ...]] = {}
    for name in LEVERS:
        values = _CHOICES[name]
        if name in quality:
            values = (values[0], *quality[name])
        if name in ("graph", "compile", "decode", "pdl") and (start.device == "cpu" or start.aim == "prefill"):
            values = ()
        if name == "speculate" and start.aim == "prefill":
            values = ()
        if name == "batch" and start.unit == "latency":  # which no batch makes shorter
            values = ()
        own = getattr(start, name)
        if name not in given and len(choices := tuple(dict.fromkeys((own, *values)))) > 1:
            levers[name] = choices
    if not levers:
        raise UserError("Every lever is set, or not good enough, so there is nothing to try; leave some out.")
    return GeneratingSpace(start, levers, start.device)  # type: ignore[arg-type]


def saved_weights(run: Generating, folder: Path) -> Path:
    """Where a study keeps the quantized weights of a run."""
    return folder / f"model-{run.weights}"


def tokens_of_step(run: Generating) -> int:
    """Tokens that count in one timed step: of one text where its latency is the aim, else of all."""
    rows = run.batch if run.unit == "throughput" else 1
    return rows * (run.prompt if run.aim == "prefill" else run.tokens)


def predict_generating(run: Generating, machine: Mapping[str, Any]) -> Prediction:
    """What to expect of a timed step: `tokens` of each text behind a prompt, or the prompt itself.

    >>> model = {"matmuls": 1e9, "element": 2, "other_bytes": 1e6, "layers": 16, "kv_heads": 8, "head_dim": 64,
    ...          "heads": 32, "quantized_bytes": 0}
    >>> machine = {"device": "cuda", "flops": {"bf16": 8e14}, "copy_bytes_per_second": 4e12, "launch_seconds": 4e-6,
    ...            "kernel_seconds": 1e-6, "model": model}
    >>> plain, small = (predict_generating(Generating("m", graph=True, weights=w), machine) for w in ("saved", "int4"))
    >>> small.seconds < plain.seconds, small.floor < small.seconds
    (True, True)
    """
    model, speed = machine["model"], _READ * machine["copy_bytes_per_second"]
    is_cpu = machine["device"] == "cpu"
    weights, cache = weight_bytes(run, model), cache_bytes(run, model)
    rate = machine["flops"].get("fp32" if model["element"] == 4 else "bf16", machine["flops"].get("fp32", 1e12))
    forwards, rows, context = 1.0, run.batch * run.prompt, run.prompt / 2
    least = 1.0
    if run.aim == "decode":
        accepted = 1.0 + _ACCEPTED * math.log2(1 + run.speculate)
        forwards, rows = run.tokens / accepted, run.batch * (run.speculate + 1)
        least, context = run.tokens / (run.speculate + 1), run.prompt + run.tokens / 2
    attention = 4 * rows * model["layers"] * model["heads"] * model["head_dim"] * context
    flops = (2 * model["matmuls"] * rows + attention) / rate
    read_keys = cache * context * run.batch if run.aim == "decode" else 0.0
    unpacked = _UNPACKED * model["matmuls"] if is_cpu and run.weights != SAVED else 0.0
    parts = {
        "weights": forwards * weights / speed / _REACHED, "cache": forwards * read_keys / speed / _REACHED,
        "matmul": forwards * max(0.0, flops - weights / speed), "unpacking": forwards * unpacked / speed,
    }  # fmt: skip
    launches = _LAUNCHES * model["layers"] * (_COMPILED if run.compile != "none" else 1.0)
    if run.decode == "tilesync":
        parts["idle"] = forwards * model["layers"] * _WAITING
    elif run.graph:
        parts["idle"] = forwards * launches * machine["kernel_seconds"] * (1 - _OVERLAPPED if run.pdl else 1)
    else:
        parts["idle"] = max(0.0, forwards * _HOST * launches * machine["launch_seconds"] - sum(parts.values()))
    floor = max(least * (weights + read_keys) / speed, least * (run.aim == "prefill") * flops)
    length = run.prompt + run.tokens + 16
    memory = {"weights": weights + model["other_bytes"], "cache": cache * length * run.batch}
    if is_cpu:
        memory["process"] = float(PROCESS_BYTES)
    return Prediction(sum(parts.values()), min(floor, sum(parts.values())), parts, sum(memory.values()), memory)


def weight_bytes(run: Generating, model: Mapping[str, Any]) -> float:
    """Bytes of weights that a forward reads."""
    if run.weights == SAVED:
        return float(model["quantized_bytes"] or model["matmuls"] * model["element"])
    return float(model["matmuls"] * _BITS[run.weights] / 8)


def cache_bytes(run: Generating, model: Mapping[str, Any]) -> float:
    """Bytes of the keys and values of one token."""
    each = _CACHE_BYTES.get(run.kv_cache, model["element"])
    head = each * model["head_dim"] + (4 if run.kv_cache in _CACHE_BYTES else 0)
    return float(2 * model["layers"] * model["kv_heads"] * head)
