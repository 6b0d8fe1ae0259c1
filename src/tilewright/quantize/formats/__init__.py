"""Weight formats, one file each: the layout of the bits, and how floats become them.

    Int8()                      one byte a weight, a scale for each output
    Fp8()                       a float of 8 bits (e4m3), a scale for each output
    Int4(group=128)             four bits, a scale and, with zeros=True, a zero point for each group of inputs

A format quantizes a matrix to named tensors, `dequantize`s them, and says what of theirs cannot be right.
"""

from tilewright.quantize.formats.base import Format, Packed
from tilewright.quantize.formats.fp8 import Fp8
from tilewright.quantize.formats.int4 import Int4
from tilewright.quantize.formats.int8 import Int8
from tilewright.quantize.formats.lookup import FORMATS, format_of

__all__ = ["FORMATS", "Format", "Fp8", "Int4", "Int8", "Packed", "format_of"]
