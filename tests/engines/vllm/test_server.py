"""A vLLM server's client, against a small server that answers as it is told."""

import json
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest

import weightsync as ws
from tests.engines.vllm.stub import drip, drop, stub
from weightsync.deadline import Deadline
from weightsync.engine import as_engine
from weightsync.engines.vllm.server import ServerClient

TOKEN = "geheimes-wort"


@pytest.fixture
def server():
    with stub() as server:
        yield server


def client_of(server, token=TOKEN):
    return ServerClient(ws.VLLMServer(server.url, token))


def soon():
    return Deadline(5.0)


# ---------------------------------------------------------------- what is said to whom


def test_importing_weightsync_imports_no_http_client():
    code = (
        "import sys, weightsync as ws; from weightsync.engine import as_engine; as_engine({});"
        "ws.VLLMServer; assert 'httpx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_httpx_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "weightsync.engines.vllm.http", raising=False)
    with pytest.raises(ws.EngineError, match=r"weightsync\[server\]"):
        ws.VLLMServer("http://localhost:8000")


def test_the_token_is_sent_with_every_request(server):
    client = client_of(server)
    client.facts(soon())
    client.ask('{"op": "status"}', soon(), "status")
    client.resume(soon())
    assert len(server.asked) == 4
    assert {asked.headers["Authorization"] for asked in server.asked} == {f"Bearer {TOKEN}"}
    server.asked.clear()
    client_of(server, token=None).facts(soon())
    assert all("Authorization" not in asked.headers for asked in server.asked)


def test_the_token_is_in_no_repr_message_or_log(server, caplog):
    caplog.set_level("DEBUG")
    target = ws.VLLMServer(server.url, TOKEN)
    engine = as_engine(target)
    server.replies["/resume"] = (500, f"who said {TOKEN}?".encode())
    with pytest.raises(ws.EngineError, match="who said") as caught:
        engine.client.resume(soon())
    said = f"{target!r} {engine.name} {caught.value!r} {caught.value.__context__!r} {caplog.text}"
    assert TOKEN not in said


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "", "schlüssel", b"bytes"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_told(token):
    with pytest.raises(ws.EngineError, match="token") as caught:
        ws.VLLMServer("http://localhost:8000", token)
    assert not token or str(token) not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", "like http://host:8000"),
        ("ftp://localhost", "like http://host:8000"),
        ("http://", "like http://host:8000"),
        ("http://host:port", "like http://host:8000"),
        ("http://host:8000/?a=b", "like http://host:8000"),
        (8000, "like http://host:8000"),
        ("http://user:word@host:8000", "give token="),
        ("http://0.0.0.0:8000", "where a server listens"),
        ("http://[::]:8000", "where a server listens"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url, words):
    with pytest.raises(ws.EngineError, match=words) as caught:
        ws.VLLMServer(url)
    assert "word@" not in str(caught.value)


def test_proxies_of_the_environment_are_not_used_for_own_addresses(server, monkeypatch):
    import socket

    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for host in ("127.0.0.1", "localhost", "127.0.0.2"):
        if host != "127.0.0.2":
            assert ws.VLLMServer(f"http://{host}:{server.port}").weight_label() == "7:3"
    from weightsync.engines.vllm.addresses import is_own

    assert is_own("localhost")
    assert is_own("127.0.0.2")
    assert is_own("::1") or not socket.has_ipv6
    assert is_own(socket.gethostname())
    assert not is_own("192.0.2.77")
    assert not is_own("no-such-host.invalid")


def test_proxies_of_the_environment_are_used_for_other_hosts(server, monkeypatch):
    """The stub plays the proxy: it is asked for the whole URL."""
    monkeypatch.setenv("HTTP_PROXY", server.url)
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    there = "http://192.0.2.77:8000"
    server.replies[f"{there}/weight_info"] = {"weight_version": "1:1"}
    assert ws.VLLMServer(there).weight_label() == "1:1"


def test_a_redirect_is_not_followed(server):
    with stub() as other:
        server.replies["/resume"] = lambda handler: handler.answer(
            307, b"", Location=f"{other.url}/resume"
        )
        with pytest.raises(ws.EngineError, match=f"redirects to '{other.url}/resume'"):
            client_of(server).resume(soon())
        assert other.asked == []


# ---------------------------------------------------------------- errors


def test_an_error_has_the_route_the_status_and_the_servers_own_words(server):
    error = {"error": {"message": "the scheduler is in a bad mood", "code": 500}}
    server.replies["/pause"] = (500, json.dumps(error).encode())
    with pytest.raises(ws.EngineError, match="/pause answered 500: the scheduler is in a bad mood"):
        client_of(server).pause("keep", soon())


def test_a_servers_own_words_are_of_bounded_length(server):
    server.replies["/resume"] = (400, b"x" * 1_000_000)
    with pytest.raises(ws.EngineError) as caught:
        client_of(server).resume(soon())
    assert len(str(caught.value)) < 2000


def test_a_missing_route_says_that_the_server_needs_its_development_mode(server):
    del server.replies["/server_info"]
    with pytest.raises(ws.EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        client_of(server).facts(soon())


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_wrong_token_is_said_so(server, token):
    server.replies["/weight_info"] = (401, b'{"error": "Unauthorized"}')
    with pytest.raises(ws.EngineError, match="accept the token" if token else "asks for a token"):
        ws.VLLMServer(server.url, token).weight_label()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "started with a weight transfer of none"),
        ({"backend": "nccl"}, "started with a weight transfer of backend 'nccl'"),
    ],
)
def test_a_server_without_the_plug_in_is_seen_before_its_workers_are_asked(
    server, tmp_path, config, words
):
    """A method that workers do not have would raise in them."""
    server.replies["/server_info"]["vllm_config"]["weight_transfer_config"] = config
    receiver = ws.DoubleBufferScheme(str(tmp_path / "run")).create_receiver(
        ws.VLLMServer(server.url)
    )
    with pytest.raises(ws.EngineError, match=words) as caught:
        receiver.connect(timeout=1)
    assert """--weight-transfer-config '{"backend": "weightsync"}'""" in str(caught.value)
    assert "/collective_rpc" not in server.routes()


