"""Stands in for pybase64, for the same reason."""

from base64 import b64decode, b64encode

__all__ = ["b64decode", "b64encode"]
