"""The code blocks of docs/metrics.md."""

import logging
from unittest.mock import Mock

import prometheus_client
import pytest

import weightsync as ws
from tests.docs import run
from tests.fakes import fake, weights

PAGE = "docs/metrics.md"


@pytest.fixture
def pair(ends):
    return ends.pair(weights(1), fake(), receiver={"id": "r"})


def test_wandb_and_tensorboard(pair, run_dir):
    sender, receiver = pair
    sender.attach(receiver)
    wandb, writer = Mock(), Mock()
    run(PAGE, "wandb", run_dir, sender=sender, wandb=wandb, writer=writer, step=3)
    (logged,), options = wandb.log.call_args
    assert options == {"step": 3}
    assert (logged["weightsync/version"], logged["weightsync/lag"]) == (3, 0)
    scalars = {call.args[0]: call.args[1:] for call in writer.add_scalar.call_args_list}
    assert scalars["sync/receivers/applied"] == (1, 3)


@pytest.mark.parametrize("block", ["prometheus", "opentelemetry"])
def test_one_line_at_either_end(ends, run_dir, block):
    receiver = ends.receiver(fake(), id="r", connect=False)
    given = {"scheme": ends.scheme(), "model": weights(1), "receiver": receiver}
    with run(PAGE, block, run_dir, **given)["sender"] as sender:
        sender.connect()
        receiver.connect()
        sender.update_weights(version=5)
        receiver.poll_and_apply()
        if block == "prometheus":
            labels = {"run": f"shm://{run_dir}", "scheme": "shm", "receiver": "r"}
            for side in ("sender", "receiver"):
                held = prometheus_client.REGISTRY.get_sample_value(
                    "weightsync_version", {"side": side, **labels}
                )
                assert held == 5
        receiver.shutdown()


def test_a_listener_of_ones_own(pair, run_dir):
    sender, receiver = pair
    said = []
    run(PAGE, "listener", run_dir, sender=sender, receiver=receiver, page=said.append)
    version = sender.update_weights(version=1).version
    receiver.engine.fail["stage"] = ws.EngineError("no room")
    with pytest.raises(ws.EngineError):
        receiver.poll_and_apply()
    assert said == [f"receiver r of shm://{run_dir}: {version}: no room"]


def test_logs(pair, run_dir, caplog):
    logger = logging.getLogger("weightsync")
    level = logger.level
    try:
        run(PAGE, "logging", run_dir)
        pair[0].update_weights(version=1)
    finally:
        logger.setLevel(level)
    assert len(caplog.messages) == 1
