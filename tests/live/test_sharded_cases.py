"""Ranks that are out of step, gone, replaced or of several trainers: what all of them are told."""

import os
import pathlib
import re
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weightsync as ws
from tests.conftest import Ends, assert_all_same, read
from tests.live import trainers
from tests.live.processes import Peer, PeerError, eventually
from weightsync.deadline import Deadline

both_ways = pytest.mark.parametrize("gather", [True, None], ids=["gathered", "direct"])


def sent_to(path):
    return read(Ends(path))[1]


def expected():
    return dict(trainers.plain().state_dict())


def assert_all_work(ranks, path, version):
    """An update of all ranks, whole and right."""
    reports = ranks(trainers.update, version, within=20)
    assert all(report == reports[0] for report in reports)
    assert_all_same(sent_to(path), ranks(trainers.whole)[0])


# -------------------------------------------------------------------- which ranks, which order


@both_ways
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_each_replica_of_a_hybrid_trainer_publishes_to_a_path_of_its_own(
    world, run_dir, kind, gather
):
    ranks = world(4)
    paths = two_paths(run_dir)
    ranks(build_replicas, kind)
    ranks(connect_half, paths, gather=gather)
    ranks(trainers.update, 1)
    for path in paths:
        assert_all_same(sent_to(path), expected())


@both_ways
def test_a_group_that_is_not_all_that_hold_the_model(world, run_dir, gather):
    ranks = world(4)
    paths = two_paths(run_dir)
    ranks(build_replicas, "sharded over all")
    ranks(connect_half, paths, gather=gather)
    for outcome in ranks.outcomes(trainers.update, 1):
        assert outcome.kind == "SourceError"
        assert re.search(r"tensor '(embed.weight|temperature)' cannot be sent", outcome.text)
        assert "group= names all that hold the model" in outcome.text
    for path in paths:
        assert nothing_visible(path)


def nothing_visible(path):
    subscriber = ws.DoubleBufferScheme(path).create_subscriber()
    try:
        subscriber.open(Deadline(5))
        return subscriber.wait(None, Deadline(0)) is None
    finally:
        subscriber.close()


def two_paths(run_dir):
    os.mkdir(run_dir)
    return [f"{run_dir}/0", f"{run_dir}/1"]


