"""What an end answers before a scheme is chosen, and what it does not do for whoever asks."""

import os
import socket

import pytest

from weightsync.placement.questions import answer

WORD = "0123456789abcdef"


def test_what_is_left_is_found_and_then_removed(tmp_path):
    about = {"directory": str(tmp_path), "word": WORD}
    assert answer({"op": "leave", **about})["free"] > 0
    assert answer({"op": "find", **about}) == {}
    assert "says something else" in _found_otherwise(tmp_path, about)
    answer({"op": "remove", **about})
    assert os.listdir(tmp_path) == []
    assert "FileNotFoundError" in answer({"op": "find", **about})["error"]


def _found_otherwise(folder, about):
    (file,) = folder.iterdir()
    file.write_text("another word")
    return answer({"op": "find", **about})["error"]


def test_no_link_is_followed(tmp_path):
    target = tmp_path / "target"
    (tmp_path / f"weightsync-proof-{WORD}").symlink_to(target)
    for op in ("leave", "find"):
        assert "error" in answer({"op": op, "directory": str(tmp_path), "word": WORD})
    assert not target.exists()


def test_a_word_is_heard_by_whoever_connects_until_it_is_hushed():
    about = {"host": "127.0.0.1", "word": WORD}
    port = answer({"op": "listen", **about})["port"]
    reach = {"op": "reach", **about, "port": port, "seconds": 5.0}
    assert answer(reach) == {}
    assert "another program" in answer({**reach, "word": WORD[::-1]})["error"]
    answer({"op": "hush", **about})
    assert "no connection" in answer(reach)["error"]


def test_one_that_listens_and_says_nothing_is_waited_for_until_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        reach = {"op": "reach", "host": "127.0.0.1", "port": port, "word": WORD, "seconds": 0.2}
        assert "TimeoutError" in answer(reach)["error"]


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"op": "run"},
        {"op": "leave", "directory": "/dev/shm", "word": "../x"},
        {"op": "leave", "directory": "relative", "word": WORD},
        {"op": "find", "directory": None, "word": WORD},
        {"op": "listen", "host": "nowhere.invalid", "word": WORD},
        {"op": "hush", "word": 7},
    ],
)
def test_nonsense_is_an_answer_too(question):
    assert "error" in answer(question)
