"""Text from a model: prompts in, tokens out one step after the other, whole or as a stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.generate.cache import KVCache, bytes_of_token, dtype_of
from tilewright.generate.decoder import Decoder
from tilewright.generate.load import from_gpt, load_huggingface
from tilewright.generate.metrics import Metrics, weight_bytes
from tilewright.generate.sampling import Sampling
from tilewright.generate.speculate import DraftSpeculating, LookupSpeculating, Speculating, refuse_draft
from tilewright.generate.step import Decoding, why_no_pdl
from tilewright.generate.text import Detokenizer, Stopper, Tokenizer
from tilewright.models import GPT
from tilewright.models.folder import read_tokenizer
from tilewright.plan.huggingface.config import read_json

Prompt = str | Sequence[int]
_CONTEXT = 4096  # tokens of a cache, where nobody asks for more
_MOST_GRAPHS = 8


@dataclass(frozen=True)
class Generated:
    """What followed a prompt. `reason` is "stop" where a stop string or token ended it, else "length"."""

    text: str  # without the stop string; empty without a tokenizer
    tokens: list[int]  # without a stop token
    reason: str


class _Row:
    """What one prompt of a batch has become."""

    def __init__(self, tokenizer: Tokenizer | None, stops: Sequence[str]) -> None:
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stopper = Stopper(stops)
        self.text, self.tokens, self.reason = "", list[int](), ""

    def add(self, token: int, stop_tokens: frozenset[int]) -> str:
        """Take a token; returns the text that is now sure."""
        if token in stop_tokens:
            return self._end("stop")
        self.tokens.append(token)
        if self._detokenizer is None:
            return ""
        piece = self._stopper.add(self._detokenizer.add(token))
        self.text += piece
        if self._stopper.found:
            self.reason = "stop"
        return piece

    def finish(self) -> str:
        """End where no more tokens may come."""
        return "" if self.reason else self._end("length")

    def _end(self, reason: str) -> str:
        self.reason = reason
        piece = "" if self._detokenizer is None else self._stopper.add(self._detokenizer.finish())
        if self._stopper.found:
            self.reason = "stop"
        piece += self._stopper.finish()
        self.text += piece
        return piece


class Generator:
    """Generates text with a decoder, or a GPT of ours.

    Args:
        model: a `Decoder`, or a `models.GPT`, whose weights are copied.
        tokenizer: makes text of tokens; without one, prompts and results are tokens.
        context: tokens, prompt and result together, that a row has room for; left out, as many as the model has
            positions for, and 4096 at most.
        stop_tokens: end a row wherever they come, such as the model's end of text.
        kv_cache: "int8" or "fp8" for keys and values of 8 bits; left out, they are in the model's dtype.
        draft: a smaller `Decoder` or GPT with the same tokens, or a Generator of one, which then proposes the tokens
            that `speculate` asks for; without one the text so far does.
        graph: whether a step is a CUDA graph; left out, it is on a GPU.
        compile: whether `torch.compile` compiles a step's forward.
        decode: "graph", or "tilesync" for a step as one graph of tiles.
        pdl: whether kernels of a step's CUDA graph begin while the one before them ends, where the GPU can do it.

    >>> import torch
    >>> from tilewright.models import GPT
    >>> from tilewright.plan.gpt import LLAMA, GPTConfig
    >>> gpt = GPT(GPTConfig(width=32, layers=2, heads=4, kv_heads=2, vocabulary=64, sequence=32, **LLAMA))
    >>> generator = Generator(gpt)
    >>> one, two = generator.generate([[1, 2, 3], [4]], max_tokens=5, temperature=0.8, top_k=20, seed=7)
    >>> len(one.tokens), two.reason
    (5, 'length')
    >>> [len(tokens) for tokens in generator.steps([[1, 2, 3], [4]], max_tokens=3)]  # one of each row, step by step
    [2, 2, 2]
    """

    def __init__(
        self, model: Decoder | GPT, tokenizer: Tokenizer | None = None, *, context: int | None = None,
        stop_tokens: Sequence[int] = (), kv_cache: str | None = None, draft: Decoder | GPT | Generator | None = None,
        graph: bool | None = None, compile: bool = False, decode: str = "graph", pdl: bool = False,
    ) -> None:  # fmt: skip
        self.model = _decoder(model, "model")
        self.tokenizer, self.stop_tokens = tokenizer, frozenset(stop_tokens)
        self.cache_dtype = dtype_of(kv_cache, self.model.dtype)
        self._how: dict[str, Any] = {"graph": graph, "compile": compile, "decode": decode, "pdl": pdl}
        known = draft.tokenizer if isinstance(draft, Generator) else None
        self.draft = (
            None if draft is None else draft.model if isinstance(draft, Generator) else _decoder(draft, "draft")
        )
        if self.draft is not None:
            refuse_draft(self.model, tokenizer, self.draft, known)
        self.metrics: Metrics | None = None  # of the last call
        self._run = 0  # how many generations have begun
        self._caches: dict[int, KVCache] = {}
        self._decodings: dict[tuple[int, Sampling], Decoding] = {}
        self._drafts: dict[tuple[Sampling, int], Speculating] = {}
        self.set_context(min(self.longest, _CONTEXT) if context is None else context)

    @property
    def longest(self) -> int:
        """Tokens that a row may have, by the positions of the model and of the one that makes drafts."""
        return min(each.longest for each in (self.model, self.draft) if each is not None)

    @property
    def why_no_pdl(self) -> str:
        """Why no kernel of a step would begin early by `pdl`; nothing where they would."""
        return why_no_pdl(self.model.device, self._how["graph"], self._how["decode"])

    def set_context(self, context: int) -> None:
        """Give every row room for so many tokens; caches and graphs of another context are dropped."""
        if not 2 <= context <= self.longest:
            which = "model has" if self.longest == self.model.longest else "draft model has"
            raise UserError(f"context is {context:,}; the {which} positions for 2 to {self.longest:,} tokens.")
        self.context = context
        self._caches.clear()
        self._decodings.clear()
        self._drafts.clear()

    @classmethod
    def from_folder(
        cls, folder: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        context: int | None = None, kv_cache: str | None = None, draft: Generator | None = None,
        graph: bool | None = None, compile: bool = False, decode: str = "graph", pdl: bool = False,
    ) -> Generator:  # fmt: skip
        """A generator of a local Hugging Face folder: config.json, safetensors and, for text, tokenizer.json.

        It runs on the GPU where there is one, in the dtype the model was saved in. No pickle is read, and no code of
        the folder's is run.
        """
        folder = Path(folder)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        model = load_huggingface(folder, device=device, dtype=dtype)
        content = read_tokenizer(folder)
        tokenizer = None if content is None else Tokenizer(content, model.config.shape.vocabulary)
        ends = _ends_of_text(folder, model.config.shape.vocabulary)
        return cls(
            model, tokenizer, context=context, stop_tokens=ends, kv_cache=kv_cache, draft=draft, graph=graph,
            compile=compile, decode=decode, pdl=pdl,
        )  # fmt: skip

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, max_tokens: int = 128, stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (), temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, seed: int = 0, speculate: int = 0,
    ) -> list[Generated]:  # fmt: skip
        """What follows each prompt, all of them as one batch; a prompt is text or tokens.

        Args:
            prompts: one or more.
            max_tokens: the most that follow one.
            stop: strings that end a row; they are no part of its text.
            stop_tokens: tokens that do, beside the generator's own.
            speculate: tokens that the draft model, or else the text so far, may propose at a time, for one prompt; 0:
                none.
            temperature, top_k, top_p, min_p, seed: see `Sampling`. The same seed gives the same batch the same
                text.
        """
        rows = self._rows(prompts, stop)
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        for _ in self._pieces(rows, self._encoded(prompts), max_tokens, stop_tokens, sampling, speculate):
            pass
        return [Generated(row.text, row.tokens, row.reason) for row in rows]

    def stream(
        self, prompt: Prompt, *, max_tokens: int = 128, stop: Sequence[str] = (), stop_tokens: Sequence[int] = (),
        temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0,
        speculate: int = 0,
    ) -> Iterator[str]:  # fmt: skip
        """The text that follows a prompt, piece by piece, as whole characters; together they are `generate`'s text."""
        if self.tokenizer is None:
            raise UserError("A stream of text needs a tokenizer; take `steps`, which gives tokens.")
        rows, sampling = self._rows(prompt, stop), Sampling(temperature, top_k, top_p, min_p, seed)
        for _, piece in self._pieces(rows, self._encoded(prompt), max_tokens, stop_tokens, sampling, speculate):
            if piece:
                yield piece

    def steps(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int = 128, sampling: Sampling | None = None,
        speculate: int = 0,
    ) -> Iterator[list[int]]:  # fmt: skip
        """The tokens of every row, step after step, whatever they are."""
        sampling = sampling or Sampling()
        self._check(prompts, max_tokens)
        if speculate and len(prompts) > 1:
            raise UserError(f"speculate works on one prompt at a time and there are {len(prompts)}; leave it out.")
        if speculate and self._how["decode"] != "graph":
            raise UserError("decode is tilesync, whose steps are of one token; leave speculate out.")
        self._run += 1  # another one may begin before this has ended, and takes the cache
        mine, decoding = self._run, self._decoding(len(prompts), sampling)
        proposing = self._speculating(decoding, speculate) if speculate else None
        weights, token = weight_bytes(self.model), bytes_of_token(self.model.config.shape, self.cache_dtype)
        draft = 0 if self.draft is None else weight_bytes(self.draft)
        first = last = begin = time.perf_counter()
        found = (
            _ahead(decoding, prompts, sampling.seed, max_tokens) if proposing is None
            else _speculated(proposing, prompts[0], sampling.seed, max_tokens)
        )  # fmt: skip
        for count, tokens in enumerate(found, 1):
            last = time.perf_counter()
            first = last if count == 1 else first
            forwards, drafted = (count - 1, 0) if proposing is None else (proposing.forwards, proposing.drafted)
            times = first - begin, last - first
            read = forwards * weights + drafted * draft
            self.metrics = _measured(read, token, prompts, count, forwards, times)
            yield tokens
            if self._run != mine:
                raise UserError(
                    "Another generation has begun on this Generator, whose cache holds one at a time; end this one "
                    "before, or make a Generator for each."
                )

    def _pieces(
        self, rows: list[_Row], prompts: list[list[int]], max_tokens: int, stop_tokens: Sequence[int],
        sampling: Sampling, speculate: int,
    ) -> Iterator[tuple[int, str]]:  # fmt: skip
        """(row, text that is now sure), until every row has ended."""
        ends = self.stop_tokens | frozenset(stop_tokens)
        for tokens in self.steps(prompts, max_tokens=max_tokens, sampling=sampling, speculate=speculate):
            for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                if not row.reason:
                    yield index, row.add(token, ends)
            if all(row.reason for row in rows):
                break
        for index, row in enumerate(rows):
            yield index, row.finish()

    def _encoded(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """Every prompt as tokens."""
        return [self._encode(prompt) for prompt in _listed(prompts)]

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise UserError("A prompt of text needs a tokenizer, and the model has no tokenizer.json; give tokens.")
        return self.tokenizer.encode(prompt)

    def _rows(self, prompts: Prompt | Sequence[Prompt], stop: Sequence[str]) -> list[_Row]:
        if isinstance(stop, str):
            raise UserError(f"stop is the string {stop!r}; give a list of strings.")
        if stop and self.tokenizer is None:
            raise UserError("Stop strings need a tokenizer; give stop_tokens.")
        return [_Row(self.tokenizer, stop) for _ in _listed(prompts)]

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        vocabulary = self.model.config.shape.vocabulary
        if type(max_tokens) is not int or max_tokens < 1:
            raise UserError(f"max_tokens is {max_tokens}; give at least 1.")
        if not prompts or not all(len(prompt) for prompt in prompts):
            raise UserError("A prompt has no tokens; give at least one.")
        for prompt in prompts:
            bad = next((token for token in prompt if type(token) is not int or not 0 <= token < vocabulary), None)
            if bad is not None:
                raise UserError(f"A prompt has the token {bad!r}, and the vocabulary is 0 to {vocabulary - 1}.")
            if len(prompt) + max_tokens > self.context:
                raise UserError(
                    f"A prompt of {len(prompt):,} tokens and max_tokens {max_tokens:,} are more than the cache's "
                    f"context of {self.context:,}; give fewer, or a larger context."
                )

    def _speculating(self, decoding: Decoding, most: int) -> Speculating:
        """Forwards of drafts, whose graph is captured once."""
        key = replace(decoding.sampling, seed=0), most
        if key not in self._drafts or self._drafts[key].decoding is not decoding:
            if self.draft is None:
                self._drafts[key] = LookupSpeculating(decoding, most)
            else:
                cache = self._cache(self.draft, 1)
                self._drafts[key] = DraftSpeculating(decoding, most, self.draft, cache)
        return self._drafts[key]

    def _decoding(self, batch: int, sampling: Sampling) -> Decoding:
        """Steps for a batch size, whose graph is captured once."""
        key = batch, replace(sampling, seed=0)
        if key not in self._decodings:
            if len(self._decodings) >= _MOST_GRAPHS:
                self._decodings.clear()
                self._drafts.clear()
                self._caches = {batch: cache for batch, cache in self._caches.items() if batch == key[0]}
            if batch not in self._caches:
                self._caches[batch] = self._cache(self.model, batch)
            self._decodings[key] = Decoding(self.model, self._caches[batch], sampling, **self._how)
        return self._decodings[key]

    def _cache(self, model: Decoder, batch: int) -> KVCache:
        return KVCache(
            model.config.shape, batch=batch, context=self.context, device=model.device, dtype=self.cache_dtype
        )  # fmt: skip


def _decoder(model: Decoder | GPT, what: str) -> Decoder:
    if isinstance(model, GPT):
        return from_gpt(model, device=model.token.weight.device)
    if not isinstance(model, Decoder):
        raise UserError(
            f"The {what} is a {type(model).__name__}; read a folder by Generator.from_folder, or give a GPT."
        )
    return model


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if not hasattr(prompts, "__len__"):
        raise UserError(f"A prompt is {prompts!r}; give text, a list of tokens, or a list of such prompts.")
    if hasattr(prompts, "tolist"):  # an array
        prompts = prompts.tolist()
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _ahead(decoding: Decoding, prompts: Sequence[Sequence[int]], seed: int, most: int) -> Iterator[list[int]]:
    """The tokens of every step. A GPU computes the next one while the host reads the last."""
    device = decoding.model.device
    if device.type != "cuda":
        yield decoding.start(prompts, seed).tolist()
        for _ in range(most - 1):
            yield decoding.step().tolist()
        return
    slots = [torch.empty(len(prompts), dtype=torch.int64, pin_memory=True) for _ in range(2)]
    waiting: deque[tuple[Tensor, torch.cuda.Event]] = deque()
    with torch.cuda.device(device):
        for number in range(most + 1):
            if number < most:
                tokens = decoding.step() if number else decoding.start(prompts, seed)
                slot, done = slots[number % 2], torch.cuda.Event()
                slot.copy_(tokens, non_blocking=True)
                done.record()
                waiting.append((slot, done))
            if len(waiting) > (number < most):
                slot, done = waiting.popleft()
                done.synchronize()
                decoding.raise_if_failed()
                yield slot.tolist()


def _speculated(proposing: Speculating, prompt: Sequence[int], seed: int, most: int) -> Iterator[list[int]]:
    """The tokens of one row, of which a forward may give several."""
    context, count = proposing.decoding.cache.context, 1
    found = proposing.start(prompt, seed)
    while True:
        for token in found:
            yield [token]
        if count == most:
            return
        room = context - len(prompt) - count + 1  # for the last token and a draft
        found = proposing.step(most - count - 1 if room > proposing.most else 0)
        count += len(found)


def _measured(
    read: float, token: int, prompts: Sequence[Sequence[int]], count: int, forwards: int, times: tuple[float, float]
) -> Metrics:  # fmt: skip
    prompt_tokens, new_tokens = sum(map(len, prompts)), count * len(prompts)
    keys = forwards * (prompt_tokens + new_tokens / 2)  # read by all forwards together
    return Metrics(len(prompts), prompt_tokens, new_tokens, forwards, *times, read + keys * token)


def _ends_of_text(folder: Path, vocabulary: int) -> list[int]:
    """The tokens that end a text by the folder's generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id") if (folder / name).exists() else None
        if found is not None:
            listed = found if isinstance(found, list) else [found]
            if not all(type(token) is int and 0 <= token < vocabulary for token in listed):
                raise UserError(f"{folder / name}: eos_token_id is no token of the vocabulary; copy it again.")
            return listed
    return []
