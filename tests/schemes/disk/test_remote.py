"""Object stores: no locks, no renames, one download for each host."""

import json
import secrets
import threading
import time
from pathlib import Path

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT, assert_all_same, copy_of
from weightsync.deadline import Deadline
from weightsync.schemes.disk.presence import Pulse, Sign, Watch, read_sign
from weightsync.schemes.disk.store import Store
from weightsync.testing import SchemeConformance, faults, roles
from weightsync.testing.processes import Peer

PATIENCE = 1.0


def weights(value=1.0):
    return {f"w{n}": torch.full((100_000,), float(value + n)) for n in range(4)}


@pytest.fixture
def scheme(tmp_path):
    """A run in this process's own memory."""
    url = f"memory://{secrets.token_hex(4)}/run"
    return ws.DiskScheme(url, cache=tmp_path / "cache", patience=PATIENCE, keep=2)


@pytest.fixture
def store(scheme):
    return Store(scheme.path)


@pytest.fixture
def sender(scheme):
    with scheme.create_sender(timeout=WAIT) as sender:
        sender.connect(WAIT)
        yield sender


def below(store):
    found = store._files.find(store._base)
    return sorted(path.removeprefix(f"{store._base}/") for path in found)


def content(scheme, version):
    reader = scheme.create_reader(0, 1)
    try:
        with reader.snapshot(version, Deadline(WAIT)) as snapshot:
            snapshot.verify()
            return {name: copy_of(tensor) for name, tensor in snapshot}
    finally:
        reader.close()


def test_errors_do_not_tell_who_may_use_the_store(tmp_path):
    """Nor does what is seen of a run."""
    url = f"memory://me:hush@{secrets.token_hex(4)}/run"
    scheme = ws.DiskScheme(url, cache=tmp_path / "cache", patience=PATIENCE)
    with pytest.raises(FileNotFoundError) as nothing:
        scheme.inspect()
    with scheme.create_receiver({}) as receiver, pytest.raises(ws.WeightSyncError) as nobody:
        receiver.connect(0.1)
    with scheme.create_sender(weights(), timeout=WAIT) as sender:
        sender.connect(WAIT)
        with scheme.create_sender(weights()) as second, pytest.raises(ws.SenderBusyError) as busy:
            second.connect(2 * PATIENCE)
        Store(url).write("HEAD", b"no commit", Deadline(WAIT))
        status = scheme.inspect()
    with pytest.raises(ws.ProtocolError) as long:
        Store(url).read("HEAD", 1, Deadline(WAIT))
    with pytest.raises(ws.SchemeError) as malformed:
        ws.DiskScheme("memory://me:hush@x/")
    said = [status.path, *status.problems]
    for text in [*said, *(str(e.value) for e in (nothing, nobody, busy, long, malformed))]:
        assert "hush" not in text
        assert "memory://***@" in text


def test_a_scheme_is_shown_without_user_and_password():
    scheme = ws.DiskScheme("memory://me:hush@bucket/run")
    shown = repr(ws.FallbackScheme([scheme]))
    assert "DiskScheme(path='memory://***@bucket/run', keep=3," in shown
    assert "hush" not in shown
    assert "hush" in scheme.to_url()


# -------------------------------------------------------------------- versions


def test_a_receiver_gets_what_was_sent(scheme, sender):
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    with scheme.create_receiver(engine, id="engine") as receiver:
        receiver.connect(WAIT)
        for number in (1, 2, 3):
            sender.update_weights(weights(number), version=number)
            report = receiver.poll_and_apply(WAIT)
            assert report.version.number == number
            assert_all_same(engine, weights(number))
        time.sleep(0.2)  # what was looked at just before is not looked at again
        told = {r.receiver: (r.state, r.version.number) for r in sender.receivers()}
        assert told == {"engine": ("applied", 3)}


def test_the_store_holds_a_checkpoint(scheme, sender, store, tmp_path):
    from safetensors.torch import load_file

    version = sender.update_weights(weights(), version=1).version
    folder = scheme.directory(version).removeprefix(scheme.path).strip("/")
    store.download(f"{folder}/model.safetensors", str(tmp_path / "file"), Deadline(WAIT))
    assert_all_same(load_file(tmp_path / "file"), weights())
    assert scheme.newest() == version


