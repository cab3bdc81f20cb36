"""Real NCCL: several ranks on one card (each says it is another host), and a vLLM worker."""

import importlib.util
import os
import signal

import pytest
import torch

import weightsync as ws
from tests.live.processes import Peer, PeerError, eventually
from weightsync.schemes.nccl import reader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.live,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WAIT = 90.0
SHAPES = {
    "large": (3000, 4001),
    "small": (17,),
    "bytes": (3,),
    "empty": (0, 2),
    "more": (2048, 2048),
}


def become(state, name):
    """NCCL refuses two ranks on one GPU, unless it takes them for two hosts."""
    os.environ["NCCL_HOSTID"] = name
    torch.cuda.set_device(0)


def use_gpu(state, index):
    torch.cuda.set_device(index)


def weights(number, device="cuda"):
    return {
        name: torch.full(shape, float(number), device=device, dtype=torch.bfloat16)
        for name, shape in SHAPES.items()
    }


def send_from(state, scheme):
    state.sender = scheme.create_sender(timeout=WAIT)
    state.sender.connect(timeout=WAIT)


def publish(state, number, **options):
    try:
        report = state.sender.update_weights(weights(number), version=number, **options)
    except ws.ReceiverError as error:
        told = error.report.receivers if error.report else error.failures
        return {r.receiver: (r.state, r.version and r.version.number) for r in told}, str(error)
    return {r.receiver: (r.state, r.version.number) for r in report.receivers}, ""


def known(state):
    return sorted(r.receiver for r in state.sender.receivers() if r.state != "dead")


def receive_in(state, scheme, id):
    state.target = weights(-1)
    state.receiver = scheme.create_receiver(state.target, id=id)
    state.receiver.connect(WAIT)
    state.receiver.follow()


def held(state):
    with state.receiver.hold() as version:
        values = {float(x) for t in state.target.values() for x in t.flatten()[:1]}
        values |= {float(x) for t in state.target.values() for x in t.flatten()[-1:]}
        return version and version.number, sorted(values)


def end(state):
    state.receiver.shutdown()


def at_bucket(state, number, stop):
    take = reader.Reader._take

    def patched(self, arriving):
        if arriving.message["number"] == number:
            reader.Reader._take = take
            os.kill(os.getpid(), signal.SIGSTOP if stop else signal.SIGKILL)
        take(self, arriving)

    reader.Reader._take = patched


@pytest.fixture
def peer():
    made = []

    def make(name):
        made.append(Peer())
        made[-1].call(become, name)
        return made[-1]

    yield make
    for one in reversed(made):
        one.dispose()


@pytest.fixture(params=["gpu", "host"])
def scheme(request):
    return ws.NCCLScheme(bucket_mb=4, peer_timeout=5.0, memory=request.param)


@pytest.fixture
def group(peer, scheme):
    """A trainer and four receivers, all on the one card."""
    trainer = peer("trainer")
    trainer.call(send_from, scheme, within=WAIT)
    ids = ["a", "b", "c", "d"]
    made = {id: peer(id) for id in ids}
    for id, one in made.items():
        one.call(receive_in, scheme, id, within=WAIT)
    return trainer, made


def test_four_receivers_get_what_is_sent(group):
    trainer, receivers = group
    for number in (1, 2, 3):
        told, words = trainer.call(publish, number, wait="applied", within=WAIT)
        assert (told, words) == (dict.fromkeys(receivers, ("applied", number)), "")
        for one in receivers.values():
            assert one.call(held) == (number, [number])
    told, _ = trainer.call(publish, 4, wait="applied", receivers=["b", "d"], within=WAIT)
    assert told == {"b": ("applied", 4), "d": ("applied", 4)}
    assert receivers["a"].call(held) == (3, [3.0])
    assert receivers["d"].call(held) == (4, [4.0])
    for one in receivers.values():
        one.call(end)


@pytest.mark.parametrize("stop", [False, True], ids=["killed", "stopped"])
def test_one_is_lost_in_the_middle_of_a_transfer(group, peer, scheme, stop):
    """H1: a hung collective is aborted, the others are served by the same call."""
    trainer, receivers = group
    trainer.call(publish, 1, wait="applied", within=WAIT)
    receivers["c"].call(at_bucket, 2, stop)
    told, words = trainer.call(publish, 2, wait="applied", timeout=60, within=WAIT)
    print(words)
    assert told == {id: ("dead", 1) if id == "c" else ("applied", 2) for id in receivers}
    assert "'c'" in words
    for id in ("a", "b", "d"):
        assert receivers[id].call(held) == (2, [2.0])
    if stop:
        receivers["c"].go_on()
    else:
        receivers["c"] = peer("c again")
        receivers["c"].call(receive_in, scheme, "c", within=WAIT)
    eventually(lambda: trainer.call(known) == ["a", "b", "c", "d"], 30)
    told, words = trainer.call(publish, 3, wait="applied", within=WAIT)
    assert (told, words) == (dict.fromkeys(receivers, ("applied", 3)), "")


