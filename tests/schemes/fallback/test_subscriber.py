"""The inference end: finding what is there, taking the newest, telling everybody."""

import gc
import threading
import time

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from tests.live.processes import eventually
from tests.schemes.fallback import toy
from weightsync.deadline import Deadline
from weightsync.schemes.double_buffer.subscriber import DoubleBufferSubscriber
from weightsync.schemes.fallback.link import Link
from weightsync.schemes.fallback.race import first_snapshot
from weightsync.transport import Snapshot, Subscriber


def weights(value):
    return {"a": torch.full((30,), float(value))}


def value_of(subscriber, version):
    with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
        return int(snapshot.tensor("a")[0])


def states(route):
    return {id: report.state for id, report in route.receivers().items()}


def update(sender, number):
    return sender.update_weights(weights(number), version=number).version


@pytest.fixture
def subscriber(two):
    made = two.scheme().create_subscriber()
    yield made
    made.close()


def searching():
    return [t.name for t in threading.enumerate() if t.name.startswith("weightsync looks")]


class TestFindingSenders:
    def test_there_is_none(self, two, subscriber):
        with pytest.raises(ws.DeadlineError, match=r"through toy, toy#2 within 0\.2 s"):
            subscriber.open(Deadline(0.2))
        eventually(lambda: not searching())

    def test_only_the_second_one_is_there(self, two, subscriber):
        """It works at once; the first one is used as soon as it comes."""
        with two.other.create_sender() as second:
            second.connect()
            subscriber.open(Deadline(WAIT))
            version = update(second, 1)
            assert subscriber.wait(None, Deadline(0)) == version
            assert value_of(subscriber, version) == 1
            with two.one.create_sender() as first:
                first.connect()
                newer = update(first, 2)
                assert subscriber.wait(version, Deadline(WAIT)) == newer
                assert value_of(subscriber, newer) == 2

    def test_waiting_for_what_is_there_is_not_slowed_by_what_is_not(self, two, subscriber):
        with two.other.create_sender() as second:
            second.connect()
            subscriber.open(Deadline(WAIT))
            began = time.monotonic()
            for _ in range(20):
                assert subscriber.wait(None, Deadline(0)) is None
            assert time.monotonic() - began < 1

    def test_both_refuse(self, two):
        """The name is taken: said at once, not at the deadline."""
        sender = two.sender()
        two.receiver(weights(0), id="r")
        began = time.monotonic()
        with pytest.raises(ws.WeightSyncError, match=r"toy: .*'r'.*; toy#2: .*'r'"):
            two.receiver(weights(0), id="r")
        assert time.monotonic() - began < WAIT / 2
        assert [r.receiver for r in sender.receivers()] == ["r"]

    def test_one_refuses(self, two):
        sender = two.sender()
        two.receiver(weights(0), id="r", scheme=two.one)
        two.receiver(weights(0), id="r")
        said = [route.receivers() for route in sender._publisher._routes]
        assert [list(known) for known in said] == [["r"], ["r"]]

    def test_an_id_that_is_none(self, two):
        with pytest.raises(ws.SchemeError, match="id"):
            two.scheme().create_receiver({}, id="../r")

    def test_close_ends_the_search(self, two, subscriber):
        with two.other.create_sender() as second:
            second.connect()
            subscriber.open(Deadline(WAIT))
            eventually(lambda: searching() == ["weightsync looks for toy"])
            subscriber.close()
            subscriber.close()
            with pytest.raises(ws.WeightSyncError, match="not open"):
                subscriber.wait(None, Deadline(0))
            # What was being opened then is not left open.
            with two.one.create_sender() as first:
                first.connect()
                eventually(lambda: not searching())
                assert first.receivers() == []

    def test_one_that_is_let_go_ends_the_search(self, two):
        with two.other.create_sender() as second:
            second.connect()
            subscriber = two.scheme().create_subscriber()
            subscriber.open(Deadline(WAIT))
            assert searching()
            del subscriber
            gc.collect()
            eventually(lambda: not searching())

    def test_open_again(self, two):
        sender = two.sender()
        for _ in range(3):
            receiver = two.receiver(weights(0), id="r")
            eventually(lambda: all(r.receivers() for r in sender._publisher._routes))
            receiver.shutdown()
            assert sender.receivers() == []


