"""A result that was measured before is found again, and nothing that is kept can do harm."""

import dataclasses
import json
import os
import pickle
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.measure.profile import StepProfile
from tilewright.train.schema import Checkpoint, Data, Log, Model, Optimizer, Train
from tilewright.tune.store import cache
from tilewright.tune.store.record import OUTCOMES, Difference, Measurement, Prediction, Record

MACHINE = {
    "device": "cuda",
    "machine": {
        "gpu": {"name": "H200", "capability": "9.0", "driver": "570", "sm_clock_mhz": 1980},
        "torch": "2.11.0", "triton": "3.6.0", "tilewright": "0.1", "commit": "abc", "date": "2026-01-01",
    },
    "host": {"cpu": "Xeon", "cores": 16},
    "copy_bytes_per_second": 4.0e12,
}  # fmt: skip
PROFILE = StepProfile("cpu", 1, 0.1, 0.1, 0.0, 7.0, 0.0, [], [], [], [], [])
RECORD = Record(
    {"compile": "none"}, "search", "done", prediction=Prediction(0.1, 0.05, {"matmuls": 0.05}, 10.0, {"weights": 5.0}),
    measurement=Measurement(1000, [0.1, 0.2], 1.0, 0.0, [2.0], 10, profile=PROFILE.as_dict()),
    differences=[Difference("gaps", 0.0, 0.1, "s", "launches")],
)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "trials"


def key(run, machine=MACHINE, **more):
    return cache.key(dataclasses.asdict(run), machine, **more)


def changed(*path, value="other"):
    tree = json.loads(json.dumps(MACHINE))
    part = tree
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return tree


def test_a_key_ignores_where_and_how_long_and_nothing_else():
    base = key(Train())
    for run in (Train(out="x"), Train(steps=7), Train(checkpoint=Checkpoint(every=3)), Train(log=Log(every=5))):
        assert key(run) == base
    others = [
        Train(compile="default"), Train(micro_batch=2), Train(global_batch=8), Train(precision="bf16"),
        Train(threads=3), Train(model=Model(width=256)), Train(model=Model(gpt_block="optimized")),
        Train(data=Data(kind="synthetic")), Train(optimizer=Optimizer(name="lion")),
    ]  # fmt: skip
    assert len({base, *map(key, others)}) == len(others) + 1


def test_the_same_holds_for_a_run_inside_of_something():
    def nested(**changes):
        return cache.key({"run": dataclasses.asdict(Train(**changes)), "own_model": ""}, MACHINE)

    assert nested(out="x") == nested() != nested(compile="default")


def test_a_key_goes_by_hardware_and_versions():
    base = key(Train())
    paths = [("machine", "gpu", name) for name in ("name", "capability", "driver")] + [
        ("host", "cpu"),
        ("host", "cores"),
    ]
    paths += [("machine", name) for name in ("torch", "triton", "tilewright", "commit")]
    assert len({base, *(key(Train(), changed(*path)) for path in paths)}) == len(paths) + 1
    for path in (("machine", "date"), ("machine", "gpu", "sm_clock_mhz"), ("copy_bytes_per_second",)):
        assert key(Train(), changed(*path)) == base
    assert key(Train(), changed("machine", "gpu", value=None)) != base
    assert (
        key(Train(), versions={**MACHINE["machine"], "torch": "2.12"})
        != base
        == key(Train(), versions=MACHINE["machine"])
    )


def test_sources_under_work_have_a_key_for_every_change(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.tilewright, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "ops").mkdir()
    source = tmp_path / "ops" / "kernel.py"
    source.write_text("")
    before = key(Train(), changed("machine", "commit", value="abc+"))
    os.utime(source, ns=(1, 1))
    assert key(Train(), changed("machine", "commit", value="abc+")) != before


