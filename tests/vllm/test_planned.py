"""Updates of a vLLM ``LLM`` on the CPU of which nothing needs vLLM's reload.

Its workers are told to leave linear layers as they are loaded, as those of a GPU do, so that one
request writes a version, and no session of vLLM's is begun. The engine is in this process.
"""

import time

import pytest
import torch

import weightsync as ws
from tests.vllm.conftest import expected, greedy, llama_config, make_llm, make_model, stop
from tests.vllm.plain import keep
from weightsync.vllm_worker import compat, sleep
from weightsync.vllm_worker.loading import Loader

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

MODELS = {number: make_model(llama_config(), seed=number) for number in (1, 2, 3)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    from vllm.model_executor.layers import utils

    folder = tmp_path_factory.mktemp("plain")
    llama_config().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep)
        llm = make_llm(folder)
        reload_once(llm, str(folder / "run"))
        yield llm
        stop(llm)


def reload_once(llm, path):
    """Random weights are random in the padding, too: a reload leaves zeros there, and so a plan
    that leaves it as it is does not do what the reload does, until that was done once."""
    scheme = ws.DoubleBufferScheme(path)
    with scheme.create_sender(MODELS[1]) as sender, scheme.create_receiver(llm) as receiver:
        sender.connect()
        receiver.connect()
        sender.update_weights(version=1)
        receiver.poll_and_apply(timeout=10)


@pytest.fixture(params=[False, True], ids=["", "staged"])
def ends(plain, path, request):
    scheme = ws.DoubleBufferScheme(path)
    receiver = scheme.create_receiver(plain, stage=request.param)
    with scheme.create_sender() as sender, receiver:
        sender.connect()
        receiver.connect()
        yield sender, receiver


@pytest.fixture
def sessions(monkeypatch):
    """The targets of vLLM's sessions from now on."""
    begun, begin = [], compat.begin_session

    def watched(worker, target):
        begun.append(target)
        begin(worker, target)

    monkeypatch.setattr(compat, "begin_session", watched)
    return begun


def update(ends, number, model):
    sender, receiver = ends
    sender.update_weights(MODELS[model], version=number)
    return receiver.poll_and_apply(timeout=10)


def test_versions_are_written_without_a_session_of_vllms(plain, ends, sessions):
    for number, model in enumerate((1, 2, 3, 1, 2), start=1):
        (note, *staged, written) = update(ends, number, model).notes
        assert "copies by plan" in note
        assert "reload" not in note
        assert "written in" in written
        assert greedy(plain) == expected(MODELS[model])
        assert ends[1].verify_weights().ok
    assert sessions == []
    assert [note.partition(":")[0] for note in staged] in ([], ["staged"])


def test_a_write_that_breaks_off_is_undone(plain, ends, monkeypatch, sessions):
    """By plan, too; the model held a mix of both."""
    update(ends, 1, 1)
    update(ends, 2, 2)
    replay, broke = Loader.replay, []

    def breaks_off(self, *arguments):
        replay(self, *arguments)
        if not broke:
            broke.append(True)
            raise OSError("gone half way")

    monkeypatch.setattr(Loader, "replay", breaks_off)
    with pytest.raises(ws.WeightSyncError, match="gone half way"):
        update(ends, 3, 3)
    assert ends[1].version.number == 2
    assert greedy(plain) == expected(MODELS[2])
    assert ends[1].verify_weights().ok
    update(ends, 4, 3)
    assert greedy(plain) == expected(MODELS[3])
    assert sessions == []


def test_what_is_published_meanwhile_is_not_read_over_what_is_being_written(
    plain, path, monkeypatch
):
    """The next version is read ahead into the same memory, and waits for its turn."""
    scheme = ws.DoubleBufferScheme(path, slots=3)
    receiver = scheme.create_receiver(plain, stage=True)
    with scheme.create_sender() as sender, receiver:
        sender.connect()
        receiver.connect()
        for number in (1, 2):
            update((sender, receiver), number, number)
        replay, held = Loader.replay, []

        def after_the_next_version(self, snapshot, staging, *arguments):
            if not held:
                sender.update_weights(MODELS[1], version=4)
                time.sleep(0.2)  # a look every few milliseconds
                held.append(staging.version)
            return replay(self, snapshot, staging, *arguments)

        monkeypatch.setattr(Loader, "replay", after_the_next_version)
        assert update((sender, receiver), 3, 3).version.number == 3
        assert held[0].number == 3
        assert greedy(plain) == expected(MODELS[3])
        assert receiver.verify_weights().ok
        assert receiver.poll_and_apply(timeout=10).version.number == 4
        assert greedy(plain) == expected(MODELS[1])


def test_a_tensor_that_moved_is_written_where_it_is_now(plain, ends, sessions):
    update(ends, 1, 1)
    model = plain.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    former = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    copies = [tensor.clone() for tensor in former]
    update(ends, 2, 2)
    assert greedy(plain) == expected(MODELS[2])
    assert all(map(torch.equal, former, copies))
    assert sessions == []


def in_a_session_of_vllms(llm, receiver, version):
    """As a user of vLLM's own methods updates, whom our driver is nothing to."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    url = receiver.scheme.for_workers(receiver.id).to_url()
    worker.start_weight_update()
    worker.update_weights({"scheme": url, "version": list(version), "timeout": 10})
    worker.finish_weight_update()
    return worker.weight_transfer_engine


def test_a_tensor_that_moved_is_found_in_a_session_of_vllms_too(plain, ends):
    sender, receiver = ends
    update(ends, 1, 1)
    model = plain.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    version = sender.update_weights(MODELS[2], version=2).version
    engine = in_a_session_of_vllms(plain, receiver, version)
    assert engine._held == version
    assert greedy(plain) == expected(MODELS[2])


def test_a_session_of_vllms_ends_its_lease_after_a_reload_of_ours(plain, ends):
    sender, receiver = ends
    update(ends, 1, 1)
    worker = plain.llm_engine.model_executor.driver_worker.worker
    sleep.watch(worker).lost.add("model")
    update(ends, 2, 2)
    version = sender.update_weights(MODELS[3], version=3).version
    engine = in_a_session_of_vllms(plain, receiver, version)
    assert engine._held == version
    assert engine._snapshot is None
    assert greedy(plain) == expected(MODELS[3])


def test_weights_lost_in_deep_sleep_are_reloaded_once(plain, ends, sessions):
    """What the model derives from weights is lost as well; a plan would not bring it back."""
    update(ends, 1, 1)
    worker = plain.llm_engine.model_executor.driver_worker.worker
    sleep.watch(worker).lost.add("model")
    update(ends, 2, 2)
    assert sessions == ["model"]
    assert greedy(plain) == expected(MODELS[2])
    update(ends, 3, 3)
    assert sessions == ["model"]
    assert greedy(plain) == expected(MODELS[3])


def test_weights_stay_lost_when_their_reload_fails_in_the_end(plain, ends, monkeypatch):
    """And the former version's, too: the next update reloads again, and recovers the engine."""
    update(ends, 1, 1)
    worker = plain.llm_engine.model_executor.driver_worker.worker

    def fails(*arguments):
        raise OSError("no room to finish")

    sleep.watch(worker).lost.add("model")
    with monkeypatch.context() as patch:
        patch.setattr(compat, "finish_reload", fails)
        with pytest.raises(ws.WeightSyncError, match="no room to finish"):
            update(ends, 2, 2)
    assert not ends[1].ready
    assert sleep.watch(worker).lost == {"model"}
    update(ends, 3, 3)
    assert ends[1].ready
    assert not sleep.watch(worker).lost
    assert greedy(plain) == expected(MODELS[3])
