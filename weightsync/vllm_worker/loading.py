"""How a model in a vLLM worker takes a version: by its copy plan, by vLLM's reload, or by both.

The plan is made once for a manifest, and used as long as the model's tensors are where they were.
Wherever the bytes of a version lie (staged on the device, in host memory, in a trainer's tensors on
the same GPU), they go straight to their places.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from weightsync.chunks import Geometry
from weightsync.deadline import Deadline
from weightsync.device import Device, Moves, device_of
from weightsync.errors import EngineError
from weightsync.manifest import Manifest
from weightsync.selection import Selection
from weightsync.tensors import Addresses
from weightsync.transport import Memory, Snapshot
from weightsync.upload import Staging, Through, merged
from weightsync.vllm_worker import copy_plan
from weightsync.vllm_worker.copy_plan import CopyPlan
from weightsync.words import by_reason, one_line, size

log = logging.getLogger("weightsync")

Apply = Literal["auto", "plan", "reload"]
"""``plan``: whatever can be planned is. ``auto``: if that is half of the bytes at least, as less is
not worth a session of two kinds. ``reload``: nothing is."""

_WORTH = 0.5

_PLACES = 4
"""So many versions in the device's memory may take turns without copies being prepared anew."""

Stream = Callable[[], Iterator[tuple[str, torch.Tensor]]]