def test_another_host_downloads_once(scheme, sender, tmp_path, monkeypatch):
    """Two readers at the same time, one cache."""
    other = ws.DiskScheme(scheme.path, cache=tmp_path / "elsewhere", patience=PATIENCE)
    version = sender.update_weights(weights(), version=1).version
    downloads, real = [], Store.download

    def download(self, name, file, deadline):
        downloads.append(name.rpartition("/")[2])
        time.sleep(0.1)
        real(self, name, file, deadline)

    monkeypatch.setattr(Store, "download", download)
    assert_all_same(content(scheme, version), weights())  # the sender's own host
    assert downloads == []
    seen = []
    threads = [
        threading.Thread(target=lambda: seen.append(content(other, version))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert sorted(downloads) == ["model.safetensors", "weightsync.digests"]
    assert len(seen) == 3
    for one in seen:
        assert_all_same(one, weights())


def test_few_versions_stay_in_the_store_and_one_in_a_cache(scheme, sender, store):
    for number in range(5):
        sender.update_weights(weights(number), version=number)
    assert len([n for n in store.names("", Deadline(WAIT)) if n.startswith("step-")]) == 2
    assert len(list(Path(scheme.cache).glob("step-*"))) == 1
    assert not list(Path(scheme.cache).glob(".step-*"))


def test_a_version_that_is_gone(scheme, sender, tmp_path):
    first = sender.update_weights(weights(1), version=1).version
    for number in (2, 3):
        sender.update_weights(weights(number), version=number)
    with pytest.raises(ws.VersionGoneError):
        content(ws.DiskScheme(scheme.path, cache=tmp_path / "elsewhere"), first)


def test_a_number_stands_for_one_set_of_weights(scheme, sender, store):
    version = sender.update_weights(weights(1), version=1).version
    before = below(store)
    sender.update_weights(weights(1), version=1)
    with pytest.raises(ws.VersionError, match="other weights"):
        sender.update_weights(weights(2), version=1)
    with pytest.raises(ws.VersionError, match="older"):
        sender.update_weights(weights(2), version=0)
    assert below(store) == before
    assert_all_same(content(scheme, version), weights(1))


@pytest.mark.parametrize("object", ["model.safetensors", "weightsync.json", "HEAD"])
def test_an_upload_that_fails_leaves_the_former_version(scheme, sender, store, monkeypatch, object):
    version = sender.update_weights(weights(1), version=1).version
    before = below(store)
    for method in ("upload", "write"):
        real = getattr(Store, method)

        def fail(self, *args, real=real):
            if any(isinstance(arg, str) and arg.endswith(object) for arg in args):
                raise ws.WeightSyncError("the network is gone")
            real(self, *args)

        monkeypatch.setattr(Store, method, fail)
    with pytest.raises(ws.WeightSyncError, match="the network is gone"):
        sender.update_weights(weights(2), version=2)
    monkeypatch.undo()
    assert below(store) == before
    assert scheme.newest() == version
    assert_all_same(content(scheme, version), weights(1))
    newer = sender.update_weights(weights(2), version=2).version
    assert_all_same(content(scheme, newer), weights(2))


def test_a_download_that_is_corrupt(scheme, sender, store, tmp_path):
    version = sender.update_weights(weights(1), version=1).version
    name = next(name for name in below(store) if name.endswith(".safetensors"))
    data = bytearray(store.read(name, 1 << 30, Deadline(WAIT)))
    data[50_000] ^= 1
    store.write(name, bytes(data), Deadline(WAIT))
    with pytest.raises(ws.CorruptError, match="'w0'"):
        content(ws.DiskScheme(scheme.path, cache=tmp_path / "elsewhere"), version)


@pytest.mark.parametrize("name", ["HEAD", "weightsync.json", "weightsync.layout.json"])
def test_x1_objects_of_strangers(scheme, sender, store, tmp_path, name):
    version = sender.update_weights(weights(1), version=1).version
    bomb = faults.Bomb(tmp_path / "exploded")
    for path in below(store):
        if path.endswith(name):
            store.write(path, bytes(bomb), Deadline(WAIT))
    elsewhere = ws.DiskScheme(scheme.path, cache=tmp_path / "elsewhere", patience=PATIENCE)
    with pytest.raises(ws.ProtocolError, match="malformed"):
        elsewhere.newest() if name == "HEAD" else content(elsewhere, version)
    assert not bomb.exploded
    assert not list((tmp_path / "elsewhere").glob("*step-*"))


def test_a_store_that_hangs_costs_the_deadline(scheme, sender, monkeypatch):
    version = sender.update_weights(weights(1), version=1).version
    store = Store(scheme.path)
    over = threading.Event()
    monkeypatch.setattr(store._files, "cat_file", lambda *a, **k: over.wait(WAIT) and b"{}")
    began = time.monotonic()
    with pytest.raises(ws.DeadlineError, match="HEAD"):
        store.read("HEAD", 100, Deadline(0.3))
    assert time.monotonic() - began < WAIT / 2
    monkeypatch.undo()
    over.set()
    assert scheme.newest() == version


def test_a_store_s_own_words_are_told(scheme, monkeypatch):
    store = Store(scheme.path)

    def refuse(*args, **options):
        raise PermissionError("no such bucket for you")

    monkeypatch.setattr(store._files, "cat_file", refuse)
    with pytest.raises(ws.WeightSyncError, match="no such bucket for you"):
        store.read("HEAD", 100, Deadline(1))


# -------------------------------------------------------------------- who is alive


def test_a_beat_tells_the_living_from_the_dead(store):
    pulse = Pulse(store, "one.json", {"says": "hello"}, PATIENCE)
    watch = Watch(PATIENCE)

    def alive():
        return watch.alive("one", read_sign(store, "one.json", Deadline(WAIT)))

    assert alive() is None  # a first look says nothing
    assert Deadline(WAIT).wait(alive) is True
    pulse._life._over.set()  # as if its process had been killed
    assert Deadline(WAIT).wait(lambda: (alive() is False) or None)
    assert read_sign(store, "one.json", Deadline(WAIT)).words == {"says": "hello"}


def test_one_that_ends_says_so(store):
    Pulse(store, "one.json", {}, PATIENCE).close()
    assert read_sign(store, "one.json", Deadline(WAIT)).ended
    Pulse(store, "two.json", {}, PATIENCE, remove=True).close()
    assert read_sign(store, "two.json", Deadline(WAIT)) is None


def test_one_whose_name_is_taken_lets_go(store):
    former = Pulse(store, "one.json", {}, PATIENCE, owns=True)
    latter = Pulse(store, "one.json", {"pid": 5, "host": "h"}, PATIENCE, owns=True)
    with pytest.raises(ws.WeightSyncError, match="pid 5 on h"):
        former.require_ours(Deadline(WAIT))
    former.close()
    latter.require_ours(Deadline(WAIT))
    latter.close()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"[]", b"\x80\x04.",
        b'{"token": 1, "beat": 1, "ended": false, "words": {}}',
        b'{"token": "x", "beat": -1, "ended": false, "words": {}}',
        b'{"token": "x", "beat": 1, "ended": 0, "words": {}}',
        b'{"token": "x", "beat": 1, "ended": false, "words": []}',
    ],
)  # fmt: skip
def test_signs_are_validated(data):
    with pytest.raises(ws.ProtocolError, match="the object is malformed"):
        Sign.from_json(data, "the object")


