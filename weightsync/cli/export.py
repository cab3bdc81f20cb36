"""``weightsync export``: a version as a checkpoint that ``from_pretrained`` and vLLM load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weightsync.cli.output import Json, console, emit, refusals, tensors_words
from weightsync.cli.progress import progress_of
from weightsync.cli.sizes import parse_size
from weightsync.cli.target import Target
from weightsync.cli.version_at import Leased, Number, version_at
from weightsync.errors import CorruptError
from weightsync.words import size

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "bfloat16", "float16")


def export(
    target: Target,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    version: Number = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Copy configuration and tokenizer from this folder."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="|".join(_DTYPES), help="Cast floating-point tensors."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of a file of weights.")
    ] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace another checkpoint.")] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For all of it.")] = 3600.0,
    as_json: Json = False,
) -> None:
    """Write a version as a Hugging Face checkpoint: whole, verified, or not at all.

    Configuration and tokenizer come from --config, or from the version where the trainer has left
    them there. While it is read a version stays: a trainer of two slots may have to wait for that.
    """
    with refusals(as_json):
        shard_bytes = parse_size(max_shard_size)
        if dtype not in (None, *_DTYPES):
            raise ValueError(f"--dtype {dtype}: one of {', '.join(_DTYPES)}")
        if shard_bytes < 1 << 20:
            raise ValueError(f"--max-shard-size {max_shard_size}: at least 1MiB")
        with version_at(target, version) as leased:
            _verify(leased)
            _export(leased, out, config, dtype, shard_bytes, force, timeout, as_json)


def _verify(leased: Leased) -> None:
    """
    Raises:
        CorruptError: what would be written is not what was sent.
    """
    from weightsync.cli.verify import damaged_tensors

    with progress_of("verifying", leased.snapshot.manifest.payload) as advance:
        damaged = damaged_tensors(leased.snapshot, advance)
    if damaged:
        more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
        raise CorruptError(f"not exported: damaged are {', '.join(damaged[:5])}{more}")


def _export(
    leased: Leased,
    out: Path,
    config: Path | None,
    dtype: str | None,
    shard_bytes: int,
    force: bool,
    timeout: float,
    as_json: bool,
) -> None:
    import torch

    from weightsync.checkpoint import export as write

    cast = None if dtype is None else getattr(torch, dtype)
    companions = _companions(leased, config, cast)
    snapshot = leased.snapshot
    with progress_of("writing", snapshot.manifest.payload) as advance:
        written = write(
            snapshot,
            Path(os.path.abspath(out)),
            companions,
            dtype=cast,
            shard_bytes=shard_bytes,
            overwrite=force,
            timeout=timeout,
            wrote=advance,
        )
    if as_json:
        emit(
            {
                "path": written.path,
                "version": snapshot.version,
                "tensors": written.tensors,
                "nbytes": written.nbytes,
                "files": written.files,
            }
        )
        return
    what = f"version {snapshot.version.number}: {size(written.nbytes)}"
    words = f"{what} in {tensors_words(written.tensors)}, in {written.path}"
    if "config.json" not in companions:
        words += "\nno config.json is beside them: --config DIR copies one"
    console().print(words, markup=False, soft_wrap=True)


def _companions(leased: Leased, config: Path | None, dtype: torch.dtype | None) -> dict[str, bytes]:
    from weightsync.checkpoint import companions_in

    if config is not None:
        return companions_in(config, dtype)
    if leased.folder is not None and os.path.exists(f"{leased.folder}/config.json"):
        return companions_in(Path(leased.folder), dtype)
    return {}
