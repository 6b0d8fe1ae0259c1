"""Generation and evaluation give what they gave, in every way that a Hugging Face model is called."""

import pytest
import torch

from optimize.zoo import MODELS, NanoGPT, _ids
from tilewright.optimize import optimized
from tilewright.runtime import dispatch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _plain_ops(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


def _left_padded():
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :4] = 0
    return {"input_ids": _ids().masked_fill(mask == 0, 0), "attention_mask": mask}


def _generated(model, **options):
    torch.manual_seed(7)
    return model.generate(**_left_padded(), max_new_tokens=5, pad_token_id=0, **options)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_the_same_tokens_are_generated(name):
    model = MODELS[name][0]().eval()
    ways = [{"do_sample": False}, {"do_sample": True, "top_k": 20}]
    if name == "Llama":
        ways += [{"do_sample": False, "use_cache": False}, {"num_beams": 2, "do_sample": False}]
    expected = [_generated(model, **way) for way in ways]
    with optimized(model):
        for way, tokens in zip(ways, expected, strict=True):
            assert _generated(model, **way).equal(tokens), way


def _flat(output):
    value = output if isinstance(output, tuple) else output.to_tuple()
    return [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


WAYS = {
    "tuple": {"return_dict": False},
    "hidden states": {"output_hidden_states": True, "use_cache": False},
    "attentions": {"output_attentions": True, "use_cache": False},
    "last logits": {"logits_to_keep": 1, "use_cache": False},
    "labels": {"labels": _ids(), "use_cache": False},
}


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_evaluation_gives_the_same_numbers(name):
    model = MODELS[name][0]().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = {way: model(**_left_padded(), **options) for way, options in WAYS.items()}
        with optimized(model) as report:
            for way, options in WAYS.items():
                found = model(**_left_padded(), **options)
                assert type(found) is type(expected[way])
                one, other = _flat(expected[way]), _flat(found)
                assert len(one) == len(other) > 0, way
                for left, right in zip(one, other, strict=True):
                    torch.testing.assert_close(right, left, rtol=1e-4, atol=1e-5, msg=way)
    assert report.changed and not report.captured.failures


def test_a_prefill_fills_the_cache_that_decoding_reads():
    model, ids = MODELS["Llama"][0]().eval(), _ids()
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        with optimized(model) as report:
            first = model(input_ids=ids[:, :6], use_cache=True)
            assert first.past_key_values.get_seq_length() == 6
            rest = model(input_ids=ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
            torch.testing.assert_close(torch.cat((first.logits, rest.logits), 1), whole, rtol=1e-4, atol=1e-5)
        assert report.changed


def test_batches_of_every_shape_are_captured():
    model = MODELS["Llama"][0]().eval()
    with torch.no_grad(), optimized(model) as report:
        for rows, columns in [
            (2, 9),
            (2, 5),
            (3, 12),
            (1, 4),
            (4, 7),
            (5, 6),
            (1, 1),
            (6, 3),
            (2, 16),
            (7, 2),
            (8, 11),
        ]:
            ids = torch.randint(3, 64, (rows, columns))
            found = model(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(found, model._call_impl(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
        assert len(report.captured.graphs) <= 6 and all(report.captured.graphs)
        rules = [{site.rule for site in sites if site.is_changed} for sites in report.captured.graphs]
        assert all({"norm", "add_norm", "glu"} <= each for each in rules)


def test_a_plain_model_in_training_evaluation_and_inference_mode():
    torch.manual_seed(0)
    model = NanoGPT(dropout=0.5).eval()
    ids = _ids()
    expected = model(ids, ids)
    with optimized(model) as report:
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                logits, loss = model(ids, ids)
                torch.testing.assert_close(loss.detach(), expected[1].detach())
                torch.testing.assert_close(logits + 0.0, expected[0], rtol=1e-4, atol=1e-5, check_device=False)
            assert loss.requires_grad is (mode is torch.enable_grad)
            assert loss.is_inference() is (mode is torch.inference_mode)
        model.train()
        drawn = {model(ids, ids)[1].item() for _ in range(3)}
        assert len(drawn) == 3 and expected[1].item() not in drawn
        torch.manual_seed(3)
        once = model(ids, ids)[1]
        torch.manual_seed(3)
        assert model(ids, ids)[1].equal(once)
        model.eval()
        torch.testing.assert_close(model(ids, ids)[1], expected[1])
    assert any("dropout" in site.detail for site in report.changed)
