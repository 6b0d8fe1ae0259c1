"""Scripts for clusters: they parse, start the right number of ranks, and keep arguments in one piece."""

import shlex
import subprocess

import pytest
import yaml

from tilewright.cli.main import app
from tilewright.errors import UserError
from tilewright.parallel.jobs import kubernetes, slurm

ARGUMENTS = ["my run.yaml", "data.paths=[a, b]", "parallel.zero=3"]


def test_a_slurm_script_is_bash_that_keeps_its_arguments(tmp_path):
    text = slurm(ARGUMENTS, nodes=2, gpus=4, name="big", partition="gpu", hours=1.5)
    assert "#SBATCH --nodes=2\n" in text and "#SBATCH --time=01:30:00\n" in text and "--partition=gpu\n" in text
    for name, body in {"scontrol": "echo first", "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(text)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}
    out = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    words = out.stdout.splitlines()
    assert words[words.index("train") + 1 :] == ARGUMENTS
    (tmp_path / "srun").write_text("#!/bin/bash\nexit 7\n")
    run = lambda text: subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True)  # noqa: E731
    assert run(text).returncode == 7
    near = run(f"SECONDS=5221\n{text}")  # of 5,400: it was told to stop, and goes on when it is its turn again
    assert near.returncode == 0 and near.stdout == b"first\n" and "requeue" in text
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=first:29500", "--rdzv-id=7"} <= set(words)


def test_a_manifest_is_yaml_with_a_pod_for_each_node():
    job = yaml.safe_load(kubernetes(ARGUMENTS, nodes=2, gpus=4, name="big", image="site/tilewright:1", claim="disk"))
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert worker["replicas"] == 2 and container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container["command"] + container["args"] == ["torchrun", "--no-python", "tilewright", "train", *ARGUMENTS]
    assert job["spec"]["nprocPerNode"] == "4" and job["kind"] == "PyTorchJob"
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/data"}


@pytest.mark.parametrize("given", [
    {"hours": float("nan")}, {"hours": 0}, {"hours": 1e9},
    {"name": "Big Job"}, {"name": "a; rm -rf /"}, {"nodes": 0}, {"gpus": 0}, {"partition": "a b"},
])  # fmt: skip
def test_what_would_not_be_a_script_is_refused(given):
    with pytest.raises(UserError):
        slurm(["run.yaml"], **{"nodes": 1, "gpus": 1, "name": "big", **given})


def test_a_dollar_reaches_the_run():
    job = yaml.safe_load(kubernetes(["out=$(HOME)"], nodes=1, gpus=1, name="big", image="site/tilewright:1"))
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["args"][-1] == "out=$$(HOME)"


def test_the_command_looks_at_the_run_first(capsys):
    from typer.testing import CliRunner

    good = CliRunner().invoke(app, ["launch", "slurm", "parallel.tp=2", "--nodes", "2", "--gpus", "4"])
    (line,) = (line for line in good.stdout.splitlines() if "tilewright train" in line)
    assert good.exit_code == 0 and shlex.split(line)[-3:] == ["parallel.tp=2", "||", "code=$?"]
    bad = CliRunner().invoke(app, ["launch", "slurm", "parallel.tp=3", "--nodes", "2", "--gpus", "4"])
    assert isinstance(bad.exception, UserError) and "8 processes do not divide by tp 3" in str(bad.exception)
    command = ["launch", "kubernetes", "micro_batch=4", "--nodes", "2", "--gpus", "4", "--image", "site/tilewright:1"]
    pods = yaml.safe_load(CliRunner().invoke(app, command).stdout)
    (container,) = pods["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert {"global_batch=32", "micro_batch=4", "parallel.dp=0"} <= set(container["args"])
    pods = yaml.safe_load(CliRunner().invoke(app, [*command, "parallel.zero=3", "parallel.dp_replicate=2"]).stdout)
    assert pods["spec"]["elasticPolicy"]["minReplicas"] == 2
    for wrong, words in (("checkpoint.resume=never", "goes on"), ("model.heads=2", "heads do not divide")):
        bad = CliRunner().invoke(app, ["launch", "slurm", "parallel.tp=4", wrong, "--gpus", "4"])
        assert isinstance(bad.exception, UserError) and words in str(bad.exception)
