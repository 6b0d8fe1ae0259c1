"""The cases of `bench attention`, and what it learns from them."""

from __future__ import annotations

import json

import pytest
import torch

from tilewright.bench import attention as bench
from tilewright.bench.protocol import Ask
from tilewright.cli.bench import bench as command
from tilewright.errors import UserError
from tilewright.ops.attention import backends, table


def measured(case, **medians):
    """A result of a case, half of each time forward."""
    cells = {name: {"median": seconds / 2} for name, seconds in medians.items()}
    return {**case, "forward": {"flops": 1e9, "implementations": cells | {"fa3": {"error": "missing"}}},
            "backward": {"flops": 2e9, "implementations": dict(cells)}}  # fmt: skip


def test_every_case_has_a_label_and_a_limit_of_its_own():
    cases = list(bench.cases(quick=False))
    assert len({bench._label(case) for case in cases}) == len(cases) and list(bench.cases(quick=True))
    for case in cases:
        limits = bench._limits(case)
        assert limits["backward"].flops == pytest.approx(2.5 * limits["forward"].flops, rel=1e-6)
    by_mask = {
        c["causal"]: bench._limits(c)["forward"].flops for c in cases if (c["sequence"], c["head_dim"]) == (512, 64)
    }
    assert 0.5 < by_mask[True] / by_mask[False] < 0.51
    assert set(bench.BACKENDS) <= set(backends.BACKENDS)


def test_the_fastest_of_plain_cases_is_learned(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")
    table._read.cache_clear()
    plain, shared, packed = (
        bench._case(8, 2048, 32, 64),
        bench._case(4, 4096, 32, 64),
        bench._case(1, 99, 8, 64, packed=[99]),
    )
    times = {"tilewright": 1.0, "tilewright-hopper": 2.0, "tilewright-triton": 3.0, "cudnn": 2.5, "flex": 0.1}
    slow_hopper = {**times, "tilewright-hopper": 2.6}
    many = bench._case(1, 6000, 8, 64, packed=[3000, 3000])
    results = [
        measured(plain, **times),
        measured(shared, **slow_hopper),
        measured(packed, flash=1.0),
        measured(many, **{**times, "flash": 0.5}),
    ]

    def run_cases(name, cases, prepare, limits, label, *, peers, ask):
        ask.save({"cases": results})
        return {"cases": results}

    monkeypatch.setattr(bench, "run_cases", run_cases)
    lines: list[str] = []
    try:
        bench.run(Ask(lines.append, lambda result: None))
        key = table.Key("Some GPU", torch.bfloat16, 64, True, 2048)
        assert table.find(key) == ""
        bench.run(Ask(lines.append, lambda result: None, learn=True))
        assert (table.find(key), table.find(key._replace(length=4096)), table.find(key._replace(length=99))) == (
            "hopper",
            "cudnn",
            "",
        )
        assert table.find(key._replace(length=3000, packed=True)) == "hopper", "flash is another function there"
        text = '"Some GPU / bfloat16 / 64 / causal / 2048": "hopper"'
        assert text in lines[-1] and "hopper" in json.loads(lines[-1]).values(), "what measured.json can take"
    finally:
        table._read.cache_clear()
    assert results[0]["forward"]["implementations"]["cudnn"]["tflops"] == pytest.approx(1e9 / 1.25 / 1e12, abs=0.1)


def test_only_attention_learns():
    with pytest.raises(UserError, match="--learn is of `tilewright bench attention` alone"):
        command("rope", seed=0, cases=200, ops="", budget=0.0, resume=False, again="", learn=True)
