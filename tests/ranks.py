"""Run a function as each rank of a gloo process group, in processes of their own."""

import os
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

PRELOADED = ["torch.distributed.checkpoint", "tilewright.ops", "tilewright.train.loop", "tilewright.cli.main"]


def run_ranks(function, ranks, *arguments):
    """Call function(rank, *arguments) on every rank; raises what the first of them to fail raised."""
    with tempfile.TemporaryDirectory() as folder:
        # New processes, of a server that has imported torch: what else the parent has must be found under its name.
        multiprocessing.set_forkserver_preload(PRELOADED)
        given = (ranks, f"{folder}/store", sys.path, function, arguments)
        multiprocessing.start_processes(_run, given, nprocs=ranks, start_method="forkserver")


def start_process(function, *arguments):
    """Call a function in such a process, and do not wait for it."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    process = multiprocessing.get_context("forkserver").Process(target=_call, args=(sys.path, function, arguments))
    process.start()
    return process


def _call(path, function, arguments):
    sys.path[:] = path
    torch.set_num_threads(1)
    function(*arguments)


def _run(rank, ranks, store, path, function, arguments):
    sys.path[:] = path
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    function(rank, *arguments)
    if dist.is_initialized():  # the function may have ended it, and begun others
        dist.barrier()
        dist.destroy_process_group()
    # Threads of gloo can outlive the group, and one that Python's own end finds at work aborts the process
    # (https://github.com/pytorch/pytorch/pull/179291). What was to be shown has been.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
