"""The command line: ``weightsync``, and ``python -m weightsync``.

One module for each command. None of them imports torch before it needs it, so that ``--help`` and
refusals come at once.
"""

from __future__ import annotations

import io
import sys

INTERRUPTED = 130
"""The exit status after Ctrl-C, as of shells."""


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit with its status."""
    try:
        from weightsync.cli.app import app

        if isinstance(sys.stdout, io.TextIOWrapper):
            # Names of files may be bytes that are no text, or text that a terminal does not know.
            sys.stdout.reconfigure(errors="backslashreplace")
        app()
    except KeyboardInterrupt:  # also while modules are imported
        sys.exit(INTERRUPTED)
