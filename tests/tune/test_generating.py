"""Studies of generating on a tiny model: predictions from bytes, quality as a floor, one whole study, its report."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from tilewright.errors import UserError
from tilewright.models import GPT
from tilewright.plan.gpt import LLAMA, GPTConfig
from tilewright.runtime import dispatch
from tilewright.train.export import byte_tokenizer, export_huggingface, generator_of
from tilewright.tune.generating import tune_generating
from tilewright.tune.proof.generating import Floor
from tilewright.tune.report.code import generate_command
from tilewright.tune.report.page import page
from tilewright.tune.report.reread import reread
from tilewright.tune.search.generating import (
    Generating,
    GeneratingSpace,
    open_generating,
    parse_fields,
    predict_generating,
)
from tilewright.tune.search.search import Search
from tilewright.tune.store.record import Measurement, Prediction, Record
from tilewright.tune.worker import trial

pytest.importorskip("tokenizers", reason="text needs it")
MACHINE = {
    "device": "cuda", "flops": {"bf16": 8e14, "fp32": 5e13}, "copy_bytes_per_second": 4e12, "launch_seconds": 4e-6,
    "kernel_seconds": 1e-6, "memory_bytes": 1.4e11, "host": {"cores": 8},
    "model": {
        "matmuls": 1.2e9, "element": 2, "other_bytes": 1e6, "layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 64,
        "quantized_bytes": 0, "parameters": 12 * 10**8,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(width=64, layers=2, heads=2, ffn=128, vocabulary=256, sequence=160, **LLAMA))
    folder = tmp_path_factory.mktemp("model") / "hf"
    export_huggingface(gpt, folder, json.dumps(byte_tokenizer()).encode())
    return folder


def space(**changes):
    start = Generating("m", device="cuda", **changes)
    levers = {
        "weights": ("saved", "int8", "int4"), "kv_cache": ("saved", "int8"), "graph": (False, True),
        "speculate": (0, 4), "batch": (1, 32),
    }  # fmt: skip
    return GeneratingSpace(start, levers, "cuda")


def test_fewer_bytes_are_predicted_to_be_faster_and_have_a_lower_floor():
    plain = Generating("m", device="cuda", graph=True)
    seconds = []
    for weights in ("saved", "int8", "int4"):
        found = predict_generating(dataclasses.replace(plain, weights=weights), MACHINE)
        assert found.floor < found.seconds == pytest.approx(sum(found.parts.values()))
        seconds.append(found.seconds)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 2.5 * seconds[2]
    # 1.2 billion weights of 2 bytes at 1.1 times the copy: 0.55 ms a token, 64 of them.
    assert predict_generating(plain, MACHINE).floor == pytest.approx(64 * 2.4e9 / 4.4e12, rel=0.01)
    eager = predict_generating(dataclasses.replace(plain, graph=False), MACHINE)
    assert eager.parts["idle"] > 0
    tiled = predict_generating(dataclasses.replace(plain, decode="tilesync"), MACHINE)
    launched = predict_generating(plain, MACHINE)
    assert tiled.floor == launched.floor and 0 < tiled.parts["idle"] != launched.parts["idle"]
    chained = predict_generating(dataclasses.replace(plain, pdl=True), MACHINE)
    assert chained.floor == launched.floor and 0 < chained.parts["idle"] < launched.parts["idle"]
    assert predict_generating(dataclasses.replace(plain, graph=False, pdl=True), MACHINE) == eager
    long = [dataclasses.replace(plain, batch=32, prompt=8000, kv_cache=kind) for kind in ("saved", "int8")]
    assert predict_generating(long[0], MACHINE).seconds > 1.5 * predict_generating(long[1], MACHINE).seconds
    prompt = predict_generating(Generating("m", aim="prefill", prompt=2048, device="cuda"), MACHINE)
    assert prompt.floor == pytest.approx(2 * 1.2e9 * 2048 / 8e14, rel=0.2)


def test_what_cannot_win_by_its_bytes_is_not_tried():
    searched = space(prompt=16)
    search = Search(searched, lambda point: predict_generating(searched.at(point), MACHINE))
    guess = search.descend(searched.baseline)
    assert guess["weights"] == "int4" and guess["graph"] and guess["batch"] == 1
    quick = 0.3 * predict_generating(searched.at({**guess, "weights": "saved", "speculate": 0}), MACHINE).floor
    measured = Measurement(64, [quick] * 5, 1.0, 0.0, [], 10)
    records = [Record(searched.baseline, "reference", "done", measurement=measured)]
    records.append(Record(guess, "search", "done", measurement=measured, prediction=Prediction(1, 1e-9, {}, 1, {})))
    search._trusted = lambda records: 1.0
    tried = []
    while (point := search.next(records, tried)) is not None:
        tried.append(point)
    assert all(point["weights"] == "int4" or point["speculate"] for point in tried)
    assert "cannot win" in search.discarded.values()


def test_words_of_a_run_and_of_its_quality():
    assert parse_fields(["batch=8", "graph=true", "weights=int8"]) == {"batch": 8, "graph": True, "weights": "int8"}
    for text, sentence in (("bacth=8", "no field"), ("batch=x", "give a int"), ("batch=0", "at least 1"),
                           ("weights=int3", "choose saved, int8"), ("graph=maybe", "give a bool")):  # fmt: skip
        with pytest.raises(UserError, match=sentence):
            parse_fields([text])
    assert space().refusal({"speculate": 4, "batch": 32}).startswith("speculate works on one prompt")
    assert all(space().refusal({"decode": "tilesync", "weights": each}) is None for each in ("saved", "int8", "int4"))
    for other in ({"kv_cache": "fp8"}, {"compile": "default"}, {"batch": 8}, {"speculate": 2},
                  {"pdl": True}):  # fmt: skip
        (name,) = other
        assert f"decode=tilesync goes with {name}=" in space().refusal({"decode": "tilesync", **other})
    opened = [open_generating(Generating("m", device="cuda"), [], {"decode": found}) for found in ([], ["tilesync"])]
    assert [each.levers.get("decode") for each in opened] == [None, ("graph", "tilesync")]
    on_cpu = open_generating(Generating("m"), [], {"decode": ["tilesync"], "pdl": [True]}).levers
    assert "decode" not in on_cpu and "pdl" not in on_cpu
    opened = [open_generating(Generating("m", device="cuda"), [], {"pdl": found}) for found in ([], [True])]
    assert [each.levers.get("pdl") for each in opened] == [None, (False, True)]
    for graph, words in ((True, "--graph --pdl"), (False, "--no-graph")):
        run = Generating("m", device="cuda", graph=graph, pdl=True)
        assert generate_command(run, Path("no")).endswith(f"cuda {words}")
    with pytest.raises(UserError, match="weights cannot be fp8"):
        space().parse("weights=fp8")
    quality = {"perplexity": 10.0, "quantized_perplexity": 10.3, "divergence": 0.02, "agreement": 0.9}
    assert "rises by 3.00%" in Floor.parse("1%").refuse(quality) and not Floor.parse("4%").refuse(quality)
    assert "nats" in Floor.parse("perplexity=5%,divergence=0.01").refuse(quality)
    assert "first choice" in Floor.parse("perplexity=5%,agreement=95%").refuse(quality)
    with pytest.raises(UserError, match="such as 1%"):
        Floor.parse("good")
    for text in ("1", "agreement=95"):  # which would let anything pass, or nothing
        with pytest.raises(UserError, match="write percent, such as"):
            Floor.parse(text)


def test_jobs_measure_and_prove(folder, monkeypatch, tmp_path):
    """As a child does them, in this process."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    start = Generating(str(folder), prompt=12, tokens=6)
    meter = {"warm": 1, "fewest": 3, "most": 4, "least": 0.0, "seconds": 1.0, "spread": 0.5, "stop_above": 0.0}
    meter |= {"best": 0.0, "widest": 0.02, "memory_cap": 0}

    def attempt(kind, run, **more):
        job = {"kind": f"{kind} generating", "configuration": dataclasses.asdict(run), **more}
        events = []
        found = trial.attempt(json.dumps(job), events.append)
        assert found["outcome"] == "done", found
        return found["value"]

    for run in (start, dataclasses.replace(start, weights="int8", kv_cache="fp8", speculate=2),
                dataclasses.replace(start, aim="prefill", batch=3, unit="throughput")):  # fmt: skip
        measured = Measurement(**attempt("measure", run, **meter))
        rows = 3 if run.aim == "prefill" else 1
        assert measured.tokens_per_step == rows * (12 if run.aim == "prefill" else 6) and not measured.losses
    floor, verdicts = dataclasses.asdict(Floor()), []
    for changes, least in (({"speculate": 2}, floor), ({"decode": "tilesync"}, floor), ({"batch": 3}, floor),
                           ({"weights": "int8", "kv_cache": "int8"}, floor),
                           ({"weights": "int4"}, {**floor, "divergence": 0.0})):  # fmt: skip
        best = dataclasses.replace(start, **changes)
        more = {"start": dataclasses.asdict(start), "floor": least, "save": str(tmp_path)}
        found = attempt("prove", best, **more)
        verdicts.append(found["verdict"])
        assert ("--quality allows" in found["why"]) == (found["verdict"] == "wrong")
    assert verdicts == ["same within rounding"] * 3 + ["different by design", "wrong"]
    assert [path.name for path in tmp_path.iterdir()] == ["model-int8"]
    kept, narrowed = (
        generator_of(path, device="cpu", weights=weights).generate("def", max_tokens=8)[0].tokens
        for path, weights in ((tmp_path / "model-int8", ""), (folder, "int8"))
    )
    assert kept == narrowed, "the folder is what was measured and proved"
    run = dataclasses.replace(start, weights="int8", kv_cache="int8")
    ready = generate_command(run, tmp_path)
    assert ready == f'tilewright generate {tmp_path}/model-int8 "Once upon a time" --device cpu --kv-cache int8'


