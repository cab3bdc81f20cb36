"""Fallbacks as lists, URLs and dicts."""

import copy
import json
import math
import pickle

import pytest

import weightsync as ws

SHM = ws.DoubleBufferScheme("/dev/shm/run42", slots=3)
ODD = ws.DoubleBufferScheme("/a,b;c?d&e=f#g%2Ch i", reader_path="/r,s;t?u&v=w", on_busy="skip")
NCCL = ws.NCCLScheme("::1", 29500, backend="gloo", gpus_per_replica=(2, 4), token="a,b;c&d?e")


@pytest.mark.parametrize(
    "scheme",
    [
        ws.FallbackScheme([SHM]),
        ws.FallbackScheme([SHM, ODD]),
        ws.FallbackScheme([NCCL, SHM], retry_after=0),
        ws.FallbackScheme([ODD, NCCL, SHM], retry_after=1.5, attempt_timeout=0.25),
        ws.FallbackScheme([SHM, ODD], retry_after=math.inf, attempt_timeout=20),
    ],
    ids=lambda scheme: "+".join(scheme.names),
)
def test_round_trips(scheme):
    url = scheme.to_url()
    assert url.isascii()
    assert url.isprintable()
    assert ws.scheme_from_url(url) == scheme
    assert ws.scheme_from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert copy.deepcopy(scheme) == scheme
    assert hash(scheme) == hash(copy.copy(scheme))


def test_the_url_is_one_that_people_type():
    scheme = ws.FallbackScheme([SHM, ws.DoubleBufferScheme("/mnt/run")], retry_after=5.0)
    url = "fallback://shm:///dev/shm/run42?slots=3,shm:///mnt/run;retry_after=5.0"
    assert scheme.to_url() == url


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        (
            "fallback://nccl://127.0.0.1:29500?backend=gloo&buffers=3,shm:///tmp/x",
            ws.FallbackScheme(
                [
                    ws.NCCLScheme("127.0.0.1", 29500, backend="gloo", buffers=3),
                    ws.DoubleBufferScheme("/tmp/x"),
                ]
            ),
        ),
        (
            "fallback://nccl://[::1]:29500,shm:///r?slots=4&verify=0;retry_after=2&attempt_timeout=3",
            ws.FallbackScheme(
                [
                    ws.NCCLScheme("::1", 29500),
                    ws.DoubleBufferScheme("/r", slots=4, verify=False),
                ],
                retry_after=2,
                attempt_timeout=3,
            ),
        ),
        ("FALLBACK:shm:///r;", ws.FallbackScheme([ws.DoubleBufferScheme("/r")])),
        ("fallback://shm:///a%2Cb%3Bc", ws.FallbackScheme([ws.DoubleBufferScheme("/a,b;c")])),
    ],
)
def test_read(url, scheme):
    assert ws.scheme_from_url(url) == scheme


def test_a_port_that_was_drawn_is_the_same_on_both_sides():
    scheme = ws.FallbackScheme([ws.NCCLScheme(backend="gloo"), SHM])
    assert ws.scheme_from_url(scheme.to_url()).schemes[0].port == scheme.schemes[0].port


def test_members_may_be_urls_and_dicts():
    assert ws.FallbackScheme([SHM.to_url(), ODD.to_dict()]) == ws.FallbackScheme((SHM, ODD))


def test_each_has_a_name():
    assert ws.FallbackScheme([SHM, NCCL, ODD]).names == ("shm", "nccl", "shm#2")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("fallback:", "URL"),
        ("fallback://", "URL"),
        ("fallback:///tmp/x", "URL"),
        ("fallback://shm:///r,", "URL"),
        ("fallback://shm:///r,nobody:///x", "'nobody'"),
        ("fallback://shm:///r?slot=3", "'slot'.*slots"),
        ("fallback://shm:///r,shm:///r", "twice"),
        ("fallback://fallback://shm:///r,shm:///s", "in a fallback"),
        ("fallback://shm:///r;colour=1", "'colour'.*retry_after"),
        ("fallback://shm:///r;schemes=shm:///s", "'schemes'"),
        ("fallback://shm:///r;retry_after=soon", "retry_after"),
        ("fallback://shm:///r;retry_after=-1", "retry_after"),
        ("fallback://shm:///r;retry_after=nan", "retry_after"),
        ("fallback://shm:///r;retry_after=1;attempt_timeout=1", "retry_after"),
        ("fallback://shm:///r;attempt_timeout=0", "attempt_timeout"),
        ("fallback://shm:///r#x", "%23"),
    ],
)
def test_wrong_urls(url, words):
    with pytest.raises(ws.SchemeError, match=words):
        ws.scheme_from_url(url)


@pytest.mark.parametrize(
    ("schemes", "options", "words"),
    [
        ([], {}, "schemes"),
        ("shm:///r", {}, "schemes"),
        (None, {}, "schemes"),
        ({"shm:///r": 1}, {}, "schemes"),
        ([5], {}, "int"),
        ([None], {}, "NoneType"),
        ([ws.FallbackScheme([SHM])], {}, "in a fallback"),
        ([{"scheme": "fallback", "schemes": ["shm:///r"]}], {}, "in a fallback"),
        ([{"scheme": "shm", "path": "r"}], {}, "absolute"),
        ([SHM], {"retry_after": "60"}, "retry_after"),
        ([SHM], {"retry_after": True}, "retry_after"),
        ([SHM], {"retry_after": None}, "retry_after"),
        ([SHM], {"attempt_timeout": -1}, "attempt_timeout"),
    ],
)
def test_wrong_options(schemes, options, words):
    with pytest.raises(ws.SchemeError, match=words):
        ws.FallbackScheme(schemes, **options)
