"""Ops for `compare` to stumble over, in processes that import them by name."""

import os
import time

from tilewright.bench.drawing import Op
from tilewright.plan.cost import Cost


def _ours(shape, x):
    rows = x.shape[0]
    if rows == 2:
        raise ValueError("no such kernel")
    if rows == 3:
        os._exit(7)
    if rows == 5:
        time.sleep(600)
    return x * 2


def _slow(shape, x):
    time.sleep(0.02 if x.shape[1] == 7 else 0.0)
    return x * 2


def _op(ours, eager):
    return Op(
        lambda rng, scale: {"dtype": "fp32", "width": rng.randint(1, 9)},
        lambda case, make: [make(case["rows"], case["width"])],
        ours,
        eager,
        lambda case: Cost(0, 4 * case["rows"] * case["width"], 4 * case["rows"] * case["width"]),
        ((0,),),
        {"width": 8},
    )


def _plain(shape, x):
    return x * 2


OPS = {"faulty": _op(_ours, _plain), "slow": _op(_slow, _plain), "plain": _op(_plain, _plain)}


def cases(op, width, rows):
    return [{"op": op, "dtype": "fp32", "width": width, "rows": each} for each in rows]
