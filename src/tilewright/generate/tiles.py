"""A decoding step as one graph of tiles (`tilewright.tilesync`): all layers and the head for the one token of a row.

On a Hopper it is what `tilesync.compile` measures to be the fastest, one persistent launch among others. The cache is
read in place; the graph returns the new keys and values of all layers, which two copies put into it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewright import tilesync
from tilewright.errors import UserError
from tilewright.generate.cache import KVCache
from tilewright.generate.decoder import Decoder, Norm
from tilewright.generate.quantized import SideBySide
from tilewright.nn.hooks import has_no_hooks
from tilewright.nn.quantized_linear import QuantizedLinear
from tilewright.runtime import dispatch, hopper
from tilewright.runtime.log import log
from tilewright.tilesync import chains, launch

WAYS = ("graph", "tilesync")  # of decoding


def why_not(model: Decoder, batch: int, cache: torch.dtype) -> str:
    """Say why a model's steps are no graph of tiles here; nothing where they are.

    >>> from tilewright.generate.config import of_gpt
    >>> from tilewright.plan.gpt import LLAMA, GPTConfig
    >>> shape = {"width": 32, "layers": 1, "heads": 2, "vocabulary": 64, "sequence": 16}
    >>> why_not(Decoder(of_gpt(GPTConfig(**shape, **LLAMA))), 1, torch.float32)
    ''
    >>> why_not(Decoder(of_gpt(GPTConfig(**shape))), 1, torch.float32)
    'it has no model but one of RMSNorm, rotary positions and a SwiGLU MLP without biases, as Llama is'
    """
    shape = model.config.shape
    biases = shape.qkv_bias or shape.out_bias or shape.mlp_bias
    if (shape.norm, shape.positions, model.config.activation) != ("rms", "rope", "silu") or not shape.gated or biases:
        return "it has no model but one of RMSNorm, rotary positions and a SwiGLU MLP without biases, as Llama is"
    if shape.qk_norm:
        return "it has no norm of queries and keys"
    if batch > 1:
        return f"it decodes one text at a time, and there are {batch}"
    if cache != model.dtype:
        return "it has no cache of 8 bits"
    known = nn.Linear, nn.Embedding, nn.ModuleList, Norm, QuantizedLinear
    for name, module in model.named_modules():
        if isinstance(module, SideBySide):
            return f"it has one format for layers of the same input, and those of {name} have several"
        if isinstance(module, QuantizedLinear) and module.order is not None:
            return f"it has no order of inputs, and {name} was quantized with act-order"
        inside = module.__module__ != Decoder.__module__ and type(module) not in known
        if inside or not has_no_hooks(module) or any(type(p) not in dispatch.PLAIN for p in module.parameters()):
            return f"it reads weights as they are, and {name or 'the model'} is hooked or replaced"
    if model.device.type == "cuda" and not hopper.is_hopper(model.device):
        return "its kernels are for a Hopper, and need NVRTC"
    return ""


class TiledDecoder:
    """Calls as a `Decoder` does, for one token of one row of a cache.

    The graph is checked when it is made, which takes seconds for a model of a billion weights.
    """

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        if why := why_not(model, cache.batch, cache.keys[0].dtype):
            raise UserError(f"decode is tilesync: {why}; choose graph.")
        self.model, self.cache = model, cache
        shape, self._kv = model.config.shape, model.config.shape.kv_heads * model.config.shape.head_dim
        matmuls: dict[str, nn.Module] = {"head": model.head}
        for layer, block in enumerate(model.blocks):
            attention, mlp = block.attention, block.mlp
            of_layer = {"qkv": attention.qkv, "o": attention.out, "up": mlp.up, "down": mlp.down}  # type: ignore[union-attr]
            matmuls |= {f"{name}{layer}": each for name, each in of_layer.items()}  # type: ignore[misc]
        packings = tuple(
            (name, tilesync.Packing.of(each.weight, each.scale, each.zero))
            for name, each in matmuls.items()
            if isinstance(each, QuantizedLinear)
        )
        graph = chains.decode_step(
            shape.layers, shape.width, shape.ffn, shape.heads, shape.kv_heads, shape.head_dim, shape.vocabulary,
            cache.context, eps=model.config.epsilon, packings=packings,
        )  # fmt: skip
        self._compiled = tilesync.compile(graph)
        model.prepare(cache.context + 1)
        assert model.tables is not None
        tables = {name: table[: cache.context + 1] for name, table in zip(("cos", "sin"), model.tables, strict=True)}
        self._inputs: dict[str, Tensor] = {**tables, "length": cache.before}
        self._inputs["norm"] = model.norm.weight
        for layer, block in enumerate(model.blocks):
            tensors = {
                "norm_a": block.norm1.weight, "norm_b": block.norm2.weight,  # type: ignore[union-attr]
                "k": cache.keys[layer].view(-1, shape.head_dim), "v": cache.values[layer].view(-1, shape.head_dim),
            }  # fmt: skip
            self._inputs |= {f"{name}{layer}": x for name, x in tensors.items()}  # type: ignore[misc]
        for name, each in matmuls.items():
            self._inputs |= _weights(name, each)
        if model.device.type == "cuda":
            x = torch.empty(1, shape.width, device=model.device, dtype=model.dtype)
            if why := launch.why_no_kernel(self._compiled.program, [*self._ordered(x)]):
                raise UserError(f"decode is tilesync: {why.rstrip('.')}; choose graph.")
        else:
            log.warning("decode is tilesync: no tile waits on a CPU; a step runs stage by stage in plain PyTorch")

    def _ordered(self, x: Tensor) -> list[Tensor]:
        given = {"x": x, **self._inputs}
        return [given[name] for name in self._compiled.graph.inputs]

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Return the logits (1, 1, vocabulary) of a token (1, 1), whose keys and values are then in the cache."""
        assert cache is self.cache and tokens.shape == (1, 1)
        cache.place(1)
        logits, *rotated = self._compiled.run(self._ordered(self.model.token(tokens[0])))
        shape = self.model.config.shape
        _, keys, values = torch.cat(rotated).split((shape.heads * shape.head_dim, self._kv, self._kv), 1)
        place = cache.before.long()
        for new, old in ((keys, cache.all_keys), (values, cache.all_values)):
            old[:, 0].index_copy_(2, place, new.unflatten(1, (shape.kv_heads, 1, shape.head_dim)))
        return logits[None]


def _weights(name: str, layer: nn.Module) -> dict[str, Tensor]:
    """Return a layer's weight as the graph's inputs: a packed one whole, gate and up of another one apart."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    if isinstance(layer, QuantizedLinear):
        parts = {name: weight, f"{name}_scale": layer.scale, f"{name}_zero": layer.zero}
        return {part: tensor for part, tensor in parts.items() if tensor is not None}
    if name.startswith("up"):
        return dict(zip((name.replace("up", "gate"), name), weight.chunk(2), strict=True))
    return {name: weight}
