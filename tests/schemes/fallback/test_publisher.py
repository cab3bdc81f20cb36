"""The trainer's end: what fails, what is used instead, whom it reaches, and what is said of it."""

import contextlib
import os
import re
import shutil
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from tests.schemes.fallback import toy
from weightsync.deadline import Deadline
from weightsync.engines.module import ModuleEngine
from weightsync.files import Directory
from weightsync.manifest import Manifest
from weightsync.schemes.double_buffer.generation import Filling
from weightsync.weight import Weight


def weights(value):
    return {"a": torch.full((30,), float(value)), "b": torch.full((2, 2), value)}


class Counting(ModuleEngine):
    """Knows which versions were loaded into it."""

    def __init__(self, target):
        super().__init__(target)
        self.applied = []

    def apply(self, update, deadline):
        super().apply(update, deadline)
        self.applied.append(update.version.number)


def following(two, id, scheme=None):
    """A receiver that applies whatever comes."""
    receiver = two.receiver(Counting(weights(0)), scheme=scheme, id=id)
    receiver.follow()
    return receiver


def value_of(receiver):
    with receiver.hold():
        return int(receiver.engine.target["b"][0, 0])


def states(report):
    return {r.receiver: (r.state, r.version and r.version.number) for r in report.receivers}


def update(sender, number, value=None, **options):
    options.setdefault("wait", "applied")
    sent = weights(number if value is None else value)
    return sender.update_weights(sent, version=number, **options)


# -------------------------------------------------------------------- the first that works


def test_the_first_scheme_is_used_while_it_works(two):
    sender, receiver = two.sender(), following(two, "r")
    for number in 1, 2, 3:
        report = update(sender, number)
        assert (report.scheme, report.notes) == ("fallback:toy", ())
        assert states(report) == {"r": ("applied", number)}
        assert value_of(receiver) == number
    assert toy.ASKED == ["one"] * 3


@contextlib.contextmanager
def parent_missing(two):
    object.__setattr__(two.one, "path", f"{two.path}/deep/one")
    yield "deep"


@contextlib.contextmanager
def a_file_in_its_place(two):
    open(two.one.path, "w").close()
    yield "not a directory"
    os.unlink(two.one.path)


@contextlib.contextmanager
def owned_by_another(two):
    with two.one.create_sender() as other:
        other.connect()
        yield f"SenderBusyError.*pid {os.getpid()}"


@pytest.mark.parametrize("broken", [parent_missing, a_file_in_its_place, owned_by_another])
def test_a_scheme_that_cannot_be_opened(two, broken):
    with broken(two) as words:
        sender, receiver = two.sender(), following(two, "r")
        report = update(sender, 1)
        assert report.scheme == "fallback:toy#2"
        assert_notes(report, f"toy is left aside: .*{words}")
        assert value_of(receiver) == 1
        sender.shutdown()
        receiver.shutdown()


def assert_notes(report, *patterns):
    assert len(report.notes) == len(patterns), report.notes
    for note, pattern in zip(report.notes, patterns, strict=True):
        assert re.search(pattern, note), note


def removed(two, monkeypatch):
    shutil.rmtree(two.one.path)
    return "WeightSyncError.*removed while the sender"


def full(two, monkeypatch):
    real = Directory.free_bytes

    def free_bytes(directory):
        return 100 if directory.path == two.one.path else real(directory)

    monkeypatch.setattr(Directory, "free_bytes", free_bytes)
    return "NoRoomError.*100 are free"


def raises(error, words):
    def fault(two, monkeypatch):
        toy.FAULTS["one"] = toy.raising(error)
        return words

    return fault


def hangs(two, monkeypatch):
    toy.FAULTS["one"] = toy.hanging
    return "DeadlineError: nobody answered"


