import contextlib
import dataclasses
import itertools
import json
import math
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some

from tilewright.measure.markup import clean
from tilewright.train.load_config import from_dict
from tilewright.tune.report import anatomy, plots
from tilewright.tune.report.answer import NOT_TRIED, Ablation, Answer
from tilewright.tune.report.head import facts
from tilewright.tune.report.page import page, write_report
from tilewright.tune.report.plots import changes
from tilewright.tune.report.reread import read_answer
from tilewright.tune.store.proof import Layer, Proof
from tilewright.tune.store.record import OUTCOMES
from tune.example_answer import CANARY, example

PLOTS = {
    "waterfall", "tradeoff", "roofline", "memory", "time", "timeline", "forecast", "outputs", "gradients", "losses",
    "drift",
}  # fmt: skip
EMPTY = Answer("nothing", {}, {}, {}, {}, [], None, None)


class Parsed(HTMLParser):
    """The tags of a page, its text outside of scripts, and what its scripts hold."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.scripts, self._in = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._in.append(tag)

    def handle_endtag(self, tag):
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data):
        (self.scripts if self._in[-1:] == ["script"] else self.text).append(data)


def replaced(answer, **changes):
    """The answer with another best run, wherever that stands."""
    best = dataclasses.replace(answer.best, **changes)
    records = [best if record == answer.best else record for record in answer.records]
    return dataclasses.replace(answer, best=best, records=records)


def test_the_example_has_every_outcome_and_its_best_is_the_fastest():
    for device in ("cuda", "cpu"):
        answer = example(device)
        assert {record.outcome for record in answer.records} == set(OUTCOMES)
        done = [record for record in answer.records if record.outcome == "done"]
        assert answer.best == max(done, key=lambda record: record.tokens_per_second)


# Numbers


numbers = some.integers(0, 12).map(float)


@given(some.lists(some.tuples(numbers, numbers), max_size=20))
def test_the_front_has_what_nothing_beats_and_beats_all_else(points):
    def beats(a, b):
        return a[0] <= b[0] and a[1] >= b[1] and a != b

    front = [points[i] for i in plots.pareto(points)]
    assert not any(beats(other, point) for point in front for other in points)
    assert all(point in front or any(beats(other, point) for other in front) for point in points)
    assert front == sorted(set(front))


@given(some.lists(some.none() | some.floats(1.0, 1e7), max_size=6))
def test_the_waterfall_adds_up_from_the_run_as_given_to_the_best(speeds):
    answer = example()
    given_, best = answer.reference.tokens_per_second, answer.best.tokens_per_second
    levers = [Ablation(f"lever{i}", True, False, speed, None) for i, speed in enumerate(speeds)]
    bars = plots.waterfall_bars(dataclasses.replace(answer, ablations=levers))
    assert bars[0] == ("baseline", 0.0, given_) and bars[-1] == ("best", 0.0, best)
    assert bars[-2][2] == best
    assert all(after[1] == before[2] for before, after in itertools.pairwise(bars[:-1]))
    gains = {name: to - start for name, start, to in bars[1:-2]}
    for lever in levers:
        if lever.tokens_per_second is not None:
            assert gains[lever.lever] == pytest.approx(best - lever.tokens_per_second, abs=1e-3)
    assert len(gains) == sum(speed is not None for speed in speeds)


def test_a_lever_whose_run_was_not_tried_is_told_from_one_whose_run_failed():
    levers = [Ablation(name, True, False, None, None, why) for name, why in (("a", NOT_TRIED), ("b", "out of memory"))]
    shown = page(dataclasses.replace(example(), ablations=levers))
    assert "Without a it was not tried" in shown and "Without b it did not run: out of memory" in shown


def test_the_bars_drawn_are_the_waterfall():
    answer = example()
    figure = plots.waterfall(answer)
    (trace,) = figure.data
    ends = [base + length for base, length in zip(trace["base"], trace["x"], strict=True)]
    assert ends == pytest.approx([to for _, _, to in plots.waterfall_bars(answer)])
    assert min(trace["x"]) < 0


@given(some.floats(1e-9, 1e9), some.floats(1.01, 1e9))
def test_a_logarithmic_axis_has_a_few_round_numbers_within_it(low, times):
    scale = plots.logarithmic(low, low * times)
    ticks = scale.get("tickvals", [])
    assert len(ticks) != 1 and len(ticks) <= 12
    assert all(low <= tick <= low * times for tick in ticks)
    assert len(ticks) > 1 or times < 10


def test_measured_memory_is_shared_out_without_rest():
    found = example("cuda").best
    parts = anatomy.memory_parts(found)
    assert sum(parts.values()) == pytest.approx(found.measurement.memory["total"])
    found = example("cpu").best
    assert sum(anatomy.memory_parts(found).values()) == pytest.approx(found.measurement.bytes)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_predicted_memory_has_the_parts_that_were_measured(device):
    answer = example(device)
    bars = anatomy.memory(answer)
    assert bars.names == ["predicted", "measured"]
    assert all(value is not None for _, _, values in bars.parts for value in values)
    predicted = sum(values[0] for _, _, values in bars.parts)
    assert predicted == pytest.approx(sum(answer.best.prediction.memory.values()))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_point_of_the_roofline_is_what_the_work_reaches_of_its_limit(device):
    points = anatomy.roofline_points(example(device))
    assert [point.work["category"] for point in points] == ["matmul", "fused"]  # of the third nothing is known
    assert [point.share for point in points] == pytest.approx([0.6, 0.8])
    assert points[0].limit == example(device).ceilings["flops"]["bf16"]


def with_long_work(answer):
    """Each op a good part of the step, at the rates it had."""
    long = [{**work, **{name: 100 * work[name] for name in ("seconds", "flops", "bytes")}} for work in answer.work[:2]]
    return dataclasses.replace(answer, work=long)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize(("part", "name"), [("flops", "bf16"), ("copy_bytes_per_second", "memory")])
@pytest.mark.parametrize("share", [0.9, 1.1, 1.3])
def test_what_an_op_reached_beyond_the_probe_is_the_ceiling(device, part, name, share):
    """0.6 of the matmul's rate and 0.8 of the copy's are reached; the probe may have found less than that."""
    answer, reached = with_long_work(example(device)), {"flops": 0.6, "copy_bytes_per_second": 0.8}[part]
    before, scale = answer.ceilings[part], reached / share
    lower = {key: rate * scale for key, rate in before.items()} if part == "flops" else before * scale
    found = anatomy.roof(dataclasses.replace(answer, ceilings={**answer.ceilings, part: lower}))
    shares = [at.share for work in answer.work if (at := found.point(work)) is not None]
    assert len(shares) == 2 and max(shares) <= 1 + 1e-9
    assert [f"The ceiling of {name}" in words and "reached here" in words for words in found.raised] == [True] * (
        share > 1
    )
    assert max(shares) == pytest.approx(max(min(share, 1), 1.4 - reached) if share < 1 else 1)


def test_an_op_beyond_the_datasheet_had_less_to_do_and_raises_nothing():
    answer = example("cuda")
    known = anatomy.roof(answer)
    cached = {
        **answer.work[1],
        "seconds": answer.work[1]["seconds"] / 2,
    }  # 1.6 times the copy, 1.42 times the datasheet
    found = anatomy.roof(dataclasses.replace(answer, work=[answer.work[0], cached]))
    assert (found.copy_rate, found.rates, found.raised) == (known.copy_rate, known.rates, [])
    assert found.point(cached) is None


def test_no_recorded_op_reaches_more_than_its_limit():
    recorded = sorted((Path(__file__).parents[3] / "results/h200").glob("tune_*.json"))
    assert len(recorded) >= 5
    for path in recorded:
        answer = read_answer(path)
        found = anatomy.roof(answer)
        shares = {work["op"]: at.share for work in answer.work if (at := found.point(work)) is not None}
        assert max(shares.values()) <= 1 + 1e-9, path
        long = [w for w in answer.work if w["flops"] and w["dtype"] == "bf16" and w["seconds"] > 1e-3]
        assert long and all(found.point(work) is not None for work in long), path  # matmuls keep their share


def test_small_kernels_share_a_row_that_stays_last():
    """Half a percent of the step is the border; a single small one has its own row."""
    answer = example(hostile=False)
    whole = anatomy.step_seconds(answer)
    works = [{**answer.work[0], "op": f"op{i}", "seconds": share * whole} for i, share in
             enumerate((0.5, 0.2, 0.006, 0.0049, 0.001, 0.0001))]  # fmt: skip
    rows = Rows(page(dataclasses.replace(answer, work=works)))
    assert [row[0].partition(" ")[0] for row in rows.body["Op"]] == ["op0", "op1", "op2"]
    (foot,) = rows.foot["Op"]
    assert foot[0] == "3 others, each below 0.5%" and foot[5] == "0.6%"
    rows = Rows(page(dataclasses.replace(answer, work=works[:4])))
    assert [row[0].partition(" ")[0] for row in rows.body["Op"]] == ["op0", "op1", "op2", "op3"] and not rows.foot["Op"]
    profile = answer.best.measurement.profile
    tenth = [{**each, "share": each["share"] / 10} for each in profile["kernels"]]
    answer = of_measurement(dataclasses.replace(answer, work=[]), profile={**profile, "kernels": tenth})
    kernels = Rows(page(answer))
    assert "others, each below" in kernels.foot["Kernel"][0][0]
    shown = sum(float(row[4].rstrip("%")) for row in (*kernels.body["Kernel"], *kernels.foot["Kernel"]))
    assert shown == pytest.approx(100 * sum(each["share"] for each in tenth), abs=0.5)


class Rows(HTMLParser):
    """The rows of a page's tables, by the first heading."""

    def __init__(self, text):
        super().__init__()
        self.body, self.foot, self._table, self._part, self._cell = {}, {}, "", "", None
        self.feed(text.partition('<script type="application/json"')[0])

    def handle_starttag(self, name, attributes):
        if name in ("thead", "tbody", "tfoot"):
            self._part = name
        elif name == "tr" and self._part in ("tbody", "tfoot"):
            (self.body if self._part == "tbody" else self.foot)[self._table].append([])
        elif name in ("td", "th"):
            self._cell = []
        if name == "thead":
            self._table = ""

    def handle_data(self, data):
        if self._cell is not None:
            self._cell.append(data)

    def handle_endtag(self, name):
        if name == "th" and not self._table:
            self._table = "".join(self._cell)
            self.body.setdefault(self._table, [])
            self.foot.setdefault(self._table, [])
        elif name == "td":
            (self.body if self._part == "tbody" else self.foot)[self._table][-1].append("".join(self._cell))
            self._cell = None


