"""The application that every command is registered with."""

from __future__ import annotations

from typing import Annotated

import typer

import weightsync
for command in (inspect, doctor, verify, export, clean, bench):
    app.command()(command)
