"""``weightsync verify``: damage is found, and named."""

import pytest
import torch
from safetensors.torch import save_file

import weightsync as ws
from tests.conftest import WAIT, newest_slot
from weightsync.testing import faults


def test_a_version_that_is_as_it_was_sent(weightsync, shm, run_dir):
    answer = weightsync("verify", run_dir)
    assert (answer.code, answer.err) == (0, "")
    assert "version 1: 1.24 kB in 2 tensors every digest is right" in answer.words
    assert weightsync("verify", run_dir, "--json").json["good"] is True


def test_digests_are_compared_also_for_a_scheme_that_does_not(weightsync, shm, run_dir):
    faults.corrupt(newest_slot(ws.DoubleBufferScheme(run_dir)), byte=0)
    assert weightsync("verify", f"shm://{run_dir}?verify=0").code == 1


def test_only_tensors_near_the_damage_are_named(weightsync, run_dir):
    weights = {f"layer.{number}": torch.ones(1 << 19) for number in range(10)}  # 2 MiB each
    with ws.DoubleBufferScheme(run_dir).create_sender(weights, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
        faults.corrupt(newest_slot(ws.DoubleBufferScheme(run_dir)), byte=(3 << 21) + 17)
        faults.corrupt(newest_slot(ws.DoubleBufferScheme(run_dir)), byte=(8 << 21) + 17)
        answer = weightsync("verify", run_dir)
        assert answer.code == 1
        assert "damaged: layer.3 damaged: layer.8" in answer.words
        document = weightsync("verify", run_dir, "--json").json
    assert (document["damaged"], document["good"]) == (["layer.3", "layer.8"], False)


def test_a_version_of_several_that_are_kept(weightsync, disk):
    for wanted in ("1", "2"):
        document = weightsync("verify", disk, "--version", wanted, "--json").json
        assert (document["version"][1], document["good"]) == (int(wanted), True)
    answer = weightsync("verify", disk, "--version", "3")
    assert answer.code == 2
    assert "holds no version 3; it holds: 1, 2" in answer.err


@pytest.mark.parametrize("file", ["model.safetensors", "weightsync.digests", "weightsync.json"])
def test_files_that_are_cut_off_or_garbage_are_damage_too(weightsync, disk, file):
    (found,) = disk.glob(f"step-0000000002-*/{file}")
    faults.truncate(found, 20)
    answer = weightsync("verify", disk)
    assert answer.code == 1
    assert "damaged: " in answer.out
    assert "error" in weightsync("verify", disk, "--json").json
    assert weightsync("verify", disk, "--version", "1").code == 0


def test_a_checkpoint_of_the_same_weights(weightsync, disk):
    (folder,) = disk.glob("step-0000000002-*")
    answer = weightsync("verify", disk, "--against", folder)
    assert answer.code == 0
    assert "every tensor is that of" in answer.words


def test_what_differs_from_a_checkpoint_is_named(weightsync, disk, weights, tmp_path):
    other = {**weights, "extra": torch.ones(1), "model.b": torch.ones(7, 3)}
    other["model.a"] = weights["model.a"].clone()
    other["model.a"][3] = -0.0
    weights["model.a"][3] = 0.0
    save_file(other, tmp_path / "other.safetensors")
    answer = weightsync("verify", disk, "--against", tmp_path / "other.safetensors")
    assert answer.code == 1
    assert "different: model.a" in answer.out
    assert "model.b: bfloat16[7, 3] in the run, float32[7, 3] in the checkpoint" in answer.words
    assert "only in checkpoint: extra" in answer.words
    words = f"2 of 2 tensors differ from {tmp_path}/other.safetensors; 1 only in checkpoint"
    assert answer.out.splitlines()[-1] == words


@pytest.mark.parametrize("made", ["nothing", "an empty folder", "garbage"])
def test_what_is_no_checkpoint(weightsync, disk, tmp_path, made):
    path = tmp_path / "checkpoint"
    if made == "an empty folder":
        path.mkdir()
    elif made == "garbage":
        path.write_bytes(b"no header")
    answer = weightsync("verify", disk, "--against", path)
    assert answer.code == 2
    assert str(path) in answer.err


def test_the_newest_of_a_fallback(weightsync, shm, run_dir, disk):
    url = f"fallback://nccl://127.0.0.1:29599?backend=gloo,shm://{run_dir},disk://{disk}"
    assert weightsync("verify", url, "--json").json["version"][1] == 2  # of the later sender


@pytest.mark.parametrize("url", ["nccl://127.0.0.1:29599", "cuda-ipc:///dev/shm/nothing"])
def test_schemes_that_keep_no_copy_are_refused(weightsync, url):
    answer = weightsync("verify", url)
    assert answer.code == 2
    assert url.partition(":")[0] in answer.err


def test_the_trainer_is_not_hindered_afterwards(weightsync, shm, run_dir):
    weightsync("verify", run_dir)
    for number in (2, 3, 4):
        shm.update_weights(version=number, timeout=WAIT)
