"""Trainers of several ranks: gathered in step, or each rank its own rows into the one slot."""

import json
import pathlib

import pytest
import torch

import weightsync as ws
from tests.conftest import assert_all_same, read
from tests.live import trainers
from tests.live.processes import PeerError


def ends_of(run_dir):
    from tests.conftest import Ends

    return Ends(run_dir)


def generation_of(run_dir):
    return json.loads(pathlib.Path(run_dir, "head.json").read_text())["generation"]


def expected(**options):
    return dict(trainers.plain(**options).state_dict())


WHOLE = ["plain", "ddp", "fsdp1, not sharded"]
"""Each rank has all of it: rank 0 sends alone."""

FOUR = ["fsdp2, hybrid", "fsdp2 and tensor parallel"]
TWO = [kind for kind in trainers.KINDS if kind not in (*WHOLE, *FOUR)]


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
@pytest.mark.parametrize("kind", TWO)
def test_two_ranks_send_the_whole_model(world, run_dir, kind, gather):
    """W8 and its kind: every bit, under the plain model's names; the trainer stays as it was."""
    ranks = world(2)
    ranks(trainers.build, kind)
    before = ranks(trainers.shards)
    epochs = ranks(trainers.connect, run_dir, gather=gather)
    assert epochs[0] == epochs[1]
    reports = ranks(trainers.update, 1)
    assert ws.SyncReport.from_dict(reports[0]) == ws.SyncReport.from_dict(reports[1])
    assert tuple(reports[0]["version"]) == (epochs[0], 1)
    sent = read(ends_of(run_dir))[1]
    assert_all_same(sent, expected())
    for was, now in zip(before, ranks(trainers.shards), strict=True):
        assert_all_same(was, now)
    ranks(trainers.train, 5)
    ranks(trainers.update, 2)
    after = read(ends_of(run_dir))[1]
    whole = ranks(trainers.whole)[0]
    assert_all_same(after, whole)
    assert not torch.equal(after["head.weight"], sent["head.weight"])


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
@pytest.mark.parametrize("kind", [*FOUR, "fsdp2", "fsdp1"])
def test_four_ranks_send_the_whole_model(world, run_dir, kind, gather):
    ranks = world(4)
    ranks(trainers.build, kind)
    ranks(trainers.connect, run_dir, gather=gather)
    reports = ranks(trainers.update, 1)
    assert all(report == reports[0] for report in reports)
    assert_all_same(read(ends_of(run_dir))[1], expected())


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2, columns", "fsdp1", "fsdp2, hybrid"])
def test_tensors_of_many_chunks(world, run_dir, kind):
    """Digests made by several ranks, and of chunks that several wrote, are those of the whole."""
    ranks = world(4)
    ranks(trainers.build, kind, width=304 if "columns" in kind else 301)
    ranks(trainers.connect, run_dir, gather=False)
    for version in (1, 2, 3):  # both slots, and one of them again
        ranks(trainers.update, version)
        assert_all_same(read(ends_of(run_dir))[1], ranks(trainers.whole)[0])
        ranks(trainers.train, version)


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
def test_a_tie_is_sent_once(world, run_dir, gather):
    """T1, also where a rank holds no row of the tied tensor."""
    ranks = world(2)
    ranks(trainers.build, "fsdp2", tied=True)
    ranks(trainers.connect, run_dir, gather=gather)
    ranks(trainers.update, 1)
    manifest, sent = read(ends_of(run_dir))
    assert manifest.aliases == {"head.weight": "embed.weight"}
    whole = expected(tied=True)
    del whole["head.weight"]
    assert_all_same(sent, whole)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_that_every_rank_has_is_sent_by_one(world, run_dir, kind):
    ranks = world(2)
    ranks(trainers.build, kind)
    first = ranks.peers[0]
    first.call(trainers.connect, run_dir)
    first.call(trainers.update, 1)
    assert_all_same(read(ends_of(run_dir))[1], expected())


