"""Adapters of PEFT get the gradients they got, whichever of the two came first."""

import copy

import pytest
import torch

from optimize.zoo import MODELS, _language, step
from tilewright.optimize import optimize, optimized
from tilewright.runtime import dispatch

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
CASES = {
    "q and v": ("Llama", {"target_modules": ["q_proj", "v_proj"]}),
    "all and a trained head": ("Llama", {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}),
    "the head": ("Llama", {"target_modules": ["q_proj", "lm_head"]}),
    "Conv1D": ("GPT-2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
}


@pytest.fixture(autouse=True)
def _plain_ops(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


def adapted(model, **options):
    torch.manual_seed(3)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False, **options
    )
    return peft.get_peft_model(model, config).train()


def error(found, truth):
    """Of the gradient that is furthest off, relative to its size."""
    return max(((found[name] - each).norm() / each.norm()).item() for name, each in truth.items())


@pytest.mark.parametrize("case", CASES)
def test_adapters_get_the_gradients_they_got(case):
    name, options = CASES[case]
    model = adapted(MODELS[name][0](), **options)
    loss, gradients = step(copy.deepcopy(model).double(), _language)
    before, plain = step(model, _language)
    with optimized(model) as report:
        after, found = step(model, _language)
    assert found.keys() == plain.keys() == gradients.keys() and any("lora_" in each for each in found)
    assert abs(after - loss) <= abs(before - loss) + 1e-6
    assert error(found, gradients) <= 1.5 * error(plain, gradients) + 1e-6
    rules = {site.rule for site in report.changed}
    assert {"add_norm"} <= rules and ("linear_cross_entropy" in rules) == (case != "the head")
    if case == "the head":
        assert any("not from a linear layer" in site.declined for site in report.declined)
    assert all("__" not in site.where for site in report.sites)


def test_adapters_may_come_after_optimize():
    name, options = CASES["q and v"]
    truth, gradients = step(adapted(MODELS[name][0](), **options), _language)
    model = MODELS[name][0]()
    report = optimize(model)
    loss, found = step(adapted(model, **options), _language)
    torch.testing.assert_close(loss, truth)
    assert error(found, gradients) < 1e-5 and report.changed


def test_adapters_may_be_disabled_and_merged():
    name, options = CASES["q and v"]
    model = adapted(MODELS[name][0](), **options)
    with torch.no_grad():
        expected = _language(model)
        with model.disable_adapter():
            without = _language(model)
        assert abs(expected - without) > 1e-3
        with optimized(model) as report:
            torch.testing.assert_close(_language(model), expected)
            with model.disable_adapter():
                torch.testing.assert_close(_language(model), without)
            torch.testing.assert_close(_language(model), expected)
            merged = model.merge_and_unload()
            torch.testing.assert_close(_language(merged), expected)
        assert report.changed and merged._compiled_call_impl is None
        with optimized(merged) as report:
            torch.testing.assert_close(_language(merged), expected)
        assert report.changed and all("lora" not in each for each in merged.state_dict())
