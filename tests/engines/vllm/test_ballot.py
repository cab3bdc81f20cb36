"""Workers' own answers: who may give them, and what becomes of those that nobody may give."""

import json
import pickle
import socket
import threading

import pytest

import weightsync as ws
from tests.engines.vllm.stub import stub
from weightsync.deadline import Deadline
from weightsync.engines.vllm import ballot as ballots
from weightsync.engines.vllm.ballot import Ballot, message
from weightsync.engines.vllm.server import ServerClient
from weightsync.vllm_worker import answers


@pytest.fixture
def ballot():
    ballot = Ballot("127.0.0.1")
    yield ballot
    ballot.close()


def request(question, **changes):
    return json.dumps({"op": "status", "answer": {**question.answer, **changes}})


def answer(rank, **more):
    return json.dumps({"rank": rank, **more})


def send_raw(ballot, content, end=True):
    connection = socket.create_connection((ballot.host, ballot.port), timeout=5)
    connection.sendall(content)
    if end:
        connection.close()
    return connection


def test_each_workers_answer_arrives_in_their_order(ballot):
    with ballot.question() as question:
        for rank in (2, 0, 1):
            answers.send(request(question), answer(rank))
        assert question.wait(3, Deadline(5)) == [answer(0), answer(1), answer(2)]


def test_workers_that_do_not_answer_are_named(ballot):
    with ballot.question() as question:
        answers.send(request(question), answer(1))
        with pytest.raises(
            ws.EngineError, match=r"of 4 workers 0, 2, 3 did not answer at 127"
        ) as e:
            question.wait(4, Deadline(0.3))
    assert "answer_address" in str(e.value)


def test_an_answer_to_another_question_does_not_count(ballot):
    with ballot.question() as former:
        pass
    with ballot.question() as question:
        answers.send(request(former), answer(0, old=True))
        answers.send(request(question, number=former.answer["number"]), answer(0, old=True))
        answers.send(request(question, token="0" * 32), answer(0, forged=True))
        answers.send(request(question), answer(0))
        assert question.wait(1, Deadline(5)) == [answer(0)]


def test_the_first_answer_of_a_worker_counts(ballot):
    with ballot.question() as question:
        answers.send(request(question), answer(0))
        question.wait(1, Deadline(5))
        answers.send(request(question), answer(0, again=True))
        answers.send(request(question), answer(1))
        assert question.wait(2, Deadline(5)) == [answer(0), answer(1)]


def test_x1_a_pickle_sent_to_the_socket_creates_no_file(ballot, tmp_path):
    """X1: nor does one with a right digest, from a worker that was taken over."""
    file = tmp_path / "made"

    class Evil:
        def __reduce__(self):
            return (open, (str(file), "w"))

    evil = pickle.dumps(Evil())
    with ballot.question() as question:
        token, number = question.token, question.answer["number"]
        send_raw(ballot, evil)
        send_raw(ballot, ballots._digest(token, number, evil) + evil)
        answers.send(request(question), answer(0))
        assert question.wait(1, Deadline(5)) == [answer(0)]
    assert not file.exists()


BAD = [
    b"",
    b"x",
    b"\0" * 32,
    b"[]",
    b"null",
    b"3",
    b'{"rank": -1}',
    b'{"rank": true}',
    b"\xff" * 50,
]


@pytest.mark.parametrize(
    "content", [*BAD, b'{"rank": "0"}', b"[" * 50_000], ids=range(len(BAD) + 2)
)
def test_garbage_with_a_right_digest_is_dropped(ballot, content):
    with ballot.question() as question:
        token, number = question.token, question.answer["number"]
        send_raw(ballot, ballots._digest(token, number, content) + content)
        answers.send(request(question), answer(0))
        assert question.wait(1, Deadline(5)) == [answer(0)]


def test_connections_that_say_nothing_keep_nobody_waiting(ballot):
    silent = [send_raw(ballot, b"12", end=False) for _ in range(20)]
    with ballot.question() as question:
        answers.send(request(question), answer(0))
        assert question.wait(1, Deadline(3)) == [answer(0)]
    for connection in silent:
        connection.close()