@pytest.mark.parametrize(
    "fault",
    [
        removed,
        full,
        hangs,
        raises(ws.WeightSyncError("the network is down"), "WeightSyncError: the network is down"),
        raises(OSError("stale file handle"), "OSError: stale file handle"),
        raises(ConnectionResetError("reset"), "ConnectionResetError: reset"),
        raises(NotImplementedError("no such device"), "NotImplementedError: no such device"),
        raises(RuntimeError("NCCL error"), "RuntimeError: NCCL error"),
    ],
)
def test_a_scheme_that_fails(two, monkeypatch, fault):
    """The same call goes on with the next one; the receiver follows, and takes it once."""
    scheme = two.scheme(attempt_timeout=0.2)
    sender, receiver = two.sender(scheme=scheme), following(two, "r", scheme)
    words = fault(two, monkeypatch)
    report = update(sender, 1)
    assert report.scheme == "fallback:toy#2"
    assert_notes(report, f"toy failed: {words}")
    assert states(report) == {"r": ("applied", 1)}
    report = update(sender, 2)
    assert report.scheme == "fallback:toy#2"
    assert_notes(report, f"toy is left aside: {words}")
    assert value_of(receiver) == 2
    assert receiver.engine.applied == [1, 2]
    assert toy.ASKED == ["one", "two", "two"]
    toy.FAULTS.clear()


def test_a_share_of_the_time(two):
    """Without attempt_timeout each gets an equal share of what is left."""
    seen = []

    def slow(publish, version, deadline, receivers):
        seen.append(deadline.remaining)
        toy.hanging(publish, version, deadline, receivers)

    def watched(publish, version, deadline, receivers):
        seen.append(deadline.remaining)
        return publish()

    toy.FAULTS.update(one=slow, two=watched)
    sender = two.sender()
    update(sender, 1, timeout=0.4, wait="published")
    assert 0.15 < seen[0] <= 0.2
    assert 0.1 < seen[1] <= 0.2


def test_none_works(two):
    """All reasons are said; the next call tries them all again."""
    sender, receiver = two.sender(), following(two, "r")
    toy.FAULTS["one"] = toy.raising(OSError("a cable"))
    toy.FAULTS["two"] = toy.raising(ws.WeightSyncError("a switch"))
    with pytest.raises(ws.WeightSyncError, match=r"toy: OSError: a cable; toy#2: .*a switch"):
        update(sender, 1)
    toy.FAULTS.clear()
    assert update(sender, 1).scheme == "fallback:toy"
    assert value_of(receiver) == 1


def test_a_number_that_failed_is_not_given_to_other_weights(two):
    """It may have reached an engine, which would take what comes next for the same."""
    sender, receiver = two.sender(), two.receiver(Counting(weights(0)), id="r")

    def fault(publish, version, deadline, receivers):
        publish()
        raise OSError("a cable")

    toy.FAULTS.update(one=fault, two=toy.raising(OSError("a switch")))
    with pytest.raises(ws.WeightSyncError, match="a switch"):
        sender.update_weights(weights(1))
    assert receiver.poll_and_apply(WAIT).version.number == 0
    toy.FAULTS.clear()
    sender.update_weights(weights(2))
    assert receiver.poll_and_apply(WAIT).version.number == 1
    assert value_of(receiver) == 2


@pytest.mark.parametrize("error", [ws.DeadlineError, ws.NoRoomError, ws.SenderBusyError])
def test_errors_that_agree_stay_of_their_kind(two, error):
    toy.FAULTS["one"] = toy.FAULTS["two"] = toy.raising(error("why"))
    with pytest.raises(error, match=r"toy: .*why; toy#2: .*why"):
        update(two.sender(), 1)


def test_none_can_be_opened(two):
    with two.one.create_sender() as one, two.other.create_sender() as other:
        one.connect()
        other.connect()
        with pytest.raises(ws.SenderBusyError, match=r"toy: .*/one: .*; toy#2: .*/two: "):
            two.scheme().create_sender().connect(timeout=0.2)


def test_what_is_wrong_with_the_call_is_said_at_once(two):
    sender = two.sender()
    update(sender, 5, wait="published")
    toy.ASKED.clear()
    with pytest.raises(ws.VersionError, match="older"):
        update(sender, 4)
    with pytest.raises(ws.SourceError, match=r"'m'.*meta"):
        sender.update_weights({"m": torch.zeros(3, device="meta")}, version=6)
    assert toy.ASKED == []
    with pytest.raises(ws.VersionError, match="other weights"):
        update(sender, 5, value=1)
    assert toy.ASKED == ["one"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TypeError])
