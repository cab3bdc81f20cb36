"""What is said of a process, and whether what comes from elsewhere is believed."""

import json
import pickle
from dataclasses import replace

import pytest

import weightsync as ws

HERE = ws.Place.here()


def test_a_place_travels_as_json_and_as_an_argument():
    assert ws.Place.from_dict(json.loads(json.dumps(HERE.to_dict()))) == HERE
    assert pickle.loads(pickle.dumps(HERE)) == HERE


@pytest.mark.parametrize(
    "document", [None, {}, {**HERE.to_dict(), "pid": "x"}, {**HERE.to_dict(), "gpus": None}]
)
def test_what_is_no_place_is_refused(document):
    with pytest.raises(ws.ProtocolError, match="no description of a place"):
        ws.Place.from_dict(document)


def test_processes_of_one_machine_are_together_and_of_one_container_only(peers):
    (peer,) = peers(1)
    other = peer.call(_place)
    assert other.process != HERE.process
    assert other.is_with(HERE)
    assert not replace(other, machine="another").is_with(HERE)
    assert not replace(other, node="named").is_with(HERE)


def _place(state):
    return ws.Place.here()


def test_what_the_system_does_not_tell_is_equal_to_nothing(monkeypatch):
    def unknown(*arguments, **options):
        raise OSError("no such file")

    monkeypatch.setattr("builtins.open", unknown)
    monkeypatch.setattr("os.readlink", unknown)
    assert not ws.Place.here().is_with(HERE)
