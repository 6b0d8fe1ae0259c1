import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewright.models.standard import StandardDropoutAddNorm
from tilewright.optim import states, update
from tilewright.plan import memory
from tilewright.plan.decoder import from_gpt, load
from tilewright.plan.gpt import LLAMA, preset
from tilewright.plan.roofline import step_ops
from tilewright.plan.sizing import reached
from tilewright.plan.step import ADAFACTOR, AHEAD, CATEGORIES, TENSOR, How, Rates, launches, step
from tilewright.plan.traffic import Links
from tilewright.plan.training import LOSSES, Training
from tilewright.plan.work import SHARES, _norms

H200 = Rates({"bf16": 787e12, "tf32": 400e12, "fp32": 50e12}, 4.27e12, 13e-6, 2e-6)
XEON = Rates({"bf16": 1e12, "fp32": 1e11}, 1.2e10, 4e-6, 3e-6)
SHAPES = [("125m", {}), ("350m", {"dropout": 0.1}), ("1b", LLAMA)]


@st.composite
def runs(draw, devices=("cuda", "cpu")):
    """A model and how it is trained, with its levers anyhow."""
    device = draw(st.sampled_from(devices))
    name, fields = draw(st.sampled_from(SHAPES))
    config = preset(name, **fields, gpt_block=draw(st.sampled_from(("standard", "optimized"))))
    precision = draw(st.sampled_from(("bf16_stochastic", "bf16", "fp32")))
    training = Training(
        micro_batch=draw(st.sampled_from((1, 2, 8, 32))), precision=precision, accumulation=draw(st.integers(1, 4)),
        optimizer=draw(st.sampled_from(("adamw", "adamw_8bit", "adafactor", "lion", "sgd"))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))), compiled=draw(st.booleans()),
        loss=draw(st.sampled_from(LOSSES)), mlp_recompute=draw(st.booleans()),
        mlp_tiles=draw(st.booleans()),
        residual=draw(st.sampled_from(("auto", "bf16"))) if precision == "bf16_stochastic" else "auto",
    )  # fmt: skip
    how = How(
        matmuls="fp32" if precision == "fp32" else "bf16", device=device,
        recorded=draw(st.booleans()) and device == "cuda",
        attention=draw(st.sampled_from(("auto", "flash", "cudnn", "efficient"))),
    )  # fmt: skip
    return from_gpt(config), training, how


def timed(decoder, training, how, rates=None):
    return step(decoder, training, how, rates or (H200 if how.device == "cuda" else XEON))


@given(run=runs())
def test_parts_add_up_and_none_is_below_zero_and_the_floor_below_all(run):
    found = timed(*run)
    assert set(found.parts) == {*CATEGORIES, "idle"}
    assert min(found.parts.values()) >= 0
    assert found.seconds == pytest.approx(sum(found.parts.values()), rel=1e-12)
    assert 0 < found.floor <= found.seconds


@given(run=runs(devices=("cuda",)), times=st.sampled_from((2, 4)))
def test_many_micro_batches_are_never_quicker_than_one_of_all(run, times):
    decoder, training, how = run
    several = dataclasses.replace(training, accumulation=times)
    whole = dataclasses.replace(training, accumulation=1, micro_batch=times * training.micro_batch)
    assert timed(decoder, several, how).seconds >= timed(decoder, whole, how).seconds


@given(run=runs())
def test_recompute_trades_time_for_memory(run):
    decoder, training, how = run
    kinds = [dataclasses.replace(training, recompute=how_much) for how_much in ("none", "full")]
    none, full = (timed(decoder, kind, how) for kind in kinds)
    assert full.floor > none.floor
    # Where both wait for the same host, as for an optimizer of many small ops, more work takes no longer.
    assert full.seconds > none.seconds or (full.seconds == none.seconds and full.parts["idle"] > 0.0)
    assert memory.train(decoder, kinds[1]).allocated < memory.train(decoder, kinds[0]).allocated


@given(run=runs(), faster=st.floats(1.0, 100.0))
def test_a_better_machine_takes_no_longer(run, faster):
    base = H200 if run[2].device == "cuda" else XEON
    better = [
        dataclasses.replace(base, flops={name: faster * rate for name, rate in base.flops.items()}),
        dataclasses.replace(base, bytes_per_second=faster * base.bytes_per_second),
        dataclasses.replace(base, launch_seconds=base.launch_seconds / faster),
        dataclasses.replace(base, kernel_seconds=base.kernel_seconds / faster),
    ]
    before = timed(*run).seconds
    assert all(timed(*run, rates).seconds <= before * (1 + 1e-12) for rates in better)


