"""What Prometheus sees of senders and receivers."""

import asyncio
import sys

import pytest
import torch
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest

import weightsync as ws
from tests.conftest import WAIT
from tests.fakes import fake, weights
from weightsync.metrics import Prometheus
from weightsync.stream_receiver import StreamReceiver


@pytest.fixture
def registry():
    return CollectorRegistry()


class Seen:
    """What a scrape shows of one run."""

    def __init__(self, registry, run):
        self._registry = registry
        self._run = run

    def __call__(self, name, **labels):
        """The value of the one sample with these labels; None if there is none."""
        found = self.all(name, **labels)
        assert len(found) <= 1, found
        return next(iter(found.values()), None)

    def all(self, name, **labels):
        """Values by receiver."""
        wanted = {"run": f"shm://{self._run}", **labels}.items()
        samples = [sample for family in self._registry.collect() for sample in family.samples]
        found = [
            s for s in samples if s.name == f"weightsync_{name}" and wanted <= s.labels.items()
        ]
        values = {sample.labels.get("receiver"): sample.value for sample in found}
        assert len(values) == len(found), found
        return values


@pytest.fixture
def seen(registry, run_dir):
    return Seen(registry, run_dir)


@pytest.fixture
def pair(ends, registry):
    options = {"listeners": [Prometheus(registry)]}
    receiver = {"id": "r", **options}
    return ends.pair(
        weights(1), fake(), scheme=ends.scheme(slots=4), sender=options, receiver=receiver
    )


def test_updates_are_counted_with_their_bytes_and_seconds(pair, seen):
    sender, receiver = pair
    reports = [sender.update_weights(version=step) for step in (1, 2)]
    report = receiver.poll_and_apply()
    assert seen("updates_total", side="sender") == 2
    assert seen("updates_total", side="receiver", receiver="r") == 1
    assert seen("bytes_total", side="sender") == 2 * reports[0].nbytes
    assert seen("bytes_total", side="receiver") == reports[0].nbytes
    total = sum(each.seconds.total for each in reports)
    assert seen("phase_seconds_sum", side="sender", phase="total") == pytest.approx(total)
    assert seen("phase_seconds_count", side="sender", phase="transfer") == 2
    assert seen("phase_seconds_sum", side="receiver", phase="pause") == report.seconds.pause
    assert seen("phase_seconds_count", side="sender", phase="pause") is None
    assert seen("phase_seconds_count", side="receiver", phase="extract") is None


def test_gauges_show_where_each_receiver_stands_when_they_are_looked_at(pair, seen):
    sender, receiver = pair
    for step in (10, 20, 30):
        sender.update_weights(version=step)
        if step == 10:
            receiver.poll_and_apply()
    assert seen.all("version", side="sender") == {"": 30, "r": 10}
    assert seen.all("version", side="receiver") == {"r": 10}
    assert seen.all("lag") == {"r": 2}
    assert seen("epoch", side="receiver") == receiver.version.epoch
    receiver.poll_and_apply()
    assert seen.all("version", side="sender") == {"": 30, "r": 30}
    assert seen.all("lag") == {"r": 0}
    assert seen("receivers", state="applied") == 1


def test_receivers_that_are_gone_disappear(ends, pair, seen, registry):
    sender, receiver = pair
    other = ends.receiver(
        fake(), id="other", scheme=sender.scheme, listeners=[Prometheus(registry)]
    )
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    other.poll_and_apply()
    assert seen.all("lag") == {"r": 0, "other": 0}
    other.shutdown()
    assert seen.all("lag") == {"r": 0}
    assert seen.all("version", side="sender") == {"": 1, "r": 1}
    assert seen.all("version", side="receiver") == {"r": 1}
    receiver.shutdown()
    sender.shutdown()
    assert seen.all("version") == seen.all("lag") == {}
    assert seen("updates_total", side="sender") == 1  # counters stay


def test_the_dead_are_counted_and_have_no_version(pair, seen, monkeypatch):
    sender, _ = pair
    held = sender.update_weights(version=1).version
    dead = [ws.ReceiverReport(f"d{number}", "dead", held) for number in range(2)]
    monkeypatch.setattr(sender, "receivers", lambda: [*dead, ws.ReceiverReport("new", "connected")])
    assert seen.all("version", side="sender") == {"": 1}
    assert seen.all("lag") == {}
    states = ["dead", "connected", "applied", "rolled back"]
    assert [seen("receivers", state=state) for state in states] == [2, 1, 0, 0]


def test_a_sender_that_cannot_look_at_its_receivers_is_left_out(pair, seen, monkeypatch):
    sender, receiver = pair
    sender.update_weights(version=1)
    receiver.poll_and_apply()

    def fail():
        raise OSError("the mount is gone")

    monkeypatch.setattr(sender, "receivers", fail)
    assert seen.all("lag") == {}
    assert seen.all("version", side="receiver") == {"r": 1}