class TestVersions:
    def test_the_newest_of_both(self, two, subscriber):
        sender = two.sender()
        subscriber.open(Deadline(WAIT))
        first = update(sender, 1)
        toy.FAULTS["one"] = toy.raising(OSError("a cable"))
        second = update(sender, 2)
        assert subscriber.wait(None, Deadline(WAIT)) == second
        assert subscriber.wait(first, Deadline(0)) == second
        assert subscriber.wait(second, Deadline(0)) is None
        assert (value_of(subscriber, first), value_of(subscriber, second)) == (1, 2)

    def test_one_that_none_holds(self, two, subscriber):
        sender = two.sender()
        subscriber.open(Deadline(WAIT))
        version = update(sender, 1)
        with pytest.raises(ws.VersionGoneError):
            subscriber.snapshot(ws.Version(version.epoch, 9), Deadline(WAIT))

    def test_what_a_former_sender_left_in_one(self, two):
        """A version of an earlier epoch is old, not a clock gone wrong."""
        two.one = toy.ToyScheme(two.one.path, keep_files=True)
        scheme = two.scheme(retry_after=0)
        sender, receiver = two.sender(scheme=scheme), two.receiver(weights(0), scheme=scheme)
        update(sender, 5)
        receiver.poll_and_apply(WAIT)
        sender.shutdown()
        toy.FAULTS["one"] = toy.raising(OSError("a cable"))
        sender = two.sender(scheme=scheme)
        newer = update(sender, 1)
        assert receiver.poll_and_apply(WAIT).version == newer
        assert receiver.poll_and_apply(0.1) is None
        sender.shutdown()  # now the old one is all there is
        assert receiver.poll_and_apply(0.1) is None
        two.one = toy.ToyScheme(two.one.path)
        receiver.shutdown()
        two.sender().shutdown()  # removes what was kept

    def test_an_epoch_from_the_future(self, two, subscriber):
        sender = two.sender()
        subscriber.open(Deadline(WAIT))
        version = update(sender, 1)
        toy.FAULTS["one"] = toy.raising(OSError("a cable"))
        update(sender, 2)
        eventually(lambda: all(link.attached for link in subscriber._links))
        with pytest.raises(ws.ProtocolError, match="clock"):
            subscriber.wait(ws.Version(version.epoch + 1, 0), Deadline(0))

    def test_one_that_is_malformed_is_no_obstacle(self, two, subscriber, caplog):
        sender = two.sender()
        subscriber.open(Deadline(WAIT))
        update(sender, 1)
        with open(f"{two.one.path}/head.json", "w") as head:
            head.write("nonsense")
        toy.FAULTS["one"] = toy.raising(OSError("a cable"))
        version = update(sender, 2)
        assert subscriber.wait(None, Deadline(WAIT)) == version
        assert caplog.text.count("head.json is malformed") == 1
        toy.FAULTS.clear()

    def test_all_are_malformed(self, two, subscriber):
        sender = two.sender()
        subscriber.open(Deadline(WAIT))
        update(sender, 1)
        toy.FAULTS["one"] = toy.raising(OSError("a cable"))
        update(sender, 2)
        for scheme in two.one, two.other:
            with open(f"{scheme.path}/head.json", "w") as head:
                head.write("nonsense")
        with pytest.raises(ws.ProtocolError, match=r"one/head\.json is malformed"):
            subscriber.wait(None, Deadline(WAIT))


