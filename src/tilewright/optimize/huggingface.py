"""Hugging Face: our attention by name, and a local folder as a model to tune.

Of a folder, config.json with safetensors or without, nothing is run: its code is never trusted, pickles are never read,
and the network is never asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilewright.errors import UserError
from tilewright.measure.machine import host_memory_bytes
from tilewright.plan.hf_folder import check_folder

_SEQUENCE = 2048  # tokens, unless told otherwise or the model takes fewer
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def register_attention(name: str = "tilewright") -> str:
    """Let transformers know `ops.attention` by a name, for `attn_implementation` of any model.

    Windows, soft-caps and shared key heads are computed by our kernels, and padded batches without what is padded.

    Args:
        name: what models call it; the words sdpa, flash and flex mean something else to transformers.

    Returns:
        The name.

    >>> _ = register_attention()  # doctest: +SKIP
    >>> model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="tilewright")  # doctest: +SKIP
    """
    if not name.isidentifier() or name == "eager" or any(word in name for word in ("sdpa", "flash", "flex", "paged")):
        raise UserError(f"{name!r} is no name for an attention; give a word without sdpa, flash, flex or paged in it.")
    from transformers import AttentionInterface, AttentionMaskInterface

    from tilewright.optimize import attention_interface

    AttentionInterface.register(name, attention_interface.attend)
    AttentionMaskInterface.register(name, attention_interface.make_mask)
    return name


def build(
    folder: str, batch: int = 8, sequence: int = 0, dtype: str = "fp32", attention: str = "sdpa"
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The causal language model of a folder, and a batch of random tokens for it.

    Args:
        folder: has a config.json; with ``*.safetensors`` beside it the weights are read, without they are random.
        batch: sequences.
        sequence: tokens of each; 0 for 2,048 or as many as the model takes.
        dtype: of the weights: fp32, bf16 or fp16.
        attention: as transformers calls it: sdpa or eager.
    """
    where = Path(folder)
    check_folder(where)
    import transformers

    if dtype not in _DTYPES:
        raise UserError(f"dtype is {dtype!r}; choose {', '.join(_DTYPES)}.")
    if attention not in ("sdpa", "eager"):
        raise UserError(f"attention is {attention!r}; choose sdpa or eager.")
    transformers.logging.set_verbosity_error()
    try:
        parsed = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, local_files_only=True)
        options: dict[str, Any] = {"trust_remote_code": False, "attn_implementation": attention}
        _check_size(transformers, parsed, _DTYPES[dtype], attention, where)
        if any(where.glob("*.safetensors")):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                where, config=parsed, use_safetensors=True, local_files_only=True, dtype=_DTYPES[dtype], **options
            )
        else:
            # A CPU draws a billion weights in most of a minute.
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                model = transformers.AutoModelForCausalLM.from_config(parsed, **options).to(_DTYPES[dtype])
    except UserError:
        raise
    except Exception as error:  # whatever transformers, safetensors or a field of the config make of it
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"transformers cannot build the model of {where}: {why}") from error
    model.config.use_cache = False
    most = getattr(parsed, "max_position_embeddings", None) or _SEQUENCE
    columns = sequence or min(_SEQUENCE, most)
    if columns > most:
        raise UserError(f"sequence is {columns}, and the model takes at most {most} tokens.")
    if not isinstance(parsed.vocab_size, int) or parsed.vocab_size < 1 or batch < 1 or columns < 1:
        raise UserError(
            f"A batch of {batch} x {columns} tokens of {parsed.vocab_size} cannot be made; give at least 1."
        )
    tokens = torch.randint(0, parsed.vocab_size, (batch, columns)).to(model.device)
    return model.train(), {"input_ids": tokens, "labels": tokens.clone()}


def _check_size(transformers: Any, config: Any, dtype: torch.dtype, attention: str, folder: Path) -> None:
    """Refuse a model that this machine has no memory for, before it is allocated."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, attn_implementation=attention
        )
    needed, there = sum(each.numel() for each in model.parameters()) * dtype.itemsize, host_memory_bytes()
    if needed > there:
        raise UserError(
            f"The model of {folder} has {needed / 1e9:,.0f} GB of weights, and this machine {there / 1e9:,.0f} GB of "
            "memory; give a smaller one."
        )