def test_a_server_of_some_data_parallel_ranks_only_is_refused(server):
    parallel = server.replies["/server_info"]["vllm_config"]["parallel_config"]
    parallel.update(data_parallel_size=2, data_parallel_external_lb=True)
    with pytest.raises(ws.EngineError, match="data_parallel_external_lb"):
        client_of(server).facts(soon())


def test_a_server_that_does_not_listen_is_dead_at_once(server):
    client = client_of(server)
    client.facts(soon())
    server.close()
    began = time.monotonic()
    with pytest.raises(ws.EngineDiedError, match="is gone"):
        client.resume(Deadline(60))
    assert time.monotonic() - began < 30  # not the deadline


def test_a_server_that_starts_late_is_waited_for(server, monkeypatch):
    server.replies["/version"] = {"version": "late"}
    client = client_of(server)
    get = client._http.request
    left = [3]

    def refused(*arguments):
        if left[0]:
            left[0] -= 1
            raise ws.EngineDiedError("nobody there")
        return get(*arguments)

    monkeypatch.setattr(client._http, "request", refused)
    assert client.facts(Deadline(10)).version == "late"
    left[0] = 1
    with pytest.raises(ws.EngineDiedError):  # it was there before: it is dead
        client.facts(Deadline(10))


def test_a_server_that_may_still_be_starting_is_said_to_need_more_time(server):
    client = client_of(server)
    server.close()
    with pytest.raises(ws.DeadlineError, match=r"still starting.*connect\(timeout=\)"):
        client.facts(Deadline(0.5))


def test_an_engine_that_died_behind_its_server_is_dead(server):
    server.replies["/resume"] = (500, b'{"error": {"message": "EngineCore encountered an issue."}}')
    server.replies["/health"] = (503, b"")
    with pytest.raises(ws.EngineDiedError, match="EngineCore encountered"):
        client_of(server).resume(soon())


@pytest.mark.parametrize("health", ["dead", "gone"])
def test_a_server_whose_engine_dies_under_a_call_is_not_waited_for(server, health):
    """vLLM's does not answer such a call any more."""
    ended = threading.Event()

    def reply(handler):
        if health == "dead":
            server.replies["/health"] = (503, b"")
        else:
            threading.Thread(target=server.close).start()
        ended.wait(30)
        return 200, b""

    server.replies["/resume"] = reply
    with pytest.raises(ws.EngineDiedError, match="is dead" if health == "dead" else "no more"):
        client_of(server).resume(Deadline(60))
    ended.set()


def test_a_server_that_takes_its_time_is_waited_for(server):
    server.replies["/resume"] = lambda handler: time.sleep(2.5) or (200, b"")
    client_of(server).resume(soon())
    assert "/health" in server.routes()


def test_a_connection_that_breaks_is_no_death_of_a_server_that_answers(server):
    server.replies["/resume"] = drop
    with pytest.raises(ws.EngineError, match="broke") as caught:
        client_of(server).resume(soon())
    assert not isinstance(caught.value, ws.EngineDiedError)


