"""What OpenTelemetry sees of updates."""

import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import weightsync as ws
from tests.fakes import fake, weights
from weightsync.metrics import OpenTelemetry


class Spans:
    """A provider of tracers, and what its tracers made."""

    def __init__(self):
        self.provider = TracerProvider(shutdown_on_exit=False)
        self._memory = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._memory))

    def all(self):
        return self._memory.get_finished_spans()

    def one(self, name):
        (span,) = [span for span in self.all() if span.name == name]
        return span

    def below(self, span):
        """Names and spans of the children, in order."""
        found = [s for s in self.all() if s.parent and s.parent.span_id == span.context.span_id]
        return {child.name: child for child in sorted(found, key=lambda child: child.start_time)}


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


@pytest.fixture
def spans():
    return Spans()


@pytest.fixture
def pair(ends, spans):
    options = {"listeners": [OpenTelemetry(spans.provider)]}
    return ends.pair(weights(1), fake(), sender=options, receiver={"id": "r", **options})


def test_an_update_is_a_span_with_its_phases_below(pair, spans):
    sender, receiver = pair
    report = sender.update_weights(version=4)
    applied = receiver.poll_and_apply()

    sent = spans.one("weightsync send")
    assert sent.attributes == {
        "weightsync.version": str(report.version),
        "weightsync.scheme": "shm",
        "weightsync.run": f"shm://{sender.scheme.path}",
        "weightsync.bytes": report.nbytes,
        "weightsync.tensors": report.tensors,
        "weightsync.skipped": False,
    }
    assert seconds(sent) == pytest.approx(report.seconds.total, abs=1e-5)
    extract, transfer = spans.below(sent).values()
    assert (extract.name, transfer.name) == ("extract", "transfer")
    assert seconds(extract) == pytest.approx(report.seconds.extract, abs=1e-5)
    assert seconds(transfer) == pytest.approx(report.seconds.transfer, abs=1e-5)
    assert extract.start_time == sent.start_time
    assert transfer.end_time <= sent.end_time

    got = spans.one("weightsync apply")
    assert got.attributes["weightsync.receiver"] == "r"
    assert got.attributes["weightsync.version"] == str(report.version)
    stage, pause = spans.below(got).values()
    assert (stage.name, pause.name) == ("stage", "pause")
    assert seconds(pause) == pytest.approx(applied.seconds.pause, abs=1e-5)
    assert pause.end_time <= got.end_time
    assert got.status.is_ok


def test_the_callers_span_is_above(pair, spans):
    sender, _ = pair
    tracer = spans.provider.get_tracer("trainer")
    with tracer.start_as_current_span("step") as step:
        sender.update_weights(version=1)
        assert trace.get_current_span() is step
    assert "weightsync send" in spans.below(spans.one("step"))


def test_an_error_is_recorded_in_the_span_of_its_update(pair, spans):
    sender, receiver = pair
    version = sender.update_weights(version=1).version
    receiver.engine.fail["load"] = ws.CorruptError("a bit fell over")
    with pytest.raises(ws.CorruptError):
        receiver.poll_and_apply()
    span = spans.one("weightsync apply")
    assert not span.status.is_ok
    assert span.status.description == "CorruptError: a bit fell over"
    (event,) = span.events
    assert event.attributes["exception.message"] == "a bit fell over"
    assert span.attributes["weightsync.version"] == str(version)
    assert list(spans.below(span)) == ["stage", "pause"]


def test_without_the_package_nothing_happens(ends, monkeypatch, caplog):
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    sender = ends.sender(weights(1), listeners=[OpenTelemetry()])
    sender.update_weights(version=1)
    assert caplog.messages == []
