import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from plan.llama import Llama
from tilewright import hardware
from tilewright.errors import UserError
from tilewright.models import GPT
from tilewright.models.standard import StandardDropoutAddNorm
from tilewright.ops import cross_entropy
from tilewright.plan import memory
from tilewright.plan.decoder import Decoder, from_gpt, load
from tilewright.plan.gpt import GPTConfig, preset
from tilewright.plan.training import OPTIMIZERS, Training

MEASURED = json.loads((Path(__file__).parents[2] / "results" / "h200" / "memory.json").read_text(encoding="utf-8"))
LLAMA = Decoder(
    width=256, layers=4, heads=8, kv_heads=2, head_dim=48, ffn=704, vocabulary=1000, sequence=512, gated=True,
    tied=False, norm="rms", positions="rope",
)  # fmt: skip


def tracked(make, decoder, batch, autocast=False):
    """What torch's own tracker counts, under fake tensors: parameters, gradients, optimizer states, activations."""
    with FakeTensorMode():
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(batch, decoder.sequence, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(tokens, tokens)
            forward = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
            loss.backward()
            optimizer.step()
            after = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    counted = {str(k).rpartition(".")[2]: v for k, v in after.items()}
    activations = next(v for k, v in forward.items() if str(k).endswith("ACT"))
    return counted["PARAM"], counted["GRAD"], counted["OPT"], activations


def within(predicted, counted, share=0.03):
    assert predicted == pytest.approx(counted, rel=share)


FEW = {"layers": 4, "vocabulary": 4096}  # what the tracker does for a tensor takes as long as there are tensors


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("block", ["standard", "optimized"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_every_part_agrees_with_torchs_memory_tracker(model, block, recompute):
    if model == "gpt":
        config = preset("125m", gpt_block=block, recompute=recompute, **FEW)
        decoder, batch = from_gpt(config), 2
        counted = tracked(lambda: GPT(config), decoder, batch)
    else:
        decoder, batch = dataclasses.replace(LLAMA, gpt_block=block), 3
        counted = tracked(lambda: Llama(LLAMA, block == "optimized", recompute == "full"), decoder, batch)
    training = Training(micro_batch=batch, precision="fp32", recompute=recompute)
    parameters, gradients, states, activations = counted
    within(4 * decoder.parameters, parameters)
    within(4 * decoder.parameters, gradients)
    within(memory.optimizer_bytes(decoder, training) * decoder.parameters, states)
    kept = memory.kept_activations(decoder, training) + 4 * batch * decoder.sequence * decoder.vocabulary
    within(kept, activations, 0.005)


@pytest.fixture
def widens(monkeypatch):
    """A CPU's autocast leaves a norm's input alone; a GPU's makes it float32, as this does."""
    normalise = StandardDropoutAddNorm.normalise
    monkeypatch.setattr(StandardDropoutAddNorm, "normalise", lambda norm, x: normalise(norm, x.float()))


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float32), ("cpu", torch.bfloat16)])
@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_norms_of_pytorch_are_float32_under_a_gpus_autocast(norm, device, dtype):
    enabled = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, True)  # torch.autocast would look for the GPU, and its fake needs none
    try:
        with FakeTensorMode(), torch.no_grad():
            x = torch.empty(4, 8, dtype=torch.bfloat16, device=device)
            assert norm(x, (8,), torch.empty(8, device=device)).dtype == dtype
    finally:
        torch.set_autocast_enabled(device, enabled)


