"""A server takes hundreds of updates, some of which fail, while requests never stop."""

import random
import threading
import time
from collections import Counter

import psutil
import pytest
import torch

import weightsync as ws
from tests.vllm.conftest import llama_config, make_model
from tests.vllm.forms.servers import TOKEN, Streamed, serving
from tests.vllm.forms.suite import STEPS, WAIT, at, broken, stepped

pytestmark = [pytest.mark.vllm, pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(3600)]

UPDATES = 500
MODELS = 5
CLIENTS = 4
BLOCKS = 64
"""Of the cache: few, as memory that is touched for the first time would look like a leak."""

PROMPTS = [[1, 2, 3, 4], [9, 8, 7], [42], [5] * 40, list(range(70)), [77, 3]]

NEAR = 1e-3
"""How far the logit of a greedy token may be below the largest: the two sides round differently."""


class Truth:
    """Which model each version is, and which is the newest that a request must see."""

    def __init__(self, models):
        self.models = models
        self.of = {}
        self.newest = None

    def check(self, prompt, tokens, spans, asked_at):
        """Each token is what the model of its version says after those before it."""
        assert spans[0][1] == 0, spans
        ends = [start for _, start in spans[1:]] + [len(tokens)]
        for (version, start), end in zip(spans, ends, strict=True):
            assert version >= asked_at, f"{version} after an update to {asked_at}"
            assert version in self.of, f"{version} never was a good version"
            sequence = torch.tensor([prompt + tokens[:end]])
            with torch.no_grad():
                logits = self.models[self.of[version]](sequence).logits[0, len(prompt) - 1 : -1]
            for place in range(start, end):
                short = logits[place].max() - logits[place][tokens[place]]
                assert short < NEAR, f"token {place} of {tokens} is not of {version} in {spans}"


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, server, truth):
        self._server, self._truth = server, truth
        self._stop = threading.Event()
        self.failures, self.counts, self.gaps = [], Counter(), []
        self._threads = [
            threading.Thread(target=self._again, args=(self._ask, number), daemon=True)
            for number in range(CLIENTS)
        ]
        self._threads.append(
            threading.Thread(target=self._again, args=(self._stream, CLIENTS), daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def _again(self, ask, seed):
        chance = random.Random(seed)
        while not self._stop.is_set():
            try:
                ask(chance, self._truth.newest)
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def _ask(self, chance, newest):
        prompt, count = chance.choice(PROMPTS), chance.randint(5, 60)
        (answer,) = self._server.target.generate(
            [prompt], temperature=0, max_tokens=count, ignore_eos=True, timeout=WAIT
        )
        assert (len(answer.tokens), answer.finish_reason) == (count, "length")
        spans = [(span.version, span.start) for span in answer.spans]
        self._note(prompt, list(answer.tokens), spans, newest)

    def _stream(self, chance, newest):
        prompt, count = chance.choice(PROMPTS), 150
        running = Streamed(self._server.url, prompt, count)
        answer = running.answer()
        assert (len(answer.tokens), answer.finish_reason) == (count, "length")
        spans = [(ws.Version.parse(label), start) for label, start in answer.versions]
        self.gaps += [b - a for a, b in zip(running.times, running.times[1:], strict=False)]
        self._note(prompt, answer.tokens, spans, newest)

    def _note(self, prompt, tokens, spans, newest):
        self._truth.check(prompt, tokens, spans, newest)
        self.counts["answers"] += 1
        self.counts["tokens"] += len(tokens)
        self.counts["mixed"] += len(spans) > 1

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT)
        assert not any(thread.is_alive() for thread in self._threads)


# ---------------------------------------------------------------- updates, good and bad


class Updates:
    def __init__(self, sender, receiver, path):
        self._sender, self._receiver, self._path = sender, receiver, path
        self._number = 0

    def good(self, model):
        self._number += 1
        self._sender.update_weights(model, version=self._number)
        return self._receiver.poll_and_apply(timeout=WAIT)

    def bad(self, model, chance):
        """One that fails at a random point, which is returned."""
        kind = chance.choice(["step", "step", "step", "corrupt", "left out"])
        if kind == "step":
            return self._broken_step(model, chance)
        self._number += 1
        if kind == "corrupt":
            self._sender.update_weights(model, version=self._number)
            self._corrupt(chance)
        else:
            state = dict(model.state_dict())
            state.pop(chance.choice(sorted(state)))
            self._sender.update_weights(state, version=self._number)
        with pytest.raises(ws.WeightSyncError, match=r"digests|lacks"):
            self._receiver.poll_and_apply(timeout=WAIT)
        return kind

    def _broken_step(self, model, chance):
        step = chance.choice([step for step in STEPS if step != "resume"])
        when = chance.choice(["before", "after"])
        self._number += 1
        self._sender.update_weights(model, version=self._number)
        client = self._receiver.engine.client
        with (
            stepped(client, **{when: at(step, broken)}),
            pytest.raises(ws.EngineError, match="injected"),
        ):
            self._receiver.poll_and_apply(timeout=WAIT)
        return f"{when} {step}"

    def _corrupt(self, chance):
        head = self._receiver.scheme.inspect()
        slot = next(slot for slot in head.slots if slot.version == head.version)
        with open(f"{self._path}/{slot.generation}/slot{slot.slot}.bin", "r+b") as file:
            place = chance.randrange(100_000)
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))


