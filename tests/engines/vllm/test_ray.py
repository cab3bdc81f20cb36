"""The client of Ray actors, on an actor of this process: no Ray is started."""

import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

import weightsync as ws
from weightsync.deadline import Deadline
from weightsync.engines.vllm import make
from weightsync.engines.vllm import ray as of_ray

WAIT = 10.0


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class ActorUnavailableError(RayActorError):
    pass


class GetTimeoutError(RayError, TimeoutError):
    pass


@pytest.fixture
def ray(monkeypatch):
    """What the client needs of Ray: a reference is the call that is yet to be made."""
    module = ModuleType("ray")
    module.exceptions = SimpleNamespace(
        RayError=RayError,
        RayActorError=RayActorError,
        ActorUnavailableError=ActorUnavailableError,
        GetTimeoutError=GetTimeoutError,
    )
    module.cancelled = []
    module.get = lambda reference, timeout=None: reference()
    module.wait = lambda references, timeout=None: (references, [])
    module.cancel = module.cancelled.append
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


class ActorHandle:
    """``Ray``'s own has this name, and is told by it."""

    def __init__(self, actor):
        def remote(function, *arguments):
            return lambda: function(actor, *arguments)

        self.__ray_call__ = SimpleNamespace(remote=remote)

    def __repr__(self):
        return "Actor(Rollouts, 0123)"


ActorHandle.__module__ = "ray.actor"


class Core:
    """vLLM's client of its engine, which nobody has put to sleep."""


class LLM:
    """As much of vLLM's as it takes to be asked for facts, and to be paused."""

    def __init__(self):
        parallel = SimpleNamespace(world_size=2, data_parallel_size=1)
        transfer = SimpleNamespace(backend="weightsync")
        config = SimpleNamespace(parallel_config=parallel, weight_transfer_config=transfer)
        self.llm_engine = SimpleNamespace(
            vllm_config=config, is_sleeping=lambda: True, engine_core=Core()
        )

    def sleep(self, level, mode):
        raise RuntimeError("no sleep tonight")


LLM.__module__ = "vllm.entrypoints.llm"


class Rollouts:
    def __init__(self, **attributes):
        vars(self).update(attributes)


@pytest.mark.parametrize(
    ("actor", "options"),
    [
        (LLM(), {}),
        (Rollouts(llm=LLM(), step=3), {}),
        (Rollouts(anything=LLM()), {}),
        (Rollouts(one=LLM(), other=LLM()), {"attribute": "other"}),
        (Rollouts(worker=Rollouts(llm=LLM())), {"attribute": "worker.llm"}),
    ],
    ids=["the actor itself", "in llm", "in any attribute", "one of two", "further inside"],
)
def test_the_engine_of_an_actor_is_found(ray, actor, options):
    engine = make(ActorHandle(actor), **options)
    assert engine.workers(Deadline(WAIT)) == 2
    assert engine.client.is_paused(Deadline(WAIT))


@pytest.mark.parametrize(
    ("actor", "options", "words"),
    [
        (Rollouts(), {}, "a Rollouts holds no LLM or AsyncLLM"),
        (Rollouts(one=LLM(), other=LLM()), {}, "several engines: one, other; say attribute="),
        (Rollouts(llm=LLM()), {"attribute": "engine"}, "no attribute 'engine'"),
        (Rollouts(llm=3), {"attribute": "llm"}, "its 'llm' is an int"),
    ],
)
def test_an_actor_without_one_is_told_what_to_say(ray, actor, options, words):
    engine = make(ActorHandle(actor), **options)
    with pytest.raises(ws.EngineError, match=words) as caught:
        engine.workers(Deadline(WAIT))
    assert "Actor(Rollouts, 0123)" in str(caught.value)


def test_an_error_of_the_engine_comes_back_in_its_own_words(ray):
    client = make(ActorHandle(LLM())).client
    with pytest.raises(ws.EngineError, match=r"Actor\(Rollouts, 0123\): .*no sleep tonight"):
        client.pause("keep", Deadline(WAIT))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RayActorError("the node is gone"), ws.EngineDiedError),
        (ActorUnavailableError("no network"), ws.EngineError),
        (RayError("out of memory"), ws.EngineError),
    ],
)
def test_what_ray_says_of_an_actor_is_told_by_name(ray, raised, expected):
    def get(reference, timeout=None):
        raise raised

    ray.get = get
    client = make(ActorHandle(LLM())).client
    with pytest.raises(ws.EngineError, match=rf"Actor\(Rollouts, 0123\).*{raised}") as caught:
        client.resume(Deadline(WAIT))
    assert type(caught.value) is expected


def test_a_call_that_has_not_begun_at_its_deadline_is_cancelled(ray):
    def get(reference, timeout=None):
        assert timeout is not None
        raise GetTimeoutError

    ray.get = get
    client = make(ActorHandle(LLM())).client
    with pytest.raises(ws.DeadlineError, match="had not answered to pause"):
        client.pause("keep", Deadline(0.0))
    assert len(ray.cancelled) == 1


def test_an_async_engine_is_asked_until_it_has_answered(ray, monkeypatch):
    """Ray hands an actor no other call while one of ours is waiting in it."""

    class Slow:
        def is_paused(self, deadline):
            time.sleep(0.1)
            return True

    monkeypatch.setattr(of_ray, "_client", lambda actor, attribute: Slow())
    calls = []
    plain = ray.get
    ray.get = lambda reference, timeout=None: calls.append(1) or plain(reference)
    assert make(ActorHandle(None)).client.is_paused(Deadline(WAIT))
    assert len(calls) > 2
    assert not of_ray._OUTCOMES


def test_how_often_a_busy_actor_slept_is_what_it_said_last(ray, monkeypatch):
    client = make(ActorHandle(LLM())).client
    monkeypatch.setattr(of_ray, "_deep_sleeps", lambda actor, attribute: 2)
    assert client.deep_sleeps() == 2
    ray.wait = lambda references, timeout=None: ([], references)
    monkeypatch.setattr(of_ray, "_deep_sleeps", lambda actor, attribute: 3)
    assert client.deep_sleeps() == 2


def test_a_handle_is_recognised_without_importing_ray():
    code = """
import sys
class ActorHandle: pass
ActorHandle.__module__ = "ray.actor"
from weightsync.engines.vllm import accepts
assert accepts(ActorHandle()) and not accepts(object())
assert not {"ray", "vllm", "httpx"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