class TestInStep:
    """H6 and its kind: no rank is left behind in a collective, whatever happens on another."""

    def test_ranks_do_not_run_ahead_of_a_slow_send(self, mortal, run_dir, monkeypatch):
        """A send of 6 s in all, with a limit of 2 s for any collective."""
        ranks = mortal(2, seconds=2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect_slow, run_dir, 0.3, bucket=1 << 10)
        ranks(trainers.update, 1)
        assert_all_same(ranks.peers[0].call(trainers.got), expected())
        ranks(trainers.whole)  # the collectives still match

    @pytest.mark.parametrize("after", [0, 1, 7, 20])
    def test_a_send_that_fails_frees_all_ranks(self, world, run_dir, after):
        ranks = world(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect_slow, run_dir, 0.0, fail_after=after, bucket=1 << 10)
        first, second = ranks.outcomes(trainers.update, 1)
        assert (first.kind, first.text) == ("OSError", "the network is gone")
        assert second.kind == "WeightSyncError"
        assert "rank 0" in second.text
        assert "the network is gone" in second.text
        ranks(trainers.whole)

    @pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_that_cannot_read_its_model(self, world, run_dir, rank, gather):
        ranks = world(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect, run_dir, gather=gather)
        ranks(trainers.update, 1)
        ranks(trainers.failing_source, rank)
        for outcome in ranks.outcomes(trainers.update, 2):
            assert outcome.kind == "SourceError"
            assert "out of memory" in outcome.text
        assert read(ends_of(run_dir))[0].names()  # version 1 is still there
        ranks(trainers.end_senders)
        ranks(trainers.connect, run_dir, gather=gather)
        ranks(trainers.update, 2)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_that_cannot_write_its_rows(self, world, run_dir, rank):
        ranks = world(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect, run_dir, gather=False)
        ranks(trainers.failing_rows, 1)
        first, second = ranks.outcomes(trainers.update, 1)
        assert second.kind == "OSError"
        assert "rank 1" in first.text
        assert "no such rows" in first.text
        ranks(trainers.end_senders)
        ranks(trainers.connect, run_dir, gather=False)
        ranks(trainers.update, 2)
        assert_all_same(read(ends_of(run_dir))[1], expected())

    def test_too_little_room_is_said_to_all_ranks(self, mortal, run_dir):
        ranks = mortal(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.no_room)
        for outcome in ranks.outcomes(trainers.connect, run_dir, gather=False):
            assert outcome.kind == "NoRoomError"
            assert "10 are free" in outcome.text

    def test_an_update_that_the_transport_refuses(self, world, run_dir):
        ranks = world(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect, run_dir)
        ranks(trainers.update, 3)
        for outcome in ranks.outcomes(trainers.update, 2):
            assert outcome.kind == "VersionError"
        assert ranks(trainers.update, 4)[1]["version"][1] == 4

    def test_a_rank_that_does_not_come(self, world, run_dir):
        """The others are free at the deadline, and it is named; the rank hears of it later."""
        ranks = world(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect, run_dir)
        with pytest.raises(PeerError, match="rank 1 of the trainer did not come") as error:
            ranks.peers[0].call(trainers.update, 1, timeout=0.5)
        assert error.value.kind == "DeadlineError"
        with pytest.raises(PeerError, match="rank 0 of the trainer") as error:
            ranks.peers[1].call(trainers.update, 1, timeout=5)
        assert error.value.kind == "DeadlineError"
        ranks(trainers.update, 2)
        assert_all_same(read(ends_of(run_dir))[1], expected())

    def test_rank_0_does_not_come(self, world, run_dir):
        ranks = world(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect, run_dir)
        with pytest.raises(PeerError, match="rank 0 of the trainer said nothing"):
            ranks.peers[1].call(trainers.update, 1, timeout=0.5)

    @pytest.mark.parametrize("dead", [0, 1])
    @pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
    def test_a_dead_rank_costs_no_more_than_the_deadline(self, mortal, run_dir, dead, gather):
        ranks = mortal(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect, run_dir, gather=gather)
        ranks(trainers.update, 1)
        ranks.peers[dead].kill()
        with pytest.raises(PeerError, match=f"rank {dead}"):
            ranks.peers[1 - dead].call(trainers.update, 2, timeout=1, within=20)

    def test_ranks_that_hold_other_weights(self, world, run_dir):
        ranks = world(2)
        ranks(trainers.build, "fsdp2")
        ranks(trainers.connect, run_dir)
        ranks.peers[1].call(trainers.build, "plain", width=8)
        ranks.peers[1].call(trainers.register)
        for outcome in ranks.outcomes(trainers.update, 1):
            assert outcome.kind == "SourceError"
            assert "rank 1" in outcome.text


