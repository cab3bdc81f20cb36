"""vLLM's OpenAI server for tests: a process of its own, its workers with it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import httpx
import psutil

import weightsync as ws
from tests.vllm.forms.suite import WAIT, Answer, Running

TOKEN = "only-for-tests"

START = 240.0
"""Seconds that a server has to start, on a machine that does other things as well."""


class Server:
    """Started with the flags of vLLM's command line; ``flags`` like ``data_parallel_size=2``."""

    def __init__(self, folder, log, environment=None, **flags):
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.target = ws.VLLMServer(self.url, TOKEN)
        self._log = log
        self._process = None
        self._command = [
            sys.executable,
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(folder), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"),
            *("--max-model-len", "256", "--block-size", "32", "--dtype", "float32"),
            *("--weight-transfer-config", '{"backend": "weightsync"}', "--api-key", TOKEN),
        ]
        for name, value in flags.items():
            self._command.append(f"--{name.replace('_', '-')}")
            if value is not True:
                self._command.append(str(value))
        self._environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
            **(environment or {}),
        }

    def start(self):
        """Returns before it listens: a receiver waits for that."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a session, so that nothing of it is left
            )

    def wait(self):
        """Until it answers."""
        until = time.monotonic() + START
        while time.monotonic() < until:
            assert self._process.poll() is None, self.log()
            try:
                return self.target.weight_label(timeout=5.0)
            except ws.WeightSyncError:
                time.sleep(0.2)
        raise AssertionError(f"the server did not start: {self.log()}")

    def log(self):
        with open(self._log, errors="replace") as log:
            return log.read()[-5000:]

    def processes(self):
        """Of the server, its engines and its workers."""
        parent = psutil.Process(self._process.pid)
        return [parent, *parent.children(recursive=True)]

    def kill(self):
        """All of it at once, as a machine that is gone."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)

    def stop(self):
        self.target.close()
        if self._process is None:
            return
        left = self.processes() if self._process.poll() is None else []
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(30)


@contextmanager
def serving(config, folder, **flags):
    """A server of a model with random weights, which answers."""
    config.save_pretrained(folder)
    server = Server(folder, os.path.join(str(folder), "server.log"), **flags)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.stop()


class Streamed(Running):
    """A request whose tokens come one by one."""

    def __init__(self, url, prompt, count):
        self.tokens, self.times = [], []
        self._finished, self._versions, self._error = None, None, None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(url, prompt, count), daemon=True)
        self._thread.start()

    def _run(self, url, prompt, count):
        body = {
            "token_ids": prompt,
            "stream": True,
            "sampling_params": {"temperature": 0, "max_tokens": count, "ignore_eos": True},
        }
        try:
            with httpx.stream(
                "POST",
                f"{url}/inference/v1/generate",
                json=body,
                headers={"Authorization": f"Bearer {TOKEN}"},
                timeout=WAIT,
                trust_env=False,
            ) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        self._take(json.loads(line.removeprefix("data: ")))
        except BaseException as error:
            self._error = error
        with self._changed:
            self._changed.notify_all()

    def _take(self, document):
        if "choices" not in document:
            raise RuntimeError(f"the server says {document}")
        (choice,) = document["choices"]
        with self._changed:
            self.tokens += choice["token_ids"] or []
            self.times += [time.perf_counter()] * len(choice["token_ids"] or [])
            self._finished = choice["finish_reason"] or self._finished
            spans = choice["weight_versions"]
            if spans is not None:
                self._versions = [(span["version"], span["start"]) for span in spans]
            self._changed.notify_all()

    def wait_begun(self):
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.tokens or not self._thread.is_alive(), timeout=WAIT
            )

    def answer(self):
        self._thread.join(WAIT)
        assert self._error is None, repr(self._error)
        assert not self._thread.is_alive(), f"{len(self.tokens)} tokens, {self._finished}"
        return Answer(self.tokens, self._finished, self._versions)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