def test_a_whole_study_ends_with_a_command_a_file_and_a_page(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", "off")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    answer = tune_generating(
        folder, "prompt=8", "tokens=4", "kv_cache=saved", quality="perplexity=50%", budget=12.0, study="s", out=tmp_path
    )  # fmt: skip
    assert answer.best is not None and answer.recommended and answer.generates
    assert answer.ready.startswith(f"tilewright generate {folder}") or "model-int" in answer.ready
    assert set(answer.levers) == {"weights", "speculate"} and answer.ceilings["quality"]["weights"]["int8"]
    assert "generates" in answer.sentences[1]
    saved = json.loads((tmp_path / "s" / "answer.json").read_text())
    assert saved["ready"] == answer.ready and saved["command"] == "tune"
    again = reread(tmp_path / "s", "s")
    assert again.as_dict() == answer.as_dict()
    html = page(again)
    assert "Quality" in html and "standard float32" not in html and answer.ready.split(" --")[1] in html
    for arguments, sentence in (({"aim": "train"}, "choose decode or"), ({"unit": "speed"}, "choose latency or")):
        with pytest.raises(UserError, match=sentence):
            tune_generating(folder, out=tmp_path, **arguments)
    with pytest.raises(UserError, match="is not a folder"):
        tune_generating(tmp_path / "nothing", out=tmp_path)
