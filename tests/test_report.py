import json
from dataclasses import replace

from weightsync.report import ReceiverReport, Seconds, SyncReport
from weightsync.version import Version


def test_a_receivers_report_says_who_where_and_why():
    text = str(ReceiverReport("r1", "failed", error="no nccl", host="node7", pid=42))
    for words in ("'r1'", "node7", "42", "failed", "holds no version", "no nccl"):
        assert words in text
    assert "holds 3:7" in str(ReceiverReport("r1", "applied", Version(3, 7)))


def test_a_report_is_plain_json():
    receiver = ReceiverReport("r1", "applied", Version(1, 2), Version(1, 2))
    report = SyncReport(
        Version(1, 2), "shm", 10, 3, None, Seconds(1.0), missing=("a",), receivers=(receiver,)
    )
    values = json.loads(json.dumps(report.to_dict()))
    assert values["version"] == [1, 2]
    assert values["seconds"]["extract"] == 1.0
    assert values["missing"] == ["a"]
    assert values["receivers"][0]["receiver"] == "r1"


def test_a_report_is_flat_numbers_for_a_logger():
    receivers = [
        ReceiverReport("r1", "applied", Version(1, 2)),
        ReceiverReport("r2", "applied", Version(1, 2)),
        ReceiverReport("r3", "rolled back", Version(1, 1)),
    ]
    seconds = Seconds(1.0, 2.0, 3.0, 0.5, 6.5)
    report = SyncReport(Version(1, 2), "shm", 10, 3, 2, seconds, receivers=tuple(receivers), lag=1)
    assert report.metrics("sync_") == {
        "sync_version": 2,
        "sync_bytes": 10,
        "sync_tensors": 3,
        "sync_changed": 2,
        "sync_lag": 1,
        "sync_fallback": 0,
        "sync_skipped": 0,
        "sync_seconds/extract": 1.0,
        "sync_seconds/transfer": 2.0,
        "sync_seconds/apply": 3.0,
        "sync_seconds/pause": 0.5,
        "sync_seconds/total": 6.5,
        "sync_receivers/connected": 0,
        "sync_receivers/applied": 2,
        "sync_receivers/rolled_back": 1,
        "sync_receivers/unusable": 0,
        "sync_receivers/failed": 0,
        "sync_receivers/dead": 0,
        "sync_receivers/waiting": 0,
    }


def test_what_a_report_does_not_know_is_no_metric():
    metrics = SyncReport(Version(1, 2), "shm", 10, 3, None, Seconds(), skipped=True).metrics()
    assert metrics["weightsync/skipped"] == 1
    assert not {"weightsync/changed", "weightsync/lag"} & metrics.keys()
    assert {type(value) for value in metrics.values()} <= {int, float}
    assert not any(name.startswith("weightsync/receivers/") for name in metrics)  # nobody was asked


def test_a_report_is_one_line():
    seconds = Seconds(extract=0.001, transfer=0.25, total=0.2513)
    report = SyncReport(Version(1, 2), "shm", 13_480_000_000, 291, 2, seconds)
    words = "version 1:2 by shm: 291 tensors, 13.48 GB, 251.3 ms (extract 1.0, transfer 250.0)"
    assert str(report) == words
    told = (ReceiverReport("r1", "applied", Version(1, 2)), ReceiverReport("r2", "dead"))
    assert str(replace(report, receivers=told)) == words + "; 1 applied; 1 dead"
    assert "skipped" in str(replace(report, skipped=True))
    assert str(Seconds(total=0.0001)) == "0.1 ms"