def test_each_byte_is_written_once(world, run_dir):
    """A direct update gathers nothing: every rank writes its own rows, all together once."""
    ranks = world(4)
    ranks(trainers.build, "fsdp2, hybrid")
    ranks(trainers.connect, run_dir, gather=False)
    parameters = sum(p.nbytes for p in trainers.plain().parameters())
    assert sum(ranks(trainers.written)) == parameters
    reports = ranks(trainers.update, 1)
    buffers = sum(b.nbytes for n, b in trainers.plain().state_dict().items() if "scale" in n)
    assert reports[0]["nbytes"] == parameters + buffers


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
def test_memory_is_that_of_a_bucket(mortal, run_dir, gather):
    """G6: a model of 100 MB is never whole in the memory of any rank."""
    ranks = mortal(2)
    ranks(trainers.build, "fsdp2", width=1152, blocks=3)
    ranks(trainers.connect, run_dir, gather=gather)
    ranks(trainers.update, 1)
    for peak in ranks(trainers.peak_of_update, bucket=16 << 20):
        assert peak < 60 << 20


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
def test_precision_and_names_are_chosen_as_for_any_model(world, run_dir, gather):
    """D1: cast once, on whichever rank holds the row."""
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    ranks(
        trainers.connect,
        run_dir,
        gather=gather,
        dtype=torch.bfloat16,
        keep_dtype=["*.norm.*"],
        exclude=["temperature"],
    )
    ranks(trainers.update, 1)
    _, sent = read(ends_of(run_dir))
    kept = {n: t for n, t in expected().items() if n != "temperature"}
    assert_all_same(sent, {n: t if ".norm." in n else t.bfloat16() for n, t in kept.items()})


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "direct"])
def test_a_sharded_state_dict_instead_of_the_model(world, run_dir, gather):
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.halves)
    ranks(trainers.connect, run_dir, gather=gather)
    ranks(trainers.update, 1)
    assert_all_same(read(ends_of(run_dir))[1], expected())


def test_rows_of_another_host_are_gathered(world, run_dir):
    """gather=None takes what is possible; gather=False says why it is not."""
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.elsewhere, 1)
    try:
        ranks(trainers.connect, run_dir)
        ranks(trainers.update, 1)
        assert_all_same(read(ends_of(run_dir))[1], expected())
        ranks(trainers.end_senders)
        ranks(trainers.connect, run_dir, gather=False)
        for outcome in ranks.outcomes(trainers.update, 1):
            assert "several hosts" in outcome.text
    finally:
        ranks(trainers.here)


def test_a_sharded_model_that_is_named_too_late(world, run_dir):
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    first = ranks.peers[0]
    first.call(trainers.connect, run_dir, model=False)
    first.call(trainers.register)
    with pytest.raises(PeerError, match="group="):
        first.call(trainers.update, 1)


def test_the_ranks_are_named(world, run_dir):
    """group= serves a trainer that passes its weights to each update."""
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect_group, run_dir)
    ranks(trainers.register)
    ranks(trainers.update, 1)
    assert_all_same(read(ends_of(run_dir))[1], expected())


def test_a_trainer_that_begins_again_takes_new_buffers(mortal, run_dir, tmp_path):
    """A rank of the dead one may still be writing into the old ones."""
    ranks = mortal(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir, gather=False)
    ranks(trainers.update, 1)
    old = generation_of(run_dir)
    ranks.dispose()
    ends = ends_of(run_dir)
    sender = ends.sender(expected())
    sender.update_weights(version=1)
    assert generation_of(run_dir) != old
    ends.shutdown()


def test_an_update_is_heard_of_once_on_rank_0(world, run_dir):
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir)
    ranks(trainers.listen)
    ranks(trainers.update, 3)
    assert ranks(trainers.heard) == [[3], []]
