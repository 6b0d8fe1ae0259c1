import dataclasses
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tilewright.models import GPT
from tilewright.plan.decoder import from_gpt
from tilewright.plan.flops import DEFAULT, attention_flops, conventions
from tilewright.plan.gpt import GPTConfig, preset
from tilewright.train.metrics import Journal, Metrics, Rates, memory, read

FIGURES = Metrics(
    step=99_999, loss=10.8249, gradient_norm=0.0123, skipped=False, learning_rate=3e-4, samples=1, seconds=1.0,
    tokens_per_second=1_234_567.8, tflops=456.7, mfu=0.461, hfu=0.512, convention="6N", memory_allocated=70 * 2**30,
    memory_reserved=75 * 2**30, memory_device=138 * 2**30, data_wait=0.0123,
)  # fmt: skip


def test_a_line_fits_80_columns_under_its_header_and_has_every_figure():
    header, line = FIGURES.header(), FIGURES.line()
    assert len(header) == len(line) == 80
    assert line.split() == [
        "99999", "10.8249", "0.0123", "3.0e-04", "1,234,568", "457", "46.1%", "51.2%", "75.2/80.5/148", "12.3"
    ]  # fmt: skip
    for title in ("step", "loss", "norm", "tokens/s", "TFLOPS", "MFU", "HFU", "memory GB", "data ms"):
        assert title in header


def test_a_mixture_shows_its_largest_share_in_80_columns():
    found = dataclasses.replace(FIGURES, largest_share=0.354)
    assert len(found.header()) <= 80 and "35.4%" in found.line() and "share" in found.header()


def test_what_is_not_known_is_not_shown_as_a_number():
    on_a_cpu = {"memory_allocated": None, "memory_reserved": None, "memory_device": None, "mfu": None, "hfu": None}
    found = dataclasses.replace(FIGURES, loss=None, gradient_norm=None, skipped=True, **on_a_cpu)
    assert found.line().split() == [
        "99999",
        "n/a",
        "n/a",
        "3.0e-04",
        "1,234,568",
        "457",
        "n/a",
        "n/a",
        "12.3",
        "skipped",
    ]
    assert memory(torch.device("cpu")) == dict.fromkeys(("memory_allocated", "memory_reserved", "memory_device"))


def test_rates_are_those_of_the_convention():
    decoder = from_gpt(preset("125m"))
    convention = conventions(decoder)[DEFAULT]
    found = Rates(decoder, ["none"] * decoder.layers, 1e15, ranks=4).at_speed(4e6)
    assert found["tflops"] == pytest.approx(1e6 * convention.model / 1e12)
    assert found["mfu"] == found["hfu"] == pytest.approx(1e6 * convention.model / 1e15)
    assert found["convention"] == convention.formula


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("how", ["selective", "full"])
def test_what_is_done_again_is_what_a_counter_counts(how, experts):
    """Of the matmuls, that is: the counter knows no attention, and the convention takes vectors for matrices."""
    config = GPTConfig(width=64, layers=2, heads=2, vocabulary=64, sequence=16, experts=experts)
    counts = []
    for recompute in ("none", how):
        model = GPT(dataclasses.replace(config, recompute=recompute))
        tokens = torch.zeros(1, 16, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).backward()
        counts.append(counter.get_total_flops())
    rates = Rates(from_gpt(config), [how] * 2, None, 1)
    attention = attention_flops(from_gpt(config)) if how == "full" else 0
    assert rates.hardware - rates.model - attention == pytest.approx((counts[1] - counts[0]) / 16, rel=0.03)


def test_selective_blocks_do_a_little_more_and_half_of_the_blocks_half_of_it():
    decoder = from_gpt(preset("125m"))
    hardware = {
        how: Rates(decoder, policies, None, 1).hardware
        for how, policies in (
            ("none", ["none"] * 12), ("selective", ["selective"] * 12), ("full", ["full"] * 12),
            ("half", ["full"] * 6 + ["none"] * 6),
        )
    }  # fmt: skip
    assert hardware["none"] < hardware["selective"] < hardware["half"] < hardware["full"]
    assert hardware["half"] == pytest.approx((hardware["none"] + hardware["full"]) / 2)
    assert Rates(decoder, ["none"] * 12, None, 1).at_speed(1.0)["mfu"] is None


def at(step):
    return dataclasses.replace(FIGURES, step=step)


def test_a_journal_goes_on_and_forgets_what_comes_again(tmp_path):
    journal = Journal(tmp_path, 0, tensorboard=False)
    for step in (1, 2, 3):
        journal.write(at(step))
    journal.sync()
    journal.close()
    journal = Journal(tmp_path, 2, tensorboard=False)
    journal.write(at(3))
    assert [record["step"] for record in read(tmp_path / "metrics.jsonl")] == [1, 2, 3]  # before it is closed
    journal.close()
    assert read(tmp_path / "metrics.jsonl")[0] == dataclasses.asdict(at(1))


def test_lines_that_are_no_record_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read(path) == []
    path.write_bytes(b'{"step": 1}\n[2]\n{"step": "3"}\n\xff\xfe\n\n{"step": 4}\n{"step": 5, "lo')
    assert [record["step"] for record in read(path)] == [1, 4]


def test_every_line_is_strict_json(tmp_path):
    journal = Journal(tmp_path, 0, tensorboard=False)
    journal.write(dataclasses.replace(FIGURES, loss=None, mfu=None))
    journal.close()

    def refuse(word):
        raise AssertionError(word)

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
