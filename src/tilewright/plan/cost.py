"""What an op cannot avoid: the fewest floating-point operations and the fewest bytes through device memory.

Each op's formula stands here once, without torch. The op re-exports it as `cost`, its benchmark divides by it to
print "% of limit", and the planner's roofline reads it, so the three cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of one call, each input read once and each output written once.

    >>> Cost(flops=10, bytes_read=6, bytes_written=2).bytes
    8
    """

    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    def floor_seconds(self, bytes_per_second: float, flops_per_second: float = float("inf")) -> float:
        """The time below which no implementation can go on a device with these rates.

        >>> Cost(flops=0, bytes_read=3000, bytes_written=1000).floor_seconds(bytes_per_second=4000.0)
        1.0
        """
        return max(self.bytes / bytes_per_second, self.flops / flops_per_second)


def dropout_add_norm(
    rows: int,
    width: int,
    *,
    x_bytes: int = 2,
    residual_bytes: int = 2,
    out_bytes: int | None = None,
    has_residual: bool = True,
    backward: bool = False,
    dropout: bool = True,
) -> Cost:
    """Dropout, residual add and a norm over `rows` rows, prenorm (the new residual is an output).

    Forward reads x and the residual and writes the output and the new residual. Backward reads the two incoming
    gradients and the saved residual and writes the gradients of x and of the residual. Without dropout and with
    one dtype those two gradients are the same numbers, and one tensor serves as both. Row statistics, the weight
    and the bias are of a lower order and left out.

    >>> dropout_add_norm(1, 1).bytes, dropout_add_norm(1, 1, backward=True).bytes
    (8, 10)
    >>> dropout_add_norm(1, 1, backward=True, dropout=False).bytes
    8
    """
    n = rows * width
    out_bytes = x_bytes if out_bytes is None else out_bytes
    if not backward:
        read = x_bytes + (residual_bytes if has_residual else 0)
        return Cost(flops=9 * n, bytes_read=read * n, bytes_written=(out_bytes + residual_bytes) * n)
    shared = has_residual and not dropout and x_bytes == residual_bytes
    written = x_bytes + (residual_bytes if has_residual and not shared else 0)
    return Cost(flops=14 * n, bytes_read=(out_bytes + 2 * residual_bytes) * n, bytes_written=written * n)
