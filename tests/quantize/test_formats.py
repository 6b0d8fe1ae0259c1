import pytest
import torch

from tilewright.errors import UserError
from tilewright.quantize import Fp8, Int4, Int8
from tilewright.quantize.formats import format_of

FORMATS = (Int8(), Fp8(), Int4(group=32), Int4(group=64, zeros=True), Int4(), Int4(zeros=True, group=32, search=True))
# How far a weight of normal numbers may be from what it becomes: half a step of the range, over sqrt(3).
ERRORS = {"int8": 0.012, "fp8": 0.03, "int4": 0.14}


def weights():
    torch.manual_seed(0)
    weight = torch.randn(24, 256)
    weight[3], weight[4, 128:], weight[5, 7] = 0.0, 0.0, 100.0
    weight[6] = weight[6].abs() + 1  # all on one side
    return weight


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_what_is_stored_is_stored_again_as_it_is(kind):
    packed = kind.quantize(weights().bfloat16())
    kind.check(packed, 24, 256)
    matrix = kind.dequantize(packed)
    assert torch.equal(matrix[3], torch.zeros(256)), "a row of zeros"
    again = kind.quantize(matrix)
    if not kind.search and not getattr(kind, "zeros", False):  # whose largest number need not be one of those there
        assert torch.equal(kind.dequantize(again), matrix) or kind.name == "int4"
    assert format_of(kind.options()).options() == kind.options()


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_a_weight_is_rounded_to_the_nearest_number_that_its_scale_allows(kind):
    weight = weights()
    packed = kind.quantize(weight)
    error = (kind.dequantize(packed) - weight).abs()
    rows = [0, 1, 2]
    assert (error[rows].norm() / weight[rows].norm()).item() < ERRORS[kind.name]
    if kind.search:
        return  # which clips
    if kind.name == "int4":
        allowed = packed["scale"].t().float().repeat_interleave(kind.group, 1)
        half = 0.5 + kind.zeros  # the zero point is rounded, and what that cuts off is clipped
    else:
        allowed, half = packed["scale"][:, None].expand(24, 256), 0.5 if kind.name == "int8" else 16.0
    assert (error <= half * allowed * 1.02 + 1e-6).all()


def test_int8_represents_its_own_numbers_exactly():
    codes = torch.randint(-127, 128, (5, 9)).float()
    codes[:, 0] = 127
    packed = Int8().quantize(codes * 0.25)
    assert torch.equal(packed["weight"].float(), codes) and torch.equal(Int8().dequantize(packed), codes * 0.25)


def test_int4_lays_halves_of_a_span_into_bytes():
    codes = torch.arange(128) % 16
    codes[::16] = 15  # the largest of each group and its half
    packed = Int4(group=64).quantize((codes - 8.0)[None])
    weight = packed["weight"][0].long()
    assert torch.equal(packed["scale"], torch.ones(2, 1).bfloat16())
    assert torch.equal(weight[:32] & 15, codes[:32]) and torch.equal(weight[:32] >> 4, codes[32:64])
    assert torch.equal(weight[32:] & 15, codes[64:96]) and torch.equal(weight[32:] >> 4, codes[96:])
    small = Int4(group=32).quantize((codes - 8.0)[None])
    assert torch.equal(small["weight"], packed["weight"]) and small["scale"].shape == (4, 1)


def test_a_searched_scale_is_never_worse_and_better_for_a_row_with_an_outlier():
    weight = weights()
    for plain, searched in ((Int8(), Int8(search=True)), (Int4(), Int4(search=True)), (Fp8(), Fp8(search=True))):
        errors = [(kind.dequantize(kind.quantize(weight)) - weight).square().sum(1) for kind in (plain, searched)]
        assert (errors[1] <= errors[0] * 1.0001).all()
    weight = torch.randn(4, 128)
    weight[:, 0] = 6.0
    plain, searched = ((kind.dequantize(kind.quantize(weight)) - weight).norm() for kind in (Int4(), Int4(search=True)))
    assert searched < 0.97 * plain


@pytest.mark.parametrize("kind", (Int8(), Fp8(), Int4()), ids=str)
@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (torch.tensor([[1.0, float("nan")]]).repeat(1, 64), "NaN or Inf"),
        (torch.tensor([[1.0, float("inf")]]).repeat(1, 64), "NaN or Inf"),
        (torch.full((2, 128), 1e300, dtype=torch.float64), "NaN or Inf"),
        (torch.ones(128), "needs a matrix"),
        (torch.ones(2, 128, dtype=torch.int8), "is torch.int8"),
        (torch.ones(2, 128, device="meta"), "meta device"),
    ],
)
def test_a_weight_that_cannot_be_quantized_is_refused(kind, weight, says):
    with pytest.raises(UserError, match=says):
        kind.quantize(weight)


def test_inputs_that_the_group_does_not_divide_are_refused_with_what_to_do():
    with pytest.raises(UserError, match=r"192 inputs, no multiple of 128, .* choose group=64\."):
        Int4().quantize(torch.ones(2, 192))
    with pytest.raises(UserError, match="leave this layer out, or take int8"):
        Int4(group=32).quantize(torch.ones(2, 96))
    with pytest.raises(UserError, match="choose 32, 64 or 128"):
        Int4(group=48)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"format": "int3", "version": 1}, "'int3', which is unknown; known are int8, fp8, int4"),
        ({"format": ["int8"], "version": 1}, "is unknown"),
        ("int8", "is unknown"),
        ({"format": "int8", "version": 2}, "version 2 of int8"),
        ({"format": "int4", "version": 1, "group": 64}, "does not say zeros of int4"),
        ({"format": "int4", "version": 1, "group": 7, "zeros": False}, "group of int4 is 7"),
        ({"format": "int4", "version": 1, "group": 64, "zeros": "no"}, "zeros of int4 is 'no'"),
        ({"format": "int8", "version": 1, "group": 64}, "group"),
    ],
)
def test_an_unknown_format_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        format_of(options)


def test_tensors_that_are_not_the_format_s_are_refused():
    for kind in (Int8(), Fp8(), Int4(zeros=True)):
        packed = kind.quantize(weights())
        for part in packed:
            with pytest.raises(UserError, match=f"{part} of the layer is missing"):
                kind.check({name: tensor for name, tensor in packed.items() if name != part}, 24, 256)
            with pytest.raises(UserError, match=f"{part} of the layer is torch"):
                kind.check(
                    {**packed, part: packed[part][:1, :1] if packed[part].ndim > 1 else packed[part][:1]}, 24, 256
                )
        for bad in (0.0, float("nan"), float("inf")):
            scale = packed["scale"].clone()
            scale.view(-1)[3] = bad
            with pytest.raises(UserError, match="A scale of the layer is 0, NaN or Inf"):
                kind.check({**packed, "scale": scale}, 24, 256)
    packed = Int4(zeros=True).quantize(weights())
    packed["zero"][0, 0] = 16
    with pytest.raises(UserError, match="zero point of the layer is above 15"):
        Int4(zeros=True).check(packed, 24, 256)
    packed = Fp8().quantize(weights())
    packed["weight"].view(torch.uint8)[0, 0] = 0xFF
    with pytest.raises(UserError, match="is NaN"):
        Fp8().check(packed, 24, 256)
