"""docs/migrating/torchrl.md: what stands there as before and after both runs, and does the same."""

import os
import types

import pytest
import torch

pytest.importorskip("torchrl")

from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

from tests.conftest import assert_all_same
from tests.docs import run
from tests.integrations.torchrl.policies import actions_are_of, change, scaled

PAGE = "docs/migrating/torchrl.md"


class Model(torch.nn.Linear):
    """Loads as those of vLLM do."""

    def load_weights(self, weights):
        self.load_state_dict(dict(weights))


@pytest.fixture
def policy():
    return torch.nn.Linear(4, 4)


def test_through_files_before(run_dir, policy):
    model = Model(4, 4)
    worker = types.SimpleNamespace(model_runner=types.SimpleNamespace(model=model))
    llm = types.SimpleNamespace(model_executor=types.SimpleNamespace(driver_worker=worker))
    run(PAGE, "vllm, before", run_dir, policy=policy, llm=llm)
    assert_all_same(model.state_dict(), policy.state_dict())
    assert os.path.exists(run_dir)  # and stays


def test_through_files_after(run_dir, policy):
    """With a module in the engine's place; with vLLM: tests/vllm/test_torchrl.py."""
    model = torch.nn.Linear(4, 4)
    names = run(PAGE, "vllm, after", run_dir, policy=policy, llm=model)
    assert_all_same(model.state_dict(), policy.state_dict())
    assert names["receiver"].poll_and_apply() is False
    names["receiver"].shutdown()
    assert not os.path.exists(run_dir)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_collector(run_dir, when):
    policy, seen = scaled(), []
    change(policy, seed=0)

    def learn(policy, data):
        seen.append(actions_are_of(data, policy))
        change(policy, seed=len(seen))

    run(
        PAGE,
        f"collector, {when}",
        run_dir,
        make_env=ContinuousActionVecMockEnv,
        policy=policy,
        learn=learn,
    )
    assert seen == [True] * 3
