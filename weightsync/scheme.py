"""Schemes: what the user constructs, and the registry that finds them by name.

A scheme is picklable configuration. It makes senders and receivers, and round-trips through a URL
and through a dict, so that it can stand in a configuration file or travel to another process.
"""

from __future__ import annotations

import dataclasses
import logging
import types
import typing
from abc import ABC, abstractmethod
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from typing_extensions import Self

from weightsync.errors import SchemeError
from weightsync.inspection import RunStatus
from weightsync.run.kind import RunKind
from weightsync.transport import Publisher, Subscriber
from weightsync.words import a_kind, address_of, one_line, without_secrets

if TYPE_CHECKING:
    from weightsync.receiver import Receiver
    from weightsync.sender import Sender

log = logging.getLogger("weightsync")

_REGISTRY: dict[str, type[WeightSyncScheme]] = {}
_ENTRY_POINTS = "weightsync.schemes"
_ERRORS = "surrogateescape"  # how Python holds file names that are not UTF-8
_BUILT_IN = {
    "shm": "weightsync.schemes.double_buffer",
    "cuda-ipc": "weightsync.schemes.cuda_ipc",
    "nccl": "weightsync.schemes.nccl",
    "disk": "weightsync.schemes.disk",
    "fallback": "weightsync.schemes.fallback",
}

S = TypeVar("S", bound="type[WeightSyncScheme]")


class WeightSyncScheme(ABC):
    """Base of all schemes: a frozen dataclass of plain values, in the subclass's hands.

    A subclass names itself with ``url_scheme``, says how its address is written
    (``address`` and ``from_address``), and makes the two ends of its transport.
    """

    url_scheme: ClassVar[str]
    """The part of the URL before ``://``."""

    address_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that the URL's address gives, besides those without a default."""

    run_kind: ClassVar[RunKind | None] = None
    """Of schemes whose runs are directories: how to tell them by what lies there, and clean up."""

    @abstractmethod
    def create_publisher(self) -> Publisher:
        """The trainer's raw end."""

    @abstractmethod
    def create_subscriber(self, receiver: str | None = None) -> Subscriber:
        """The inference end's raw end. Without an id it can read, but is not waited for."""

    def for_workers(self, receiver: str) -> WeightSyncScheme:
        """The scheme that is handed, as a URL, to the worker processes of a receiver's engine."""
        return self

    def create_reader(self, rank: int, size: int) -> Subscriber:
        """The end in one of an engine's worker processes, made from :meth:`for_workers`.

        It is used for ``snapshot`` only, and needs no ``open``.

        Args:
            rank, size: this worker's number among all that read for the same receiver.
        """
        return self.create_subscriber()

    @abstractmethod
    def address(self) -> tuple[str, str]:
        """The parts of the URL between the scheme and the options: host (and port), and path."""

    @classmethod
    @abstractmethod
    def from_address(cls, host: str, path: str, options: dict[str, Any]) -> Self:
        """The reverse of :meth:`address`, the options parsed already."""

    def inspect(self) -> RunStatus:
        """What the run looks like now, from outside; changes nothing, and needs neither end.

        Optional: a scheme that has nothing to show need not have it.

        Raises:
            FileNotFoundError: there is no such run. SchemeError: this scheme cannot be looked at.
        """
        raise SchemeError(f"runs of scheme {self.url_scheme!r} cannot be looked at from outside")

    # ---------------------------------------------------------------- what users call

    def create_sender(self, model: Any = None, **options: Any) -> Sender:
        """The trainer's end.

        Args:
            model: where the weights come from, as for :func:`weightsync.source.as_source`. May
                also be given later, by ``register_model`` or to ``update_weights``.
            **options: as for :class:`~weightsync.sender.Sender`.
        """
        from weightsync.sender import Sender

        return Sender(self, model, **options)

    def create_receiver(self, engine: Any, **options: Any) -> Receiver:
        """The inference end, in the process that holds the engine.

        Args:
            engine: an ``nn.Module``, a mapping of names to tensors, a ``vllm.LLM``, or an
                :class:`~weightsync.engine.Engine`.
            **options: as for :class:`~weightsync.receiver.Receiver`; the rest goes to the engine.
        """
        from weightsync.receiver import Receiver

        return Receiver(self, engine, **options)

    # ---------------------------------------------------------------- URL and dict

    def where(self) -> str:
        """The URL without options and secrets: for logs, and for labels of metrics."""
        return address_of(self.to_url())

    def shown(self) -> str:
        """The URL as errors have it: with its options, without what is secret."""
        return without_secrets(self.to_url())

    def purpose(self) -> str:
        """What the ranks of one trainer meet for: equal on all of them."""
        return self.to_url()

    def to_dict(self) -> dict[str, Any]:
        """``{"scheme": name, option: value, ...}`` of plain values."""
        return {"scheme": self.url_scheme, **self._options()}

    def to_url(self) -> str:
        """The shortest URL that :func:`scheme_from_url` makes an equal scheme of."""
        host, path = self.address()
        taken = _address_fields(type(self))
        query = {
            field.name: _to_text(value)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if field.name not in taken
            and (value := getattr(self, field.name)) != field.default
            and value is not None
        }
        tail = f"?{urlencode(query, errors=_ERRORS)}" if query else ""
        return f"{self.url_scheme}://{host}{quote(path, errors=_ERRORS)}{tail}"

    @classmethod
    def from_url(cls, url: str) -> WeightSyncScheme:
        """The reverse of :meth:`to_url`, for a URL that begins with this scheme's name.

        Raises:
            SchemeError: an unknown option, or a value of the wrong kind; says what exists.
        """
        parts = urlsplit(url)
        if parts.fragment:
            shown = f"{without_secrets(repr(url)):.200}"
            raise SchemeError(f"{shown}: '#' begins nothing here; write it as %23 in a path")
        pairs = parse_qsl(parts.query, keep_blank_values=True, errors=_ERRORS)
        options = _parse(cls, pairs, taken=_address_fields(cls))
        return cls.from_address(parts.netloc, unquote(parts.path, errors=_ERRORS), options)

    def _options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]


