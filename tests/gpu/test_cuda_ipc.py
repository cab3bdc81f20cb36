"""CUDA IPC for real: the trainer's own tensors, mapped by another process, and by vLLM's worker."""

import gc
import importlib.util
import os
import threading
import time

import pytest
import torch

import weightsync as ws
from tests.conftest import assert_all_same
from tests.gpu.engines import dense, greedy, make_llm, model, stop
from weightsync.deadline import Deadline
from weightsync.device import driver
from weightsync.schemes.cuda_ipc.handles import CUDAExchange
from weightsync.testing.processes import PeerError, eventually

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {"large": (3000, 4001), "small": (17,), "bytes": (3,), "empty": (0, 2), "more": (512, 512)}
WAIT = 40.0


# -------------------------------------------------------------------- what processes do


def constants(number, device="cuda"):
    return {
        name: torch.full(shape, float(number), device=device, dtype=torch.bfloat16)
        for name, shape in SHAPES.items()
    }


def values(weights):
    return sorted({float(x) for t in weights.values() if t.numel() for x in (t.min(), t.max())})


def send(state, scheme, expandable=False):
    if expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    state.weights = constants(0)
    state.sender = scheme.create_sender(state.weights)
    state.sender.connect(timeout=WAIT)


def update(state, number, timeout=WAIT, **options):
    """Publish a constant, and overwrite it as soon as ``update_weights`` has returned."""
    for tensor in state.weights.values():
        tensor.fill_(number)
    try:
        report = state.sender.update_weights(version=number, timeout=timeout, **options)
        told = {r.receiver: r.state for r in report.receivers}, report.notes
    except ws.ReceiverError as error:
        told = {f.receiver: f.state for f in error.failures}, (str(error),)
    for tensor in state.weights.values():
        tensor.fill_(-7)
    torch.cuda.synchronize()
    return told


def move(state):
    """Put the weights elsewhere, and give their former memory back to the driver."""
    state.weights.clear()
    state.sender.register_model({})
    gc.collect()
    torch.cuda.empty_cache()
    state.weights.update(constants(0))
    state.sender.register_model(state.weights)


def free_memory(state):
    """Bytes of the GPU that are free after the trainer gave its weights up."""
    state.weights.clear()
    state.sender.register_model({})
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def receive(state, scheme, id):
    state.weights = constants(-1)
    state.errors = []
    state.receiver = scheme.create_receiver(state.weights, id=id)
    state.receiver.connect(timeout=WAIT)
    state.receiver.follow(on_error=lambda error: state.errors.append(str(error)))


def seen(state):
    with state.receiver.hold() as version:
        return version and version.number, values(state.weights), list(state.errors)


def hold(state, seconds):
    """Begin to keep updates away for a while, in the background."""
    begun = threading.Event()

    def holding():
        with state.receiver.hold():
            begun.set()
            time.sleep(seconds)

    threading.Thread(target=holding, daemon=True).start()
    assert begun.wait(WAIT)


def read_and_wait(state, scheme, seconds):
    """Lease what is shown, wait, read it, and settle."""
    subscriber = scheme.create_subscriber()
    subscriber.open(Deadline(WAIT))
    version = subscriber.wait(None, Deadline(WAIT))
    snapshot = subscriber.snapshot(version, Deadline(WAIT))
    state.tensors = dict(snapshot)
    time.sleep(seconds)
    found = values(state.tensors)
    snapshot.settle()
    return found


@pytest.fixture
def scheme(run_dir):
    return ws.CUDAIPCScheme(run_dir)


# -------------------------------------------------------------------- two processes


def test_versions_arrive_and_the_trainer_goes_on_only_when_they_have(scheme, peers):
    trainer, engine = peers(2)
    trainer.call(send, scheme, within=WAIT)
    engine.call(receive, scheme, "engine", within=WAIT)
    for number in range(1, 20):
        assert trainer.call(update, number) == ({"engine": "applied"}, ())
        assert engine.call(seen) == (number, [number], [])


def test_tensors_that_moved_are_found_even_at_their_former_addresses(scheme, peers):
    trainer, engine = peers(2)
    trainer.call(send, scheme, within=WAIT)
    engine.call(receive, scheme, "engine", within=WAIT)
    for number in range(1, 5):
        assert trainer.call(update, number) == ({"engine": "applied"}, ())
        assert engine.call(seen) == (number, [number], [])
        trainer.call(move)


