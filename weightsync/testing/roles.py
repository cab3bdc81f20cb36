"""What the processes of a test do: be a sender, a receiver or a reader, one step after the other.

The functions of this module run in a :class:`~weightsync.testing.processes.Peer`, in whose state
they find what the former ones made.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from weightsync.deadline import Deadline
from weightsync.engine import Engine
from weightsync.errors import MismatchError, ReceiverError, VersionGoneError
from weightsync.report import ReceiverReport, SyncReport
from weightsync.scheme import WeightSyncScheme, scheme_from_url
from weightsync.testing.processes import WAIT, eventually
from weightsync.testing.weights import Weights, constants, differences, fill, room_for, value_of
from weightsync.transport import Subscriber, Targets
from weightsync.version import Version

Seen = list[tuple[int, int | str]]
"""Version numbers, and what the weights held: the same number if they are whole."""


def know(state: Any, scheme: type[WeightSyncScheme]) -> None:
    """Have a scheme's module imported, as its entry point would once it is installed."""


# -------------------------------------------------------------------- what senders do


def send_from(
    state: Any,
    scheme: WeightSyncScheme,
    value: int = 0,
    timeout: float = WAIT,
    receivers: int | list[str] = 0,
    **shape: int,
) -> int:
    """Be a connected sender of constants. Returns the epoch."""
    state.weights = constants(value, **shape)
    state.sender = scheme.create_sender(state.weights)
    state.sender.connect(timeout=timeout, receivers=receivers)
    epoch: int = state.sender._epoch
    return epoch


def connect_again(state: Any, receivers: int | list[str] = 0, timeout: float = WAIT) -> None:
    state.sender.connect(timeout=timeout, receivers=receivers)


def publish(
    state: Any, number: int, value: int | None = None, timeout: float = WAIT, **options: Any
) -> SimpleNamespace:
    """Publish a constant, by default the version's number."""
    fill(state.weights, number if value is None else value)
    return summary(state.sender.update_weights(version=number, timeout=timeout, **options))


def publish_range(state: Any, first: int, last: int, **options: Any) -> list[SimpleNamespace]:
    return [publish(state, number, **options) for number in range(first, last + 1)]


def publish_until(state: Any, seconds: float, first: int = 1, **options: Any) -> tuple[int, int]:
    """Publish as fast as it goes; returns the last number and how many were skipped."""
    end = time.monotonic() + seconds
    number, skipped = first, 0
    while time.monotonic() < end:
        skipped += publish(state, number, **options).skipped
        number += 1
    return number - 1, skipped


def publish_made(
    state: Any, number: int, make: Callable[..., Any], *args: Any, timeout: float = WAIT, **how: Any
) -> SyncReport:
    """Publish what a function makes, and return the whole report."""
    report: SyncReport = state.sender.update_weights(
        make(*args), version=number, timeout=timeout, **how
    )
    return report


def publish_to_failures(
    state: Any, number: int, timeout: float = WAIT, **options: Any
) -> SimpleNamespace:
    """Publish what some receivers will not apply: what the sender is told of it.

    Returns:
        ``failed`` (id to state), ``words``, ``receivers`` as of :func:`summary`, ``seconds``.
    """
    fill(state.weights, number)
    began = time.monotonic()
    failures: dict[str, str] = {}
    words = ""
    report: SyncReport | None
    try:
        report = state.sender.update_weights(
            version=number, wait="applied", timeout=timeout, **options
        )
    except ReceiverError as failed:
        report = failed.report
        failures = {r.receiver: r.state for r in failed.failures}
        words = str(failed)
    told = summary(report) if report else SimpleNamespace(number=number, receivers={})
    told.failed, told.words, told.seconds = failures, words, time.monotonic() - began
    return told


def publish_haltingly(state: Any, number: int, seconds: float, **options: Any) -> SimpleNamespace:
    """Publish a stream that pauses in its middle: so long half of a version is under way."""
    weights = dict(state.weights)
    fill(weights, number)
    passes = itertools.count()

    def stream() -> Any:
        values = next(passes) > 0  # the first pass only describes
        for place, entry in enumerate(weights.items()):
            if values and place == len(weights) // 2:
                time.sleep(seconds)
            yield entry

    return summary(state.sender.update_weights(stream, version=number, **options))