def test_interrupts_and_bugs_are_no_faults_of_a_scheme(two, error):
    toy.FAULTS["one"] = toy.raising(error())
    sender = two.sender()
    with pytest.raises(error):
        update(sender, 1, wait="published")
    assert toy.ASKED == ["one"]
    toy.FAULTS.clear()
    assert update(sender, 2, wait="published").scheme == "fallback:toy"


def test_a_version_that_is_skipped_is_no_fault(two):
    two.one = toy.ToyScheme(two.one.path, slots=2, on_busy="skip")
    sender, receiver = two.sender(), two.receiver(weights(0), id="r")
    update(sender, 1, wait="published")
    receiver.poll_and_apply(WAIT)
    update(sender, 2, wait="published")
    report = update(sender, 3, wait="published")  # the receiver still holds 1
    assert (report.skipped, report.scheme) == (True, "fallback:toy")
    assert toy.ASKED == ["one"] * 3
    receiver.poll_and_apply(WAIT)
    report = update(sender, 3, wait="published")
    assert (report.skipped, report.scheme, report.notes) == (False, "fallback:toy", ())


# -------------------------------------------------------------------- back to the first


@pytest.fixture
def clock(monkeypatch):
    """Moves the clock by which a scheme that failed is tried again."""
    now = [1000.0]
    monkeypatch.setattr("weightsync.schemes.fallback.faults.monotonic", lambda: now[0])

    def forward(seconds):
        now[0] += seconds

    return forward


def test_a_scheme_that_failed_is_tried_again_later(two, clock):
    sender, receiver = two.sender(), following(two, "r")
    toy.FAULTS["one"] = toy.raising(OSError("a cable"))
    for number, seconds, asked in [(1, 0, "one two"), (2, 59, "two"), (3, 2, "one two")]:
        clock(seconds)
        toy.ASKED.clear()
        assert update(sender, number).scheme == "fallback:toy#2"
        assert asked.split() == toy.ASKED
    toy.FAULTS.clear()
    clock(59)
    assert update(sender, 4).scheme == "fallback:toy#2"
    clock(2)
    report = update(sender, 5)
    assert (report.scheme, report.notes, report.changed) == ("fallback:toy", (), None)
    assert receiver.engine.applied == [1, 2, 3, 4, 5]


def test_what_changed_is_not_counted_over_versions_that_went_another_way(two, clock):
    """The scheme knows only what it sent itself: between 1 and 3 nothing changed, to 2 much."""
    sender = two.sender()
    changed = []
    for number, value in [(1, 5), (2, 6), (3, 5), (4, 5)]:
        toy.FAULTS.pop("one", None)
        if number == 2:
            toy.FAULTS["one"] = toy.raising(OSError("a cable"))
        clock(61)
        changed.append(update(sender, number, value, wait="published").changed)
    assert changed == [None, None, None, 0]


def test_a_directory_that_was_removed_is_made_again(two, clock):
    sender, receiver = two.sender(), following(two, "r")
    first = update(sender, 1).version
    shutil.rmtree(two.one.path)
    assert update(sender, 2).scheme == "fallback:toy#2"
    clock(61)
    for number in 3, 4:
        report = update(sender, number)
        assert report.version == (first.epoch, number)
        assert states(report) == {"r": ("applied", number)}
    assert report.scheme == "fallback:toy"
    assert receiver.engine.applied == [1, 2, 3, 4]


def test_one_that_could_not_be_opened_joins_later(two, clock):
    """In the epoch of the others, so that versions stay ordered."""
    other = two.one.create_sender()
    other.connect()
    sender, receiver = two.sender(), following(two, "r")
    first = update(sender, 1)
    other.shutdown()
    clock(61)
    second = update(sender, 2)
    assert second.scheme.startswith("fallback:toy")
    assert second.version == (first.version.epoch, 2)
    assert receiver.engine.applied == [1, 2]
    assert update(sender, 3).scheme == "fallback:toy"


