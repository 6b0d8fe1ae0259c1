"""Every lever trains the tiny model, those that must not change the numbers do not, and what a run leaves is right."""

import contextlib
import json
import math
import os
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file

from tilewright.errors import UserError
from tilewright.measure.results import SCHEMA
from tilewright.optim import AdamW
from tilewright.parallel.layout import Layout
from tilewright.parallel.mesh import Mesh
from tilewright.runtime import cublaslt
from tilewright.tilesync import TilesyncError
from tilewright.train import loop
from tilewright.train.checkpoint import read
from tilewright.train.engine import Engine
from tilewright.train.loop import train
from tilewright.train.metrics import read as read_metrics
from tilewright.train.schema import OPTIMIZERS, SCHEDULES
from tilewright.train.shown import Shown
from tilewright.train.world import World
from train.tiny import as_on_a_cpu, losses, tiny, trained  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.usefixtures("as_on_a_cpu")
]  # fmt: skip


# A rate means something else to each rule; Adafactor's is a share of the parameter's own size.
RATES = {"lion": 1e-2, "sgd": 0.1, "adafactor": 0.2}
LEVERS = {
    "gpt_block": {"model": {"gpt_block": "optimized"}},
    "dropout": {"model": {"dropout": 0.1}},
    "optimized, dropout": {"model": {"gpt_block": "optimized", "dropout": 0.1}},
    "math": {"model": {"attention": "math"}},
    "flash": {"model": {"attention": "flash"}},
    "mlp fused": {"model": {"mlp": "fused"}},
    "mlp recompute": {"model": {"mlp": "recompute"}},
    "mlp tilesync, bf16": {"model": {"mlp": "tilesync"}, "precision": "bf16"},
    "llama": {"model": {"norm": "rms", "activation": "swiglu", "position": "rope", "bias": False}},
    "recompute, dropout": {"model": {"recompute": "full", "dropout": 0.1}},
    "accumulation": {"micro_batch": 2, "accumulation": 2},
    "global batch": {"micro_batch": 0, "global_batch": 6},
    "no clipping": {"optimizer": {"clip": 0.0, "learning_rate": 3e-3}},
    **{name: {"precision": name} for name in ("fp32", "tf32", "bf16", "bf16_kahan", "bf16_stochastic")},
    **{name: {"optimizer": {"name": name, "learning_rate": RATES.get(name, 3e-3)}} for name in OPTIMIZERS},
    **{name: {"schedule": {"name": name, "warmup": 2}} for name in SCHEDULES},
}


@pytest.mark.parametrize("lever", LEVERS)
def test_every_lever_lowers_the_loss(tmp_path, lever):
    found = losses(tiny(tmp_path, **LEVERS[lever]))
    assert sum(found[-3:]) < sum(found[:3]) - 0.3


def test_compiled_it_learns_the_same(tmp_path):
    plain = losses(tiny(tmp_path / "plain", steps=5))
    compiled = losses(tiny(tmp_path / "compiled", steps=5, compile="default"))
    assert compiled == pytest.approx(plain, rel=1e-4)


