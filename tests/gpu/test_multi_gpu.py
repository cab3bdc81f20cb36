"""Two GPUs: a broadcast between them, an engine with TP=2 by plan, a trainer sharded over both."""

import importlib.util

import pytest
import torch
from torch import nn

import weightsync as ws
from tests.gpu.engines import greedy, make_llm, model, stop
from tests.live.processes import Peer
from weightsync.chunks import CHUNK
from weightsync.device import device_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.live,
    # Engines are started by fixtures, whose time does not count.
    pytest.mark.timeout(180, func_only=True),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WAIT = 90.0

SHAPES = {"large": (3000, 4001), "small": (17,), "empty": (0, 2), "more": (2048, 2048)}


def some_bits(seed, device="cpu"):
    """Every bit pattern, those of no number too."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=random)
        .view(torch.bfloat16)
        .to(device)
        for name, shape in SHAPES.items()
    }


def different(found, wanted):
    return [
        name
        for name, tensor in wanted.items()
        if not torch.equal(found[name].cpu().view(torch.int16), tensor.view(torch.int16))
    ]


def send_from(state, scheme, gpu):
    torch.cuda.set_device(gpu)
    state.sender = scheme.create_sender(some_bits(0, "cuda"))
    state.sender.connect(timeout=WAIT)


def send(state, number):
    report = state.sender.update_weights(some_bits(number, "cuda"), version=number, timeout=WAIT)
    return report.nbytes


def receive_on(state, scheme, gpu):
    torch.cuda.set_device(gpu)
    state.target = some_bits(99, "cuda")
    state.receiver = scheme.create_receiver(state.target, id="other")
    state.receiver.connect(WAIT)


def wrong_after(state, number):
    assert state.receiver.poll_and_apply(WAIT).version.number == number
    return different(state.target, some_bits(number))


@pytest.fixture
def peers():
    both = [Peer(), Peer()]
    yield both
    for one in both:
        one.dispose()


def test_a_broadcast_to_another_gpu_is_right_bit_for_bit(peers):
    trainer, receiver = peers
    scheme = ws.NCCLScheme(bucket_mb=4)
    trainer.call(send_from, scheme, 0, within=WAIT)
    receiver.call(receive_on, scheme, 1, within=WAIT)
    for number in (1, 2, 3):
        trainer.call(send, number, within=WAIT)
        assert receiver.call(wrong_after, number, within=WAIT) == []


def digest_on(state, index):
    """
    Returns:
        The GPUs on which this process has a context.
    """
    gpu = device_of(torch.device("cuda", index))
    lane = gpu.lane()
    data, into = gpu.empty(CHUNK), lane.empty(1)
    gpu.digests(lane, data.data_ptr(), 1, into)
    lane.wait()
    return [n for n in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(n)]


def test_work_on_the_second_gpu_takes_no_memory_of_the_first(peers):
    assert peers[0].call(digest_on, 1, within=WAIT) == [1]


def stack(seed):
    """Rows that two ranks cannot share evenly, and fewer rows than ranks."""
    torch.manual_seed(seed)
    parts = [nn.Linear(257, 33), nn.Linear(33, 1), nn.Linear(1024, 2048, bias=False)]
    return nn.Sequential(*parts).bfloat16()


def join(state, store, rank):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=2
    )


def publish_sharded(state, scheme, number):
    from torch.distributed.fsdp import fully_shard

    policy = stack(number).cuda()
    for layer in policy:
        fully_shard(layer)
    fully_shard(policy)
    if not hasattr(state, "sender"):
        state.sender = scheme.create_sender(policy, gather=False)
        state.sender.connect(timeout=WAIT)
    state.sender.update_weights(policy, version=number, timeout=WAIT)


def end_sender(state):
    state.sender.shutdown()
    torch.distributed.destroy_process_group()


def test_a_trainer_sharded_over_two_gpus_is_right_bit_for_bit(peers, run_dir, tmp_path):
    scheme = ws.DoubleBufferScheme(run_dir)
    for rank, peer in enumerate(peers):
        peer.start(join, tmp_path / "store", rank)
    for peer in peers:
        peer.result(WAIT)
    target = stack(99)
    receiver = scheme.create_receiver(target)
    for number in (1, 2, 3):
        for peer in peers:
            peer.start(publish_sharded, scheme, number)
        for peer in peers:
            peer.result(WAIT)
        if number == 1:
            receiver.connect(WAIT)
        assert receiver.poll_and_apply(WAIT).version.number == number
        assert different(target.state_dict(), stack(number).state_dict()) == []
    receiver.shutdown()
    for peer in peers:
        peer.start(end_sender)
    for peer in peers:
        peer.result(WAIT)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Tokens of an engine that loads the last version from files."""
    folder = tmp_path_factory.mktemp("saved")
    model(4).save_pretrained(folder)
    llm = make_llm(folder, "safetensors", tensor_parallel_size=2)
    try:
        return greedy(llm)
    finally:
        stop(llm)


@pytest.fixture(scope="module")
def engine(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model(0).config.save_pretrained(folder)
    llm = make_llm(folder, tensor_parallel_size=2)
    yield llm
    stop(llm)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")
@pytest.mark.parametrize("stage", [False, True], ids=["plan", "staged"])
def test_two_workers_get_their_rows_by_plan(loaded, engine, run_dir, stage):
    scheme = ws.DoubleBufferScheme(run_dir)
    receiver = scheme.create_receiver(engine, apply="plan", stage=stage)
    with scheme.create_sender() as sender, receiver:
        sender.connect()
        receiver.connect()
        for number in (1, 2, 3, 4):
            sender.update_weights(model(number).cuda(), version=number)
            report = receiver.poll_and_apply(timeout=30)
        assert any("copies by plan" in note and "reload" not in note for note in report.notes)
        assert receiver.verify_weights().ok
        assert greedy(engine) == loaded
