"""The double buffer with tensors on a GPU, on either end."""

import pytest
import torch

import weightsync as ws
from tests.conftest import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]


def weights(seed, device):
    generator = torch.Generator().manual_seed(seed)
    made = {
        str(dtype): torch.randn(513, 2049, generator=generator).to(dtype).to(device)
        for dtype in DTYPES
    }
    made["scalar"] = torch.tensor(float(seed), device=device)
    made["strided"] = torch.randn(300, 700, generator=generator).to(device).t()
    made["empty"] = torch.empty(0, 3, device=device)
    return made


@pytest.mark.parametrize(
    ("trainer", "engine"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]
)
def test_round_trip(ends, trainer, engine):
    target = {name: torch.zeros_like(t) for name, t in weights(0, engine).items()}
    places = {name: tensor.data_ptr() for name, tensor in target.items()}
    sender = ends.sender()
    receiver = ends.receiver(target)
    sender.attach(receiver)
    for number in range(1, 4):
        sent = weights(number, trainer)
        sender.update_weights(sent, version=number)
        for name, tensor in sent.items():
            assert_same(target[name].cpu(), tensor.cpu())
        assert receiver.verify_weights().ok
    assert places == {name: tensor.data_ptr() for name, tensor in target.items()}


def test_r7_a_parameter_that_is_still_being_computed(ends):
    """Published right after a long kernel on the same stream: its result is what is sent."""
    model = torch.nn.Linear(2048, 2048, bias=False, device="cuda")
    target = {"weight": torch.zeros(2048, 2048)}
    sender = ends.sender(model)
    receiver = ends.receiver(target)
    sender.attach(receiver)
    with torch.no_grad():
        for number in range(1, 6):
            busy = torch.randn(8192, 8192, device="cuda")
            for _ in range(10):
                busy = busy @ busy / 8192
            model.weight.copy_(busy[:2048, :2048] * 0 + number)
            sender.update_weights(version=number)
            assert target["weight"].eq(number).all()


def test_r7_a_parameter_that_is_still_being_computed_on_a_side_stream(ends):
    """R7: nobody told the current stream to wait for it."""
    weights = {"weight": torch.zeros(2048, 2048, device="cuda")}
    target = {"weight": torch.zeros(2048, 2048)}
    sender = ends.sender(weights)
    sender.attach(ends.receiver(target))
    side = torch.cuda.Stream()
    busy = torch.randn(8192, 8192, device="cuda")
    for number in range(1, 6):
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for _ in range(20):
                busy = busy @ busy / 8192
            weights["weight"].copy_(busy[:2048, :2048] * 0 + number)
        sender.update_weights(version=number)
        assert target["weight"].eq(number).all()


def test_a_cast_on_the_way_from_the_gpu(ends):
    model = torch.nn.Linear(256, 256, device="cuda")
    target = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    sender = ends.sender(model, dtype=torch.bfloat16)
    sender.attach(ends.receiver(target))
    sender.update_weights(version=1)
    assert_same(target.weight.cpu(), model.weight.detach().to(torch.bfloat16).cpu())


def test_the_version_before_is_readable_when_a_gpu_tensor_is_refused(ends):
    sender = ends.sender()
    sender.update_weights({"w": torch.ones(3, device="cuda")}, version=1)
    sparse = torch.eye(3, device="cuda").to_sparse()
    with pytest.raises(ws.SourceError, match="'w'"):
        sender.update_weights({"w": sparse}, version=2)
    assert ends.scheme().inspect().version.number == 1
