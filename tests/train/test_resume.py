"""A run that was interrupted, in any way and at any moment, ends with the bits of one that was not."""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from tilewright.errors import UserError
from tilewright.train import checkpoint, checkpoint_format
from tilewright.train.loop import train
from tilewright.train.metrics import read as read_metrics
from tilewright.train.shown import Shown
from train.tiny import as_on_a_cpu, losses, tiny, trained  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.usefixtures("as_on_a_cpu")
]  # fmt: skip

CASES = {
    "dropout, accumulation": {"model": {"dropout": 0.2}, "micro_batch": 2, "accumulation": 2},
    "8-bit optimizer": {"optimizer": {"name": "adamw_8bit", "learning_rate": 3e-3}},
    # Of few tokens, where matmuls are in bfloat16: some CPUs have no instructions for them.
    "bf16_stochastic": {"precision": "bf16_stochastic", "model": {"dropout": 0.1}, "micro_batch": 1},
    "bf16_kahan, lion": {
        "precision": "bf16_kahan", "optimizer": {"name": "lion", "learning_rate": 3e-3}, "micro_batch": 1,
    },
    "bf16, adafactor": {
        "precision": "bf16", "optimizer": {"name": "adafactor", "learning_rate": 0.1}, "micro_batch": 1,
    },
    "sgd, recomputed dropout": {
        "model": {"dropout": 0.2, "recompute": "selective"}, "optimizer": {"name": "sgd", "learning_rate": 0.1},
    },
    "spikes": {
        "steps": 40, "optimizer": {"learning_rate": 1e-5}, "model": {"dropout": 0.1},
        "guard": {"spike": 0.2, "on_spike": "skip", "patience": 1000},
    },
    "a worker, small epochs": {"data": {"workers": 1, "paths": [__file__], "seed": 3}, "micro_batch": 7},
}  # fmt: skip
SHOWN = ("step", "loss", "gradient_norm", "skipped", "learning_rate", "samples")


def result(folder, step):
    """All that a run has computed, and the bits of its last checkpoint."""
    records = [tuple(record[name] for name in SHOWN) for record in read_metrics(folder / "metrics.jsonl")]
    path = folder / "checkpoints" / f"step-{step:08d}"
    tensors = {name: checkpoint.read(path, name)[0] for name in ("model", "optimizer")}
    return records, {f"{part}/{name}": value for part, flat in tensors.items() for name, value in flat.items()}


def assert_equal(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


class Crash(Exception):
    pass


def crash_at(step):
    def at(metrics, steps):
        if metrics.step == step:
            raise Crash

    return Shown(step=at)


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_crashed_ends_as_one_that_did_not(tmp_path, case):
    changes = {"deterministic": True, "checkpoint": {"every": 4, "keep": 1}, **CASES[case]}
    whole, broken = tiny(tmp_path / "whole", **changes), tiny(tmp_path / "broken", **changes)
    train(whole)
    for step in (3, 4, 7, whole.steps):  # before any checkpoint, as one is due, after it, before the last
        with pytest.raises(Crash):
            train(broken, crash_at(step))
    train(broken)
    expected = result(tmp_path / "whole", whole.steps)
    assert_equal(result(tmp_path / "broken", whole.steps), expected)
    if case == "spikes":
        assert 3 < sum(record[3] for record in expected[0]) < 30  # the guard had something to decide


def test_a_run_that_was_stopped_at_any_step_ends_as_one_that_was_not(tmp_path):
    """A polite stop saves at a step where the other does not: what the guard knows must not depend on it."""
    changes = {"deterministic": True, **CASES["spikes"]}
    train(tiny(tmp_path / "whole", **changes))
    stops = 0
    for _ in range(40):
        count = iter(range(1000))
        shown = Shown(step=lambda *_, count=count: os.kill(os.getpid(), signal.SIGTERM) if next(count) == 3 else None)
        outcome = train(tiny(tmp_path / "stopped", **changes), shown)
        stops += outcome.stopped
        if not outcome.stopped:
            break
    assert stops > 5
    assert_equal(result(tmp_path / "stopped", 40), result(tmp_path / "whole", 40))


def test_metrics_beyond_the_checkpoint_are_forgotten_and_come_again(tmp_path):
    with pytest.raises(Crash):
        train(tiny(tmp_path, checkpoint={"every": 4}), crash_at(7))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # a kill in the middle of a line
    trained(tiny(tmp_path))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 13))


