"""What arrives is what was sent, bit by bit, under the names it was sent under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from weightsync.report import SyncReport
from weightsync.scheme import WeightSyncScheme
from weightsync.testing import roles, weights
from weightsync.testing.conformance.base import Conformance, Run, refusal
from weightsync.testing.processes import Peer, PeerError

MIB = 1 << 20


def carry(
    run: Run, make: Callable[..., Any], *args: Any, sender: Peer | None = None, number: int = 1
) -> tuple[SyncReport, SyncReport, dict[str, str]]:
    """Send what a function makes to another process.

    Returns:
        The reports of both ends, and the differences by name.
    """
    sender = sender or run.sender(nbytes=4096)
    receiver = run.peer()
    receiver.call(roles.receive_made, run.scheme, f"engine{number}", make, *args)
    receiver.start(roles.poll_made, number, make, *args)
    sent = sender.call(roles.publish_made, number, make, *args, wait="applied")
    received, different = receiver.result()
    receiver.call(roles.end_receiver)
    return sent, received, different


class RoundTrip(Conformance):
    """Any dtype, any shape, any strides, any name; whole or refused by name."""

    @pytest.mark.parametrize(
        "make",
        [weights.every_dtype, weights.shapes, weights.strided],
        ids=["dtypes", "shapes", "strides"],
    )
    def test_every_bit_arrives(self, run: Run, make: Callable[[], weights.Weights]) -> None:
        """D3, W1, W3."""
        _, _, different = carry(run, make)
        assert different == {}

    def test_dtypes_that_few_can_carry_arrive_or_are_refused(self, run: Run) -> None:
        sender, careless = run.sender(nbytes=4096), run.peer()
        careless.call(roles.receive_part_of, run.scheme, "careless", weights.of_odd_dtypes)
        careless.call(roles.follow)
        carried = []
        for number, dtype in enumerate(weights.odd_dtypes()):
            refused = refusal(sender, roles.publish_made, number, weights.of_odd_dtypes, dtype)
            if refused is None:
                carried.append(dtype)
            else:
                assert (refused.kind, dtype in refused.text) == ("SourceError", True), refused
        make, number = weights.of_odd_dtypes, len(weights.odd_dtypes())
        _, _, different = carry(run, make, *carried, sender=sender, number=number)
        assert different == {}

    def test_names_are_names(self, run: Run) -> None:
        """X4: no name is a path, too long, or one of somebody's own."""
        _, _, different = carry(run, weights.named, *weights.HOSTILE_NAMES)
        assert different == {}

    def test_both_ends_in_one_process(self, run: Run) -> None:
        """A trainer that generates itself: each update is applied when it returns."""
        assert run.peer().call(update_attached, run.scheme, 3) == [(1, 1), (2, 2), (3, 3)]

    def test_ties_are_sent_once(self, run: Run) -> None:
        """T1."""
        sent, _, different = carry(run, weights.Tied)
        assert different == {}
        assert sent.tensors == 3
        assert sent.nbytes == 4 * (32 * 8 + 8 + 8)

    def test_many_small_tensors(self, run: Run) -> None:
        """E4."""
        sent, _, different = carry(run, weights.many, 2000)
        assert different == {}
        assert sent.tensors == 2000

    def test_a_tensor_larger_than_any_buffer(self, run: Run) -> None:
        """W6."""
        _, _, different = carry(run, weights.large, self.buffered_bytes + 3)
        assert different == {}

    def test_the_order_of_a_stream_does_not_matter(self, run: Run) -> None:
        """W7: tensors of one size, in another order the second time."""
        _, _, different = carry(run, weights.Reordered)
        assert different == {}

    def test_a_stream_is_never_held_as_a_whole(self, run: Run) -> None:
        """G6."""
        count = 3 * self.buffered_bytes // MIB
        sender, receiver = run.sender(nbytes=4096), run.peer()
        receiver.call(roles.receive_made, run.scheme, "engine", weights.counted, count, MIB)
        receiver.start(roles.poll_made, 1, weights.counted, count, MIB)
        most = sender.call(publish_counted, 1, count, MIB)
        _, different = receiver.result()
        assert different == {}
        assert most <= self.buffered_bytes

    def test_a_model_may_change(self, run: Run) -> None:
        """Other names, shapes and dtypes at the next version, for whoever has room for them."""
        sender = run.sender(nbytes=4096)
        for number, make in enumerate([weights.strided, weights.shapes, weights.strided]):
            _, _, different = carry(run, make, sender=sender, number=number)
            assert different == {}

    def test_no_tensors_at_all(self, run: Run) -> None:
        sent, _, different = carry(run, weights.named)
        assert different == {}
        assert (sent.tensors, sent.nbytes) == (0, 0)

    @pytest.mark.parametrize(
        ("make", "words"),
        [("with_meta", "offloaded.weight"), ("that_breaks", "the disk of the trainer is gone")],
    )
    def test_what_cannot_be_sent_changes_nothing(self, run: Run, make: str, words: str) -> None:
        """W10, L9: refused by name, or broken off half-way. The next version arrives."""
        sender, receiver = run.sender(), run.receiver("engine")
        receiver.start(roles.poll)
        sender.call(roles.publish, 1)
        assert receiver.result() == (1, 1)
        with pytest.raises(PeerError, match=words):
            sender.call(publish_unsendable, 2, make)
        assert receiver.call(roles.poll, 0.1) is None
        assert receiver.call(roles.held) == (1, 1)
        receiver.start(roles.poll)
        sender.call(roles.publish, 2)
        assert receiver.result() == (2, 2)


def update_attached(state: Any, scheme: WeightSyncScheme, last: int) -> roles.Seen:
    """Send to a receiver of this process: the version it holds after each update, and the value."""
    roles.send_from(state, scheme)
    target = weights.constants(-1)
    receiver = scheme.create_receiver(target)
    state.sender.attach(receiver)
    seen: roles.Seen = []
    for number in range(1, last + 1):
        roles.publish(state, number)
        assert receiver.version is not None
        seen.append((receiver.version.number, weights.value_of(target)))
    receiver.shutdown()
    state.sender.shutdown()
    return seen


def publish_counted(state: Any, number: int, tensors: int, nbytes: int) -> int:
    """Publish a stream of tensors; returns how many bytes of them were alive at most."""
    stream = weights.Counted(tensors, nbytes)
    state.sender.update_weights(stream, version=number)
    return stream.most


def publish_unsendable(state: Any, number: int, how: str) -> None:
    weights.fill(state.weights, number)
    if how == "with_meta":
        meta = state.weights["layer0"].to("meta")
        state.sender.update_weights({**state.weights, "offloaded.weight": meta}, version=number)
    else:
        state.sender.update_weights(weights.Breaking(state.weights), version=number)
