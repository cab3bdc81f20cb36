"""Rows of a sharded trainer: every rank writes those it holds into the one slot, in place."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from weightsync.chunks import Copier, Geometry, SlotWriter
from weightsync.errors import ProtocolError
from weightsync.files import Directory
from weightsync.manifest import Manifest
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.slot import Slot, copy_tensor, slot_size
from weightsync.source import Inventory
from weightsync.tensors import plain_address


def write_rows(slot: Slot, inventory: Inventory, writer: SlotWriter) -> None:
    """Write the pieces that this rank holds.

    Blocks of whole rows go the fast way and are digested in passing. Blocks of columns are copied
    by torch; the rank that publishes digests the chunks they lie in.
    """
    offsets, sizes, addresses = [], [], []
    for number, piece in inventory.pieces():
        spec = inventory.manifest.tensors[number]
        place = piece.place(slot.view(spec))
        address = plain_address(piece.tensor, spec.dtype) if place.is_contiguous() else 0
        if address == 0:
            copy_tensor(place, piece.tensor, spec.name)
        if place.is_contiguous():
            offsets.append(slot.offset(place))
            sizes.append(place.numel() * spec.dtype.itemsize)
            addresses.append(address)
    whole = np.array(offsets, np.int64), np.array(sizes, np.int64), np.array(addresses, np.int64)
    writer.write_pieces(*whole)


def ticket_of(generation: str, slot: int) -> dict[str, Any]:
    return {"generation": generation, "slot": slot}


class RowWriter:
    """The end of a rank that publishes nothing itself: maps a slot once, and writes its rows."""

    def __init__(self, path: str, copier: Copier) -> None:
        self._path = path
        self._copier = copier
        self._geometry: tuple[Manifest, Geometry] | None = None
        self._slots: dict[int, Slot] = {}

    def write(self, ticket: dict[str, Any], inventory: Inventory) -> dict[str, Any]:
        """
        Returns:
            The chunks that this rank wrote whole, and their digests.
        """
        name, number = ticket["generation"], ticket["slot"]
        if layout.generation_number(name) is None or type(number) is not int:
            raise ProtocolError(f"not a ticket: {ticket!r:.200}")
        manifest = inventory.manifest
        if self._geometry is None or self._geometry[0].fingerprint != manifest.fingerprint:
            self._geometry = manifest, Geometry(manifest)
        generation = Directory.open(self._path).subdirectory(name)
        slot = self._slots.get(number)
        if slot is None or not slot.is_file(generation, number):
            slot = Slot.open(generation, number, slot_size(manifest), writable=True)
            self._slots[number] = slot
        writer = SlotWriter(self._geometry[1], slot.bytes, self._copier)
        write_rows(slot, inventory, writer)
        chunks, digests = writer.digested()
        return {"chunks": _text(chunks.astype("<i8")), "digests": _text(digests.astype("<u8"))}

    def close(self) -> None:
        self._slots.clear()


def adopt(written: dict[str, Any], writer: SlotWriter) -> None:
    """Take over what another rank wrote."""
    chunks = np.frombuffer(base64.b64decode(written["chunks"]), "<i8").astype(np.int64)
    digests = np.frombuffer(base64.b64decode(written["digests"]), "<u8").astype(np.uint64)
    writer.adopt(chunks, digests)


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()
