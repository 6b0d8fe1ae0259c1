"""`tilewright train` in forks of a process that has imported it, and its ranks as forks of them: what is imported is
imported once. All else is as a user starts it."""

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ranks import start_process
from tilewright.cli.main import main
from tilewright.parallel import alive, launch
from tilewright.runtime import dispatch

_NETWORK = 0x40000000  # CLONE_NEWNET


class Command:
    """A command line in a process of its own.

    Args:
        words: `train ...` of tilewright, or `torchrun ...`.
        silent: seconds without a sign of life after which a rank counts as hung.
        network: the name of the network namespace that it is in.
    """

    def __init__(self, output, *words, silent=10.0, network="", **environment):
        self.output = Path(output)
        self.output.touch()
        self.process = start_process(_run, str(output), words, silent, network, environment)

    def ranks(self):
        """The processes that it has started, in their order."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it has ended
                continue
            if int(parent) == self.process.pid and state != "Z":
                found.append(int(path.parent.name))
        return sorted(found)

    def said(self, start):
        """Lines of its output that start so."""
        return [line for line in self.output.read_text().splitlines() if line.startswith(start)]

    def wait(self, seconds=120.0):
        """Its exit code."""
        self.process.join(seconds)
        return self.process.exitcode

    def end(self):
        """End it, and what it has started, as a machine that is switched off."""
        processes = [*self.ranks(), self.process.pid] if self.process.is_alive() else []
        for process in processes:
            os.kill(process, signal.SIGKILL)
        self.process.join()


def _run(output, words, silent, network, environment):
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if network:
        with open(f"/run/netns/{network}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK):
                raise OSError(ctypes.get_errno(), "setns")
    os.environ.update(environment)
    dispatch.INTERPRETED = False
    SubprocessHandler._popen = lambda self, args, env: _Fork(args, env)
    launch.run, alive._SILENT = functools.partial(launch.run, silent=silent), silent
    if words[0] == "torchrun":
        torchrun.main(words[1:])
    else:
        sys.argv = ["tilewright", *words]
        main()


class _Fork:
    """What torchrun's agent needs of a Popen; in a session of its own, as the agent's processes are."""

    def __init__(self, args, env):
        self.code, self.pid = None, os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                os.environ.clear()
                os.environ.update(env)
                for number in launch._SIGNALS:
                    signal.signal(number, signal.SIG_DFL)
                sys.argv = ["tilewright", *args[args.index("train") :]]
                main()
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    def poll(self):
        if self.code is None:
            process, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if process else None
        return self.code

    def wait(self, seconds):
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", seconds)
            time.sleep(0.01)