def test_failures_are_counted_by_their_kind(pair, seen):
    sender, receiver = pair
    meta = {"a": torch.empty(2, device="meta")}
    for _ in range(2):
        with pytest.raises(ws.SourceError):
            sender.update_weights(meta)
    sender.update_weights(version=1)
    receiver.engine.fail["load"] = ws.CorruptError("a bit fell over")
    with pytest.raises(ws.CorruptError):
        receiver.poll_and_apply()
    assert seen("failures_total", side="sender", error="SourceError") == 2
    assert seen("failures_total", side="receiver", receiver="r", error="CorruptError") == 1
    assert seen("updates_total", side="receiver") is None


def test_a_version_that_a_receiver_failed_at_is_published_and_a_failure(pair, seen):
    sender, receiver = pair
    sender.attach(receiver)
    receiver.engine.fail["stage"] = ws.EngineError("no")
    with pytest.raises(ws.ReceiverError):
        sender.update_weights(version=1)
    assert seen("updates_total", side="sender") == 1
    assert seen("failures_total", side="sender", error="ReceiverError") == 1


def test_versions_that_are_skipped_move_no_bytes(ends, seen, registry):
    scheme = ends.scheme(on_busy="skip")
    sender = ends.sender(weights(1), scheme=scheme, listeners=[Prometheus(registry)])
    receiver = ends.receiver(fake(), scheme=scheme)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    sender.update_weights(version=2)
    report = sender.update_weights(version=3)  # one slot is leased, one is under the head
    assert report.skipped
    assert seen("skipped_total", side="sender") == 1
    assert seen("bytes_total", side="sender") == 2 * report.nbytes


def test_a_fallback_is_counted_by_what_was_used(tmp_path, registry):
    (tmp_path / "file").touch()
    broken = ws.DoubleBufferScheme(str(tmp_path / "file"))
    scheme = ws.FallbackScheme([broken, ws.DiskScheme(str(tmp_path / "run"))])
    with scheme.create_sender(weights(1), listeners=[Prometheus(registry)]) as sender:
        sender.connect(WAIT)
        report = sender.update_weights(version=1)
        assert report.fell_back
        assert report.metrics()["weightsync/fallback"] == 1
        labels = {"side": "sender", "run": scheme.where(), "scheme": "fallback", "receiver": ""}
        name = "weightsync_fallbacks_total"
        assert registry.get_sample_value(name, {**labels, "through": "disk"}) == 1
        assert registry.get_sample_value("weightsync_updates_total", labels) == 1


def test_the_first_of_a_fallback_is_none(tmp_path, registry):
    scheme = ws.FallbackScheme([ws.DiskScheme(str(tmp_path / name)) for name in ("a", "b")])
    with scheme.create_sender(weights(1), listeners=[Prometheus(registry)]) as sender:
        sender.connect(WAIT)
        assert not sender.update_weights(version=1).fell_back
    families = {family.name: family.samples for family in registry.collect()}
    assert families["weightsync_fallbacks"] == []


def test_subscribed_twice_counts_once(pair, seen, registry):
    sender, _ = pair
    sender.subscribe(Prometheus(registry))
    sender.update_weights(version=1)
    assert seen("updates_total", side="sender") == 1


def test_runs_of_one_process_are_told_apart(pair, seen, registry, tmp_path):
    sender, receiver = pair
    scheme = ws.DiskScheme(str(tmp_path / "other"))
    with scheme.create_sender(weights(2), listeners=[Prometheus(registry)]) as other:
        other.connect(WAIT)
        other.update_weights(version=5)
        sender.update_weights(version=7)
        labels = {"side": "sender", "scheme": "disk", "run": scheme.where(), "receiver": ""}
        assert registry.get_sample_value("weightsync_version", labels) == 5
        assert seen("version", side="sender", receiver="") == 7
    assert receiver.version is None


def test_a_stream_is_seen_too(ends, seen, registry):
    sender = ends.sender(weights(1))
    sender.update_weights(version=3)

    async def take(receiver):
        return [name async for name, _ in receiver.stream(WAIT)]

    with StreamReceiver(ends.scheme(), id="s", listeners=[Prometheus(registry)]) as receiver:
        asyncio.run(take(receiver))
        assert seen.all("version", side="receiver") == {"s": 3}
    assert seen.all("version", side="receiver") == {}


def test_without_a_registry_it_is_the_one_that_is_served(ends):
    sender = ends.sender(weights(1), listeners=[Prometheus(), Prometheus()])
    sender.update_weights(version=1)
    assert f'run="shm://{ends.path}"' in generate_latest(REGISTRY).decode()


def test_names_that_are_taken_are_said(registry):
    Counter("weightsync_updates", "somebody else's", registry=registry)
    with pytest.raises(ValueError, match="weightsync_updates"):
        Prometheus(registry)


def test_a_token_is_no_label():
    scheme = ws.NCCLScheme(master_address="10.0.0.5", master_port=29500, token="hush")
    both = ws.FallbackScheme([scheme, ws.DiskScheme("s3://user:hush@bucket/run")])
    assert scheme.where() == "nccl://10.0.0.5:29500"
    assert "hush" not in both.where()
    assert both.where().startswith("fallback://nccl://10.0.0.5:29500,disk://")


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'weightsync\[prometheus\]'"):
        Prometheus()