def test_a_run_that_has_seen_a_later_sender_stays_out(two, clock):
    """What this sender wrote there would be older than what is there already."""
    two.one = toy.ToyScheme(two.one.path, keep_files=True)
    other = two.one.create_sender(weights(7))
    other.connect()
    sender = two.sender()
    time.sleep(0.01)
    other.shutdown()
    later = two.one.create_sender(weights(8))
    later.connect()
    later.update_weights(version=1)
    later.shutdown()
    for number in 1, 2:
        clock(61)
        report = update(sender, number, wait="published")
        assert report.scheme == "fallback:toy#2"
        assert_notes(report, "toy failed: VersionError: .*has seen a sender of epoch")
    shutil.rmtree(two.one.path)


def test_all_schemes_are_in_the_latest_epoch(two):
    """A run that saw a clock ahead sets the epoch of all."""
    two.other = toy.ToyScheme(two.other.path, keep_files=True, slots=3)
    with two.other.create_sender(weights(1)) as ahead:
        ahead.connect()
        ahead._publisher.open(Deadline(1), epoch=1 << 50)
        ahead._epoch = 1 << 50
        ahead.update_weights(version=1)
    two.other = toy.ToyScheme(two.other.path, slots=3)
    sender, receiver = two.sender(), following(two, "r")
    report = update(sender, 1)
    assert report.version.epoch == (1 << 50) + 1
    assert report.scheme == "fallback:toy"
    assert states(report) == {"r": ("applied", 1)}
    toy.FAULTS["one"] = toy.raising(OSError("a cable"))
    assert states(update(sender, 2)) == {"r": ("applied", 2)}
    assert receiver.engine.applied[-2:] == [1, 2]


def test_connect_again_keeps_the_epoch(two):
    sender = two.sender()
    first = update(sender, 1, wait="published")
    sender.connect()
    assert update(sender, 2, wait="published").version == (first.version.epoch, 2)


def test_connect_again_after_a_directory_was_removed(two):
    sender, receiver = two.sender(), following(two, "r")
    first = update(sender, 1)
    shutil.rmtree(two.one.path)
    sender.connect()
    second = update(sender, 1)
    assert second.scheme.startswith("fallback:toy")
    assert second.version.epoch > first.version.epoch
    assert receiver.engine.applied == [1, 1]


def test_room_is_taken_in_one_scheme_only(two):
    sender = two.sender(weights(1))
    sizes = [os.path.exists(f"{scheme.path}/generation-0001") for scheme in (two.one, two.other)]
    assert sizes == [True, False]
    sender.shutdown()


def test_too_little_room_is_found_while_connecting(two, monkeypatch):
    words = full(two, monkeypatch)
    sender = two.sender(weights(1))
    report = sender.update_weights(version=1)
    assert report.scheme == "fallback:toy#2"
    assert_notes(report, f"toy is left aside: {words}")
    sender.shutdown()
    monkeypatch.setattr(Directory, "free_bytes", lambda directory: 100)
    with pytest.raises(ws.NoRoomError, match=r"toy: .*100 are free.*; toy#2: .*100 are free"):
        two.sender(weights(1))


# -------------------------------------------------------------------- whom it reaches


def losing(*ids, state="waiting", then=lambda: None):
    """Hand a version to all receivers but these, and say that they were lost."""

    def fault(publish, version, deadline, receivers):
        reached = [id for id in receivers or ("a", "b") if id not in ids]
        published = publish(reached)
        then()
        lost = [ws.ReceiverReport(id, state, error="lost on the way") for id in ids]
        return replace(published, failures=tuple(lost))

    return fault


def test_receivers_that_were_lost_on_the_way_get_it_by_the_next(two):
    sender, a, b = two.sender(), following(two, "a"), following(two, "b")
    toy.FAULTS["one"] = losing("b")
    for number in 1, 2:
        report = update(sender, number)
        assert report.scheme == "fallback:toy+toy#2"
        assert states(report) == {"a": ("applied", number), "b": ("applied", number)}
    assert (value_of(a), value_of(b)) == (2, 2)
    assert a.engine.applied == b.engine.applied == [1, 2]
    toy.FAULTS.clear()
    assert update(sender, 3).scheme == "fallback:toy"  # it was not the scheme that failed


