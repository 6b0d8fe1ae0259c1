import json

import pytest

from tilewright.errors import UserError
from tilewright.plan.decoder import Decoder, from_config, from_gpt, load, read_config
from tilewright.plan.gpt import PRESETS, preset

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def changed(base=None, **fields):
    return {**(LLAMA if base is None else base), **fields}


# The counts that the models' own files give.
PUBLISHED = {
    "Llama-3.1-8B": (LLAMA, 8_030_261_248),
    "Llama-3.1-70B": (
        changed(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672),
        70_553_706_496,
    ),
    "Llama-3.1-405B": (
        changed(hidden_size=16384, num_hidden_layers=126, num_attention_heads=128, intermediate_size=53248),
        405_853_388_800,
    ),
    "Llama-2-7B": (changed(num_key_value_heads=32, intermediate_size=11008, vocab_size=32000), 6_738_415_616),
    "TinyLlama-1.1B": (
        changed(
            hidden_size=2048, num_hidden_layers=22, num_key_value_heads=4, intermediate_size=5632, vocab_size=32000
        ),
        1_100_048_384,
    ),
    "Mistral-7B": (changed(model_type="mistral", vocab_size=32000, sliding_window=4096), 7_241_732_096),
    "Mixtral-8x7B": (
        changed(model_type="mixtral", vocab_size=32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Qwen2-7B": (
        changed(
            model_type="qwen2", hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
            intermediate_size=18944, vocab_size=152064,
        ),
        7_615_616_512,
    ),
    "Qwen3-8B": (
        changed(model_type="qwen3", num_hidden_layers=36, head_dim=128, intermediate_size=12288, vocab_size=151936),
        8_190_735_360,
    ),
    "Qwen3-30B-A3B": (
        changed(
            model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_key_value_heads=4, head_dim=128,
            intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
            vocab_size=151936,
        ),
        30_532_122_624,
    ),
    "Gemma-7B": (
        changed(
            model_type="gemma", hidden_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=16,
            head_dim=256, intermediate_size=24576, vocab_size=256000, tie_word_embeddings=None,
        ),
        8_537_680_896,
    ),
    "Gemma-2-9B": (
        changed(
            model_type="gemma2", hidden_size=3584, num_hidden_layers=42, num_attention_heads=16, head_dim=256,
            intermediate_size=14336, vocab_size=256000, tie_word_embeddings=None, sliding_window=4096,
        ),
        9_241_705_984,
    ),
    "Gemma-3-1B": (
        changed(
            model_type="gemma3_text", hidden_size=1152, num_hidden_layers=26, num_attention_heads=4,
            num_key_value_heads=1, head_dim=256, intermediate_size=6912, vocab_size=262144, tie_word_embeddings=None,
            sliding_window=512,
        ),
        999_885_952,
    ),
    "Gemma-3-4B, its decoder": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        },
        3_880_263_168,
    ),
    "Qwen1.5-MoE-A2.7B": (
        changed(
            model_type="qwen2_moe", hidden_size=2048, num_hidden_layers=24, num_attention_heads=16,
            num_key_value_heads=16, intermediate_size=5632, moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4, vocab_size=151936,
        ),
        14_315_784_192,
    ),
    "Pythia-6.9B": (
        {
            "model_type": "gpt_neox", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "intermediate_size": 16384, "vocab_size": 50432, "tie_word_embeddings": False,
        },
        6_857_302_016,
    ),
    "GPT-2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, 124_439_808),
    "GPT-2 XL": (
        {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257}, 1_557_611_200,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models_are_exact(name):
    config, parameters = PUBLISHED[name]
    assert from_config(config).parameters == parameters


def test_a_mixture_of_experts_has_fewer_active_parameters():
    assert from_config(PUBLISHED["Mixtral-8x7B"][0]).active_parameters == 12_879_925_248
    assert from_config(PUBLISHED["Qwen3-30B-A3B"][0]).active_parameters == 3_353_032_704


def test_a_window_shortens_the_context():
    gemma = from_config({**PUBLISHED["Gemma-2-9B"][0], "max_position_embeddings": 8192})
    assert (gemma.window, gemma.windowed_layers, gemma.context()) == (4096, 21, 6144)
    assert from_config(LLAMA).context() == 131072
    assert from_config(changed(model_type="qwen2", sliding_window=4096)).window == 0  # use_sliding_window is off


@pytest.mark.parametrize("name", PRESETS)
def test_presets_count_the_same_either_way(name):
    assert from_gpt(preset(name)).parameters == preset(name).parameters


def test_an_unknown_family_is_refused():
    with pytest.raises(UserError, match="does not know the architecture 'newllama'"):
        from_config(changed(model_type="newllama"))


def test_the_decoder_inside_a_multimodal_model_is_found():
    assert from_config({"model_type": "llava", "text_config": LLAMA}).parameters == 8_030_261_248


def test_overrides_change_fields_and_refuse_what_is_not_one():
    assert load("125m", ["model.layers=3", "tied=false"]).layers == 3
    for bad, message in (("layer=3", "did you mean layers"), ("layers=x", "type int"), ("layers", "field=value")):
        with pytest.raises(UserError, match=message):
            load("125m", [bad])
    with pytest.raises(UserError, match=r"There is no preset '125'; did you mean 125m\?"):
        load("125")


def test_what_follows_from_a_changed_field_of_a_preset_follows():
    more_heads = load("1b", ["heads=32"])
    assert (more_heads.head_dim, more_heads.kv_heads, more_heads.parameters) == (64, 32, load("1b").parameters)
    assert load("1b", ["width=4096", "ffn=1000"]).ffn == 1000 and load("1b", ["width=4096"]).ffn == 16384


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gpt_block=optimised", "standard or optimized"),
        ("norm=foo", "layer or rms"),
        ("positions=foo", "learned, rope or none"),
        ("norms=-100", "at least 1"),
        ("shared_ffn=-5", "at least 0"),
        ("layers=1000000", "no model has"),
        ("dropout=nan", "dropout"),
    ],
)
def test_a_change_that_makes_no_model_is_one_sentence(change, message):
    with pytest.raises(UserError, match=message):
        load("1b", [change])


