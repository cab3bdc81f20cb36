"""GRPO on a tiny Llama: the trainer in this process, vLLM in another, one weight sync per step.

    make demo                    # or: python examples/grpo_tiny.py
    make demo ARGS=--lora        # the trainer holds adapters; merged values are sent
    make demo ARGS=--no-sync     # what happens without sync: no learning, and the check fails

Prompts are three digits that count up (``7 8 9``); the policy is rewarded for counting on
(``0 1 2 3``). It learns only if the engine that samples gets each step's weights, and that is
checked at each step: vLLM's log-probabilities of the tokens it sampled against the trainer's own.
They agree to about 1e-6 if, and only if, both ends hold the same weights.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import weightsync as ws

DIGITS, PROMPT, ANSWER = 10, 3, 4
GROUP = 32  # completions of each prompt, judged against one another
EPOCHS, CLIP, ENTROPY, LEARNING_RATE = 2, 0.2, 0.02, 2e-3
TOLERANCE = 1e-3  # of log-probabilities; see the docstring
GOAL = 0.8  # of rewards, which are 1 at most

CONFIG = LlamaConfig(
    architectures=["LlamaForCausalLM"],
    vocab_size=16,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=32,  # vLLM's CPU attention takes no smaller one
    initializer_range=0.05,  # wide enough that other weights show in the log-probabilities
    bos_token_id=None,
    eos_token_id=None,
)
SAMPLING = {
    # The policy's own distribution, nothing cut off: the trainer computes the same.
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "n": GROUP,
    "max_tokens": ANSWER,
    "ignore_eos": True,
    "detokenize": False,
    "logprobs": 0,  # of the sampled token only
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the model is too small for more, and the trainer needs a core too
    "TORCH_COMPILE_DISABLE": "1",  # compiling vLLM's sampler takes as long as the training
}


# ---------------------------------------------------------------- rollouts, in their own process


class Rollouts(NamedTuple):
    """Completions, one row each, and the version that the engine held while it sampled them."""

    version: int | None
    tokens: list[list[int]]
    logprobs: list[list[float]]


def serve_rollouts(pipe: Connection, scheme: ws.WeightSyncScheme, seed: int, scratch: str) -> None:
    """The rollout process: sample on request, take new weights in the background."""
    os.setpgrp()  # Ctrl-C reaches the trainer alone, which ends this process and vLLM's in order
    with open(f"{scratch}/log", "ab") as log:
        os.dup2(log.fileno(), 1)  # shown if this process dies; it would spoil the table
        os.dup2(log.fileno(), 2)
    tempfile.tempdir = os.environ["TMPDIR"] = scratch  # what vLLM leaves behind goes with it
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig

    llm = LLM(
        scratch,
        load_format="dummy",  # there is no checkpoint: the first sync brings the weights
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=PROMPT + ANSWER,
        max_num_seqs=DIGITS * GROUP,
        weight_transfer_config=WeightTransferConfig(backend="weightsync"),
    )
    with ExitStack() as stack:
        stack.callback(llm.llm_engine.engine_core.shutdown)  # or exit would wait for that process
        receiver = stack.enter_context(scheme.create_receiver(llm))
        receiver.connect(timeout=60)
        receiver.follow()
        pipe.send("ready")
        while True:
            try:
                step, prompts = pipe.recv()
            except EOFError:  # the trainer hung up
                return
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            # Each completion has its own seed (vLLM adds 0..n-1), so that a run can be repeated.
            first = (seed * 1_000_000 + step) * DIGITS * GROUP
            seeds = range(first, first + len(prompts) * GROUP, GROUP)
            sampling = [SamplingParams(**SAMPLING, seed=each) for each in seeds]
            with receiver.hold() as version:  # no new weights between first token and last
                results = llm.generate(inputs, sampling, use_tqdm=False)
            outputs = [output for result in results for output in result.outputs]
            tokens = [list(output.token_ids) for output in outputs]
            logprobs = [[place.popitem()[1].logprob for place in o.logprobs] for o in outputs]
            pipe.send(Rollouts(version and version.number, tokens, logprobs))


class RolloutError(RuntimeError):
    """The rollout process died, or does not answer."""


class RolloutEngine:
    """The trainer's handle on the rollout process."""

    def __init__(self, scheme: ws.WeightSyncScheme, seed: int, scratch: str) -> None:
        spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self._pipe, far_end = spawn.Pipe()
        self._log = Path(scratch, "log")
        self._process = spawn.Process(target=serve_rollouts, args=(far_end, scheme, seed, scratch))
        self._process.start()
        far_end.close()  # or the pipe would stay open when the process dies
        self._ready = False

    def wait_ready(self) -> None:
        self._ready = self._receive(timeout=120) == "ready"

    def sample(self, step: int, prompts: list[list[int]]) -> Rollouts:
        with suppress(OSError):  # a broken pipe: receiving says why
            self._pipe.send((step, prompts))
        return self._receive(timeout=60)

    def _receive(self, timeout: float) -> Any:
        came = wait([self._pipe, self._process.sentinel], timeout)
        if not came:
            raise RolloutError(f"the rollout process has not answered for {timeout} s")
        with suppress(EOFError, OSError):
            if self._pipe in came:
                return self._pipe.recv()
        self._process.join(5)
        words = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
        raise RolloutError(f"the rollout process died, code {self._process.exitcode}\n{words}")

    def close(self) -> None:
        """Hang up, and see that neither the process nor any that vLLM started is left."""
        self._pipe.close()
        self._process.join(20 if self._ready else 0)
        with suppress(ProcessLookupError):  # as it should be
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()


