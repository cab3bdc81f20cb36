"""Visiting the sender of a broadcast: it says how it stands, and goes on as before."""

import json
import socket
import struct
import threading
from dataclasses import replace

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.schemes.nccl.control import PROTOCOL


@pytest.fixture
def scheme():
    return ws.NCCLScheme(backend="gloo", token="secret")


@pytest.fixture
def sender(scheme):
    with scheme.create_sender({"w": torch.ones(10)}, timeout=WAIT) as made:
        made.connect(WAIT)
        yield made


def test_a_sender_tells_a_visitor_what_was_published_and_who_holds_it(scheme, sender):
    assert scheme.inspect().version is None
    engine = {"w": torch.zeros(10)}
    with scheme.create_receiver(engine, id="r1") as receiver:
        receiver.connect(WAIT)
        with Polling(receiver):
            version = sender.update_weights(version=3, wait="applied").version
        status = scheme.inspect()
        assert status.sender_alive
        assert (status.version, status.tensors, status.nbytes) == (version, 1, 40)
        assert [(r.receiver, r.state, r.version) for r in status.receivers] == [
            ("r1", "applied", version)
        ]
        assert status.unseen  # the weights
        assert {r.receiver for r in sender.receivers()} == {"r1"}  # a visitor is no receiver


class Polling:
    """A receiver that polls until the block ends."""

    def __init__(self, receiver):
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._poll, args=(receiver,))

    def _poll(self, receiver):
        while not self._over.is_set():
            receiver.poll_and_apply(0.05)

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()


def test_a_visitor_without_the_token_is_told_nothing(scheme, sender):
    status = replace(scheme, token=None).inspect()
    assert status.version is None
    assert "token" in status.problems[0]


def test_nobody_listens(scheme):
    status = scheme.inspect()
    assert status.sender_alive is False
    assert "no connection" in status.unseen[0]


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400\r\n\r\n", b"", None])
def test_another_program_listens(answer):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        threading.Thread(target=reply, args=(listening, answer), daemon=True).start()
        status = ws.NCCLScheme(master_port=port, backend="gloo").inspect()
    assert status.version is None
    assert status.problems or status.unseen


def reply(listening, answer):
    connection, _ = listening.accept()
    if answer is None:  # a sender of a release that knows no visitors: hangs up after the hello
        greeting = json.dumps({"protocol": PROTOCOL, "nonce": "00"}).encode()
        connection.sendall(struct.pack(">I", len(greeting)) + greeting)
        connection.recv(1000)
    elif answer:
        connection.sendall(answer)
    connection.close()