class TestCopiesThatAreLost:
    @pytest.fixture
    def unreadable(self, two, monkeypatch):
        """What lies in the first scheme cannot be read."""
        real = DoubleBufferSubscriber.snapshot
        asked = []

        def snapshot(self, version, deadline):
            if self._path == two.one.path:
                asked.append(version.number)
                raise ws.CorruptError("bad memory")
            return real(self, version, deadline)

        monkeypatch.setattr(DoubleBufferSubscriber, "snapshot", snapshot)
        return asked

    def test_the_other_copy_is_taken(self, two, unreadable):
        scheme = two.scheme(retry_after=0)
        sender, receiver = two.sender(scheme=scheme), two.receiver(weights(0), scheme=scheme)

        def fault(publish, version, deadline, receivers):
            publish()
            raise OSError("a cable")

        toy.FAULTS["one"] = fault
        update(sender, 1)
        assert receiver.poll_and_apply(WAIT).version.number == 1

    def test_the_sender_is_told_and_the_receiver_looks_again(self, two, unreadable):
        """No error for a loop that polls: the next version may come another way."""
        sender, receiver = two.sender(), two.receiver(weights(0), id="r")
        receiver.follow(on_error=lambda error: errors.append(error))
        errors = []
        words = "'r'.*connected, holds no version: not received through toy: .*bad memory"
        with pytest.raises(ws.ReceiverError, match=words):
            sender.update_weights(weights(1), version=1, wait="applied")
        assert len(unreadable) == 1
        toy.FAULTS["one"] = toy.raising(OSError("a cable"))
        report = sender.update_weights(weights(2), version=2, wait="applied")
        assert [r.state for r in report.receivers] == ["applied"]
        assert errors == []

    def test_it_is_asked_for_again_after_a_while(self, two, unreadable, monkeypatch):
        monkeypatch.setattr("weightsync.schemes.fallback.link._REST", 0.05)
        sender, receiver = two.sender(), two.receiver(weights(0), id="r")
        update(sender, 1)
        assert receiver.poll_and_apply(0.5) is None
        assert 3 < len(unreadable) < 12

    def test_an_explicit_version(self, two, unreadable):
        sender, receiver = two.sender(), two.receiver(weights(0), id="r")
        version = update(sender, 1)
        with pytest.raises(ws.VersionGoneError, match="bad memory"):
            receiver.apply_weights(version, timeout=1)


class TestAnswers:
    def test_go_to_all(self, two):
        sender, receiver = two.sender(), two.receiver(weights(0), id="r")
        update(sender, 1)
        receiver.poll_and_apply(WAIT)
        for route in sender._publisher._routes:
            eventually(lambda: states(route) == {"r": "applied"})  # noqa: B023

    def test_are_said_again_to_one_that_comes_later(self, two):
        with two.one.create_sender() as obstacle:
            obstacle.connect()
            sender = two.sender(scheme=two.scheme(retry_after=0))
        receiver = two.receiver(weights(0), id="r")
        update(sender, 1)
        eventually(lambda: receiver.poll_and_apply() or receiver.version)
        for route in sender._publisher._routes:
            eventually(lambda: states(route) == {"r": "applied"})  # noqa: B023


class Slow(Subscriber):
    """Takes its time to open, and keeps nothing that is said before."""

    def __init__(self):
        self.go = threading.Event()
        self.log = []

    def open(self, deadline):
        self.log.append("opening")
        self.go.wait(WAIT)
        self.log.append("open")

    def acknowledge(self, report):
        if "open" not in self.log:
            raise ws.WeightSyncError("not open")
        self.log.append(report.state)

    def close(self):
        self.log.append("closed")

    def wait(self, after, deadline):
        raise AssertionError("not reached")

    def snapshot(self, version, deadline):
        raise AssertionError("not reached")


class TestOneThatTakesItsTimeToOpen:
    def test_it_is_told_then_what_was_said_before(self):
        slow, stop = Slow(), threading.Event()
        link = Link("slow", slow)
        link.look_for_sender(stop)
        link.acknowledge(ws.ReceiverReport("r", "applied"))
        assert not link.attached
        slow.go.set()
        eventually(lambda: link.attached)
        assert slow.log == ["opening", "open", "applied"]
        link.close()

    def test_it_is_closed_if_it_opens_after_the_end(self):
        slow, stop = Slow(), threading.Event()
        link = Link("slow", slow)
        link.look_for_sender(stop)
        eventually(lambda: slow.log)
        stop.set()
        link.close()
        slow.go.set()
        eventually(lambda: slow.log == ["opening", "closed", "open", "closed"])
        assert not link.attached

    def test_it_is_opened_on_the_gpu_of_whoever_asked(self, monkeypatch):
        """NCCL takes the current one, which a new thread does not inherit."""
        slow, current = Slow(), threading.local()
        current.gpu = 1
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "gpu", 0))
        monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(current, "gpu", gpu))
        slow.open = lambda deadline: slow.log.append(torch.cuda.current_device())
        link = Link("slow", slow)
        link.look_for_sender(threading.Event())
        eventually(lambda: link.attached)
        assert slow.log == [1]
        link.close()

    def test_it_is_opened_by_one_thread_at_a_time(self):
        slow = Slow()
        link = Link("slow", slow)
        for _ in range(3):
            stop = threading.Event()
            link.look_for_sender(stop)
            stop.set()
            link.close()
        link.look_for_sender(threading.Event())
        slow.go.set()
        eventually(lambda: link.attached)
        assert slow.log.count("opening") == 1
        link.close()


