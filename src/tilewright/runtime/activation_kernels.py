"""The activations of every kernel that has one, and their derivatives.

Arithmetic is in z's dtype, float32 or float64, and in powers of two; SIZE is the bytes of what z was loaded from.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY = tl.constexpr(0.3989422804014327)  # of the normal distribution at 0: 1 / sqrt(2 pi)
_TANH = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBIC = tl.constexpr(0.07135481627260025)  # 0.044715 times that


@triton.jit
def _reciprocal(x, SIZE: tl.constexpr):
    """1 / x for x >= 1: a division takes eight instructions, which 2-byte input has not the time for, nor the use."""
    if SIZE == 2:
        root = tl.rsqrt(x)
        result = root * root
    else:
        result = 1.0 / x
    return result


@triton.jit
def _sigmoid(z, TANH: tl.constexpr, SIZE: tl.constexpr):
    """z sigmoid(v) and its derivative, where v is z (SiLU), or 2 sqrt(2 / pi) (z + 0.044715 z^3): since sigmoid(2 u) is
    (1 + tanh(u)) / 2, that is the GELU by tanh."""
    if TANH:
        # Beyond 100 the sigmoid is 0 or 1, and a bound on z^2 keeps what multiplies that 0 finite.
        square = tl.minimum(z * z, 1e4)
        power = z * (-_LOG2E * _TANH - _LOG2E * _CUBIC * square)
        rate = _TANH + 3.0 * _CUBIC * square
    else:
        power = z * -_LOG2E
        rate = 1.0
    odds = tl.exp2(power)
    share = _reciprocal(1.0 + odds, SIZE)
    value = z * share
    # 1 - share, without the cancellation near 1; infinite odds times a share of 0 are no number.
    rest = tl.minimum(odds, 3e38) * share
    return value, share + value * rest * rate


@triton.jit
def _gelu(z, SIZE: tl.constexpr):
    """z Phi(z) and its derivative, where Phi is the normal distribution.

    In float32, Phi(-a) = exp(-a^2 / 2) P(1 / (1 + a / 4)) for a >= 0, with P fitted to 3e-8 of Phi: no
    branches as in erf, and the exponential is the density that the derivative needs.
    """
    if SIZE == 8:
        share = 0.5 + 0.5 * tl.erf(z * _SQRT_HALF)
        value = z * share
        bell = tl.exp2(z * z * (-0.5 * _LOG2E))
    else:
        distance = tl.minimum(tl.abs(z), 100.0)  # where Phi has long been 0 or 1
        bell = tl.exp2(distance * distance * (-0.5 * _LOG2E))
        t = _reciprocal(1.0 + 0.25 * distance, SIZE)
        p = 0.37506569016050123 - 0.0985788030617431 * t
        p = 0.3534818610361963 + t * (-0.33398548917354687 + t * p)
        p = 0.1284594409559957 + t * (-0.02040840618894091 + t * p)
        below = bell * (0.00023631722778313935 + t * (0.09572937277321934 + t * p))
        share = tl.where(z < 0.0, below, 1.0 - below)
        value = tl.maximum(z, 0.0, tl.PropagateNan.ALL) - distance * below
    return value, share + z * (bell * _DENSITY)


@triton.jit
def value_and_slope(z, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    """The activation of z and its derivative there."""
    if ACTIVATION == "gelu":
        pair = _gelu(z, SIZE)
    else:
        pair = _sigmoid(z, ACTIVATION == "gelu_tanh", SIZE)
    return pair


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
    """The activation of z alone, for epilogues; z itself where ACTIVATION is empty."""
    if ACTIVATION != "":
        z, _slope = value_and_slope(z, ACTIVATION, SIZE)
    return z