SAME = {
    "gpt_block": {"model": {"gpt_block": "optimized"}},
    "math": {"model": {"attention": "math"}},
    "loss fused": {"model": {"loss": "fused"}},
    "loss linear_fused": {"model": {"loss": "linear_fused"}},
    "mlp": {"model": {"mlp": "recompute"}},
    "mlp of tiles": {"model": {"mlp": "tilesync"}},
    "selective": {"model": {"recompute": "selective"}},
    "full": {"model": {"recompute": "full"}},
    "budget": {"model": {"recompute": "budget", "recompute_budget": 0.00025}},
    "split in two": {"micro_batch": 2, "accumulation": 2},
    "split in four": {"micro_batch": 1, "global_batch": 4},
    "a worker": {"data": {"workers": 1}},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return losses(tiny(tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("lever", SAME)
def test_what_does_not_change_the_model_does_not_change_the_curve(tmp_path, plain, lever):
    assert losses(tiny(tmp_path, **SAME[lever])) == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_blocks_drop_the_same_elements(tmp_path, how):
    """A mask drawn anew in backward would give other gradients, and another curve from the second step on."""
    kept = losses(tiny(tmp_path / "kept", model={"dropout": 0.2}))
    again = losses(tiny(tmp_path / "again", model={"dropout": 0.2, "recompute": how}))
    assert again[0] == pytest.approx(kept[0], rel=1e-5)
    if how == "full":  # "selective" draws in another order
        assert again == pytest.approx(kept, rel=1e-4)


def test_dropout_differs_from_step_to_step_and_from_rank_to_rank(tmp_path):
    config = tiny(tmp_path)
    drawn = []
    for step, rank in ((1, 0), (2, 0), (1, 1), (1, 0)):
        mesh = Mesh(Layout(), "cpu")
        mesh.place = {"dp": rank, "cp": 0}.get
        engine = Engine(config, torch.device("cpu"), loop.World(rank, 2, mesh), ["none"] * 2)
        engine.seed(step)
        drawn.append(torch.rand(4).tolist())
    assert drawn[0] == drawn[3]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


@pytest.mark.parametrize("block", ["standard", "optimized"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_every_micro_batch_of_every_step_has_a_mask_of_its_own(tmp_path, monkeypatch, dropout, block):
    """All sequences are the same and the rate is 0: the loss is always the same, but for dropout, which never is."""
    found, accumulate = [], Engine.accumulate

    def heard(self, *given):
        found.append(float(accumulate(self, *given)))
        return torch.tensor(found[-1])

    monkeypatch.setattr(Engine, "accumulate", heard)
    (tmp_path / "text").write_text("abcdefgh" * 200)
    optimizer = {"learning_rate": 0.0, "weight_decay": 0.0}
    data = {"paths": [str(tmp_path / "text")]}
    model = {"dropout": dropout, "gpt_block": block}
    trained(tiny(tmp_path / "run", steps=5, accumulation=2, model=model, optimizer=optimizer, data=data))
    assert len(found) == 10
    assert len(set(found)) == (10 if dropout else 1), found


def test_the_folder_has_metrics_configuration_and_a_checkpoint(tmp_path):
    begun = []
    shown = trained(tiny(tmp_path, steps=3), begin=begun.append)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3]
    assert [record["loss"] for record in records] == [one.loss for one in shown]
    assert [record["samples"] for record in records] == [4, 8, 12]
    assert begun[0]["schema"] == SCHEMA and begun[0]["convention"] == records[0]["convention"]
    assert json.loads(json.dumps(begun[0])) and (tmp_path / "config.yaml").exists()
    assert read(tmp_path / "checkpoints" / "step-00000003", "model")[1]["step"] == 3


def test_no_checkpoint_is_written_where_none_is_wanted(tmp_path):
    trained(tiny(tmp_path, steps=2, checkpoint={"final": False}))
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_lines_come_as_often_as_asked_and_the_records_all(tmp_path):
    assert [one.step for one in trained(tiny(tmp_path, steps=7, log={"every": 3}))] == [3, 6, 7]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 7


def test_a_data_set_shorter_than_a_batch_begins_anew(tmp_path):
    (tmp_path / "text").write_text("abcdefgh" * 9)  # two windows of 32
    found = losses(tiny(tmp_path / "run", data={"paths": [str(tmp_path / "text")]}, steps=15))
    assert len(found) == 15 and found[-1] < found[0] - 1


def test_tensorboard_has_the_metrics(tmp_path):
    pytest.importorskip("tensorboard", reason="reads what TensorBoard would, and that is not installed")
    trained(tiny(tmp_path, steps=2, log={"tensorboard": True}))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    written = events.Scalars("loss")
    assert [event.step for event in written] == [1, 2]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [event.value for event in written] == pytest.approx([record["loss"] for record in records])


# -- the guard, in a run


def broken(monkeypatch, when):
    """Make the loss of micro batches that `when(number)` names a NaN; they are counted from 0."""
    accumulate, number = Engine.accumulate, iter(range(10**6))

    def bad(self, *given):
        loss = accumulate(self, *given)
        return loss * math.nan if when(next(number)) else loss

    monkeypatch.setattr(Engine, "accumulate", bad)


@pytest.mark.parametrize("step", [1, 4])
def test_a_loss_that_is_no_number_stops_the_run_and_its_batch_is_kept(tmp_path, monkeypatch, step):
    taken, accumulate = [], Engine.accumulate
    monkeypatch.setattr(
        Engine, "accumulate", lambda self, t, *given: (taken.append(t.clone()), accumulate(self, t, *given))[1]
    )
    broken(monkeypatch, lambda number: number == step - 1)
    with pytest.raises(UserError, match=f"step {step}: the loss is nan.*guard.nan=skip"):
        train(tiny(tmp_path, checkpoint={"every": 1}))
    kept = load_file(tmp_path / f"bad-step-{step:08d}.safetensors")
    assert torch.equal(kept["micro_batch_0"], taken[step - 1])
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["skipped"] for record in records] == [False] * (step - 1) + [True]
    assert records[-1]["loss"] is None
    # The bad step has changed nothing and is saved as done: the same command goes on behind it.
    monkeypatch.setattr(Engine, "accumulate", accumulate)
    assert [metrics.step for metrics in trained(tiny(tmp_path, checkpoint={"every": 1}))] == list(range(step + 1, 13))


def test_a_skipped_step_changes_nothing_but_the_count(tmp_path, monkeypatch):
    """Also where the NaN is in the middle of an accumulation, whose other gradients must not reach the next step."""
    accumulate = Engine.accumulate

    def poisoned(self, *given):
        loss = accumulate(self, *given)
        if poisoned.number == 4:  # the second micro batch of step 2
            self.model.token.weight.grad[3] = math.nan
        poisoned.number += 1
        return loss

    poisoned.number = 1
    monkeypatch.setattr(Engine, "accumulate", poisoned)
    states = {}
    update = Engine.update

    def watched(self, *arguments):
        states[len(states)] = [p.clone() for p in self.model.parameters()]
        return update(self, *arguments)

    monkeypatch.setattr(Engine, "update", watched)
    said = []
    metrics = trained(tiny(tmp_path, steps=4, micro_batch=2, accumulation=2, guard={"nan": "skip"}), say=said.append)
    assert [one.skipped for one in metrics] == [False, True, False, False]
    assert metrics[1].gradient_norm is None and metrics[1].loss is not None and "skipped" in metrics[1].line()
    assert len(said) == 1 and "skipped, its batch is in" in said[0]
    same = [[torch.equal(a, b) for a, b in zip(states[i], states[i + 1], strict=True)] for i in range(3)]
    assert not any(same[0]) and all(same[1]) and not any(same[2])
    assert len(load_file(tmp_path / "bad-step-00000002.safetensors")) == 2


def test_too_many_skipped_in_a_row_stop_the_run(tmp_path, monkeypatch):
    broken(monkeypatch, lambda number: number >= 2)
    with pytest.raises(UserError, match="step 5: .*number 3 in a row"):
        train(tiny(tmp_path, guard={"nan": "skip", "patience": 3}))


def test_a_spike_is_skipped_or_stops(tmp_path, monkeypatch):
    accumulate = Engine.accumulate

    def jumps(self, *given):
        jumps.number += 1
        return accumulate(self, *given) + (5.0 if jumps.number == 25 else 0.0)

    monkeypatch.setattr(Engine, "accumulate", jumps)
    jumps.number = 0
    spikes = {"spike": 4.0, "on_spike": "skip"}
    metrics = trained(tiny(tmp_path / "skip", steps=27, guard=spikes))
    assert [one.step for one in metrics if one.skipped] == [25] and metrics[24].loss > 8
    jumps.number = 0
    with pytest.raises(UserError, match=r"step 25: the loss jumped.*guard.on_spike=skip"):
        train(tiny(tmp_path / "stop", steps=27, guard={"spike": 4.0}))


# -- signals, folders, modes


def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path):
    def polite(metrics, steps):
        if metrics.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    outcome = train(tiny(tmp_path, steps=50), Shown(step=polite))
    assert outcome.stopped and 3 <= outcome.step <= 5
    assert read(tmp_path / "checkpoints" / f"step-{outcome.step:08d}", "model")[1]["step"] == outcome.step
    assert [r["step"] for r in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, outcome.step + 1))
    assert signal.getsignal(signal.SIGTERM) is before
    assert train(tiny(tmp_path, steps=8)).step == 8


@pytest.mark.parametrize("compile", ["none", "default"])
def test_a_signal_ends_the_first_step_at_once_where_it_compiles(tmp_path, monkeypatch, compile):
    real, waits = Engine.accumulate, []

    def signalled(engine, *given, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        waits.append(compile)
        return real(engine, *given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "accumulate", signalled)
        if compile == "none":
            assert train(tiny(tmp_path, steps=50)).step == 1 and waits
        else:
            with pytest.raises(KeyboardInterrupt):
                train(tiny(tmp_path, steps=50, compile=compile))
            assert not waits and not list((tmp_path / "checkpoints").glob("step-*"))
    assert train(tiny(tmp_path, steps=3)).step == 3  # and nothing is in the way of another


def test_a_second_signal_ends_it_at_once(tmp_path):
    def impatient(metrics, steps):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny(tmp_path, steps=50), Shown(step=impatient))


def test_a_run_leaves_the_process_as_it_was(tmp_path):
    before = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    train(tiny(tmp_path, steps=1, deterministic=True, precision="tf32"))
    with contextlib.suppress(UserError):
        train(tiny(tmp_path, steps=1, deterministic=True, precision="tf32", checkpoint={"resume": "never"}))
    assert (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()) == before


def test_waiting_for_data_is_said_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(loop, "STALL", -1.0)
    trained(tiny(tmp_path, steps=25), say=said.append)
    assert len(said) == 1 and "waiting for data; raise data.workers" in said[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"residual": "bf16"}}, "needs matmuls in bfloat16"),
        ({"model": {"attention": "cudnn"}}, "no such attention"),
        ({"model": {"attention": "hopper"}}, "attention=hopper: .*; choose model.attention=auto"),
        ({"model": {"mlp": "tilesync", "activation": "swiglu"}}, "mlp=tilesync: a gated MLP of tiles has no bias"),
        ({"compile": "reduce-overhead", "global_batch": 8}, "would overwrite the gradients"),
        ({"cuda_graphs": True}, "needs a GPU"),
    ],
)
def test_levers_that_do_not_go_together_are_one_sentence(tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        train(tiny(tmp_path, **changes))


@pytest.fixture
def matmuls_on_any_device(monkeypatch):
    """Let `linear` compute small matmuls on a CPU too, and the optimizer's kernel take CPU tensors."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    monkeypatch.setattr(sys.modules["tilewright.ops.linear.op"], "_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 0)
    monkeypatch.setattr(AdamW, "_device", device.type)
    return device


def ema_by_copy(model, values):
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)


def ema_by_pointer(model, values):
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data = value.clone()


def ema_in_place(model, values):
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def load(model, values):
    model.load_state_dict(dict(zip(dict(model.named_parameters()), values, strict=True)))


@pytest.mark.parametrize("write", [ema_by_copy, ema_by_pointer, ema_in_place, load])
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))])  # fmt: skip
def test_an_engine_reads_the_weights_that_are_there(tmp_path, matmuls_on_any_device, graphs, write):
    """By any writer, in any way, and whatever the engine ran before."""
    device = matmuls_on_any_device
    config = tiny(tmp_path, precision="bf16", cuda_graphs=graphs, model={"gpt_block": "optimized"})
    torch.manual_seed(0)
    batches = [torch.randint(256, (4, 33), device=device) for _ in range(4)]

    def step(engine, batch):
        loss = engine.accumulate(batch, first=True)
        gradients = [p.grad.clone() for p in engine.model.parameters()]
        engine.update(loss, torch.tensor(math.inf, device=device), 1e-2, 1)
        return loss, gradients

    old = Engine(config, device, World(), ["none"] * 2)
    for batch in batches:
        step(old, batch)
    values = [2.0 * p.detach() + 0.01 * torch.randn_like(p) for p in old.model.parameters()]
    fresh = Engine(config, device, World(), ["none"] * 2)
    for engine in (old, fresh):
        write(engine.model, values)
    losses, gradients = zip(*[step(engine, batches[0]) for engine in (old, fresh)], strict=True)
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    for engine in (old, fresh):
        write(engine.model, values)
    with torch.no_grad():  # as an evaluation does
        assert torch.equal(*(engine._loss(batches[1]) for engine in (old, fresh)))


def test_an_engine_that_sees_a_larger_batch_computes_its_loss(tmp_path, matmuls_on_any_device, monkeypatch):
    """Matmuls of the small batch are PyTorch's, those of the large one ours, which once read memory nobody wrote."""
    device = matmuls_on_any_device
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 2 * 6 * 32 * 32 * 32)
    config = tiny(tmp_path, precision="bf16", model={"gpt_block": "optimized"})
    torch.manual_seed(0)
    small, large = (torch.randint(256, (batch, 33), device=device) for batch in (4, 8))
    engine = Engine(config, device, World(), ["none"] * 2)
    for _ in range(3):
        loss = engine.accumulate(small, first=True)
        engine.update(loss, torch.tensor(math.inf, device=device), 1e-2, 1)
    fresh = Engine(config, device, World(), ["none"] * 2)
    fresh.model.load_state_dict(engine.model.state_dict())
    assert torch.equal(engine.accumulate(large, first=True), fresh.accumulate(large, first=True))


