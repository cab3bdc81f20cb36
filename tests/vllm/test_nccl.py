"""Broadcast into vLLM: every worker process takes part in the group itself. On gloo."""

import json
import os
import subprocess
import sys

import psutil
import pytest

import weightsync as ws
from tests.vllm.conftest import expected, greedy, llama_config, make_llm, make_model, stop
from weightsync.deadline import Deadline
from weightsync.schemes.nccl.transfer import Transfer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

DRIVER = """
import json, sys
import weightsync as ws
from tests.vllm.conftest import greedy, make_llm

if __name__ == "__main__":
    folder, url, id, size = sys.argv[1:]
    llm = make_llm(folder, tensor_parallel_size=int(size))
    receiver = ws.scheme_from_url(url).create_receiver(llm, id=id)
    receiver.connect(timeout=60)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        report = receiver.poll_and_apply(timeout=60)
        print(json.dumps([report.version.number, greedy(llm)]), flush=True)
"""


class Engine:
    """A process of its own that holds an LLM, and applies a version when it is told to."""

    def __init__(self, folder, scheme, id, size):
        script = folder / "driver.py"
        script.write_text(DRIVER)
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(folder), scheme.to_url(), id, str(size)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self):
        for line in self.process.stdout:
            if line.startswith(("[", '"')):
                return json.loads(line)
        raise AssertionError("the engine's process ended")

    def poll(self):
        self.process.stdin.write("poll\n")
        self.process.stdin.flush()

    def kill(self):
        """Its workers, too, as when a host goes down."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        for one in [psutil.Process(self.process.pid), *family]:
            one.kill()
        self.process.wait()

    def dispose(self):
        if self.process.poll() is None:
            self.kill()


def test_every_worker_of_a_replica_is_a_rank(tmp_path):
    config = llama_config()
    config.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, tensor_parallel_size=2)
    try:
        scheme = ws.NCCLScheme(backend="gloo", num_replicas=1, gpus_per_replica=2)
        with scheme.create_sender() as sender, scheme.create_receiver(llm) as receiver:
            sender.connect()
            sender.attach(receiver)
            for number in range(1, 4):
                model = make_model(config, number)
                report = sender.update_weights(model, version=number)
                assert [r.version.number for r in report.receivers] == [number]
                assert greedy(llm) == expected(model)
            # One that does not fit is refused; the workers still have the last good version.
            state = dict(model.state_dict())
            state["model.layers.1.mlp.down_proj.weight"] = state["model.norm.weight"]
            with pytest.raises(ws.ReceiverError, match="down_proj"):
                sender.update_weights(state, version=4)
            assert greedy(llm) == expected(model)
            last = make_model(config, 5)
            sender.update_weights(last, version=5)
            assert greedy(llm) == expected(last)
    finally:
        stop(llm)


@pytest.mark.slow
@pytest.mark.live
def test_two_engines_of_different_size_one_of_which_dies_and_comes_back(tmp_path, monkeypatch):
    """H1, R6: ten versions; the other engine is served by the very call in which one dies."""
    config = llama_config()
    config.save_pretrained(tmp_path)
    scheme = ws.NCCLScheme(
        backend="gloo", num_replicas=2, gpus_per_replica=[2, 1], bucket_mb=1, peer_timeout=5.0
    )
    engines = {}
    try:
        with scheme.create_sender(timeout=60) as sender:
            sender.connect()
            engines["two"] = Engine(tmp_path, scheme, "two", 2)
            engines["one"] = Engine(tmp_path, scheme, "one", 1)
            for engine in engines.values():
                assert engine.answer() == "ready"

            def update(number, *ids):
                model = make_model(config, number)
                for id in ids:
                    engines[id].poll()
                try:
                    report = sender.update_weights(model, version=number, wait="applied")
                finally:
                    wanted = [number, expected(model)]
                    answers = {id: engines[id].answer() for id in ids}
                    assert answers == dict.fromkeys(ids, wanted)
                assert {r.receiver: r.version.number for r in report.receivers} == dict.fromkeys(
                    ids, number
                )

            for number in range(1, 5):
                update(number, "two", "one")

            send = Transfer.send

            def send_and_kill(transfer, bucket):
                send(transfer, bucket)
                if bucket.number == 0:
                    monkeypatch.undo()
                    engines["two"].kill()

            monkeypatch.setattr(Transfer, "send", send_and_kill)
            with pytest.raises(ws.ReceiverError, match=r"'two'.*dead") as caught:
                update(5, "one")
            told = {r.receiver: (r.state, r.version.number) for r in caught.value.report.receivers}
            assert told == {"two": ("dead", 4), "one": ("applied", 5)}

            engines["two"] = Engine(tmp_path, scheme, "two", 2)
            update(6, "one")
            assert engines["two"].answer() == "ready"
            within = Deadline(30)
            assert within.wait(lambda: len(sender.receivers()) == 2 or None)
            for number in range(7, 11):
                update(number, "two", "one")
    finally:
        for engine in engines.values():
            engine.dispose()
