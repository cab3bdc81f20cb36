"""Sends a worker's answer to the driver itself, where vLLM's RPC would drop it."""

from __future__ import annotations

import json
import logging
import socket

from weightsync.engines.vllm.ballot import LARGEST, message
from weightsync.words import one_line

log = logging.getLogger("weightsync")

_PATIENCE = 5.0
"""Seconds that a driver has to take an answer."""


def send(request: str, answer: str) -> None:
    """Send an answer to where the request says, if it does. Raises nothing.

    A driver that it does not reach sees that it is missing.
    """
    try:
        where = json.loads(request).get("answer")
        if where is None:
            return
        content = message(str(where["token"]), int(where["number"]), answer)
        if len(answer) > LARGEST:
            raise ValueError(f"an answer of {len(answer):,} characters is too long")
        address = str(where["host"]), int(where["port"])
        with socket.create_connection(address, timeout=_PATIENCE) as connection:
            connection.sendall(content)
    except Exception as error:
        log.warning("an answer did not reach the driver: %s", one_line(error))