def test_an_endless_answer_is_cut(ballot, monkeypatch):
    monkeypatch.setattr(ballots, "LARGEST", 1000)
    monkeypatch.setattr(ballots, "_PATIENCE", 600.0)  # not because of the time it takes
    connection = socket.create_connection((ballot.host, ballot.port), timeout=5)

    def send_for_long():
        for _ in range(500):
            connection.sendall(b"x" * 100_000)

    with pytest.raises(ConnectionError):
        send_for_long()
    connection.close()


@pytest.mark.parametrize(
    "where",
    [
        3,
        {},
        {"host": "127.0.0.1", "port": 1, "token": "t", "number": 1},
        {"host": "127.0.0.1", "port": 10**9, "token": "t", "number": 1},
        {"host": 7, "port": "x", "token": None, "number": []},
    ],
)
def test_a_worker_survives_whatever_it_is_told_to_answer_to(where, caplog):
    answers.send(json.dumps({"op": "status", "answer": where}), answer(0))
    assert "did not reach the driver" in caplog.text


def test_a_request_without_an_address_is_answered_the_usual_way_only(ballot, caplog):
    answers.send('{"op": "status"}', answer(0))
    answers.send('{"op": "status", "answer": null}', answer(0))
    assert caplog.text == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.77"])
def test_it_listens_at_addresses_of_this_machine_only_and_never_at_all_of_them(host):
    with pytest.raises(ws.EngineError):
        Ballot(host)


def test_an_answer_is_bound_to_its_question():
    assert message("key", 1, "{}") != message("key", 2, "{}") != message("kez", 2, "{}")


# ---------------------------------------------------------------- in a client


def serving(server, workers):
    """A stub whose RPC reaches all workers and returns what the first one says."""
    asked = []

    def reply(handler):
        request = json.loads(handler.body)["args"][0]
        asked.append(json.loads(request))
        for rank in workers:
            answers.send(request, answer(rank, op=asked[-1]["op"]))
        return 200, json.dumps({"results": [answer(0)]}).encode()

    server.replies["/collective_rpc"] = reply
    parallel = server.replies["/server_info"]["vllm_config"]["parallel_config"]
    parallel.update(world_size=1, data_parallel_size=3)
    return asked


@pytest.fixture
def server():
    with stub() as server:
        yield server


def test_a_data_parallel_servers_workers_are_all_heard(server):
    asked = serving(server, range(3))
    client = ServerClient(ws.VLLMServer(server.url))
    assert client.facts(Deadline(5)).workers == 3
    for op in ("status", "release"):
        found = client.ask(json.dumps({"op": op}), Deadline(5), op)
        assert found == [answer(rank, op=op) for rank in range(3)]
    assert {request["answer"]["host"] for request in asked} == {"127.0.0.1"}
    assert len({request["answer"]["token"] for request in asked}) == 2
    assert len({request["answer"]["port"] for request in asked}) == 1
    client.close()


def test_a_data_parallel_worker_that_is_not_heard_is_named(server, monkeypatch):
    from weightsync.engines.vllm import server as module

    monkeypatch.setattr(module, "GRACE", 0.3)
    serving(server, [0, 2])
    client = ServerClient(ws.VLLMServer(server.url))
    with pytest.raises(ws.EngineError, match="of 3 workers 1 did not answer"):
        client.ask('{"op": "status"}', Deadline(5), "status")
    client.close()


def test_the_address_that_a_user_gives_is_listened_at_and_told(server):
    asked = serving(server, range(3))
    client = ServerClient(ws.VLLMServer(server.url, answer_address="127.0.0.3"))
    assert len(client.ask('{"op": "status"}', Deadline(5), "status")) == 3
    assert asked[0]["answer"]["host"] == "127.0.0.3"
    client.close()


def test_the_threads_of_a_ballot_end_with_it(server):
    serving(server, range(3))
    before = threading.active_count()
    client = ServerClient(ws.VLLMServer(server.url))
    client.ask('{"op": "status"}', Deadline(5), "status")
    client.close()
    assert not any(thread.name == "weightsync ballot" for thread in threading.enumerate())
    assert threading.active_count() <= before + 6  # those of the stub's kept connections
