"""What a rule keeps of a parameter, and in how many bits.

States. float32; bfloat16, rounded stochastically, because a mean that moves by a thousandth a step never leaves its
place when it is rounded to nearest; or 8 bits, in blocks of 256 elements in memory's order that share a float32 scale,
the largest magnitude among them:

    int8    m = scale * sign(q) * (q / 127)^2      q = -127 ... 127     smallest: scale / 16,129
    uint8   v = scale * (q / 255)^4                q =    0 ... 255     smallest: scale / 4.2e9

Powers put many codes near zero, where most moments are, and take two square roots and no table. For m a cube would
reach lower, yet the square has less error: 1.0 to 1.1 % of the root mean square of the moments of a small language
model, against 1.3 %. Between two codes stochastic rounding chooses by a probability that is linear in the value, so
that the mean of what is stored is what was to be stored; only a v above 0 is never stored as 0, because the m above it
would then be divided by nothing but eps. Tensors below 4,096 elements keep float32 states.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from tilewright.errors import UserError
from tilewright.runtime import dispatch
from tilewright.runtime.philox import words

BLOCK = 256  # elements that share the scale of their 8-bit codes
TILE = 4 * BLOCK  # of a program
SMALL = 4096  # below so many elements 8 bits save nothing worth their noise
MOMENTS = {"adamw": ("mean", "square"), "lion": ("mean",), "sgd": ("mean",), "adafactor": ()}
ROUNDINGS = ("nearest", "kahan", "stochastic")
_CODES = {"mean": torch.int8, "square": torch.uint8}
_WORD = 0xFFFFFFFF


def new_state(
    parameter: torch.Tensor, rule: str, dtype: torch.dtype | None = torch.float32, rounding: str = "nearest"
) -> dict[str, torch.Tensor]:
    """What a rule keeps of a parameter, before its first step; every value is a tensor.

    Args:
        dtype: of the moments: float32, bfloat16, int8 for 8-bit codes, or None for the dtype of the parameter.
        rounding: of a bfloat16 parameter; only "kahan" keeps anything.

    >>> state = new_state(torch.zeros(64, 100), "adamw", torch.int8)
    >>> {name: (str(value.dtype), tuple(value.shape)) for name, value in state.items() if "square" in name}
    {'square': ('torch.uint8', (64, 100)), 'square_scale': ('torch.float32', (25,))}
    """
    if parameter.dtype not in (torch.float32, torch.bfloat16):
        raise UserError(f"optimizer: a parameter is {parameter.dtype}; convert the model to float32 or bfloat16.")
    if type(parameter) not in dispatch.PLAIN:
        raise UserError(f"optimizer: a parameter is a {type(parameter).__name__}; give plain tensors.")
    zeros = functools.partial(torch.zeros, device=parameter.device)
    state = {"step": zeros((), dtype=torch.float32)}
    kind = parameter.dtype if dtype is None else dtype
    if kind == torch.int8 and parameter.numel() < SMALL:
        kind = torch.float32
    for name in MOMENTS[rule]:
        state[name] = zeros(parameter.shape, dtype=_CODES[name] if kind == torch.int8 else kind)
        if kind == torch.int8:
            state[f"{name}_scale"] = zeros(-(-parameter.numel() // BLOCK), dtype=torch.float32)
    if rule == "adafactor" and parameter.dim() > 1:
        *batch, rows, columns = parameter.shape
        state["row"] = zeros((*batch, rows, 1), dtype=torch.float32)
        state["column"] = zeros((*batch, 1, columns), dtype=torch.float32)
    elif rule == "adafactor":
        state["square"] = zeros(parameter.shape, dtype=torch.float32)
    if rounding == "kahan" and parameter.dtype == torch.bfloat16:
        state["compensation"] = zeros(parameter.shape, dtype=torch.bfloat16)
    return state


def random_bits(seed: int, step: torch.Tensor, stream: int, elements: int) -> torch.Tensor:
    """16 random bits an element, those that the kernel draws: Philox-4x32 with seven rounds."""
    group = torch.arange(-(-elements // 8), device=step.device)
    drawn = words(seed, group & _WORD, group >> 32, step.long().expand_as(group), torch.full_like(group, stream))
    return torch.stack((drawn & 0xFFFF, drawn >> 16), -1).flatten()[:elements]


def to_bfloat16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Stochastically rounded by 16 random bits an element."""
    cut = (x.view(torch.int32) + bits.view(x.shape).int() >> 16 << 16).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).bfloat16()


def _share(code: torch.Tensor, levels: int) -> torch.Tensor:
    share = code * (1.0 / levels)
    return share.square() if levels == 127 else share.square().square()


def encode(x: torch.Tensor, dtype: torch.dtype, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit codes of a float32 tensor (int8: with a sign; uint8: of numbers from 0 on) and the scale of each block.

    >>> codes, scale = encode(torch.tensor([0.0, -1.0, 4.0]), torch.int8, torch.zeros(3))
    >>> codes.tolist(), scale.tolist(), decode(codes, scale).tolist()[::2]
    ([0, -64, 127], [4.0], [0.0, 4.0])
    """
    levels = 127 if dtype == torch.int8 else 255
    blocks = F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    draws = F.pad(bits.float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    share = blocks.abs() / torch.where(scale > 0, scale, 1.0)
    root = share.sqrt() if levels == 127 else share.sqrt().sqrt()
    low = (root * levels).floor().clamp(max=levels - 1)
    below, above = _share(low, levels), _share(low + 1, levels)
    code = low + (draws < (share - below) / (above - below) * 65536)
    code = torch.where(blocks < 0, -code, code) if levels == 127 else code.clamp(min=1) * (blocks > 0)
    return code.flatten()[: x.numel()].view(x.shape).to(dtype), scale.flatten()


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the codes stand for, in float32."""
    flat = codes.flatten().float()
    share = _share(flat.abs(), 127 if codes.dtype == torch.int8 else 255)
    share = share * scale.repeat_interleave(BLOCK)[: codes.numel()]
    return torch.where(flat < 0, -share, share).view(codes.shape)


def unpacked(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A moment in float32, whatever it is stored in."""
    codes = state[name]
    return codes.float() if codes.is_floating_point() else decode(codes, state[f"{name}_scale"])
