"""The shape that a Hugging Face `config.json` describes, as fields of a `Decoder`.

A config.json is untrusted and read as data: nothing of it is imported, called or evaluated. An architecture that is in
no table here is refused, because a wrong guess gives a wrong count. Where a file leaves a field out, the field has the
default of that architecture's class in `transformers`.

    config.py     reads the file, and each field with its type
    llama.py      Llama and those that share the names of its fields: a new one is a row
    decoders.py   GPT-2, OPT, Falcon and others with names of their own
    mixtures.py   DeepSeek, Llama 4
    encoders.py   BERT, T5
"""

from __future__ import annotations

from typing import Any

from tilewright.errors import UserError
from tilewright.plan.huggingface import decoders, encoders, llama, mixtures
from tilewright.plan.huggingface.config import Config, shorten

_OTHERS = {**decoders.ARCHITECTURES, **mixtures.ARCHITECTURES, **encoders.ARCHITECTURES}
KNOWN = (*llama.FAMILIES, *_OTHERS)


def decoder_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `Decoder` from a parsed config.json."""
    outer, note = raw.get("model_type"), ""
    text = raw.get("text_config")
    if isinstance(text, dict) and "hidden_size" not in raw:  # the decoder of a multimodal model
        raw = {"model_type": outer, "tie_word_embeddings": raw.get("tie_word_embeddings"), **text}
        note = f"of {shorten(outer)} only the text decoder is counted, not what encodes images or sound."
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise UserError("config.json has no model_type; it names the architecture, such as llama.")
    if kind in llama.FAMILIES:
        family = llama.FAMILIES[kind]
        found = llama.llama_fields(Config({**family.left_out, **raw}), family)
    elif kind in _OTHERS:
        found = _OTHERS[kind](Config(raw))
    else:
        raise UserError(f"plan does not know the architecture {shorten(kind)}; docs/plan.md lists those it counts.")
    return {"note": note, **found} if note else found