def build_replicas(state, kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import ShardingStrategy

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    state.group = mesh.get_group("shard")
    if kind == "fsdp1":
        strategy = ShardingStrategy.HYBRID_SHARD
        state.model = trainers.fsdp1(trainers.plain(), device_mesh=mesh, sharding_strategy=strategy)
    else:
        mesh = mesh if kind == "fsdp2" else init_device_mesh("cpu", (4,))
        state.model = trainers.fsdp2(trainers.plain(), mesh=mesh)


def connect_half(state, paths, **options):
    trainers.connect(state, paths[state.rank // 2], group=state.group, **options)


@both_ways
@pytest.mark.parametrize("order", [[1, 0], [3, 1, 2, 0]])
def test_a_mesh_whose_ranks_do_not_ascend(world, run_dir, order, gather):
    """torch cuts and joins by ascending ranks, whatever the mesh says."""
    ranks = world(len(order))
    ranks(build_over, order)
    ranks(trainers.connect, run_dir, gather=gather)
    ranks(trainers.update, 1)
    assert_all_same(sent_to(run_dir), expected())


def build_over(state, order):
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.tensor(order))
    state.model = trainers.fsdp2(trainers.plain(), mesh=mesh)


def test_a_group_that_this_process_is_none_of(world, run_dir):
    ranks = world(2)
    ranks(trainers.build, "plain")
    outsider, member = ranks.outcomes(connect_rank_1, run_dir)
    assert outsider.kind == "WeightSyncError"
    assert "group=: this process" in outsider.text
    assert member == 0


def connect_rank_1(state, path):
    trainers.connect(state, path, group=dist.new_group([1]))
    return state.sender._ranks.rank


# -------------------------------------------------------------------- what is sent


def test_an_fsdp1_unit_that_is_not_sharded_between_those_that_are(mortal, run_dir):
    """Rank 0 reads it alone: that must not cost the others a collective."""
    ranks = mortal(2, seconds=10)
    ranks(build_mixed)
    ranks(trainers.connect, run_dir, gather=True)
    ranks(trainers.update, 1, within=20)
    assert_all_same(sent_to(run_dir), expected())


def build_mixed(state):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model, device = trainers.plain(), torch.device("cpu")
    model.layers[2] = FullyShardedDataParallel(
        model.layers[2], sharding_strategy=ShardingStrategy.NO_SHARD, device_id=device
    )
    state.model = FullyShardedDataParallel(model, device_id=device)


@both_ways
def test_fsdp1_parameters_whose_data_was_replaced(world, run_dir, gather):
    """FSDP takes them over in the next forward pass; until then it would send the old ones."""
    ranks = world(2)
    ranks(trainers.build, "fsdp1, original parameters")
    ranks(trainers.connect, run_dir, gather=gather)
    ranks(trainers.update, 1)
    ranks(replace_data)
    for outcome in ranks.outcomes(trainers.update, 2):
        assert outcome.kind == "SourceError"
        assert "' cannot be sent: its data was replaced" in outcome.text
    assert_all_same(sent_to(run_dir), expected())
    ranks(forward)
    assert_all_work(ranks, run_dir, 3)
    assert not torch.equal(sent_to(run_dir)["head.weight"], expected()["head.weight"])


def replace_data(state):
    for parameter in state.model.parameters():
        parameter.data = parameter.data + 1


def forward(state):
    state.model(torch.zeros(1, 2, dtype=torch.int64))


@both_ways
def test_a_shard_that_is_a_tensor_subclass(world, run_dir, gather):
    ranks = world(2)
    for outcome in ranks.outcomes(connect_subclass, run_dir, gather=gather):
        assert outcome.kind == "SourceError"
        assert "tensor 'w' cannot be sent: TwoTensor is a tensor subclass" in outcome.text


def connect_subclass(state, path, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.two_tensor import TwoTensor

    local = TwoTensor(torch.ones(2, 3), torch.ones(2, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state.model = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
    trainers.connect(state, path, **options)


@both_ways
def test_an_iterable_is_not_sent_by_several_ranks(world, run_dir, gather):
    ranks = world(2)
    ranks(connect_all, run_dir, gather=gather)
    for outcome in ranks.outcomes(update_iterable):
        assert outcome.kind == "SourceError"
        assert "an iterable is not sent by several ranks: pass the module" in outcome.text


def connect_all(state, path, **options):
    trainers.connect(state, path, model=False, group=dist.group.WORLD, **options)


def update_iterable(state):
    state.sender.update_weights(lambda: iter([("a", torch.ones(3))]), timeout=10)


# -------------------------------------------------------------------- in step


@both_ways
def test_ranks_that_are_a_step_apart(world, run_dir, gather):
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir, gather=gather)
    ranks(trainers.update, 1)
    ranks(trainers.train, 5)
    for outcome in ranks.outcomes(update_own_step):
        assert outcome.kind == "VersionError"
        assert "rank 1 of the trainer sends version 6, rank 0 5" in outcome.text
    assert_all_same(sent_to(run_dir), expected())
    assert_all_work(ranks, run_dir, 7)


def update_own_step(state):
    trainers.update(state, 5 + state.rank)


@both_ways
@pytest.mark.parametrize("bad", [0, 1])
def test_one_rank_calls_it_wrongly(world, run_dir, bad, gather):
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir, gather=gather)
    outcomes = ranks.outcomes(update_misspelt, bad)
    assert outcomes[bad].kind == "ValueError"
    assert outcomes[1 - bad].kind == "WeightSyncError"
    for outcome in outcomes:
        assert "wait='aplied'" in outcome.text
    for version in (1, 2, 3):
        assert_all_work(ranks, run_dir, version)


def update_misspelt(state, bad):
    wait = "aplied" if state.rank == bad else "published"
    trainers.update(state, 0, wait=wait, timeout=20)


@pytest.mark.slow
@both_ways
def test_a_rank_whose_time_was_up_before_rank_0_came(mortal, run_dir, gather):
    """Rank 0 hears of it at once, and enters no collective alone."""
    ranks = mortal(2, seconds=10)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir, gather=gather)
    first, second = ranks.peers
    with pytest.raises(PeerError, match="rank 0 of the trainer said nothing"):
        second.call(trainers.update, 1, timeout=0.2)
    with pytest.raises(PeerError, match=r"rank 1 of the trainer .* said nothing") as error:
        first.call(trainers.update, 1, timeout=60, within=5)
    assert error.value.kind == "DeadlineError"
    assert_all_work(ranks, run_dir, 2)


@pytest.mark.slow
def test_a_rank_that_was_interrupted_before_rank_0_came(mortal, run_dir):
    ranks = mortal(2, seconds=10)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir, gather=True)
    first, second = ranks.peers
    assert second.call(interrupted_update, 0.2) == "interrupted"
    with pytest.raises(PeerError, match=r"rank 1 of the trainer .*: KeyboardInterrupt"):
        first.call(trainers.update, 1, timeout=60, within=5)
    assert_all_work(ranks, run_dir, 2)


def interrupted_update(state, seconds):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        trainers.update(state, 1)
    except KeyboardInterrupt:
        return "interrupted"


def test_all_ranks_know_which_version_was_skipped(world, run_dir):
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir, scheme=ws.DoubleBufferScheme(run_dir, on_busy="skip", slots=2))
    ranks(update_and_tell, 1)
    with reading(run_dir):
        ranks(trainers.update, 2)
        assert ranks(update_and_tell, 3) == [(True, 2)] * 2
    assert ranks(update_and_tell, 3) == [(False, 3)] * 2