def test_one_gpu_is_not_two(peer, scheme):
    """P7, for real."""
    trainer, receiver = peer(""), peer("")
    trainer.call(send_from, scheme, within=WAIT)
    with pytest.raises(PeerError, match=r"same GPU.*DoubleBufferScheme"):
        receiver.call(receive_in, scheme, "r", within=WAIT)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_from_one_gpu_to_another(scheme):
    """By whatever way NCCL finds between them."""
    trainer, receiver = Peer(), Peer()
    try:
        trainer.call(use_gpu, 0)
        receiver.call(use_gpu, 1)
        trainer.call(send_from, scheme, within=WAIT)
        receiver.call(receive_in, scheme, "other", within=WAIT)
        for number in (1, 2, 3):
            told, _ = trainer.call(publish, number, wait="applied", within=WAIT)
            assert told == {"other": ("applied", number)}
            assert receiver.call(held) == (number, [number])
    finally:
        receiver.dispose()
        trainer.dispose()


def end_sender(state):
    state.sender.shutdown()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_of_the_same_host_dies_between_updates():
    """An orderly end of the group would wait for it: NCCL takes these two for one host."""
    scheme = ws.NCCLScheme(bucket_mb=4, peer_timeout=5.0)
    trainer, receiver, again = peers = [Peer(), Peer(), Peer()]
    try:
        for one, index in zip(peers, (0, 1, 1), strict=True):
            one.call(use_gpu, index)
        trainer.call(send_from, scheme, within=WAIT)
        receiver.call(receive_in, scheme, "first", within=WAIT)
        told, _ = trainer.call(publish, 1, wait="applied", within=WAIT)
        assert told == {"first": ("applied", 1)}
        receiver.kill()
        again.call(receive_in, scheme, "second", within=WAIT)
        told, _ = trainer.call(publish, 2, wait="applied", within=WAIT)
        assert told["second"] == ("applied", 2)
        again.kill()
        trainer.call(end_sender, within=20)
    finally:
        for one in peers:
            one.dispose()


def generate(state, tokens=12):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": each} for each in ([1, 2, 3, 4], [9, 8, 7], [42])]
    outputs = state.llm.generate(prompts, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def make_llm(folder, load_format):
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its worker is this process
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        folder,
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        gpu_memory_utilization=0.2,
        weight_transfer_config=WeightTransferConfig(backend="weightsync"),
    )


def hold_llm(state, scheme, folder):
    state.llm = make_llm(folder, "dummy")
    state.receiver = scheme.create_receiver(state.llm, id="vllm")
    state.receiver.connect(WAIT)


def load_and_generate(state, folder):
    """What vLLM generates after its own load of a checkpoint."""
    state.llm = make_llm(folder, "safetensors")
    return generate(state)


def apply(state):
    return state.receiver.poll_and_apply(WAIT).version.number


def send_model(state, folder, number):
    from tests.vllm.conftest import make_model

    config = state.config
    model = make_model(config, number).bfloat16()
    model.save_pretrained(f"{folder}/{number}")
    state.sender.update_weights(model.cuda(), version=number)


def use_config(state, folder):
    from tests.vllm.conftest import llama_config

    state.config = llama_config(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=4, torch_dtype="bfloat16"
    )
    state.config.save_pretrained(folder)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")
def test_a_vllm_worker_receives(peer, scheme, tmp_path):
    trainer, engine = peer("trainer"), peer("engine")
    folder = str(tmp_path)
    trainer.call(use_config, folder)
    trainer.call(send_from, scheme, within=WAIT)
    engine.call(hold_llm, scheme, folder, within=200)
    seen = []
    for number in (1, 2, 3):
        trainer.call(send_model, folder, number, within=WAIT)
        assert engine.call(apply, within=WAIT) == number
        seen.append(engine.call(generate, within=WAIT))
    assert seen[0] != seen[1] != seen[2]
    assert peer("loaded").call(load_and_generate, f"{folder}/3", within=200) == seen[2]
