"""JSON over HTTP with one server: bounded in time and size, errors in the server's own words.

Imported only when a server is used: it needs httpx.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from weightsync.deadline import Deadline, call_with_deadline
from weightsync.engines.vllm.addresses import is_own
from weightsync.errors import DeadlineError, EngineDiedError, EngineError

T = TypeVar("T")

_LARGEST = 64 << 20
"""Bytes of an answer, at most."""

_WORDS = 1000
"""Characters of a server's own words in a message, at most."""

_IDLE = 2.0
"""Seconds that an idle connection is used again: vLLM closes them after 5, and a request that
meets the closing would look like the server's death."""

_LOOK = 1.0
"""Seconds after which a server that has not answered is asked whether it lives, again and again."""

_HEALTH = 2.0
"""Seconds that a server has to say that it lives."""

_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment"


class RouteError(EngineError):
    """The server answered a request with an error.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Connection:
    """Requests to one server. May be used from any thread.

    Args:
        url: of the server, with the path it is mounted at, if any.
        token: sent as ``Authorization: Bearer``; appears in no message.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.url = checked_url(url)
        self._token = checked_token(token)
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the server."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    def get(self, route: str, deadline: Deadline, **query: Any) -> Any:
        """See :meth:`request`."""
        return self.request("GET", route, deadline, query=query)

    def post(self, route: str, deadline: Deadline, body: Any = None, **query: Any) -> Any:
        """See :meth:`request`."""
        return self.request("POST", route, deadline, body, query)

    def request(
        self,
        method: str,
        route: str,
        deadline: Deadline,
        body: Any = None,
        query: dict[str, Any] | None = None,
        *,
        parse: bool = True,
    ) -> Any:
        """
        Args:
            parse: whether the answer is JSON; if not, only its status counts.

        Returns:
            The answer, parsed; None for an empty one.

        Raises:
            RouteError: the server answered with an error. EngineDiedError: it is gone.
            DeadlineError: it did not answer in time. EngineError: its answer is no JSON, or the
                connection broke although the server lives.
        """
        try:
            response, content = self._exchange(method, route, deadline, body, query)
        except httpx.TimeoutException:
            raise DeadlineError(
                f"{self.url} did not answer {route} within {deadline.seconds:.1f} s"
            ) from None
        except httpx.HTTPError as error:
            raise self._broken(route, error) from None
        if response.status_code >= 300:
            raise self._refusal(route, response, content)
        if not content or not parse:
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise EngineError(
                f"{self.url}{route} answered no JSON: {self._words(content)!r}"
            ) from None

    def close(self) -> None:
        """Close idle connections. It can be used again."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # ---------------------------------------------------------------- one exchange

    def _exchange(
        self, method: str, route: str, deadline: Deadline, body: Any, query: dict[str, Any] | None
    ) -> tuple[httpx.Response, bytes]:
        content = bytearray()
        with self._open().stream(
            method,
            self.url + route,
            params=query or None,
            json=body,
            timeout=max(deadline.remaining, 0.001),
        ) as response:
            for part in response.iter_raw():
                content += part
                if len(content) > _LARGEST:
                    raise EngineError(f"{self.url}{route} answered more than {_LARGEST:,} bytes")
                if deadline.expired:  # httpx bounds each read, not all of them
                    raise DeadlineError(
                        f"{self.url}{route} had not ended its answer after {deadline.seconds:.1f} s"
                    )
        return response, bytes(content)

    def _open(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                headers = {"Accept-Encoding": "identity"}
                if self._token is not None:
                    headers["Authorization"] = f"Bearer {self._token}"
                self._client = httpx.Client(
                    headers=headers,
                    trust_env=not is_own(self.endpoint[0]),  # its proxies do not lead back here
                    follow_redirects=False,  # the token is for this server
                    limits=httpx.Limits(max_keepalive_connections=32, keepalive_expiry=_IDLE),
                )
            return self._client

    # ---------------------------------------------------------------- what went wrong

    def _refusal(self, route: str, response: httpx.Response, content: bytes) -> EngineError:
        status, words = response.status_code, self._words(content)
        said = f"{self.url}{route} answered {status}: {words}"
        if 300 <= status < 400:
            where = response.headers.get("location", "")[:_WORDS]
            said = f"{self.url}{route} redirects to {where!r}: give the server's own URL"
        elif status == 401:
            advice = "does not accept the token" if self._token else "asks for a token"
            said = f"{said} (it {advice}: VLLMServer(url, token=...), its --api-key)"
        elif status == 404 and words == "Not Found":
            said = f"{self.url} has no {route}: {_DEV_MODE}"
        elif status >= 500 and self.health() in (None, 503):
            return EngineDiedError(f"{said} (and its /health says that the engine is dead)")
        return RouteError(said, status)

    def _broken(self, route: str, error: httpx.HTTPError) -> EngineError:
        words = self._hidden(f"{type(error).__name__}: {error}")[:_WORDS]
        if self.health() == 200:
            return EngineError(f"the connection to {self.url} broke in {route}: {words}")
        return EngineDiedError(f"{self.url} is gone, or was never there: {words}")

    def watched(self, function: Callable[[], T], deadline: Deadline, what: str) -> T:
        """A call of the server by whatever means, which ends when the server does.

        Raises:
            DeadlineError: it did not return in time. EngineDiedError: the server is gone.
        """
        # The server never answers a call that waits for an engine which dies: it stops listening,
        # and waits for the call to end.
        looked = time.monotonic()

        def look() -> None:
            nonlocal looked
            if time.monotonic() - looked > _LOOK:
                self.require_alive()
                looked = time.monotonic()

        return call_with_deadline(function, deadline, what, look)

    def require_alive(self) -> None:
        """
        Raises:
            EngineDiedError: nobody listens any more, or the server says that its engine is dead.
        """
        health = self.health()
        if health in (None, 503):
            said = "says that its engine is dead" if health else "listens no more"
            raise EngineDiedError(f"{self.url} {said}")

    def health(self) -> int | None:
        """The status that its ``/health`` answers; 0: nothing in time; None: nobody is there."""
        try:
            return self._exchange("GET", "/health", Deadline(_HEALTH), None, None)[0].status_code
        except (httpx.TimeoutException, DeadlineError):
            return 0
        except (httpx.HTTPError, EngineError):
            return None

    def _words(self, content: bytes) -> str:
        """A server's own words, without what vLLM wraps them in."""
        text = content[: 16 * _WORDS].decode(errors="replace")
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            document = None
        if isinstance(document, dict):
            inner = document.get("error", document.get("detail", text))
            inner = inner.get("message", inner) if isinstance(inner, dict) else inner
            text = inner if isinstance(inner, str) else json.dumps(inner)
        return self._hidden(text)[:_WORDS]

    def _hidden(self, text: str) -> str:
        return text.replace(self._token, "***") if self._token else text


def checked_url(url: str) -> str:
    """
    Raises:
        EngineError: it is none that a server can be reached by.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except (ValueError, TypeError, AttributeError) as error:
        raise EngineError(f"a vLLM server's URL is like http://host:8000: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise EngineError("a vLLM server's URL holds no password: give token=")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise EngineError(f"a vLLM server's URL is like http://host:8000, not {url!r:.200}")
    if host in ("0.0.0.0", "::", "0"):
        raise EngineError(f"{host} is where a server listens, and no address: name its host")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def checked_token(token: str | None) -> str | None:
    """
    Raises:
        EngineError: it cannot be sent in a header. Does not say what it is.
    """
    if token is None:
        return None
    if not isinstance(token, str) or not token.isascii() or not token.isprintable():
        raise EngineError("a token is a text of printable ASCII characters")
    if not token or " " in token:
        raise EngineError("a token is not empty and has no spaces")
    return token
