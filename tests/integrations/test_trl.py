"""TRL's own trainers and client over our schemes; a real vLLM behind them: test_trl_vllm.py."""

import copy
import functools
import os
from contextlib import closing

import pytest
import torch

import weightsync as ws
from tests.conftest import assert_all_same
from tests.docs import run as page
from tests.integrations.counting import (
    configuration,
    dataset,
    logged,
    policy,
    reward,
    tokenizer,
)
from tests.integrations.vllm_stand_in import standing_in
from weightsync.testing.fake_engine import FakeEngine

trl = pytest.importorskip("trl")

from trl.generation import vllm_generation  # noqa: E402

from weightsync.integrations import trl as integration  # noqa: E402
from weightsync.integrations.trl import Client, Link, Plan, attach  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

AGREE = 1e-5
"""Of log-probabilities: the engine's against the trainer's. Other weights differ by 1e-2."""


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def server():
    with standing_in(policy(seed=99)) as made:
        yield made


@pytest.fixture
def train(server, run_dir, tmp_path):
    """Make and train a trainer of TRL's whose engine is the stand-in's module."""

    def train(
        trainer="GRPO", engine=None, model=None, options=None, peft_config=None, **configured
    ):
        config = getattr(trl, f"{trainer}Config")
        with attach(
            ws.DoubleBufferScheme(run_dir),
            engine=server.policy if engine is None else engine,
            **{"timeout": 10.0, **(options or {})},
        ):
            made = getattr(trl, f"{trainer}Trainer")(
                model=policy() if model is None else model,
                args=configuration(config, tmp_path, server.url, **configured),
                reward_funcs=reward,
                train_dataset=dataset(),
                processing_class=tokenizer(),
                **({} if peft_config is None else {"peft_config": peft_config}),
            )
            made.train()
        return made

    yield train
    assert not os.path.lexists(run_dir), "something of the run was left behind"


def test_a_grpo_trainer_and_its_engine_agree_after_each_step(train, server):
    reports = []
    trainer = train(options={"on_update": reports.append})
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) == 3
    assert max(differences) < AGREE
    assert [report.version.number for report in reports] == [0, 1, 2]
    assert all(report.changed for report in reports[1:])


def test_a_trainer_without_updates_would_not_agree(train, monkeypatch):
    """That the test above can fail."""
    monkeypatch.setattr(Link, "send", lambda *_: None)
    trainer = train(max_steps=1)
    assert logged(trainer, "sampling/sampling_logp_difference/max")[0] > 100 * AGREE


def test_rloo_goes_the_same_way(train, server):
    reports = []
    trainer = train("RLOO", options={"on_update": reports.append}, max_steps=2)
    assert [report.version.number for report in reports] == [0, 1]
    # What the second generation was sampled with: before the last optimizer step.
    assert trainer.state.global_step == 2


def test_weights_are_sent_once_for_each_generation(train):
    """Four optimizer steps from two generations; each step accumulates two batches."""
    reports = []
    train(
        options={"on_update": reports.append},
        max_steps=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        per_device_train_batch_size=8,
    )
    assert [report.version.number for report in reports] == [0, 1]


def test_l1_an_adapter_is_merged_on_the_way_and_the_trainer_left_as_it_is(train, server):
    """L1, L9: TRL itself merges the trainer's weights and takes the adapter out again."""
    from peft import LoraConfig

    model = policy()
    before = copy.deepcopy(model.state_dict())
    trainer = train(
        model=model,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False),
    )
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < AGREE
    base = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in trainer.model.base_model.model.state_dict().items()
        if "lora_" not in name
    }
    assert_all_same(base, before)


def test_l3_trained_copies_of_embedding_and_head_reach_the_engine(train):
    from peft import LoraConfig

    trainer = train(
        peft_config=LoraConfig(
            r=4, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"]
        ),
    )
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < AGREE


# ---------------------------------------------------------------- what goes wrong


def test_an_engine_that_refuses_ends_the_training_with_its_words(train):
    other = policy(num_hidden_layers=3)
    with pytest.raises(ws.ReceiverError, match=r"not sent: 'model\.layers\.2\.") as caught:
        train(engine=other, options={"receiver": {"id": "the-engine"}})
    assert [failure.receiver for failure in caught.value.failures] == ["the-engine"]
    assert same(other, policy(num_hidden_layers=3))


