"""``python -m weightsync``: the command line where its script is not on the path."""

from weightsync.cli import main

main()
