"""What a user makes: URL, dict, options, and the advice where there is no GPU."""

import os
import pickle
import shutil
import threading

import pytest
import torch

import weightsync as ws
from tests.conftest import WAIT
from tests.schemes.cuda_ipc.host import HostIPCScheme
from weightsync.deadline import Deadline
from weightsync.report import ReceiverReport

SCHEME = ws.CUDAIPCScheme("/dev/shm/run42", release=True)


def test_it_travels_as_a_url_as_a_dict_and_as_a_pickle():
    assert SCHEME.to_url() == "cuda-ipc:///dev/shm/run42?release=1"
    assert ws.scheme_from_url(SCHEME.to_url()) == SCHEME
    assert ws.scheme_from_dict(SCHEME.to_dict()) == SCHEME
    assert pickle.loads(pickle.dumps(SCHEME)) == SCHEME
    assert ws.CUDAIPCScheme("/dev/shm/run42").to_url() == "cuda-ipc:///dev/shm/run42"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("cuda-ipc://dev/shm/run", "three slashes"),
        ("cuda-ipc:///dev/shm/run?release=maybe", "release"),
        ("cuda-ipc:///dev/shm/run?slots=2", "no option 'slots'"),
        ("cuda-ipc:///", "directory of the run's own"),
    ],
)
def test_wrong_urls_are_refused(url, words):
    with pytest.raises(ws.SchemeError, match=words):
        ws.scheme_from_url(url)


@pytest.mark.parametrize("options", [{"path": "relative"}, {"path": "/run", "release": 1}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ws.SchemeError):
        ws.CUDAIPCScheme(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_both_ends_say_what_to_use_instead(run_dir):
    scheme = ws.CUDAIPCScheme(run_dir)
    for end in (scheme.create_sender, scheme.create_receiver):
        with pytest.raises(ws.SchemeError, match="DoubleBufferScheme"):
            end({"w": torch.ones(3)}).connect(timeout=WAIT)
    with pytest.raises(ws.SchemeError, match="DoubleBufferScheme"):
        scheme.create_reader(0, 1)
    assert not os.path.exists(run_dir)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_fallback_falls_back_and_says_why(run_dir):
    os.mkdir(run_dir, 0o700)
    scheme = ws.FallbackScheme(
        [ws.CUDAIPCScheme(f"{run_dir}/ipc"), ws.DoubleBufferScheme(f"{run_dir}/shm")]
    )
    target = {"w": torch.zeros(3)}
    with scheme.create_sender({"w": torch.ones(3)}) as sender:
        sender.connect()
        with scheme.create_receiver(target) as receiver:
            receiver.connect(timeout=WAIT)
            report = sender.update_weights(version=1)
            assert report.scheme == "fallback:shm"
            assert "cuda-ipc is left aside: SchemeError" in report.notes[0]
            assert receiver.poll_and_apply(timeout=WAIT).version == report.version
            assert target["w"].tolist() == [1, 1, 1]
    assert os.listdir(run_dir) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_who_only_drives_workers_needs_no_gpu(run_dir):
    """A server's are elsewhere: what they lack is for them to say."""
    server = ws.CUDAIPCScheme(run_dir).create_receiver(ws.VLLMServer("http://127.0.0.1:1"))
    server.shutdown()
    driver = ws.CUDAIPCScheme(run_dir).create_subscriber("driver")
    driver.delegate(1)
    with HostIPCScheme(run_dir).create_sender({"w": torch.ones(3)}) as sender:
        sender.connect()
        driver.open(Deadline(WAIT))
        driver.acknowledge(ReceiverReport("driver", "connected"))
        trainer = threading.Thread(target=sender.update_weights, kwargs={"version": 1})
        trainer.start()
        version = driver.wait(None, Deadline(WAIT))
        with driver.snapshot(version, Deadline(WAIT)) as snapshot:
            assert list(snapshot.manifest.by_name) == ["w"]
        driver.close()
        trainer.join()
    shutil.rmtree(run_dir + ".memory", ignore_errors=True)