def test_h1_a_server_that_is_gone_ends_the_training_and_is_named(train, server):
    with pytest.raises(ws.EngineDiedError, match=server.url):
        train(options={"on_update": lambda report: server.stop() if report.version.number else 0})


def test_h1_a_server_that_does_not_answer_costs_the_timeout(train, server):
    server.silent.set()
    with pytest.raises(ws.DeadlineError, match=f"{server.url}.*/v1/completions"):
        train(options={"timeout": 1.0})


@pytest.mark.parametrize("backend", ["nccl", None])
def test_a_server_started_for_another_transfer_is_refused_when_the_trainer_is_made(
    train, server, backend
):
    server.backend = backend
    with pytest.raises(ws.EngineError, match=r"start it with --weight-transfer-config"):
        train()


def test_trl_is_as_it_was_afterwards(train, server):
    places = {"VLLMClient": vllm_generation, "LLM": vllm_generation}
    methods = ("sync_weights", "generate")
    before = [getattr(place, name) for name, place in places.items()]
    before += [getattr(vllm_generation.VLLMGeneration, name) for name in methods]
    server.backend = None
    with pytest.raises(ws.EngineError):
        train()
    after = [getattr(place, name) for name, place in places.items()]
    after += [getattr(vllm_generation.VLLMGeneration, name) for name in methods]
    assert before == after


# ---------------------------------------------------------------- before it generates


def test_s1_what_an_engine_lost_in_sleep_is_there_again_before_it_generates(run_dir):
    """S1: also when the trainer has made no step since."""
    engine = FakeEngine({"a": (2, 2)})
    reports = []
    link = Link(Plan(ws.DoubleBufferScheme(run_dir), 10.0, on_update=reports.append), engine)
    with closing(link):
        assert not link.restore()  # nothing was sent yet
        model = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.eye(2))})
        link.send(model)
        engine.sleep()
        assert not torch.equal(engine.part("a"), torch.eye(2))
        engine.wake()
        assert link.restore()
        assert torch.equal(engine.part("a"), torch.eye(2))
    assert [report.version.number for report in reports] == [0]


def test_an_engine_without_a_whole_version_does_not_generate(run_dir):
    engine = FakeEngine({"a": (2, 2)})
    with closing(Link(Plan(ws.DoubleBufferScheme(run_dir), 10.0), engine)) as link:
        engine.fail["load"] = RuntimeError("no room")
        with pytest.raises(ws.ReceiverError, match="no room"):
            link.send({"a": torch.eye(2)})
        engine.fail["load"] = [RuntimeError("still none")] * 9
        with pytest.raises(ws.EngineUnusableError):
            link.restore()
        engine.fail.clear()
        link.send({"a": torch.eye(2)})
        assert link.restore()


# ---------------------------------------------------------------- the client


@pytest.fixture
def client(server, run_dir):
    made = Client(ws.DoubleBufferScheme(run_dir), server.url, engine=server.policy, timeout=10.0)
    made.init_communicator()
    yield made
    made.close_communicator()
    assert not os.path.lexists(run_dir)


def same(one, other):
    return all(torch.equal(one.state_dict()[name], t) for name, t in other.state_dict().items())


def described(model):
    return [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for name, tensor in model.named_parameters()
    ]


def test_a_client_sends_models(client, server):
    for seed in (1, 2):
        model = policy(seed)
        client.update_model_params(model)
        assert same(server.policy, model)


def test_a_client_sends_streams(client, server):
    for seed in (1, 2):
        model = policy(seed)
        client.update_named_params(described(model), model.named_parameters())
        assert same(server.policy, model)


def test_a_stream_that_is_not_what_was_announced_is_refused(client, server):
    before = copy.deepcopy(server.policy)
    model = policy(1)
    short = list(model.named_parameters())[:-1]
    with pytest.raises(ws.SourceError, match=r"lm_head\.weight"):
        client.update_named_params(described(model), iter(short))
    assert same(server.policy, before)
    with pytest.raises(ws.SourceError, match="no dtype"):
        client.update_named_params([("x", "Tensor", [1])], iter([]))
    client.update_model_params(model)
    assert same(server.policy, model)


