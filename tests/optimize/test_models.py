"""Models that people have, with their sites replaced: loss and gradients, eager and compiled, and back to the bit."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
import torch

from optimize import zoo  # tests/ is on the path
from tilewright.optimize import api, backend, optimized
from tilewright.optimize.backend import Backend, Captured
from tilewright.optimize.rewrite import count
from tilewright.optimize.rules import ALL
from tilewright.runtime import dispatch

RECORD = json.loads(zoo.RECORD.read_text())
TRACED = ("Llama", "Gemma3", "GPT-2", "nanoGPT", "unplanned")  # of which a compiler sees the registered ops


@pytest.fixture(autouse=True)
def _fresh() -> None:
    pytest.importorskip("transformers")
    torch._dynamo.reset()


def _errors(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> dict[str, float]:
    assert found.keys() == truth.keys()
    size = max(each.norm().item() for each in truth.values())
    return {
        name: ((each - truth[name]).norm() / max(truth[name].norm().item(), 1e-4 * size)).item()
        for name, each in found.items()
    }


Step = tuple[torch.Tensor, dict[str, torch.Tensor]]  # its loss and gradients


def _check(name: str, compile: str = "none") -> None:
    build, loss_of = zoo.MODELS[name]
    model = build().train()
    keys, kind = list(model.state_dict()), type(model)
    true, own = zoo.oracle(model, loss_of), zoo.step(model, loss_of)
    with optimized(model, compile=compile) as report:
        found = zoo.step(model, loss_of)
        assert list(model.state_dict()) == keys and type(model) is kind
    assert not report.captured.failures
    _check_step(found, own, true)
    _check_sites(name, count(report.sites), report)
    again_loss, again = zoo.step(model, loss_of)
    assert torch.equal(again_loss, own[0]) and all(torch.equal(again[each], own[1][each]) for each in own[1])


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


def _check_sites(name: str, sites: dict[str, int], report: object = "") -> None:
    """The sites on record; of masks at least as many, for older transformers make them in more models.

    They also draw at random which layers of Whisper's encoder run, where Dynamo must cut: its sites are not found then.
    """
    if name == "Whisper" and _release("transformers") < (5, 23):
        return
    recorded = dict(RECORD[name])
    masks, fewest = sites.pop("mask", 0), recorded.pop("mask", 0)
    assert sites == recorded and masks >= fewest, f"python tests/optimize/zoo.py writes the table anew\n{report}"


def _check_step(step: Step, plain_step: Step, true: Step) -> None:
    """A step is no further from float64 than the model's own."""
    (loss, found), (own_loss, own), (true_loss, truth) = step, plain_step, true
    assert (loss - true_loss).abs() <= 2 * (own_loss - true_loss).abs() + 1e-6 * true_loss.abs()
    plain = _errors(own, truth)
    for parameter, error in _errors(found, truth).items():
        assert error <= 2 * plain[parameter] + 2e-6, (
            f"{parameter}: {error:.1e}, the model itself {plain[parameter]:.1e}"
        )


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_model_is_no_further_from_float64_and_undo_gives_the_same_bits(name: str) -> None:
    """By the kernels themselves, under Triton's interpreter where there is no GPU."""
    _check(name)


