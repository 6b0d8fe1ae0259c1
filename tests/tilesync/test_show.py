"""`tilewright tilesync show`, and the picture of a schedule."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tilesync.graphs import chain
from tilewright.cli.main import app
from tilewright.errors import UserError
from tilewright.tilesync import check, device
from tilewright.tilesync.show import figure, timeline_of
from tilewright.tilesync.simulate import Machine, simulate, simulate_serial


def run(*arguments):
    return CliRunner().invoke(app, ["tilesync", "show", *arguments], catch_exceptions=False)


def test_a_chain_is_shown_as_a_table_json_and_a_page(tmp_path):
    done = run("conv-7", "--rows", "2", "--html", str(tmp_path / "page.html"), "--json")
    data = json.loads(done.stdout)
    assert data["synchronised_seconds"] < data["serial_seconds"] and data["tiles"] == 32 and data["semaphores"] == 2
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Conv2DSync" in page and "plotly" in page and "SM, tilesync" in page
    said = run("conv-7").stdout
    assert "nothing can deadlock" in said and "Conv2DSync" in said and max(map(len, said.splitlines()[1:12])) <= 80


def test_a_wrong_chain_is_a_sentence():
    with pytest.raises(UserError, match="no chain 'conv-8'; take one of llama-mlp"):
        run("conv-8")
    for name in ("llama-mlp", "conv-56"):
        with pytest.raises(UserError, match=r"has [\d,]+ tiles, which would take minutes to check; take fewer rows"):
            run(name, "--rows", "99999999")


def test_every_tile_is_drawn_where_it_ran():
    program = check(chain(3, 3, 3))
    timelines = {"serial": simulate_serial(program, Machine(sms=4)), "tilesync": simulate(program, Machine(sms=4))}
    drawn = figure(program, timelines)
    assert len(drawn["data"]) == 2 * 2 * 2
    bars = [trace for trace in drawn["data"] if "waits" not in trace["name"]]
    assert sum(len(trace["y"]) for trace in bars) == 2 * len(program.tasks)
    ends = [base + width for trace in bars[2:] for base, width in zip(trace["base"], trace["x"], strict=True)]
    assert max(ends) == pytest.approx(1e6 * timelines["tilesync"].seconds)


def test_the_clock_of_the_kernel_is_a_timeline():
    times = np.array([(3, 0, 1000, 1500, 4000), (5, 0, 2000, 2000, 9000)], device.TIME)
    timeline = timeline_of(times, 132)
    assert timeline.seconds == pytest.approx(8e-6) and [event.worker for event in timeline.events] == [3, 5]
