"""Drop-ins for TorchRL's vLLM schemes, between a trainer's model and a real engine."""

import copy

import pytest
import torch

import weightsync as ws
from tests.docs import run
from tests.vllm.conftest import expected, greedy, llama_config, make_model

pytest.importorskip("torchrl")

from torchrl.weight_update import WeightSyncScheme

from weightsync.integrations.torchrl import (
    VLLMDoubleBufferSyncScheme,
    VLLMNCCLWeightSync,
    VLLMWeightSyncScheme,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


class Collector:
    versions = 0

    def increment_version(self):
        self.versions += 1


@pytest.fixture
def end():
    """Ends to be shut down after the test, receivers first."""
    made = []
    yield made
    for one in reversed(made):
        one.shutdown()


def test_double_buffer_with_torchrls_keywords_and_methods(llama, path, end):
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=path, num_threads=1, strategy="tensordict")
    assert isinstance(scheme, WeightSyncScheme)
    model, collector = make_model(llama_config(), seed=1), Collector()
    sender, receiver = scheme.create_sender(), scheme.create_receiver(llama)
    end.extend((sender, receiver))
    sender.register_model(model)
    sender.register_collector(collector)
    for number in range(2):
        sender.update_weights()
        assert receiver.poll_and_apply(timeout=30) is True
        assert greedy(llama) == expected(model)
        assert receiver.poll_and_apply() is False  # there is nothing newer
        model.load_state_dict(make_model(llama_config(), seed=number + 2).state_dict())
    assert collector.versions == 2

    sender.update_weights(model.state_dict())
    receiver.poll_and_apply()
    assert greedy(llama) == expected(model)
    with pytest.raises(TypeError, match="whole versions only"):
        receiver.apply_weights({"lm_head.weight": torch.zeros(1)})


def test_the_page_about_it(llama, path, end):
    model = make_model(llama_config(), seed=3)
    page = run("docs/integrations/torchrl.md", "vllm", path, policy=model, llm=llama)
    end.extend((page["sender"], page["receiver"]))
    assert greedy(llama) == expected(model)


@pytest.mark.parametrize("kind", [VLLMWeightSyncScheme, VLLMNCCLWeightSync])
def test_broadcast_to_an_engine_that_the_trainer_drives(llama, end, kind):
    from torchrl.weight_update.llm import get_model_metadata

    scheme = kind(
        master_address="localhost", gpus_per_replica=1, num_replicas=1, device=0, backend="gloo"
    )
    assert isinstance(scheme, WeightSyncScheme)
    model = make_model(llama_config(), seed=5)
    sender = scheme.create_sender()
    end.append(sender)
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=llama)
    sender.update_weights()
    assert greedy(llama) == expected(model)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    sender.update_weights()
    assert greedy(llama) == expected(model)


def test_broadcast_says_which_engine_refuses_an_update(llama, end):
    scheme = VLLMNCCLWeightSync(num_replicas=1, gpus_per_replica=1, backend="gloo")
    model = make_model(llama_config(), seed=6)
    sender = scheme.create_sender()
    end.append(sender)
    sender.register_model(model)
    sender.init_all_workers_group(vllm_engine=llama)
    sender.update_weights()
    tokens = greedy(llama)
    state = dict(copy.deepcopy(model).state_dict())
    state["model.norm.wieght"] = state.pop("model.norm.weight")
    with pytest.raises(ws.ReceiverError, match="wieght"):
        sender.update_weights(state)
    assert greedy(llama) == tokens


def test_a_transformers_wrapper_is_looked_through(llama, path, end):
    """Its own names, ``model.model...``, are no checkpoint's."""
    from torchrl.modules.llm import TransformersWrapper

    model = make_model(llama_config(), seed=7)
    wrapper = TransformersWrapper.__new__(TransformersWrapper)
    torch.nn.Module.__init__(wrapper)
    wrapper.model = model
    scheme = VLLMDoubleBufferSyncScheme(path)
    sender, receiver = scheme.create_sender(), scheme.create_receiver(llama)
    end.extend((sender, receiver))
    sender.register_model(wrapper)
    sender.update_weights()
    receiver.poll_and_apply()
    assert greedy(llama) == expected(model)