def test_the_header_says_what_the_study_is_of():
    answer = example(hostile=False)
    found = facts(answer)
    model = answer.start["model"]
    assert f"{model['layers']} layers" in found["Model"] and f"width {model['width']:,}" in found["Model"]
    assert f"{answer.start['global_batch']} sequences of {model['sequence']:,} tokens" in found["Batch"]
    compiled = [r for r in answer.records if changes(answer, r.point).keys() == {"compile"} and r.outcome == "done"]
    fastest = max(compiled, key=lambda record: record.tokens_per_second)
    times = answer.best.tokens_per_second / fastest.tokens_per_second
    assert found["Beside torch.compile"].startswith(f"{times:.2f} times as fast")
    for value in found.values():
        assert value in "".join(Parsed(page(answer)).text)
    none = dataclasses.replace(answer, records=[r for r in answer.records if r not in compiled])
    assert facts(none)["Beside torch.compile"] == "not measured"
    own = facts(dataclasses.replace(answer, own_model="mine:build"))
    assert own["Model"].startswith("mine:build") and "tokens" not in own["Batch"]


def test_the_contents_lead_to_every_section():
    parsed = Parsed(page(example()))
    links = [attributes["href"] for tag, attributes in parsed.tags if tag == "a"]
    ids = [attributes["id"] for tag, attributes in parsed.tags if tag == "section"]
    assert len(ids) == len(set(ids)) == 13 and links == [f"#{each}" for each in ids]
    every = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(every) == len(set(every))