def test_a_request_that_is_not_answered_ends_at_its_deadline(server):
    server.replies["/weight_info"] = lambda handler: time.sleep(2)
    with pytest.raises(ws.DeadlineError, match=r"/weight_info within 0\.2 s"):
        ws.VLLMServer(server.url).weight_label(timeout=0.2)


def test_an_answer_that_never_ends_ends_at_its_deadline(server):
    server.replies["/weight_info"] = drip
    with pytest.raises(ws.DeadlineError):
        ws.VLLMServer(server.url).weight_label(timeout=1.0)


def test_an_answer_that_is_too_long_is_not_read(server, monkeypatch):
    from weightsync.engines.vllm import http

    monkeypatch.setattr(http, "_LARGEST", 1000)
    server.replies["/weight_info"] = (200, b" " * 100_000)
    with pytest.raises(ws.EngineError, match="more than 1,000 bytes"):
        ws.VLLMServer(server.url).weight_label()


GARBAGE = [
    b"<html>",
    b"\xff\xfe\x00",
    b"[]",
    b"null",
    b"7",
    b'{"results": 3}',
    b'{"results": [null]}',
    pickle.dumps(print),
    b"[" * 100_000,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("route", ["/server_info", "/collective_rpc"])
def test_garbage_is_an_engines_error(server, route, garbage):
    client = client_of(server)
    if route != "/server_info":
        client.facts(soon())
    server.replies[route] = (200, garbage)
    with pytest.raises(ws.EngineError):
        client.ask('{"op": "status"}', soon(), "status")


def test_the_label_of_ranks_that_do_not_agree_yet_is_asked_again(server):
    words = b'{"error": {"message": "Engines returned different get_weight_version results"}}'
    left = [(500, words)] * 3
    server.replies["/weight_info"] = lambda handler: (
        left.pop() if left else (200, b'{"weight_version": "7:4"}')
    )
    assert ws.VLLMServer(server.url).weight_label() == "7:4"


# ---------------------------------------------------------------- generating


def spanned(*spans, tokens=(5, 6, 7), logprobs=None):
    choice = {
        "index": 0,
        "token_ids": list(tokens),
        "finish_reason": "length",
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
        "logprobs": logprobs,
    }
    return {"choices": [choice]}


def test_an_answer_says_which_tokens_are_of_which_version(server):
    content = {"content": [{"token_id": 5, "logprob": -0.5, "top_logprobs": []}] * 3}
    server.replies["/inference/v1/generate"] = spanned(
        ("7:3", 0, 2), ("7:4", 2, 3), logprobs=content
    )
    target = ws.VLLMServer(server.url)
    (answer,) = target.generate([[1, 2]], temperature=0, max_tokens=3, logprobs=0, model="policy")
    assert (answer.tokens, answer.finish_reason) == ((5, 6, 7), "length")
    assert (answer.oldest, answer.newest) == (ws.Version(7, 3), ws.Version(7, 4))
    assert [(s.version, s.start, s.end) for s in answer.spans] == [
        (ws.Version(7, 3), 0, 2),
        (ws.Version(7, 4), 2, 3),
    ]
    assert answer.logprobs == (-0.5, -0.5, -0.5)
    assert json.loads(server.asked[-1].body) == {
        "token_ids": [1, 2],
        "sampling_params": {"temperature": 0, "max_tokens": 3, "logprobs": 0},
        "model": "policy",
    }


def test_the_answers_are_in_the_order_of_the_prompts(server):
    def reply(handler):
        prompt = json.loads(handler.body)["token_ids"]
        time.sleep(0.05 * (prompt == [0]))
        return 200, json.dumps(spanned(("7:3", 0, 1), tokens=prompt)).encode()

    server.replies["/inference/v1/generate"] = reply
    answers = ws.VLLMServer(server.url).generate([[number] for number in range(8)])
    assert [answer.tokens for answer in answers] == [(number,) for number in range(8)]


def test_before_the_first_update_an_answer_is_of_no_version(server):
    server.replies["/inference/v1/generate"] = spanned(("default", 0, 3))
    (answer,) = ws.VLLMServer(server.url).generate([[1]])
    assert answer.oldest is answer.newest is answer.spans[0].version is None


@pytest.mark.parametrize("status", [403, 404])
def test_without_spans_an_answer_has_the_oldest_and_newest_version_around_it(server, status):
    labels = iter(["7:3", "7:5"])
    server.replies["/inference/v1/generate"] = (status, b'{"error": {"message": "disabled"}}')
    server.replies["/weight_info"] = lambda handler: (
        200,
        json.dumps({"weight_version": next(labels)}).encode(),
    )
    choices = [
        {"index": 1, "token_ids": [8], "finish_reason": "stop", "logprobs": None},
        {
            "index": 0,
            "token_ids": [9],
            "finish_reason": "length",
            "logprobs": {"token_logprobs": [-1]},
        },
    ]
    server.replies["/v1/completions"] = {"choices": choices}
    target = ws.VLLMServer(server.url)
    first, second = target.generate([[1], [2]], max_tokens=1)
    assert (first.tokens, first.logprobs, second.tokens) == ((9,), (-1.0,), (8,))
    for answer in (first, second):
        assert (answer.oldest, answer.newest) == (ws.Version(7, 3), ws.Version(7, 5))
        assert answer.spans is None


@pytest.mark.parametrize("spans", [True, False])
def test_an_unusable_server_generates_nothing(server, spans):
    if spans:
        server.replies["/inference/v1/generate"] = spanned(("7:3", 0, 2), ("unusable", 2, 3))
    else:
        server.replies["/inference/v1/generate"] = (404, b"")
        server.replies["/weight_info"] = {"weight_version": "unusable"}
        server.replies["/v1/completions"] = {"choices": [{**spanned()["choices"][0]}]}
    with pytest.raises(ws.EngineUnusableError, match="holds no whole version"):
        ws.VLLMServer(server.url).generate([[1]])


@pytest.mark.parametrize("garbage", [b"{}", b'{"choices": [{"index": 0}]}', b'{"choices": 3}'])
def test_a_garbage_answer_is_an_engines_error(server, garbage):
    server.replies["/inference/v1/generate"] = (200, garbage)
    with pytest.raises(ws.EngineError):
        ws.VLLMServer(server.url).generate([[1]])


def test_several_answers_for_a_prompt_are_refused_by_name(server):
    with pytest.raises(ws.EngineError, match="no n="):
        ws.VLLMServer(server.url).generate([[1]], n=2)


def test_logprobs_are_those_of_the_prompts_own_tokens(server):
    positions = [None, {"2": {"logprob": -1.5}}, {"3": {"logprob": -2.5}}]
    server.replies["/v1/completions"] = {"choices": [{"index": 0, "prompt_logprobs": positions}]}
    client = client_of(server)
    assert client.logprobs([[1, 2, 3]], soon()) == [[-1.5, -2.5]]
    with pytest.raises(ws.EngineError):
        client.logprobs([[1, 2, 4]], soon())


# ---------------------------------------------------------------- the rest of the contract


def test_each_call_goes_to_its_route(server):
    for route in (
        "/pause",
        "/resume",
        "/wake_up",
        "/reset_encoder_cache",
        "/update_weight_version",
    ):
        server.replies[route] = (200, b"")
    client = client_of(server)
    client.pause("keep", soon())
    client.resume(soon())
    client.wake(["weights", "kv_cache"], soon())
    assert client.reset_prefix_cache(soon())
    client.reset_encoder_cache(soon())
    client.set_version("7:4", soon())
    assert [asked.path for asked in server.asked] == [
        "/pause?mode=keep&clear_cache=false",
        "/resume",
        "/wake_up?tags=weights&tags=kv_cache",
        "/reset_prefix_cache?reset_running_requests=true",
        "/reset_encoder_cache",
        "/update_weight_version",
    ]
    assert json.loads(server.asked[-1].body) == {"new_version": "7:4"}
    server.replies["/reset_prefix_cache"] = {"success": False}
    assert not client.reset_prefix_cache(soon())


@pytest.mark.parametrize("name", ["is_paused", "is_sleeping"])
def test_a_server_that_is_paused_or_asleep_is_paused(server, name):
    client = client_of(server)
    assert not client.is_paused(soon())
    server.replies[f"/{name}"] = {name: True}
    assert client.is_paused(soon())


def test_ranks_that_do_not_agree_are_not_paused_by_a_user(server):
    words = b'{"error": {"message": "Engines returned different is_scheduler_paused results"}}'
    server.replies["/is_paused"] = (500, words)
    assert not client_of(server).is_paused(soon())
    server.replies["/is_paused"] = (500, b"something else")
    with pytest.raises(ws.EngineError, match="something else"):
        client_of(server).is_paused(soon())


def test_connections_are_used_again_and_closed(server):
    target = ws.VLLMServer(server.url)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        target.weight_label()
    target.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the stub's own end closes when it may
    assert target.weight_label() == "7:3"
