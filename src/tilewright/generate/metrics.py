"""How fast tokens came, and how many bytes each of them had to read."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.generate.decoder import Decoder


@dataclass(frozen=True)
class Metrics:
    """Of one call: `first_seconds` until the first token was there, `decode_seconds` from it to the last."""

    rows: int
    prompt_tokens: int  # of all rows
    new_tokens: int  # of all rows
    steps: int  # forwards behind the first token
    first_seconds: float
    decode_seconds: float
    bytes_read: float  # by all decoding steps, at least: weights and the cache's keys and values

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second behind the first of each row; None where there are no more."""
        more = self.new_tokens - self.rows
        return more / self.decode_seconds if more and self.decode_seconds > 0 else None

    @property
    def tokens_per_forward(self) -> float | None:
        """Tokens of a row that a forward gave, 1 without speculation; None where there was none behind the first.

        >>> Metrics(1, 3, 10, 3, 0.1, 0.2, 0.0).tokens_per_forward
        3.0
        """
        return (self.new_tokens - self.rows) / self.rows / self.steps if self.steps else None

    @property
    def bytes_per_second(self) -> float | None:
        """Bytes that decoding read a second."""
        return self.bytes_read / self.decode_seconds if self.steps and self.decode_seconds > 0 else None


def weight_bytes(model: Decoder) -> int:
    """Bytes of weights that a step reads: all but the tables of tokens and positions, of which it reads a row.

    >>> from tilewright.generate.config import of_gpt
    >>> from tilewright.plan.gpt import GPTConfig
    >>> model = Decoder(of_gpt(GPTConfig(width=16, layers=1, heads=2, vocabulary=32, sequence=8)))
    >>> weight_bytes(model) == sum(p.nbytes for p in model.parameters()) - model.position.weight.nbytes
    True
    """
    tables = {id(table.weight) for table in (model.token, model.position) if table is not None}
    tables -= {id(parameter) for parameter in model.head.parameters()}  # a tied head reads all of it
    kept = {id(each): each.nbytes for each in (*model.parameters(), *model.buffers())}
    return sum(size for key, size in kept.items() if key not in tables)