def test_a_receiver_that_was_given_up_and_has_it_all_the_same(two):
    """Only its word came late."""
    sender = two.sender()
    following(two, "a")
    following(two, "b")

    def fault(publish, version, deadline, receivers):
        published = publish()
        assert deadline.wait(lambda: all(r.version == version for r in sender.receivers()) or None)
        return replace(published, failures=(ws.ReceiverReport("b", "waiting", error="late"),))

    toy.FAULTS["one"] = fault
    report = update(sender, 1)
    assert (report.scheme, toy.ASKED) == ("fallback:toy", ["one"])
    assert states(report) == {"a": ("applied", 1), "b": ("applied", 1)}


def test_a_receiver_that_is_lost_in_both_ways(two):
    sender, a = two.sender(), following(two, "a")
    following(two, "b")
    toy.FAULTS["one"] = toy.FAULTS["two"] = losing("b")
    with pytest.raises(ws.ReceiverError, match=r"'b'.*lost on the way") as caught:
        update(sender, 1)
    assert states(caught.value.report) == {"b": ("waiting", None), "a": ("applied", 1)}
    assert value_of(a) == 1


def test_a_receiver_that_has_died_is_not_sent_anything_more(two):
    sender = two.sender()
    following(two, "a")
    gone = following(two, "b")
    toy.FAULTS["one"] = losing("b", state="dead", then=gone.shutdown)
    with pytest.raises(ws.ReceiverError, match=r"'b'.*lost on the way") as caught:
        update(sender, 1)
    assert states(caught.value.report) == {"b": ("dead", None), "a": ("applied", 1)}
    assert toy.ASKED == ["one"]


def test_a_receiver_that_only_the_second_leads_to(two):
    sender, both = two.sender(), following(two, "both")
    apart = following(two, "apart", two.other)
    for number in 1, 2:
        report = update(sender, number)
        assert report.scheme == "fallback:toy+toy#2"
        assert report.notes == ()
        assert states(report) == {"both": ("applied", number), "apart": ("applied", number)}
    assert both.engine.applied == apart.engine.applied == [1, 2]
    toy.ASKED.clear()
    report = update(sender, 3, receivers=["both"])
    assert (report.scheme, toy.ASKED) == ("fallback:toy", ["one"])
    assert states(report) == {"both": ("applied", 3)}
    report = update(sender, 4, receivers=["apart"])
    assert states(report) == {"apart": ("applied", 4)}
    assert both.engine.applied == [1, 2, 3]
    assert apart.engine.applied == [1, 2, 4]


def test_a_receiver_that_only_a_broken_scheme_leads_to(two):
    """It is said, and waited for no longer than it takes to say so."""
    sender = two.sender()
    following(two, "both")
    following(two, "apart", two.one)
    toy.FAULTS["one"] = toy.raising(OSError("a cable"))
    report = update(sender, 1, wait="published")
    assert_notes(
        report, "toy failed: OSError: a cable", "'apart' is not reached: .*toy only.*a cable"
    )
    began = time.monotonic()
    with pytest.raises(ws.ReceiverError, match=r"'apart'.*toy only.*a cable") as caught:
        update(sender, 2)
    assert time.monotonic() - began < WAIT / 2
    assert states(caught.value.report) == {"both": ("applied", 2), "apart": ("waiting", None)}


