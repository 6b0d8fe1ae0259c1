"""Scripts that start a run on a cluster: SLURM's, and a manifest of Kubernetes' training operator. No torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import yaml

from tilewright.errors import UserError

PORT = 29500
_SHORTEST, _LONGEST = 0.1, 24.0 * 365
_WARNING = 120  # seconds before the end of its time that SLURM tells a job; it may be a minute early


def slurm(
    arguments: Sequence[str], *, nodes: int, gpus: int, name: str, partition: str = "", hours: float = 24.0,
    restarts: int = 3,
) -> str:  # fmt: skip
    """An sbatch script: one torchrun a node, which meet at the first.

    >>> print(slurm(["run.yaml"], nodes=2, gpus=8, name="big").splitlines()[1])
    #SBATCH --job-name=big
    """
    _check(name, nodes, gpus)
    if partition and not re.fullmatch(r"[\w.,-]+", partition):
        raise UserError(f"The partition is {partition!r}; give its name.")
    if not _SHORTEST <= hours <= _LONGEST:
        raise UserError(f"The job has {hours:g} hours; give a number from {_SHORTEST:g} to {_LONGEST:,.0f}.")
    minutes = round(hours * 60)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={gpus}",
        f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00",
        "#SBATCH --requeue",
        f"#SBATCH --signal=TERM@{_WARNING}",
        *([f"#SBATCH --partition={partition}"] if partition else []),
        "set -euo pipefail",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "# Names the interface that ranks talk over, where the machine has several:",
        "# export NCCL_SOCKET_IFNAME=ib0",
        "code=0",
        f"srun --kill-on-bad-exit=1 torchrun --nnodes={nodes} --nproc-per-node={gpus} --max-restarts={restarts} \\",
        f'  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:{PORT}" \\',
        f"  --no-python tilewright train {shlex.join(arguments)} || code=$?",
        "# At the end of its time the run was told to stop and has saved; it goes on from there when queued again:",
        f'if [ "$code" -ne 0 ] && [ "$SECONDS" -ge {minutes * 60 - _WARNING - 60} ]; then',
        '  exec scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def kubernetes(
    arguments: Sequence[str],
    *,
    nodes: int,
    gpus: int,
    name: str,
    image: str,
    claim: str = "",
    restarts: int = 3,
    fewest: int = 1,
) -> str:
    """A PyTorchJob: a pod a node; `claim` names the volume with data and checkpoints, mounted at /data.

    Where pods are lost it goes on with no less than `fewest`.

    >>> "kind: PyTorchJob" in kubernetes(["run.yaml"], nodes=2, gpus=8, name="big", image="site/tilewright:1")
    True
    """
    _check(name, nodes, gpus)
    if not re.fullmatch(r"[\w./:@-]+", image):
        raise UserError(f"The image is {image!r}; give its name, as registry/name:tag.")
    mounts = [{"name": "memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, object]] = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    if claim:
        mounts.append({"name": "data", "mountPath": "/data"})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    container = {
        "name": "pytorch", "image": image, "command": ["torchrun"],
        # Kubernetes reads $(NAME) as a variable, and $$ as a dollar.
        "args": ["--no-python", "tilewright", "train", *(one.replace("$", "$$") for one in arguments)],
        "resources": {"limits": {"nvidia.com/gpu": gpus}}, "volumeMounts": mounts,
    }  # fmt: skip
    if claim:
        container["workingDir"] = "/data"
    worker = {
        "replicas": nodes, "restartPolicy": "OnFailure",
        "template": {"spec": {"containers": [container], "volumes": volumes}},
    }  # fmt: skip
    # The operator tells torchrun how many pods there are and where they meet, by its PET_... variables.
    spec = {
        "elasticPolicy": {
            "rdzvBackend": "c10d", "minReplicas": fewest, "maxReplicas": nodes, "maxRestarts": restarts,
            "nProcPerNode": gpus,
        },
        "nprocPerNode": str(gpus), "pytorchReplicaSpecs": {"Worker": worker},
    }  # fmt: skip
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name}, "spec": spec}
    return yaml.safe_dump(job, sort_keys=False)


def _check(name: str, nodes: int, gpus: int) -> None:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", name):
        raise UserError(f"The name is {name!r}; use lower-case letters, digits and dashes.")
    if nodes < 1 or gpus < 1:
        raise UserError(f"There are {nodes} nodes of {gpus} GPUs; give at least one of each.")