def test_a_small_batch_waits_for_its_host_and_a_recorded_one_does_not():
    model, training = load("125m", ["gpt_block=optimized"]), Training(micro_batch=1, loss="fused")
    eager, recorded = (timed(model, training, How(recorded=recorded)) for recorded in (False, True))
    assert eager.parts["idle"] > eager.seconds / 2 and recorded.parts["idle"] == 0
    large = dataclasses.replace(training, micro_batch=32)
    assert timed(model, large, How()).parts["idle"] == 0  # the host is ahead
    # A CPU has nobody to run ahead of.
    on_cpu = timed(model, training, How(device="cpu"))
    ops = launches(model, training, How(device="cpu"))
    assert on_cpu.parts["idle"] == pytest.approx(XEON.launch_seconds * sum(ops))


def test_the_host_is_not_ahead_by_more_launches_than_cuda_takes():
    model = load("350m", ["gpt_block=optimized"])
    few, many = (Training(micro_batch=64, loss="fused", optimizer=name) for name in ("lion", "adafactor"))
    assert launches(model, few, How())[1] < AHEAD < launches(model, many, How())[1]
    assert timed(model, few, How()).parts["idle"] == 0
    # However long the gradients take, most of the update is launched when they are there.
    found = [timed(model, dataclasses.replace(many, micro_batch=size), How()) for size in (64, 256)]
    assert found[0].parts["idle"] == pytest.approx(found[1].parts["idle"])


def simulated(gradients, update):
    """Seconds of a step whose (launches, device seconds) are these, op by op; a host waits for the step before last."""
    starts, ends, host, device = [], [], 0.0, 0.0
    for _ in range(6):
        for ops, seconds in (gradients, update):
            for _ in range(round(ops)):
                host = max(host, starts[-AHEAD] if len(starts) >= AHEAD else 0.0) + H200.launch_seconds
                starts.append(max(host, device))
                device = starts[-1] + seconds / round(ops)
        ends.append(device)
        host = max(host, *ends[-2:-1], 0.0)
    return ends[-1] - ends[-2]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor"])
@pytest.mark.parametrize(("name", "batch"), [("1b", 1), ("1b", 2), ("350m", 4), ("350m", 16), ("125m", 2)])
def test_what_the_host_adds_is_what_a_queue_adds_op_by_op(name, batch, optimizer):
    model, training = (
        load(name, ["gpt_block=optimized"]),
        Training(micro_batch=batch, loss="fused", optimizer=optimizer),
    )
    found, (gradients, update) = timed(model, training, How()), launches(model, training, How())
    updating, idle = found.parts["optimizer"], found.parts["idle"]
    expected = simulated((gradients, found.seconds - updating - idle), (update, updating))
    assert found.seconds == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(
    ("change", "slower"),
    [({"loss": "plain"}, "pointwise"), ({"optimizer": "adamw_8bit"}, "optimizer"), ({"residual": "auto"}, "fused")],
)
def test_a_lever_moves_its_own_part(change, slower):
    model = load("350m", ["gpt_block=optimized"])
    best = Training(micro_batch=16, loss="fused", residual="bf16")
    before, after = (timed(model, each, How()).parts for each in (best, dataclasses.replace(best, **change)))
    more = {name: after[name] - before[name] for name in CATEGORIES}
    assert more[slower] > 0
    assert max(more[name] for name in more if name != slower) < 0.05 * more[slower]


def test_fewer_bytes_between_matmuls_is_what_fusion_gives():
    training = Training(micro_batch=16)
    eager = timed(load("1b"), training, How())
    compiled = timed(load("1b"), dataclasses.replace(training, compiled=True), How())
    fused = timed(load("1b", ["gpt_block=optimized"]), dataclasses.replace(training, loss="fused"), How())
    assert eager.seconds > compiled.seconds > fused.seconds
    assert eager.parts["matmul"] == compiled.parts["matmul"] == fused.parts["matmul"]


class Moved(TorchDispatchMode):
    """Counts what ops read and write of tensors of one size; a norm's backward reads twice, for weight and bias too."""

    def __init__(self, elements):
        super().__init__()
        self.elements, self.bytes = elements, 0

    def __torch_dispatch__(self, op, types, arguments=(), options=None):
        out = op(*arguments, **(options or {}))
        read, written = (
            sum(t.nbytes for t in tree_leaves(found) if isinstance(t, torch.Tensor) and t.numel() == self.elements)
            for found in (arguments, out)
        )
        self.bytes += written + read * (2 if op == torch.ops.aten.native_layer_norm_backward.default else 1)
        return out


