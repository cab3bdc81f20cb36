"""A scheme is plain configuration: it travels as a URL, a dict or an argument."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

from weightsync.errors import SchemeError
from weightsync.scheme import WeightSyncScheme, scheme_from_dict, scheme_from_url
from weightsync.testing import roles
from weightsync.testing.conformance.base import Conformance, Run


class Configuration(Conformance):
    """Equal after every journey, and strict about what it is told."""

    def test_a_url(self, scheme: WeightSyncScheme) -> None:
        url = scheme.to_url()
        assert url.startswith(f"{scheme.url_scheme}://")
        assert scheme_from_url(url) == scheme
        assert scheme_from_url(url).to_url() == url

    def test_a_dict(self, scheme: WeightSyncScheme) -> None:
        values = scheme.to_dict()
        assert values["scheme"] == scheme.url_scheme
        assert scheme_from_dict(values) == scheme
        assert scheme_from_dict(json.loads(json.dumps(values))) == scheme

    def test_another_process_gets_an_equal_one(self, run: Run, scheme: WeightSyncScheme) -> None:
        """As a plain argument, the way users hand it to a process that they start."""
        assert run.peer().call(describe, scheme) == (scheme.to_dict(), True)
        assert hash(copy.deepcopy(scheme)) == hash(scheme)

    def test_it_does_not_change(self, scheme: WeightSyncScheme) -> None:
        """Frozen: both ends of a run, and all their copies, go by the same."""
        field = next(iter(scheme.to_dict().keys() - {"scheme"}))
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(scheme, field, None)

    def test_an_unknown_option(self, scheme: WeightSyncScheme) -> None:
        """Named, and never taken for something else."""
        url = scheme.to_url()
        mark = "&" if "?" in url.rpartition("/")[2] else "?"
        with pytest.raises(SchemeError, match="colour"):
            scheme_from_url(f"{url}{mark}colour=red")
        with pytest.raises(SchemeError, match="colour"):
            scheme_from_dict({**scheme.to_dict(), "colour": "red"})

    def test_wrong_options(self, scheme: WeightSyncScheme) -> None:
        wrong = self.wrong_options()
        if not wrong:
            pytest.skip("no option can be wrong (wrong_options)")
        for options in wrong:
            with pytest.raises(SchemeError) as refused:
                scheme_from_dict({**scheme.to_dict(), **options})
            assert any(name in str(refused.value) for name in options), options

    def test_constructing_it_touches_nothing(self, scheme: WeightSyncScheme) -> None:
        """Nor does making the ends: a run begins with ``connect``."""
        scheme.create_publisher().close()
        scheme.create_subscriber().close()
        scheme.create_subscriber("engine").close()
        scheme.create_sender().shutdown()

    def test_closing_twice(self, run: Run) -> None:
        run.sender().call(end_twice, "sender")
        peer = run.peer()
        run.sender()
        peer.call(roles.receive_in, run.scheme, "engine")
        peer.call(end_twice, "receiver")

    def test_another_process_knows_the_url_only(self, run: Run) -> None:
        sender, receiver = run.sender(), run.peer()
        receiver.call(receive_by_url, run.scheme.to_url(), "engine")
        receiver.start(roles.poll)
        sender.call(roles.publish, 1, wait="applied")
        assert receiver.result() == (1, 1)


def end_twice(state: Any, end: str) -> None:
    for _ in range(2):
        getattr(state, end).shutdown()


def receive_by_url(state: Any, url: str, id: str) -> None:
    roles.receive_in(state, scheme_from_url(url), id)


def describe(state: Any, scheme: WeightSyncScheme) -> tuple[dict[str, Any], bool]:
    return scheme.to_dict(), scheme_from_url(scheme.to_url()) == scheme