def test_what_was_put_is_found_and_marked(folder):
    assert cache.get("a" * 64) is None
    cache.put("a" * 64, RECORD)
    assert cache.get("a" * 64) == dataclasses.replace(RECORD, cached=True)
    assert cache.get("b" * 64) is None
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("outcome", [name for name in OUTCOMES if name != "done"])
def test_only_what_was_measured_to_the_end_is_kept(folder, outcome):
    cache.put("a" * 64, dataclasses.replace(RECORD, outcome=outcome))
    assert not list(folder.glob("*"))


class Canary:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_an_entry_that_is_damaged_foreign_or_hostile_is_a_miss_and_is_replaced(folder, tmp_path):
    name = "a" * 64
    cache.put(name, RECORD)
    whole = (folder / f"{name}.json").read_bytes()
    tree = json.loads(whole)

    def but(**changes):
        return json.dumps({**tree, "record": {**tree["record"], **changes}}).encode()

    canary = tmp_path / "canary"
    bad = [
        b"", whole[: len(whole) // 2], b"\x00" * 100, b"[" * 100_000, b"null", b"[]", b"7", b"{}", b"\xff\xfe",
        pickle.dumps(Canary(canary)), json.dumps({**tree, "key": "b" * 64}).encode(),
        json.dumps({**tree, "record": 5}).encode(), but(outcome="error"), but(outcome=["done"]), but(point=None),
        but(purpose="x"), but(drift=0.0), but(drift="1"), but(measurement={}), but(measurement=[1]),
        but(measurement={**tree["record"]["measurement"], "step_seconds": []}),
        but(measurement={**tree["record"]["measurement"], "step_seconds": [0.0]}),
        but(measurement={**tree["record"]["measurement"], "step_seconds": "fast"}),
        but(differences=[{"part": 1}]), but(prediction="soon"),
    ]  # fmt: skip
    for content in bad:
        (folder / f"{name}.json").write_bytes(content)
        assert cache.get(name) is None, content[:80]
    assert not canary.exists()
    cache.put(name, RECORD)
    assert cache.get(name) is not None
    (folder / f"{name}.json").unlink()
    (folder / f"{name}.json").mkdir()
    assert cache.get(name) is None
    with pytest.warns(UserWarning, match="could not be kept"):
        cache.put(name, RECORD)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=20), st.integers(0, 10_000), st.integers(0, 10_000))
def test_no_damage_gives_an_error_or_another_outcome(folder, junk, begin, length):
    cache.put("a" * 64, RECORD)
    path = folder / f"{'a' * 64}.json"
    whole = path.read_bytes()
    begin %= len(whole)
    path.write_bytes(whole[:begin] + junk + whole[begin + length % 40 :])
    found = cache.get("a" * 64)
    assert found is None or found == dataclasses.replace(RECORD, cached=True)  # the damage may be none


def test_a_folder_that_others_can_write_to_is_not_used(folder):
    cache.put("a" * 64, RECORD)
    for part in (folder, folder.parent):
        part.chmod(0o777)
        with pytest.warns(UserWarning, match="other users can write to .*TILEWRIGHT_CACHE"):
            assert cache.get("a" * 64) is None
        with pytest.warns(UserWarning, match="other users can write"):
            cache.put("b" * 64, RECORD)
        part.chmod(0o700)
    assert len(list(folder.glob("*"))) == 1


def test_a_folder_that_is_somebody_elses_is_not_used(monkeypatch):
    cache.put("a" * 64, RECORD)
    other = os.getuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert cache.get("a" * 64) is None


def test_a_place_that_is_no_folder_turns_caching_off(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="Results are not cached"):
        cache.put("a" * 64, RECORD)


def test_where_the_folder_is(tmp_path, monkeypatch):
    monkeypatch.delenv("TILEWRIGHT_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for base, expected in ((tmp_path / "xdg", tmp_path / "xdg"), ("relative", tmp_path / "home" / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(base))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.put("a" * 64, RECORD)
        assert len(list((expected / "tilewright" / "trials").glob("*.json"))) == 1


def test_it_can_be_switched_off(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEWRIGHT_CACHE", "off")
    assert cache._folder() is None and not list(tmp_path.iterdir())
