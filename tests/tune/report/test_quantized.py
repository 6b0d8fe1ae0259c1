"""The page of a quantized folder."""

import json
import re

from tilewright.quantize.quality import Quality
from tilewright.quantize.report import Layer, Report
from tilewright.tune.report.quantized import errors, kinds, page

QUALITY = Quality(2048, 12.0, 12.06, 0.002, 0.03, 0.985)


def report(name="model.layers.{}.mlp.up_proj", outputs=True):
    layers = [
        Layer(name.format(at), 64, 32, 4096, 2048, 0.1 + at / 100, 0.02 * (at + 1) if outputs else None,
              "its error of 4.0% is above most_error=0.03" if at == 1 else "")
        for at in range(3)
    ]  # fmt: skip
    head = Layer("lm_head", 96, 32, 6144, 3072, 0.01, 0.005 if outputs else None)
    return Report("int4", 20000, 9000, [*layers, head], ["lm_head has its own weight now."])


def test_a_line_a_matmul_along_the_depth_and_crosses_where_it_was_left_out():
    found = kinds(report())
    assert [(kind.name, [at for at, _ in kind.layers]) for kind in found] == [
        ("mlp.up_proj", [0, 1, 2]),
        ("lm_head", [3]),
    ]
    assert found[0].worst()[0] == 2
    drawn = errors(report(), "output_error")
    assert drawn.data[0]["x"] == [0, 1, 2] and drawn.data[0]["y"] == [2.0, 4.0, 6.0]
    assert drawn.data[0]["marker"]["symbol"] == ["circle", "x", "circle"] and drawn.legend[-1][2] == "left out"
    assert drawn.data[1]["x"] == [3]


def test_the_page_says_everything_and_escapes_what_it_did_not_make():
    found = page("my-llama", "int4, rounded", report("model.layers.{}.<script>alert(1)</script>"), QUALITY, "a.txt")
    assert "Perplexity +0.50%" in found and "2,048 tokens of a.txt" in found and "3 quantized, 1 left out" in found
    assert "<script>alert" not in found and "most_error=0.03" in found and "its own weight now" in found
    figures = json.loads(re.search('type="application/json" id="figures">(.*?)</script>', found, re.S)[1])
    assert set(figures) == {"errors-output", "errors-weight"}


def test_without_text_the_page_says_so():
    found = page("my-llama", "int8", report(outputs=False), None, "")
    assert "There was no text to measure it on" in found and "errors-weight" in found and "Perplexity" not in found
