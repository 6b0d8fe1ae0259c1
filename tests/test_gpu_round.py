"""A round on a GPU: on a CPU, of made-up steps; and that the commands of the real ones are there."""

import json
import os
import re
import shutil
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import gpu_round
from gpu_round import STEPS, Step
from ops.contract import on_gpu, on_hopper
from tilewright.bench import NAMES
from tilewright.cli.main import app

SLEEPS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("FAILED tests/one.py::test_b - late", flush=True)
"""


def step(name, code, limit=30.0, *arguments, **more):
    return Step(name, limit, ("{python}", "-c", code, *arguments), **more)


def read(folder):
    return json.loads((folder / "round.json").read_text())


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(gpu_round, "RESERVE", 0.0)
    monkeypatch.setattr(gpu_round, "LEAST", 0.5)


def test_a_round_says_what_failed_stops_what_takes_too_long_and_goes_on(tmp_path, quick, capsys):
    folder, archive = tmp_path / "round", tmp_path / "out" / "all.tar.gz"
    fails = "print('FAILED tests/one.py::test_a[1-x] - boom'); print('ERROR tests/two.py'); raise SystemExit(1)"
    writes = "import sys; open(sys.argv[1] + '/made.json', 'a').write('x'); print(sys.argv[2])"
    writes += "; open(sys.argv[1] + '/weights', 'wb').truncate(2**30)"
    steps = (
        step("writes", writes, 30.0, "{results}", "{seconds}"), step("fails", fails), step("sleeps", SLEEPS, 2.0),
        Step("absent", 9.0, ("no-such-program-anywhere",)), step("given up", SLEEPS, 60.0),
        step("last", "print(1)"),
    )  # fmt: skip
    arguments = ["--resume", str(folder), "--archive", str(archive)]
    assert gpu_round.main([*arguments, "--budget", "9"], steps) == 1
    found = read(folder)
    assert [each["state"] for each in found.values()] == [
        "passed", "failed", "outlasted its limit", "no such program", "ended by the budget",
    ]  # fmt: skip
    assert found["fails"]["failing"] == ["tests/one.py::test_a[1-x]", "tests/two.py"]
    assert found["sleeps"]["failing"] == ["tests/one.py::test_b"] and found["writes"]["last"].isdigit()
    for log in ("02_sleeps", "04_given_up"):
        assert not is_running(int((folder / "logs" / f"{log}.log").read_text().split()[0]))
    printed = capsys.readouterr().out
    assert "    tests/two.py" in printed and "2 steps are left: given up, last." in printed
    with tarfile.open(archive) as tar:
        assert {"round.json", "summary.txt", "results/made.json", "logs/01_fails.log"} < set(tar.getnames())
        assert "results/weights" not in tar.getnames()

    elsewhere = tmp_path / "elsewhere"  # where nothing but the archive came to be
    elsewhere.mkdir()
    archive.rename(elsewhere / "round.tar.gz")
    again = (*steps[:4], step("given up", "print(2)"), steps[5])
    assert gpu_round.main(["--resume", str(elsewhere), "--budget", "60"], again) == 1
    assert (elsewhere / "results" / "made.json").read_text() == "x"
    states = {name: each["state"] for name, each in read(elsewhere).items()}
    assert states["given up"] == states["last"] == "passed" and states["sleeps"] == "outlasted its limit"
    assert "0 steps are left: none." in capsys.readouterr().out


def test_a_step_has_its_environment_and_goes_on_with_a_copy_of_what_was_recorded(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(gpu_round, "ROOT", tmp_path)
    recorded = tmp_path / "results" / "h200" / "shapes.json"
    recorded.parent.mkdir(parents=True)
    recorded.write_text("{}")
    monkeypatch.setenv("PYTHONPATH", "packages")
    code = "import os, sys; print(os.environ['A'], os.path.exists(sys.argv[1] + '/shapes.json'))"
    code += f"; assert {str(Path('packages').absolute())!r} in sys.path"  # whatever folder it is started in
    steps = (step("copies", code, 30.0, "{results}", environment={"A": "b"}, copied="shapes"), step("other", "1 / 0"))
    assert gpu_round.main(["--resume", str(tmp_path / "r"), "--only", "^copies$"], steps) == 0
    assert read(tmp_path / "r")["copies"]["last"] == "b True" and len(read(tmp_path / "r")) == 1


def test_a_step_that_ended_the_round_is_not_run_again(tmp_path, quick, monkeypatch):
    def ends(*_):
        raise SystemExit

    steps, arguments = (step("hangs", "1 / 0"), step("next", "print(1)")), ["--resume", str(tmp_path)]
    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(gpu_round, "_run", ends)
        gpu_round.main(arguments, steps)
    with tarfile.open(tmp_path / "round.tar.gz") as tar:
        assert "round.json" in tar.getnames()
    assert gpu_round.main(arguments, steps) == 1
    assert {name: each["state"] for name, each in read(tmp_path).items()} == {
        "hangs": "ended the round", "next": "passed",
    }  # fmt: skip


def test_a_study_that_has_begun_is_resumed(tmp_path, quick):
    study = step("study", "import sys; print(sys.argv[1:])", resumes="study/trials")
    for said in ("[]", "['--resume']"):
        assert gpu_round.main(["--resume", str(tmp_path)], [study]) == 0
        assert read(tmp_path)["study"]["last"] == said
        (tmp_path / "round.json").unlink()  # so that it is left
        (tmp_path / "round.tar.gz").unlink()
        (tmp_path / "results" / "study").mkdir(exist_ok=True)
        (tmp_path / "results" / "study" / "trials").touch()
    assert all(each.resumes for each in STEPS if "tune" in each.command)


@pytest.fixture
def plugin(pytestconfig):
    return pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))


def test_tests_that_need_a_gpu_can_be_run_alone(plugin):
    marks = on_gpu.mark, on_hopper.mark, pytest.mark.skipif(True, reason="needs nvcc").mark
    items = [SimpleNamespace(iter_markers=lambda name, mark=mark: [mark]) for mark in marks]
    wanted, left_out = items[:2], []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    plugin.pytest_collection_modifyitems(SimpleNamespace(getoption="--gpu-alone".__eq__, hook=hook), items)
    assert items == wanted and len(left_out) == 1


def test_a_worker_whose_gpu_is_lost_ends(plugin, monkeypatch):
    def lost():
        raise RuntimeError("unspecified launch failure")

    ended = []
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    plugin.pytest_runtest_logfinish()
    assert not ended
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    plugin.pytest_runtest_logfinish()
    assert ended == [1]
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    plugin.pytest_runtest_logfinish()
    assert ended == [1]


def test_what_a_step_made_for_others_is_made_again_on_another_machine_that_needs_it(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(gpu_round, "SCRATCH", tmp_path / "scratch")
    writes = "import os, sys; os.makedirs(sys.argv[1]); open(sys.argv[2] + '/made', 'a').write('x')"
    reads = "import os, sys; sys.exit(not os.path.isdir(sys.argv[1]))"
    made = Step("makes", 30.0, ("{python}", "-c", writes, "{scratch}/it", "{results}"), makes="it")
    one, two = (step(name, reads, 30.0, "{scratch}/it") for name in ("one", "two"))
    for steps, times in (([made, one], "x"), ([made, one], "x"), ([made, one, two], "xx")):
        assert gpu_round.main(["--resume", str(tmp_path / "r")], steps) == 0
        assert (tmp_path / "r" / "results" / "made").read_text() == times
        shutil.rmtree(tmp_path / "scratch", ignore_errors=True)
    assert [each.command[-1] for each in STEPS if each.makes] == ["{scratch}/llama"]


def test_the_steps_are_commands_that_there_are():
    assert len({each.name for each in STEPS}) == len(STEPS)
    group, root = typer.main.get_command(app), gpu_round.ROOT
    for each in STEPS:
        _, *words = each.command
        if "pytest" in words:
            for word in words[words.index("pytest") :]:
                if word.startswith("tests/"):
                    file, _, test = word.partition("::")
                    assert (root / file).exists(), word
                    assert not test or f"def {test.split('[')[0]}(" in (root / file).read_text(), word
        elif "tilewright" in words:
            _, _, name, *options = [re.sub(r"\{seconds\}", "9", word) for word in words]
            command = group.commands[name]
            context = command.make_context(name, options)  # refuses what it does not know
            assert name != "bench" or context.params["name"] in (*NAMES, "all")
        if each.copied:
            assert (root / "results" / "h200" / f"{each.copied}.json").exists()


def test_a_process_that_ends_while_it_is_stopped_is_no_error(tmp_path, quick):
    began = time.monotonic()
    steps = (step("ends", "import signal, time; signal.signal(2, lambda *_: exit(0)); time.sleep(30)", 1.0),)
    assert gpu_round.main(["--resume", str(tmp_path)], steps) == 1
    assert read(tmp_path)["ends"]["state"] == "outlasted its limit" and time.monotonic() - began < 15
    assert os.path.getsize(tmp_path / "round.tar.gz") > 0
