"""TRL's trainers with a real vLLM: a server beside them, and an engine in their own process."""

import os

import pytest

import weightsync as ws
from tests.integrations import colocated
from tests.integrations.counting import (
    configuration,
    dataset,
    logged,
    policy,
    reward,
    tokenizer,
)
from tests.vllm.forms.servers import TOKEN, serving

trl = pytest.importorskip("trl")

from weightsync.integrations.trl import attach  # noqa: E402

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

AGREE = 1e-5
"""Of log-probabilities: vLLM's against the trainer's."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Its weights are random: what it answers comes from updates alone."""
    folder = tmp_path_factory.mktemp("trl")
    with serving(policy().config, folder, logprobs_mode="processed_logprobs") as made:
        yield made


def trainer(kind, server, folder, **configured):
    model = configured.pop("model", None) or policy()
    adapter = configured.pop("peft_config", None)
    config = configuration(getattr(trl, f"{kind}Config"), folder, server.url, **configured)
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=config,
        reward_funcs=reward,
        train_dataset=dataset(),
        processing_class=tokenizer(),
        **({} if adapter is None else {"peft_config": adapter}),
    )


def test_a_grpo_trainer_learns_and_vllm_agrees_after_each_step(server, run_dir, tmp_path):
    reports = []
    scheme = ws.DoubleBufferScheme(run_dir)
    with attach(scheme, token=TOKEN, timeout=60.0, on_update=reports.append):
        made = trainer(
            "GRPO",
            server,
            tmp_path,
            max_steps=30,
            per_device_train_batch_size=160,
            num_generations=16,
        )
        made.train()
    assert max(logged(made, "sampling/sampling_logp_difference/max")) < AGREE
    rewards = logged(made, "reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert [report.version.number for report in reports] == list(range(30))
    assert server.target.weight_label() == str(reports[-1].version)
    assert not os.path.lexists(run_dir)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_l6_an_adapter_reaches_vllm_merged(server, run_dir, tmp_path, kind):
    from peft import LoraConfig

    reports = []
    adapter = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"])
    with attach(
        ws.DoubleBufferScheme(run_dir), token=TOKEN, timeout=60.0, on_update=reports.append
    ):
        made = trainer(kind, server, tmp_path, peft_config=adapter)
        made.train()
    if kind == "GRPO":  # RLOO does not look
        assert max(logged(made, "sampling/sampling_logp_difference/max")) < AGREE
    assert all(report.changed for report in reports[1:])


@pytest.mark.parametrize("url", ["disk:///{}", "nccl://127.0.0.1:0?backend=gloo"])
def test_other_schemes_do_as_well(server, tmp_path, url):
    scheme = ws.scheme_from_url(url.format(str(tmp_path / "run").lstrip("/")))
    with attach(scheme, token=TOKEN, timeout=60.0):
        made = trainer("GRPO", server, tmp_path)
        made.train()
    assert max(logged(made, "sampling/sampling_logp_difference/max")) < AGREE


def test_an_engine_in_the_trainers_process_agrees(tmp_path, run_dir):
    found = colocated.run(tmp_path, f"shm://{run_dir}", timeout=400)
    assert len(found["differences"]) == 3
    assert max(found["differences"]) < AGREE
    assert found["versions"] == [0, 1, 2]
    assert found["states"] == ["applied"] * 3
    assert found["verified"] == [True] * 3


def test_h1_a_server_that_is_killed_ends_the_training_and_is_named(run_dir, tmp_path):
    """Last: nothing is left of the server."""
    killed = []

    def kill(report):
        if report.version.number == 1:
            server.kill()
            killed.append(report)

    with (
        serving(policy().config, tmp_path, logprobs_mode="processed_logprobs") as server,
        attach(ws.DoubleBufferScheme(run_dir), token=TOKEN, timeout=30.0, on_update=kill),
        pytest.raises(ws.EngineDiedError, match=server.url),
    ):
        trainer("GRPO", server, tmp_path / "out").train()
    assert killed
    assert not os.path.lexists(run_dir)
