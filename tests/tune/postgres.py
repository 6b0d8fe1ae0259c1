"""The real PostgreSQL server, in a folder of its own, for as long as a test needs it."""

import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest


def binary(name):
    """The path of one of the server's programs, which Debian does not put on PATH, or None."""
    found = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"))
    return shutil.which(name) or (found[-1] if found else None)


class Server:
    """A server that can be stopped, killed and started again on the same data and port."""

    def __init__(self, folder):
        self.data, self.process = Path(folder) / "data", None
        # It refuses to run as root.
        self.user = None if os.getuid() else next(u for u in ("postgres", "nobody") if _exists(u))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"postgresql://tester@127.0.0.1:{self.port}/postgres"
        self._run([binary("initdb"), "-D", self.data, "-U", "tester", "-A", "trust", "--no-sync", "-E", "UTF8"])

    def start(self):
        options = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        command = [binary("postgres"), "-D", self.data]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.data, **self._as_user()
        )
        deadline = time.monotonic() + 30
        while True:
            import psycopg

            try:
                psycopg.connect(self.url, connect_timeout=5).close()
                return
            except psycopg.OperationalError:
                assert self.process.poll() is None and time.monotonic() < deadline, "PostgreSQL did not start"
                time.sleep(0.05)

    def stop(self):
        """At once, connections and all, as a machine that goes down: what was committed is kept."""
        self.process.send_signal(3)  # "immediate shutdown"
        self.process.wait(30)

    def _as_user(self):
        return {"user": self.user, "group": pwd.getpwnam(self.user).pw_gid, "extra_groups": []} if self.user else {}

    def _run(self, command):
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.data.parent, **self._as_user())
        assert done.returncode == 0, done.stderr


def _exists(user):
    try:
        return bool(pwd.getpwnam(user))
    except KeyError:
        return False


@pytest.fixture(scope="module")
def server():
    if binary("initdb") is None or binary("postgres") is None:
        pytest.skip("PostgreSQL is not installed: apt install postgresql")
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'tilewright[postgresql]'")
    with tempfile.TemporaryDirectory(prefix="postgres") as folder:  # pytest's own are closed to other users
        os.chmod(folder, 0o777)
        found = Server(folder)
        found.start()
        yield found
        found.stop()
