"""Names, addresses and ports."""

import socket

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from weightsync.doctor import Subject, network


@pytest.mark.parametrize(
    ("addresses", "state"),
    [(["10.0.0.5"], "ok"), (["127.0.1.1", "10.0.0.5"], "ok"), (["127.0.1.1"], "warning")],
)
def test_the_name_of_this_host(monkeypatch, addresses, state):
    found = [(socket.AF_INET, 1, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **how: found)
    finding = network.host_name(Subject())
    assert finding.state == state
    assert addresses[0] in finding.words


def test_a_name_that_nobody_knows(monkeypatch):
    def unknown(*args, **how):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert network.host_name(Subject()).state == "warning"


def test_an_address_that_is_given_is_looked_at_instead(monkeypatch):
    def unknown(name, *args, **how):
        raise socket.gaierror(-2, f"{name} is unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    scheme = ws.NCCLScheme(backend="gloo", master_address="trainer-0", master_port=29_500)
    finding = network.host_name(Subject(scheme=scheme))
    assert finding.state == "problem"
    assert "trainer-0 is not found" in finding.words


def test_a_port_can_be_had():
    assert network.ports(Subject()).state == "ok"


def test_a_port_of_a_sender_and_one_of_another_program():
    scheme = ws.NCCLScheme(backend="gloo")
    assert "can be listened at" in network.ports(Subject(scheme=scheme)).words
    with scheme.create_sender({"w": torch.ones(1)}, timeout=WAIT) as sender:
        sender.connect(WAIT)
        assert "a sender answers" in network.ports(Subject(scheme=scheme)).words
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        other = ws.NCCLScheme(backend="gloo", master_port=listening.getsockname()[1])
        listening.settimeout(WAIT)
        import threading

        threading.Thread(target=_rude, args=(listening,), daemon=True).start()
        assert network.ports(Subject(scheme=other)).state == "problem"


def _rude(listening):
    for _ in range(2):
        connection, _ = listening.accept()
        connection.sendall(b"220 mail.example.org\r\n")
        connection.close()


def test_an_address_of_another_host_where_nobody_listens():
    scheme = ws.NCCLScheme(backend="gloo", master_address="192.0.2.77", master_port=29_500)
    finding = network.ports(Subject(scheme=scheme))
    assert finding.state == "warning"
    assert "192.0.2.77" in finding.words
