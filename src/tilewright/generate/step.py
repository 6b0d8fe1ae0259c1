"""A prompt into the cache, then one token after the other: `prefill`, and `decode_one_token` as a CUDA graph.

A step has the tokens of all rows in one tensor, which it reads and writes: nothing of it depends on the host, and a
graph captured once is replayed for every token. Inside of it our kernels begin while the one before them ends
(`runtime/pdl.py`), where the GPU can do that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewright.errors import UserError
from tilewright.generate.cache import KVCache
from tilewright.generate.decoder import Decoder
from tilewright.generate.sampling import Sampling, sample
from tilewright.generate.tiles import WAYS, TiledDecoder
from tilewright.runtime import dispatch, paths
from tilewright.runtime.pdl import Chain, chaining, why_not
from tilewright.tilesync import raise_if_failed


@torch.no_grad()
def prefill(
    model: Decoder, cache: KVCache, prompts: Sequence[Sequence[int]], sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Put a prompt into each row of the cache and return the token (batch,) that follows it."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    longest = max(len(prompt) for prompt in prompts)
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    cache.begin(lengths)
    logits = model(torch.tensor(padded, device=model.device), cache, last=lengths - 1)
    cache.end_prompt()
    return sample(logits[:, -1], sampling, generator)


@torch.no_grad()
def decode_one_token(
    model: Callable[..., Tensor], cache: KVCache, tokens: Tensor, sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    """Put a token (batch,) into each row of the cache and return the one that follows it.

    The model is a `Decoder`, what `torch.compile` makes of one, or a `TiledDecoder`.
    """
    logits = model(tokens[:, None], cache)
    cache.advance(1)
    return sample(logits[:, -1], sampling, generator)


def uses_graph(device: torch.device, graph: bool | None) -> bool:
    """Whether a step is a CUDA graph: where nobody says so, on a GPU."""
    return device.type == "cuda" if graph is None else graph


def why_no_pdl(device: torch.device, graph: bool | None, decode: str) -> str:
    """Say why no kernel of a step begins early; nothing where they do.

    >>> why_no_pdl(torch.device("cpu"), None, "graph")
    'PDL is for CUDA'
    """
    if decode == "tilesync":
        return "the layers of a step by tiles are one kernel"
    if device.type == "cuda" and not uses_graph(device, graph):
        return "PDL is for the kernels of a CUDA graph, and there is none"
    return why_not(device)


class Decoding:
    """Decoding steps of one batch size and one way of sampling: on a GPU one CUDA graph, replayed for every token.

    `decode` is "graph", or "tilesync": then a step's layers are one graph of tiles that wait for each other. Without
    `pdl` a kernel of a CUDA graph begins when the one before it has ended.

    >>> from tilewright.generate.config import of_gpt
    >>> from tilewright.plan.gpt import LLAMA, GPTConfig
    >>> config = of_gpt(GPTConfig(width=32, layers=1, heads=2, vocabulary=64, sequence=16, **LLAMA))
    >>> model = Decoder(config).requires_grad_(False)
    >>> decoding = Decoding(model, KVCache(config.shape, batch=1, context=16), Sampling())
    >>> first = decoding.start([[1, 2, 3]]).clone()
    >>> decoding.step().shape
    torch.Size([1])
    """

    def __init__(
        self, model: Decoder, cache: KVCache, sampling: Sampling, *, graph: bool | None = None, compile: bool = False,
        decode: str = "graph", pdl: bool = False,
    ) -> None:  # fmt: skip
        if decode not in WAYS:
            raise UserError(f"decode is {decode!r}; choose {' or '.join(WAYS)}.")
        self.is_tiled = decode == "tilesync"
        if compile and self.is_tiled:
            raise UserError("decode is tilesync, and leaves torch.compile nothing to compile; leave compile out.")
        self.model, self.cache, self.sampling = model, cache, sampling
        self.forward: Callable[..., Tensor] = torch.compile(model, dynamic=False) if compile else model
        if self.is_tiled:
            self.forward = TiledDecoder(model, cache)
        self.tokens = torch.zeros(cache.batch, dtype=torch.int64, device=model.device)
        self.generator = None if sampling.is_greedy else torch.Generator(model.device)
        self.uses_graph = uses_graph(model.device, graph)
        self._why_no_pdl = why_no_pdl(model.device, graph, decode) if pdl else "it is off"
        self._tables: list[object] = []  # which graphs read: others may make longer ones
        self._graph = self.capture(self._decode) if self.uses_graph else None

    def _decode(self) -> None:
        self.tokens.copy_(decode_one_token(self.forward, self.cache, self.tokens, self.sampling, self.generator))

    def capture(self, run: Callable[[], None], *more: KVCache) -> torch.cuda.CUDAGraph:
        """Capture what steps over the cache, and `more` of them, after two on the side that compile and load it."""
        chain = None if self._why_no_pdl else Chain()
        with torch.cuda.device(self.model.device), chaining(chain):
            caches, side = (self.cache, *more), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), dispatch.forcing_kernels():
                for _ in range(2):
                    _empty(caches)
                    run()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            _empty(caches)
            graph = torch.cuda.CUDAGraph()
            if self.generator is not None:
                graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph):
                run()
            self._tables.append(self.model.tables)
        paths.note("decode_one_token", "CUDA graph", f"no PDL: {self._why_no_pdl}" if chain is None else str(chain))
        return graph

    def start(self, prompts: Sequence[Sequence[int]], seed: int = 0) -> Tensor:
        """Begin with these prompts; returns their first tokens, in a tensor that every step writes anew."""
        if self.generator is not None:
            self.generator.manual_seed(seed)
        self.tokens.copy_(prefill(self.model, self.cache, prompts, self.sampling, self.generator))
        return self.tokens

    def step(self) -> Tensor:
        """The next token of every row, in the same tensor."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._decode()
        return self.tokens

    def raise_if_failed(self) -> None:
        """Raise what a step reported that the GPU has ended: a tile that waited too long."""
        if self.is_tiled:
            raise_if_failed()


def _empty(caches: Sequence[KVCache]) -> None:
    for cache in caches:
        cache.before.zero_()
