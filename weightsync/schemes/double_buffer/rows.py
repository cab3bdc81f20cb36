"""Rows of a sharded trainer: every rank writes those it holds into the one slot, in place."""

from __future__ import annotations

import base64
from contextlib import ExitStack
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightsync.chunks import Copier, Geometry, SlotWriter
from weightsync.download import Blocks, Download, Downloads, Flow
from weightsync.errors import ProtocolError, SourceError
from weightsync.files import Directory
from weightsync.intake import copy_tensor
from weightsync.manifest import Manifest, ParamSpec
from weightsync.run.ownership import epoch_of
from weightsync.schemes.double_buffer import layout
from weightsync.schemes.double_buffer.generation import flow_into
from weightsync.schemes.double_buffer.slot import Slot, slot_size
from weightsync.source import Inventory
from weightsync.tensors import plain_address

Written = npt.NDArray[np.int64]
"""Blocks in a slot: of which tensor, where each begins, how many bytes it has."""


def write_rows(
    slot: Slot, inventory: Inventory, writer: SlotWriter, downloads: Downloads
) -> Written:
    """Write the pieces that this rank holds. All of it is there when this returns.

    Blocks of whole rows go the fast way and are digested in passing. Blocks of columns are copied
    by torch; the rank that publishes digests the chunks they lie in.

    Returns:
        A row for each block that was written: tensor, where it begins, how many bytes it has.
    """
    blocks = []
    offsets, sizes, addresses = [], [], []
    elsewhere: dict[Download, list[tuple[int, int, ParamSpec, torch.Tensor]]] = {}
    for number, piece in inventory.pieces():
        spec = inventory.manifest.tensors[number]
        place = piece.place(slot.view(spec))
        block = slot.offset(place), place.numel() * spec.dtype.itemsize
        blocks.append((number, *block))
        download = downloads.of(piece.tensor.device, len(slot.bytes))
        if download is not None and place.is_contiguous():
            if place.numel():
                elsewhere.setdefault(download, []).append((*block, spec, piece.tensor))
            continue
        address = plain_address(piece.tensor, spec.dtype) if place.is_contiguous() else 0
        if address == 0:
            copy_tensor(place, piece.tensor, spec.name)
        if place.is_contiguous():
            offsets.append(slot.offset(place))
            sizes.append(place.numel() * spec.dtype.itemsize)
            addresses.append(address)
    whole = np.array(offsets, np.int64), np.array(sizes, np.int64), np.array(addresses, np.int64)
    with ExitStack() as flows:
        for download, pieces in elsewhere.items():
            flow = flows.enter_context(flow_into(slot, download, writer, _nothing, downloads))
            _send(download, pieces, flow)
        writer.write_pieces(*whole)
    return np.array(blocks, np.int64).reshape(-1, 3)


def _send(
    download: Download, pieces: list[tuple[int, int, ParamSpec, torch.Tensor]], flow: Flow
) -> None:
    """Queue a GPU's blocks of whole rows, each an offset, bytes, a spec and a tensor."""
    begin, nbytes, specs, tensors = zip(*sorted(pieces, key=itemgetter(0)), strict=True)
    plan = download.plan(Blocks.of(specs, begin, nbytes), tensors)
    for window in plan.windows:
        download.run(plan, window, tensors, flow)


def _nothing(begin: int, end: int) -> None:
    """Readers are told of rows when those of all ranks are there."""


def require_all(inventory: Inventory, blocks: Written) -> None:
    """
    Raises:
        SourceError: the ranks together did not write all of every tensor that has rows.
    """
    # Ranks of which none knows of the other may write the same block: it counts once.
    once = np.unique(blocks, axis=0)
    specs, whole = inventory.manifest.tensors, set(inventory.gathered())
    there = np.bincount(once[:, 0], once[:, 2], len(specs)).astype(np.int64)
    for number in inventory.streamed():
        spec = specs[number]
        if number not in whole and there[number] != spec.nbytes:
            raise SourceError(
                f"tensor {spec.name!r} cannot be sent: the ranks of this sender hold "
                f"{there[number]} of its {spec.nbytes} bytes; group= names all that hold the model"
            )


def ticket_of(epoch: int, generation: str, slot: int) -> dict[str, Any]:
    return {"epoch": epoch, "generation": generation, "slot": slot}


class RowWriter:
    """The end of a rank that publishes nothing itself: maps a slot once, and writes its rows."""

    def __init__(self, path: str, copier: Copier, downloads: Downloads) -> None:
        self._path = path
        self._copier = copier
        self._downloads = downloads
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
        run = Directory.open(self._path)
        generation = run.subdirectory(name)
        slot = self._slots.get(number)
        if slot is None or not slot.is_file(generation, number):
            slot = Slot.open(generation, number, slot_size(manifest), writable=True)
            self._slots[number] = slot
        if epoch_of(run) != ticket["epoch"]:
            raise ProtocolError(f"{self._path} is another sender's by now")
        writer = SlotWriter(self._geometry[1], slot.bytes, self._copier)
        blocks = write_rows(slot, inventory, writer, self._downloads)
        chunks, digests = writer.digested()
        return {
            "chunks": _text(chunks.astype("<i8")),
            "digests": _text(digests.astype("<u8")),
            "blocks": _text(blocks.astype("<i8")),
        }

    def close(self) -> None:
        self._slots.clear()


def adopt(written: dict[str, Any], writer: SlotWriter) -> Written:
    """Take over what another rank wrote. Returns the blocks that are."""
    chunks = np.frombuffer(base64.b64decode(written["chunks"]), "<i8").astype(np.int64)
    digests = np.frombuffer(base64.b64decode(written["digests"]), "<u8").astype(np.uint64)
    writer.adopt(chunks, digests)
    blocks = np.frombuffer(base64.b64decode(written["blocks"]), "<i8").astype(np.int64)
    return blocks.reshape(-1, 3)


def _text(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()
