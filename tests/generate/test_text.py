"""Text piece by piece: whole characters, no stop string, nothing taken back."""

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.generate.text import Detokenizer, Stopper, Tokenizer
from tilewright.train.export import byte_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="text needs it")


@functools.cache
def bytes_tokenizer():
    return Tokenizer(json.dumps(byte_tokenizer()).encode(), 256)


@functools.cache
def metaspace_tokenizer():
    """Like Llama 2's: a word's space is part of its first token, and the very first one is left out."""
    words = [
        "\u2581the",
        "\u2581caf",
        "\u00e9",
        "\u2581",
        "s",
        "\u2581\U0001f600",
        "<0xF0>",
        "<0x9F>",
        "<0x98>",
        "<0x80>",
    ]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({"<unk>": 0, **{word: i + 1 for i, word in enumerate(words)}}, [], byte_fallback=True)
    )
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(made.to_str().encode(), len(words) + 1)


def pieces(tokenizer, tokens):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


@given(text=st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_pieces_are_whole_characters_and_join_to_the_text(text):
    tokenizer = bytes_tokenizer()
    tokens = tokenizer.encode(text)
    found = pieces(tokenizer, tokens)
    assert "".join(found) == text == tokenizer.decode(tokens)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)


@given(tokens=st.lists(st.integers(0, 255), max_size=30))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_text_join_to_what_the_tokenizer_makes_of_them(tokens):
    tokenizer = bytes_tokenizer()
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_a_character_comes_when_its_last_byte_does():
    found = pieces(bytes_tokenizer(), "a\U0001f600b".encode())
    assert found == ["a", "", "", "", "\U0001f600", "b", ""]


@functools.cache
def pairs_tokenizer():
    """A BPE over bytes whose tokens begin and end within characters."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["\u65e5\u672c\u8a9e\u65e5\u672c \U0001f600\U0001f601 \u00e9\u00e8a" * 3], trainer)
    return Tokenizer(made.to_str().encode(), 320)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_characters_split_over_tokens_come_whole_and_nothing_is_lost(data):
    tokenizer = pairs_tokenizer()
    text = data.draw(st.text("\u65e5\u672c\u8a9e\U0001f600\U0001f602\u00e9 a", max_size=20))
    found = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(found) == text and "\ufffd" not in "".join(found)
    tokens = data.draw(st.lists(st.integers(0, tokenizer._tokenizer.get_vocab_size() - 1), max_size=20))
    found = pieces(tokenizer, tokens)
    assert "".join(found) == tokenizer.decode(tokens)  # whatever bytes a model may choose


@given(tokens=st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), max_size=20))
@settings(max_examples=80, deadline=None)
def test_spaces_at_the_borders_of_words_are_kept(tokens):
    tokenizer = metaspace_tokenizer()
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)
    assert tokenizer.decode([1, 2, 3]) == "the caf\u00e9"


@given(data=st.data(), text=st.text("abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=4)))
@settings(max_examples=150, deadline=None)
def test_a_stop_string_is_found_across_any_borders(data, text, stops):
    stopper, given_out, at = Stopper(stops), "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 5))
        given_out += stopper.add(text[at : at + size])
        at += size
        if stopper.found:
            break
        assert text.startswith(given_out)
    given_out += stopper.finish()
    # The end of the first piece that completes a stop string decides which one comes first.
    read = text[:at]
    ends = [read.find(stop) for stop in stops if stop in read]
    assert stopper.found == bool(ends)
    assert given_out == (read[: min(ends)] if ends else text)


def test_as_little_as_possible_is_held_back():
    stopper = Stopper(["abab", "xy"])
    assert [stopper.add(piece) for piece in ("aab", "b", "aba", "ca", "x")] == ["a", "abb", "", "abac", "a"]
    assert stopper.finish() == "x" and not stopper.found
