"""Tokens as text and back: a tokenizer.json, and text that comes piece by piece.

A token is not text: one may be a part of a character, a word's first space may depend on the token before it, a stop
string may begin in one token and end in another. What is given out is never taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewright.errors import UserError

_UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no whole character


class Tokenizer:
    """A Hugging Face tokenizer.json, checked against the vocabulary of a model."""

    def __init__(self, content: bytes, vocabulary: int) -> None:
        try:
            import tokenizers
        except ImportError:
            raise UserError("Text needs the package tokenizers: pip install 'tilewright[tokenizers]'.") from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # tokenizers' own, which has no class of its own
            what = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise UserError(f"tokenizer.json is no tokenizer ({what}); copy it again.") from None
        known = self._tokenizer.get_vocab(with_added_tokens=True)
        largest = max(known.values(), default=-1)
        if largest >= vocabulary:
            raise UserError(
                f"The tokenizer has tokens up to {largest:,} and the model's vocabulary is {vocabulary:,}: it is not "
                "this model's; copy the folder again."
            )
        if not known:
            raise UserError("tokenizer.json has no tokens; copy it again.")

    def is_like(self, other: Tokenizer) -> bool:
        """Whether two tokenizers have the same tokens under the same numbers."""
        mine, theirs = (each._tokenizer.get_vocab(with_added_tokens=True) for each in (self, other))
        return bool(mine == theirs)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model begins with."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class Detokenizer:
    """Text that grows by tokens: whole characters only, and together what the tokenizer makes of all tokens at once.

    Only the last few tokens are decoded again: those of the piece before, whose end decides how the next one begins,
    and those that are not yet text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._first, self._given = 0, 0  # first token that is decoded again, first that was not given out

    def add(self, token: int) -> str:
        """The text that a token completes; empty where it ends within a character."""
        self._tokens.append(token)
        return self._grow(is_last=False)

    def finish(self) -> str:
        """The rest, where the last character stays incomplete."""
        return self._grow(is_last=True)

    def _grow(self, is_last: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._first : self._given])
        text = self._tokenizer.decode(self._tokens[self._first :])
        if not is_last and (text.endswith(_UNFINISHED) or len(text) <= len(before)):
            return ""
        self._first, self._given = self._given, len(self._tokens)
        return text[len(before) :]


class Stopper:
    """Text up to the first stop string; holds back what may be the beginning of one.

    >>> stopper = Stopper(["END"])
    >>> stopper.add("the E"), stopper.add("astern EN"), stopper.add("Ding"), stopper.found
    ('the ', 'Eastern ', '', True)
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise UserError("A stop string is empty; leave it out.")
        self._stops, self._held, self.found = list(stops), "", False

    def add(self, text: str) -> str:
        """What of the text so far is sure to come before a stop string."""
        if self.found:
            return ""
        text = self._held + text
        ends = [end for stop in self._stops if (end := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)]
        keep = max((self._beginning(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, where the text has ended."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """The length of the longest end of the text that a stop string begins with."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
