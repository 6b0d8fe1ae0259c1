"""Run a function as each rank of a gloo process group, in processes of their own."""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run_ranks(function, ranks, *arguments):
    """Call function(rank, *arguments) on every rank; raises what the first of them to fail raised."""
    with tempfile.TemporaryDirectory() as folder:
        # By a spawn they are new processes: what the parent imports must be found there under the same name.
        multiprocessing.spawn(_run, (ranks, f"{folder}/store", sys.path, function, arguments), nprocs=ranks)


def _run(rank, ranks, store, path, function, arguments):
    sys.path[:] = path
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    function(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()
    # Threads of gloo can outlive the group, and one that Python's own end finds at work aborts the process
    # (https://github.com/pytorch/pytorch/pull/179291). What was to be shown has been.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
