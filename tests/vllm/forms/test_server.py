"""The shared suite on vLLM's OpenAI server, and what only a server does."""

import functools
import json
import os
import signal
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

import weightsync as ws
from tests.docs import run as page
from tests.vllm.conftest import PROMPTS, expected, llama_config, make_model
from tests.vllm.forms.servers import TOKEN, Streamed, serving
from tests.vllm.forms.suite import LONG, WAIT, EngineSuite, Form, Run, at, broken, stepped
from weightsync.deadline import Deadline

pytestmark = [pytest.mark.vllm, pytest.mark.live, pytest.mark.timeout(600)]


class ServerForm(Form):
    def __init__(self, server):
        self.server = server
        self.target = server.target

    def greedy(self, prompts, count):
        answers = self.target.generate(prompts, temperature=0, max_tokens=count, ignore_eos=True)
        return [list(answer.tokens) for answer in answers]

    def start(self, prompt, count=LONG):
        return Streamed(self.server.url, prompt, count)

    def label(self):
        return self.target.weight_label()


@pytest.fixture(scope="module")
def form(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with serving(ServerForm.config, folder, enable_scale_out=True) as server:
        yield ServerForm(server)


@pytest.mark.slow
class TestServer(EngineSuite):
    pass


@pytest.fixture
def run(form, path):
    run = Run(form, path)
    yield run
    run.close()


def test_successive_versions_are_right_and_one_that_fails_is_rolled_back(form, run):
    run.receive()
    for seed in (1, 2):
        model = form.model(seed)
        report = run.send(model)
        assert form.greedy(PROMPTS, 10) == expected(model)
        assert form.label() == str(report.version)
    with (
        stepped(run.client, after=at("load", broken)),
        pytest.raises(ws.ReceiverError, match="injected"),
    ):
        run.send(form.model(3))
    assert run.receiver.status().state == "rolled back"
    assert form.greedy(PROMPTS, 10) == expected(model)
    assert form.label() == str(report.version)


def test_f3_an_answer_names_the_versions_of_its_tokens(form, run):
    """F3, and F1: a request in flight is kept and goes on with the new weights."""
    run.receive()
    first, second = form.model(111), form.model(112)
    answers = []

    def ask():
        answers.extend(
            form.target.generate([PROMPTS[0]], temperature=0, max_tokens=200, ignore_eos=True)
        )

    for _ in range(5):  # on a busy machine the answer may be there before the pause
        one = run.send(first).version
        asking = threading.Thread(target=ask)

        def start(asking=asking):
            asking.start()
            form.start(PROMPTS[1]).wait_begun()

        with stepped(run.client, before=at("pause", start)):
            two = run.send(second).version
        asking.join(WAIT)
        answer = answers.pop()
        if len(answer.spans) > 1:
            break
    assert (answer.oldest, answer.newest) == (one, two)
    old, new = answer.spans
    assert (old.version, old.start, new.version, new.end) == (one, 0, two, 200)
    tokens = list(answer.tokens)
    assert tokens[: old.end] == expected(first, [PROMPTS[0]], old.end)[0]
    prompt = PROMPTS[0] + tokens[: new.start]
    assert tokens[new.start :] == expected(second, [prompt], 200 - new.start)[0]


def test_a_plain_completion_has_the_oldest_and_newest_version(form, run):
    run.receive()
    model = form.model(121)
    one = run.send(model).version
    plain = ws.VLLMServer(form.server.url, TOKEN)
    plain._reports_spans = False  # as of a server without --enable-scale-out
    answers = plain.generate(PROMPTS, temperature=0, max_tokens=10, ignore_eos=True)
    assert [list(answer.tokens) for answer in answers] == expected(model)
    assert {(answer.oldest, answer.newest) for answer in answers} == {(one, one)}


def test_logprobs_of_a_prompt_are_the_models(form, run):
    import torch

    run.receive()
    model = form.model(131)
    run.send(model)
    found = run.client.logprobs(PROMPTS, Deadline(WAIT))
    for prompt, values in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        right = [scores[i, token].item() for i, token in enumerate(prompt[1:])]
        assert values == pytest.approx(right, abs=1e-3)


def test_an_unusable_server_is_refused_by_generate(form, run):
    run.receive()
    run.client.set_version("unusable", Deadline(WAIT))
    with pytest.raises(ws.EngineUnusableError, match="holds no whole version"):
        form.greedy(PROMPTS, 1)
    run.send(form.model(141))
    form.greedy(PROMPTS, 1)


def test_the_lines_of_the_page_on_engines(form, path, monkeypatch, capsys):
    monkeypatch.setattr(ws, "VLLMServer", functools.partial(ws.VLLMServer, token=TOKEN))
    model = form.model(131)
    with ws.DoubleBufferScheme(path).create_sender(model) as sender:
        sender.connect()
        version = sender.update_weights(version=1).version
        names = page("docs/engines.md", "server", path, url=form.server.url)
        tokens = expected(model, [[1, 2, 3]], 8)[0]
        assert capsys.readouterr().out.strip() == f"{tuple(tokens)} {version} {version}"
        names["receiver"].shutdown()


def test_without_the_token_nothing_is_generated(form):
    with pytest.raises(ws.EngineError, match="asks for a token"):
        ws.VLLMServer(form.server.url).generate([[1]])


# ---------------------------------------------------------------- further servers


@pytest.mark.slow
@pytest.mark.parametrize("who", ["server", "engine", "worker"])
def test_a_server_that_is_killed_in_mid_update_is_named_at_once(path, tmp_path, who):
    config = llama_config(num_hidden_layers=1)
    names = {"engine": "EngineCore", "worker": "Worker"}
    with serving(config, tmp_path) as server, ws.DoubleBufferScheme(path).create_sender() as sender:
        sender.connect()
        receiver = sender.scheme.create_receiver(server.target)
        with receiver:
            receiver.connect(timeout=WAIT)
            sender.attach(receiver)
            sender.update_weights(make_model(config, 1), version=1)

            def kill():
                if who == "server":
                    server.kill()
                    return
                found = [p for p in server.processes() if names[who] in " ".join(p.cmdline())]
                os.kill(found[0].pid, signal.SIGKILL)

            began = time.monotonic()
            with (
                stepped(receiver.engine.client, before=at("load", kill)),
                pytest.raises(ws.ReceiverError, match=server.url),
            ):
                sender.update_weights(make_model(config, 2), version=2)
            assert time.monotonic() - began < 60  # the deadline is 300
            (engine,) = receiver.status().engines
            assert (engine.state, engine.version) == ("dead", None)
            assert server.url in engine.engine


@pytest.mark.slow
def test_the_other_replica_goes_on_and_a_restarted_server_is_taken_back(path, tmp_path):
    config = llama_config(num_hidden_layers=1)
    folders = [tmp_path / "one", tmp_path / "two"]
    with serving(config, folders[0]) as one, serving(config, folders[1]) as two:
        scheme = ws.DoubleBufferScheme(path)
        replicas = ws.Replicas({"one": one.target, "two": two.target})
        with scheme.create_sender() as sender, scheme.create_receiver(replicas) as receiver:
            sender.connect()
            receiver.connect(timeout=WAIT)
            sender.attach(receiver)
            forms = [ServerForm(one), ServerForm(two)]

            def right(model, *forms):
                return all(form.greedy(PROMPTS, 10) == expected(model) for form in forms)

            model = make_model(config, 1)
            sender.update_weights(model, version=1)
            assert right(model, *forms)
            two.kill()
            model = make_model(config, 2)
            with pytest.raises(ws.ReceiverError, match="two"):
                sender.update_weights(model, version=2)
            assert right(model, forms[0])
            assert [engine.state for engine in receiver.status().engines] == ["applied", "dead"]
            two.start()
            two.wait()
            model = make_model(config, 3)
            sender.update_weights(model, version=3)
            assert right(model, *forms)
            assert [engine.state for engine in receiver.status().engines] == ["applied"] * 2


@contextmanager
def data_parallel(config, path, folder):
    """A server of two ranks, and what drives it."""
    with serving(config, folder, enable_scale_out=True, data_parallel_size=2) as server:
        scheme = ws.DoubleBufferScheme(path)
        with scheme.create_sender() as sender, scheme.create_receiver(server.target) as receiver:
            sender.connect()
            receiver.connect(timeout=WAIT)
            sender.attach(receiver)
            yield server, sender, receiver


def workers_of(receiver):
    client = receiver.engine.client
    assert client.facts(Deadline(WAIT)).workers == 2
    answers = [
        json.loads(text) for text in client.ask('{"op": "status"}', Deadline(WAIT), "status")
    ]
    return [(answer["rank"], answer["held"]) for answer in answers]


def on_rank(server, rank, prompts):
    """Greedy tokens of one data-parallel rank."""
    found = []
    for prompt in prompts:
        response = httpx.post(
            f"{server.url}/inference/v1/generate",
            json={
                "token_ids": prompt,
                "sampling_params": {"temperature": 0, "max_tokens": 10, "ignore_eos": True},
            },
            headers={"Authorization": f"Bearer {TOKEN}", "X-data-parallel-rank": str(rank)},
            timeout=WAIT,
            trust_env=False,
        )
        found.append(response.json()["choices"][0]["token_ids"])
    return found


@pytest.mark.slow
def test_every_worker_of_a_data_parallel_server_is_heard(path, tmp_path):
    config = llama_config(num_hidden_layers=1)
    with data_parallel(config, path, tmp_path) as (server, sender, receiver):
        for number in (1, 2, 3):
            model = make_model(config, number)
            version = sender.update_weights(model, version=number).version
            assert workers_of(receiver) == [(0, list(version)), (1, list(version))]
            assert [on_rank(server, rank, PROMPTS) for rank in (0, 1)] == [expected(model)] * 2
            assert server.target.weight_label() == str(version)
        bad = dict(model.state_dict())
        bad.pop("model.norm.weight")
        with pytest.raises(ws.ReceiverError, match=r"worker 0.*worker 1"):
            sender.update_weights(bad, version=4)
        assert [on_rank(server, rank, PROMPTS) for rank in (0, 1)] == [expected(model)] * 2
