"""What ends do to prove something to each other, and that nothing of it stays."""

import os

import pytest

import weightsync as ws
from tests.conftest import WAIT
from weightsync.deadline import Deadline
from weightsync.placement import questions
from weightsync.placement.ends import End
from weightsync.placement.proofs import prove_reached, prove_shared


def answering(question, deadline):
    return [questions.answer(question)]


def silent(question, deadline):
    raise ws.DeadlineError("it had not answered")


def one_worker_elsewhere(question, deadline):
    return [questions.answer(question), {"error": "no such file"}]


TRAINER, ENGINE = End("trainer", answering), End("engine", answering)


def test_each_is_told_apart_and_no_file_stays(tmp_path):
    others = [ENGINE, End("other", one_worker_elsewhere), End("unasked", None)]
    proof = prove_shared(str(tmp_path), TRAINER, others, Deadline(WAIT))
    assert proof.holds == (True, False, True)
    assert proof.words == (
        f"the trainer wrote into {tmp_path}",
        "engine read it",
        "other does not find it: no such file",
        "unasked cannot be asked, and is trusted to",
    )
    assert os.listdir(tmp_path) == []


def test_what_was_done_is_undone_also_when_the_time_is_up(tmp_path):
    with pytest.raises(ws.DeadlineError):
        prove_shared(str(tmp_path), TRAINER, [End("engine", silent)], Deadline(0.1))
    assert os.listdir(tmp_path) == []
    with pytest.raises(ws.DeadlineError):
        prove_reached("127.0.0.1", None, TRAINER, [End("engine", silent)], Deadline(0.1))
    assert not questions._listening


def test_the_port_that_was_reached_is_free_for_the_sender():
    proof = prove_reached("127.0.0.1", None, TRAINER, [ENGINE], Deadline(WAIT))
    assert proof.holds == (True,)
    scheme = ws.NCCLScheme(master_port=proof.port, backend="gloo")
    with scheme.create_sender({}) as sender:
        sender.connect(timeout=WAIT)


def test_a_directory_that_the_trainer_cannot_write_to_is_not_shared(tmp_path):
    proof = prove_shared(f"{tmp_path}/none", TRAINER, [ENGINE], Deadline(WAIT))
    assert proof.holds == (False,)
    assert "FileNotFoundError" in proof.words[0]
