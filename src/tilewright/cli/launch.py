"""`tilewright launch`: scripts that start `tilewright train` on a cluster."""

from __future__ import annotations

import typer

from tilewright.errors import UserError
from tilewright.parallel import jobs
from tilewright.train.check_ranks import check_ranks, keeps_its_ranks, with_fewer_ranks
from tilewright.train.load_config import read, split_arguments
from tilewright.train.schema import Train

app = typer.Typer(help="Write a script that starts `tilewright train` on a cluster.", no_args_is_help=True)

_ARGUMENTS = typer.Argument(
    None, metavar="[CONFIG.yaml] [FIELD=VALUE]...", help="As of `tilewright train`; looked at here and now."
)
_NODES = typer.Option(1, "--nodes", help="Machines.")
_GPUS = typer.Option(8, "--gpus", help="GPUs of each.")
_NAME = typer.Option("tilewright", "--name", help="Of the job.")
_RESTARTS = typer.Option(3, "--restarts", min=0, help="How many times torchrun starts all ranks anew when one fails.")


@app.command("slurm")
def slurm(
    arguments: list[str] = _ARGUMENTS,
    nodes: int = _NODES,
    gpus: int = _GPUS,
    name: str = _NAME,
    partition: str = typer.Option("", "--partition", help="SLURM's partition."),
    hours: float = typer.Option(24.0, "--hours", help="After which SLURM ends the job; it saves and is queued again."),
    restarts: int = _RESTARTS,
) -> None:
    """Print an sbatch script.

    Examples:

        tilewright launch slurm run.yaml parallel.zero=3 --nodes 2 > job.sh && sbatch job.sh
    """
    _check(arguments, nodes * gpus)
    given = arguments or []
    print(jobs.slurm(given, nodes=nodes, gpus=gpus, name=name, partition=partition, hours=hours, restarts=restarts),
          end="")  # fmt: skip


@app.command("kubernetes")
def kubernetes(
    arguments: list[str] = _ARGUMENTS,
    image: str = typer.Option(..., "--image", help="A container image that has Tilewright."),
    nodes: int = _NODES,
    gpus: int = _GPUS,
    name: str = _NAME,
    claim: str = typer.Option("", "--claim", help="A persistent volume claim, mounted at /data."),
    restarts: int = _RESTARTS,
) -> None:
    """Print the manifest of a PyTorchJob, for the training operator of Kubeflow.

    Examples:

        tilewright launch kubernetes run.yaml --nodes 2 --image site/tilewright:1 --claim data | kubectl apply -f -
    """
    run = _check(arguments, nodes * gpus)
    given = [*(arguments or []), *with_fewer_ranks(run, nodes * gpus)]  # with the pods that are left it learns the same
    # Groups that share the weights are so many as they say: the operator waits until all pods are there.
    fewest = nodes if keeps_its_ranks(run, nodes * gpus) or run.parallel.dp_replicate > 1 else 1
    print(jobs.kubernetes(given, nodes=nodes, gpus=gpus, name=name, image=image, claim=claim, restarts=restarts,
                          fewest=fewest), end="")  # fmt: skip


def _check(arguments: list[str] | None, ranks: int) -> Train:
    """The run; what every rank would refuse there is refused here."""
    run = read(*split_arguments(arguments or [])).train
    if run.checkpoint.resume == "never":
        raise UserError("checkpoint.resume is never, and a job that is started again goes on; leave it out.")
    check_ranks(run, ranks)
    return run
