"""The matmuls of a decoder in fewer bits, as it is loaded: round to nearest, nothing written."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from tilewright.errors import UserError
from tilewright.generate.decoder import Decoder
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.quantize.apply import quantize_
from tilewright.quantize.formats import Format, Fp8, Int4, Int8

WEIGHTS = ("int8", "fp8", "int4")
_SPAN = 64  # inputs that int4 packs together


def formats(name: str, inputs: Collection[int]) -> tuple[Format, Format]:
    """The formats of blocks, whose matmuls have so many inputs, and of the head: it chooses tokens, and has 8 bits.

    >>> [each.name for each in formats("int4", [4096])]
    ['int4', 'int8']
    """
    if name == "int4":
        odd = next((each for each in inputs if each % _SPAN), None)
        if odd is not None:
            raise UserError(f"int4 needs inputs that {_SPAN} divides and a matmul has {odd:,}; take int8 or fp8.")
        return Int4(group=128 if all(each % 128 == 0 for each in inputs) else _SPAN), Int8()
    if name not in WEIGHTS:
        raise UserError(f"weights is {name!r}; choose {', '.join(WEIGHTS)}, or leave it out.")
    both = Int8() if name == "int8" else Fp8()
    return both, both


def narrow(model: Decoder, name: str) -> Decoder:
    """Quantize a decoder in place, and return it: all matmuls of the blocks, and the head.

    >>> from tilewright.generate.config import of_gpt
    >>> from tilewright.plan.gpt import LLAMA, GPTConfig
    >>> model = Decoder(of_gpt(GPTConfig(width=32, layers=1, heads=2, vocabulary=64, sequence=16, **LLAMA)))
    >>> narrow(model, "int8").head
    QuantizedLinear(in_features=32, out_features=64, int8, bias=False)
    """
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        raise UserError("The model is quantized already; leave weights out.")
    body, head = formats(name, {each.in_features for each in model.blocks.modules() if isinstance(each, nn.Linear)})
    quantize_(model, body, lambda module, place: place != "head")
    quantize_(model, head, lambda module, place: place == "head")
    return model.requires_grad_(False).eval()
