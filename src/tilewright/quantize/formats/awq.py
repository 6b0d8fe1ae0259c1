"""AWQ of 4 bits, in its version "gemm", as AutoAWQ stores a layer.

qweight  (in, out / 8)      int32    bits 4 i to 4 i + 3 of word [k, c]: the code of output 8 c + ORDER[i]
qzeros   (groups, out / 8)  int32    the zero points, likewise
scales   (groups, out)      float16  W[n, k] = scales[k // group, n] * (code[k, n] - zero[k // group, n])
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilewright.quantize.formats.gptq import FLOATS
from tilewright.quantize.formats.words import Read, part, to_int4, unpack_words

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = [ORDER.index(output) for output in range(8)]  # of each output in a word


def read_awq(tensors: Mapping[str, Tensor], *, name: str = "the layer") -> Read:
    """Read a layer's qweight, qzeros and scales.

    >>> words = torch.full((64, 1), 0x75316420, dtype=torch.int32)
    >>> layer = {"qweight": words, "qzeros": words[:1] * 0, "scales": torch.ones(1, 8).half()}
    >>> read = read_awq(layer)
    >>> read.format.dequantize(read.packed)[:, 0].tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    codes, zero = (
        unpack_words(part(tensors, key, (torch.int32,), 2, name))[..., _PLACES].flatten(1)
        for key in ("qweight", "qzeros")
    )
    known, packed = to_int4(codes, part(tensors, "scales", FLOATS, 2, name), zero, name)
    return Read(known, packed, None)
