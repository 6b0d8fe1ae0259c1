import json
import os
import subprocess
import sys

import pytest
import torch

from tilewright.cli import doctor
from tilewright.errors import UserError
from tilewright.hardware import peak
from tilewright.runtime import nvrtc


def tilewright(*arguments, **environment):
    plain = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", "from tilewright.cli.main import main; main()", *arguments],
        capture_output=True, text=True, env={**plain, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", **environment},
    )  # fmt: skip


def test_help_names_every_command_and_does_not_load_torch():
    done = tilewright("--help")
    assert done.returncode == 0
    for command in ("tune", "report", "train", "plan", "bench", "doctor"):
        assert command in done.stdout
    code = "import sys\nimport tilewright.cli.main\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bench", "dropout_norm"), "did you mean 'dropout_add_norm'"),
        (("bench", "dropout_add_norm"), "needs a CUDA GPU"),
        (("bench", "shapes"), "needs a CUDA GPU"),
        (("bench", "rope", "--seed", "1"), "are of `tilewright bench shapes` alone"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, sentence):
    done = tilewright(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_doctor_says_what_works_without_a_gpu():
    done = tilewright("doctor", "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    found = {f["what"]: f for f in report["findings"]}
    assert found["torch"]["found"].split("+")[0] == torch.__version__.split("+")[0]  # only some say for which CUDA
    assert not found["accelerator"]["ok"] and found["accelerator"]["advice"]
    assert report["works"]["tune"] == "yes" and "no GPU" in report["works"]["fused kernels"]
    assert "What will work" in tilewright("doctor").stdout


def test_doctor_names_the_fix_for_a_missing_compiler():
    done = tilewright("doctor", "--json", PATH="", CXX="")
    found = {f["what"]: f for f in json.loads(done.stdout)["findings"]}
    assert "install g++" in found["compilers"]["advice"]


def test_doctor_names_the_compiler_that_torch_brings_for_gpus(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor._nvrtc() == []
    for version, package in (("12.8", "nvidia-cuda-nvrtc-cu12"), ("13.0", "nvidia-cuda-nvrtc;")):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(nvrtc, "can_compile", lambda: False)
        (missing,) = doctor._nvrtc()
        assert missing.ok and missing.found == "missing" and f"pip install {package}" in missing.advice
        monkeypatch.setattr(nvrtc, "can_compile", lambda: True)
        (found,) = doctor._nvrtc()
        assert (found.found, found.advice) == ("found", "")


def test_an_unknown_accelerator_has_no_mfu_and_the_flag_is_named():
    found, source = peak("NVIDIA H200 NVL", "bf16", None, "--peak-tflops")
    assert found is None and "--peak-tflops" in source and "NVIDIA H200 NVL" in source
    assert peak("NVIDIA H200", "bf16", None, "--peak-tflops")[0] == 989.5e12
    assert peak("NVIDIA H200 NVL", "bf16", 800.0, "--peak-tflops")[0] == 800e12
    with pytest.raises(UserError):
        peak("NVIDIA H200", "bf16", 0.0, "--peak-tflops")