@pytest.mark.parametrize(("residual", "dtype"), [("auto", torch.float32), ("bf16", torch.bfloat16)])
def test_eager_norms_move_what_autocast_has_them_move(residual, dtype):
    """One more norm in a chain, widened and rounded as a GPU's autocast does it."""
    rows, width = 64, 768

    def moved(count):
        norm = StandardDropoutAddNorm(width, 0.0, norm="layer", bias=True)
        branches = [torch.zeros(rows, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(count)]
        stream, outputs = torch.zeros(rows, width, dtype=dtype, requires_grad=True), []
        inputs, gradients = (stream, *branches, *norm.parameters()), [branch.detach() for branch in branches]
        with Moved(rows * width) as mode:
            for branch in branches:
                stream = branch + stream
                outputs.append(norm.normalise(stream.float()).bfloat16())
            torch.autograd.grad(outputs, inputs, gradients)
        return mode.bytes

    model, training = from_gpt(preset("125m", sequence=rows)), Training(residual=residual)
    planned = sum(work.calls * work.cost.bytes for work in _norms(model, training, How()))
    assert planned == (2 * model.layers + 1) * (moved(4) - moved(3))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_matmuls_are_the_rooflines(recompute):
    model, training = load("1b"), Training(micro_batch=16, loss="fused", recompute=recompute)
    flops = sum(op.calls * op.cost.flops for op in step_ops(model, training) if "matmul" in op.name)
    found = timed(model, training, How()).parts["matmul"]
    assert 0.9 * SHARES["matmul"] < flops / H200.flops["bf16"] / found <= SHARES["matmul"]


def test_an_mlp_of_tiles_multiplies_once_more_and_has_no_activation_in_forward():
    model, ops = load("1b"), []
    for how in ({}, {"mlp_tiles": True}):
        ops.append({op.name: op for op in step_ops(model, Training(micro_batch=16, **how))})
    more = sum(ops[1][f"{name} matmul, recompute"].cost.flops for name in ("up", "down"))
    assert more == sum(ops[0][f"{name} matmul, forward"].cost.flops for name in ("up", "down"))
    assert "activation, forward" in ops[0] and "activation, forward" not in ops[1]
    seconds = [timed(model, Training(micro_batch=16, **how), How()).seconds for how in ({}, {"mlp_tiles": True})]
    assert seconds[0] < seconds[1] < 1.5 * seconds[0]


def test_small_and_odd_matmuls_reach_less_of_their_rate():
    assert reached(128 * 132, 256, 512, 132) > 1.3 * reached(128 * 133, 256, 512, 132)  # a wave for one tile more
    assert reached(8192, 8192, 8192, 132) > 0.95
    assert reached(128, 512, 512, 132) < 0.1 < reached(128, 512, 65536, 132)  # the second is split along its sums
    assert reached(4096, 4096, 4092, 132) < 0.75 * reached(4096, 4096, 4096, 132)  # not on 16 bytes


@given(run=runs(devices=("cuda",)), ranks=st.sampled_from((2, 4, 8)))
def test_ranks_share_the_work(run, ranks):
    """Tensor-parallel ranks share the matmuls, stages the layers, ranks of ZeRO the states."""
    model, training, how = run
    links, before = Links(link=1e15, network=1e15), timed(*run)
    cut = dataclasses.replace(training, tensor=ranks if model.heads % ranks == 0 else 2, sequence_parallel=True)
    after = step(model, cut, how, H200, links).parts
    assert before.parts["matmul"] / (1.3 * cut.tensor) < after["matmul"] < 1.3 * before.parts["matmul"]
    staged = step(model, dataclasses.replace(training, pipeline=2, accumulation=4), how, H200, links)
    whole = step(model, dataclasses.replace(training, accumulation=4), how, H200)
    assert staged.parts["matmul"] == pytest.approx(whole.parts["matmul"] / 2)
    sharded = step(model, dataclasses.replace(training, data=ranks, zero=1), how, H200, links)
    assert sharded.parts["optimizer"] < before.parts["optimizer"]
    assert sharded.parts["matmul"] == before.parts["matmul"]


def test_no_share_is_more_than_the_whole():
    assert all(0 < share <= 1 for share in SHARES.values())


@settings(deadline=None)
@given(micro_batch=st.integers(1, 64))
def test_slower_attention_takes_longer(micro_batch):
    model, training = load("1b"), Training(micro_batch=micro_batch)
    names = ("cudnn", "flash", "efficient")
    seconds = [timed(model, training, How(attention=name)).parts["attention"] for name in names]
    assert seconds[0] < seconds[1] < seconds[2]
    assert timed(model, training, How()).parts["attention"] == seconds[0]


def test_it_needs_no_torch():
    code = "import sys, tilewright.plan.step; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class _Launched(TorchDispatchMode):
    """How many ops there were, without those that only look at their tensor another way."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += not op.is_view and not str(op).startswith("aten.detach")
        return op(*args, **(kwargs or {}))


def test_adafactor_launches_as_many_ops_a_tensor_as_a_step_is_charged(monkeypatch):
    monkeypatch.setattr(update, "update", lambda *tensors, **numbers: None)  # a kernel, where there is a GPU
    counts = []
    for shape in ((8, 16), (16,)):
        parameter, given = torch.zeros(shape), {"grad_scale": torch.ones(1), "found_inf": torch.zeros(1)}
        state = states.new_state(parameter, "adafactor")
        with _Launched() as launched:
            update.adafactor(parameter, torch.ones(shape), state, lr=1e-3, **given)
        counts.append(launched.count + TENSOR["cuda"])
    assert sum(counts) / 2 == pytest.approx(ADAFACTOR, rel=0.1), counts
