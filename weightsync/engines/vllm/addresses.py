"""Which addresses are this machine's own, and which of them another machine sees."""

from __future__ import annotations

import socket
from typing import Any


def is_own(host: str) -> bool:
    """Whether a name or address leads to this machine: no proxy does, and loopback reaches it.

    May wait for the system's resolver.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False  # whoever connects will say so
    return all(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def own_address_towards(host: str, port: int) -> str:
    """This machine's address on the route to another one. Sends nothing.

    Raises:
        OSError: there is no route.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
