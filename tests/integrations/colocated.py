"""A program: GRPO with the engine in the trainer's process; prints what the steps were like.

In a process of its own, because TRL sets variables that later engines would be made by.
"""

import functools
import json
import os
import subprocess
import sys


def run(folder, scheme, *, timeout, dtype="float32", **configured):
    """Start it and wait for it; what it printed last, parsed."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(folder), scheme, dtype, json.dumps(configured)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(folder, scheme, dtype, configured):
    import torch
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    import weightsync as ws
    from tests.integrations import counting
    from weightsync.integrations.trl import attach

    model = counting.policy(seed=5, dtype=dtype).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    model.name_or_path = folder
    with torch.no_grad():
        for parameter in model.parameters():  # not what the engine loads from the folder
            parameter.mul_(1.5)
    small = {"dtype": dtype, "enforce_eager": True, "skip_tokenizer_init": True}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **small)
    reports, verified, generations = [], [], []

    def look(prompts, completion_ids, **_):
        """Between generating and the optimizer's step, trainer and engine hold the same."""
        link = trainer.vllm_generation._weightsync_link
        generations.append(str(link._receiver.version))
        # What slept has no weights, and what CUDA IPC lent was given back: nothing to compare.
        if not configured.get("vllm_enable_sleep_mode") and not scheme.startswith("cuda-ipc"):
            verified.append(link._receiver.verify_weights().ok)
        return counting.reward(prompts, completion_ids)

    with attach(ws.scheme_from_url(scheme), timeout=60.0, on_update=reports.append):
        trainer = GRPOTrainer(
            model=model,
            args=counting.configuration(
                GRPOConfig,
                folder,
                **{"vllm_mode": "colocate", "vllm_max_model_length": 32, **configured},
            ),
            reward_funcs=look,
            train_dataset=counting.dataset(),
            processing_class=counting.tokenizer(),
        )
        trainer.train()
    print(
        json.dumps(
            {
                "differences": counting.logged(trainer, "sampling/sampling_logp_difference/max"),
                "versions": [report.version.number for report in reports],
                "states": [report.receivers[0].state for report in reports],
                "generations": len(generations),
                "verified": verified,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:4], json.loads(sys.argv[4]))