class Loader:
    """
    Attributes:
        plan: None: everything goes through the reload.
    """

    def __init__(self, target: str, apply: Apply) -> None:
        self.target, self._apply = target, apply
        self.plan: CopyPlan | None = None
        self._why = "apply='reload'" if apply == "reload" else "no plan was made yet"
        self._again = self._tried = False
        self._looked: tuple[str, nn.Module] | None = None
        self._device: Device | None = None
        self._manifest: Manifest | None = None
        self._through: Through | None = None
        self._selected: Selection | None = None
        self._moves: list[tuple[Addresses, Moves]] = []

    def prepare(
        self, model: nn.Module, config: Any, manifest: Manifest, stream: Stream, held: bool
    ) -> bool:
        """Have a plan for a manifest, if there can be one. Between two steps of the model.

        Args:
            held: what :meth:`holds` says.

        Returns:
            Whether the reload is not needed at all.
        """
        self._prepare(model, config, manifest, stream, held)
        return self.plans_all(manifest.fingerprint)

    def _prepare(
        self, model: nn.Module, config: Any, manifest: Manifest, stream: Stream, held: bool
    ) -> None:
        subject = manifest.fingerprint, model
        if self._apply == "reload" or (held and not self._again):
            return
        if self.plan is None and self._looked == subject:
            return
        self._tried = self._again and self._looked == subject
        self.forget()
        self._looked = subject
        try:
            plan = copy_plan.make(model, config, manifest, stream())
        except EngineError as error:
            self._why = str(error)
            log.warning("%s: %s", self.target, one_line(error))
            return
        self._device = device_of(next(model.parameters()).device)
        enough = plan.share > 0 if self._apply == "plan" else plan.share >= _WORTH
        if self._device is None or not enough:
            share = f"a plan would cover {plan.share:.0%} of the bytes"
            why = f"{share}, not {by_reason(plan.fallback)}" if plan.fallback else share
            self._why = why if self._device else "this device is not known"
            return
        self.plan, self._manifest = plan, manifest

    def reloaded(self) -> None:
        """The reload has been at work: of what fell back to it, more can be planned, maybe.

        It leaves zeros where there is padding, for one thing; an engine of dummy weights has not.
        """
        self._again = not self._tried and self.plan is not None and bool(self.plan.fallback)

    def free(self) -> None:
        """Give memory of the device back. The plan stays."""
        self._through = None

    def forget(self) -> None:
        """The plan, and the memory that goes with it."""
        self.plan = self._manifest = self._through = self._looked = None
        self._moves = []
        self._selected, self._again = None, False

    def holds(self, model: nn.Module, fingerprint: str) -> bool:
        """Whether there is a plan for a manifest, and the model is still where it says."""
        plan = self.plan
        return plan is not None and plan.fingerprint == fingerprint and plan.holds(model)

    def plans(self, fingerprint: str) -> bool:
        """Whether there is a plan for a manifest, if the model is still where it says."""
        return self.plan is not None and self.plan.fingerprint == fingerprint

    def plans_all(self, fingerprint: str) -> bool:
        """The same, of a plan that needs no reload."""
        return self.plans(fingerprint) and not (self.plan and self.plan.fallback)

    def still_holds(self, model: nn.Module) -> bool:
        """Whether the plan, if there is one, is that of the model as it is now."""
        return self.plan is None or self.plan.holds(model)

    def covers(self, model: nn.Module, fingerprint: str) -> bool:
        """Whether the reload is not needed at all."""
        return self.plans_all(fingerprint) and self.holds(model, fingerprint)

    def note(self, snapshot: Snapshot) -> str:
        """What becomes of a version, for a report."""
        plan = self.plan
        if plan is None:
            return f"{self.target}: by vLLM's reload: {self._why:.1000}"
        if not self.takes(snapshot):
            return (
                f"{self.target}: by vLLM's reload: this version lies neither in memory of this "
                "process nor on its device"
            )
        copies = len(plan.length) + len(plan.conversions)
        words = f"{self.target}: {copies} copies by plan ({size(plan.nbytes)})"
        if plan.fallback:
            listed = by_reason(plan.fallback)
            words += f"; {len(plan.fallback)} layers by vLLM's reload: {listed:.1000}"
        return words

    # ---------------------------------------------------------------- the bytes that are needed

    @property
    def verifies(self) -> bool:
        """Whether the device digests what passes through it: whole chunks, so all of a version."""
        on_gpu = self._device is not None and self._device.place.type != "cpu"
        return on_gpu and self.plan is not None and self._selection().whole

    def _selection(self) -> Selection:
        assert self._manifest is not None
        if self._selected is None:
            self._selected = Selection.of(*self.needed(), self._manifest.nbytes)
        return self._selected

    def needed(self) -> tuple[Addresses, Addresses]:
        """Offsets in the layout, and lengths, of what the plan reads."""
        assert self.plan is not None
        assert self._manifest is not None
        tensor, offset, length = self.plan.needed()
        return self._offsets()[tensor] + offset, length

    def _offsets(self) -> Addresses:
        assert self._manifest is not None
        return np.array([spec.offset for spec in self._manifest.tensors], dtype=np.int64)

    def takes(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot's bytes can be had without the reload."""
        if self._device is None:
            return False
        if snapshot.memory() is not None:
            return True
        return snapshot.addresses(self._device.place) is not None

    # ---------------------------------------------------------------- while nothing generates

    @torch.no_grad()
    def replay(
        self, snapshot: Snapshot, staging: Staging | None, verified: bool, deadline: Deadline
    ) -> None:
        """Bring a version to its places, all but the layers that fall back.

        Args:
            staging: if it holds the version.
            verified: the bytes were compared with their digests since they were leased.

        Raises:
            CorruptError, DeadlineError: places may have been written then.
        """
        plan, device = self.plan, self._device
        assert plan is not None
        assert device is not None
        memory = snapshot.memory()
        if staging is not None:
            offsets = self._offsets()
            self._move(device, staging.addresses(offsets[plan.tensor] + plan.offset))
            self._convert(lambda name: _staged(staging, snapshot.manifest, name))
        elif memory is None:
            addresses = snapshot.addresses(device.place)
            assert addresses is not None  # or it would not have been taken
            self._move(device, addresses[plan.tensor] + plan.offset)
            self._convert(snapshot.tensor)
        elif device.place.type == "cpu":
            self._move(device, self._offsets()[plan.tensor] + plan.offset + memory.address)
            self._convert(snapshot.tensor)
        else:
            self._pass_through(device, memory, verified, deadline)
            self._convert(lambda name: snapshot.tensor(name).to(device.place))
        device.current().wait()

    def _move(self, device: Device, out_of: Addresses) -> None:
        assert self.plan is not None
        known = (moves for source, moves in self._moves if np.array_equal(source, out_of))
        moves = next(known, None)
        if moves is None:
            into, source, length = merged(self.plan.into, out_of, self.plan.length)
            moves = device.moves(into, source, length)
            self._moves = [(out_of, moves), *self._moves[: _PLACES - 1]]
        moves.run(device.current())

    def _pass_through(
        self, device: Device, memory: Memory, verified: bool, deadline: Deadline
    ) -> None:
        plan = self.plan
        assert plan is not None
        assert self._manifest is not None
        if self._through is None:
            offset = self._offsets()[plan.tensor] + plan.offset
            rows = merged(plan.into, offset, plan.length)
            geometry, selection = Geometry(self._manifest), self._selection()
            self._through = Through(device, geometry, selection, *rows)
        self._through.run(memory, deadline, verified)

    def _convert(self, tensor: Callable[[str], torch.Tensor]) -> None:
        assert self.plan is not None
        for conversion in self.plan.conversions:
            conversion.apply(tensor(conversion.tensor))


def _staged(staging: Staging, manifest: Manifest, name: str) -> torch.Tensor:
    spec = manifest.spec(name)
    begin = int(staging.addresses(np.array([spec.offset]))[0]) - staging.buffer.data_ptr()
    flat = staging.buffer[begin : begin + spec.nbytes]
    return flat.view(spec.dtype).view(spec.shape)