def test_tensors_that_come_one_by_one_are_one_update(client, server):
    before = copy.deepcopy(server.policy)
    model = policy(1)
    with client.weight_update():
        for name, parameter in model.named_parameters():
            client.update_named_param(name, parameter.data)
            with torch.no_grad():
                parameter.zero_()  # as an adapter is taken out again at once
        assert same(server.policy, before)
    assert same(server.policy, policy(1))
    assert server.reset == 0
    client.reset_prefix_cache()
    assert server.reset == 1


def test_tensors_that_come_one_by_one_end_with_the_reset_of_the_cache(client, server):
    for name, parameter in policy(1).named_parameters():
        client.update_named_param(name, parameter.data)
    client.reset_prefix_cache()
    assert same(server.policy, policy(1))


def test_an_update_that_breaks_off_changes_nothing(client, server):
    before = copy.deepcopy(server.policy)

    def break_off():
        with client.weight_update():
            client.update_named_param("lm_head.weight", torch.zeros(16, 64))
            raise RuntimeError("the user's")

    with pytest.raises(RuntimeError, match="the user's"):
        break_off()
    client.reset_prefix_cache()
    assert same(server.policy, before)


def test_a_client_begins_anew_after_it_was_closed(client, server):
    client.update_model_params(policy(1))
    client.close_communicator()
    client.init_communicator()
    client.update_model_params(policy(2))
    assert same(server.policy, policy(2))
    assert client.generate([[1, 2, 3]], n=2, max_tokens=4)["prompt_ids"] == [[1, 2, 3]]


# ---------------------------------------------------------------- as documented


def test_the_trainer_of_the_page(server, run_dir, tmp_path, monkeypatch):
    config = configuration(trl.GRPOConfig, tmp_path, server.url, max_steps=1)
    given = {
        "model": policy(),
        "arguments": config,
        "reward": reward,
        "data": dataset(),
        "more": {"processing_class": tokenizer()},
    }
    # The engine is the stand-in's module, of which the page knows nothing.
    monkeypatch.setattr(
        integration, "attach", functools.partial(integration.attach, engine=server.policy)
    )
    names = page("docs/integrations/trl.md", "trainer", run_dir, **given)
    assert max(logged(names["trainer"], "sampling/sampling_logp_difference/max")) < AGREE


def test_the_client_of_the_page(server, run_dir, monkeypatch):
    monkeypatch.setattr(integration, "Client", functools.partial(Client, engine=server.policy))
    model = policy(3)
    names = page("docs/integrations/trl.md", "client", run_dir, url=server.url, model=model)
    assert same(server.policy, model)
    assert [len(tokens) for tokens in names["answer"]["completion_ids"]] == [4, 4]


# ---------------------------------------------------------------- as migrated

MIGRATING = "docs/migrating/trl.md"


@pytest.fixture
def given(server, tmp_path, monkeypatch):
    """What both blocks of the page take from their reader; a tokenizer, which the model lacks."""
    monkeypatch.setattr(
        trl, "GRPOTrainer", functools.partial(trl.GRPOTrainer, processing_class=tokenizer())
    )
    arguments = configuration(trl.GRPOConfig, tmp_path, server.url, max_steps=1)
    return {"model": policy(), "arguments": arguments, "reward": reward, "data": dataset()}


def test_before_a_migration_trl_wants_a_gpu_to_sync(server, run_dir, given):
    """As far as TRL goes on a CPU: to its own transfer."""
    server.backend = "nccl"
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        page(MIGRATING, "trainer, before", run_dir, **given)


def test_after_a_migration_both_ends_agree(server, run_dir, given, monkeypatch):
    attached = functools.partial(integration.attach, engine=server.policy)
    monkeypatch.setattr(integration, "attach", attached)
    names = page(MIGRATING, "trainer, after", run_dir, **given)
    assert max(logged(names["trainer"], "sampling/sampling_logp_difference/max")) < AGREE
    assert not os.path.lexists(run_dir)
