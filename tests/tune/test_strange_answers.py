"""An answer.json that somebody else wrote: whatever it holds, a report of it is a page without their code, or a
sentence and exit code 2."""

import copy
import io
import json
import math
import os
import random
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewright.cli import tune as tune_cli
from tilewright.cli.main import app
from tilewright.errors import UserError
from tilewright.measure.markup import Verbatim, render, tag
from tilewright.tune.report import html as report_html
from tilewright.tune.report import page as report
from tilewright.tune.report.answer import Answer
from tilewright.tune.report.reread import read_answer
from tilewright.tune.store.record import Record
from tune.example_answer import CANARY, HOSTILE, example

RECORDED = sorted((Path(__file__).parents[2] / "results/h200").glob("tune_*.json"))
REFRESH = '<meta http-equiv="refresh" content="0;url=//example.invalid">'
STRANGE = (
    None, True, "", "x", HOSTILE, REFRESH, "\x1b]0;title\x07", -1, 0, 1, 10**400, -(10**400), 2**63, 1e308, -1e308,
    1e-320, 1e-150, math.nan, math.inf, -math.inf, [], {}, [[]], [None], {"a": 1}, {"a": {"b": []}}, [1e308, 1e308],
)  # fmt: skip


class Tags(HTMLParser):
    """The elements of a page that can do something."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, name, attributes):
        given = dict(attributes)
        if name in ("script", "meta", "img", "iframe", "base", "form", "link") or "onerror" in given:
            self.found.append((name, given))
        assert name != "a" or given["href"].startswith("#")


def body(answer):
    """The page without plotly's four megabytes."""
    figures = {}
    header, sections = report.content(answer, figures)
    content = [(each.title, each.note, each.content) for each in sections]
    json.dumps(report_html.plain(figures), allow_nan=False)
    return render(tag("main", header, content))


def printed(answer, monkeypatch):
    """What a terminal shows."""
    text = io.StringIO()
    monkeypatch.setattr(sys, "stdout", text)
    tune_cli.show(answer, Path("study"))
    return text.getvalue()


