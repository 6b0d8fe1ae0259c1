import json

import pytest

from tilewright.errors import UserError
from tilewright.plan.replay import Event, Recording, read
from tilewright.plan.traffic import Links

FSDP = {  # two layers whose weights are gathered ahead
    "gpus": 8, "tokens": 16384,
    "events": [
        {"name": "gather 0", "seconds": 0.2, "stream": "traffic", "bytes": 4e8},
        {"name": "forward 0", "seconds": 1.0, "after": ["gather 0"]},
        {"name": "gather 1", "seconds": 0.2, "stream": "traffic", "bytes": 4e8},
        {"name": "forward 1", "seconds": 1.0, "after": ["gather 1"]},
    ],
}  # fmt: skip


def written(tmp_path, value):
    path = tmp_path / "run.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_recording_takes_on_its_own_gpus_what_it_took(tmp_path):
    small = read(written(tmp_path, FSDP))
    assert small.replay(8, Links()) == pytest.approx(2.2)  # the second gather is hidden
    assert small.tokens == 16384 and small.events[1].after == ("gather 0",)


def test_traffic_is_hidden_until_it_is_longer_than_the_computing(tmp_path):
    small, links = read(written(tmp_path, FSDP)), Links()
    ratio = links.ring(4e8, 1024) / links.ring(4e8, 8)
    assert small.replay(1024, links) == pytest.approx(max(0.2 * ratio + 1.0, 0.4 * ratio) + 1.0)
    slow = Links(network=1e9)
    assert small.replay(1024, slow, recorded_on=links) == pytest.approx(
        0.4 * slow.ring(4e8, 1024) / links.ring(4e8, 8) + 1.0
    )
    assert small.replay(8, slow) == pytest.approx(2.2)  # it stays in the node


def test_what_one_gpu_does_not_send_is_added():
    alone = Recording(1, 2048.0, (Event("reduce", 0.1, "traffic", 1e9), Event("forward", 1.0, after=("reduce",))))
    assert alone.replay(1, Links()) == pytest.approx(1.1)
    assert alone.replay(8, Links()) == pytest.approx(1.1 + Links().ring(1e9, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no json", "no JSON"),
        ([], "has no events"),
        ({**FSDP, "events": []}, "has no events"),
        ({**FSDP, "gpus": 0}, "gpus must be"),
        ({**FSDP, "tokens": "many"}, "tokens must be a number"),
        ({**FSDP, "events": [{"name": "a", "seconds": -1}]}, "seconds of event 0"),
        ({**FSDP, "events": [{"name": "a", "seconds": 1}, {"name": "a", "seconds": 1}]}, "event 1 needs a name"),
        ({**FSDP, "events": [{"name": "a", "seconds": 1, "after": ["b"]}]}, "not before it"),
        ({**FSDP, "events": [{"name": "a", "seconds": 1, "bytes": True}]}, "bytes of event 0"),
        ({**FSDP, "events": [{"name": "a", "seconds": 1, "stream": 3}]}, "stream of event 0"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, change, message):
    with pytest.raises(UserError, match=message) as caught:
        read(written(tmp_path, change))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="Cannot read"):
        read(tmp_path / "none.json")
