"""What a user makes: URL, dict, options, and the advice where there is no GPU."""

import pickle

import pytest
import torch

import weightsync as ws

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
    with pytest.raises(ws.SchemeError, match="DoubleBufferScheme"):
        scheme.create_sender({"w": torch.ones(3)})
    with pytest.raises(ws.SchemeError, match="DoubleBufferScheme"):
        scheme.create_receiver({"w": torch.ones(3)})
