"""The application that every command is registered with."""

from __future__ import annotations

from typing import Annotated

import typer

import weightsync
from weightsync.cli.bench import bench
from weightsync.cli.clean import clean
from weightsync.cli.doctor import doctor
from weightsync.cli.export import export
from weightsync.cli.inspect import inspect
from weightsync.cli.verify import verify

app = typer.Typer(
    name="weightsync",
    help="Moves policy weights from an RL trainer into inference engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weightsync {weightsync.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    pass


for command in (inspect, doctor, verify, export, clean, bench):
    app.command()(command)