def require_int(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """
    Raises:
        SchemeError: an option is no int, or one that is not possible.
    """
    if type(value) is not int:
        raise SchemeError(f"{name}={value!r:.80}: an int is wanted, not {a_kind(value)}")
    if value < least or (most is not None and value > most):
        possible = f"at least {least} is" if most is None else f"{least} to {most} are"
        raise SchemeError(f"{name}={value}: {possible} possible")


def register_scheme(cls: S) -> S:
    """Class decorator: make a scheme known by its ``url_scheme``.

    Raises:
        SchemeError: another class has the name.
    """
    other = _REGISTRY.setdefault(cls.url_scheme, cls)
    if other is not cls:
        raise SchemeError(f"scheme {cls.url_scheme!r} is registered already, by {other.__name__}")
    return cls


def scheme_from_url(url: str) -> WeightSyncScheme:
    """Make a scheme of a URL, for instance ``shm:///dev/shm/run42?slots=3``.

    Raises:
        SchemeError: an unknown scheme or option, or a value of the wrong kind; says what exists.
    """
    try:
        parts = urlsplit(url)
    except (ValueError, AttributeError):
        parts = None
    if parts is None or not parts.scheme or not isinstance(url, str):
        shown = f"{without_secrets(repr(url)):.200}"
        raise SchemeError(f"not a URL of a scheme: {shown}; like shm:///dev/shm/run42")
    return _find(parts.scheme).from_url(url)


def known_schemes() -> list[type[WeightSyncScheme]]:
    """All schemes that can be found by name. One that cannot be imported is left out."""
    names = [*_BUILT_IN, *(point.name for point in entry_points(group=_ENTRY_POINTS)), *_REGISTRY]
    found = []
    for name in dict.fromkeys(names):
        try:
            found.append(_find(name))
        except Exception as error:  # somebody else's module
            log.warning("scheme %r cannot be used: %s", name, one_line(error))
    return found


def as_scheme(scheme: WeightSyncScheme | str) -> WeightSyncScheme:
    """A scheme as it is, or made of its URL.

    Raises:
        SchemeError: it is neither, or the URL says something unknown.
    """
    if isinstance(scheme, WeightSyncScheme):
        return scheme
    if isinstance(scheme, str):
        return scheme_from_url(scheme)
    what = scheme.__name__ if isinstance(scheme, type) else type(scheme).__name__
    raise SchemeError(f"a scheme or its URL was expected, not {what}")


def scheme_from_dict(values: dict[str, Any]) -> WeightSyncScheme:
    """Make a scheme of a dict, for instance ``{"scheme": "shm", "path": "/dev/shm/run42"}``.

    Raises:
        SchemeError: an unknown scheme or option, or a value of the wrong kind; says what exists.
    """
    values = dict(values)
    name = values.pop("scheme", None)
    if not isinstance(name, str):
        raise SchemeError("the dict of a scheme has its name under 'scheme'")
    cls = _find(name)
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    _require_known(cls, values, known)
    try:
        return cls(**values)
    except TypeError as error:
        raise SchemeError(f"scheme {name!r}: {error}") from None


def _find(name: str) -> type[WeightSyncScheme]:
    if name not in _REGISTRY and name in _BUILT_IN:
        __import__(_BUILT_IN[name])
    if name not in _REGISTRY:
        for point in entry_points(group=_ENTRY_POINTS):
            if point.name == name:
                register_scheme(point.load())
    if name not in _REGISTRY:
        plugged = [point.name for point in entry_points(group=_ENTRY_POINTS)]
        known = ", ".join(sorted({*_REGISTRY, *_BUILT_IN, *plugged}))
        raise SchemeError(f"no scheme is called {name!r:.80}; there are: {known}")
    return _REGISTRY[name]


def _address_fields(cls: type[WeightSyncScheme]) -> set[str]:
    """The fields that the URL's address gives."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    without = {field.name for field in fields if field.default is dataclasses.MISSING}
    return without | set(cls.address_fields)


def _require_known(
    cls: type[WeightSyncScheme], given: typing.Iterable[str], known: set[str]
) -> None:
    for name in given:
        if name not in known:
            raise SchemeError(
                f"scheme {cls.url_scheme!r} has no option {name!r:.80}; "
                f"there are: {', '.join(sorted(known))}"
            )


def _parse(
    cls: type[WeightSyncScheme], pairs: list[tuple[str, str]], taken: set[str]
) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)} - taken  # type: ignore[arg-type]
    _require_known(cls, (name for name, _ in pairs), known)
    options: dict[str, Any] = {}
    for name, text in pairs:
        if name in options:
            raise SchemeError(f"option {name!r} is given twice")
        try:
            options[name] = _from_text(text, hints[name])
        except ValueError as error:
            raise SchemeError(f"option {name}={text!r:.80}: {error}") from None
    return options


def _from_text(text: str, hint: Any) -> Any:
    """Read a value of a URL's query: text, number, truth value, or one of a list."""
    choices = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        # A list of several where one value would do: "4,2" for 4.
        several = [choice for choice in choices if typing.get_origin(choice) is tuple]
        one = next(choice for choice in choices if choice is not type(None))
        hint = several[0] if several and "," in text else one
        choices = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return tuple(_from_text(part, choices[0]) for part in text.split(","))
    if typing.get_origin(hint) is typing.Literal:
        if text not in choices:
            raise ValueError(f"one of {', '.join(map(str, choices))} was expected")
        return text
    if hint is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError("1 or 0 was expected")
        return text.lower() in ("1", "true")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            kind = "an int" if hint is int else "a number"
            raise ValueError(f"{kind} was expected") from None
    return text


def _to_text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, tuple):
        return ",".join(map(_to_text, value))
    return str(value)
