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


def separate_dropout_add_norm(
    rows: int, width: int, *, x_bytes: int = 2, residual_bytes: int = 2, backward: bool = False, dropout: bool = True
) -> Cost:
    """The same by three ops, one after the other, each reading and writing memory; a mask of one byte is stored.

    >>> separate_dropout_add_norm(1, 1).bytes > dropout_add_norm(1, 1).bytes
    True
    """
    n, x, r = rows * width, x_bytes, residual_bytes
    if not backward:
        drop_read, drop_written = (x, x + 1) if dropout else (0, 0)
        return Cost(9 * n, (drop_read + x + r + r) * n, (drop_written + r + x) * n)
    drop_read, drop_written = (x + 1, x) if dropout else (0, 0)
    # The norm's backward, the sum with the other gradient, the rounding for the branch, dropout's backward.
    return Cost(14 * n, (x + r + 2 * r + r + drop_read) * n, (r + r + x + drop_written) * n)


def matmul(m: int, n: int, k: int, *, element_bytes: int = 2) -> Cost:
    """(m x k) by (k x n), each matrix once through memory.

    >>> matmul(2, 3, 4).flops, matmul(2, 3, 4).bytes
    (48, 52)
    """
    return Cost(2 * m * n * k, element_bytes * (m * k + k * n), element_bytes * m * n)


def linear(tokens: int, width: int, out: int, *, element_bytes: int = 2, backward: bool = False) -> Cost:
    """A linear layer: one matmul forward, two backward; every matrix once in, the result or the gradients once out.

    >>> linear(2, 3, 4).flops, linear(2, 3, 4, backward=True).flops, linear(2, 3, 4, backward=True).bytes
    (48, 96, 88)
    """
    if not backward:
        return matmul(tokens, out, width, element_bytes=element_bytes)
    gradients = element_bytes * (tokens * width + width * out)
    return Cost(4 * tokens * width * out, element_bytes * tokens * out + gradients, gradients)


def gelu_mlp(tokens: int, width: int, inner: int, *, element_bytes: int = 2, backward: bool = False) -> Cost:
    """Two matmuls with a GELU between them, where two tensors are written, and in backward read.

    >>> gelu_mlp(1, 2, 8).flops, gelu_mlp(1, 2, 8, backward=True).flops
    (64, 128)
    """
    up, down = (matmul(tokens, *shape, element_bytes=element_bytes) for shape in ((inner, width), (width, inner)))
    between = element_bytes * tokens * inner
    if not backward:
        written = up.bytes_written + between + down.bytes_written
        return Cost(up.flops + down.flops, up.bytes_read + down.bytes_read, written)
    # Read: dy twice, x, both weights, activations and slopes; dz is written and read twice. Written: the gradients.
    weights, outer = element_bytes * width * inner, element_bytes * tokens * width
    return Cost(2 * (up.flops + down.flops), 3 * outer + 2 * weights + 4 * between, outer + 2 * weights + between)


def glu_mlp(tokens: int, width: int, inner: int, *, element_bytes: int = 2, backward: bool = False) -> Cost:
    """Three matmuls with a gated activation between them, where three tensors are written, and in backward read.

    >>> glu_mlp(1, 2, 8).flops, glu_mlp(1, 2, 8, backward=True).flops
    (96, 192)
    """
    flops, weights = 6 * tokens * width * inner, element_bytes * 3 * width * inner
    outer, between = element_bytes * tokens * width, element_bytes * tokens * inner
    if not backward:
        return Cost(flops, outer + weights + between, outer + 3 * between)
    # Read: dy twice, x twice, the weights, what was kept, and both gradients of what lies between, twice each.
    return Cost(2 * flops, 4 * outer + weights + 7 * between, outer + weights + 2 * between)