def test_updates_for_some(two):
    """H5, while the first scheme fails at every other update."""
    two.one, two.other = (toy.ToyScheme(s.path, slots=4) for s in (two.one, two.other))
    scheme = two.scheme(retry_after=0)
    sender = two.sender(scheme=scheme)
    ids = ("a", "b", "c")
    receivers = {id: following(two, id, scheme) for id in ids}
    last = dict.fromkeys(ids, 0)
    for number in range(1, 25):
        toy.FAULTS.clear()
        if number % 2:
            toy.FAULTS["one"] = toy.raising(OSError("a cable"))
        one = ids[number // 3 % 3]
        chosen = [None, [one], [id for id in ids if id != one]][number % 3]
        report = update(sender, number, receivers=chosen, timeout=5)
        for id in chosen or ids:
            last[id] = number
            assert states(report)[id] == ("applied", number)
        assert {id: value_of(receiver) for id, receiver in receivers.items()} == last
    for receiver in receivers.values():
        assert receiver.engine.applied == sorted(set(receiver.engine.applied))


# -------------------------------------------------------------------- never twice


def after_it_was_applied(sender, ids, number, error):
    """Publish, wait until receivers have said that they hold it, and fail then."""

    def fault(publish, version, deadline, receivers):
        publish()

        def all_hold_it():
            held = [r.version and r.version.number for r in sender.receivers() if r.receiver in ids]
            return held == [number] * len(ids) or None

        assert deadline.wait(all_hold_it)
        raise error

    return fault


def test_what_was_applied_is_not_sent_again_because_its_way_broke(two):
    sender, a, b = two.sender(), following(two, "a"), following(two, "b")
    toy.FAULTS["one"] = after_it_was_applied(sender, "ab", 1, OSError("a cable"))
    report = update(sender, 1)
    assert toy.ASKED == ["one"]
    assert report.scheme == "fallback:toy"
    assert_notes(report, "toy failed: OSError: a cable", "every receiver has it all the same")
    assert states(report) == {"a": ("applied", 1), "b": ("applied", 1)}
    assert report.nbytes == 30 * 4 + 4 * 8
    assert update(sender, 2).scheme == "fallback:toy#2"
    assert a.engine.applied == b.engine.applied == [1, 2]


def test_who_has_it_is_not_among_those_it_is_sent_to_again(two):
    sender, a, b = two.sender(), following(two, "a"), two.receiver(Counting(weights(0)), id="b")
    addressed = []

    def second(publish, version, deadline, receivers):
        addressed.append(receivers)
        return publish()

    toy.FAULTS.update(one=after_it_was_applied(sender, "a", 1, OSError("a cable")), two=second)
    update(sender, 1, wait="published")
    assert addressed == [["b"]]
    assert b.poll_and_apply(WAIT).version.number == 1
    assert b.poll_and_apply() is None
    assert a.engine.applied == b.engine.applied == [1]


def test_the_first_copy_comes_when_the_second_was_applied(two):
    """A late copy is no new version, whoever asks."""
    sender, receiver = two.sender(), following(two, "r")
    late = []

    def fault(publish, version, deadline, receivers):
        late.append(publish)
        raise ws.DeadlineError("it will come later")

    toy.FAULTS["one"] = fault
    update(sender, 1)
    late[0]()
    with receiver.hold():
        assert receiver._subscriber._links[0].newest().number == 1
    assert receiver.poll_and_apply(0.1) is None
    assert receiver.engine.applied == [1]
    assert update(sender, 2).scheme == "fallback:toy#2"
    assert receiver.engine.applied == [1, 2]


def test_two_threads_that_see_two_copies_apply_one(two):
    scheme = two.scheme(retry_after=0)
    sender, receiver = two.sender(scheme=scheme), following(two, "r", scheme)

    def fault(publish, version, deadline, receivers):
        publish()
        raise ws.DeadlineError("too late")

    toy.FAULTS["one"] = fault
    for number in range(1, 20):
        with receiver.hold():  # both copies are there before anybody may apply one
            update(sender, number, wait="published")
        receiver.poll_and_apply(0.01)
        assert value_of(receiver) == number
    assert receiver.engine.applied == list(range(1, 20))


# -------------------------------------------------------------------- answers


class Failing(Counting):
    """Refuses its first update."""

    def apply(self, update, deadline):
        if not self.applied:
            self.applied.append("refused")
            raise RuntimeError("no memory")
        super().apply(update, deadline)


def test_an_answer_to_the_first_attempt_is_none_to_the_second(two):
    """The engine failed with what came one way; what it makes of the other copy is what counts."""
    sender = two.sender()
    receiver = two.receiver(Failing(weights(0)), id="r")

    def fault(publish, version, deadline, receivers):
        publish()
        with pytest.raises(RuntimeError, match="no memory"):
            receiver.poll_and_apply(WAIT)
        raise OSError("a cable")

    def second(publish, version, deadline, receivers):
        published = publish()
        threading.Timer(0.3, receiver.follow).start()  # the sender waits for it by then
        return published

    toy.FAULTS.update(one=fault, two=second)
    report = update(sender, 1)
    assert states(report) == {"r": ("applied", 1)}
    assert receiver.engine.applied == ["refused", 1]


def test_an_engine_that_fails_is_told_of(two):
    """C1, by the second scheme."""
    sender = two.sender()
    receiver = two.receiver(Failing(weights(0)), id="r")
    toy.FAULTS["one"] = toy.raising(OSError("a cable"))
    receiver.follow()
    with pytest.raises(ws.ReceiverError, match=r"'r'.*no memory"):
        update(sender, 1)
    assert states(update(sender, 2)) == {"r": ("applied", 2)}


def test_who_does_not_answer_is_late(two):
    sender, a = two.sender(), following(two, "a")
    two.receiver(weights(0), id="lazy")
    with pytest.raises(ws.ReceiverError, match=r"'lazy'.*waiting.*late") as caught:
        update(sender, 1, timeout=0.3)
    assert states(caught.value.report) == {"a": ("applied", 1), "lazy": ("waiting", None)}
    with pytest.raises(ws.ReceiverError, match=r"'nobody'.*never connected"):
        update(sender, 2, timeout=0.3, receivers=["a", "nobody"])
    assert value_of(a) == 2


def test_nobody_is_there_to_answer(two):
    with pytest.raises(ws.DeadlineError, match="no receiver was connected"):
        update(two.sender(), 1, timeout=0.2)


def test_receivers_that_sign_off_are_not_waited_for(two):
    sender, a = two.sender(), following(two, "a")
    going = two.receiver(weights(0), id="going")
    assert {r.receiver for r in sender.receivers()} == {"a", "going"}
    going.shutdown()
    assert {r.receiver for r in sender.receivers()} == {"a"}
    assert states(update(sender, 1)) == {"a": ("applied", 1)}
    assert value_of(a) == 1


def test_a_receiver_is_waited_for_by_name(two):
    sender = two.scheme().create_sender(timeout=WAIT)
    two._made.append(sender)
    with pytest.raises(ws.DeadlineError, match="connected: none"):
        sender.connect(timeout=0.1, receivers=["r"])
    following(two, "r")
    sender.connect(timeout=WAIT, receivers=["r"])
    assert [(r.receiver, r.state) for r in sender.receivers()] == [("r", "connected")]


def test_one_process(two):
    """Attached receivers are driven by the sender, whichever way a version went."""
    sender, receiver = two.sender(), two.receiver(Counting(weights(0)), id="r")
    sender.attach(receiver)
    for number in 1, 2, 3:
        if number == 2:
            toy.FAULTS["one"] = toy.raising(OSError("a cable"))
        assert states(update(sender, number, wait="published")) == {"r": ("applied", number)}
    assert receiver.engine.applied == [1, 2, 3]


# -------------------------------------------------------------------- the same number again


def test_the_same_number_goes_the_same_way(two, clock):
    """Only there it can be told whether the weights are the same."""
    sender = two.sender()
    toy.FAULTS["one"] = toy.raising(OSError("a cable"))
    update(sender, 1, wait="published")
    toy.FAULTS.clear()
    clock(61)
    with pytest.raises(ws.VersionError, match="other weights"):
        update(sender, 1, value=2)
    assert update(sender, 1, wait="published").scheme == "fallback:toy#2"
    toy.FAULTS["two"] = toy.raising(OSError("a cable"))
    with pytest.raises(ws.WeightSyncError, match=r"once more, the way it went before: .*a cable"):
        update(sender, 1, wait="published")
    assert update(sender, 2, wait="published").scheme == "fallback:toy"


# -------------------------------------------------------------------- weights that are read again


def breaking(two, monkeypatch):
    """The first scheme fails after it has read one tensor."""
    real = Filling.write_stream

    def write_stream(filling, *rest):
        if two.one.path in filling.generation.directory.path:
            next(filling.inventory.stream())
            raise OSError("a cable")
        return real(filling, *rest)

    monkeypatch.setattr(Filling, "write_stream", write_stream)


def test_a_stream_that_starts_afresh_is_sent_again(two, monkeypatch):
    sender, receiver = two.sender(), following(two, "r")
    breaking(two, monkeypatch)
    stream = weights(1)
    report = sender.update_weights(lambda: iter(stream.items()), version=1, wait="applied")
    assert report.scheme == "fallback:toy#2"
    assert value_of(receiver) == 1


def manifest():
    return Manifest.build([(n, t.dtype, t.shape) for n, t in weights(0).items()])


def test_a_one_shot_iterator_cannot_be_sent_again(two, monkeypatch):
    """The error says so; nothing is visible, and no scheme is blamed for it."""
    sender = two.sender(manifest=manifest())
    breaking(two, monkeypatch)
    words = r"toy failed: OSError: a cable; toy#2: .*one-shot iterator.*callable"
    with pytest.raises(ws.SourceError, match=words):
        sender.update_weights(iter(weights(1).items()), version=1)
    reader = two.scheme().create_subscriber()
    reader.open(Deadline(WAIT))
    assert reader.wait(None, Deadline(0)) is None
    reader.close()
    report = sender.update_weights(iter(weights(2).items()), version=2)
    assert report.scheme == "fallback:toy#2"


def test_a_one_shot_iterator_that_was_not_begun_can(two):
    sender = two.sender(manifest=manifest())
    toy.FAULTS["one"] = toy.raising(OSError("a cable"))
    receiver = following(two, "r")
    report = sender.update_weights(iter(weights(1).items()), version=1, wait="applied")
    assert report.scheme == "fallback:toy#2"
    assert value_of(receiver) == 1


def test_a_one_shot_iterator_reaches_one_way_only(two):
    """The version is visible all the same; whom it did not reach is said."""
    sender = two.sender(manifest=manifest())
    following(two, "both")
    following(two, "apart", two.other)
    report = sender.update_weights(iter(weights(1).items()), version=1)
    assert report.scheme == "fallback:toy"
    assert_notes(report, "toy#2 was of no use: .*one-shot", "'apart' is not reached")


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), OSError("x"), ws.WeightSyncError("x"), ws.SourceError("x")]
)
def test_weights_that_fail_are_no_fault_of_a_scheme(two, error):
    def stream():
        yield from list(weights(1).items())[:1]
        if described:
            raise error
        yield from list(weights(1).items())[1:]
        described.append(True)

    described = []
    sender = two.sender()
    with pytest.raises(type(error), match="x"):
        sender.update_weights(stream, version=1)
    assert toy.ASKED == ["one"]
    assert update(sender, 2, wait="published").scheme == "fallback:toy"


class Cursed(Weight):
    """A tensor that cannot be made."""

    dtype = torch.float32
    shape = (3,)

    def read(self):
        raise RuntimeError("out of memory")


def test_a_tensor_that_cannot_be_made_is_no_fault_of_a_scheme(two):
    with pytest.raises(RuntimeError, match="out of memory"):
        two.sender().update_weights({"a": torch.ones(3), "b": Cursed()}, version=1)
    assert toy.ASKED == ["one"]


def test_memory_stays_bounded(two, monkeypatch):
    """G6, in the second attempt as well: a tensor is let go before the next one is made."""
    alive, most = [], []

    def stream():
        for number in range(20):
            tensor = torch.full((1000,), float(number))
            alive.append(weakref.ref(tensor))
            most.append(sum(ref() is not None for ref in alive))
            yield f"t{number}", tensor
            del tensor

    breaking(two, monkeypatch)
    sender = two.sender()
    assert sender.update_weights(stream, version=1).scheme == "fallback:toy#2"
    assert max(most) <= 2