def update_and_tell(state, version):
    skipped = trainers.update(state, version)["skipped"]
    return skipped, state.sender.version.number


class reading:
    """Holds the newest version."""

    def __init__(self, path):
        self._subscriber = ws.DoubleBufferScheme(path).create_subscriber()

    def __enter__(self):
        self._subscriber.open(Deadline(5))
        version = self._subscriber.wait(None, Deadline(5))
        self._snapshot = self._subscriber.snapshot(version, Deadline(5))
        self._snapshot.__enter__()

    def __exit__(self, *error):
        self._snapshot.__exit__(*error)
        self._subscriber.close()


@both_ways
def test_all_ranks_hear_of_a_receiver_that_failed(world, run_dir, gather):
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir, gather=gather)
    ranks.peers[0].call(attach_wrong)
    told = ranks(failures_of_update, 1)
    assert told == [[("wrong", 1, 1)]] * 2
    assert_all_same(sent_to(run_dir), expected())
    ranks.peers[0].call(detach)
    assert_all_work(ranks, run_dir, 2)


def attach_wrong(state):
    state.receiver = state.scheme.create_receiver({"other": torch.zeros(1)}, id="wrong")
    state.sender.attach(state.receiver)


def detach(state):
    state.sender.detach(state.receiver)
    state.receiver.shutdown()


def failures_of_update(state, version):
    try:
        trainers.update(state, version)
    except ws.ReceiverError as error:
        numbers = error.report.version.number, state.sender.version.number
        return [(failed.receiver, *numbers) for failed in error.failures]


@pytest.mark.slow
def test_a_rank_that_was_stopped_writes_nothing_into_the_next_sender_s_buffers(
    mortal, peer, run_dir, tmp_path
):
    """Its own deadline is far away: it has been told to write, and no one waits for it."""
    gate = tmp_path / "gate"
    ranks = mortal(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir)
    first, second = ranks.peers
    second.call(write_after, str(gate))
    second.start(trainers.update, 1, timeout=60)
    with pytest.raises(PeerError, match="rank 1 of the trainer did not come"):
        first.call(trainers.update, 1, timeout=1)
    first.call(trainers.end_senders)
    other = peer()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in expected().items()}
    other.call(send_mapping, run_dir, zeros)
    before = slots_of(run_dir)
    assert before
    gate.touch()
    with pytest.raises(PeerError):
        second.result()
    assert slots_of(run_dir) == before
    assert_all_same(sent_to(run_dir), zeros)


