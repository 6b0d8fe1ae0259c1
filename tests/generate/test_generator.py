"""Batches, streams, stops, seeds, limits and bad input."""

import copy
import json

import pytest
import torch

from tilewright.errors import UserError
from tilewright.generate import Generator, Tokenizer
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.train.export import byte_tokenizer

PROMPTS = ["def main(", "a", "the quick brown fox jumps", "zz"]


@pytest.fixture(scope="module")
def generator():
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(width=32, layers=2, heads=4, vocabulary=256, sequence=96, **{**LLAMA, "kv_heads": 2}))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return Generator(gpt, Tokenizer(json.dumps(byte_tokenizer()).encode(), 256))


def test_a_batch_of_unequal_prompts_is_each_alone(generator):
    together = generator.generate(PROMPTS, max_tokens=24)
    for prompt, found in zip(PROMPTS, together, strict=True):
        assert generator.generate(prompt, max_tokens=24) == [found]
    assert len({tuple(found.tokens) for found in together}) == len(PROMPTS)


def test_a_row_that_has_ended_leaves_the_others_as_they_are(generator):
    together = generator.generate(PROMPTS, max_tokens=24)
    end = together[1].tokens[3]
    cut = generator.generate(PROMPTS, max_tokens=24, stop_tokens=[end])
    for whole, found in zip(together, cut, strict=True):
        there = whole.tokens.index(end) if end in whole.tokens else 24
        assert found.tokens == whole.tokens[:there] and found.reason == ("stop" if there < 24 else "length")
    assert {found.reason for found in cut} == {"stop", "length"} or all(end in each.tokens for each in together)


def test_pieces_of_a_stream_join_to_the_text_and_come_before_the_end(generator):
    for options in ({}, {"temperature": 1.0, "seed": 3}, {"stop": ["\x00", "zq"]}):
        whole = generator.generate(PROMPTS[0], max_tokens=40, **options)[0]
        pieces = list(generator.stream(PROMPTS[0], max_tokens=40, **options))
        assert "".join(pieces) == whole.text and len(pieces) > 1 and all(pieces)


def test_a_second_generation_ends_the_first_one_with_an_error(generator):
    prompt = list(PROMPTS[0].encode())
    alone = next(iter(zip(*generator.steps([prompt], max_tokens=6), strict=True)))
    first, second = (generator.steps([list(each.encode())], max_tokens=6) for each in PROMPTS[:2])
    next(first)
    next(second)
    with pytest.raises(UserError, match="cache holds one at a time; end this one "):
        next(first)
    assert len(list(second)) == 5
    assert next(iter(zip(*generator.steps(torch.tensor([prompt]).tolist(), max_tokens=6), strict=True))) == alone
    assert generator.generate(torch.tensor(prompt), max_tokens=4) == generator.generate(PROMPTS[0], max_tokens=4)


def test_a_stop_string_ends_the_text_before_it(generator):
    whole = generator.generate(PROMPTS[0], max_tokens=60, temperature=1.0, seed=1)[0].text
    stop = whole[10:14]  # of four tokens or more
    first = whole.index(stop)
    cut = generator.generate(PROMPTS[0], max_tokens=60, temperature=1.0, seed=1, stop=["none of it", stop])[0]
    assert cut.text == whole[:first] and cut.reason == "stop" and len(cut.tokens) < 60
    assert "".join(generator.stream(PROMPTS[0], max_tokens=60, temperature=1.0, seed=1, stop=[stop])) == cut.text


def test_the_same_seed_gives_the_same_text_and_another_one_another(generator):
    def drawn(seed):
        return [each.tokens for each in generator.generate(PROMPTS[:2], max_tokens=20, temperature=1.2, seed=seed)]

    first = drawn(1)
    torch.manual_seed(99)
    torch.rand(7)
    assert drawn(1) == first != drawn(2)
    assert generator.generate(PROMPTS[0], max_tokens=8, temperature=1.0, top_k=1) == generator.generate(
        PROMPTS[0], max_tokens=8
    )


