"""Every architecture that plan counts, beside the model that transformers builds of the same config.json."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from tilewright.errors import UserError
from tilewright.plan.decoder import from_config
from tilewright.plan.flops import conventions, forward_flops
from tilewright.plan.huggingface import KNOWN
from tilewright.plan.memory import train
from tilewright.plan.roofline import step_ops
from tilewright.plan.serving_memory import infer, kv_bytes_per_token
from tilewright.plan.training import Training

ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert")
BOTH = ("t5", "mt5", "umt5")  # an encoder and a decoder

# Published models: the fields of their config.json that matter, and the parameters that transformers 5.23 builds of
# them on the meta device (test_a_random_model_has_as_many_parameters_as_transformers_builds compares many more).
PUBLISHED = {
    "bert-base-uncased": (
        {"model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2},
        # (30522 + 512 + 2) h + 2h; a layer 4(h² + h) + 2hf + f + h + 4h; the pooler h² + h; h = 768, f = 3072
        109_482_240,
    ),
    "roberta-base": (
        {"model_type": "roberta", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
        124_645_632,
    ),
    "distilbert-base-uncased": (
        {"model_type": "distilbert", "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072,
         "vocab_size": 30522, "max_position_embeddings": 512},
        66_362_880,
    ),
    "t5-base": (
        {"model_type": "t5", "d_model": 768, "num_layers": 12, "num_heads": 12, "d_kv": 64, "d_ff": 3072,
         "vocab_size": 32128, "n_positions": 512},
        # vh + 2 · 32a; 12 layers of an encoder 4h² + 2hf + 2h and of a decoder 8h² + 2hf + 3h; 2h
        222_903_552,
    ),
    "flan-t5-xl": (
        {"model_type": "t5", "d_model": 2048, "num_layers": 24, "num_heads": 32, "d_kv": 64, "d_ff": 5120,
         "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        # 2vh + 2 · 32a; 24 layers of 4h² + 3hf + 2h and of 8h² + 3hf + 3h; 2h
        2_849_757_184,
    ),
    "phi-2": (
        {"model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 32,
         "intermediate_size": 10240, "vocab_size": 51200, "max_position_embeddings": 2048,
         "tie_word_embeddings": False},
        # 2vh + v + 2h; a layer 4(h² + h) + 2hf + f + h + 2h
        2_779_683_840,
    ),
    "starcoder2-3b": (
        {"model_type": "starcoder2", "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24,
         "num_key_value_heads": 2, "intermediate_size": 12288, "vocab_size": 49152, "max_position_embeddings": 16384,
         "sliding_window": 4096, "use_bias": True},
        # vh + 2h; a layer h² + h + 2(256h + 256) + h² + h + 2hf + f + h + 4h
        3_030_371_328,
    ),
    "c4ai-command-r-v01": (
        {"model_type": "cohere", "hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64,
         "num_key_value_heads": 64, "intermediate_size": 22528, "vocab_size": 256000,
         "max_position_embeddings": 8192, "use_qk_norm": False},
        # vh + h; a layer 4h² + 3hf + h
        34_980_831_232,
    ),
    "c4ai-command-r-plus": (
        {"model_type": "cohere", "hidden_size": 12288, "num_hidden_layers": 64, "num_attention_heads": 96,
         "num_key_value_heads": 8, "intermediate_size": 33792, "vocab_size": 256000,
         "max_position_embeddings": 131072, "use_qk_norm": True},
        103_810_674_688,
    ),
    "opt-125m": (
        {"model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
         "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": 768},
        125_239_296,
    ),
    "falcon-7b": (
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
         "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False},
        6_921_720_704,
    ),
    "bloom-560m": ({"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16,
                    "vocab_size": 250880}, 559_214_592),
    "mpt-7b": ({"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "expansion_ratio": 4,
                "vocab_size": 50432, "max_seq_len": 2048, "no_bias": True}, 6_649_286_656),
    "gpt-j-6b": ({"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400},
                 6_050_882_784),
    "DeepSeek-V3": (  # 671B with 37B active, as its makers say, without the layers that predict more tokens
        {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
         "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
         "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
         "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "max_position_embeddings": 163840},
        671_026_404_352,
    ),
    "DeepSeek-V2-Lite": (
        {"model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
         "intermediate_size": 10944, "moe_intermediate_size": 1408, "vocab_size": 102400, "n_routed_experts": 64,
         "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None,
         "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "max_position_embeddings": 163840},
        15_706_484_224,
    ),
    "Llama-4-Scout-17B-16E": (  # its text decoder
        {"model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
         "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "vocab_size": 202048,
         "max_position_embeddings": 10485760},
        107_769_861_120,
    ),
    "falcon-40b": (
        {"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
         "num_kv_heads": 8, "new_decoder_architecture": True, "bias": False, "vocab_size": 65024},
        41_303_293_952,
    ),
    "OLMo-2-1124-7B": (
        {"model_type": "olmo2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
         "intermediate_size": 11008, "vocab_size": 100352, "max_position_embeddings": 4096},
        7_298_617_344,
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088,
         "num_local_experts": 32, "num_experts_per_tok": 4, "max_position_embeddings": 131072},
        20_914_757_184,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_counted_exactly(name):
    config, parameters = PUBLISHED[name]
    assert from_config(config).parameters == parameters


UNKNOWN = ("bart", "vit", "deepseek_v4", "mamba", "qwen3_next", "llama5_text", "clip", "newllama",
           "x" * 999)  # fmt: skip


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_architecture_is_refused_and_not_guessed(kind):
    llama = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336,
        "vocab_size": 128256,
    }  # fmt: skip
    with pytest.raises(UserError, match="does not know the architecture") as caught:
        from_config({"model_type": kind, **llama})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    assert from_config({"model_type": "llama", **llama}).parameters


def test_the_documentation_lists_every_architecture():
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    assert [kind for kind in KNOWN if f"`{kind}`" not in text] == []


def test_a_variant_that_nobody_counts_is_refused():
    base = PUBLISHED["opt-125m"][0]
    with pytest.raises(UserError, match="word_embed_proj_dim"):
        from_config({**base, "word_embed_proj_dim": 512})
    with pytest.raises(UserError, match="no_bias"):
        from_config({**PUBLISHED["mpt-7b"][0], "no_bias": False})
    with pytest.raises(UserError, match="attn_config"):
        from_config({**PUBLISHED["mpt-7b"][0], "attn_config": 7})
    with pytest.raises(UserError, match="is_decoder"):
        from_config({**PUBLISHED["bert-base-uncased"][0], "is_decoder": True})
    with pytest.raises(UserError, match="no num_local_experts"):
        from_config({**PUBLISHED["OLMo-2-1124-7B"][0], "num_local_experts": 8})


def test_an_encoder_sees_every_token_and_has_no_logits_and_no_cache():
    bert = from_config(PUBLISHED["bert-base-uncased"][0])
    h, f, s = 768, 3072, 512
    assert forward_flops(bert, causal=True) == 12 * (2 * (4 * h * h + 2 * h * f) + 4 * s * h)
    assert not any("logits" in op.name or "entropy" in op.name for op in step_ops(bert, Training()))
    anatomy = train(bert, Training(micro_batch=8))
    assert anatomy["logits and loss"] == 0 and anatomy["weights"] == 4 * 109_482_240
    with pytest.raises(UserError, match="encoder"):
        infer(bert, 1, 128)
    assert "head for a task" in bert.note


def test_an_encoder_with_a_decoder_counts_both_and_what_goes_between_them():
    t5 = dataclasses.replace(from_config(PUBLISHED["t5-base"][0]), sequence=512)
    assert (t5.layers, t5.cross_layers) == (24, 12) and "source" in t5.note
    h, f, s, layers = 768, 3072, 512, 12
    matmuls = 12 * h * h + 4 * h * f  # of an encoder's layer and a decoder's: three attentions, two MLPs
    scores = 4 * h * (s + s / 2 + s)  # the encoder's, the decoder's, and those over the source
    assert forward_flops(t5, causal=True) == layers * (2 * matmuls + scores) + 2 * 32128 * h
    anatomy = train(t5, Training(micro_batch=8))
    assert anatomy["weights"] == 4 * 222_903_552
    ops = {op.name: op for op in step_ops(t5, Training(attention="softmax"))}
    cross, own = ops["cross attention, forward"], ops["attention, forward"]
    assert cross.cost.flops == 4 * h * s * s and own.cost.flops == pytest.approx(0.75 * cross.cost.flops)
    assert "softmax of cross attention, backward" in ops
    longer = dataclasses.replace(
        t5, layers=36, cross_layers=12
    )  # twelve more layers of an encoder cost no second branch
    deeper = dataclasses.replace(t5, layers=36, cross_layers=24)
    assert train(longer, Training())["activations"] < train(deeper, Training())["activations"]
    for split in ({"pipeline": 2}, {"context": 2}):
        with pytest.raises(UserError, match="encoder with a decoder"):
            train(t5, Training(**split))
    with pytest.raises(UserError, match="two caches"):
        infer(t5, 1, 128)
    with pytest.raises(UserError, match="more special layers"):
        dataclasses.replace(t5, cross_layers=25)
    with pytest.raises(UserError, match="feed_forward_proj"):
        from_config({**PUBLISHED["t5-base"][0], "feed_forward_proj": 3})


def test_latent_attention_takes_the_flops_and_the_cache_that_its_makers_say():
    """250 GFLOPs a token to train at 4,096 tokens, and 70.272 kB of cache a token: arXiv 2505.09343."""
    model = dataclasses.replace(from_config(PUBLISHED["DeepSeek-V3"][0]), sequence=4096)
    assert conventions(model)["matmuls, causal"].model == pytest.approx(250e9, rel=0.005)
    assert kv_bytes_per_token(model) == 70_272
    assert model.active_parameters == pytest.approx(37.5e9, rel=0.01)
    # Every rank keeps all latents; its weights and those of the experts are shared.
    one, eight = (infer(model, 16, 4096, tensor=ranks) for ranks in (1, 8))
    assert one["KV cache"] == eight["KV cache"] and one["weights"] == 8 * eight["weights"]
    plain = dataclasses.replace(model, kv_rank=0, q_rank=0, rope_dim=0, value_dim=0)
    assert kv_bytes_per_token(plain) > 80 * kv_bytes_per_token(model)
    ops = {op.name: op for op in step_ops(model, Training())}
    assert ops["kv up matmul, forward"].cost.flops == 2 * 4096 * 512 * 128 * (128 + 128)
    with pytest.raises(UserError, match="give kv_rank"):
        dataclasses.replace(model, kv_rank=0)


def test_attention_in_chunks_looks_back_to_the_beginning_of_its_own():
    scout = from_config(PUBLISHED["Llama-4-Scout-17B-16E"][0])
    assert (scout.windowed_layers, scout.window, scout.chunked) == (36, 8192, True)
    seen = [1 + i % 4 for i in range(10)]  # tokens that each sees in chunks of 4
    short = dataclasses.replace(scout, sequence=10, window=4, windowed_layers=scout.layers)
    assert short.context(causal=True) == pytest.approx(sum(seen) / 10 - 0.5)


def test_the_text_decoder_of_a_multimodal_model_is_named_as_such():
    text = {**PUBLISHED["phi-2"][0]}
    found = from_config({"model_type": "imaginary_vision", "text_config": text})
    assert found.parameters == 2_779_683_840 and "only the text decoder" in found.note


def draw(kind, rng):
    """A small config.json of this architecture, with its switches anyhow."""
    kv_heads = rng.choice((1, 2, 3))
    heads, layers = kv_heads * rng.choice((1, 2, 4)), rng.randint(1, 7)
    width, ffn, vocabulary = heads * 2 * rng.randint(4, 20), rng.randint(8, 200), rng.randint(300, 999)
    length = rng.choice((32, 128))
    tied, flag = {"tie_word_embeddings": rng.random() < 0.5} if rng.random() < 0.7 else {}, lambda: rng.random() < 0.5
    if kind in ("gpt2", "gpt_bigcode", "gptj", "codegen"):
        if kind == "codegen":
            heads, width = 4, 4 * 2 * rng.randint(4, 20)  # its attention is written for four cores
        more = {"multi_query": flag()} if kind == "gpt_bigcode" else {}
        inner = {"n_inner": ffn} if flag() else {}
        return {"n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary, "n_positions": length,
                "rotary_dim": 2, **inner, **tied, **more}  # fmt: skip
    if kind == "mpt":
        return {"d_model": width, "n_layers": layers, "n_heads": heads, "vocab_size": vocabulary,
                "expansion_ratio": 4, "max_seq_len": length, **tied}  # fmt: skip
    if kind in BOTH:  # whose head transformers ties where nothing is loaded, whatever the file says
        more = {"num_decoder_layers": rng.randint(1, 7)} if flag() else {}
        more |= {"feed_forward_proj": rng.choice(("relu", "gated-gelu", "gated-silu"))} if flag() else {}
        return {"d_model": width, "num_layers": layers, "num_heads": heads, "d_kv": rng.randint(2, 20), "d_ff": ffn,
                "vocab_size": vocabulary, "relative_attention_num_buckets": rng.randint(8, 32), **more}  # fmt: skip
    if kind == "distilbert":
        return {"dim": width, "n_layers": layers, "n_heads": heads, "hidden_dim": ffn, "vocab_size": vocabulary,
                "max_position_embeddings": length}  # fmt: skip
    base = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary,
            "max_position_embeddings": length}  # fmt: skip
    if kind in ENCODERS:
        return {**base, "intermediate_size": ffn, "type_vocab_size": rng.randint(1, 3)}
    if kind == "bloom":
        return {"hidden_size": width, "n_layer": layers, "n_head": heads, "vocab_size": vocabulary, **tied}
    if kind == "opt":
        return {**base, "ffn_dim": ffn, "word_embed_proj_dim": width, "enable_bias": flag(),
                "do_layer_norm_before": flag(), **tied}  # fmt: skip
    if kind == "falcon":
        return {**base, "num_kv_heads": kv_heads, "new_decoder_architecture": flag(), "multi_query": flag(),
                "parallel_attn": flag(), "bias": flag(), "alibi": flag(), **tied}  # fmt: skip
    if kind.startswith("deepseek"):
        return {**base, "n_group": 1, "topk_group": 1, "intermediate_size": ffn, "num_key_value_heads": heads,
                "moe_intermediate_size": rng.randint(4, 50), "n_routed_experts": 4 * rng.randint(1, 2),
                "n_shared_experts": rng.randint(1, 3), "first_k_dense_replace": rng.randint(0, 3),
                "num_experts_per_tok": rng.randint(1, 3), "kv_lora_rank": 2 * rng.randint(2, 20),
                "q_lora_rank": 2 * rng.randint(2, 20) if kind.endswith("3") or flag() else None,
                "qk_nope_head_dim": 2 * rng.randint(2, 20), "qk_rope_head_dim": 2 * rng.randint(2, 20),
                "v_head_dim": 2 * rng.randint(2, 20), **tied}  # fmt: skip
    if kind == "llama4_text":
        return {**base, "intermediate_size": ffn, "intermediate_size_mlp": rng.randint(4, 50), "pad_token_id": 0,
                "num_key_value_heads": kv_heads, "head_dim": 2 * rng.randint(2, 20), "attention_bias": flag(),
                "num_local_experts": rng.randint(2, 5), "num_experts_per_tok": 1, "attention_chunk_size": 16,
                "interleave_moe_layer_step": rng.randint(1, 3), "no_rope_layer_interval": rng.randint(1, 4),
                **tied}  # fmt: skip
    base |= {"intermediate_size": ffn, "num_key_value_heads": kv_heads, "attention_bias": flag(), "mlp_bias": flag(),
             "use_bias": flag(), "use_qkv_bias": flag(), "use_qk_norm": flag(), "use_parallel_residual": flag(),
             "sliding_window": 16, "use_sliding_window": flag(), "pad_token_id": 0, **tied}  # fmt: skip
    if kind not in ("phi", "stablelm", "gpt_neox", "phi3", "qwen2", "qwen2_moe", "cohere", "olmo", "olmo2", "olmo3",
                    "olmoe", "granite", "granitemoe", "starcoder2", "smollm3"):  # fmt: skip
        base["head_dim"] = 2 * rng.randint(2, 20)
    if kind == "stablelm":
        base["qk_layernorm"] = flag()
    experts = rng.randint(2, 5)
    base |= {"num_local_experts": experts} if kind in ("mixtral", "granitemoe", "gpt_oss") else {}
    base |= {"num_experts": experts} if kind in ("olmoe", "qwen2_moe", "qwen3_moe") else {}
    base |= (
        {"num_experts_per_tok": rng.randint(1, experts)} if kind.endswith(("moe", "oss")) or kind == "mixtral" else {}
    )
    if kind in ("qwen2_moe", "qwen3_moe"):
        base |= {"moe_intermediate_size": rng.randint(4, 50), "decoder_sparse_step": rng.randint(1, 3),
                 "mlp_only_layers": rng.sample(range(layers), rng.randint(0, layers))}  # fmt: skip
        base |= {"shared_expert_intermediate_size": rng.randint(4, 50)} if kind == "qwen2_moe" else {}
    return base


def model_class(kind):
    import transformers

    if kind in ENCODERS:
        return transformers.AutoModel
    return transformers.AutoModelForSeq2SeqLM if kind in BOTH else transformers.AutoModelForCausalLM


@pytest.mark.parametrize("kind", KNOWN)
def test_a_random_model_has_as_many_parameters_as_transformers_builds(kind):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    built = 0
    for _ in range(12):
        raw = {"model_type": kind, **draw(kind, rng)}
        try:
            config = transformers.AutoConfig.for_model(**raw)
        except Exception as error:  # its own checks of a configuration, such as windows, are not what is tested
            print(type(error).__name__, error)
            continue
        make = model_class(kind)
        with torch.device("meta"):
            model = make.from_config(config)
        expected = sum(parameter.numel() for parameter in model.parameters())
        written = json.loads(config.to_json_string(use_diff=True))
        for form in (raw, written):
            found = from_config(form)
            assert found.parameters == expected, (seed, form, expected - found.parameters)
        windowed = [kind_ for kind_ in getattr(config, "layer_types", None) or [] if kind_ == "sliding_attention"]
        if windowed:
            assert found.windowed_layers == len(windowed), (seed, raw)
        built += 1
    assert built >= 6


@pytest.mark.parametrize("kind", KNOWN)
def test_a_random_model_has_the_flops_that_torch_counts(kind):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    seed, tokens = random.randrange(10**6), 16
    print(f"seed {seed}")
    rng, compared = random.Random(seed), 0
    for number in range(60):
        if number >= 6 and compared:  # transformers cannot run some of what is drawn
            break
        raw = {"model_type": kind, **draw(kind, rng)}
        make = model_class(kind)
        try:
            config = transformers.AutoConfig.for_model(**raw)
            # Kernels that the counter knows.
            config._attn_implementation = config._experts_implementation = "eager"
            model = make.from_config(config).eval()
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                inputs = torch.randint(3, 200, (1, tokens))
                model(inputs, **({"decoder_input_ids": inputs} if kind in BOTH else {}))
        except (ValueError, RuntimeError, AttributeError) as error:  # shapes that transformers itself cannot run
            print(type(error).__name__, error)
            continue
        found = dataclasses.replace(from_config(raw), sequence=tokens, window=0, windowed_layers=0)
        if kind == "llama4_text":  # transformers computes every expert for every token
            found = dataclasses.replace(found, active_experts=found.experts)
        pooler = 2 * found.width**2 if found.pooler else 0  # for one token of a sequence
        assert tokens * forward_flops(found) + pooler == pytest.approx(counter.get_total_flops(), rel=1e-4), (seed, raw)
        compared += 1
    assert compared
