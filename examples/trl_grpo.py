"""TRL's GRPOTrainer on a tiny Llama, its weights brought to vLLM by a scheme.

    make example-trl                       # vLLM as a server beside the trainer
    make example-trl ARGS=--colocate       # vLLM in the trainer's own process
    make example-trl ARGS=--lora           # the trainer holds an adapter; merged values are sent
    make example-trl ARGS="--scheme disk:///tmp/run42"

Prompts are three digits that count up (``7 8 9``); the policy is rewarded for counting on. TRL
itself compares, at each step, vLLM's log-probabilities of what was sampled with the trainer's own:
they agree to about 1e-6 if, and only if, both ends hold the same weights.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

DIGITS, ANSWER = 10, 4
TOLERANCE = 1e-4  # of log-probabilities; see the docstring
GAIN = 0.2  # of the reward, which is 1 at most

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that weights are controlled by
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the model is too small for more, and both ends need a core
    "TORCH_COMPILE_DISABLE": "1",  # compiling vLLM's sampler takes as long as the training
    "TOKENIZERS_PARALLELISM": "false",
}

# ---------------------------------------------------------------- what any user of TRL writes


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*map(str, range(DIGITS)), "<pad>", "<end>", "<unknown>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


def make_policy(folder: Path) -> Any:
    """A model with random weights; its folder is what vLLM starts from."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,  # vLLM's CPU attention takes no smaller one
        initializer_range=0.05,  # wide enough that other weights show in the log-probabilities
        max_position_embeddings=64,
        bos_token_id=None,
        pad_token_id=DIGITS,
        eos_token_id=DIGITS + 1,
    )
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    model.name_or_path = str(folder)
    return model


def make_prompts() -> Any:
    from datasets import Dataset

    prompts = [" ".join(str((d + i) % DIGITS) for i in range(3)) for d in range(DIGITS)]
    return Dataset.from_dict({"prompt": prompts * 16})


def counts_on(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward: which part of an answer counts on."""
    firsts = [int(prompt.split()[-1]) + 1 for prompt in prompts]
    return [
        sum(token == (first + i) % DIGITS for i, token in enumerate(answer)) / ANSWER
        for first, answer in zip(firsts, completion_ids, strict=True)
    ]


def make_trainer(options: argparse.Namespace, folder: Path, url: str | None) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    adapter = None
    if options.lora:
        from peft import LoraConfig

        adapter = LoraConfig(
            r=16, target_modules="all-linear", modules_to_save=["embed_tokens", "lm_head"]
        )
    return GRPOTrainer(
        model=make_policy(folder),
        args=GRPOConfig(
            output_dir=str(folder / "out"),
            use_vllm=True,
            vllm_mode="colocate" if options.colocate else "server",
            vllm_server_base_url=url,
            vllm_max_model_length=32,
            per_device_train_batch_size=160,
            num_generations=16,
            max_completion_length=ANSWER,
            generation_kwargs={"ignore_eos": True},
            max_steps=options.steps,
            learning_rate=2e-3,
            lr_scheduler_type="constant",
            beta=0.0,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            log_level="error",
        ),
        reward_funcs=counts_on,
        train_dataset=make_prompts(),
        processing_class=make_tokenizer(),
        peft_config=adapter,
    )


# ---------------------------------------------------------------- vLLM on a small machine


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """vLLM's own server; ``vllm serve MODEL --weight-transfer-config ...`` for a real model."""
    make_policy(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [
        sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
        *("--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "32", "--load-format", "dummy", "--skip-tokenizer-init"),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
        *("--weight-transfer-config", '{"backend": "weightsync"}'),
    ]
    log = folder / "server.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}"
    except BaseException:
        if process.poll() is not None:
            print(log.read_text(errors="replace")[-2000:])
        raise
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def make_engines_small() -> None:
    """TRL passes on few of vLLM's options to an engine in the trainer's process."""
    from trl.generation import vllm_generation

    small = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **small)


# ---------------------------------------------------------------- the run


def train(options: argparse.Namespace, folder: Path) -> bool:
    """Whether the policy learned, and both ends held the same weights at each step."""
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")  # said many times
    import torch
    from transformers import PrinterCallback, TrainerCallback

    import weightsync as ws
    from weightsync.integrations.trl import attach

    reports: list[ws.SyncReport] = []

    class Table(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_log(self, arguments: Any, state: Any, *_: Any, logs: Any, **__: Any) -> None:
            if "reward" in logs:
                seconds = reports[-1].seconds
                print(
                    f"{state.global_step:5d} {float(logs['reward']):8.3f} "
                    f"{reports[-1].version.number:8d} "
                    f"{float(logs['sampling/sampling_logp_difference/max']):12.0e} "
                    f"{seconds.total * 1e3:9.1f} {seconds.pause * 1e3:9.1f}",
                    flush=True,
                )

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    if options.colocate:
        make_engines_small()
    with (
        nullcontext() if options.colocate else serving(folder / "engine") as url,
        # The one line: whatever trains inside is synced by the scheme.
        attach(ws.scheme_from_url(options.scheme), timeout=60, on_update=reports.append),
    ):
        trainer = make_trainer(options, folder, url)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Table)
        print(" step   reward  version  max |Δlogp|   sync ms  pause ms")
        trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in steps]
    worst = max(entry["sampling/sampling_logp_difference/max"] for entry in steps)
    course = f"reward {fmean(rewards[:5]):.2f} at first, {fmean(rewards[-5:]):.2f} at the end"
    agreed, learned = worst < TOLERANCE, fmean(rewards[-5:]) > fmean(rewards[:5]) + GAIN
    print(
        f"{'PASSED' if agreed and learned else 'FAILED'}: {course}; vLLM's log-probabilities were "
        f"the trainer's to {worst:.0e} at each of {len(steps)} steps, {len(reports)} updates"
    )
    return agreed and learned


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    url = f"shm:///dev/shm/weightsync-trl-{os.getpid()}"
    parser.add_argument("--scheme", metavar="URL", default=url, help="how weights travel")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lora", action="store_true", help="train an adapter")
    parser.add_argument("--colocate", action="store_true", help="vLLM in the trainer's process")
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # the server inherits it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cleans up, as Ctrl-C does
    with tempfile.TemporaryDirectory() as folder:
        return 0 if train(options, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
