"""Too little room is an error that says so, and nothing that was there is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsync.testing import faults, roles
from weightsync.testing.conformance.base import Conformance, Run, names_below
from weightsync.testing.processes import PeerError
from weightsync.testing.weights import constants

MIB = 1 << 20


class Room(Conformance):
    """Disks that are small, full, or fill up between two versions."""

    @pytest.fixture
    def small(self, tmp_path: Path) -> Iterator[Path]:
        """A file system of 12 MiB."""
        if self.scheme_at(tmp_path) is None:
            pytest.skip("the scheme keeps no files (scheme_at)")
        try:
            with faults.small_disk(tmp_path, 12 * MIB):
                yield tmp_path
        except faults.UnavailableError as reason:
            pytest.skip(str(reason))

    def run_at(self, run: Run, path: Path) -> Run:
        scheme = self.scheme_at(path)
        if scheme is None:
            pytest.skip("the scheme keeps no files (scheme_at)")
        run.scheme = scheme
        return run

    def test_a_model_that_is_too_big_for_the_disk(self, run: Run, small: Path) -> None:
        """The version before stays readable, and what fits is sent afterwards."""
        self.run_at(run, small)
        sender, receiver = run.sender(), run.follower("engine")
        sender.call(roles.publish, 1, wait="applied")
        before = names_below(small)
        with pytest.raises(PeerError) as full:
            sender.call(roles.publish_made, 2, constants, 2, 16 * MIB)
        assert full.value.kind == "NoRoomError"
        assert names_below(small) == before
        assert receiver.call(roles.held) == (1, 1)
        sender.call(roles.publish, 2, wait="applied")
        assert receiver.call(roles.held) == (2, 2)

    def test_a_disk_that_fills_up(self, run: Run, small: Path) -> None:
        """Between two versions, to the last byte: refused or published, and never half."""
        self.run_at(run, small)
        sender, receiver = run.sender(), run.follower("engine")
        sender.call(roles.publish, 1, wait="applied")
        with faults.filled(small):
            for number in 2, 3:
                with pytest.raises(PeerError) as full:
                    sender.call(roles.publish, number)
                assert full.value.kind == "NoRoomError"
            assert receiver.call(roles.held) == (1, 1)
        sender.call(roles.publish, 3, 30, wait="applied")
        assert receiver.call(roles.held) == (3, 30)

    def test_files_that_must_not_grow(self, run: Run, tmp_path: Path) -> None:
        """Too little room for this process alone; needs no privileges."""
        self.run_at(run, tmp_path)
        sender, receiver = run.sender(), run.follower("engine")
        sender.call(roles.publish, 1, wait="applied")
        sender.call(roles.suffer, faults.file_size_limit, 2 * MIB)
        with pytest.raises(PeerError) as full:
            sender.call(roles.publish_made, 2, constants, 2, 16 * MIB)
        assert full.value.kind == "NoRoomError"
        assert receiver.call(roles.held) == (1, 1)
        sender.call(roles.recover)
        sender.call(roles.publish, 2, wait="applied")
        assert receiver.call(roles.held) == (2, 2)
