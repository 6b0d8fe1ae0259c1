"""The verdict on a run beside the standard float32 model, from what both have shown.

A tensor may be twice as far from float32 as the standard run's is, or as that of its whole layer (a tensor of few
elements may be near by luck), and what float32 itself rounds off: the standard run in float32 has no error, and another
order of additions does. The loss may be too, and by as much of itself as the standard run's layers are off. The first
of these is measured, the second follows from the length of the sums: nothing is picked by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.measure.numerics import tolerance, ulp
from tilewright.tune.store.proof import VERDICTS, Layer, Proof

FACTOR = 2.0  # of the standard run's error: what attention kernels are accepted by


class Key(NamedTuple):
    """A tensor of a run: the output or the gradient of a layer, and which of them."""

    kind: str  # "output" or "gradient"
    layer: str
    what: str


class Distance(NamedTuple):
    """The root mean square distance of a tensor from float32's, the size of that, and a digest of the tensor's bits."""

    difference: float
    size: float
    elements: int
    rounding: float = 0.0  # to the tensor's own dtype, of its size
    bits: int = 0


_PART = 2**24  # elements that are digested at once
_GOLDEN, _MIXED = -0x61C8864680B583EB, -0x4B47D0C5A1F2B4D5  # odd, with bits everywhere, as 64-bit integers have them
_MISSING = Distance(math.inf, 0.0, 1)


@dataclass
class Seen:
    """What was recorded of a run: float32's tensors, and the distances of the other runs' tensors from them."""

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    distances: dict[Key, Distance] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    loss_dtype: torch.dtype = torch.float32
    random: bool = False  # another seed gave something else

    def at(self, key: Key) -> Distance:
        return self.distances.get(key, _MISSING)

    def error(self, keys: Iterable[Key]) -> float:
        """Return the error of all these tensors as if they were one."""
        found = [self.at(key) for key in keys]
        difference = sum(each.difference**2 * each.elements for each in found) ** 0.5
        return _ratio(difference, sum(each.size**2 * each.elements for each in found) ** 0.5)


def _ratio(difference: float, size: float) -> float:
    return difference / size if size else 0.0 if difference == 0 else math.inf


def distance(tensor: Tensor, reference: Tensor | None) -> Distance:
    """Return a tensor's distance from float32's, computed in float64 on the tensor's device.

    >>> distance(torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.ones(4))[:3]
    (2.0, 1.0, 4)
    """
    bits = _digest(tensor)
    if reference is None or reference.shape != tensor.shape:  # float32 has nothing of the kind
        return _MISSING._replace(bits=bits)
    truth, root = reference.to(tensor.device).double(), max(1, tensor.numel()) ** 0.5
    difference = torch.linalg.vector_norm(tensor.double() - truth).item() / root
    size = torch.linalg.vector_norm(truth).item() / root
    # An error is anywhere within half of a unit in the last place, on either side.
    return Distance(difference, size, tensor.numel(), ulp(tensor.dtype) / 12**0.5, bits)


def _digest(tensor: Tensor) -> int:
    """Hash the bits of a tensor, on its device.

    Each element times an odd number of its place, added up modulo 2^64: one that differs always shows, and of several
    the chance is 2^-64 that they make up for each other. To bring a large model's gradients to the host and to take
    their SHA-256 there took a third of its proof.

    >>> a, b = _digest(torch.tensor([1.0, 2.0])), _digest(torch.tensor([2.0, 1.0]))
    >>> a != b, _digest(torch.tensor([0.0])) != _digest(torch.tensor([-0.0])), a == _digest(torch.tensor([1.0, 2.0]))
    (True, True, True)
    """
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    found = tensor.numel()
    for number, part in enumerate(tensor.detach().contiguous().view(whole).reshape(-1).split(_PART)):
        place = torch.arange(number * _PART, number * _PART + len(part), device=part.device) * _GOLDEN
        place = (place ^ (place >> 29)) * _MIXED
        found += int((part.to(torch.int64) * ((place ^ (place >> 32)) | 1)).sum())
    return found % 2**64


def at_its_own_size(proof: Proof, given: Sequence[float], found: Sequence[float]) -> Proof:
    """A proof is of a small batch; losses on the same large ones must agree too: the proof, or that the run is wrong.

    They may differ by what the proof found rounding to do, and by a thousandth, which is what rounding in float32 has
    grown to after a few steps. Before the first update all rules of learning are the same.
    """
    if proof.verdict not in VERDICTS[:3]:
        return proof
    steps = 1 if proof.verdict == "different by design" else 8
    rounding = [abs(a - b) for a, b in zip(proof.losses["standard"], proof.losses["float32"], strict=False)]
    share = 1e-3 + FACTOR * (proof.layers[-1].output_standard if proof.layers else 0.0)
    for step, (a, b) in enumerate(zip(given[:steps], found[:steps], strict=False), 1):
        if abs(a - b) > FACTOR * max(rounding, default=0.0) + share * abs(a):
            why = f"at its own batch the loss of step {step} is {b:.4g}, and {a:.4g} in the baseline."
            return Proof("wrong", why, proof.layers, proof.losses)
    return proof


def judge(reference: Seen, plain: Seen, found: Seen, *, reduced: int, precision: str, design: str) -> Proof:
    """Judge the best run by what the three runs have shown.

    Args:
        reference, plain, found: the float32 run, the standard one, and the one that is judged.
        reduced: length of all sums that stand behind one another in a step.
        precision: of the latter two, as a word.
        design: what is meant to learn in another way than AdamW in float32 does; empty where nothing is.
    """
    groups: dict[str, dict[str, list[Key]]] = {}  # by layer, in the order in which they ran, and kind
    for key in [*reference.tensors, *found.distances]:
        kept = groups.setdefault(key.layer, {"output": [], "gradient": []})[key.kind]
        if key not in kept:
            kept.append(key)
    layers = [
        Layer(name, *(seen.error(group[kind]) for kind in ("output", "gradient") for seen in (found, plain)))
        for name, group in groups.items()
    ]
    losses = {"float32": reference.losses, "standard": plain.losses, "best": found.losses}
    # Of the loss: what it rounds off itself, and what the last layer brings along.
    last = [layer.output_standard for layer in layers if groups[layer.name]["output"]][-1:]
    rounding = tolerance(plain.loss_dtype, reduced * len(reference.losses)) + sum(last)
    if not all(map(math.isfinite, reference.losses)):
        verdict, why = "not proven", "the standard float32 model itself has a loss that is no number."
    elif wrong := _wrong_tensor(groups, plain, found, reduced) or _wrong_loss(losses, rounding, bool(design)):
        verdict, why = "wrong", wrong
    elif design:
        verdict, apart = "different by design", max(_apart(losses, "best"))
        why = f"{design}; layers are as they should be, and the loss stays within {apart:.2g} of float32's."
    elif (found.distances, found.losses) == (plain.distances, plain.losses):
        verdict, why = "bit-identical", f"outputs, gradients and losses are those of the standard model in {precision}."
    else:
        verdict = "same within rounding"
        why = f"layers, gradients and losses are as near to float32 as the standard model's in {precision}."
    return Proof(verdict, why, layers, losses)


def _wrong_tensor(groups: dict[str, dict[str, list[Key]]], plain: Seen, found: Seen, reduced: int) -> str | None:
    """Name the first tensor, in the order of computation, that is further off than it may be."""
    order = [group["output"] for group in groups.values()]
    order += [group["gradient"] for group in reversed(groups.values())]
    coarsest = max(each.rounding for each in plain.distances.values())
    for keys in order:
        # Rounding has the size of what is added up, not of the sum: a tensor that is next to nothing may be off by as
        # much as the largest of its layer.
        floor = tolerance(torch.float32, reduced) * max((found.at(key).size for key in keys), default=0.0)
        beyond = []
        for key in keys:
            (difference, size, _, rounding, _), other = found.at(key), plain.at(key)
            # What is rounded here may be rounded there by the op that reads it: autocast leaves norms in float32.
            early = rounding if other.rounding < rounding <= coarsest else 0.0
            own = max(math.hypot(other.difference, early * size), plain.error(keys) * size)
            limit = FACTOR * own + floor
            if not difference <= limit < math.inf:  # or one of them is no number
                beyond.append((_ratio(difference, limit), _ratio(difference, size), _ratio(limit, size), key))
        if beyond:
            _, error, limit, key = max(beyond)
            what = key.layer if key.kind == "output" else key.what
            return f"the {key.kind} of {what} is off by {error:.2g} of its size, where rounding explains {limit:.2g}."
    return None


def _apart(losses: Mapping[str, list[float]], which: str) -> list[float]:
    return [abs(own - other) for own, other in zip(losses[which], losses["float32"], strict=True)]


def _wrong_loss(losses: Mapping[str, list[float]], rounding: float, design: bool) -> str | None:
    """Name the first step whose loss is further off than it may be.

    Where another way of learning is meant, it still has to stay nearer to float32's loss than that moves by itself.
    """
    truth, apart = losses["float32"], _apart(losses, "best")
    floor = rounding * max(map(abs, truth))
    limit = FACTOR * max(_apart(losses, "standard")) + floor
    if design:
        limit = min(limit, max(truth) - min(truth) + floor)
    for step, distance in enumerate(apart, 1):
        if not distance <= limit < math.inf:
            return (
                f"the loss of step {step} is {losses['best'][step - 1]:.6g} and float32's {truth[step - 1]:.6g}, where "
                f"rounding explains a difference of {limit:.2g}."
            )
    return None
