"""The control channel: small JSON messages between a sender and those that receive from it.

Each message is four bytes of length, big-endian, and JSON; nothing is ever unpickled. A process
that dies closes its connection, which the other side sees at once. Whoever connects proves that it
knows the token, if there is one, and is told so; the token itself is never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from weightsync.deadline import Deadline
from weightsync.errors import ProtocolError, SchemeError
from weightsync.schemes.nccl import endpoint
from weightsync.schemes.nccl.endpoint import Endpoint

Message = dict[str, Any]
log = logging.getLogger("weightsync")

PROTOCOL = "weightsync-nccl-2"
MAX_HELLO = 1 << 16
MAX_MESSAGE = 1 << 30
"""Bytes: a manifest of millions of tensors."""

HELLO_SECONDS = 5.0
"""Whoever connects and says nothing is hung up on after this."""

SEND_SECONDS = 5.0
"""A peer that takes no bytes for so long has stopped."""

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""A forked child would keep its parent's connections, and port, alive: it closes them at once."""


def _close_in_child() -> None:
    for each in list(_sockets):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


class Connection:
    """Messages both ways over one socket. Any thread may send; one thread receives.

    Attributes:
        local_host: the address of this end: the one by which the other end reaches this host.
        heard: when the last message came, in seconds of the monotonic clock.
        proof: what shows the other side that this one knows the token.
    """

    proof = ""
    closed = False

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self.local_host = str(connected.getsockname()[0])
        self.heard = time.monotonic()
        _sockets.add(connected)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A host that is gone says nothing: ask after 5 s, give up after 6 more.
        for option, value in (
            (socket.TCP_KEEPIDLE, 5),
            (socket.TCP_KEEPINTVL, 2),
            (socket.TCP_KEEPCNT, 3),
        ):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        # Only sending is bounded by the socket itself: receiving waits for whatever comes next.
        connected.settimeout(None)
        bound = struct.pack("ll", int(SEND_SECONDS), 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)

    def send(self, message: Message) -> None:
        """
        Raises:
            OSError: the peer is gone, or takes nothing.
        """
        data = json.dumps(message).encode()
        left = memoryview(struct.pack(">I", len(data)) + data)
        with self._sending:
            begun = False
            try:
                while left:
                    left = left[self._socket.send(left) :]
                    begun = True
            except BaseException:
                if begun and left:
                    self.close()  # half a message went out: what follows would make no sense
                raise

    def welcome(self, **fields: Any) -> None:
        """Answer a hello."""
        self.send({"op": "welcome", "proof": self.proof, **fields})

    def tell(self, message: Message) -> bool:
        """Send to a peer that may be gone. Whether it went out; if not, it is hung up on."""
        try:
            self.send(message)
        except OSError:
            self.close()
            return False
        return True

    def receive(self, limit: int = MAX_MESSAGE) -> Message:
        """The next message.

        Raises:
            EOFError, OSError: the connection is over. ProtocolError: this is no message.
        """
        (length,) = struct.unpack(">I", self._exactly(4))
        if length > limit:
            raise ProtocolError(f"a message of {length} bytes; {limit} are allowed")
        try:
            message = json.loads(self._exactly(length))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not a message: {error!s:.100}") from None
        if not isinstance(message, dict):
            raise ProtocolError(f"not a message: {message!r:.100}")
        self.heard = time.monotonic()
        return message

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError("the connection was closed")
            parts += part
        return bytes(parts)

    def bound_receive(self, seconds: float | None) -> None:
        """How long ``receive`` may wait for the next bytes; None for ever."""
        whole = 0.0 if seconds is None else max(seconds, 0.001)
        bound = struct.pack("ll", int(whole), int(whole % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)

    def close(self) -> None:
        """Hang up; wakes the thread that receives. Idempotent."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Refused(SchemeError):
    """The other side does not want this connection; has its words."""


class Server:
    """Listens, and runs a function in a thread of its own for each that says hello properly.

    Args:
        where: host and port; port 0 takes a free one.
        token: what those who connect must know; None for nothing.
        serve: called with the hello and the connection. It calls ``welcome`` or raises
            :class:`Refused`, and receives until the connection is over.
    """

    def __init__(
        self, where: Endpoint, token: str | None, serve: Callable[[Message, Connection], None]
    ) -> None:
        self._listening = endpoint.listen(where)
        _sockets.add(self._listening)
        self.where = Endpoint(where.host, int(self._listening.getsockname()[1]))
        self._token = token
        self._serve = serve
        self._closed = False
        self._accepted: weakref.WeakSet[Connection] = weakref.WeakSet()
        threading.Thread(target=self._accept, name="weightsync accept", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                if self._closed or self._listening.fileno() < 0:
                    return
                time.sleep(0.05)  # out of descriptors, say: it may get better
                continue
            threading.Thread(
                target=self._greet, args=(accepted,), name="weightsync control", daemon=True
            ).start()

    def _greet(self, accepted: socket.socket) -> None:
        connection = None
        try:
            connection = Connection(accepted)
            self._accepted.add(connection)
            if self._closed:
                raise Refused("the sender has ended")
            connection.bound_receive(HELLO_SECONDS)
            nonce = secrets.token_hex(16)
            connection.send({"protocol": PROTOCOL, "nonce": nonce})
            hello = connection.receive(MAX_HELLO)
            if hello.get("protocol") != PROTOCOL:
                raise Refused(f"this is {PROTOCOL}, not {hello.get('protocol')!r:.80}")
            if not hmac.compare_digest(str(hello.get("proof")), _proof(self._token, nonce)):
                raise Refused("the token= is not the sender's")
            connection.bound_receive(None)
            connection.proof = _proof(self._token, str(hello.get("nonce")))
            self._serve(hello, connection)
        except Refused as error:
            if connection is not None:
                connection.tell({"op": "refused", "error": str(error)})
        except (OSError, EOFError):
            pass  # gone, or never one of ours
        except Exception as error:
            log.debug("%s: hung up on a peer: %s: %s", self.where, type(error).__name__, error)
        finally:
            if connection is not None:
                connection.close()
            else:
                accepted.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._listening.close()
        for connection in list(self._accepted):  # also those that are just saying hello
            connection.close()


def join(
    where: Endpoint, token: str | None, hello: Message, deadline: Deadline
) -> tuple[Connection, Message]:
    """Connect to a sender.

    Returns:
        The connection and the sender's welcome.

    Raises:
        DeadlineError: nobody is there. Refused: the sender does not want this, or is none.
    """
    connection = Connection(endpoint.connect(where, deadline))
    try:
        connection.bound_receive(deadline.remaining)
        greeting = connection.receive(MAX_HELLO)
        if greeting.get("protocol") != PROTOCOL:
            raise Refused(f"{where} is no sender of {PROTOCOL}")
        nonce = secrets.token_hex(16)
        proof = _proof(token, str(greeting.get("nonce")))
        connection.send({**hello, "protocol": PROTOCOL, "nonce": nonce, "proof": proof})
        welcome = connection.receive(MAX_HELLO)
        if welcome.get("op") == "refused":
            raise Refused(f"the sender at {where} says: {welcome.get('error')!s:.500}")
        if not hmac.compare_digest(str(welcome.get("proof")), _proof(token, nonce)):
            raise Refused(f"the sender at {where} does not know the token=")
        connection.bound_receive(None)
    except ProtocolError:
        connection.close()
        raise Refused(f"{where} is no sender of {PROTOCOL}: another program has the port") from None
    except BaseException:
        connection.close()
        raise
    return connection, welcome


def _proof(token: str | None, nonce: str) -> str:
    return hmac.new((token or "").encode(), nonce.encode(), hashlib.sha256).hexdigest()
