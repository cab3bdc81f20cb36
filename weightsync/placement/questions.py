"""What an end is asked before a scheme is chosen: where it is, what it finds, whom it reaches.

Questions and answers are plain dicts that could be JSON, whatever way they travel. A proof that two
processes share a directory, or that one reaches the other, is made by doing it: with a random word
that the one writes, or says, and the other reads.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from contextlib import suppress
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.placement.place import Place
from weightsync.schemes.nccl.endpoint import Endpoint, connect, listen, reserve_port

_WORD = re.compile(r"[0-9a-f]{16,64}")

_SAYING = 5.0
"""Seconds for a word to go over a connection."""

_listening: dict[str, socket.socket] = {}
"""By the word that is said there to whoever connects."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer a question in the process that it is about; never raises.

    ==========  =================================================================================
    ``look``    ``place``: where this process is
    ``leave``   write ``word`` into a file of ``directory``; ``free``: bytes of room there
    ``find``    read what was left in ``directory``, and be able to write there
    ``remove``  remove it
    ``listen``  at ``host``, and say ``word`` to whoever connects; ``port``: a free one, kept
    ``reach``   connect to ``host`` and ``port`` within ``seconds`` and hear ``word``
    ``hush``    listen no more
    ==========  =================================================================================

    Returns:
        What is said above, or ``error``: why not.
    """
    try:
        return _ANSWERS[str(question["op"])](question) or {}
    except Exception as error:
        own = isinstance(error, WeightSyncError)
        return {"error": (str(error) if own else f"{type(error).__name__}: {error}")[:1000]}


def _look(question: dict[str, Any]) -> dict[str, Any]:
    return {"place": Place.here().to_dict()}


def _leave(question: dict[str, Any]) -> dict[str, Any]:
    path = _path(question)
    exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, exclusive, 0o600), "w") as file:
        file.write(_word(question))
    room = os.statvfs(os.path.dirname(path))
    return {"free": room.f_bavail * room.f_frsize}


def _find(question: dict[str, Any]) -> None:
    path = _path(question)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        if file.read(100) != _word(question):
            raise WeightSyncError(f"{path} says something else here")
    if not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
        raise WeightSyncError(f"{os.path.dirname(path)} cannot be written to here")


def _remove(question: dict[str, Any]) -> None:
    with suppress(FileNotFoundError):
        os.unlink(_path(question))


def _listen(question: dict[str, Any]) -> dict[str, Any]:
    host, word = str(question["host"]), _word(question)
    port = int(question.get("port") or reserve_port(host))
    listening = _listening[word] = listen(Endpoint(host, port))

    def serve() -> None:
        with suppress(OSError):  # hushed
            while True:
                connection, _ = listening.accept()
                with connection, suppress(OSError):
                    connection.settimeout(_SAYING)
                    connection.sendall(word.encode())

    threading.Thread(target=serve, name="weightsync listens", daemon=True).start()
    return {"port": port}


def _reach(question: dict[str, Any]) -> None:
    where = Endpoint(str(question["host"]), int(question["port"]))
    deadline, word = Deadline(float(question["seconds"])), _word(question)
    with connect(where, deadline) as connection:
        connection.settimeout(max(0.01, deadline.at_most(_SAYING).remaining))
        heard = connection.makefile().read(len(word))
    if heard != word:
        raise WeightSyncError(f"another program answers at {where}")


def _hush(question: dict[str, Any]) -> None:
    listening = _listening.pop(_word(question), None)
    if listening is not None:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        listening.close()


def _word(question: dict[str, Any]) -> str:
    word = question["word"]
    if not isinstance(word, str) or not _WORD.fullmatch(word):
        raise WeightSyncError(f"no word to prove something by: {word!r:.80}")
    return word


def _path(question: dict[str, Any]) -> str:
    directory = question["directory"]
    if not isinstance(directory, str) or not directory.startswith("/"):
        raise WeightSyncError(f"{directory!r:.200}: an absolute path was expected")
    return os.path.join(directory, f"weightsync-proof-{_word(question)}")


_ANSWERS = {
    "look": _look,
    "leave": _leave,
    "find": _find,
    "remove": _remove,
    "listen": _listen,
    "reach": _reach,
    "hush": _hush,
}
