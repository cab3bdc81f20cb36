"""TorchRL's ``InferenceServer``, fed by our scheme while it answers."""

import threading

import pytest
import torch
from tensordict import TensorDict

import weightsync as ws

pytest.importorskip("torchrl")

from tests.docs import run
from tests.integrations.torchrl.conftest import WAIT
from tests.integrations.torchrl.policies import change, scaled


@pytest.fixture
def served(run_dir, made):
    """A trainer's policy, its scheme, a running server, and a client of it."""
    policy = scaled()
    page = run(
        "docs/integrations/torchrl.md", "server", run_dir, served_policy=scaled(), policy=policy
    )
    server = page["server"]
    made.extend((page["scheme"], server.weight_sync))
    try:
        yield policy, page["scheme"], server, server.transport.client()
    finally:
        server.shutdown()


def test_answers_follow_the_trainer_and_the_servers_version_rises(served):
    policy, sending, server, client = served
    asked = TensorDict({"observation": torch.arange(7.0)})
    for number in range(4):
        assert server.policy_version == number + 1  # the page's own send() was the first
        answer = client(asked.clone())
        assert torch.equal(answer["action"], policy.module(asked["observation"]))
        change(policy, seed=number)
        sending.send(policy)


def test_f3_answers_during_updates_are_of_one_version(served):
    policy, sending, _, client = served
    asked = TensorDict({"observation": torch.ones(7)})
    answers, stop = [], threading.Event()

    def ask():
        while not stop.is_set():
            answers.append(client(asked.clone())["action"])

    asking = threading.Thread(target=ask)
    asking.start()
    sent = {tuple(policy.module(asked["observation"]).tolist())}
    try:
        for number in range(20):
            change(policy, seed=number)
            sent.add(tuple(policy.module(asked["observation"]).tolist()))
            sending.send(policy)
    finally:
        stop.set()
        asking.join(WAIT)
    assert {tuple(answer.tolist()) for answer in answers} <= sent


def test_a_server_goes_on_with_its_weights_when_an_update_is_refused(served):
    policy, sending, _, client = served
    asked = TensorDict({"observation": torch.ones(7)})
    before = client(asked.clone())["action"]
    with pytest.raises(ws.ReceiverError, match=r"worker-0.*'module.other'"):
        sending.send({**policy.state_dict(), "module.other": torch.ones(7)})
    assert torch.equal(client(asked.clone())["action"], before)
    change(policy, seed=1)
    sending.send(policy)
    assert torch.equal(client(asked.clone())["action"], policy.module(asked["observation"]))