def embedding(
    tokens: int, vocabulary: int, width: int, *, rows: int | None = None, table_bytes: int = 2, out_bytes: int = 2,
    backward: bool = False,
) -> Cost:  # fmt: skip
    """A look-up in a table: forward reads `rows` of it, and writes one a token; backward writes the whole gradient.

    `rows` are those that differ; left out, as many as there can be. Positions are of a lower order.

    >>> embedding(2, 10, 4).bytes, embedding(2, 10, 4, backward=True).bytes
    (32, 96)
    """
    if not backward:
        read = min(tokens, vocabulary) if rows is None else rows
        return Cost(0, table_bytes * read * width, out_bytes * tokens * width)
    return Cost(tokens * width, out_bytes * tokens * width, table_bytes * vocabulary * width)


def attention(
    batch: int, sequence: int, heads: int, kv_heads: int, head_dim: int, *,
    keys: int | None = None, context: float | None = None, element_bytes: int = 2, backward: bool = False,
) -> Cost:  # fmt: skip
    """Attention that stores no scores: two matmuls forward, five backward.

    `keys` is how many there are where it is another number than `sequence`. `context` is how many of them a token looks
    at in the mean, of which `mean_context` tells; left out, it is half of `sequence`, as under a causal mask. Of packed
    sequences each is a batch of its own: their costs add up.

    >>> attention(1, 4, 2, 1, 8).flops, attention(1, 4, 2, 1, 8, keys=8, context=8).flops
    (512, 2048)
    """
    queries = batch * sequence * heads * head_dim
    keys = batch * (sequence if keys is None else keys) * kv_heads * head_dim
    pairs = batch * heads * sequence * (sequence / 2 if context is None else context)
    if not backward:
        return Cost(int(4 * pairs * head_dim), element_bytes * (queries + 2 * keys), element_bytes * queries)
    return Cost(
        int(10 * pairs * head_dim), element_bytes * (3 * queries + 2 * keys), element_bytes * (queries + 2 * keys)
    )


def decode_attention(
    batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int, context: int, *, element_bytes: int = 2,
    cache_bytes: int | None = None,
) -> Cost:  # fmt: skip
    """Attention of the newest `tokens` of each sequence over a cache of `context` keys.

    An element of the cache has `cache_bytes`, as many as others unless given; at 1 each token and head has 4 of scale.

    >>> decode_attention(1, 1, 32, 8, 128, 4096).bytes
    16793600
    """
    queries = batch * tokens * heads * head_dim
    each = element_bytes if cache_bytes is None else cache_bytes
    keys = batch * kv_heads * context * (each * head_dim + (4 if each == 1 else 0))
    return Cost(4 * queries * context, element_bytes * queries + 2 * keys, element_bytes * queries)


def few_rows_linear(rows: int, width: int, out: int, *, element_bytes: int = 2) -> Cost:
    """A linear layer of a few rows without its gradients.

    >>> few_rows_linear(1, 2048, 2048).bytes
    8396800
    """
    return Cost(2 * rows * width * out, element_bytes * (width * out + rows * width), element_bytes * rows * out)


def mean_context(queries: int, keys: int, left: int = -1, right: int = -1) -> float:
    """How many keys a query sees in the mean, from `left` before it to `right` behind it; -1 is no limit.

    The last query is at the last key.

    >>> mean_context(4, 4), mean_context(4, 4, right=0), mean_context(4, 4, left=1, right=0)
    (4.0, 2.5, 1.75)
    """

    def triangle(n: int) -> int:
        return n * (n - 1) // 2 if n > 0 else 0

    def clipped(first: int) -> int:
        """The sum of `first` and the numbers behind it, one for each query, each between 0 and `keys`."""
        over = first - keys
        return triangle(first + queries) - triangle(first) - triangle(over + queries) + triangle(over)

    offset = keys - queries
    ends = clipped(offset + right + 1) if right >= 0 else queries * keys
    starts = clipped(offset - left) if left >= 0 else 0
    return (ends - starts) / queries if queries else 0.0


