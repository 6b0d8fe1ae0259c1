"""Where the verdict of a proof turns: as far off as rounding explains is accepted, the next number is not."""

import dataclasses
import math

import pytest
import torch

from tilewright.measure.numerics import tolerance
from tilewright.tune.proof.verdict import FACTOR, Distance, Key, Seen, at_its_own_size, judge
from tilewright.tune.store.proof import Layer, Proof

KEY = {kind: Key(kind, "block", "weight") for kind in ("output", "gradient")}
SIZE, ERROR, REDUCED = 1.0, 2.0**-10, 64
FLOOR = tolerance(torch.float32, REDUCED)


def seen(error, losses=(4.0, 3.0), kind="output"):
    distances = {key: Distance(0.0, SIZE, 1) for key in KEY.values()} | {KEY[kind]: Distance(error, SIZE, 1)}
    return Seen(distances=distances, losses=list(losses))


def verdict(found, plain, design=""):
    reference = Seen(tensors={key: torch.ones(1) for key in KEY.values()}, losses=[4.0, 3.0])
    return judge(reference, plain, found, reduced=REDUCED, precision="bf16", design=design).verdict


@pytest.mark.parametrize("kind", KEY)
def test_a_tensor_at_its_limit_is_right_and_one_beyond_it_is_wrong(kind):
    plain = seen(ERROR, kind=kind)
    limit = FACTOR * ERROR + FLOOR * SIZE
    assert verdict(seen(limit, kind=kind), plain) == "same within rounding"
    assert verdict(seen(math.nextafter(limit, 1), kind=kind), plain) == "wrong"
    assert verdict(seen(math.nan, kind=kind), plain) == verdict(seen(math.inf, kind=kind), plain) == "wrong"


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_loss_at_its_limit_is_right_and_one_beyond_it_is_wrong(step, sign):
    plain = seen(0.0, losses=(4.0, 3.0 + 2.0**-6))
    limit = FACTOR * 2.0**-6 + tolerance(torch.float32, REDUCED * 2) * 4.0
    for distance, expected in ((0.999999 * limit, "same within rounding"), (1.000001 * limit, "wrong")):
        losses = [4.0, 3.0]
        losses[step] += sign * distance
        assert verdict(seen(0.0, losses=losses), plain) == expected


def test_a_design_may_stray_no_further_than_float32_moves_by_itself():
    plain = seen(0.0, losses=(4.0, 9.0))
    floor = tolerance(torch.float32, REDUCED * 2) * 4.0
    for distance, expected in ((0.999999 * (1 + floor), "different by design"), (1.000001 * (1 + floor), "wrong")):
        assert verdict(seen(0.0, losses=(4.0, 3.0 + distance)), plain, design="8-bit states") == expected


def test_at_its_own_batch_a_loss_at_the_limit_is_right_and_one_beyond_it_is_wrong():
    layer = Layer("block", 0.0, 2.0**-9, 0.0, 0.0)
    proof = Proof(
        "same within rounding", "", [layer], {"standard": [4.0, 3.0 + 2.0**-6], "float32": [4.0, 3.0], "best": []}
    )
    limit = FACTOR * 2.0**-6 + (1e-3 + FACTOR * layer.output_standard) * 8.0
    for distance, expected in ((0.999999 * limit, "same within rounding"), (1.000001 * limit, "wrong")):
        assert at_its_own_size(proof, [8.0], [8.0 + distance]).verdict == expected
    design = dataclasses.replace(proof, verdict="different by design")
    assert at_its_own_size(design, [8.0, 8.0], [8.0, 9.0]).verdict == "different by design"  # its own path by then
    assert at_its_own_size(proof, [8.0, 8.0], [8.0, 9.0]).verdict == "wrong"