@pytest.mark.parametrize("residual", ["auto", "bf16"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_keeps_sixteen_bits_and_copies_of_the_weights(device, residual, request):
    if device == "cuda":
        request.getfixturevalue("widens")
    config = preset("125m", residual=residual, **FEW)
    *_, activations = tracked(lambda: GPT(config), from_gpt(config), 2, autocast=True)
    kept = memory.kept_activations(from_gpt(config), Training(micro_batch=2, residual=residual, device=device))
    copies = 2 * memory.matmul_weights(from_gpt(config))
    loss = 4 * 2 * config.sequence * config.vocabulary  # on the CPU; a GPU keeps more, see MEASURED
    within(kept + copies + loss, activations, 0.005)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_narrow_stream_is_kept_wide_by_each_norm_unless_compiled(compiled, widens):
    config = GPTConfig(width=64, layers=3, heads=2, vocabulary=256, sequence=64, residual="bf16")
    model, tokens, kept = GPT(config), torch.zeros(4, 64, dtype=torch.long), {}
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        memory_of = tensor.untyped_storage()
        if memory_of.data_ptr() not in own:
            kept[memory_of.data_ptr()] = memory_of
        return tensor

    # What Inductor is given to compile: decomposed, and cut in two where the least has to be kept.
    forward = torch.compile(model, backend="aot_eager_decomp_partition") if compiled else model
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        logits = forward(tokens)
    counted = sum(each.nbytes() for each in kept.values())
    assert logits.requires_grad
    plan = memory.kept_activations(from_gpt(config), Training(micro_batch=4, residual="bf16", compiled=compiled))
    within(plan + 2 * memory.matmul_weights(from_gpt(config)), counted, 0.005)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_a_mixture_keeps_what_the_plan_says(activation):
    config = GPTConfig(width=128, layers=3, heads=2, vocabulary=64, sequence=64, experts=4, activation=activation)
    model, tokens, kept = GPT(config), torch.randint(64, (4, 64)), {}
    own = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        memory_of = tensor.untyped_storage()
        if memory_of.data_ptr() not in own:
            kept[memory_of.data_ptr()] = memory_of
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(tokens)
    counted = sum(each.nbytes() for each in kept.values())
    assert logits.requires_grad
    within(memory.kept_activations(from_gpt(config), Training(micro_batch=4, precision="fp32")), counted, 0.03)


def test_a_traced_loss_has_a_gradient_beside_the_logits():
    decoder = from_gpt(GPTConfig(width=64, layers=1, heads=2, vocabulary=4096, sequence=512))
    with FakeTensorMode(), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        x, weight = (torch.empty(n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (2 * 512, 4096))
        targets, tracker = torch.zeros(2 * 512, dtype=torch.long), MemTracker()
        tracker.track_external(x, weight, targets)
        with tracker:
            before = tracker.get_tracker_snapshot("current")[x.device]["Total"]
            cross_entropy(F.linear(x, weight), targets, inplace=True)
            most = tracker.get_tracker_snapshot("peak")[x.device]["Total"] - before
    held = 2 * 2 * 512 * 4096

    def planned(**options):
        return memory.train(decoder, Training(micro_batch=2, loss="fused", **options))["logits and loss"]

    within(planned(compiled=True), most, 0.01)
    assert planned() == planned(compiled=True, device="cpu") == held  # in place; on a CPU, the compiler's own


@pytest.mark.parametrize("case", MEASURED["cases"], ids=lambda c: f"{c['preset']}-{c['batch']}")
def test_the_peak_agrees_with_an_h200(case):
    config = GPTConfig(**case["model"])
    anatomy = memory.train(from_gpt(config), Training(micro_batch=case["batch"], recompute=config.recompute))
    within(anatomy.allocated, case["peak_allocated"], 0.05)
    within(anatomy.total, case["device_used"], 0.08)


def test_what_is_called_measured_is_what_the_run_has():
    assert pytest.approx(MEASURED["context_bytes"], rel=0.01) == memory.CONTEXT_BYTES
    assert pytest.approx(MEASURED["machine"]["gpu"]["memory_bytes"], rel=0.02) == hardware.find("H200-SXM").usable_bytes


def test_the_literatures_activation_formulas():
    h, a, s = 1024, 16, 2048
    gpt = from_gpt(GPTConfig(h, 8, a, sequence=s, dropout=0.1))

    def of(**options):
        return memory.layer_activation_bytes(gpt, Training(precision="bf16_stochastic", attention="softmax", **options))

    within(of(), h * (34 + 5 * a * s / h), 0.001)
    within(of(tensor=4), h * (10 + 24 / 4 + 5 * a * s / (h * 4)), 0.001)
    within(of(tensor=4, sequence_parallel=True), h / 4 * (34 + 5 * a * s / h), 0.001)
    within(of(tensor=4, recompute="selective"), h * (10 + 24 / 4), 0.001)
    within(of(tensor=4, recompute="selective", sequence_parallel=True), 34 * h / 4, 0.001)


def test_gated_experts_keep_what_their_tokens_pass_through():
    dense = Decoder(64, 2, 4, 4, 16, 128, 256, 32, gated=True, norm="rms", positions="rope")
    moe = dataclasses.replace(dense, experts=8, active_experts=2, shared_ffn=96)
    more = memory.layer_activation_bytes(moe, Training()) - memory.layer_activation_bytes(dense, Training())
    # One more expert of 128 and a shared one of 96, four tensors of 2 bytes each; two copies of tokens, two results.
    assert more == 4 * 2 * (128 + 96) + 2 * 2 * 2 * 64
    normed = dataclasses.replace(dense, qk_norm=True)
    more = memory.layer_activation_bytes(normed, Training()) - memory.layer_activation_bytes(dense, Training())
    assert more == 2 * (64 + 64) + 4 * (4 + 4)


@pytest.mark.parametrize("recompute, first, count, flight", [
    ("none", True, 16, (4, 4 + 3 / 2)), ("full", False, 32, (3, 4 + 1 / 2)),
])  # fmt: skip
def test_a_pipelines_ranks_hold_what_its_schedule_leaves_in_flight(recompute, first, count, flight):
    """The first is the fullest; with little kept of a micro batch the second, which receives from both sides."""
    model, how = load("1b"), Training(pipeline=4, micro_batch=8, loss="fused", recompute=recompute)

    def activations(**options):
        return memory.train(model, dataclasses.replace(how, **options))["activations"]

    kept = memory.kept_activations(model, how, layers=6, first=first, last=False)
    working = activations(accumulation=count) - flight[0] * kept  # and under full a layer at work
    assert working == 0 if first else working > 0
    within(activations(accumulation=count, interleave=2) - working, flight[1] * kept, 0.001)
    if first:
        within(activations(accumulation=2), 2 * kept, 0.001)  # never more than there are


def test_a_pipeline_receives_into_a_buffer_for_every_micro_batch():
    model, how = load("1b"), Training(pipeline=4, micro_batch=2, tensor=2, recompute="full")
    one = 2 * model.sequence * model.width * (2 + 4)
    assert memory.receive_buffers(model, dataclasses.replace(how, pipeline=1), first=True, last=True) == 0
    for micro_batches, pieces in ((8, 1), (16, 3)):
        many = dataclasses.replace(how, accumulation=micro_batches, interleave=pieces)
        for first, last, ways in ((True, False, -1), (False, False, 0), (False, True, -1)):
            found = memory.receive_buffers(model, many, first=first, last=last)
            assert found == micro_batches * (2 * pieces + ways) * one
    assert memory.receive_buffers(model, how, first=True, last=False) == 4 * one  # as few micro batches as fill it
    shared = dataclasses.replace(how, sequence_parallel=True)
    assert memory.receive_buffers(model, shared, first=True, last=False) == 2 * one
    # Under full recompute what the second rank keeps of micro batches in flight lies in these buffers.
    more = [memory.train(model, dataclasses.replace(how, accumulation=count))["receive buffers"] for count in (64, 65)]
    assert more[0] == (2 * 64 - 3) * one and more[1] - more[0] == 2 * one


def test_fsdp_gathers_two_layers():
    model = load("7b")
    anatomy = memory.train(model, Training(data=64, zero=3, accumulation=2))
    body = (model.parameters - model.embedding_parameters) / model.layers
    within(anatomy["16-bit copies"], 2 * (2 * body + model.vocabulary * model.width), 0.001)


def test_groups_of_fsdp_share_among_their_own_ranks():
    model, how = load("7b"), Training(data=64, zero=3, accumulation=2)
    groups, alone = (dataclasses.replace(how, **few) for few in ({"replicate": 8}, {"data": 8}))
    assert memory.train(model, groups) == memory.train(model, alone)
    assert memory.train(model, groups)["optimizer"] == 8 * memory.train(model, how)["optimizer"]
    assert "zero: 1" not in dict(memory.levers(model, groups))  # which groups are not for


def test_fsdp_in_a_pipeline_has_a_stage_or_three_pieces_of_it():
    model, how = load("7b"), Training(data=64, zero=3, pipeline=4, accumulation=8)
    stage = model.layers / 4 * (model.parameters - model.embedding_parameters) / model.layers
    stage += (model.vocabulary + model.sequence) * model.width  # the first has both tables
    for pieces, share in ((1, 1), (2, 1), (4, 3 / 4), (8, 3 / 8)):
        anatomy = memory.train(model, dataclasses.replace(how, interleave=pieces))
        within(anatomy["16-bit copies"], 2 * share * stage, 0.01)


def test_bytes_a_parameter():
    model = load("7b")
    n = model.parameters
    amp = memory.train(model, Training(accumulation=2))
    within(amp["weights"] + amp["gradients"] + amp["optimizer"], 16 * n)
    per = {name: memory.optimizer_bytes(model, Training(optimizer=name)) for name in OPTIMIZERS}
    assert (per["adamw"], per["lion"], per["sgd"], per["adamw_bf16_kahan"]) == (8, 4, 4, 6)
    assert 2 <= per["adamw_8bit"] < 2.1 and per["adafactor"] < 0.1
    assert memory.optimizer_bytes(model, Training(precision="bf16_stochastic", optimizer="adamw_bf16")) == 4
    assert memory.optimizer_bytes(model, Training(precision="mixed")) == 12


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_papers_figures(stage, gigabytes):
    model = load("7b")
    anatomy = memory.train(model, Training(precision="mixed", data=64, zero=stage, accumulation=2))
    states = anatomy["weights"] + anatomy["gradients"] + anatomy["optimizer"]
    assert states / model.parameters * 7.5 == pytest.approx(gigabytes, abs=0.05)


def test_zero_divides_states_and_pipelines_divide_layers():
    model = load("1b")
    whole = memory.train(model, Training())
    one, two, three = (memory.train(model, Training(data=8, zero=z, accumulation=2)) for z in (1, 2, 3))
    within(one["optimizer"], whole["optimizer"] / 8, 0.001)
    within(two["gradients"], one["gradients"] / 8, 0.001)
    within(three["weights"], whole["weights"] / 8, 0.001)
    split = memory.train(model, Training(pipeline=4, tensor=2))
    assert split["weights"] < whole["weights"] / 4
    with pytest.raises(UserError, match="pipeline stages"):
        memory.train(model, Training(pipeline=25))
    with pytest.raises(UserError, match="tensor parallel 3"):
        memory.train(model, Training(tensor=3))


def test_the_largest_micro_batch_fits_and_the_next_does_not():
    model, training, capacity = load("1b"), Training(), 141e9
    batch = memory.largest_micro_batch(model, training, capacity)
    sizes = [memory.train(model, dataclasses.replace(training, micro_batch=b)).total for b in (batch, batch + 1)]
    assert sizes[0] <= capacity < sizes[1]
    assert memory.largest_micro_batch(load("70b"), training, capacity) == 0


def test_every_lever_named_saves_what_it_says():
    model, training = load("350m", ["dropout=0.1"]), Training(micro_batch=8, data=4, attention="softmax")
    saved = memory.levers(model, training)
    names = [name for name, _ in saved]
    assert {"recompute: full", "optimizer: adamw_8bit", "loss: linear_fused", "zero: 3", "attention: flash"} <= set(
        names
    )
    assert [value for _, value in saved] == sorted((value for _, value in saved), reverse=True)
    before = memory.train(model, training).total
    after = memory.train(model, dataclasses.replace(training, recompute="full")).total
    assert dict(saved)["recompute: full"] == before - after > 0


@pytest.mark.parametrize("gated", [False, True])
def test_an_mlp_of_tiles_keeps_its_input_alone(gated):
    model = load("350m", ["gated=true"] if gated else [])
    tiles, plain, cheap = (
        memory.layer_activation_bytes(model, Training(**how))
        for how in ({"mlp_tiles": True}, {}, {"mlp_recompute": True})
    )
    assert plain - tiles == 2 * model.ffn * (4 if gated else 2) and tiles < cheap < plain


@pytest.mark.parametrize(
    ("change", "message"),
    [({"optimizer": "adam"}, "choose adamw"), ({"zero": 4}, "zero is 4"), ({"micro_batch": 0}, "at least 1")],
)
def test_bad_options_are_one_sentence(change, message):
    with pytest.raises(UserError, match=message):
        Training(**change)
