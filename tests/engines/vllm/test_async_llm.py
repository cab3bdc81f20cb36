"""The client of ``AsyncLLM``, on an object that has the surface of one."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

import weightsync as ws
from weightsync.deadline import Deadline
from weightsync.engines.vllm import make

WAIT = 10.0


class EngineDeadError(Exception):
    pass


class AsyncLLM:
    """Two data-parallel ranks; what they answer is the test's."""

    def __init__(self, answer):
        async def call(method, *arguments, engine):
            return await answer(method, engine)

        parallel = SimpleNamespace(world_size=1, data_parallel_size=2)
        transfer = SimpleNamespace(backend="weightsync")
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel, weight_transfer_config=transfer
        )
        self.engine_core = SimpleNamespace(
            core_engines=[b"0", b"1"], engine_ranks_managed=[0, 1], _call_utility_async=call
        )
        self.output_handler = None
        self.errored = False


AsyncLLM.__module__ = "vllm.v1.engine.async_llm"


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    if loop.is_running():
        loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def client_of(answer, loop):
    return make(AsyncLLM(answer), loop=loop).client


def test_the_workers_of_every_rank_are_asked(loop):
    async def answer(method, engine):
        return [f"{method} of rank {engine.decode()}"]

    client = client_of(answer, loop)
    assert client.ask("{}", Deadline(WAIT), "status") == [
        "collective_rpc of rank 0",
        "collective_rpc of rank 1",
    ]


def test_a_worker_that_does_not_answer_is_missed(loop):
    async def answer(method, engine):
        return ["yes"] if engine == b"0" else []

    with pytest.raises(ws.EngineError, match="1 of 2 workers answered to begin"):
        client_of(answer, loop).ask("{}", Deadline(WAIT), "begin")


def test_one_rank_that_is_paused_and_one_whose_cache_is_not_empty_count(loop):
    async def answer(method, engine):
        return engine == b"1"

    client = client_of(answer, loop)
    assert client.is_paused(Deadline(WAIT))
    assert not client.reset_prefix_cache(Deadline(WAIT))


def test_its_loop_has_to_be_known_and_to_run(loop):
    async def answer(method, engine):
        return []

    with pytest.raises(ws.EngineError, match="say loop="):
        make(AsyncLLM(answer)).client.is_paused(Deadline(WAIT))
    idle = asyncio.new_event_loop()
    with pytest.raises(ws.EngineError, match="does not run"):
        client_of(answer, idle).is_paused(Deadline(WAIT))
    idle.close()


def test_a_receiver_made_in_the_loop_needs_no_hint(loop):
    async def answer(method, engine):
        return False

    async def made():
        return make(AsyncLLM(answer)).client

    client = asyncio.run_coroutine_threadsafe(made(), loop).result(WAIT)
    assert not client.is_paused(Deadline(WAIT))


def test_an_engine_that_dies_meanwhile_is_not_waited_for(loop):
    async def answer(method, engine):
        target.errored = True
        await asyncio.sleep(10**6)

    target = AsyncLLM(answer)
    began = time.monotonic()
    with pytest.raises(ws.EngineDiedError, match="process died"):
        make(target, loop=loop).client.is_paused(Deadline(600.0))
    assert time.monotonic() - began < 60


def test_nor_is_a_loop_that_ends(loop):
    async def answer(method, engine):
        loop.stop()
        await asyncio.sleep(10**6)

    with pytest.raises(ws.EngineError, match="ended during is_sleeping"):
        client_of(answer, loop).is_paused(Deadline(600.0))


def test_what_it_says_is_told(loop):
    async def dead(method, engine):
        raise EngineDeadError("see above")

    async def wrong(method, engine):
        raise ValueError("no such method")

    with pytest.raises(ws.EngineDiedError, match="see above"):
        client_of(dead, loop).is_paused(Deadline(WAIT))
    with pytest.raises(ws.EngineError, match="is_sleeping says ValueError: no such method"):
        client_of(wrong, loop).is_paused(Deadline(WAIT))


def test_a_call_that_is_late_is_given_up_and_cancelled(loop, monkeypatch):
    monkeypatch.setattr("weightsync.engines.vllm.async_llm.GRACE", 0.0)
    cancelled = threading.Semaphore(0)

    async def answer(method, engine):
        try:
            await asyncio.sleep(10**6)
        except asyncio.CancelledError:
            cancelled.release()
            raise

    with pytest.raises(ws.DeadlineError, match=r"is_sleeping did not return within 0.2 s"):
        client_of(answer, loop).is_paused(Deadline(0.2))
    assert cancelled.acquire(timeout=WAIT)


def test_only_an_async_llm_has_a_loop():
    class LLM:
        pass

    LLM.__module__ = "vllm"
    scheme = ws.DoubleBufferScheme("/dev/shm/weightsync-test-unused")
    with pytest.raises(ws.EngineError, match=r"LLM.*loop"):
        scheme.create_receiver(LLM(), loop=None)
