"""The matmuls of a decoder out of quantized layers, in their formats: several layers of theirs are one of ours."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from tilewright.models.folder import Saved, open_tensors
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.ops.quantized_linear.reference import MIDDLE
from tilewright.quantize.folder import Stored, open_quantized
from tilewright.quantize.formats.words import Read


class SideBySide(nn.Module):
    """Layers of the same input, whose outputs lie behind one another: what cannot be one layer, since its formats or
    orders differ.

    >>> SideBySide([nn.Linear(4, 2), nn.Linear(4, 3)])(torch.ones(1, 4)).shape
    torch.Size([1, 5])
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


def open_folder(
    folder: Path, is_quantized: bool, names: Container[str], opened: ExitStack
) -> tuple[dict[str, Saved], dict[str, Stored]]:
    """(the tensors of no quantized layer, the quantized layers) of a folder; spare ones only where `names` has them."""
    if not is_quantized:
        return open_tensors(folder, opened), {}
    found = open_quantized(folder, opened)
    plain = {name: saved for name, saved in found.plain.items() if name in names or name not in found.spare}
    return plain, found.layers


def make_layer(
    names: Sequence[str], stored: Mapping[str, Stored], saved: Mapping[str, Saved], has_bias: bool,
    device: torch.device | str, dtype: torch.dtype, is_transposed: bool,
) -> nn.Module:  # fmt: skip
    """One matmul out of the layers with these names, of which at least one is quantized.

    `is_transposed`: the weights of the others are (in, out).
    """
    biases = [saved[f"{name}.bias"].load() for name in names] if has_bias else []

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype, copy=True)

    reads = [stored[name].read() if name in stored else None for name in names]
    whole = [read for read in reads if read is not None]
    if len(whole) == len(reads) and all(_go_together(whole[0], read) for read in whole):
        return _quantized(whole, move(torch.cat(biases)) if biases else None, device)
    layers: list[nn.Module] = []
    for place, (name, read) in enumerate(zip(names, reads, strict=True)):
        bias = move(biases[place]) if biases else None
        if read is None:
            weight = saved[f"{name}.weight"].load()
            layers.append(_plain(move(weight.t() if is_transposed else weight).contiguous(), bias))
        else:
            layers.append(_quantized([read], bias, device))
    return SideBySide(layers).requires_grad_(False).eval()


def _go_together(first: Read, other: Read) -> bool:
    """Whether two layers of the same input can be one: the same format, groups and order of inputs."""
    one, two = first.packed["scale"], other.packed["scale"]
    groups = one.ndim < 2 or len(one) == len(two)
    if first.format.name != other.format.name or one.dtype != two.dtype or not groups:
        return False
    if first.order is None or other.order is None:
        return first.order is other.order
    return torch.equal(first.order, other.order)


def _quantized(reads: Sequence[Read], bias: Tensor | None, device: torch.device | str) -> nn.Module:
    """The layers behind one another. Zero points, where only some have them, are 8 in the others."""
    outputs = 1 if reads[0].packed["scale"].ndim == 2 else 0  # of scales and zero points
    scale = torch.cat([read.packed["scale"] for read in reads], outputs)
    zero = None
    if any("zero" in read.packed for read in reads):
        middle = [torch.full_like(read.packed["scale"], MIDDLE, dtype=torch.uint8) for read in reads]
        zero = torch.cat([read.packed.get("zero", other) for read, other in zip(reads, middle, strict=True)], outputs)
    weight = torch.cat([read.packed["weight"].view(torch.uint8) for read in reads])
    layer = QuantizedLinear(weight.view(reads[0].packed["weight"].dtype), scale, zero, bias, reads[0].order)
    return layer.to(device).requires_grad_(False).eval()


def _plain(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight)
    if bias is not None:
        layer.bias = nn.Parameter(bias)
    return layer
