"""Layers of GPTQ and AWQ, packed here code by code, as their formats say."""

import pytest
import torch

from tilewright.errors import UserError
from tilewright.ops import int4_linear
from tilewright.quantize.formats.awq import ORDER, read_awq
from tilewright.quantize.formats.gptq import read_gptq

WIDE = 2**32


def pack(codes, dimension, order=range(8)):
    """Eight codes a word, along a dimension."""
    rows = codes.movedim(dimension, -1).unflatten(-1, (-1, 8)).long()
    words = sum(rows[..., code] << 4 * place for place, code in enumerate(order))
    return torch.where(words >= WIDE // 2, words - WIDE, words).to(torch.int32).movedim(-1, dimension)


def numbers(inputs=256, outputs=24, group=64, zeros=True):
    torch.manual_seed(inputs + group)
    codes = torch.randint(16, (inputs, outputs))
    zero = torch.randint(16, (inputs // group, outputs)) if zeros else torch.full((inputs // group, outputs), 8)
    return codes, zero, (torch.rand(inputs // group, outputs) + 0.1).half()


def definition(codes, zero, scale, index):
    """(out, in), exact in float64."""
    return (scale.double()[index] * (codes - zero[index]).double()).t()


def check(read, truth):
    """The packed layer is the definition, its inputs in the order that it says, in the kernel too."""
    order = torch.arange(truth.shape[1]) if read.order is None else read.order
    assert torch.equal(read.format.dequantize(read.packed, torch.float64), truth[:, order])
    x = torch.randn(3, truth.shape[1], dtype=torch.float64)
    y = int4_linear(x[:, order], read.packed["weight"], read.packed["scale"], read.packed.get("zero"))
    assert torch.allclose(y, x @ truth.t())


@pytest.mark.parametrize("v2", (False, True))
@pytest.mark.parametrize(("inputs", "group"), ((256, 64), (256, 32), (256, 128), (256, 256), (64, 64)))
def test_a_gptq_layer_is_read(inputs, group, v2):
    codes, zero, scale = numbers(inputs, group=group)
    tensors = {"qweight": pack(codes, 0), "qzeros": pack(zero if v2 else (zero - 1) & 15, 1), "scales": scale}
    index = torch.arange(inputs) // group
    for extra in ({}, {"g_idx": index.int()}):
        read = read_gptq(tensors | extra, v2=v2)
        assert read.order is None and read.format.group == min(group, 128) and read.format.zeros
        check(read, definition(codes, zero, scale, index))


def test_act_order_brings_the_inputs_of_a_group_together():
    codes, zero, scale = numbers()
    index = (torch.arange(256) // 64)[torch.randperm(256)]
    tensors = {"qweight": pack(codes, 0), "qzeros": pack(zero, 1), "scales": scale, "g_idx": index.int()}
    read = read_gptq(tensors, v2=True)
    assert read.order.sort().values.equal(torch.arange(256)) and not read.order.equal(torch.arange(256))
    check(read, definition(codes, zero, scale, index))


@pytest.mark.parametrize(("inputs", "group"), ((256, 64), (192, 32), (256, 128)))
def test_an_awq_layer_is_read(inputs, group):
    codes, zero, scale = numbers(inputs, group=group)
    read = read_awq({"qweight": pack(codes, 1, ORDER), "qzeros": pack(zero, 1, ORDER), "scales": scale})
    assert read.order is None and read.format.group == group
    check(read, definition(codes, zero, scale, torch.arange(inputs) // group))


def test_a_symmetric_layer_has_no_zero_points():
    codes, zero, scale = numbers(zeros=False)
    read = read_gptq({"qweight": pack(codes, 0), "qzeros": pack(zero - 1, 1), "scales": scale})
    assert not read.format.zeros and set(read.packed) == {"weight", "scale"}
    check(read, definition(codes, zero, scale, torch.arange(256) // 64))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"qweight": None}, "qweight of layer is missing"),
        ({"qweight": torch.zeros(32, 24)}, "qweight of layer is torch.float32"),
        ({"qzeros": torch.zeros(4, 2, dtype=torch.int32)}, "do not go together"),
        ({"scales": torch.zeros(4, 24).half()}, "scale of layer is not above 0"),
        ({"scales": torch.full((4, 24), float("nan")).half()}, "scale of layer is not above 0"),
        ({"scales": torch.ones(3, 24).half(), "qzeros": torch.zeros(3, 3, dtype=torch.int32)}, "do not go together"),
        ({"scales": torch.ones(16, 24).half(), "qzeros": torch.zeros(16, 3, dtype=torch.int32)}, "groups of 16"),
        ({"g_idx": torch.zeros(256, dtype=torch.int32)}, "g_idx of layer does not give each of 4 groups"),
        ({"g_idx": torch.arange(256, dtype=torch.int32)}, "g_idx of layer"),
        ({"g_idx": -torch.arange(256, dtype=torch.int32)}, "g_idx of layer"),
        ({"g_idx": torch.zeros(3, dtype=torch.int32)}, "g_idx of layer"),
    ],
)
def test_what_is_not_such_a_layer_is_refused_in_one_sentence(change, says):
    codes, zero, scale = numbers()
    tensors = {"qweight": pack(codes, 0), "qzeros": pack(zero, 1), "scales": scale} | change
    with pytest.raises(UserError, match=says) as caught:
        read_gptq({key: tensor for key, tensor in tensors.items() if tensor is not None}, name="layer")
    assert "\n" not in str(caught.value)
