"""Hugging Face's Trainer learns the same with the callback as without, through accumulation, evaluation and saving."""

import inspect

import pytest
import torch
from safetensors import safe_open

from optimize.zoo import MODELS
from tilewright.optimize import TilewrightCallback
from tilewright.runtime import dispatch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _plain_ops(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


def sequences(number):
    """Sequences of unequal lengths, the first third of each not trained on."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for _ in range(number):
        length = int(torch.randint(4, 13, (1,), generator=generator))
        ids = torch.randint(3, 64, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return found


def padded(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    pads = {"input_ids": 0, "labels": -100}
    batch = {
        name: torch.tensor([r[name] + [pad] * (longest - len(r[name])) for r in rows]) for name, pad in pads.items()
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    return {**batch, "attention_mask": (torch.arange(longest) < lengths[:, None]).long()}


def train(folder, callbacks, **options):
    """A trainer that has trained, saved once in between and evaluated twice."""
    model = MODELS["Llama"][0]()
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=4, logging_steps=1,
        learning_rate=1e-2, optim="sgd", report_to=[], use_cpu=True, disable_tqdm=True, eval_strategy="steps",
        eval_steps=2, save_strategy="steps", save_steps=2, seed=1, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, data_collator=padded, train_dataset=sequences(24), eval_dataset=sequences(4),
        callbacks=callbacks, compute_metrics=lambda each: {"sum": float(abs(each.predictions).sum())},
    )  # fmt: skip
    trainer.train()
    return trainer


def curve(trainer):
    names = ("loss", "grad_norm", "eval_loss", "eval_sum")
    return [(name, row[name]) for row in trainer.state.log_history for name in names if name in row]


@pytest.mark.parametrize("half", [False, True])
def test_a_trainer_learns_the_same(half, tmp_path):
    callback = TilewrightCallback()
    plain, fast = train(tmp_path / "plain", [], bf16=half), train(tmp_path / "fast", [callback], bf16=half)
    one, other = curve(plain), curve(fast)
    assert [name for name, _ in one] == [name for name, _ in other] and len(one) == 10
    assert [v for _, v in other] == pytest.approx([v for _, v in one], rel=3e-3 if half else 1e-5)
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(fast.model.state_dict()[name], value, rtol=0, atol=2e-4 if half else 1e-6)

    changed = {site.rule for site in callback.report.changed}
    assert {"linear_cross_entropy", "add_norm", "norm", "glu"} <= changed and not callback.report.captured.failures
    # One graph in training, more only for other lengths and for evaluation.
    assert len(callback.report.captured.graphs) <= 4

    # The model is as it was, and what the trainer reads of it always was.
    assert fast.model._compiled_call_impl is None and "_compiled_call_impl" not in vars(fast.model)
    assert fast.model_accepts_loss_kwargs is plain.model_accepts_loss_kwargs is True
    saved = [tmp_path / kind / "checkpoint-2" / "model.safetensors" for kind in ("plain", "fast")]
    first, second = (safe_open(path, "pt") for path in saved)
    assert sorted(first.keys()) == sorted(second.keys())
    for name in first.keys():  # noqa: SIM118, it is no dict
        torch.testing.assert_close(second.get_tensor(name), first.get_tensor(name), rtol=0, atol=2e-4 if half else 1e-6)
    torch.testing.assert_close(
        torch.tensor(fast.predict(sequences(4)).predictions), torch.tensor(plain.predict(sequences(4)).predictions),
        rtol=0, atol=5e-3 if half else 1e-5,
    )  # fmt: skip


def test_what_a_trainer_reads_of_a_model_stays():
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    from tilewright.optimize import optimized

    model = MODELS["Llama"][0]()
    forward, signature, loss_function = model.forward, inspect.signature(model.forward), model.loss_function
    with optimized(model):
        assert model.forward == forward and inspect.signature(model.forward) == signature
        assert any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
        assert model.loss_function is loss_function is ForCausalLMLoss
        assert LOSS_MAPPING["ForCausalLM"] is ForCausalLMLoss
        assert type(model).__name__ == "LlamaForCausalLM" and not vars(model).get("forward")


def test_a_loss_is_divided_by_the_number_of_items_it_is_given():
    from tilewright.optimize import optimized

    model = MODELS["Llama"][0]().train()
    batch = padded(sequences(3))
    with optimized(model) as report:
        for count in (torch.tensor(7), torch.tensor(29)):
            found = model(**batch, num_items_in_batch=count)
            expected = model._call_impl(**batch, num_items_in_batch=count)
            torch.testing.assert_close(found.loss, expected.loss)
            torch.testing.assert_close(found.logits.float(), expected.logits)
        assert any(site.rule == "linear_cross_entropy" for site in report.changed)
        assert len(report.captured.graphs) == 1