# ---------------------------------------------------------------- the policy and its training


@dataclass(frozen=True)
class Step:
    """``difference``: the largest between vLLM's log-probabilities and the trainer's."""

    step: int
    reward: float
    version: int | None
    difference: float
    sync: ws.SyncReport | None

    @property
    def agrees(self) -> bool:
        return self.difference < TOLERANCE and self.version == self.step


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """For each row of prompt and answer: the fraction of the answer that counts on."""
    wanted = (tokens[:, PROMPT - 1 : PROMPT] + torch.arange(1, ANSWER + 1)) % DIGITS
    return (tokens[:, PROMPT:] == wanted).float().mean(1)


def logprobs_and_entropy(
    policy: torch.nn.Module, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy's log-probability of each token of the answers, and its entropy there."""
    logits = policy(tokens[:, :-1], use_cache=False).logits[:, PROMPT - 1 :]
    every = logits.log_softmax(-1)
    sampled = every.gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)
    return sampled, -(every.exp() * every).sum(-1)


def grpo_step(
    policy: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    behaviour: torch.Tensor,
) -> None:
    """Make likelier what did better than its group. ``behaviour``: vLLM's log-probabilities."""
    rewards = reward(tokens).view(-1, GROUP)
    # Not divided by the group's deviation: where nearly all of a group agree, that would make
    # one stray sample count for more than all the rest.
    advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
    for _ in range(EPOCHS):
        logprobs, entropy = logprobs_and_entropy(policy, tokens)
        ratio = (logprobs - behaviour).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        surrogate = torch.min(ratio * advantages, clipped * advantages)
        # A group that agrees on a wrong answer has no advantages to learn from: keep it doubting.
        loss = -(surrogate + ENTROPY * entropy).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


def make_policy(lora: bool) -> torch.nn.Module:
    """The model, all of it trained; or frozen, with adapters and a trained head and embedding."""
    model = LlamaForCausalLM(CONFIG)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    trained = ["embed_tokens", "lm_head"]
    return get_peft_model(
        model, LoraConfig(r=16, target_modules="all-linear", modules_to_save=trained)
    )