def places(tree, path=()):
    """Every place in a tree of JSON."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, child in children:
        yield (*path, name)
        yield from places(child, (*path, name))


def at(tree, path):
    for name in path:
        tree = tree[name]
    return tree


def mutated(tree, every, chance):
    """A tree with one to three places changed, and what was done to them."""
    tree, done = copy.deepcopy(tree), []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        path = chance.choice(every)
        try:
            parent = at(tree, path[:-1])
            how = chance.choice(("strange", "strange", "strange", "remove", "other", "extra"))
            if how == "remove":
                del parent[path[-1]]
            elif how == "extra" and isinstance(parent, dict):
                parent[chance.choice(("unknown.lever", HOSTILE, "", "records"))] = chance.choice(STRANGE)
            elif how == "other":
                parent[path[-1]] = copy.deepcopy(at(tree, chance.choice(every)))
            else:
                parent[path[-1]] = copy.deepcopy(chance.choice(STRANGE))
            done.append((how, path))
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    return tree, done


def small(tree):
    """Without what is there many times over, so that changes meet everything, and quickly."""
    tree = copy.deepcopy(tree)
    tree["records"] = [tree["reference"], tree["best"], tree["records"][2]]
    for record in tree["records"]:
        record["log"], record["differences"] = record["log"][:99], record["differences"][:1]
        found = record["measurement"] or {}
        profile = found.get("profile") or {}
        for name in ("kernels", "timeline", "categories", "phases", "longest_gaps"):
            if name in profile:
                profile[name] = profile[name][:2]
        if found:
            found["step_seconds"], found["losses"] = found["step_seconds"][:4], found["losses"][:3]
    tree["proof"]["layers"], tree["work"] = tree["proof"]["layers"][:2], tree["work"][:4]
    return tree


def on_ranks(tree):
    """The same of a study whose runs were shared by two ranks."""
    tree["levers"]["parallel"], tree["start"]["parallel"] = ["dp2", "tp2+sp"], {"dp": 2, "tp": 1}
    for record in (*tree["records"], tree["reference"], tree["best"]):
        record["point"] = {**record["point"], "parallel": "tp2+sp"}
    return {**tree, "ranks": 2}


@pytest.mark.parametrize("source", ["example", "recorded"])
def test_a_mutated_answer_is_a_page_or_a_sentence(source, monkeypatch):
    tree = small(on_ranks(example().as_dict()) if source == "example" else json.loads(RECORDED[0].read_text()))
    seed, every = os.environ["TILEWRIGHT_SEED"], list(places(tree))  # which conftest.py draws, and prints
    chance = random.Random(seed)
    read, refused, end = 0, 0, time.process_time() + 5
    while time.process_time() < end:
        changed, done = mutated(tree, every, chance)
        try:
            answer = Answer.from_dict(json.loads(json.dumps(changed)))
        except UserError as error:
            refused += 1
            assert "\n" not in str(error), done
            continue
        read += 1
        try:
            assert Tags(body(answer)).found == [], done
            assert "\x1b" not in printed(answer, monkeypatch)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {done}") from error
    assert read > 10 and refused > 10


def test_what_every_text_of_an_answer_says_stays_text():
    """A canary in every string, keys of dictionaries too, wherever a page or a terminal may show it."""

    def hostile(value, name=""):
        if isinstance(value, dict):
            free = name in ("discarded", "phases", "losses", "memory", "parts") and "name" not in value
            return {(f"{key} {REFRESH}" if free else key): hostile(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [hostile(each, name) for each in value]
        kept = ("outcome", "purpose", "verdict", "dtype", "unit")
        return f"{value}{HOSTILE}{REFRESH}" if isinstance(value, str) and name not in kept else value

    tree = hostile(example().as_dict()) | {"no_float32": f"because {HOSTILE}{REFRESH}", "float32_losses": []}
    answer = Answer.from_dict(json.loads(json.dumps(tree)))
    assert Tags(body(answer)).found == []
    assert body(answer).count("&lt;meta http-equiv") > 100
    figures = {}
    report.content(answer, figures)
    assert "<meta" not in json.dumps(report_html.plain(figures)) and "<script" not in json.dumps(
        report_html.plain(figures)
    )


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_studies_are_read_as_they_were_written(path):
    tree = json.loads(path.read_text())
    found = read_answer(path).as_dict()
    for name in ("sentences", "levers", "start", "ceilings", "machine", "work", "ablations"):
        assert found[name] == tree[name], name
    assert [each["measurement"] for each in found["records"]] == [each["measurement"] for each in tree["records"]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tree: tree["records"][0]["measurement"].update(bytes=10**400), "measurement.bytes is a number of"),
        (lambda tree: tree["records"][0]["point"].update({"warp": 9}), "sets 'warp', which is no lever of the study"),
        (lambda tree: tree.update(ceilings="none"), "ceilings is 'none'; it must be an object"),
        (lambda tree: tree.pop("records"), "records is missing"),
        (lambda tree: tree["levers"].update(compile=[]), "levers.compile has no value"),
        (lambda tree: tree["start"].update(model=7), "start.model is no section"),
        (lambda tree: tree["best"].update(measurement=None), "best is 'done' and has no time of a step"),
        (lambda tree: tree["proof"].update(losses=[1]), "proof.losses is a list"),
        (lambda tree: tree["machine"].update(gpu=[]), "machine.gpu is a list"),
    ],
)
def test_a_damaged_answer_is_a_sentence_that_names_the_field(change, sentence, tmp_path):
    tree = example(hostile=False).as_dict()
    change(tree)
    (tmp_path / "answer.json").write_text(json.dumps(tree))
    failed = CliRunner().invoke(app, ["report", str(tmp_path)]).exception
    assert isinstance(failed, UserError) and sentence in str(failed) and "\n" not in str(failed)
    assert [path.name for path in tmp_path.iterdir()] == ["answer.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 10**5, "1" * 10**4, '{"a": 1e400}', "null", "7", '"x"', "[]", "\x00", '{"records": 3}']
)
def test_what_is_no_answer_is_a_sentence(text, tmp_path):
    (tmp_path / "answer.json").write_text(text)
    with pytest.raises(UserError, match=r"is no answer of a study: .*; give another\.$"):
        read_answer(tmp_path / "answer.json")


def test_an_answer_beyond_all_measure_is_not_loaded(tmp_path):
    with open(tmp_path / "answer.json", "wb") as file:
        file.truncate(10**9)  # a hole, which takes no room on the disk
    with pytest.raises(UserError, match="larger than 64 MB"):
        read_answer(tmp_path / "answer.json")


def test_a_record_survives_json_and_a_strange_one_does_not():
    record = example(hostile=False).records[1]
    tree = json.loads(json.dumps(record.as_dict()))
    assert Record.from_dict(tree) == record
    for name, value in (("drift", 0), ("drift", 10**400), ("point", {"a": [1]}), ("log", 7), ("phases", {"a": "b"})):
        with pytest.raises(UserError, match=f"^records\\[3\\].{name}"):
            Record.from_dict({**tree, name: value}, "records[3]")


# The elements of a page


def test_an_element_escapes_its_text_and_its_attributes():
    nasty = "\"'<>&</style><!--\x00\u202e"
    made = render(tag("p", nasty, [tag("b", nasty), 7, None], title=nasty, class_=nasty))
    assert made.count("<") == 4 and made.count(">") == 4 and "\"'" not in made
    (name, attributes), text = Only(made).result()
    assert (name, set(attributes)) == ("p", {"title", "class"})
    assert text == "\"'<>&</style><!--" * 2 + "7" and attributes["title"] == "\"'<>&</style><!--"


class Only(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def result(self):
        return self.tags[0], self.text


def test_only_code_of_our_own_is_written_verbatim():
    with pytest.raises(ValueError, match="tag that ends it"):
        Verbatim(f"</ScRipt><script>{CANARY}")
    with pytest.raises(ValueError, match="stands in a script"):
        render(tag("p", Verbatim("x")))
    with pytest.raises(ValueError, match="must be verbatim"):
        render(tag("script", CANARY))
    for name in ("p onclick", "", "P", "onclick"):
        with pytest.raises(ValueError, match="no name"):
            tag(name)
    with pytest.raises(ValueError, match="no name"):
        tag("p", **{"on_error": CANARY})
