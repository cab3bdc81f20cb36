"""The half of an adapter that runs in vLLM's workers, on a stand-in for one."""

import json
from types import SimpleNamespace

import pytest

from weightsync.files import Directory, Lock
from weightsync.vllm_worker.adapters import LOCK_NAME, answer

pytestmark = pytest.mark.vllm


class Worker:
    """Holds requests as vLLM holds adapters: also one of which it could load a part only."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(lora_config=None)
        self.held = {}
        self.fails = False

    def add_lora(self, request):
        self.held[request.lora_int_id] = request
        if self.fails:
            raise RuntimeError("it does not fit")
        return True

    def remove_lora(self, number):
        return self.held.pop(number, None) is not None

    def list_loras(self):
        return set(self.held)


@pytest.fixture
def folder(tmp_path):
    Lock(Directory.open(str(tmp_path)), LOCK_NAME, create=True)
    return str(tmp_path)


def ask(worker, step, **more):
    request = {"op": "adapter", "step": step, **more}
    return json.loads(answer(json.dumps(request), worker, number=3))


def load(worker, folder):
    return ask(worker, "load", name="policy", number=7, path=folder, stacked=True, held=[folder])


def is_in_use(folder):
    lock = Lock(Directory.open(folder), LOCK_NAME)
    try:
        return not lock.try_exclusive()
    finally:
        lock.release()


@pytest.mark.parametrize("request_", ["", "[]", "{}", '"adapter"', '{"op": "load"}'])
def test_requests_about_something_else_are_left_to_others(request_):
    assert answer(request_, Worker(), 0) is None


def test_files_are_in_use_until_the_adapter_is_dropped(folder):
    worker = Worker()
    assert not is_in_use(folder)
    for _ in range(2):  # again, in its own place
        assert load(worker, folder) == {"rank": 3, "error": None, "loaded": [7]}
        assert is_in_use(folder)
    request = worker.held[7]
    assert (request.lora_name, request.lora_path) == ("policy", folder)
    assert request.load_inplace
    assert request.is_3d_lora_weight
    assert ask(worker, "drop", number=7) == {"rank": 3, "error": None, "loaded": []}
    assert not is_in_use(folder)


def test_an_adapter_that_does_not_fit_is_said_and_not_kept(folder):
    worker = Worker()
    worker.fails = True
    assert load(worker, folder) == {"rank": 3, "error": "it does not fit", "loaded": []}
    assert not worker.held
    assert not is_in_use(folder)


def test_files_that_the_worker_does_not_see(tmp_path):
    said = ask(Worker(), "look", path=str(tmp_path / "elsewhere"), stacked=False)["error"]
    assert "No such file" in said
    assert "directory=" in said


def test_steps_that_nobody_knows_are_said():
    assert "no such request: 'jump'" in ask(Worker(), "jump")["error"]
