"""An output that cannot be written, because its disk is full or nobody reads it: one sentence, and nothing is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright.cli import train
from tilewright.cli.output import ProgressConsole
from tilewright.cli.tune import _Progress
from tilewright.train.load_config import read
from tilewright.tune.store.record import Measurement, Record

MAIN = "from tilewright.cli.main import main; main()"
PLAN = ("plan", "flops", "7b")
PATH = f"{Path(__file__).parents[2] / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def run(*arguments, **more):
    command = [sys.executable, "-c", MAIN, *arguments]
    return subprocess.run(command, text=True, env={**os.environ, "PYTHONPATH": PATH}, **more)


@pytest.mark.parametrize("arguments", [PLAN, (*PLAN, "--json"), ("--help",)], ids=" ".join)
def test_a_full_disk_is_one_sentence(arguments):
    with open("/dev/full", "w") as full:
        done = run(*arguments, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        "error: Cannot write the output: No space left on device; make room or write elsewhere. What was finished is "
        "kept.\n"
    )


@pytest.mark.parametrize("arguments", [PLAN, (*PLAN, "--json")], ids=" ".join)
def test_a_closed_pipe_ends_a_command_without_a_word(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    done = run(*arguments, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 1 and done.stderr == ""


def test_where_standard_error_is_full_too_the_exit_code_remains():
    with open("/dev/full", "w") as full:
        assert run(*PLAN, stdout=full, stderr=full).returncode == 2


@pytest.mark.parametrize("as_json", [True, False])
def test_training_stops_with_a_checkpoint(as_json, tmp_path, monkeypatch, capsys):
    tiny = ("model.width=16", "model.layers=1", "model.sequence=16", "global_batch=1", "micro_batch=1", "steps=100000")
    run = read(None, [*tiny, "device=cpu", "log.every=1", "data.workers=0", f"out={tmp_path}", "precision=fp32"])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert train._run(run, as_json)
        monkeypatch.undo()
    assert list((tmp_path / "checkpoints").iterdir())
    assert "No space left on device): stopping, with a checkpoint" in capsys.readouterr().err


def test_a_study_goes_on_though_its_progress_cannot_be_shown(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with _Progress() as progress:
            progress.begin({"levers": {}, "name": "a study", "finished": 0, "budget": 60.0})
            found = Record({}, "reference", "done", measurement=Measurement(1000, [1.0], 1.0, 0.0, [], 1))
            progress.record(found, None)
        assert progress.records == [found]
        monkeypatch.undo()


def test_what_is_lost_is_told_once():
    told = []
    with open("/dev/full", "w") as full:
        console = ProgressConsole(told.append, file=full)
        for _ in range(3):
            console.print("a line")
    assert told == ["No space left on device"]