def test_a_recording_is_made_anew_where_tensors_lie_elsewhere_and_only_there(tmp_path, monkeypatch):
    """With a stand-in for CUDA graphs: only what is recorded when."""
    recorded = []

    class Graph:
        def pool(self):
            return None

        def replay(self):
            pass

    @contextlib.contextmanager
    def record(graph, pool, capture_error_mode):
        recorded.append(graph)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(Engine, "_warm_up", lambda self: None)
    engine = Engine(tiny(tmp_path, cuda_graphs=True), torch.device("cpu"), World(), ["none"] * 2)
    batch = torch.randint(256, (4, 33))

    def recordings():
        before = len(recorded)
        for first in (True, False, False, True):
            engine.accumulate(batch, first=first)
        return len(recorded) - before

    weight = engine.model.token.weight
    assert recordings() == 2  # one that sets gradients, one that adds to them
    weight.data.mul_(2.0)
    assert recordings() == 0
    weight.data = weight.data.clone()
    assert recordings() == 2
    weight.grad = None
    assert recordings() == 2
    with pytest.raises(UserError, match=r"cuda_graphs: the first batch has shape \(4, 33\) and this one \(1, 33\)"):
        engine.accumulate(batch[:1], first=True)


def test_the_norm_of_bfloat16_gradients_is_in_float32(tmp_path):
    config = tiny(tmp_path, precision="bf16_stochastic")
    engine = Engine(config, torch.device("cpu"), World(), ["none"] * 2)
    engine.accumulate(torch.randint(256, (4, 33)), first=True)
    gradients = [p.grad.double() for p in engine.model.parameters()]
    norm = engine.update(torch.tensor(1.0), torch.tensor(math.inf), 0.0, 1)[0]
    assert float(norm) == pytest.approx(float(torch.stack([g.norm() for g in gradients]).norm()), rel=1e-5)


def test_candidates_of_max_autotune_are_tried_in_a_process_of_their_own(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(torch, "compile", lambda model, **how: given.append(how["options"]) or model)
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        Engine(tiny(tmp_path, compile=mode), torch.device("cpu"), World(), ["none"] * 2)
    apart = {"max_autotune": True, "coordinate_descent_tuning": True, "autotune_in_subproc": True}
    graphs = {"triton.cudagraphs": True}
    assert given == [{}, graphs, {**apart, **graphs}, apart]


def test_a_step_whose_tiles_waited_too_long_is_not_saved(tmp_path, monkeypatch):
    """A recording that is replayed does not say so by itself, as a call does."""
    steps = iter(range(1, 9))

    def fails():
        if next(steps) == 5:
            raise TilesyncError("Tile (0, 0) of stage y waited too long: semaphore 0 stands at 1 of 2. Nothing else.")

    monkeypatch.setattr(loop, "raise_if_failed", fails)
    with pytest.raises(UserError, match=r"waited too long: semaphore 0 stands at 1 of 2. The step is not saved"):
        train(tiny(tmp_path, checkpoint={"every": 1}))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[-1] == "step-00000004"
