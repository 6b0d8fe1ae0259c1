import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.measure.line_plot import Line, Panel, Plot, Point, draw, ticks

LONG = tuple("a long label of a peer, " + letter for letter in "abcdefgh")
SVG = "{http://www.w3.org/2000/svg}"


def self_attention(labels=("eager", "torch.compile", "Tilewright")):
    """Time by width for three sequences, as a benchmark would have it."""
    panels = []
    for sequence in (10, 20, 30):
        lines = [
            Line(label, [Point(w, (n + 1) * sequence * w, (n + 0.9) * sequence * w, (n + 1.2) * sequence * w)
                         for w in (64, 128, 256, 512, 1024, 2048)])
            for n, label in enumerate(labels)
        ]  # fmt: skip
        panels.append(Panel(f"sequence {sequence}", lines))
    return Plot("self_attention", "width", "\u00b5s", panels, "bf16, <batch> & more")


def boxes(svg):
    """Where each text is, on the safe side: left, top, right, bottom."""
    found = []
    for text in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        size = {"title": 16, "note": 11}.get(text.get("class"), 12)
        width, x, y = 0.56 * size * len(text.text), float(text.get("x")), float(text.get("y"))
        left = x - {None: 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor")] * width
        found.append((left, y - 0.8 * size, left + width, y + 0.2 * size, text.text))
    return found


@pytest.mark.parametrize(
    "labels",
    [("ours",), ("eager", "torch.compile", "Tilewright"), LONG],
)
def test_no_text_overlaps_another_or_leaves_the_picture(labels):
    svg = draw(self_attention(labels))
    texts = boxes(svg)
    height = float(ElementTree.fromstring(svg).get("height"))
    assert {*labels, "self_attention", "width", "sequence 30", "\u00b5s"} <= {text for *_, text in texts}
    for i, (left, top, right, bottom, text) in enumerate(texts):
        assert left >= 0 and top >= 0 and right <= 800 and bottom <= height, text
        for other in texts[:i]:
            apart = right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            assert apart, (text, other[4])


def test_every_point_and_spread_is_inside_its_panel_and_in_proportion():
    svg = draw(self_attention(("ours",)))
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in ElementTree.fromstring(svg).iter(f"{SVG}circle")]
    panel = circles[1:7]  # behind the legend's
    steps = [b[0] - a[0] for a, b in pairwise(panel)]
    rises = [a[1] - b[1] for a, b in pairwise(panel)]
    assert max(steps) - min(steps) < 0.2 and max(rises) - min(rises) < 0.2  # doubling is a distance on log axes
    assert all(64 <= x <= 772 for x, _ in circles) and svg.count('class="spread c0"') == 18
    assert min(y for _, y in circles[1:]) > 80 and max(y for _, y in circles[1:]) < 370


def test_it_has_two_sets_of_colours_escapes_and_is_the_same_bytes_again():
    svg = draw(self_attention())
    assert "prefers-color-scheme:dark" in svg and "&lt;batch&gt; &amp; more" in svg
    assert svg == draw(self_attention())
    for number in range(3):
        light, dark = re.findall(rf"\.c{number}{{stroke:(#\w+)", svg)
        assert light != dark


@given(st.floats(1e-9, 1e9), st.floats(1.01, 1e9), st.booleans())
def test_ticks_are_few_ordered_and_inside(low, ratio, is_log):
    found = ticks(low, low * ratio, is_log)
    assert found == sorted(set(found)) and 1 <= len(found) <= 9
    assert all(low * 0.999 <= value <= low * ratio * 1.001 for value in found)


@pytest.mark.parametrize(
    ("points", "log", "said"),
    [
        ([], True, "needs points"), ([Point(1, float("nan"))], True, "finite"),
        ([Point(1, 1, 0.0, 2)], True, "no room for 0"), ([Point(0, 1)], True, "no room for 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(points, log, said):
    with pytest.raises(ValueError, match=said):
        draw(Plot("t", "x", "y", [Panel("p", [Line("a", points)])], log_x=log, log_y=log))


def test_more_labels_than_colours_are_refused_and_a_single_point_is_drawn():
    with pytest.raises(ValueError, match="9 labels, and colours for 8"):
        draw(self_attention(tuple("abcdefghi")))
    for log in (True, False):
        assert "<circle" in draw(Plot("t", "x", "y", [Panel("p", [Line("a", [Point(3, 5)])])], log_x=log, log_y=log))