def test_more_steps_and_another_micro_batch_go_on_with_the_same_data(tmp_path):
    trained(tiny(tmp_path / "whole", steps=10, schedule={"name": "constant"}))
    trained(tiny(tmp_path / "parts", steps=6, schedule={"name": "constant"}))
    begun = []
    trained(
        tiny(tmp_path / "parts", steps=10, schedule={"name": "constant"}, micro_batch=2, global_batch=4),
        begin=begun.append,
    )
    assert begun[0]["resumed_from"] == 6
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [r["samples"] for r in parts] == [r["samples"] for r in whole]
    assert [r["loss"] for r in parts] == pytest.approx([r["loss"] for r in whole], rel=1e-5)


def test_a_run_that_is_done_says_so_and_changes_nothing(tmp_path):
    trained(tiny(tmp_path, steps=3))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    said = []
    assert trained(tiny(tmp_path, steps=3), say=said.append) == []
    assert len(said) == 1 and "raise steps" in said[0]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_path_begins_where_another_run_was(tmp_path):
    there = losses(tiny(tmp_path / "there", steps=4, schedule={"name": "constant"}))
    path = str(tmp_path / "there" / "checkpoints" / "step-00000004")
    found = losses(tiny(tmp_path / "here", steps=6, schedule={"name": "constant"}, checkpoint={"resume": path}))
    assert len(found) == 2 and there + found == losses(
        tiny(tmp_path / "whole", steps=6, schedule={"name": "constant"})
    )  # fmt: skip
    with pytest.raises(UserError, match="start in another folder"):
        train(tiny(tmp_path / "other", model={"width": 16}, checkpoint={"resume": path}))
    with pytest.raises(UserError, match="There is no checkpoint"):
        train(tiny(tmp_path / "other", checkpoint={"resume": str(tmp_path / "no")}))
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def test_a_path_does_not_take_a_run_back(tmp_path):
    """Once a folder has checkpoints of its own, the same command goes on from those."""
    path = str(tmp_path / "there" / "checkpoints" / "step-00000004")
    trained(tiny(tmp_path / "there", steps=4))
    trained(tiny(tmp_path / "here", steps=5, checkpoint={"resume": path}))
    assert [metrics.step for metrics in trained(tiny(tmp_path / "here", steps=7, checkpoint={"resume": path}))] == [
        6,
        7,
    ]
    trained(tiny(tmp_path / "there", steps=6))
    with pytest.raises(UserError, match="has gone on to step-00000006; to branch off"):
        train(tiny(tmp_path / "there", steps=9, checkpoint={"resume": path}))


@pytest.mark.parametrize("change", [{"heads": 4}, {"activation": "gelu"}, {"norm": "rms", "bias": False}])
def test_another_model_does_not_go_on_from_a_checkpoint(tmp_path, change):
    trained(tiny(tmp_path, steps=2))
    with pytest.raises(UserError):
        train(tiny(tmp_path, steps=4, model=change))
    assert (
        len(trained(tiny(tmp_path, steps=4, model={"gpt_block": "optimized", "recompute": "full"}))) == 2
    )  # levers may


def test_never_refuses_a_folder_with_checkpoints_and_leaves_it_as_it_was(tmp_path):
    trained(tiny(tmp_path, steps=2))
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"has checkpoints; choose another `out`"):
        train(tiny(tmp_path, steps=9, checkpoint={"resume": "never"}))
    assert (tmp_path / "config.yaml").read_text() == before
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_a_damaged_checkpoint_is_passed_over_and_said_but_none_that_is_whole_is_an_end(tmp_path):
    train(tiny(tmp_path, steps=8, checkpoint={"every": 4}))
    said = []
    _flip(tmp_path / "checkpoints" / "step-00000008")
    assert len(trained(tiny(tmp_path, steps=8), say=said.append)) == 4  # again from step 4
    assert len(said) == 1 and "step-00000008" in said[0]
    for step in (4, 8):
        _flip(tmp_path / "checkpoints" / f"step-{step:08d}")
    with pytest.raises(UserError, match=r"No checkpoint of .* is whole: .*step-00000008"):
        train(tiny(tmp_path, steps=9))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 8