def test_expandable_segments_are_copied_first(scheme, peers):
    """CUDA has no handles for them."""
    trainer, engine = peers(2)
    trainer.call(send, scheme, expandable=True, within=WAIT)
    engine.call(receive, scheme, "engine", within=WAIT)
    for number in (1, 2):
        told, notes = trainer.call(update, number)
        assert told == {"engine": "applied"}
        assert engine.call(seen) == (number, [number], [])
    assert "were copied" in notes[0]


def test_release_lets_the_trainer_free_its_memory(run_dir, peers):
    scheme = ws.CUDAIPCScheme(run_dir, release=True)
    trainer, engine = peers(2)
    trainer.call(send, scheme, within=WAIT)
    engine.call(receive, scheme, "engine", within=WAIT)
    for number in (1, 2):
        assert trainer.call(update, number)[0] == {"engine": "applied"}
        assert engine.call(seen) == (number, [number], [])
    before = torch.cuda.mem_get_info()[0]
    after = trainer.call(free_memory)
    assert after - before >= 20 << 20, "the engine still has it mapped"
    assert engine.call(seen) == (2, [2], [])


def test_a_killed_trainer_leaves_the_engine_whole(scheme, peers):
    trainer, engine, after = peers(3)
    trainer.call(send, scheme, within=WAIT)
    engine.call(receive, scheme, "engine", within=WAIT)
    trainer.call(update, 1)
    trainer.kill()
    assert engine.call(seen) == (1, [1], [])
    after.call(send, scheme, within=WAIT)
    assert after.call(update, 3)[0] == {"engine": "applied"}
    assert engine.call(seen)[:2] == (3, [3])


def test_a_killed_engine_is_named_and_holds_nobody_up(scheme, peers):
    trainer, good, bad = peers(3)
    trainer.call(send, scheme, within=WAIT)
    good.call(receive, scheme, "good", within=WAIT)
    bad.call(receive, scheme, "bad", within=WAIT)
    bad.call(hold, 30.0)
    trainer.start(update, 1)
    eventually(lambda: good.call(seen)[0] == 1)
    bad.kill()
    assert trainer.result()[0] == {"bad": "dead"}
    assert good.call(seen) == (1, [1], [])
    assert trainer.call(update, 2)[0] == {"good": "applied"}


def test_a_late_reader_finds_out_that_the_version_was_taken_back(scheme, peers):
    trainer, engine, reader = peers(3)
    trainer.call(send, scheme, within=WAIT)
    engine.call(receive, scheme, "engine", within=WAIT)
    engine.call(hold, 3.0)
    reader.start(read_and_wait, scheme, 4.0)
    told, words = trainer.call(update, 1, timeout=2.0)
    assert told == {"engine": "waiting"}
    assert "taken back" in words[0]
    with pytest.raises(PeerError, match="took version"):
        reader.result()
    assert trainer.call(update, 2)[0] == {"engine": "applied"}
    assert engine.call(seen)[:2] == (2, [2])


# -------------------------------------------------------------------- one process


