"""``weightsync export``: whole checkpoints that others load, or nothing."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

import weightsync as ws
from tests.conftest import WAIT, assert_all_same, newest_slot
from tests.vllm.conftest import llama_config, make_model
from weightsync import checkpoint
from weightsync.testing import faults
from weightsync.testing.processes import eventually


def tensors_in(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def only(folder, *names):
    """Whether a directory holds nothing else: no half-written folder either."""
    return sorted(os.listdir(folder)) == sorted(names)


def test_the_bytes_are_those_of_the_version(weightsync, shm, run_dir, weights, tmp_path):
    answer = weightsync("export", run_dir, tmp_path / "out")
    assert (answer.code, answer.err) == (0, "")
    assert "1.24 kB in 2 tensors" in answer.words
    assert "--config DIR" in answer.words
    assert_all_same(tensors_in(tmp_path / "out"), weights)
    assert only(tmp_path, "out")
    assert only(tmp_path / "out", "model.safetensors")


def test_an_older_version_with_its_configuration(weightsync, tmp_path):
    model = make_model(llama_config(), 1)
    scheme = ws.DiskScheme(str(tmp_path / "run"))
    with scheme.create_sender(model, timeout=WAIT) as sender:
        sender.connect(WAIT)
        first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        sender.update_weights(version=1)
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        sender.update_weights(version=2)
    document = weightsync(
        "export", tmp_path / "run", tmp_path / "out", "--version", 1, "--json"
    ).json
    assert document["version"][1] == 1
    assert "config.json" in document["files"]
    assert_all_same(tensors_in(tmp_path / "out"), first)


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_it(weightsync, run_dir, tmp_path, tied):
    """T1: a tied tensor is in the files once, and its model ties it again. One that the trainer
    tied, and its configuration does not know of, is there under both names."""
    from transformers import AutoModelForCausalLM

    model = make_model(llama_config(tie_word_embeddings=tied), 1)
    model.lm_head.weight = model.model.embed_tokens.weight
    config = tmp_path / "config"
    config.mkdir()
    model.config.save_pretrained(config)
    (config / "tokenizer.json").write_text("{}")
    (config / "model.safetensors").write_text("old weights")
    (config / "model.safetensors.index.json").write_text("old index")
    with ws.DoubleBufferScheme(run_dir).create_sender(model, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
        answer = weightsync(
            "export", run_dir, tmp_path / "out", "--config", config, "--max-shard-size", "1MiB"
        )
    assert answer.code == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert ("lm_head.weight" in tensors_in(tmp_path / "out")) != tied
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_all_same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_files_are_no_larger_than_asked_for_and_an_index_lists_them(weightsync, run_dir, tmp_path):
    weights = {f"layer.{number}": torch.full((1 << 18,), float(number)) for number in range(7)}
    with ws.DoubleBufferScheme(run_dir).create_sender(weights, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
        weightsync("export", run_dir, tmp_path / "out", "--max-shard-size", "2.2MB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    assert_all_same(tensors_in(tmp_path / "out"), weights)


def test_a_cast(weightsync, shm, run_dir, weights, tmp_path):
    config = tmp_path / "config"
    llama_config().save_pretrained(config)
    weightsync("export", run_dir, tmp_path / "out", "--dtype", "float16", "--config", config)
    cast = {name: tensor.to(torch.float16) for name, tensor in weights.items()}
    assert_all_same(tensors_in(tmp_path / "out"), cast)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written.get("dtype", written.get("torch_dtype")) == "float16"


def test_what_is_there_is_not_replaced_unless_asked_for(weightsync, disk, tmp_path):
    weightsync("export", disk, tmp_path / "out", "--version", 1)
    before = tensors_in(tmp_path / "out")
    answer = weightsync("export", disk, tmp_path / "out")
    assert answer.code == 2
    assert "--force" in answer.err
    assert_all_same(tensors_in(tmp_path / "out"), before)
    assert weightsync("export", disk, tmp_path / "out", "--force").code == 0
    assert tensors_in(tmp_path / "out")["model.a"][0] == 2
    assert only(tmp_path, "run", "out")


@pytest.mark.parametrize("kind", ["a file", "a symlink", "folders", "papers"])
def test_what_is_no_checkpoint_is_never_replaced(weightsync, disk, tmp_path, kind):
    out = tmp_path / "out"
    if kind == "a file":
        out.write_text("mine")
    elif kind == "a symlink":
        out.symlink_to(tmp_path)
    else:
        (out / "inner").mkdir(parents=True) if kind == "folders" else out.mkdir()
        (out / "mine.txt").write_text("mine")
    answer = weightsync("export", disk, out, "--force")
    assert answer.code == 2
    assert str(out) in answer.err
    assert os.path.lexists(out)
    assert only(tmp_path, "run", "out")


def test_a_version_of_a_run_is_not_replaced(weightsync, disk, tmp_path):
    older = ws.DiskScheme(str(disk)).inspect().slots[0].generation
    answer = weightsync("export", disk, disk / older, "--force")
    assert (answer.code, "version of a run" in answer.err) == (2, True)
    assert weightsync("verify", disk, "--version", 1).code == 0


def test_what_has_come_to_the_place_meanwhile_is_not_replaced(
    weightsync, disk, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    weightsync("export", disk, out)

    def write(*arguments, **options):
        (out / "inner").mkdir()
        return write_shards(*arguments, **options)

    write_shards = checkpoint.write_shards
    monkeypatch.setattr(checkpoint, "write_shards", write)
    answer = weightsync("export", disk, out, "--force")
    assert (answer.code, "has folders in it" in answer.err) == (2, True)
    assert (out / "inner").is_dir()
    assert only(tmp_path, "run", "out")


def test_a_damaged_version_is_not_exported(weightsync, shm, run_dir, tmp_path):
    faults.corrupt(newest_slot(ws.DoubleBufferScheme(run_dir)), byte=0)
    answer = weightsync("export", run_dir, tmp_path / "out")
    assert answer.code == 2
    assert "damaged are model.a" in answer.err
    assert only(tmp_path)


def test_a_disk_that_is_full_leaves_nothing(weightsync, shm, run_dir, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    try:
        with faults.small_disk(small, 64 << 10) as place:
            with faults.filled(place, leave=4096):
                answer = weightsync("export", run_dir, place / "out")
            assert only(place)
    except faults.UnavailableError as error:
        pytest.skip(str(error))
    assert answer.code == 2
    assert "bytes" in answer.err
    assert "free" in answer.err


def test_a_disk_that_fills_up_in_the_middle_leaves_nothing(
    weightsync, shm, run_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoint, "_require_room", lambda folder, needed: None)
    with faults.file_size_limit(100):
        answer = weightsync("export", run_dir, tmp_path / "out")
    assert answer.code == 2
    assert "File too large" in answer.err
    assert only(tmp_path)


def test_no_parent_and_no_configuration(weightsync, disk, tmp_path):
    answer = weightsync("export", disk, tmp_path / "no/out")
    assert answer.code == 2
    assert "there is no folder" in answer.err
    answer = weightsync("export", disk, tmp_path / "out", "--config", tmp_path)
    assert "there is no config.json" in answer.err
    assert only(tmp_path, "run")


def test_a_configuration_that_is_none(weightsync, disk, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("[" * 100_000)
    given = ("export", disk, tmp_path / "out", "--config", tmp_path / "config")
    answer = weightsync(*given, "--dtype", "float16")
    assert (answer.code, "config.json" in answer.err) == (2, True)
    assert weightsync(*given).code == 0  # its content does not matter


def test_a_dtype_that_is_none(weightsync, disk, tmp_path):
    answer = weightsync("export", disk, tmp_path / "out", "--dtype", "int8")
    assert answer.code == 2
    assert "float32, bfloat16, float16" in answer.err


@pytest.mark.parametrize("size", ["x", "-1", "10", "3iB"])
def test_sizes_that_are_none(weightsync, disk, tmp_path, size):
    answer = weightsync("export", disk, tmp_path / "out", f"--max-shard-size={size}")
    assert answer.code == 2
    assert size in answer.err


def test_what_others_may_read_is_as_this_user_s_files_are(weightsync, disk, tmp_path):
    mask = os.umask(0o022)
    try:
        weightsync("export", disk, tmp_path / "out")
    finally:
        os.umask(mask)
    modes = {stat.S_IMODE(os.stat(path).st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o644}
    assert stat.S_IMODE(os.stat(tmp_path / "out").st_mode) == 0o755


def test_dtypes_that_safetensors_does_not_have(weightsync, run_dir, tmp_path):
    weights = {"odd": torch.ones(4).to(torch.float8_e8m0fnu)}
    with ws.DoubleBufferScheme(run_dir).create_sender(weights, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
        answer = weightsync("export", run_dir, tmp_path / "out")
        assert answer.code == 2
        assert "'odd'" in answer.err
        assert only(tmp_path)


NO_EXCHANGE = "checkpoint.exchange = lambda path, other: os.stat('/none')"
"""For a process: it has a file system where two folders cannot change places."""


ENDS = (".json", ".safetensors")
"""Of the names of files of a checkpoint."""


@contextmanager
def standing_still_at(function, *arguments, calls=0, named="", first=""):
    """A process that exports and never comes further than the first call of that function.

    Args:
        calls: so many of it are well before. named: of a file of such a name; others do not count.
        first: what the process runs first.
    """
    code = (
        "import os, shutil, sys, threading\n"
        "from weightsync import checkpoint\n"
        "from weightsync.cli import main\n"
        f"{first}\n"
        f"real, left = {function}, [None] * {calls}\n"
        "def standing(*given, **options):\n"
        f"    if not given or str(given[0]).endswith({named!r}):\n"
        "        left.pop() if left else threading.Event().wait()\n"
        "    return real(*given, **options)\n"
        f"{function} = standing\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "export", *map(str, arguments)]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_killed_in_the_middle_there_is_no_checkpoint_and_clean_removes_the_rest(
    weightsync, disk, tmp_path
):
    with standing_still_at("checkpoint._put", disk, tmp_path / "out"):
        [half] = eventually(lambda: list(tmp_path.glob(f"{checkpoint.UNFINISHED}*/model*")))
        time.sleep(0.1)
        listed = weightsync("clean", tmp_path, "--json").json["leftovers"]
        assert not [entry for entry in listed if entry["kept"] is None]
    assert not (tmp_path / "out").exists()
    assert half.parent.exists()
    weightsync("clean", tmp_path, "--yes")
    assert only(tmp_path, "run")


def test_killed_once_a_checkpoint_has_taken_another_s_place(weightsync, disk, tmp_path):
    """It is there, and clean removes what it has replaced."""
    out = tmp_path / "out"
    weightsync("export", disk, out, "--version", 1)
    with standing_still_at("shutil.rmtree", disk, out, "--force"):
        eventually(lambda: tensors_in(out)["model.a"][0] == 2)
    assert not only(tmp_path, "run", "out")
    weightsync("clean", tmp_path, "--yes")
    assert only(tmp_path, "run", "out")
    assert tensors_in(out)["model.a"][0] == 2


@pytest.mark.parametrize(("files", "first"), [(0, ""), (1, ""), (2, ""), (1, NO_EXCHANGE)])
def test_killed_while_it_removes_what_it_has_replaced(weightsync, disk, tmp_path, files, first):
    """Whichever files are gone by then, clean knows the rest for what it is."""
    out = tmp_path / "out"
    weightsync("export", disk, out, "--version", 1)
    for name in ("a.json", "b.json"):
        (out / name).touch()
    with standing_still_at("os.unlink", disk, out, "--force", calls=files, named=ENDS, first=first):
        eventually(lambda: tensors_in(out)["model.a"][0] == 2)
        eventually(lambda: [len(os.listdir(f)) for f in tmp_path.glob(".weight*")] == [4 - files])
    weightsync("clean", tmp_path, "--yes")
    assert only(tmp_path, "run", "out")


def test_clean_while_the_export_itself_removes_what_it_has_replaced(
    weightsync, tmp_path, monkeypatch
):
    """Whoever comes second finds nothing, which is well."""

    def removed(path, **options):
        monkeypatch.undo()
        os.unlink(path, **options)
        shutil.rmtree(former)

    former = tmp_path / f"{checkpoint.UNFINISHED}{'0' * 16}"
    former.mkdir(mode=0o700)
    for name in ("a.json", "model.safetensors", checkpoint.LOCK):
        (former / name).touch()
    monkeypatch.setattr(os, "unlink", removed)
    assert weightsync("clean", tmp_path, "--yes").code == 0
    assert only(tmp_path)


def test_one_that_came_to_the_place_in_the_last_moment_is_not_replaced(
    weightsync, disk, tmp_path, monkeypatch
):
    def came(path, overwrite):
        require_free(path, overwrite)
        if list(tmp_path.glob(f"{checkpoint.UNFINISHED}*")):
            out.mkdir()
            (out / "other.safetensors").touch()

    out, require_free = tmp_path / "out", checkpoint._require_free
    monkeypatch.setattr(checkpoint, "_require_free", came)
    answer = weightsync("export", disk, out)
    assert (answer.code, "not empty" in answer.err) == (2, True)
    assert only(out, "other.safetensors")
    assert only(tmp_path, "run", "out")


def test_a_file_system_where_two_folders_cannot_change_places(
    weightsync, disk, tmp_path, monkeypatch
):
    def refused(path, other):
        raise OSError(errno.EINVAL, "Invalid argument", path)

    out = tmp_path / "out"
    weightsync("export", disk, out, "--version", 1)
    monkeypatch.setattr(checkpoint, "exchange", refused)
    assert weightsync("export", disk, out, "--force").code == 0
    assert tensors_in(out)["model.a"][0] == 2
    assert only(out, "model.safetensors")
    assert only(tmp_path, "run", "out")


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_what_fails_there_between_the_two_steps(weightsync, disk, tmp_path, monkeypatch, error):
    """What was at the place is there again."""

    def rename(path, other):
        if path.endswith(".former") or other.endswith(".former"):
            return real(path, other)
        raise error

    def refused(path, other):
        raise OSError(errno.EINVAL, "Invalid argument", path)

    out, real = tmp_path / "out", os.rename
    weightsync("export", disk, out, "--version", 1)
    monkeypatch.setattr(checkpoint, "exchange", refused)
    monkeypatch.setattr(checkpoint.os, "rename", rename)
    assert weightsync("export", disk, out, "--force").code != 0
    assert tensors_in(out)["model.a"][0] == 1
    assert only(out, "model.safetensors")
    assert only(tmp_path, "run", "out")


def test_killed_there_between_the_two_steps(weightsync, disk, tmp_path):
    """What was at the place is all there is: clean does not take it for something that was left."""
    weightsync("export", disk, tmp_path / "out", "--version", 1)
    with standing_still_at(
        "os.rename", disk, tmp_path / "out", "--force", calls=1, first=NO_EXCHANGE
    ):
        eventually(lambda: not (tmp_path / "out").exists())
    weightsync("clean", tmp_path, "--yes")
    (former,) = tmp_path.glob("*.former")
    assert tensors_in(former)["model.a"][0] == 1


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_loads_it(weightsync, run_dir, tmp_path):
    from tests.vllm.conftest import expected, greedy, make_llm, stop

    model = make_model(llama_config(), 5)
    model.config.save_pretrained(tmp_path / "config")
    with ws.DoubleBufferScheme(run_dir).create_sender(model, timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(version=1)
        weightsync("export", run_dir, tmp_path / "out", "--config", tmp_path / "config")
    llm = make_llm(tmp_path / "out", "auto", backend=None)
    try:
        assert greedy(llm) == expected(model)
    finally:
        stop(llm)
