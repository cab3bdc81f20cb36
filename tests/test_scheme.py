"""Schemes as URLs and dicts; unknown and wrong options."""

import copy
import json
import pickle
from pathlib import Path

import pytest

import weightsync as ws
from weightsync.scheme import register_scheme

SCHEMES = [
    ws.DoubleBufferScheme("/dev/shm/run42"),
    ws.DoubleBufferScheme("/dev/shm/run42", slots=3, on_busy="skip", verify=False),
    ws.DoubleBufferScheme("/mnt/a", reader_path="/mnt/b", keep_files=True),
    ws.DoubleBufferScheme("/x", slots=4, threads=2),
    ws.DoubleBufferScheme("/a b/c%20d/e?f=g&h/#i;j/k+l/ä/日本/x:y@z/'\"\\"),
    ws.DoubleBufferScheme("/x", reader_path="/r?s=t&u=v#w +%20ä"),
    ws.DoubleBufferScheme("/tab\tand\nnewline\r", reader_path="/also\there\n"),
    ws.DoubleBufferScheme("/not-utf8-\udcff", reader_path="/nor-this-\udcfe"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: ascii(scheme.path))
def test_round_trips(scheme):
    url = scheme.to_url()
    assert url.isascii()
    assert url.isprintable()
    assert ws.scheme_from_url(url) == scheme
    assert ws.scheme_from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
    assert pickle.loads(pickle.dumps(scheme)) == scheme
    assert copy.deepcopy(scheme) == scheme
    assert hash(scheme) == hash(copy.copy(scheme))


def test_url_is_short():
    assert SCHEMES[0].to_url() == "shm:///dev/shm/run42"
    assert SCHEMES[1].to_url() == "shm:///dev/shm/run42?slots=3&on_busy=skip&verify=0"


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("shm:///r", ws.DoubleBufferScheme("/r")),
        ("SHM:///r", ws.DoubleBufferScheme("/r")),
        ("shm:/r", ws.DoubleBufferScheme("/r")),
        ("shm:///r?", ws.DoubleBufferScheme("/r")),
        ("shm:///r/../s/./t//", ws.DoubleBufferScheme("/s/t")),
        ("shm:///r?slots=4&verify=true", ws.DoubleBufferScheme("/r", slots=4)),
        ("shm:///r?verify=False", ws.DoubleBufferScheme("/r", verify=False)),
        ("shm:///r?threads=2", ws.DoubleBufferScheme("/r", threads=2)),
    ],
)
def test_read(url, scheme):
    assert ws.scheme_from_url(url) == scheme


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "URL"),
        ("/dev/shm/run42", "URL"),
        ("nobody:///x", "'nobody'.*shm"),
        ("shm:", "path"),
        ("shm://", "path"),
        ("shm:///", "path"),
        ("shm:run42", "absolute"),
        ("shm://run42", "three slashes"),
        ("shm://[::1", "URL"),
        ("shm:///r#fragment", "%23"),
        ("shm:///a%00b", "path"),
        ("shm:///r?slot=3", "'slot'.*slots"),
        ("shm:///r?path=/other", "'path'"),
        ("shm:///r?slots=3&slots=3", "twice"),
        ("shm:///r?slots=three", "slots='three': an int was expected"),
        ("shm:///r?slots=", "slots"),
        ("shm:///r?slots=2.0", "slots"),
        ("shm:///r?slots=1", "slots"),
        ("shm:///r?slots=-2", "slots"),
        ("shm:///r?slots=1000", "slots"),
        ("shm:///r?on_busy=never", "on_busy.*wait"),
        ("shm:///r?verify=maybe", "verify"),
        ("shm:///r?threads=0", "threads"),
        ("shm:///r?reader_path=relative", "reader_path"),
        ("shm:///r?reader_path=", "reader_path"),
        (5, "URL"),
        (None, "URL"),
    ],
)
def test_wrong_urls(url, words):
    with pytest.raises(ws.SchemeError, match=words):
        ws.scheme_from_url(url)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "'scheme'"),
        ({"scheme": None}, "'scheme'"),
        ({"scheme": "nobody"}, "'nobody'"),
        ({"scheme": "shm"}, "path"),
        ({"scheme": "shm", "path": None}, "path"),
        ({"scheme": "shm", "path": 5}, "path"),
        ({"scheme": "shm", "path": "r"}, "absolute"),
        ({"scheme": "shm", "path": "/r", "slots": "3"}, "slots='3': an int is wanted, not a str"),
        ({"scheme": "shm", "path": "/r", "slots": 1}, "slots=1: 2 to 64 are possible"),
        ({"scheme": "disk", "path": "/r", "keep": 0}, "keep=0: at least 1 is possible"),
        ({"scheme": "shm", "path": "/r", "slots": True}, "slots"),
        ({"scheme": "shm", "path": "/r", "slots": 2.0}, "slots"),
        ({"scheme": "shm", "path": "/r", "slots": None}, "slots"),
        ({"scheme": "shm", "path": "/r", "verify": 1}, "verify"),
        ({"scheme": "shm", "path": "/r", "keep_files": "no"}, "keep_files"),
        ({"scheme": "shm", "path": "/r", "on_busy": None}, "on_busy"),
        ({"scheme": "shm", "path": "/r", "threads": 1e6}, "threads"),
        ({"scheme": "shm", "path": "/r", "threads": 1.5}, "threads"),
        ({"scheme": "shm", "path": "/r", "port": 5}, "'port'"),
        ({"scheme": "shm", "path": "/r", 5: 5}, "5"),
    ],
)
def test_wrong_dicts(values, words):
    with pytest.raises(ws.SchemeError, match=words):
        ws.scheme_from_dict(values)


@pytest.mark.parametrize(
    "path", ["", ".", "run", "~/run", "/", "//", "//host/share", "/.", "/a\0b"]
)
def test_wrong_paths(path):
    with pytest.raises(ws.SchemeError, match="path"):
        ws.DoubleBufferScheme(path)


def test_paths_may_be_path_objects():
    assert ws.DoubleBufferScheme(Path("/dev/shm/run")) == ws.DoubleBufferScheme("/dev/shm/run")


def test_the_dict_given_is_not_changed():
    values = {"scheme": "shm", "path": "/r"}
    ws.scheme_from_dict(values)
    assert values == {"scheme": "shm", "path": "/r"}


def test_a_name_is_registered_once():
    register_scheme(ws.DoubleBufferScheme)
    with pytest.raises(ws.SchemeError, match="shm"):
        register_scheme(type("Other", (ws.WeightSyncScheme,), {"url_scheme": "shm"}))


def test_configuration_touches_nothing(tmp_path):
    scheme = ws.DoubleBufferScheme(tmp_path / "run")
    scheme.create_sender()
    scheme.create_receiver({})
    assert list(tmp_path.iterdir()) == []