def test_signs_round_trip():
    sign = Sign("x", 5, True, {"a": [1, None]})
    assert Sign.from_json(sign.to_json(), "x") == sign


def test_a_second_sender_is_refused(scheme, sender):
    with pytest.raises(ws.SenderBusyError, match=r"pid \d+ on .* in this very process: shutdown"):
        scheme.create_sender().connect(WAIT)


def test_a_sender_that_comes_back_is_newer(scheme):
    former = None
    for _ in range(2):
        with scheme.create_sender(timeout=WAIT) as sender:
            sender.connect(WAIT)
            version = sender.update_weights(weights(1), version=40).version
            assert former is None or version > former
            former = version
    assert scheme.newest() == version


def test_halves_of_a_dead_sender_go(scheme, store):
    with scheme.create_sender(timeout=WAIT) as sender:
        sender.connect(WAIT)
        version = sender.update_weights(weights(1), version=1).version
    before = below(store)
    store.write(f"step-0000000002-{version.epoch}/model.safetensors", b"x", Deadline(WAIT))
    with scheme.create_sender(timeout=WAIT) as sender:
        sender.connect(WAIT)
        assert below(store) == before


def test_a_run_that_is_not_kept_leaves_nothing(tmp_path):
    url = f"memory://{secrets.token_hex(4)}/run"
    scheme = ws.DiskScheme(url, cache=tmp_path / "cache", patience=PATIENCE, keep_files=False)
    with scheme.create_sender(timeout=WAIT) as sender:
        sender.connect(WAIT)
        sender.update_weights(weights(1), version=1)
    assert below(Store(url)) == []


