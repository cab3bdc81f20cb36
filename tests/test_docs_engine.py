"""The engine of docs/writing-an-engine.md keeps what the page says of engines."""

import threading

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from tests.docs import run
from weightsync.testing import flip_bit

PAGE = "docs/writing-an-engine.md"


def weights(value):
    """What makes the sampler answer the prompt 1 with 48 times the value."""
    parts = {name: torch.full((2, 4), float(value * n)) for n, name in enumerate("qkv", 1)}
    return parts | {"norm": torch.ones(4)}


@pytest.fixture
def sampler(run_dir):
    return run(PAGE, "sampler", run_dir)["Sampler"]()


@pytest.fixture
def engine(run_dir, sampler):
    return run(PAGE, "engine", run_dir)["SamplerEngine"](sampler)


def test_it_is_used_like_any_other(run_dir, sampler, engine):
    made = type(engine)
    names = run(PAGE, "use", run_dir, weights=weights(2), sampler=sampler, SamplerEngine=made)
    assert names["answer"] == 3 * 48 * 2
    assert sampler.weights["qkv"][:, 0].tolist() == [2, 2, 4, 4, 6, 6]
    assert sampler.label == names["report"].version


def test_the_same_prompt_is_answered_anew(ends, sampler, engine):
    """K1."""
    sender, receiver = ends.pair(None, engine)
    for number in (1, 2):
        sender.update_weights(weights(number), version=number)
        receiver.poll_and_apply()
        assert sampler.generate(1) == 48 * number


def test_a_request_that_runs_is_waited_for_and_one_that_hangs_is_named(ends, sampler, engine):
    sender, receiver = ends.pair(weights(1), engine, receiver={"apply_timeout": 0.2})
    sender.update_weights(version=1)
    with sampler.serving, pytest.raises(ws.DeadlineError, match="a request of the sampler"):
        receiver.poll_and_apply()
    assert receiver.poll_and_apply().version.number == 1
    assert sampler.generate(1) == 48


def test_other_weights_are_refused_and_nothing_is_touched(ends, sampler, engine):
    """N7, E6."""
    sender, receiver = ends.pair(None, engine)
    wrong = {**weights(1), "norm": torch.ones(5), "bias": torch.ones(1)}
    del wrong["q"]
    sender.update_weights(wrong, version=1)
    with pytest.raises(ws.MismatchError) as error:
        receiver.poll_and_apply()
    assert (error.value.missing, error.value.unexpected) == (("q",), ("bias",))
    assert error.value.different == {"norm": ("float32[5]", "float32[4]")}
    sender.update_weights({**weights(1), "norm": torch.ones(5)}, version=2)
    with pytest.raises(ws.MismatchError, match="differ"):
        receiver.poll_and_apply()
    assert not sampler.weights["qkv"].any()


def test_one_that_fails_half_way_goes_back(ends, sampler, engine, monkeypatch):
    sender, receiver = ends.pair(None, engine)
    sender.update_weights(weights(1), version=1)
    receiver.poll_and_apply()
    apply, tries = engine.apply, []

    def fail_once(update, deadline):
        tries.append(update.version.number)
        if len(tries) == 1:
            sampler.weights["qkv"][:3] = 7
            raise RuntimeError("no such kernel")
        apply(update, deadline)

    monkeypatch.setattr(engine, "apply", fail_once)
    sender.update_weights(weights(2), version=2)
    with pytest.raises(RuntimeError, match="no such kernel"):
        receiver.poll_and_apply()
    assert (tries, receiver.state, sampler.generate(1)) == ([2, 1], "rolled back", 48)


def test_what_differs_is_found(ends, sampler, engine):
    """Q4."""
    sender, receiver = ends.pair(weights(1), engine)
    sender.update_weights(version=1)
    receiver.poll_and_apply()
    assert receiver.verify_weights().ok
    flip_bit(sampler.weights["qkv"][4])  # the first row of v
    assert receiver.verify_weights().different == ("v",)


def test_requests_are_not_answered_by_a_mix(ends, sampler, engine):
    """R3: with constants, whole versions give multiples of 48."""
    sender, receiver = ends.pair(weights(1), engine)
    sender.attach(receiver)
    sender.update_weights(version=1)
    answers, ended = set(), threading.Event()

    def ask():
        while not ended.is_set():
            answers.add(sampler.generate(1))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for number in range(2, 30):
            sender.update_weights(weights(number), version=number)
    finally:
        ended.set()
        thread.join(WAIT)
    assert {answer % 48 for answer in answers} == {0.0}


def test_a_worker_reads_for_itself(ends, run_dir):
    sender = ends.sender(weights(3))
    version = sender.update_weights(version=1).version
    parts = {name: torch.zeros(2, 4) for name in "qkv"}
    given = {"url": ends.scheme().for_workers("driver").to_url(), "rank": 0, "size": 1}
    names = run(PAGE, "worker", run_dir, **given)
    names["load"](version, parts, WAIT)
    names["reader"].close()
    assert [part[0, 0].item() for part in parts.values()] == [3, 6, 9]