@pytest.mark.parametrize("name", TRACED)
def test_a_compiler_sees_the_registered_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced by AOTAutograd as for Inductor, and run op by op."""
    monkeypatch.setattr(api, "MODES", (*api.MODES, "aot_eager"))
    _check(name, "aot_eager")


@pytest.mark.parametrize("name", ["Llama", "nanoGPT"])
def test_inductor_compiles_what_the_rules_leave(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    _check(name, "default")


@pytest.mark.parametrize(("name", "mode"), [("Qwen3", "default"), ("BERT", "aot_eager")])
def test_a_model_that_its_user_compiles_with_our_backend(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Inductor, and where that takes long on a CPU by what it is given, run op by op."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    build, loss_of = zoo.MODELS[name]
    model = build().train()
    captured = Captured()
    monkeypatch.setattr(backend, "Captured", lambda: captured)
    model.compile(backend=backend.tilewright_backend, options={"mode": mode})
    found = zoo.step(model, loss_of)
    assert not captured.failures
    _check_sites(name, count(captured.sites))
    model = build().train()
    _check_step(found, zoo.step(model, loss_of), zoo.oracle(model, loss_of))


@pytest.mark.parametrize("name", zoo.MODELS)
def test_what_an_architecture_has_is_found(name: str) -> None:
    """Every residual norm and the final one, every MLP, rotary embeddings, and head and loss."""
    found = RECORD[name]
    assert found["linear_cross_entropy"] == 1
    layers = zoo.LAYERS
    norms = {"Gemma2": 4 * layers + 1, "Gemma3": 6 * layers + 1, "Qwen3": 4 * layers + 1, "unplanned": 2}
    assert found.get("add_norm", 0) + found.get("norm", 0) >= norms.get(name, 2 * layers + 1)
    assert found["add_norm"] >= (1 if name in ("unplanned",) else 2)
    if name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi-3", "ModernBERT"):
        assert found["glu"] == layers and found["rope"] == layers
    if name in ("GPT-2", "GPT-NeoX", "BERT", "ViT", "nanoGPT", "Whisper"):
        assert found["gelu"] >= layers


def test_every_rule_that_can_run_here_has_a_site_in_some_model() -> None:
    """Embeddings need a large table, attention and linear a GPU's shapes."""
    used = {rule for counts in RECORD.values() for rule in counts}
    assert used >= set(ALL) - {"embedding", "attention", "linear", "gelu_mlp", "glu_mlp", "cross_entropy"}


def test_gemma3_in_bfloat16_has_the_dtypes_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    build, _ = zoo.MODELS["Gemma3"]
    model = build().bfloat16().eval()
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=False).logits
        with optimized(model):
            found = model(input_ids=ids, use_cache=False).logits
    assert found.dtype == plain.dtype == torch.bfloat16
    assert (found.float() - plain.float()).norm() <= 0.02 * plain.float().norm()


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_under_autocast_the_loss_is_as_near_to_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    build, loss_of = zoo.MODELS[name]
    model = build().train()
    _, truth = zoo.oracle(model, loss_of)

    def step() -> dict[str, torch.Tensor]:
        def cast(model: torch.nn.Module) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss_of(model)

        return zoo.step(model, cast)[1]

    plain = _errors(step(), truth)
    with optimized(model) as report:
        found = _errors(step(), truth)
    assert len(report.changed) >= 5
    for parameter, error in found.items():
        assert error <= 1.5 * plain[parameter] + 0.01, (
            f"{parameter}: {error:.3f}, the model itself {plain[parameter]:.3f}"
        )


@pytest.mark.parametrize("how", ["autocast", "checkpointed", "both"])
def test_rotary_embeddings_are_found_under_autocast_and_in_checkpoints(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    build, plain_loss = zoo.MODELS["Llama"]
    model = build().train()
    model.config.use_cache = False
    if how != "autocast":
        model.gradient_checkpointing_enable()

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=how != "checkpointed"):
            return plain_loss(model)

    _, truth = zoo.oracle(model, plain_loss)
    plain = _errors(zoo.step(model, loss_of)[1], truth)
    with optimized(model) as report:
        found = _errors(zoo.step(model, loss_of)[1], truth)
    assert count(report.sites)["rope"] == zoo.LAYERS, f"{report}"
    assert all(error <= 1.5 * plain[name] + (1e-6 if how == "checkpointed" else 0.01) for name, error in found.items())


def test_a_graph_that_no_rule_can_read_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise IndexError("a bug in a rule")

    monkeypatch.setattr("tilewright.optimize.backend.rewrite", broken)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    x = torch.randn(2, 4)
    expected = model(x)
    with optimized(model) as report:
        assert torch.equal(model(x), expected)
    assert report.captured.failures == ["IndexError: a bug in a rule"] and "a bug in a rule" in str(report)
    assert isinstance(Backend([], "none").captured.sites, list)