def test_strangers_among_the_receivers(scheme, sender, store):
    store.write("receivers/evil.json", b"\x80\x04.", Deadline(WAIT))
    words = {"token": "x", "beat": 1, "ended": False, "words": {"id": "other"}}
    store.write("receivers/liar.json", json.dumps(words).encode(), Deadline(WAIT))
    time.sleep(0.2)  # what was looked at just before is not looked at again
    reports = {report.receiver: report for report in sender.receivers()}
    assert set(reports) == {"evil", "liar"}
    assert all(report.state == "failed" for report in reports.values())


# -------------------------------------------------------------------- URLs


@pytest.mark.parametrize("url", ["s3://bucket/run42", "memory://a/b c", "file:///mnt/x,y"])
def test_urls_stand_in_urls(url):
    scheme = ws.DiskScheme(url, keep=5)
    assert ws.scheme_from_url(scheme.to_url()) == scheme
    assert ws.scheme_from_url(f"disk://{url.replace(' ', '%20')}?keep=5") == scheme


@pytest.mark.parametrize("url", ["s3://", "s3://bucket/", "://x", "s3://bucket/a?b", "s3://b/a#b"])
def test_what_is_no_url(url):
    with pytest.raises(ws.SchemeError, match="path="):
        ws.DiskScheme(url)


def test_a_store_that_fsspec_does_not_know():
    with pytest.raises(ws.SchemeError, match="nosuchstore"):
        ws.DiskScheme("nosuchstore://bucket/run").create_publisher()


# -------------------------------------------------------------------- other processes


def test_across_processes(tmp_path):
    """A receiver is killed, and so is the sender; both are replaced."""
    (tmp_path / "store").mkdir()
    scheme = ws.DiskScheme(
        f"file://{tmp_path}/store/run", cache=tmp_path / "cache", patience=PATIENCE
    )
    peers = [Peer() for _ in range(4)]
    try:
        first, second, receiver, again = peers
        first.call(roles.send_from, scheme)
        receiver.call(roles.receive_in, scheme, "engine")
        receiver.call(roles.follow)
        first.call(roles.publish, 1, wait="applied")
        receiver.kill()
        told = first.call(roles.publish_to_failures, 2)
        assert told.failed == {"engine": "dead"}
        again.call(roles.receive_in, scheme, "engine")
        again.call(roles.follow)
        first.kill()
        second.call(roles.send_from, scheme, receivers=["engine"])
        assert second.call(roles.publish, 0, 7, wait="applied").receivers == {
            "engine": ("applied", 0)
        }
        assert again.call(roles.held) == (0, 7)
    finally:
        for one in peers:
            one.dispose()


@pytest.mark.slow
class TestDiskSchemeOverAStore(SchemeConformance):
    """Across processes, through fsspec's ``file://``, with a cache for this host."""

    patience = 15.0
    race_seconds = 3.0

    @pytest.fixture
    def scheme(self, tmp_path):
        return self.scheme_at(tmp_path)

    def stored_files(self, scheme):
        run = Path(scheme.path.removeprefix("file://"))
        newest = max(run.glob("step-*"), default=None)
        if newest is None:
            return []
        return [run / "HEAD", *(Path(scheme.cache) / newest.name).iterdir()]

    def scheme_at(self, path):
        (path / "store").mkdir(exist_ok=True)
        url = f"file://{path}/store/run"
        return ws.DiskScheme(url, cache=str(path / "cache"), patience=1.5)

    def wrong_options(self):
        return [{"patience": 0}, {"patience": "5"}, {"cache": "relative"}, {"path": "s3://"}]

    def test_a_file_may_not_be_read(self):
        pytest.skip("a cache is read like a disk, and nobody but root can import fsspec here")
