"""Collects the answers of workers that a server's RPC reaches, and whose answers it drops.

With data parallelism vLLM's RPC calls the workers of every rank, and returns what those of the
first one say. So each is told where the driver listens, and sends its answer there too. An answer
is a text with a keyed digest of it (HMAC-SHA256); the key is in the request that asks for it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import EngineError

LARGEST = 1 << 20
"""Bytes of an answer, at most."""

_DIGEST = hashlib.sha256().digest_size

_PATIENCE = 5.0
"""Seconds that a connection may take to bring its answer."""


def message(token: str, number: int, text: str) -> bytes:
    """What a worker sends: a digest and its answer to question ``number``, until it closes."""
    content = text.encode()
    return _digest(token, number, content) + content


def _digest(token: str, number: int, content: bytes) -> bytes:
    return hmac.digest(token.encode(), b"%d:" % number + content, "sha256")


class Question:
    """One request, and the answers that have come to it."""

    def __init__(self, number: int, host: str, port: int) -> None:
        self.token = secrets.token_hex(16)
        self.answer = {"host": host, "port": port, "token": self.token, "number": number}
        self._answers: dict[int, str] = {}
        self._changed = threading.Condition()

    def answered(self, worker: int, text: str) -> None:
        """The first answer of a worker counts."""
        with self._changed:
            self._answers.setdefault(worker, text)
            self._changed.notify_all()

    def wait(self, workers: int, deadline: Deadline) -> list[str]:
        """
        Returns:
            One answer for each of the workers ``0`` to ``workers - 1``, in this order.

        Raises:
            EngineError: some have not answered; says which.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: set(range(workers)) <= self._answers.keys(), deadline.remaining
            )
            missing = [number for number in range(workers) if number not in self._answers]
            if missing:
                raise EngineError(
                    f"of {workers} workers {', '.join(map(str, missing))} did not answer at "
                    f"{self.answer['host']}:{self.answer['port']}: if that address does not lead "
                    "here from where they run, give VLLMServer(url, answer_address=...) one that "
                    "does"
                )
            return [self._answers[number] for number in range(workers)]


class Ballot:
    """Listens at one address for answers to the questions that are open.

    Args:
        host: an address of this machine; the only one that it listens at.

    Raises:
        EngineError: it is none of this machine's.
    """

    def __init__(self, host: str) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise EngineError(f"answer_address={host!r} leads nowhere: give one of this machine's")
        self._questions: dict[int, Question] = {}
        self._count = 0
        self._lock = threading.Lock()
        try:
            self._server = _Listener(host, self._take)
        except OSError as error:
            raise EngineError(f"cannot listen for workers at {host}: {error}") from None
        self.host, self.port = host, int(self._server.server_address[1])
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="weightsync ballot", daemon=True
        ).start()

    @contextmanager
    def question(self) -> Iterator[Question]:
        """A question whose answers are taken inside."""
        with self._lock:
            self._count += 1
            number = self._count
            question = self._questions[number] = Question(number, self.host, self.port)
        try:
            yield question
        finally:
            with self._lock:
                self._questions.pop(number, None)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, received: bytes) -> None:
        """Give an answer to the question it proves to know; anything else is dropped."""
        digest, content = received[:_DIGEST], received[_DIGEST:]
        with self._lock:
            questions = list(self._questions.items())
        for number, question in questions:
            if hmac.compare_digest(digest, _digest(question.token, number, content)):
                worker = _worker_of(content)
                if worker is not None:
                    question.answered(worker, content.decode())


def _worker_of(content: bytes) -> int | None:
    try:
        worker = json.loads(content)["rank"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return worker if type(worker) is int and worker >= 0 else None


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, host: str, take: Any) -> None:
        self.take = take
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), _Reader)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever sends nonsense is not worth a trace on the terminal."""


class _Reader(socketserver.BaseRequestHandler):
    server: _Listener

    def handle(self) -> None:
        deadline, received = Deadline(_PATIENCE), bytearray()
        while len(received) <= _DIGEST + LARGEST:
            self.request.settimeout(max(deadline.remaining, 0.001))
            part = self.request.recv(1 << 16)
            if not part:
                self.server.take(bytes(received))
                return
            received += part
