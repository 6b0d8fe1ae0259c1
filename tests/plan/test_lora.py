"""Adapters beside frozen weights: fewer states, gradients and FLOPs, the same activations."""

import dataclasses

import pytest
import torch

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.plan.budget import checkpoint
from tilewright.plan.decoder import from_config, load
from tilewright.plan.memory import train
from tilewright.plan.parallel import Cluster, estimate, search
from tilewright.plan.training import Training

H100 = hardware.find("H100-SXM5")
SEVEN = load("7b")
FULL = Training(precision="fsdp", loss="fused", micro_batch=4)
LORA = dataclasses.replace(FULL, lora=16)


def test_adapters_are_as_many_as_peft_builds():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    raw = {"model_type": "llama", "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
           "num_key_value_heads": 2, "intermediate_size": 200, "vocab_size": 300}  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**raw))
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert from_config(raw).adapter_parameters(8) == trained


def test_only_adapters_have_gradients_and_states():
    adapters = SEVEN.adapter_parameters(16)
    full, lora = train(SEVEN, FULL), train(SEVEN, LORA)
    assert lora["weights"] == pytest.approx(2 * SEVEN.parameters + 4 * adapters)
    assert lora["optimizer"] == pytest.approx(8 * adapters) and full["optimizer"] == 8 * SEVEN.parameters
    assert lora["activations"] == full["activations"] and lora.total < full.total - 10 * SEVEN.parameters
    sharded = train(SEVEN, dataclasses.replace(LORA, data=8, zero=3))
    assert sharded["weights"] == pytest.approx(lora["weights"] / 8)
    assert checkpoint(SEVEN, LORA).whole == 12 * adapters


def test_a_step_computes_no_gradients_of_frozen_weights():
    full, lora = (estimate(SEVEN, how, Cluster(H100, 1)) for how in (FULL, LORA))
    assert 0.6 < lora.parts["matmul"] / full.parts["matmul"] < 0.8
    assert lora.parts["optimizer"] < 0.02 * full.parts["optimizer"]
    assert lora.parts["attention"] == full.parts["attention"]
    ranks = [estimate(SEVEN, dataclasses.replace(how, data=8), Cluster(H100, 8)).data_traffic for how in (FULL, LORA)]
    assert ranks[1] < 0.05 * ranks[0]
    assert search(SEVEN, Cluster(H100, 1), 8, 1, LORA)[0].fits
    with pytest.raises(UserError, match="rank of its adapters"):
        Training(lora=-1)