# The page


def test_nothing_of_a_study_becomes_code_or_is_fetched():
    parsed = Parsed(page(example()))
    assert [tag for tag, _ in parsed.tags if tag in ("img", "iframe", "link", "object", "embed", "form")] == []
    names = {name for tag, attributes in parsed.tags for name in attributes if tag != "a"}
    assert not {name for name in names if name.startswith("on") or name in ("src", "href", "srcset", "action")}
    scripts = [attributes for tag, attributes in parsed.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "figures"}, {}, {}]
    assert "<" not in parsed.scripts[0] and "&lt;/script&gt;" in parsed.scripts[0]  # plotly has tags of its own
    assert not any(CANARY in script for script in parsed.scripts[1:])
    text = "".join(parsed.text)
    assert text.count(f"<script>{CANARY}</script>") > 50  # as text it is there, whole
    assert "\x1b" not in text and "\u202e" not in text and "\x00" not in text
    policy = next(each["content"] for tag, each in parsed.tags if each.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "http" not in policy and "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_answer_that_was_stored_gives_the_same_page(device, tmp_path):
    answer = example(device)
    text = page(answer)
    assert page(Answer.from_dict(json.loads(json.dumps(answer.as_dict())))) == text
    write_report(answer, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == text


def test_the_page_has_what_it_promises_in_order():
    answer = example(hostile=False)
    whole = page(answer)
    titles = [
        "What each lever gives", "Throughput against memory", "Kernels and their limit", "Memory",
        "Where the time went", "Timeline", "Predicted and measured", "Proof", "Drift of the machine", "Trials",
        "Hardware and versions", "Configuration",
    ]  # fmt: skip
    places = [whole.find(part) for part in (*answer.sentences, "NVIDIA H200", *(f"<h2>{each}</h2>" for each in titles))]
    assert -1 not in places and places == sorted(places)
    text = "".join(Parsed(whole).text)
    for work in answer.work:
        assert clean(f"{work['op']} {work['shapes']}", 90) in text and clean(work["kernel"], 90) in text
    without = "".join(Parsed(page(dataclasses.replace(answer, work=[]))).text)
    for kernel in answer.best.measurement.profile["kernels"]:
        assert (clean(kernel["name"], 90) in without) == (kernel["share"] >= 0.005)
    for record in answer.records:
        assert record.log.replace("\x1b[31m", "").replace("\x1b[0m", "").strip()[-2000:] in text


def test_a_speed_that_is_not_known_has_a_question_mark():
    answer = example()
    assert "A speed with a ?" not in page(answer)
    notable = answer.best.point, answer.reference.point
    trial = next(record for record in answer.records if record.measurement and record.point not in notable)
    shaken = dataclasses.replace(trial, doubt=2.0)
    shown = dataclasses.replace(answer, records=[shaken if r is trial else r for r in answer.records])
    assert "A speed with a ?" in page(shown) and "x?</td>" in page(shown)
    assert trial in plots.measured(answer) and shaken not in plots.measured(shown)


def test_who_reads_a_study_that_was_killed_does_not_know_its_time():
    assert "<dt>Time</dt>" in page(example())
    assert "<dt>Time</dt>" not in page(dataclasses.replace(example(), budget=0.0, elapsed=0.0))


def test_the_configuration_shown_is_the_best_run():
    answer = example()
    text = page(answer)
    shown = yaml.safe_load(Parsed(text.partition('id="yaml">')[2].partition("</pre>")[0]).text[0])
    assert shown == anatomy.configuration(answer)
    run = from_dict(shown)
    assert (run.compile, run.model.gpt_block, run.optimizer.name) == ("default", "optimized", "adamw_8bit")


@pytest.mark.parametrize("verdict", ["wrong", "not proven"])
def test_what_failed_its_proof_is_not_recommended(verdict):
    answer = dataclasses.replace(example(hostile=False), proof=Proof(verdict, "layer 3 is off"))
    text = page(answer)
    assert "not recommended" in text and 'class="verdict bad"' in text
    assert "not recommended" not in page(example(hostile=False))


def own_model(answer):
    records = [dataclasses.replace(record, prediction=None) for record in answer.records]
    best, reference = (records[answer.records.index(record)] for record in (answer.best, answer.reference))
    return dataclasses.replace(answer, start={"precision": "bf16"}, best=best, reference=reference, records=records)


def of_measurement(answer, **changes):
    return replaced(answer, measurement=dataclasses.replace(answer.best.measurement, **changes))


MISSING = {
    "no trial": (lambda answer: EMPTY, "No trial has run yet", set()),
    "no best": (
        lambda answer: dataclasses.replace(answer, best=None, ablations=[], proof=None), "no run to recommend",
        {"tradeoff", "forecast", "drift"},
    ),
    "no proof": (
        lambda answer: dataclasses.replace(answer, proof=None), "not proven yet",
        PLOTS - {"outputs", "gradients", "losses"},
    ),
    "an empty proof": (
        lambda answer: dataclasses.replace(answer, proof=Proof("wrong", "nothing ran")), "were not compared",
        PLOTS - {"outputs", "gradients", "losses"},
    ),
    "bit-identical": (
        lambda answer: dataclasses.replace(answer, proof=Proof("bit-identical", "", [Layer("a", 0.0, 0.0, 0.0, 0.0)])),
        "to the last bit", PLOTS - {"outputs", "gradients", "losses"},
    ),
    "no number": (
        lambda answer: dataclasses.replace(answer, proof=Proof(
            "wrong", "", [Layer("a", math.nan, math.inf, 0.1, math.nan)], {"best": [math.nan, math.nan]}
        )), "none of the errors is a number", PLOTS - {"outputs", "losses"},
    ),
    "no profile": (
        lambda answer: of_measurement(answer, profile=None), "There is no profile", PLOTS - {"time", "timeline"}
    ),
    "no observation": (
        lambda answer: dataclasses.replace(answer, work=[]), "No step of a best run was observed", PLOTS - {"roofline"}
    ),
    "no steps": (
        lambda answer: of_measurement(answer, step_seconds=[]), "could not be measured", PLOTS - {"waterfall"}
    ),
    "own model": (own_model, "No trial was both predicted and measured", PLOTS - {"forecast"}),
    "no ceilings": (
        lambda answer: dataclasses.replace(answer, ceilings={}), "ceilings of this machine", PLOTS - {"roofline"}
    ),
    "no reference": (
        lambda answer: dataclasses.replace(answer, reference=None), "could not be measured", PLOTS - {"waterfall"}
    ),
    "baseline": (
        lambda answer: dataclasses.replace(answer, best=answer.reference), "no lever is moved",
        PLOTS - {"waterfall", "time", "timeline"},
    ),
    "no differences": (lambda answer: replaced(answer, differences=[]), "Where the time went", PLOTS),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSING)
def test_what_is_missing_is_a_sentence(case):
    change, sentence, expected = MISSING[case]
    parsed = Parsed(page(change(example(hostile=False))))
    assert sentence in "".join(parsed.text)
    assert set(json.loads(parsed.scripts[0])) == expected
    assert {each["id"] for _, each in parsed.tags if each.get("class") == "plot"} == expected


# A real browser


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("There is no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()


@contextlib.contextmanager
def opened(browser, answer, folder, width):
    """The report in a window of this width; nothing may have gone wrong or out by the end."""
    write_report(answer, folder / "report.html")
    wrong = []
    tab = browser.new_page(viewport={"width": width, "height": 800})

    def ask(route):
        if route.request.url.startswith(("file:", "data:", "blob:")):
            return route.continue_()
        wrong.append(route.request.url)
        return route.abort()

    tab.route("**/*", ask)
    tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("requestfailed", lambda request: wrong.append(request.url))
    tab.goto((folder / "report.html").as_uri())
    yield tab
    tab.wait_for_timeout(100)
    assert tab.evaluate("window.canary") is None
    assert wrong == []
    tab.close()


DRAWN = """() => Object.fromEntries([...document.querySelectorAll(".plot")].map(place => [place.id, {
  traces: place.data.length,
  values: Math.min(...place.data.map(trace => trace.x.filter(value => value !== null).length)),
  marks: place.querySelectorAll(".point, .js-line").length,
  width: place.querySelector(".main-svg").getBoundingClientRect().width,
}]))"""
# Pairs of texts that lie on one another, and texts that their plot cuts off.
COLLISIONS = """() => [...document.querySelectorAll(".plot")].flatMap(place => {
  const area = place.getBoundingClientRect();
  const texts = [...place.querySelectorAll("text")].filter(text => text.textContent.trim());
  const boxes = texts.map(text => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width);
  const cut = boxes.filter(([, box]) => box.left < area.left - 1 || box.right > area.right + 1 ||
    box.top < area.top - 1 || box.bottom > area.bottom + 1).map(([text]) => [place.id, "cut", text]);
  return cut.concat(boxes.flatMap(([first, a], i) => boxes.slice(i + 1).filter(([, b]) =>
    a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1
  ).map(([second]) => [place.id, first, second])));
})"""


def fits(tab):
    return tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_it_opens_in_a_browser_with_every_plot_drawn(browser, tmp_path, device, width):
    with opened(browser, example(device), tmp_path, width) as tab:
        drawn = tab.evaluate(DRAWN)
        assert set(drawn) == PLOTS
        for name, found in drawn.items():
            assert found["traces"] and found["values"] and found["marks"], name
            assert found["width"] <= width, name
        assert fits(tab)
        assert tab.evaluate(COLLISIONS) == []
        assert tab.locator(".modebar-btn").count() == 0  # no button to somebody's cloud
        assert all(
            link.startswith("#")
            for link in tab.eval_on_selector_all("a", "all => all.map(a => a.getAttribute('href'))")
        )
        for place in ("tradeoff", "roofline", "forecast"):
            labels = tab.locator(f"#{place} .annotation-text").all_text_contents()
            assert len(labels) >= 2, place
            assert place == "roofline" or any(text.startswith("best") for text in labels)
        tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert fits(tab)
        if width < 600:  # no column out of sight
            hidden = "[...document.querySelectorAll('.wide')].filter(it => it.scrollWidth > it.clientWidth).length"
            assert tab.evaluate(hidden) == 0


@pytest.mark.parametrize("case", ["no trial", "own model"])
def test_what_is_missing_breaks_nothing_in_a_browser(browser, tmp_path, case):
    change, _, expected = MISSING[case]
    with opened(browser, change(example()), tmp_path, 390) as tab:
        assert set(tab.evaluate(DRAWN)) == expected
        assert fits(tab)


def test_a_reader_can_sort_copy_and_point(browser, tmp_path):
    answer = example()
    with opened(browser, answer, tmp_path, 1440) as tab:
        speeds = "[...document.querySelectorAll('.trials tbody tr')].map(row => row.cells[3].dataset.value)"
        before = tab.evaluate(speeds)
        for reverse in (False, True):  # trials without a speed stay last
            tab.click(".trials th:nth-child(4) button")
            after = tab.evaluate(speeds)
            numbers = [float(value) for value in after if value is not None]
            assert sorted(map(str, after)) == sorted(map(str, before))
            assert numbers == sorted(numbers, reverse=reverse) and numbers == [float(v) for v in after[: len(numbers)]]
        tab.click("#copy")
        assert yaml.safe_load(tab.evaluate("getSelection().toString()")) == anatomy.configuration(answer)
        assert tab.text_content("#copy") in ("Copied", "Selected")
        for name in ("memory", "outputs"):
            place = tab.locator(f"#{name}")
            place.scroll_into_view_if_needed()
            box = place.locator(".point").first.bounding_box()
            tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            place.locator(".hoverlayer .hovertext").first.wait_for(timeout=5000)
        assert "</script>" in tab.text_content("#outputs .hoverlayer")  # a layer's name, as text


def test_printed_it_has_no_buttons_and_plots_fit_the_paper(browser, tmp_path):
    with opened(browser, example(), tmp_path, 1440) as tab:
        before = {name: found["width"] for name, found in tab.evaluate(DRAWN).items()}
        tab.emulate_media(media="print")
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert not tab.is_visible("#copy") and not tab.is_visible("details") and tab.is_visible("#yaml")
        assert max(found["width"] for found in tab.evaluate(DRAWN).values()) <= 180 / 25.4 * 96
        tab.emulate_media(media="screen")
        tab.evaluate("dispatchEvent(new Event('afterprint'))")
        assert {name: found["width"] for name, found in tab.evaluate(DRAWN).items()} == before
        assert tab.pdf(format="A4").startswith(b"%PDF")


def test_a_speed_that_nobody_should_rely_on_is_not_in_the_title():
    steady = example("cuda", hostile=False)
    assert "times as fast" in page(steady).split("</title>")[0]
    records = [dataclasses.replace(r, drift=1.4) if r.purpose == "reference" and i else r
               for i, r in enumerate(steady.records)]  # fmt: skip
    shaky = page(dataclasses.replace(steady, records=records)).split("</title>")[0]
    assert "times as fast" not in shaky and "speed not certain" in shaky
