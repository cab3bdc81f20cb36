"""A LoRA adapter of a vLLM server, under the one name that requests give."""

import gc
import os
import threading
from contextlib import contextmanager
from glob import glob

import httpx
import pytest

import weightsync as ws
from tests.vllm.conftest import PROMPTS, expected, llama_config, make_model
from tests.vllm.forms.servers import TOKEN, Server
from tests.vllm.test_adapter import (
    FOLDERS,
    LONG,
    make_adapter,
    merged,
    other_shape,
    require_from_either,
)

pytestmark = [pytest.mark.vllm, pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def base():
    return make_model(llama_config(), seed=1)


@contextmanager
def serving(base, folder, **flags):
    base.save_pretrained(folder)
    server = Server(
        folder,
        os.path.join(folder, "server.log"),
        {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"},
        load_format="safetensors",
        served_model_name="base",
        enable_lora=True,
        max_lora_rank=8,
        **flags,
    )
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    with serving(base, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture
def ends(server, path):
    scheme = ws.DoubleBufferScheme(path)
    engine = ws.VLLMAdapter(server.target, name="policy")
    with scheme.create_sender() as sender, scheme.create_receiver(engine) as receiver:
        sender.connect()
        sender.attach(receiver)
        yield sender, receiver, engine
    engine.unload()
    assert not glob(FOLDERS)


def ask(server, model, prompts=PROMPTS, count=10):
    """Greedy tokens for each prompt."""
    response = httpx.post(
        f"{server.url}/v1/completions",
        json={
            "model": model,
            "prompt": prompts,
            "temperature": 0,
            "max_tokens": count,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        headers={"Authorization": f"Bearer {TOKEN}"},
        timeout=60,
        trust_env=False,
    )
    assert response.status_code == 200, response.text
    choices = sorted(response.json()["choices"], key=lambda choice: choice["index"])
    return [choice["token_ids"] for choice in choices]


def test_k1_every_version_is_served_under_the_name_and_no_cache_remembers_another(
    server, base, ends
):
    sender, _, _ = ends
    seen = set()
    for number in (1, 2, 3):
        peft = make_adapter(base, seed=200 + number)
        sender.update_weights(ws.AdapterSource(peft), version=number)
        for prompts in (PROMPTS, LONG):
            right = expected(merged(peft), prompts)
            assert ask(server, "policy", prompts) == right
            assert ask(server, "policy", prompts) == right
            assert ask(server, "base", prompts) == expected(base, prompts) != right
        seen.add(str(right))
    assert len(seen) == 3


def test_requests_meanwhile_are_answered_all(server, base, ends):
    """F1: whatever a request saw of the old version, its end is of one of the two."""
    sender, _, _ = ends
    pefts = [make_adapter(base, seed=210 + number) for number in range(2)]
    sender.update_weights(ws.AdapterSource(pefts[0]), version=1)
    answers, errors, stop = [], [], threading.Event()

    def load():
        while not stop.is_set():
            try:
                answers.append(ask(server, "policy", LONG, 20)[0])
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(2, 6):
        sender.update_weights(ws.AdapterSource(pefts[(number - 1) % 2]), version=number)
        right = expected(merged(pefts[(number - 1) % 2]), LONG, 20)
        assert ask(server, "policy", LONG, 20) == right
    stop.set()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert answers
    require_from_either(answers, [merged(peft) for peft in pefts], LONG[0])


def test_what_vllm_refuses_leaves_the_former_version(server, base, ends):
    sender, receiver, _ = ends
    refused(server, base, sender, receiver)


def refused(server, base, sender, receiver):
    with pytest.raises(ws.ReceiverError, match="must match"):
        sender.update_weights(ws.AdapterSource(other_shape(base)), version=1)
    peft = make_adapter(base, seed=220)
    right = expected(merged(peft), LONG)
    sender.update_weights(ws.AdapterSource(peft), version=2)
    assert ask(server, "policy", LONG) == right
    for number in (3, 4):  # twice: workers out of step would give the answers of before
        with pytest.raises(ws.ReceiverError, match="must match"):
            sender.update_weights(ws.AdapterSource(other_shape(base)), version=number)
        assert receiver.status().state == "rolled back"
        assert ask(server, "policy", LONG) == right
    better = make_adapter(base, seed=221)
    sender.update_weights(ws.AdapterSource(better), version=5)
    assert ask(server, "policy", LONG) == expected(merged(better), LONG)


def test_base_and_adapter_side_by_side(server, base, ends, path):
    sender, _, _ = ends
    peft = make_adapter(base, seed=230)
    sender.update_weights(ws.AdapterSource(peft), version=1)
    scheme = ws.DoubleBufferScheme(path + "-base")
    with scheme.create_sender() as other, scheme.create_receiver(server.target) as receiver:
        other.connect()
        other.attach(receiver)
        for number, seed in enumerate((3, 1)):  # another base, and the first one again
            new = make_model(llama_config(), seed)
            other.update_weights(new, version=number)
            on_new = merged(make_adapter(new, seed=230))
            assert ask(server, "policy", LONG) == expected(on_new, LONG)
            assert ask(server, "base", LONG) == expected(new, LONG)


def test_another_driver_takes_over_and_the_first_ones_files_stay_until_then(server, base, path):
    """A driver that ends, or dies, takes nothing away that the server may read again."""
    left = []
    for number in (1, 2):
        scheme = ws.DoubleBufferScheme(f"{path}-{number}")
        engine = ws.VLLMAdapter(ws.VLLMServer(server.url, TOKEN), name="policy")
        with scheme.create_sender() as sender, scheme.create_receiver(engine) as receiver:
            sender.connect()
            sender.attach(receiver)
            peft = make_adapter(base, seed=240 + number)
            sender.update_weights(ws.AdapterSource(peft), version=1)
        left.append(set(glob(FOLDERS)))
        if number == 1:
            del engine, receiver, sender
            gc.collect()
            assert set(glob(FOLDERS)) == left[0]
        assert ask(server, "policy", LONG) == expected(merged(peft), LONG)
    engine.unload()


def test_several_workers_stay_in_step(base, tmp_path, path):
    """Two, each of which has a half of every layer."""
    scheme = ws.DoubleBufferScheme(path)
    with serving(base, tmp_path, tensor_parallel_size=2) as server:
        engine = ws.VLLMAdapter(server.target)
        with scheme.create_sender() as sender, scheme.create_receiver(engine) as receiver:
            sender.connect()
            sender.attach(receiver)
            refused(server, base, sender, receiver)
