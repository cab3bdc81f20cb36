"""How a broadcast is configured."""

import pickle
import socket

import pytest

import weightsync as ws
from weightsync.schemes.nccl.endpoint import Endpoint, listen, reserve_port


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("fe80::1", "[fe80::1]:29500"),
        ("::1", "[::1]:29500"),
        ("10.0.0.1", "10.0.0.1:29500"),
        ("host", "host:29500"),
        ("fe80::1%eth0", "[fe80::1%25eth0]:29500"),
    ],
)
def test_addresses_of_either_family(host, text):
    """P5."""
    assert str(Endpoint(host, 29500)) == text
    assert Endpoint.parse(text) == Endpoint(host, 29500)
    scheme = ws.NCCLScheme(master_address=host, master_port=29500, backend="gloo")
    assert scheme.to_url() == f"nccl://{text}?backend=gloo"
    assert ws.scheme_from_url(scheme.to_url()) == scheme


@pytest.mark.parametrize(
    "text", ["", ":1", "[::1", "[host]:1", "host:x", "host:99999", "::1", "[::1]x", "a b:٣"]
)
def test_what_is_no_address(text):
    with pytest.raises(ws.SchemeError, match="address"):
        Endpoint.parse(text)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_replicas": 2, "gpus_per_replica": 4},
        {"gpus_per_replica": [4, 2]},
        {"gpus_per_replica": [(2, 1, 2), 1]},
        {"backend": "gloo", "bucket_mb": 3, "buffers": 1, "verify": False, "peer_timeout": 2.5},
        {"token": "a&b=c #é"},
    ],
)
def test_it_round_trips(options):
    scheme = ws.NCCLScheme(**options)
    assert ws.scheme_from_url(scheme.to_url()) == scheme
    assert ws.scheme_from_dict(scheme.to_dict()) == scheme
    assert pickle.loads(pickle.dumps(scheme)) == scheme


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "mpi"}, "backend"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"gpus_per_replica": 0}, "number of GPUs"),
        ({"gpus_per_replica": [2, 1], "num_replicas": 3}, "for 2 replicas"),
        ({"gpus_per_replica": "2"}, "gpus_per_replica"),
        ({"master_address": "[::1]"}, "master_address"),
        ({"master_address": ""}, "master_address"),
        ({"master_port": 70000}, "master_port"),
        ({"master_port": "29500"}, "master_port"),
        ({"master_port": False}, "master_port"),
        ({"peer_timeout": True}, "peer_timeout"),
        ({"buffers": 0}, "buffers"),
        ({"peer_timeout": 0}, "peer_timeout"),
        ({"peer_timeout": float("nan")}, "peer_timeout"),
        ({"token": ""}, "token"),
        ({"verify": 1}, "verify"),
    ],
)
def test_options_that_make_no_sense(options, words):
    with pytest.raises(ws.SchemeError, match=words):
        ws.NCCLScheme(**options)


@pytest.mark.parametrize("url", ["nccl://host/path", "nccl://host:1?slots=2", "nccl://a:b"])
def test_urls_that_make_no_sense(url):
    with pytest.raises(ws.SchemeError):
        ws.scheme_from_url(url)


def test_a_free_port_is_the_schemes_own_from_then_on():
    """P3: nobody else is given it, and the sender takes it without a race."""
    port = reserve_port("127.0.0.1")
    for _ in range(50):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] != port
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    with (
        listen(Endpoint("127.0.0.1", port)),
        pytest.raises(
            ws.SenderBusyError, match=rf"{port}.*this very process: shutdown.*master_port="
        ),
    ):
        listen(Endpoint("127.0.0.1", port))


def test_an_address_of_another_host_is_refused_in_words():
    sender = ws.NCCLScheme(
        master_address="192.0.2.77", master_port=29500, backend="gloo"
    ).create_sender()
    with pytest.raises(ws.WeightSyncError, match=r"192\.0\.2\.77.*master_address="):
        sender.connect()


def test_without_a_gpu_nccl_says_what_works():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ws.SchemeError, match="gloo"):
        ws.NCCLScheme().create_sender().connect()
