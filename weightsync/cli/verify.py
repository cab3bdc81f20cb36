"""``weightsync verify``: whether the bytes of a version are what was sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weightsync.cli.output import FOUND, Json, console, emit, harmless, refusals, tensors_words
from weightsync.cli.progress import Advance, progress_of
from weightsync.cli.target import Target
from weightsync.cli.version_at import Number, version_at
from weightsync.errors import CorruptError, ManifestError, ProtocolError
from weightsync.words import size

if TYPE_CHECKING:
    from weightsync.manifest import ParamSpec
    from weightsync.transport import Snapshot

_KINDS = ("different", "only_in_run", "only_in_checkpoint")

_AT_ONCE = 256 << 20
"""Bytes that are verified with one call: enough for all threads, and the bar still moves."""


def verify(
    target: Target,
    version: Number = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="CHECKPOINT", help="Compare with a safetensors file or directory."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read a version and compare every byte with its digest; name the tensors that are damaged.

    With --against, compare each tensor with the one of a checkpoint too, bit for bit. While it is
    read a version stays: a trainer of two slots may have to wait for that.

    Exit code 1: something is damaged, or differs.
    """
    with refusals(as_json):
        try:
            with version_at(target, version) as leased:
                document = _verify(target, leased.snapshot, against)
        except (CorruptError, ProtocolError, ManifestError) as error:
            document = {"target": target, "version": None, "good": False, "error": str(error)}
        if as_json:
            emit(document)
        else:
            _print(document)
        raise typer.Exit(0 if document["good"] else FOUND)


def _verify(target: str, snapshot: Snapshot, against: Path | None) -> dict[str, Any]:
    manifest = snapshot.manifest
    with progress_of("verifying", manifest.payload) as advance:
        damaged = damaged_tensors(snapshot, advance)
    document: dict[str, Any] = {
        "target": target,
        "version": snapshot.version,
        "tensors": len(manifest.tensors),
        "nbytes": manifest.payload,
        "damaged": damaged,
        "good": not damaged,
    }
    if against is not None:
        from weightsync.cli.comparison import compare

        with progress_of("comparing", manifest.payload) as advance:
            compared, differences = compare(snapshot, against, advance)
        document["against"] = {
            "checkpoint": str(against),
            "compared": compared,
            **differences,
        }
        document["good"] &= not any(differences.values())
    return document


def damaged_tensors(snapshot: Snapshot, advance: Advance) -> list[str]:
    """The names of tensors in whose chunks something is wrong.

    A digest is of a chunk of 1 MiB: small tensors that share one with damaged bytes are named too.
    """
    damaged: list[str] = []
    for group in _groups(snapshot.manifest.tensors):
        names = [spec.name for spec in group]
        damaged += _damaged(snapshot, names)
        advance(sum(spec.nbytes for spec in group))
    return damaged


def _damaged(snapshot: Snapshot, names: Sequence[str]) -> list[str]:
    """Those of some tensors that are damaged: halves are looked at until it is known which."""
    try:
        snapshot.verify(names)
        return []
    except CorruptError:
        if len(names) == 1:
            return list(names)
    middle = len(names) // 2
    return _damaged(snapshot, names[:middle]) + _damaged(snapshot, names[middle:])


def _groups(specs: Sequence[ParamSpec]) -> Iterator[list[ParamSpec]]:
    group: list[ParamSpec] = []
    nbytes = 0
    for spec in specs:
        group.append(spec)
        nbytes += spec.nbytes
        if nbytes >= _AT_ONCE:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _print(document: dict[str, Any]) -> None:
    out = console()
    if "error" in document:
        out.print(f"damaged: {harmless(document['error'])}", markup=False, soft_wrap=True)
        return
    out.print(
        f"version {document['version'].number}: {size(document['nbytes'])} in "
        f"{tensors_words(document['tensors'])}"
    )
    if not document["damaged"]:
        out.print("every digest is right")
    for name in document["damaged"]:
        out.print(f"damaged: {harmless(name)}", markup=False, soft_wrap=True)
    if "against" not in document:
        return
    against = document["against"]
    kinds = {kind: against[kind] for kind in _KINDS if against[kind]}
    if not kinds:
        out.print(f"every tensor is that of {against['checkpoint']}", markup=False, soft_wrap=True)
    for kind, found in kinds.items():
        for words in found:
            said = harmless(f"{kind.replace('_', ' ')}: {words}")
            out.print(said, markup=False, soft_wrap=True)
    if kinds:
        out.print(_count(against), markup=False, soft_wrap=True)


def _count(against: dict[str, Any]) -> str:
    """``19 of 21 tensors differ from NAME; 2 only in run``."""
    both, name = tensors_words(against["compared"]), against["checkpoint"]
    words = [f"{len(against['different'])} of {both} differ from {name}"]
    for kind in _KINDS[1:]:
        if against[kind]:
            words.append(f"{len(against[kind])} {kind.replace('_', ' ')}")
    return "; ".join(words)
