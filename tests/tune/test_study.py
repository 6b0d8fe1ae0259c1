import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tilewright.plan.gpt import GPTConfig
from tilewright.tune import study as study_module
from tilewright.tune.space import Setting
from tilewright.tune.study import run_study, run_trial
from tilewright.tune.trial import Trial, explain

TRIAL = Trial(
    model=GPTConfig(width=32, layers=1, heads=2, vocabulary=256, sequence=32, dropout=0.1),
    compile=False, device="cpu", precision="fp32", batch=4, check_batch=2, check_steps=3, warmup_steps=1, steps=2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def plain_cpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # trials are to run as a user's would
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


EAGER = [Setting("standard", False), Setting("optimized", False)]


def test_a_study_shows_speed_memory_and_that_the_model_is_the_same():
    seen = []
    study = run_study(EAGER, TRIAL, 1e15, lambda *event: seen.append(event))
    assert [str(row.setting) for row in study.rows] == ["standard, eager", "optimized, eager"]
    for row in study.rows:
        assert row.result.error is None
        assert row.result.tokens_per_second > 0 and row.result.peak_memory_bytes > 2**20 and 0 < row.mfu < 1
        assert row.loss_difference < 1e-5  # float32 on both sides, dropout only in the timed steps
    assert study.rows[0].speedup == 1.0 and study.rows[0].loss_difference == 0.0
    assert study.drift > -1.0 and ("standard, eager, again", 3, 3) in seen
    assert [e for e in seen if e[0] == "standard, eager"] == [("standard, eager", n, 6) for n in range(7)]
    json.dumps(study.as_dict())


def test_a_trial_that_fails_is_a_row_and_the_next_ones_run(monkeypatch):
    broken, sound = Setting("standard", True), Setting("optimized", False)
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    study = run_study([broken, sound], TRIAL, None, lambda *event: None)
    assert "no C++ compiler" in study.rows[0].result.error and "\n" not in study.rows[0].result.error
    assert study.rows[0].mfu is None and study.rows[0].speedup is None
    assert study.rows[1].result.error is None and study.rows[1].result.tokens_per_second > 0


def test_a_process_that_dies_is_a_result(monkeypatch):
    monkeypatch.setattr(study_module.sys, "executable", "/bin/false")
    result = run_trial(TRIAL, "x", lambda *event: None)
    assert "ended with code 1" in result.error


def test_dropout_is_off_for_the_curve_so_two_dropouts_give_one_curve():
    results = [
        run_trial(
            dataclasses.replace(TRIAL, steps=0, model=dataclasses.replace(TRIAL.model, dropout=p)), "x", lambda *e: None
        )
        for p in (0.0, 0.5)
    ]
    assert results[0].losses == results[1].losses and len(results[0].losses) == 3


def processes_with(marker):
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if marker.encode() in environ.read_bytes():
                found.append(environ.parent.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks processes up in /proc")
def test_an_interrupted_study_leaves_no_process_behind():
    endless = dataclasses.replace(TRIAL, check_steps=100_000)
    code = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background inherits it ignored\n"
        "from tilewright.plan.gpt import GPTConfig\n"
        "from tilewright.tune.study import run_trial\n"
        "from tilewright.tune.trial import Trial\n"
        f"run_trial({endless!r}, 'x', lambda label, done, total: print(done, flush=True))\n"
    )
    marker = f"TILEWRIGHT_TEST={uuid.uuid4()}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **dict([marker.split("=")])},
    )  # fmt: skip
    for line in process.stdout:
        if int(line) > 3:
            break
    assert len(processes_with(marker)) >= 2
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    time.sleep(0.5)
    assert processes_with(marker) == []


def test_a_trial_that_falls_silent_is_ended():
    began = time.monotonic()
    result = run_trial(TRIAL, "x", lambda *event: None, silence=0.2)  # importing torch alone takes longer
    assert "said nothing for 0.2 s" in result.error and time.monotonic() - began < 10


def test_what_others_print_is_no_event(tmp_path, monkeypatch):
    noisy = tmp_path / "noisy.py"
    noisy.write_text(
        "import os, tilewright.tune.trial as trial\n"
        "run = trial.run\n"
        "def noisy(*arguments):\n"
        "    os.write(1, b'{ not an event')\n"
        "    print('nor this')\n"
        "    os.system('echo nor that')\n"
        "    return run(*arguments)\n"
        "trial.run = noisy\n"
        "trial.main()\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(study_module.subprocess, "Popen", lambda command, **k: popen([sys.executable, str(noisy)], **k))
    assert run_trial(dataclasses.replace(TRIAL, steps=0), "x", lambda *event: None).error is None


def test_a_loss_that_is_not_finite_is_an_error_and_never_a_difference():
    result = run_trial(dataclasses.replace(TRIAL, learning_rate=1e30), "x", lambda *event: None)
    assert "the loss is" in result.error and result.losses == []


def test_an_impossible_mfu_is_the_rows_error_and_the_others_run():
    saved = []
    study = run_study(
        EAGER, dataclasses.replace(TRIAL, steps=1), 1.0, lambda *event: None, lambda s: saved.append(len(s.rows))
    )
    assert [("cannot be" in row.result.error) for row in study.rows] == [True, True]
    assert saved == [0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate"), "out of memory: choose a smaller --batch"),
        (RuntimeError("InvalidCxxCompiler: No working C++ compiler found"), "install g++"),
        (RuntimeError("Cannot find a working triton installation"), "pip install 'triton>=3.6'"),
        (ValueError("first line\nsecond line"), "ValueError: first line"),
    ],
)
def test_causes_are_one_sentence(error, sentence):
    assert sentence in explain(error) and "\n" not in explain(error)