def self_attention(
    batch: int, sequence: int, width: int, *, element_bytes: int = 4, backward: bool = False
) -> Cost:  # fmt: skip
    """A multi-head self-attention layer: its four projections' matmuls, scores and weighted sum, without biases.

    Backward recomputes the scores, and reads what forward has saved: x, queries, keys, values and context.

    >>> self_attention(1, 1, 1).flops, self_attention(1, 1, 1, backward=True).flops
    (12, 26)
    """
    tokens, weights = batch * sequence * width, 4 * width**2
    projections, pairs = 2 * batch * sequence * weights, 2 * batch * sequence**2 * width
    if not backward:
        return Cost(projections + 2 * pairs, element_bytes * (tokens + weights), element_bytes * tokens)
    return Cost(2 * projections + 5 * pairs, element_bytes * (6 * tokens + weights), element_bytes * (tokens + weights))


def activation(rows: int, width: int, *, gated: bool = False, element_bytes: int = 2, backward: bool = False) -> Cost:
    """An activation function, or the product of an activated gate with another branch."""
    n, inputs = rows * width, 2 if gated else 1
    if not backward:
        return Cost(10 * n, inputs * element_bytes * n, element_bytes * n)
    return Cost(20 * n, (inputs + 1) * element_bytes * n, inputs * element_bytes * n)


def cross_entropy(rows: int, vocabulary: int, *, element_bytes: int = 2) -> Cost:
    """Loss and gradient in one pass: the logits are read once and their gradient is written once."""
    n = rows * vocabulary
    return Cost(6 * n, element_bytes * n, element_bytes * n)


def linear_cross_entropy(tokens: int, vocabulary: int, width: int, *, element_bytes: int = 2) -> Cost:
    """Classifier and loss, forward and backward: three matmuls; x and the weight once in, their gradients once out.

    >>> linear_cross_entropy(2, 3, 4).flops, linear_cross_entropy(2, 3, 4).bytes
    (144, 80)
    """
    once = element_bytes * width * (tokens + vocabulary)
    return Cost(6 * tokens * vocabulary * width, once, once)


def rope(
    tokens: int, heads: int, head_dim: int, *, rotary_dim: int | None = None, element_bytes: int = 2,
    inplace: bool = False,
) -> Cost:  # fmt: skip
    """Rotary embeddings of `heads` heads, those of queries and keys together; the tables are of a lower order.

    In place, what lies beyond `rotary_dim` is not touched.

    >>> rope(1, 1, 128).bytes, rope(1, 1, 128, rotary_dim=32, inplace=True).bytes
    (512, 128)
    """
    rotated = tokens * heads * (head_dim if rotary_dim is None else rotary_dim)
    moved = element_bytes * (rotated if inplace else tokens * heads * head_dim)
    return Cost(3 * rotated, moved, moved)


def elementwise(elements: int, bytes_each: int, flops_each: int) -> Cost:
    """Anything that reads and writes each element once; `bytes_each` is of both together."""
    return Cost(flops_each * elements, bytes_each * elements // 2, bytes_each * elements - bytes_each * elements // 2)


def quantized_linear(
    tokens: int,
    width: int,
    out: int,
    *,
    bits: int = 8,
    group: int | None = None,
    zeros: bool = False,
    element_bytes: int = 2,
    scale_bytes: int = 4,
) -> Cost:
    """A linear layer whose weight has `bits` a number, with a scale for each output, and for each `group` of inputs.

    >>> quantized_linear(1, 128, 2).bytes_read, quantized_linear(1, 128, 2, bits=4, group=128, scale_bytes=2).bytes_read
    (520, 388)
    """
    scales = out * (width // group if group else 1)
    read = out * width * bits // 8 + scales * (scale_bytes + zeros) + element_bytes * tokens * width
    return Cost(2 * tokens * width * out, read, element_bytes * tokens * out)
