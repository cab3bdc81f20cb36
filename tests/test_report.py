import json

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