def train(options: argparse.Namespace, console: Console, records: list[Step]) -> None:
    """For each step: sync, sample, check, learn. Appends to ``records``."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    policy = make_policy(options.lora)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=LEARNING_RATE, betas=(0.9, 0.95))
    prompts = [[(digit + i) % DIGITS for i in range(PROMPT)] for digit in range(DIGITS)]
    rows = [prompt for prompt in prompts for _ in range(GROUP)]
    scheme = ws.scheme_from_url(options.scheme)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        CONFIG.save_pretrained(scratch)
        sender = stack.enter_context(scheme.create_sender(policy))
        sender.connect(timeout=60)  # makes what receivers look for
        engine = stack.enter_context(closing(RolloutEngine(scheme, options.seed, scratch)))
        with console.status("vLLM starts in its own process (about 20 s) ..."):
            engine.wait_ready()
        live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
        for step in range(1, options.steps + 1):
            report = None
            if step == 1 or not options.no_sync:
                report = sender.update_weights(version=step, wait="applied", timeout=60)
            rollouts = engine.sample(step, prompts)
            tokens = torch.tensor([p + a for p, a in zip(rows, rollouts.tokens, strict=True)])
            behaviour = torch.tensor(rollouts.logprobs)
            with torch.no_grad():  # before the optimizer's step: with the weights just sent
                own, _ = logprobs_and_entropy(policy, tokens)
            difference = (own - behaviour).abs().max().item()
            mean = reward(tokens).mean().item()
            records.append(Step(step, mean, rollouts.version, difference, report))
            show(live, records)
            grpo_step(policy, optimizer, tokens, behaviour)


# ---------------------------------------------------------------- what is shown

PHASES = ["extract", "transfer", "apply", "pause"]
COLUMNS = ["step", "reward", "holds", *PHASES, "max |Δlogp|"]


def milliseconds(report: ws.SyncReport, phase: str) -> float:
    return getattr(report.seconds, phase) * 1e3


def cells(record: Step) -> list[str]:
    sync = record.sync
    times = [f"{milliseconds(sync, phase):.1f}" if sync else "-" for phase in PHASES]
    held = "nothing" if record.version is None else f"v{record.version}"
    check = f"{record.difference:.0e} {'ok' if record.agrees else 'FAIL'}"
    return [f"{record.step}", f"{record.reward:.3f}", held, *times, check]


def table(records: list[Step]) -> Table:
    view = Table(title="GRPO; the version vLLM holds; sync in milliseconds", box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        view.add_column(column, justify="right", no_wrap=True)
    for record in records:
        view.add_row(*cells(record), style="" if record.agrees else "red")
    return view


def show(live: Live, records: list[Step]) -> None:
    if live.console.is_terminal:
        live.update(table(records[-15:]), refresh=True)
        return
    rows = [COLUMNS] if len(records) == 1 else []  # a file or a pipe: rows as they come
    for row in [*rows, cells(records[-1])]:
        print("".join(f"{cell:>12}" for cell in row), flush=True)


def conclude(options: argparse.Namespace, console: Console, records: list[Step]) -> bool:
    """Print a summary and the verdict; whether the run passed."""
    every = max(1, len(records) // 10)
    console.print(table([r for r in records if r.step % every == 0 or r.step == 1]))
    syncs = [record.sync for record in records if record.sync]
    times = ", ".join(f"{p} {median(milliseconds(s, p) for s in syncs):.1f}" for p in PHASES)
    size = f"{syncs[0].tensors} tensors, {syncs[0].nbytes / 1e6:.2f} MB"
    console.print(f"Each sync: {size}; medians in milliseconds: {times}", highlight=False)

    final = fmean(record.reward for record in records[-5:])
    course = f"reward {records[0].reward:.2f} at first, {final:.2f} at the end"
    failed = [record for record in records if not record.agrees]
    worst = max(failed or records, key=lambda record: record.difference)
    if failed:
        words = (
            f"FAILED: from step {failed[0].step} on, vLLM does not hold the trainer's weights. At "
            f"step {worst.step} it held version {worst.version} and its log-probabilities were off "
            f"by {worst.difference:.2g}; {len(failed)} of {len(records)} checks failed; {course}."
        )
        if options.no_sync:
            words += " This is what happens without sync."
    elif final < GOAL:
        words = f"FAILED: {course}; at least {GOAL} was expected."
    else:
        words = (
            f"PASSED: {course}. At each of {len(records)} steps vLLM held that step's version, and "
            f"its log-probabilities were the trainer's, to {worst.difference:.0e}."
        )
    passed = not failed and final >= GOAL
    console.print(words, style="green" if passed else "red", highlight=False)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    url = f"shm:///dev/shm/weightsync-demo-{os.getpid()}"
    parser.add_argument("--scheme", metavar="URL", default=url, help="how weights travel")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lora", action="store_true", help="train adapters instead of the model")
    parser.add_argument("--no-sync", action="store_true", help="sync at the first step only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record of each step")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps: at least 1")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # the rollout process inherits it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cleans up, as Ctrl-C does
    console, records = Console(), list[Step]()
    began = time.monotonic()
    try:
        train(options, console, records)
    except (RolloutError, ws.WeightSyncError) as error:
        console.print(table(records[-5:]) if records else "")
        console.print(f"FAILED: {error}", style="red", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    passed = conclude(options, console, records)
    console.print(f"{time.monotonic() - began:.0f} s", highlight=False)
    if options.json:
        steps = [{**asdict(record), "agrees": record.agrees} for record in records]
        options.json.write_text(json.dumps(steps, indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
