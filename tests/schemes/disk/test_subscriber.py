"""Readers see whole versions, or an error that says which tensors are concerned."""

import os
import shutil
import threading

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, assert_all_same, assert_same, copy_of
from weightsync.deadline import Deadline
from weightsync.transport import Targets

MIB = 1 << 20


def weights(value=1.0):
    """Five tensors of 1.5 MiB."""
    return {f"w{n}": torch.full((3 * MIB // 8,), float(value + n)) for n in range(5)}


def zeros():
    return {name: torch.zeros_like(tensor) for name, tensor in weights().items()}


def publish(run, value=1.0, number=1, **options):
    return run.sender(**options).update_weights(weights(value), version=number).version


def test_views_are_what_was_sent(run):
    version = publish(run)
    with run.lease(version) as snapshot:
        assert snapshot.version == version
        for name, tensor in snapshot:
            assert_same(tensor, weights()[name])
        kept = snapshot.tensor("w3")
    assert_same(kept, weights()["w3"])  # a mapping outlives its lease; the promise does not
    with pytest.raises(ws.WeightSyncError, match="closed"):
        snapshot.tensor("w3")


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("shard_bytes", [2 * MIB, 1 << 40])
def test_copies_are_what_was_sent(run, verify, shard_bytes):
    version = publish(run, shard_bytes=shard_bytes)
    with run.lease(version, verify=verify) as snapshot:
        whole = zeros()
        snapshot.copy_into(Targets(snapshot.manifest, whole))
        assert_all_same(whole, weights())
        some = {"w2": torch.zeros(3 * MIB // 8, dtype=torch.float64)}
        snapshot.copy_into(Targets(snapshot.manifest, some))
        assert torch.equal(some["w2"], weights()["w2"].double())


def damage(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_found_and_its_tensors_are_named(run):
    version = publish(run)
    damage(run.folder(version) / "model.safetensors", 4096 + 3 * MIB + MIB // 2)  # in w2
    with run.lease(version) as snapshot:
        with pytest.raises(ws.CorruptError, match=r"model\.safetensors.*'w2'"):
            snapshot.verify()
        with pytest.raises(ws.CorruptError, match="'w2'"):
            snapshot.copy_into(Targets(snapshot.manifest, zeros()))
        snapshot.verify(["w0", "w4"])
        with pytest.raises(ws.CorruptError, match="'w2'"):
            snapshot.verify(["w2"])


def test_a_header_that_was_changed_is_found(run):
    """It is not used here, but foreign loaders go by it."""
    version = publish(run)
    damage(run.folder(version) / "model.safetensors", 20)
    with run.lease(version) as snapshot, pytest.raises(ws.CorruptError):
        snapshot.verify()


def test_without_verification_bits_are_not_compared(run):
    version = publish(run)
    damage(run.folder(version) / "model.safetensors", 4096 + 3 * MIB)
    with run.lease(version, verify=False) as snapshot:
        snapshot.verify()
        snapshot.copy_into(Targets(snapshot.manifest, zeros()))


def test_a_file_that_was_cut_off_is_an_error_before_anything_is_read(run):
    version = publish(run)
    os.truncate(run.folder(version) / "model.safetensors", 5 * MIB)
    with pytest.raises(ws.CorruptError, match=f"{5 * MIB} bytes instead of"):
        run.lease(version)


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_is_cut_off_under_a_reader_is_no_bus_error(run, verify):
    version = publish(run)
    with run.lease(version, verify=verify) as snapshot:
        os.truncate(run.folder(version) / "model.safetensors", 4096 + 5 * MIB)
        with pytest.raises(ws.CorruptError, match="'w4'"):
            snapshot.copy_into(Targets(snapshot.manifest, zeros()))


@pytest.mark.parametrize(
    "name", ["weightsync.digests", "weightsync.json", "weightsync.layout.json", "model.safetensors"]
)
def test_files_of_another_version_are_found(run, name):
    sender = run.sender()
    one, two = (sender.update_weights(weights(n), version=n).version for n in (1, 2))
    if name == "weightsync.layout.json":
        other = {"x": torch.zeros(5)}
        three = sender.update_weights(other, version=3).version
        shutil.copy(run.folder(three) / name, run.folder(two) / name)
    else:
        shutil.copy(run.folder(one) / name, run.folder(two) / name)
    with pytest.raises((ws.CorruptError, ws.ProtocolError)):
        run.lease(two).verify()


def test_a_symlink_is_not_followed(run, tmp_path):
    version = publish(run)
    file = run.folder(version) / "model.safetensors"
    os.rename(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ws.ProtocolError, match="symbolic"):
        run.lease(version)


def test_directories_of_others_are_no_versions(run):
    from safetensors.torch import save_file

    version = publish(run)
    foreign = run.folder(version._replace(number=9))
    foreign.mkdir()
    save_file(weights(), foreign / "model.safetensors")
    with pytest.raises(ws.VersionGoneError):
        run.lease(version._replace(number=9))


def test_c6_the_second_version_is_not_the_first(run):
    """One subscriber, one layout, files of the same names."""
    sender, reader = run.sender(), run.reader()
    for value in (1.0, 5.0):
        version = sender.update_weights(weights(value), version=int(value)).version
        assert reader.wait(None, Deadline(WAIT)) == version
        with reader.snapshot(version, Deadline(WAIT)) as snapshot:
            assert_all_same({n: copy_of(t) for n, t in snapshot}, weights(value))


def test_r6_a_version_that_goes_between_seeing_and_opening_it(run):
    """The receiver takes the newest one instead, and no FileNotFoundError escapes."""
    sender = run.sender(keep=1)
    engine = zeros()
    receiver = run.receiver(engine)
    sender.update_weights(weights(1), version=1)
    real, late = receiver._subscriber.snapshot, []

    def slow(version, deadline):
        if not late:
            late.append(version)
            for number in (2, 3, 4):
                sender.update_weights(weights(number), version=number)
        return real(version, deadline)

    receiver._subscriber.snapshot = slow
    assert receiver.poll_and_apply(WAIT).version.number == 4
    assert late[0].number == 1
    assert_all_same(engine, weights(4))


def test_readers_and_removal_at_full_speed(run):
    """R1: threads read whatever is newest while versions come and go."""
    sender = run.sender(keep=1, durable=False)
    sender.update_weights({"w": torch.zeros(3000)}, version=0)
    reader = run.reader()
    seen, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            version = reader.wait(None, Deadline(WAIT))
            try:
                with reader.snapshot(version, Deadline(WAIT)) as snapshot:
                    seen.append((version.number, set(snapshot.tensor("w").tolist())))
            except ws.VersionGoneError:
                continue

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1, 60):
        sender.update_weights({"w": torch.full((3000,), float(number))}, version=number)
    stop.set()
    for thread in threads:
        thread.join(WAIT)
    assert len({number for number, _ in seen}) > 5
    assert all(values == {float(number)} for number, values in seen)


def test_a_reader_needs_no_live_sender(run):
    """As a worker of an engine: it was told which version."""
    version = publish(run)
    run.end()
    reader = run.scheme().create_reader(0, 1)
    with reader.snapshot(version, Deadline(WAIT)) as snapshot:
        snapshot.verify()
    reader.close()


def test_another_mount_point(run, tmp_path):
    """reader_path: where the receivers' host has the directory."""
    version = publish(run)
    os.rename(run.path, tmp_path / "elsewhere")
    scheme = run.scheme(reader_path=tmp_path / "elsewhere")
    assert scheme.newest() == version
    assert os.path.dirname(scheme.directory(version)) == str(tmp_path / "elsewhere")
    reader = scheme.create_reader(0, 1)
    with reader.snapshot(version, Deadline(WAIT)) as snapshot:
        snapshot.verify()
    reader.close()


def test_a_version_that_somebody_removed_is_not_looked_for_without_end(run):
    """HEAD names it, and it is not there: nothing but time brings another."""
    version = publish(run)
    receiver = run.scheme().create_receiver(zeros())
    receiver.connect(WAIT)
    shutil.rmtree(run.scheme().directory(version))
    assert receiver.poll_and_apply() is None
    assert receiver.poll_and_apply(timeout=0.2) is None
    receiver.shutdown()


def test_the_same_number_again_is_written_again_if_it_is_gone(run):
    sender = run.sender()
    version = sender.update_weights(weights(), version=1).version
    shutil.rmtree(run.scheme().directory(version))
    assert sender.update_weights(weights(), version=1).version == version
    with run.lease(version) as snapshot:
        assert_same(snapshot.tensor("w0"), weights()["w0"])