def summary(report: SyncReport) -> SimpleNamespace:
    receivers = {r.receiver: (r.state, r.version and r.version.number) for r in report.receivers}
    return SimpleNamespace(
        number=report.version.number,
        epoch=report.version.epoch,
        skipped=report.skipped,
        receivers=receivers,
    )


def end_sender(state: Any) -> None:
    state.sender.shutdown()


# -------------------------------------------------------------------- what receivers do


def receive_in(
    state: Any,
    scheme: WeightSyncScheme,
    id: str,
    timeout: float = WAIT,
    engine: Callable[[Weights], Engine] | None = None,
    **shape: int,
) -> None:
    """Be a connected receiver of constants."""
    receive_into(state, scheme, id, constants(-1, **shape), timeout, engine)


def receive_made(
    state: Any, scheme: WeightSyncScheme, id: str, make: Callable[..., Any], *args: Any
) -> None:
    """Be a connected receiver with room for what a function makes."""
    receive_into(state, scheme, id, room_for(_mapping(make(*args))))


def receive_into(
    state: Any,
    scheme: WeightSyncScheme,
    id: str,
    weights: Weights,
    timeout: float = WAIT,
    engine: Callable[[Weights], Engine] | None = None,
) -> None:
    state.weights = weights
    state.engine = weights if engine is None else engine(weights)
    state.receiver = scheme.create_receiver(state.engine, id=id)
    state.receiver.connect(timeout)


def receive_part_of(
    state: Any, scheme: WeightSyncScheme, id: str, make: Callable[..., Any], *args: Any
) -> None:
    """Be a connected receiver that takes what a function makes, and ignores what else comes."""
    state.weights = room_for(_mapping(make(*args)))
    state.receiver = scheme.create_receiver(state.weights, id=id, strict=False)
    state.receiver.connect(WAIT)


def poll(state: Any, timeout: float = WAIT) -> tuple[int, int | str] | None:
    """Apply what is new. Returns ``(number, what the weights hold)``, or None."""
    report = state.receiver.poll_and_apply(timeout)
    return report and (report.version.number, value_of(state.weights))


def poll_made(
    state: Any, number: int, make: Callable[..., Any], *args: Any, timeout: float = WAIT
) -> tuple[SyncReport, dict[str, str]]:
    """Wait for a version: the report, and how it differs from what a function makes.

    Versions before it may be of other models, for which there is no room.
    """
    deadline = Deadline(timeout)
    while not deadline.expired:
        try:
            report: SyncReport | None = state.receiver.poll_and_apply(deadline.remaining)
        except MismatchError:
            time.sleep(0.01)
            continue
        if report is not None and report.version.number >= number:
            return report, differences(_mapping(make(*args)), state.weights)
    raise AssertionError(f"version {number} did not come within {timeout} s")


def _mapping(made: Any) -> Weights:
    """The weights of a function's result: a mapping, a module, a stream."""
    if isinstance(made, torch.nn.Module):
        return dict(made.state_dict())
    return dict(made) if isinstance(made, Mapping) else dict(made())


def poll_until(state: Any, number: int) -> Seen:
    """Apply versions until the number is reached: what each left in the weights."""
    seen: Seen = []
    while not seen or seen[-1][0] < number:
        now = poll(state)
        assert now is not None, f"version {number} did not come; seen: {seen}"
        seen.append(now)
    return seen


def held(state: Any) -> tuple[int | None, int | str]:
    """The number that the receiver says it holds, and what the weights do hold."""
    version = state.receiver.version
    return (version and version.number), value_of(state.weights)


def status(state: Any) -> ReceiverReport:
    report: ReceiverReport = state.receiver.status()
    return report


def follow(state: Any) -> None:
    """Apply everything in the background; errors are kept."""
    state.errors = []
    state.receiver.follow(on_error=lambda error: state.errors.append(repr(error)))


def held_while_following(
    state: Any, number: int, timeout: float = WAIT, forgiving: bool = False
) -> tuple[int, int | str]:
    """Wait until the version's number is reached, and return it with what the weights hold.

    Args:
        forgiving: there may have been errors on the way.
    """

    def reached() -> tuple[int, int | str] | None:
        with state.receiver.hold() as version:
            if version is not None and version.number >= number:
                return version.number, value_of(state.weights)
        return None

    found = eventually(reached, timeout)
    assert forgiving or not state.errors, state.errors
    return found