# -------------------------------------------------------------------- readers


class Toy(Subscriber):
    """Answers as it is told to."""

    def __init__(self, answer):
        self._answer = answer
        self.asked = 0

    def open(self, deadline):
        raise AssertionError("a reader needs no open")

    def wait(self, after, deadline):
        raise AssertionError("a reader does not wait")

    def acknowledge(self, report):
        raise AssertionError("a reader does not answer")

    def snapshot(self, version, deadline):
        self.asked += 1
        answer = self._answer(deadline)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self):
        pass


class Held(Snapshot):
    closed = False

    def tensor(self, name):
        raise NotImplementedError

    def verify(self, names=None):
        raise NotImplementedError

    def copy_into(self, targets):
        raise NotImplementedError

    def close(self):
        self.closed = True


GONE = ws.VersionGoneError("no longer")


def asked(*answers, patience=0.0, timeout=WAIT):
    links = [Link(f"n{n}", Toy(answer)) for n, answer in enumerate(answers)]
    return first_snapshot(links, ws.Version(1, 1), Deadline(timeout), patience)


def test_a_reader_finds_a_version_wherever_it_is(two):
    sender = two.sender()
    reader = ws.scheme_from_url(two.scheme().for_workers("r").to_url()).create_reader(0, 1)
    assert value_of(reader, update(sender, 1)) == 1
    toy.FAULTS["one"] = toy.raising(OSError("a cable"))
    assert value_of(reader, update(sender, 2)) == 2
    reader.close()


def test_a_reader_does_not_wait_for_a_scheme_that_is_not_there(two):
    with two.other.create_sender() as second:
        second.connect()
        reader = two.scheme().create_reader(0, 1)
        began = time.monotonic()
        for number in 1, 2, 3:
            assert value_of(reader, update(second, number)) == number
        assert time.monotonic() - began < WAIT / 2
        reader.close()


def test_the_first_that_has_it():
    one, other = Held(), Held()
    assert asked(lambda _: one, lambda _: other) is one
    assert asked(lambda _: GONE, lambda _: other) is other
    assert asked(lambda _: OSError("x"), lambda _: other) is other


def test_one_that_takes_its_time_is_waited_for():
    one = Held()

    def slowly(deadline):
        time.sleep(0.2)
        return one

    assert asked(slowly, lambda _: GONE) is one


def test_one_that_comes_too_late_is_closed():
    one, other, go = Held(), Held(), threading.Event()

    def late(deadline):
        go.wait(WAIT)
        return one

    assert asked(late, lambda _: other) is other
    go.set()
    eventually(lambda: one.closed)
    assert not other.closed


def test_one_that_is_still_busy_is_not_asked_again():
    go = threading.Event()
    busy = Toy(lambda deadline: go.wait(WAIT) and GONE)
    links = [Link("busy", busy), Link("quick", Toy(lambda _: Held()))]
    for _ in range(3):
        first_snapshot(links, ws.Version(1, 1), Deadline(WAIT))
    assert busy.asked == 1
    go.set()
    eventually(lambda: not links[0].asked.locked())
    first_snapshot(links, ws.Version(1, 1), Deadline(WAIT))
    assert busy.asked == 2


def test_nobody_has_it():
    with pytest.raises(ws.VersionGoneError, match="n0: no longer; n1: no longer"):
        asked(lambda _: GONE, lambda _: GONE)


def test_one_has_lost_it():
    """It may be about to come the other way."""
    answers = iter([GONE, GONE, Held()])
    lost = ws.WeightSyncError("the network is down")
    found = asked(lambda _: lost, lambda _: next(answers), patience=WAIT)
    assert isinstance(found, Held)
    with pytest.raises(ws.WeightSyncError, match="network is down"):
        asked(lambda _: lost, lambda _: GONE, patience=0.2)


def test_nobody_answers():
    go = threading.Event()
    with pytest.raises(ws.DeadlineError, match=r"did not come through n0, n1 within 0\.2 s"):
        asked(lambda _: go.wait(WAIT) and GONE, lambda _: GONE, timeout=0.2)
    go.set()


def test_what_is_no_fault_of_a_scheme_is_told_as_it_is():
    with pytest.raises(ZeroDivisionError):
        asked(lambda _: ZeroDivisionError("a bug"), lambda _: GONE)
