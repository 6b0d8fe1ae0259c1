import dataclasses

from tilewright.plan.decoder import Decoder
from tilewright.plan.serving_memory import infer, kv_bytes_per_token, kv_cache_bytes


def test_the_cache_of_llama_3_1_8b_is_exact_and_windows_bound_it():
    llama = Decoder(4096, 32, 32, 8, 128, 14336, 128256, 131072, gated=True, tied=False, norm="rms", positions="rope")
    assert kv_bytes_per_token(llama) == 131072
    assert kv_cache_bytes(llama, 2, 1000) == 2 * 1000 * 131072
    windowed = dataclasses.replace(llama, window=100, windowed_layers=16)
    assert kv_cache_bytes(windowed, 1, 1000) == 131072 * (1000 + 100) / 2
    served = infer(llama, 8, 8192, weights="int8", tensor=2)
    assert served["weights"] == llama.parameters / 2
    assert served["KV cache"] == 8 * 8192 * 131072 / 2
    assert infer(llama, 8, 8192, tensor=16)["KV cache"] == 8 * 8192 * 131072 / 8  # 8 key-value heads, no finer