def switch(state: Any, scheme: WeightSyncScheme, timeout: float = WAIT) -> tuple[int, int | str]:
    """Follow another run. Returns ``(number, what the weights hold)``."""
    with state.receiver.hold():
        report: SyncReport = state.receiver.switch(scheme, timeout)
        return report.version.number, value_of(state.weights)


def verified(state: Any) -> bool:
    """Whether the weights are those of the version that the receiver says it holds."""
    with state.receiver.hold():
        return bool(state.receiver.verify_weights().ok)


def end_receiver(state: Any) -> None:
    state.receiver.shutdown()


# -------------------------------------------------------------------- what readers do


def subscribe(
    state: Any, scheme: WeightSyncScheme, id: str | None = None, workers: int = 0
) -> None:
    """Be a bare subscriber."""
    state.subscriber = scheme.create_subscriber(id)
    if workers:
        state.subscriber.delegate(workers)
    state.subscriber.open(Deadline(WAIT))
    if id is not None:
        state.subscriber.acknowledge(ReceiverReport(id, "connected"))


def be_worker(state: Any, url: str, rank: int, size: int) -> None:
    """Be the reader in one of an engine's workers, which know nothing but a URL."""
    state.subscriber = scheme_from_url(url).create_reader(rank, size)


def see(state: Any, after: Version | None = None, timeout: float = WAIT) -> Version | None:
    version: Version | None = state.subscriber.wait(after, Deadline(timeout))
    return version


def read_version(state: Any, version: Version) -> int | str:
    """What a version holds."""
    return _read(state.subscriber, version)


def see_and_read_later(state: Any, pause: float) -> tuple[int, int | str, int]:
    """Look at a version, open it after a pause; if it is gone by then, the next one.

    Returns:
        The number, what it held, and how many were gone.
    """
    after = None
    for gone in range(100):
        version = state.subscriber.wait(after, Deadline(WAIT))
        assert version is not None, "nothing new came"
        time.sleep(pause if gone == 0 else 0.0)
        try:
            return version.number, _read(state.subscriber, version), gone
        except VersionGoneError:
            after = None
    raise AssertionError("versions go before they can be opened, again and again")


def lease(state: Any, version: Version) -> int | str:
    """Lease a version and read it; the lease stays until :func:`end_lease`."""
    state.snapshot = state.subscriber.snapshot(version, Deadline(WAIT))
    return value_of(dict(state.snapshot))


def end_lease(state: Any) -> int | str:
    """What a leased version holds by now."""
    with state.snapshot as snapshot:
        return value_of(dict(snapshot))


def acknowledge(state: Any, id: str, version: Version) -> None:
    state.subscriber.acknowledge(ReceiverReport(id, "applied", version, version))


def close_subscriber(state: Any) -> None:
    state.subscriber.close()


def read_until(
    state: Any,
    scheme: WeightSyncScheme,
    seconds: float,
    stop_at: int | None = None,
    count: int | None = None,
) -> Seen:
    """Read versions with a bare subscriber: ``[(number, what it held), ...]`` of all reads."""
    target: Weights | None = None
    seen: Seen = []
    subscriber = scheme.create_subscriber()
    subscriber.open(Deadline(WAIT))
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            version = subscriber.wait(None, Deadline(WAIT))
            assert version is not None, "nothing came"
            try:
                with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
                    if target is None:
                        specs = snapshot.manifest.tensors
                        target = {s.name: torch.empty(s.shape, dtype=s.dtype) for s in specs}
                    snapshot.copy_into(Targets(snapshot.manifest, target))
            except VersionGoneError:
                continue
            seen.append((version.number, value_of(target)))
            if len(seen) == count or (stop_at is not None and version.number >= stop_at):
                break
    finally:
        subscriber.close()
    return seen


def _read(subscriber: Subscriber, version: Version) -> int | str:
    with subscriber.snapshot(version, Deadline(WAIT)) as snapshot:
        specs = snapshot.manifest.tensors
        target = {spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in specs}
        snapshot.copy_into(Targets(snapshot.manifest, target))
        return value_of(target)


# -------------------------------------------------------------------- faults of a whole process


def suffer(
    state: Any, fault: Callable[..., AbstractContextManager[Any]], *args: Any, **options: Any
) -> None:
    """Live with a fault of :mod:`weightsync.testing.faults` until :func:`recover`."""
    state.faults = getattr(state, "faults", ExitStack())
    state.faults.enter_context(fault(*args, **options))


def recover(state: Any) -> None:
    state.faults.close()
