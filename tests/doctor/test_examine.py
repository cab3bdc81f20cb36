"""How checks are run: all of them, each with a deadline, and none that can spoil the others."""

import threading

import weightsync as ws
from weightsync.doctor import Finding, Subject, examine
from weightsync.doctor.examine import CHECKS, Check

FINE = Check("fine", lambda subject: Finding("fine", "ok", "it is"))


def crash(subject):
    raise RuntimeError("no such luck")


def test_a_check_that_crashes_is_a_finding_and_the_others_stand():
    found = examine(Subject(), [Check("unlucky", crash), FINE])
    assert [finding.state for finding in found] == ["problem", "ok"]
    assert "RuntimeError: no such luck" in found[0].words
    assert found[0].remedy


def test_a_check_that_hangs_is_given_up():
    over = threading.Event()
    found = examine(Subject(), [Check("slow", lambda s: over.wait(30), seconds=0.1), FINE])
    over.set()
    assert [finding.state for finding in found] == ["problem", "ok"]
    assert "did not return within 0.1 s" in found[0].words


def test_a_path_that_cannot_be_used_is_named_in_the_remedy(tmp_path):
    (room,) = examine(Subject(str(tmp_path / "no/run")), [c for c in CHECKS if c.name == "room"])
    assert room.state == "problem"
    assert str(tmp_path / "no/run") in room.remedy


def test_of_a_scheme_only_what_matters_for_it_is_looked_at():
    def looked(scheme):
        found = []
        checks = [
            Check(c.name, lambda s, c=c: found.append(c.name) or [], c.schemes) for c in CHECKS
        ]
        examine(Subject(scheme=scheme), checks)
        return set(found)

    shm, disk = ws.DoubleBufferScheme("/dev/shm/x"), ws.DiskScheme("/dev/shm/y")
    store = ws.DiskScheme("memory://x/y")
    nccl = ws.NCCLScheme(backend="gloo")
    assert {"room", "locks"} <= looked(shm)
    assert "ports" not in looked(shm)
    assert {"ports", "host name"} <= looked(nccl)
    assert "locks" not in looked(nccl)
    assert "mapping" not in looked(disk)
    assert looked(store) == {"object store"} | (looked(disk) - {"room", "locks"})
    assert looked(ws.FallbackScheme([nccl, disk])) == looked(nccl) | looked(disk)


def test_what_is_the_same_for_all_schemes_of_a_fallback_is_said_once():
    scheme = ws.FallbackScheme([ws.NCCLScheme(backend="gloo"), ws.DiskScheme("/dev/shm/y")])
    assert examine(Subject(scheme=scheme), [FINE]) == [Finding("fine", "ok", "it is")]


def test_every_remedy_is_a_sentence_and_every_ailment_has_one():
    for finding in examine(Subject(nbytes=1 << 60)):
        assert (finding.remedy is not None) == (finding.state in ("problem", "warning"))
        assert finding.remedy is None or finding.remedy.endswith(".")
