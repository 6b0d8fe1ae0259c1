"""A config.json as data: read with bounds, and every field with its type, since nobody vouches for the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewright.errors import UserError

LARGEST_NUMBER = 1 << 40
_LARGEST_FILE = 1 << 20  # bytes of a config.json; real ones have a few thousand
MOST_LAYERS = 100_000


def shorten(value: object) -> str:
    """The value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def read_json(path: Path) -> dict[str, Any]:
    """The parsed object of a file of bounded size."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no file; copy it again.")
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise UserError(f"{path} has more than {_LARGEST_FILE:,} bytes; a config.json has a few thousand.")
        raw = json.loads(text)
    except UserError:  # which is a ValueError
        raise
    except OSError as error:
        raise UserError(f"Cannot read {shorten(str(path))}: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not JSON that a model could have written; copy it again.") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} holds no JSON object; copy it again.")
    return raw


class Config:
    """Typed access to a configuration that may hold anything."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw

    def number(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise UserError(f"config.json lacks {name}, a whole number.")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_NUMBER:
            raise UserError(f"config.json: {name} is {shorten(value)}; it must be a whole number from 0 to 2^40.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"config.json: {name} is {shorten(value)}; it must be true or false.")
        return value

    def share(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise UserError(f"config.json: {name} is {shorten(value)}; it must be a number in [0, 1).")
        return float(value)

    def each(self, name: str) -> list[Any]:
        value = self.raw.get(name)
        if value is not None and (not isinstance(value, list) or len(value) > MOST_LAYERS):
            raise UserError(f"config.json: {name} must be a list with an entry a layer.")
        return value or []

    def renamed(self, **names: str) -> Config:
        """The same with fields also under the names that other architectures give them."""
        return Config({**{new: self.raw[old] for new, old in names.items() if old in self.raw}, **self.raw})

    def refuse(self, name: str, *values: Any) -> None:
        """Refuse a variant of an architecture that nobody counts here."""
        if self.raw.get(name) in values:
            kind = shorten(self.raw.get("model_type"))
            raise UserError(f"plan does not count a {kind} with {name} {shorten(self.raw[name])}.")


def size_fields(config: Config, head_dim: str = "head_dim") -> dict[str, int]:
    """Width, layers and heads."""
    width, heads = config.number("hidden_size"), config.number("num_attention_heads")
    given = config.raw.get(head_dim) is not None
    if heads < 1 or (not given and width % heads):
        raise UserError(f"config.json: hidden_size {width} does not divide into {heads} heads.")
    return {
        "width": width, "layers": config.number("num_hidden_layers"), "heads": heads,
        "head_dim": config.number(head_dim, width // heads), "vocabulary": config.number("vocab_size"),
    }  # fmt: skip


def length_fields(tokens: int) -> dict[str, int]:
    """Sequences of as many tokens as the model takes at most."""
    return {"sequence": tokens, "longest": tokens}


LAYER_NORM = {"norm": "layer", "norm_bias": True}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


def learned_positions(tokens: int, offset: int = 0) -> dict[str, Any]:
    """A table of positions with a row a token, and `offset` rows before them."""
    return {**length_fields(tokens), "positions": "learned", "position_rows": tokens + offset}
