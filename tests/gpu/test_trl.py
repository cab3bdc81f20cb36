"""TRL's trainer and its engine in one process on one GPU, with and without sleep between steps."""

import importlib.util
import os

import pytest

from tests.gpu.engines import MARKS
from tests.integrations import colocated

pytestmark = [
    *MARKS,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl"),
]

AGREE = 0.05
"""Of log-probabilities in bfloat16, of two implementations; other weights differ by 0.3."""

ON_THE_GPU = {
    "use_cpu": False,
    "bf16": True,
    "vllm_gpu_memory_utilization": 0.1,
    "max_steps": 3,
}


def train(tmp_path, url, **configured):
    return colocated.run(
        tmp_path, url, timeout=280, dtype="bfloat16", **{**ON_THE_GPU, **configured}
    )


@pytest.mark.parametrize("kind", ["shm", "cuda-ipc"])
def test_trainer_and_engine_hold_the_same_after_each_step(tmp_path, run_dir, kind):
    found = train(tmp_path, f"{kind}://{run_dir}")
    assert max(found["differences"]) < AGREE
    assert found["versions"] == [0, 1, 2]
    assert found["states"] == ["applied"] * 3
    assert found["verified"] == [True] * (3 if kind == "shm" else 0)
    assert not os.path.lexists(run_dir)


def test_s1_an_engine_that_sleeps_between_steps_generates_with_the_last_version(tmp_path, run_dir):
    """Two generations of one version: after the first of them it sleeps, and its weights go."""
    found = train(tmp_path, f"shm://{run_dir}", vllm_enable_sleep_mode=True)
    assert max(found["differences"]) < AGREE
    assert found["versions"] == [0, 1, 2]