def test_attention_of_another_kind_is_refused_and_not_miscounted():
    with pytest.raises(UserError, match="does not know the architecture 'deepseek_v4'"):
        from_config(changed(model_type="deepseek_v4", kv_lora_rank=512, n_routed_experts=256))
    with pytest.raises(UserError, match="another architecture"):
        from_config(changed(kv_lora_rank=512))


def test_names_that_are_no_files_are_one_sentence(tmp_path):
    for name in ("x" * 5000, "/dev/zero", str(tmp_path), "a/" + "b" * 300 + ".json"):
        with pytest.raises(UserError):
            load(name)
    with pytest.raises(UserError) as caught:
        from_config(changed(model_type="\x1b[2J" * 50))
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "4096"}, "whole number"),
        ({"hidden_size": -1}, "whole number"),
        ({"hidden_size": 10**30}, "2\\^40"),
        ({"hidden_size": 1e9}, "whole number"),
        ({"hidden_size": True}, "whole number"),
        ({"num_attention_heads": 0}, "0 heads"),
        ({"num_attention_heads": 33}, "does not divide"),
        ({"num_key_value_heads": 5}, "key-value heads"),
        ({"num_hidden_layers": 0}, "at least 1"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"model_type": None}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "mistral", "layer_types": 7, "sliding_window": 8}, "list"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}, "cannot be active"),
        ({"model_type": "mixtral", "num_local_experts": 4}, "lacks num_experts_per_tok"),
        ({"num_local_experts": 4}, "another architecture"),
    ],
)
def test_hostile_fields_are_one_sentence(fields, message):
    with pytest.raises(UserError, match=message) as caught:
        from_config(changed(**fields))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", "[1]", "\ud800".encode("utf-8", "surrogatepass"), " " * 2_000_000]
)
def test_hostile_files_are_one_sentence(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="Cannot read"):
        read_config(tmp_path / "none.json")


def test_a_directory_with_a_config_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load(str(tmp_path)) == from_config(LLAMA)


def test_a_decoder_is_refused_where_its_fields_contradict():
    with pytest.raises(UserError, match="special layers"):
        Decoder(8, 2, 2, 2, 4, 32, 64, 16, windowed_layers=3)
