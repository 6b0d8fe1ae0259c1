import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ranks import run_ranks
from tilewright.errors import UserError
from tilewright.train.checkpoint import Checkpoints, load, newest, read

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(seed=0):
    """One of each kind that a run may have."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 7, generator=generator)
    return {
        "model": {
            "weight": weight, "bf16": weight.bfloat16(), "float8": weight.to(torch.float8_e4m3fn),
            "transposed": weight.t(), "view": weight[1:3, 2:], "empty": torch.zeros(0, 3), "double": weight.double(),
        },
        "optimizer": {0: {"step": torch.tensor(float(seed)), "codes": (weight * 9).to(torch.uint8)}},
    }  # fmt: skip


def blank(tensors):
    if isinstance(tensors, dict):
        return {key: blank(value) for key, value in tensors.items()}
    return torch.zeros(tensors.shape, dtype=tensors.dtype)


def bits(tensors):
    if isinstance(tensors, dict):
        return {key: bits(value) for key, value in tensors.items()}
    return str(tensors.dtype), tuple(tensors.shape), tensors.contiguous().flatten().view(torch.uint8).tolist()


def folders(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_loaded_is_what_was_saved_bit_by_bit(tmp_path, asynchronous):
    checkpoints = Checkpoints(tmp_path, keep=2, asynchronous=asynchronous)
    assert checkpoints.newest() is None and checkpoints.load_newest(state()) is None
    for step in (1, 2, 3):
        saved = state(step)
        checkpoints.save(step, saved, {"step": step, "configuration": {"model": {"width": 5}}})
        saved["model"]["weight"].fill_(-1.0)  # training goes on at once
    checkpoints.wait()
    loaded = blank(state())
    facts = checkpoints.load_newest(loaded)
    assert facts == {"step": 3, "configuration": {"model": {"width": 5}}} and bits(loaded) == bits(state(3))
    assert folders(tmp_path) == ["step-00000002", "step-00000003"]
    checkpoints.close()
    assert checkpoints.warnings == []


def test_a_section_is_read_without_knowing_its_shapes(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=False)
    checkpoints.save(1, state(1), {"step": 1})
    tensors, facts = read(newest(tmp_path), "model")
    assert bits(tensors) == bits(state(1)["model"]) and facts == {"step": 1}
    with pytest.raises(UserError, match="has no section 'mode'"):
        read(newest(tmp_path), "mode")


def test_a_large_state_is_written_by_several_threads(tmp_path):
    large = {"model": {str(index): torch.full((1 << 20,), index, dtype=torch.int64) for index in range(9)}}
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=True)
    checkpoints.save(1, large, {})
    checkpoints.close()
    assert len(list(newest(tmp_path).glob("*.bin"))) == 4
    loaded = blank(large)
    load(newest(tmp_path), loaded)
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in large["model"].items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda model: model.update(weight=torch.zeros(5, 8)), r"model/weight as \(5, 7\).*this run as \(5, 8\)"),
        (lambda model: model.update(weight=torch.zeros(5, 7).half()), "model/weight as .*float32.*float16"),
        (lambda model: model.update(new=torch.zeros(1)), "has no model/new, which this run has"),
        (lambda model: model.pop("bf16"), "has model/bf16, which this run has not"),
    ],
)
def test_another_model_is_refused_in_a_sentence_and_left_as_it_is(tmp_path, change, sentence):
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=False)
    checkpoints.save(1, state(1), {})
    other = blank(state())
    change(other["model"])
    with pytest.raises(UserError, match=sentence) as found:
        checkpoints.load_newest(other)
    assert str(found.value).count(". ") == 0 and "resume with the model" in str(found.value)
    assert all(not tensor.double().any() for tensor in other["model"].values())


def test_a_section_that_is_not_asked_for_is_left_alone_and_what_is_no_tensor_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=False)
    checkpoints.save(1, state(1), {})
    part = {"model": blank(state()["model"])}
    checkpoints.load_newest(part)
    assert bits(part["model"]) == bits(state(1)["model"])
    with pytest.raises(TypeError, match="optimizer/lr is a float; .* facts"):
        checkpoints.save(2, {"optimizer": {"lr": 0.1}}, {})
    with pytest.raises(UserError, match="There is no checkpoint"):
        load(tmp_path / "step-00000009", part)


def test_a_step_saved_again_replaces_the_first_and_later_steps_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=False)
    checkpoints.save(30, state(30), {})
    checkpoints.save(20, state(20), {})  # a run that went back
    assert folders(tmp_path) == ["step-00000020", "step-00000030"]
    checkpoints.save(30, state(31), {})
    loaded = blank(state())
    checkpoints.load_newest(loaded)
    assert bits(loaded) == bits(state(31)) and folders(tmp_path) == ["step-00000030"]


def test_leftovers_are_cleared_and_a_replacement_that_was_cut_short_is_undone(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, asynchronous=False)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
    checkpoints.close()
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".writing-3-1")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".deleting-step-00000000")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".replaced-step-00000001")
    (tmp_path / "step-00000002").rename(tmp_path / ".replaced-step-00000002")
    (tmp_path / "notes.txt").write_text("the user's own")
    assert Checkpoints(tmp_path, keep=2, asynchronous=False).load_newest(blank(state())) == {"step": 2}
    assert folders(tmp_path) == ["notes.txt", "step-00000001", "step-00000002"]


def test_a_folder_that_a_living_process_writes_to_is_left_to_it(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from tilewright.train.checkpoint import Checkpoints\n"
        "checkpoints = Checkpoints(pathlib.Path(sys.argv[1]), keep=1, asynchronous=True)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "ready\n"
    writing = tmp_path / f".writing-5-{other.pid}"
    writing.mkdir()
    with pytest.raises(UserError, match="Another process writes checkpoints"):
        Checkpoints(tmp_path, keep=1, asynchronous=True)
    assert writing.exists()
    other.send_signal(signal.SIGKILL)
    other.wait()
    other.stdin.close()
    other.stdout.close()
    Checkpoints(tmp_path, keep=1, asynchronous=True).close()
    assert not writing.exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_gpus_tensors_survive_although_training_goes_on(tmp_path, asynchronous):
    weight = torch.randn(1 << 24, device="cuda")
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=asynchronous)
    for step in (1, 2):  # the second time into the buffers of the first
        expected = weight.clone()
        checkpoints.save(step, {"model": {"weight": weight}}, {"step": step})
        weight.mul_(-3.0)
    checkpoints.wait()
    loaded = torch.zeros_like(weight)
    assert checkpoints.load_newest({"model": {"weight": loaded}}) == {"step": 2}
    assert torch.equal(loaded, expected)
    checkpoints.close()


def rank_of_two(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).view(6, 4)
    tensors = {
        "model": {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole * 2},
        f"random-{rank}": {"state": torch.full((3,), rank)},
    }
    checkpoints = Checkpoints(folder, keep=1, asynchronous=True)
    checkpoints.save(1, tensors, {"step": 1})
    checkpoints.wait()
    loaded = {
        "model": {"sharded": DTensor.from_local(torch.zeros(6, 2), mesh, [Shard(1)]), "plain": torch.zeros(6, 4)},
        f"random-{rank}": {"state": torch.full((3,), -1)},
    }
    assert checkpoints.load_newest(loaded) == {"step": 1}
    assert torch.equal(loaded["model"]["sharded"].redistribute(mesh, [Replicate()]).to_local(), whole)
    assert torch.equal(loaded["model"]["plain"], whole * 2) and loaded[f"random-{rank}"]["state"].eq(rank).all()
    if rank == 1:  # one rank alone has another model: both must hear of it, neither waits for the other
        loaded["model"]["plain"] = torch.zeros(6, 5)
    with pytest.raises(UserError, match="model/plain"):
        checkpoints.load_newest(loaded)
    dist.barrier()
    if rank == 1:  # its own file cannot be written
        (folder / f".writing-2-{checkpoints._writer}" / "1-0.bin").mkdir(parents=True)
    dist.barrier()
    checkpoints.save(2, tensors, {"step": 2})
    with pytest.raises(UserError, match="Is a directory writing .*1-0.bin; the previous .* step-00000001 is whole"):
        checkpoints.wait()
    checkpoints.close()


def test_two_ranks_write_one_checkpoint_and_one_process_reads_it(tmp_path):
    folder = tmp_path / "checkpoints"
    run_ranks(rank_of_two, 2, folder)
    assert folders(folder) == ["step-00000001"]
    path = folder / "step-00000001"
    assert {"0-0.bin", "1-0.bin"} <= json.loads((path / "manifest.json").read_text())["files"].keys()
    tensors, facts = read(path, "model")
    assert facts == {"step": 1} and torch.equal(tensors["sharded"], torch.arange(24.0).view(6, 4))
    assert read(path, "random-1")[0]["state"].tolist() == [1, 1, 1]