def used(server):
    """Resident bytes and descriptors: of the server with its workers, and of this process."""
    found = []
    for processes in (server.processes(), [psutil.Process()]):
        memory = sum(process.memory_info().rss for process in processes)
        files = sum(process.num_fds() for process in processes)
        found.append((memory, files))
    return found


# ---------------------------------------------------------------- the soak


def test_hundreds_of_updates_under_a_steady_load(path, tmp_path, record_property):
    config = llama_config(num_hidden_layers=1)
    models = [make_model(config, seed).eval() for seed in range(MODELS)]
    chance = random.Random(0)
    truth = Truth(models)
    pauses, failed, uses = [], Counter(), []
    scheme = ws.DoubleBufferScheme(path)
    with (
        serving(config, tmp_path, enable_scale_out=True, num_gpu_blocks_override=BLOCKS) as server,
        scheme.create_sender() as sender,
        scheme.create_receiver(ws.VLLMServer(server.url, TOKEN)) as receiver,
    ):
        sender.connect()
        receiver.connect(timeout=WAIT)
        updates = Updates(sender, receiver, path)
        truth.of[updates.good(models[0]).version] = 0
        truth.newest = receiver.version
        load = Load(server, truth)
        began = time.monotonic()
        try:
            for update in range(1, UPDATES + 1):
                number = update % MODELS
                if update % 10 == 0:
                    held = receiver.version
                    failed[updates.bad(models[number], chance)] += 1
                    assert receiver.version == held
                    assert receiver.status().state in ("applied", "rolled back")
                    assert server.target.weight_label() == str(held)
                else:
                    # Told before it can be seen, and asked for after it is held.
                    truth.of[ws.Version(receiver.version.epoch, updates._number + 1)] = number
                    report = updates.good(models[number])
                    truth.newest = report.version
                    pauses.append(report.seconds.pause)
                    assert truth.of[report.version] == number
                assert load.failures == []
                if update % 50 == 0:
                    uses.append(used(server))
                time.sleep(0.02)
        finally:
            load.stop()
    took = time.monotonic() - began
    assert load.failures == []
    assert load.counts["answers"] > UPDATES / 5
    assert load.counts["mixed"] > 0
    record_property("soak", _summary(took, load, pauses, failed, uses))
    print(_summary(took, load, pauses, failed, uses))
    # vLLM's caches fill up for a while; what would be left of every update goes on for ever.
    warm, last = uses[len(uses) * 2 // 5 - 1], uses[-1]
    size = sum(tensor.nbytes for tensor in models[0].state_dict().values())
    for (memory, files), (last_memory, last_files) in zip(warm, last, strict=True):
        assert last_memory < memory + 0.75 * size * (UPDATES * 3 // 5)
        assert last_files < files + 16


def _summary(took, load, pauses, failed, uses):
    def milliseconds(values):
        ordered = sorted(values)
        return f"median {1e3 * ordered[len(ordered) // 2]:.0f}, largest {1e3 * ordered[-1]:.0f} ms"

    def used_by(place):
        return ", ".join(f"{use[place][0] >> 20} MiB/{use[place][1]}" for use in uses)

    return "\n".join(
        [
            f"{len(pauses)} updates and {sum(failed.values())} failed ones in {took:.0f} s",
            f"failed at: {dict(failed)}",
            f"requests: {dict(load.counts)}",
            f"seconds.pause: {milliseconds(pauses)}",
            f"between tokens: {milliseconds(load.gaps)}",
            f"server, memory and descriptors: {used_by(0)}",
            f"driver, memory and descriptors: {used_by(1)}",
        ]
    )