def write_after(state, gate):
    former = state.sender._publisher.contribute

    def contribute(*args):
        eventually(lambda: os.path.exists(gate))
        return former(*args)

    state.sender._publisher.contribute = contribute


def send_mapping(state, path, weights):
    state.model = weights
    trainers.connect(state, path)
    trainers.update(state, 1)


def slots_of(path):
    """What each buffer holds."""
    slots = pathlib.Path(path).glob("*/slot*")
    return {slot: slot.read_bytes() for slot in slots if slot.is_file()}


# -------------------------------------------------------------------- meeting


@pytest.mark.slow
def test_a_rank_s_process_is_replaced(mortal, run_dir, tmp_path):
    """All make the default group again; the new process begins where the others are."""
    ranks = mortal(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir)
    ranks(trainers.update, 1)
    ranks.peers[1].kill()
    ranks.peers[0].call(leave)
    ranks.peers[1] = Peer()
    for rank, one in enumerate(ranks.peers):
        one.start(trainers.join, rank, 2, tmp_path / "another store")
    for one in ranks.peers:
        one.result()
    ranks(trainers.build, "fsdp2")
    for version in (2, 3):
        ranks(trainers.connect, run_dir, timeout=10)
        assert_all_work(ranks, run_dir, version)
        ranks(trainers.end_senders)


def leave(state):
    trainers.end_senders(state)
    dist.destroy_process_group()


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_whose_model_cannot_be_read_while_connecting(world, run_dir, bad):
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    outcomes = ranks.outcomes(connect_failing, run_dir, bad, timeout=1)
    assert outcomes[bad].kind == "SourceError"
    assert outcomes[1 - bad].kind == "DeadlineError"
    assert f"rank {bad} of the trainer did not come" in outcomes[1 - bad].text
    ranks(trainers.end_senders)
    ranks(trainers.connect, run_dir, timeout=10)
    assert_all_work(ranks, run_dir, 1)


def connect_failing(state, path, bad, timeout):
    state.sender = ws.DoubleBufferScheme(path).create_sender(state.model)
    trainers.failing_source(state, bad)
    state.sender.connect(timeout=timeout)


@pytest.mark.parametrize("early", [0, 1])
def test_ranks_that_come_at_other_times(world, run_dir, early):
    """What former senders said in the store is still there, and means nothing."""
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    one, other = ranks.peers[early], ranks.peers[1 - early]
    for version in (1, 2):
        with pytest.raises(PeerError, match=f"rank {1 - early} of the trainer did not come"):
            one.call(trainers.connect, run_dir, timeout=0.3)
        one.call(trainers.end_senders)
        one.start(trainers.connect, run_dir, timeout=20)
        time.sleep(0.2)
        other.call(trainers.connect, run_dir, timeout=20)
        one.result()
        assert_all_work(ranks, run_dir, version)
        ranks(trainers.end_senders)