def test_metrics_count_tokens_and_bytes(generator):
    generator.generate(PROMPTS[:2], max_tokens=11)
    found, shape = generator.metrics, generator.model.config.shape
    assert (found.prompt_tokens, found.new_tokens, found.steps) == (len(PROMPTS[0]) + 1, 22, 10)
    weights = 4 * sum(p.numel() for p in generator.model.parameters())  # the head is tied: all of it is read
    keys = sum(len(PROMPTS[0]) + 1 + 2 * step for step in range(1, 11)) * 2 * shape.layers * 2 * 8 * 4
    assert found.bytes_read == 10 * weights + keys
    assert found.tokens_per_second == pytest.approx(20 / found.decode_seconds)
    generator.generate("a", max_tokens=1)
    assert generator.metrics.tokens_per_second is None and generator.metrics.first_seconds > 0


def test_what_lies_behind_a_shorter_prompt_of_an_earlier_call_is_not_seen(generator):
    expected = generator.generate("b", max_tokens=10)
    generator.generate("a" * 80, max_tokens=10)
    assert generator.generate("b", max_tokens=10) == expected


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompts": "a" * 90, "max_tokens": 10}, "more than the cache's context of 96"),
        ({"prompts": None}, "A prompt is None; give text"), ({"prompts": ""}, "no tokens"),
        ({"prompts": []}, "no tokens"), ({"prompts": [[256]]}, "the token 256"),
        ({"prompts": "a", "max_tokens": 0}, "max_tokens is 0"), ({"prompts": "a", "temperature": -1.0}, "temperature"),
        ({"prompts": "a", "temperature": float("nan")}, "temperature"), ({"prompts": "a", "top_k": -1}, "top_k"),
        ({"prompts": "a", "top_p": 0.0}, "top_p"), ({"prompts": "a", "min_p": 1.5}, "min_p"),
        ({"prompts": "a", "seed": -1}, "seed"), ({"prompts": "a", "stop": ["x", ""]}, "stop string is empty"),
        ({"prompts": "a", "stop": "x"}, "give a list"), ({"prompts": "a", "temperature": "hot"}, "give a number"),
        ({"prompts": "a", "top_p": None}, "top_p is None; give a number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bad_input_is_one_sentence(generator, arguments, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        generator.generate(**arguments)
    assert "\n" not in str(error.value)


def test_a_context_must_fit_the_model_and_a_tokenizer_the_vocabulary(generator):
    for context in (1, 97):
        with pytest.raises(UserError, match="positions for 2 to 96"):
            Generator(generator.model, context=context)
    small = Generator(generator.model, generator.tokenizer, context=12)
    with pytest.raises(UserError, match="context of 12"):
        small.generate("abcdefgh", max_tokens=5)
    assert len(small.generate("abcdefgh", max_tokens=4)[0].tokens) == 4
    with pytest.raises(UserError, match="tokens up to 255 and the model's vocabulary is 200"):
        Tokenizer(json.dumps(byte_tokenizer()).encode(), 200)
    for content in (b"{}", b"\xff", b'{"model": {"type": "Nothing"}}'):
        with pytest.raises(UserError, match="is no tokenizer"):
            Tokenizer(content, 300)
    without = Generator(generator.model)
    for prompt, options, sentence in (("a", {}, "needs a tokenizer"), ([1], {"stop": ["x"]}, "need a tokenizer")):
        with pytest.raises(UserError, match=sentence):
            without.generate(prompt, **options)


def test_rotary_tables_go_where_the_model_goes(generator):
    model = copy.deepcopy(generator.model)
    model.prepare(8)
    model.to("meta").prepare(8)
    assert {table.device.type for table in model.tables} == {"meta"}


def test_a_step_is_one_graph_for_a_compiler(generator, monkeypatch):
    kv_cache = "int8"
    plain = Generator(generator.model, generator.tokenizer, kv_cache=kv_cache).generate("ab", max_tokens=6)
    original, compiled = torch.compile, []

    def traced(model, **options):
        compiled.append(model)
        return original(model, backend="eager", fullgraph=True, **options)

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", traced)
    again = Generator(generator.model, generator.tokenizer, kv_cache=kv_cache, compile=True)
    assert again.generate("ab", max_tokens=6) == plain and compiled == [generator.model]