def _flip(path):
    file = next(path.glob("*.bin"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# -- kill -9


def nursery():
    """Import torch once, and for each line of arguments fork a process that is `tilewright train`."""
    import torch._inductor  # which `deterministic` brings in, and that takes a second

    from tilewright.cli.main import main

    torch.set_num_threads(1)
    train  # noqa: B018 - imported, with all it needs
    for line in sys.stdin:
        sys.argv = ["tilewright", "train", *json.loads(line)]
        child = os.fork()
        if child == 0:
            os.dup2(2, 1)
            try:
                main()
            except SystemExit as error:
                os._exit(int(error.code or 0))
            os._exit(0)
        os.write(1, f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


@contextlib.contextmanager
def commands():
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**plain, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=environment,
    )  # fmt: skip

    def run(arguments, meanwhile=lambda pid: None):
        process.stdin.write(json.dumps(arguments) + "\n")
        process.stdin.flush()
        meanwhile(int(process.stdout.readline()))
        return int(process.stdout.readline())

    yield run
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    process.stdout.close()


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(tmp_path, asynchronous):
    arguments = [
        f"data.paths=[{__file__}]", "steps=12", "device=cpu",
        "micro_batch=2", "accumulation=2", "deterministic=true", "model.width=32",
        "model.layers=2", "model.heads=2", "model.sequence=32", "model.dropout=0.1", "data.workers=0",
        "optimizer.name=adamw_8bit", "optimizer.learning_rate=0.003", "checkpoint.every=3", "guard.spike=3",
        "guard.on_spike=skip", f"checkpoint.asynchronous={asynchronous}",
    ]  # fmt: skip
    chance = random.Random(asynchronous)
    killed = in_a_save = beyond = 0
    folder = tmp_path / "killed"

    def kill(pid):
        """As a save is written, or after a few more metrics than there are and some of the time of a step."""
        metrics, saves = folder / "metrics.jsonl", folder / "checkpoints"
        deadline, wanted, in_save = time.monotonic() + 30, chance.randrange(1, 8), chance.random() < 0.4
        began = metrics.stat().st_mtime_ns if metrics.exists() else None
        before = set(os.listdir(saves)) if saves.exists() else set()
        # A run forgets metrics beyond its checkpoint as it begins: wait for that, then for new ones.
        while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_mtime_ns != began):
            time.sleep(0.001)
        size = metrics.stat().st_size
        while time.monotonic() < deadline and (in_save or metrics.stat().st_size < size + 300 * wanted):
            names = set(os.listdir(saves)) if saves.exists() else set()
            if "step-00000012" in names or (in_save and any(each.startswith(".writing") for each in names - before)):
                break
            time.sleep(0.0002 if in_save else 0.001)
        time.sleep(chance.choice((0.0, 0.003, 0.01)) if in_save else chance.uniform(0, 0.05))
        with contextlib.suppress(ProcessLookupError):  # it was done already
            os.kill(pid, signal.SIGKILL)

    with commands() as run:
        assert run([f"out={tmp_path / 'whole'}", *arguments]) == 0
        while not (folder / "checkpoints" / "step-00000012").exists():
            run([f"out={folder}", *arguments], kill)
            killed += 1
            names = os.listdir(folder / "checkpoints")
            in_a_save += any(name.startswith(".writing") for name in names)
            saved = max((int(name[5:]) for name in names if name.startswith("step-")), default=0)
            beyond += read_metrics(folder / "metrics.jsonl")[-1]["step"] > saved
            assert killed < 60
        assert run([f"out={folder}", *arguments]) == 0
    assert killed > 3 and in_a_save and beyond  # the kills did hit saves, and steps after them
    assert_equal(result(folder, 12), result(tmp_path / "whole", 12))


if __name__ == "__main__":
    nursery()


# Other data than the checkpoint's


def text_of(folder, name, seed, size=4000):
    path = folder / name
    path.write_bytes(random.Random(seed).randbytes(size))
    return {"paths": [str(path)], "workers": 0}


OTHER = {
    "other text of the same length": ({"data": {"seed": 9}}, "not the data .* was trained on"),
    "more text": ({"data": {"seed": 1, "size": 5000}}, "5,000 tokens here, 4,000 there"),
    "another order": ({"seed": 1}, "data.seed is 1 and the checkpoint's run had 0"),
    "no order": ({"shuffle": False}, "data.shuffle is False and the checkpoint's run had True"),
    "random tokens": ({"kind": "synthetic", "paths": []}, "data.kind is 'synthetic' .* had 'text'"),
}


@pytest.mark.parametrize("case", OTHER)
def test_a_folder_with_a_checkpoint_of_other_data_is_refused_and_left_as_it_is(tmp_path, case):
    data = text_of(tmp_path, "a", 1)
    trained(tiny(tmp_path / "run", steps=2, data=data))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    changes, says = OTHER[case]
    changes = dict(changes)
    if "data" in changes:
        changes = text_of(tmp_path, "b", **changes.pop("data"))
    with pytest.raises(UserError, match=says) as found:
        trained(tiny(tmp_path / "run", steps=4, data={**data, **changes}))
    assert "another out" in str(found.value) and "\n" not in str(found.value)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_the_same_data_elsewhere_is_the_same_data(tmp_path):
    trained(tiny(tmp_path / "run", steps=2, data=text_of(tmp_path, "a", 1)))
    assert len(trained(tiny(tmp_path / "run", steps=4, data=text_of(tmp_path, "b", 1)))) == 2


def test_another_held_out_share_is_other_data(tmp_path):
    data = text_of(tmp_path, "a", 1)
    trained(tiny(tmp_path / "run", steps=2, data=data, eval={"every": 2, "held_out": 0.1}))
    with pytest.raises(UserError, match="eval.held_out is 0.2 and the checkpoint's run had 0.1"):
        trained(tiny(tmp_path / "run", steps=4, data=data, eval={"every": 2, "held_out": 0.2}))
    with pytest.raises(UserError, match="eval.held_out is 0.0 and the checkpoint's run had 0.1"):  # every: 0
        trained(tiny(tmp_path / "run", steps=4, data=data))


def test_a_branch_may_have_other_data_and_says_so(tmp_path):
    trained(tiny(tmp_path / "run", steps=2, data=text_of(tmp_path, "a", 1)))
    path, said = tmp_path / "run" / "checkpoints" / "step-00000002", []
    branch = tiny(
        tmp_path / "branch", steps=4, data=text_of(tmp_path, "b", 2), checkpoint={"resume": str(path)}
    )  # fmt: skip
    assert len(trained(branch, say=said.append)) == 2
    assert any("not the data" in line for line in said)
    assert len(trained(dataclasses.replace(branch, steps=5))) == 1  # by now it has a checkpoint of its own


@pytest.mark.parametrize(
    "forged",
    [
        {"step": -1}, {"step": "2"}, {"samples": 2**80}, {"samples": 1.5}, {"samples": None}, {"recent_losses": 3},
        {"recent_losses": [[1, "x"]]}, {"recent_losses": [[1, float("nan")]]}, {"recent_losses": [[1]]},
        {"configuration": None}, {"configuration": {"model": []}}, {"data": "text"}, {"skipped_in_a_row": []},
    ],
    ids=str,
)  # fmt: skip
def test_forged_facts_are_a_sentence(tmp_path, forged):
    trained(tiny(tmp_path, steps=1, data=text_of(tmp_path, "a", 1)))
    folder = tmp_path / "checkpoints" / "step-00000001"
    facts = json.loads((folder / "facts.json").read_text()) | forged
    text = json.dumps(facts).encode()
    files = checkpoint_format.read_manifest(folder)
    (folder / "facts.json").write_bytes(text)
    files["facts.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    (folder / "manifest.json").write_text(checkpoint_format.manifest_text(files))
    with pytest.raises(UserError, match="facts.json .* of a run") as found:
        trained(tiny(tmp_path, steps=2, data=text_of(tmp_path, "a", 1)))
    assert "\n" not in str(found.value)


def test_metrics_are_on_the_disk_before_the_checkpoint_that_follows_them(tmp_path, monkeypatch):
    log, fsync = [], os.fsync

    def synced(handle):
        log.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    trained(tiny(tmp_path, steps=4, checkpoint={"every": 2, "asynchronous": False}))
    order = ["metrics.jsonl", "manifest.json"]
    assert [name for name in log if name in order] == order * 2
