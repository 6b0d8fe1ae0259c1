"""Text from a decoder: KV cache, sampling, decoding.

`tilewright.generate.Generator` is the way in; `prefill` and `decode_one_token` are its two halves.
"""

from tilewright.generate.cache import KVCache
from tilewright.generate.decoder import Decoder
from tilewright.generate.generator import Generated, Generator
from tilewright.generate.load import from_gpt, load_huggingface
from tilewright.generate.metrics import Metrics
from tilewright.generate.quantizing import Plan, quantize_folder
from tilewright.generate.sampling import Sampling
from tilewright.generate.step import Decoding, decode_one_token, prefill
from tilewright.generate.text import Tokenizer

__all__ = [
    "Decoder", "Decoding", "Generated", "Generator", "KVCache", "Metrics", "Plan", "Sampling", "Tokenizer",
    "decode_one_token", "from_gpt", "load_huggingface", "prefill", "quantize_folder",
]  # fmt: skip
