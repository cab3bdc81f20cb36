"""One end watches, others read: the engine's worker processes, which know nothing but a URL."""

from __future__ import annotations

from typing import Any

from weightsync.testing import roles
from weightsync.testing.conformance.base import Conformance, Run


class Workers(Conformance):
    """As in vLLM, where the driver acknowledges and each worker opens the snapshot itself."""

    def test_workers_read_what_their_driver_saw(self, run: Run) -> None:
        run.scheme = self.for_receivers(run.scheme, 3)
        sender, driver = run.sender(), run.peer()
        workers = [run.peer(), run.peer()]
        driver.call(roles.subscribe, run.scheme, "driver", workers=len(workers))
        url = run.scheme.for_workers("driver").to_url()
        for rank, worker in enumerate(workers):
            worker.call(roles.be_worker, url, rank, len(workers))
        version = None
        for number in range(1, 4):
            driver.start(roles.see, version)
            sender.start(roles.publish, number, wait="applied")
            version = driver.result()
            assert version.number == number
            for worker in workers:
                worker.start(roles.read_version, version)
            assert [worker.result() for worker in workers] == [number, number]
            assert driver.call(names_in, version) == ["layer0", "layer1", "layer2", "layer3"]
            driver.call(roles.acknowledge, "driver", version)
            assert sender.result().receivers == {"driver": ("applied", number)}
        for peer in (*workers, driver):
            peer.call(roles.close_subscriber)


def names_in(state: Any, version: Any) -> list[str]:
    """The names of a version: the driver knows them too, if nothing else."""
    from weightsync.deadline import Deadline

    with state.subscriber.snapshot(version, Deadline(10.0)) as snapshot:
        names: list[str] = snapshot.manifest.names()
        return names
