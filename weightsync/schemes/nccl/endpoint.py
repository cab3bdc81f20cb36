"""Where a sender listens: addresses and ports, of either family, as one text."""

from __future__ import annotations

import errno
import socket
import weakref
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from weightsync.deadline import Deadline
from weightsync.errors import DeadlineError, SchemeError, SenderBusyError, WeightSyncError

_reserved: dict[tuple[str, int], socket.socket] = {}
"""Sockets that are bound and do not listen: nobody else is given their port, but whoever asks for
that very port with SO_REUSEADDR, as :func:`listen` does, gets it."""

_listening: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Those of this process that :func:`listen` has made."""


@dataclass(frozen=True)
class Endpoint:
    """A host and a port. As a text: ``10.0.0.1:29500``, ``host:29500``, ``[fe80::1]:29500``."""

    host: str
    port: int

    def __str__(self) -> str:
        host = quote(self.host, safe=":.-_")
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """The reverse of ``str``; the port may be absent, and is 0 then.

        Raises:
            SchemeError: it is no address.
        """
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            colon, port = rest[:1], rest[1:]
            good = bool(bracket) and colon in ("", ":") and ":" in host
        else:
            host, colon, port = text.partition(":")
            good = True
        good = good and (port.isascii() and port.isdigit() if colon else not port)
        if not good or not host or int(port or 0) > 65535:
            raise SchemeError(f"{text!r:.200} is no address: host:port, or [IPv6 address]:port")
        return cls(unquote(host), int(port or 0))


def _port_of(listening: socket.socket) -> int | None:
    """None: it was closed."""
    return None if listening.fileno() == -1 else int(listening.getsockname()[1])


def listen(endpoint: Endpoint) -> socket.socket:
    """A listening socket there, and nowhere else. Port 0 takes a free one.

    Raises:
        SenderBusyError: the port is taken. WeightSyncError: it is no address of this host.
    """
    try:
        listening = _bound(endpoint)
        listening.listen(128)
        _listening.add(listening)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            own = any(_port_of(each) == endpoint.port for each in list(_listening))
            whom = (
                "a sender of this very process: shutdown() it first, or"
                if own
                else ("another program or sender:")
            )
            raise SenderBusyError(
                f"port {endpoint.port} of {endpoint.host} is taken by {whom} choose another one "
                "with master_port=, or leave it out for a free one"
            ) from None
        raise WeightSyncError(
            f"cannot listen at {endpoint}: {error.strerror or error}; master_address= is an "
            "address of the trainer's host, by which the receivers reach it"
        ) from None
    return listening


def reserve_port(host: str) -> int:
    """A free port that stays ours for as long as this process lives, also for its children.

    Raises:
        WeightSyncError: there is none, or ``host`` is no address of this machine's.
    """
    try:
        bound = _bound(Endpoint(host, 0))
    except OSError as error:
        raise WeightSyncError(
            f"no free port at {host}: {error.strerror or error}; give a master_port="
        ) from None
    port = int(bound.getsockname()[1])
    _reserved[host, port] = bound
    return port


def _bound(endpoint: Endpoint) -> socket.socket:
    family, kind, protocol, _, address = _resolve(endpoint)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def connect(endpoint: Endpoint, deadline: Deadline) -> socket.socket:
    """
    Raises:
        DeadlineError: nobody listens there, says why.
    """
    words: object = "nobody listens"
    try:
        for family, kind, protocol, _, address in _resolve(endpoint):
            connecting = socket.socket(family, kind, protocol)
            try:
                connecting.settimeout(max(0.001, deadline.remaining))
                connecting.connect(address)
                if connecting.getsockname() == connecting.getpeername():
                    raise ConnectionRefusedError("a port of this range can connect to itself")
                return connecting
            except OSError as error:
                connecting.close()
                words = error.strerror or error
    except OSError as error:
        words = error.strerror or error
    raise DeadlineError(f"no connection to {endpoint}: {words}")


def _resolve(endpoint: Endpoint) -> list[tuple[int, int, int, str, Any]]:
    """One resolver for both sides, so that they agree on the family."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is empty or too long
        raise OSError(f"{endpoint.host!r:.100} is no host name: {error}") from None
    return sorted(found, key=lambda entry: entry[0])


def is_loopback(host: str) -> bool:
    """Whether nobody but this host's own programs can connect."""
    try:
        entries = _resolve(Endpoint(host, 0))
    except OSError:
        return False
    return all(str(entry[4][0]).startswith(("127.", "::1")) for entry in entries)