def test_in_one_process_every_kind_of_tensor(scheme):
    generator = torch.Generator("cuda").manual_seed(1)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    weights = {
        "float32": randn(513, 2049),
        "bfloat16": randn(2049, 33).bfloat16(),
        "float8": randn(64, 31).to(torch.float8_e4m3fn),
        "int64": torch.arange(1000, device="cuda"),
        "scalar": torch.tensor(3.5, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "strided": randn(300, 700).t(),
        "part": randn(100, 100)[3:50],
        "on the processor": torch.randn(77, 5),
    }
    target = {n: torch.zeros_like(t, device="cuda").contiguous() for n, t in weights.items()}
    target["int64"] = target["int64"].cpu()
    with scheme.create_sender(weights) as sender, scheme.create_receiver(target) as receiver:
        sender.connect()
        receiver.connect()
        sender.attach(receiver)
        for number in (1, 2, 3):
            for tensor in weights.values():
                if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                    tensor.mul_(1.5)
            report = sender.update_weights(version=number)
            here = {name: tensor.cpu() for name, tensor in target.items()}
            assert_all_same(here, {name: tensor.cpu() for name, tensor in weights.items()})
        nbytes = weights["strided"].nbytes + weights["on the processor"].nbytes
        assert f"{nbytes:,} bytes of 2 tensors were copied" in report.notes[0]


def test_r7_a_cast_of_what_is_still_being_computed(scheme):
    weights = {"w": torch.zeros(2048, 2048, device="cuda")}
    target = {"w": torch.zeros(2048, 2048, device="cuda", dtype=torch.bfloat16)}
    with (
        scheme.create_sender(weights, dtype=torch.bfloat16) as sender,
        scheme.create_receiver(target) as receiver,
    ):
        sender.connect()
        receiver.connect()
        sender.attach(receiver)
        for number in range(1, 6):
            busy = torch.randn(4096, 4096, device="cuda")
            for _ in range(20):
                busy = busy @ busy / 4096
            weights["w"].copy_(busy[:2048, :2048] * 0 + number)
            sender.update_weights(version=number)
            assert target["w"].eq(number).all()


def test_memory_of_our_own_is_given_back():
    exchange = CUDAExchange()
    place = exchange.main_place()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    room = exchange.allocate(place, 1 << 28)
    assert len(exchange.handle(place, room.tensor.data_ptr())) == 64
    assert torch.cuda.mem_get_info()[0] <= before - (1 << 28)
    del room
    gc.collect()
    assert torch.cuda.mem_get_info()[0] >= before - (1 << 26)


def test_too_much_is_no_room():
    exchange = CUDAExchange()
    with pytest.raises(ws.NoRoomError):
        exchange.allocate(exchange.main_place(), 1 << 44)


def test_a_handle_of_nothing_is_refused_in_the_drivers_words():
    with pytest.raises(driver.DriverError):
        CUDAExchange().open(torch.device("cuda", 0), bytes(64))


# -------------------------------------------------------------------- vLLM


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vllm")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    folder = tmp_path_factory.mktemp("colocated")
    dense().save_pretrained(folder)
    llm = make_llm(folder)
    yield llm
    stop(llm)


@pytest.mark.parametrize("release", [False, True])
def test_a_colocated_vllm_takes_the_trainers_own_tensors(llm, run_dir, release):
    """Its tokens are those after the same weights came through shared memory."""
    models = [model(seed).cuda() for seed in (1, 2)]
    right = []
    with (
        ws.DoubleBufferScheme(run_dir).create_sender() as sender,
        ws.DoubleBufferScheme(run_dir).create_receiver(llm) as receiver,
    ):
        sender.connect()
        receiver.connect()
        sender.attach(receiver)
        for trained in models:
            sender.update_weights(trained)
            right.append(greedy(llm))
    assert right[0] != right[1]
    scheme = ws.CUDAIPCScheme(run_dir, release=release)
    trained = model(1).cuda()
    with scheme.create_sender(trained) as sender, scheme.create_receiver(llm) as receiver:
        sender.connect()
        receiver.connect()
        sender.attach(receiver)
        for step in range(4):
            with torch.no_grad():
                for mine, other in zip(
                    trained.parameters(), models[step % 2].parameters(), strict=True
                ):
                    mine.copy_(other)
            report = sender.update_weights(version=step)
            assert not report.notes, "nothing had to be copied"
            with torch.no_grad():  # the trainer goes on at once
                for mine in trained.parameters():
                    mine.zero_()
            torch.cuda.synchronize()
            assert greedy(llm) == right[step % 2]


def test_an_engine_in_another_process_than_the_trainer_is_waited_for(llm, scheme, peers):
    """The receiver follows in a thread; the trainer's process has no other tie to the engine."""
    (trainer,) = peers(1)
    trainer.call(send_model, scheme, within=WAIT)
    receiver = scheme.create_receiver(llm, id="engine")
    try:
        receiver.connect(timeout=WAIT)
        tokens = []
        for seed in (1, 2, 1):
            trainer.start(train_and_send, seed)
            report = eventually(lambda: receiver.poll_and_apply(0.5), WAIT)
            assert report.version.number == trainer.result()
            tokens.append(greedy(llm))
        assert tokens[0] == tokens[2] != tokens[1]
    finally:
        receiver.shutdown()


def send_model(state, scheme):
    state.model = model(1).cuda()
    state.sender = scheme.create_sender(state.model, timeout=WAIT)
    state.sender.connect(timeout=WAIT)


def train_and_send(state, seed):
    state.model.load_state_dict(model(seed).state_dict())
    number = state.sender.update_weights().version.number
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.zero_()
    torch.cuda.synchronize()
    return number