@pytest.mark.slow
def test_a_trainer_after_one_that_was_killed(mortal, run_dir, tmp_path):
    """Their store outlives them, in another process; the first rank to come must not take what
    they left there for the new rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = mortal(2)
    first(share_store, store.port)
    first(trainers.build, "fsdp2")
    first(trainers.connect, run_dir)
    first(trainers.update, 1)
    for one in first.peers:
        one.start(trainers.keep_updating, 20)
    time.sleep(0.2)
    for one in first.peers:
        one.kill()
    (tmp_path / "store").unlink(missing_ok=True)
    second = mortal(2)
    second(share_store, store.port)
    second(trainers.build, "fsdp2")
    second.peers[1].start(trainers.connect, run_dir, timeout=20)
    time.sleep(0.2)
    second.peers[0].call(trainers.connect, run_dir, timeout=20)
    second.peers[1].result()
    assert_all_work(second, run_dir, 1)


def share_store(state, port):
    from torch.distributed import distributed_c10d

    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    distributed_c10d._get_default_store = lambda: store


def test_senders_of_two_paths_connect_in_opposite_order(world, run_dir):
    ranks = world(2)
    paths = two_paths(run_dir)
    ranks(trainers.build, "fsdp2")
    for version in (1, 2):
        assert ranks(connect_two, paths) == [[True, True]] * 2
        ranks(update_two, version)
        for path in paths:
            assert_all_same(sent_to(path), expected())
        ranks(end_two)


def connect_two(state, paths):
    state.senders = [ws.DoubleBufferScheme(path).create_sender(state.model) for path in paths]

    threads = [
        threading.Thread(target=sender.connect, kwargs={"timeout": 10}) for sender in state.senders
    ]
    for thread in threads[:: -1 if state.rank else 1]:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join()
    return [sender._epoch is not None for sender in state.senders]


def update_two(state, version):
    for sender in state.senders:
        sender.update_weights(version=version, timeout=10)


def end_two(state):
    for sender in state.senders:
        sender.shutdown()


# -------------------------------------------------------------------- rank 0 holds the store


@pytest.fixture
def torchrun(mortal):
    """Two ranks as torchrun starts them: the store is a server in rank 0."""

    def make():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = mortal(2, join=False)
        for rank, one in enumerate(ranks.peers):
            one.start(join_env, rank, 2, port)
        for one in ranks.peers:
            one.result()
        return ranks

    return make


def join_env(state, rank, size, port):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(trainers.torchrun(size, port)[rank])
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    state.rank, state.size = rank, size


def update_marked(state, mark, *arguments, **options):
    """Make a file, and update at once: a process in an update answers to nothing."""
    pathlib.Path(mark).touch()
    return trainers.update(state, *arguments, **options)


def wait_for_mark(mark):
    eventually(lambda: os.path.exists(mark))
    os.unlink(mark)


@pytest.mark.parametrize("when", ["before", "during"])
def test_rank_0_dies_and_the_store_with_it(torchrun, run_dir, when):
    ranks = torchrun()
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir)
    ranks(trainers.update, 1)
    first, second = ranks.peers
    if when == "before":
        first.kill()
    mark = f"{run_dir}-begun"
    second.start(update_marked, mark, 2, timeout=60)
    wait_for_mark(mark)
    if when == "during":
        first.kill()
    with pytest.raises(PeerError, match=r"process that holds it .rank 0, as a rule") as error:
        second.result(10)
    assert error.value.kind == "WeightSyncError"


@pytest.mark.slow
def test_rank_0_is_stopped_and_the_store_with_it(torchrun, run_dir):
    """No call of the store returns; the other rank ends all the same."""
    ranks = torchrun()
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir)
    ranks(trainers.update, 1)
    first, second = ranks.peers
    first.pause()
    with pytest.raises(PeerError, match="rank 0 of the trainer said nothing") as error:
        second.call(trainers.update, 2, timeout=0.3, within=10)
    assert error.value.kind == "DeadlineError"
    first.go_on()
    with pytest.raises(PeerError, match=r"rank 1 of the trainer .* said nothing"):
        first.call(trainers.update, 2, timeout=60, within=5)
    assert_all_work(ranks, run_dir, 3)


@pytest.mark.parametrize("absent", [0, 1])
@pytest.mark.parametrize("first", [0, 1])
def test_ranks_are_in_step_again_after_one_missed_a_call(world, run_dir, absent, first):
    """Whichever rank missed it, and whichever comes first to the next one."""
    ranks = world(2)
    ranks(trainers.build, "fsdp2")
    ranks(trainers.connect, run_dir)
    with pytest.raises(PeerError, match="rank"):
        ranks.peers[1 - absent].call(trainers.update, timeout=0.3)
    for _ in range(2):
        mark = f"{run_dir}-begun"
        ranks.peers[first].start(update_marked, mark)
        wait_for_mark(mark)
        ranks.peers[1 - first].start(trainers.update)
        for peer in ranks.peers:
            peer.result()
    assert_all_same(sent_to(run_dir), expected())
