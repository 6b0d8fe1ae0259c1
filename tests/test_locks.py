"""The lock files are whole, in step and name no index; an audit asks about each package where it can."""

import http.server
import json
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import audit
import lock


def test_lock_files_and_sbom_are_in_step_with_the_project():
    assert lock.faults() == []


def test_what_is_out_of_step_is_found(monkeypatch, tmp_path):
    (tmp_path / "locks").mkdir()
    for name in ("pyproject.toml", "constraints.txt", *(f"locks/{part}.txt" for part in (*lock.LOCKS, "cpu"))):
        (tmp_path / name).write_text((lock.ROOT / name).read_text())
    monkeypatch.setattr(lock, "ROOT", tmp_path)
    monkeypatch.setattr(lock, "SBOM", tmp_path / "sbom")
    (tmp_path / "sbom").write_text(lock.sbom())
    assert lock.faults() == []
    path = tmp_path / "locks/tune.txt"
    text = path.read_text()
    for bad in (
        text.replace("rich==", "rihc=="), text.replace("torch==2.13.0", "torch==2.12.0"), "--index-url x\n" + text,
        text + "left-pad==1.0\n", text.replace("--hash=sha256:", "--hash=md5:", 1),
    ):  # fmt: skip
        path.write_text(bad)
        assert lock.faults()


@pytest.fixture
def service():
    """A database that knows of one fault, in numpy, and what it was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            asked.extend(queries)
            known = [{"vulns": [{"id": "X-1"}]} if q["package"]["name"] == bad[0] else {} for q in queries]
            body = json.dumps({"results": known}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    bad = [""]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", bad, asked
        server.shutdown()


def test_a_known_fault_is_named_and_every_package_is_asked_about(service, capsys):
    address, bad, asked = service
    assert audit.main(["--service", address]) == 0
    assert {query["package"]["name"] for query in asked} == set().union(*map(lock.locked, lock.LOCKS))
    bad[0] = "numpy"
    assert audit.main(["--service", address]) == 1
    assert f"numpy {lock.locked('tune')['numpy']}: X-1" in capsys.readouterr().out


def test_without_a_network_it_says_that_nothing_was_checked(capsys):
    assert audit.main(["--service", "http://127.0.0.1:1/"]) == 0
    assert capsys.readouterr().out.startswith("Not checked: http://127.0.0.1:1/ gave no answer")
