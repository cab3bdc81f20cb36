"""ZeRO-3: whole values come from placeholders, one at a time, on all ranks together."""

import enum
import importlib.util
import os
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.conftest import assert_all_same, assert_same
from weightsync.errors import SourceError
from weightsync.source import SourceOptions, as_source, as_value


class Status(enum.Enum):
    """The names that DeepSpeed's ``ZeroParamStatus`` has."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Zero:
    """Stands for deepspeed on a single rank: it shards parameters, and gathers them again."""

    def __init__(self):
        self.zero = SimpleNamespace(GatheredParameters=self._gathered)
        self.gathered = []
        self.open = 0
        self._whole = {}

    def shard(self, module):
        for parameter in module.parameters():
            if not hasattr(parameter, "ds_id"):
                parameter.ds_id = len(self._whole)
                parameter.ds_shape = parameter.shape
            self.release(parameter)
        return module

    def release(self, parameter):
        self._whole[parameter.ds_id] = parameter.data.clone()
        parameter.data = torch.empty(0, dtype=parameter.dtype)
        parameter.ds_status = Status.NOT_AVAILABLE

    def gather(self, parameter):
        parameter.data = self._whole[parameter.ds_id].clone()
        parameter.ds_status = Status.AVAILABLE

    def _gathered(self, parameters, modifier_rank):
        return Gathering(self, *parameters)


class Gathering:
    def __init__(self, zero, parameter):
        self.zero, self.parameter = zero, parameter

    def __enter__(self):
        if self.parameter.ds_status is not Status.NOT_AVAILABLE:
            raise RuntimeError("contexts cannot overlap")
        self.zero.gathered.append(self.parameter.ds_id)
        self.zero.open += 1
        self.zero.gather(self.parameter)

    def __exit__(self, *exc):
        gathered = self.parameter.data
        self.zero.release(self.parameter)
        gathered.zero_()  # its memory is used for something else
        self.zero.open -= 1


@pytest.fixture
def zero(monkeypatch):
    module = Zero()
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    return module


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).to(torch.bfloat16))


def values(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def test_placeholders_are_sent_whole(zero):
    module = model()
    expected = values(module)
    source = as_source(zero.shard(module))
    for _ in range(2):
        assert_all_same({n: t.clone() for n, t in source.tensors()}, expected)


def test_dtype_and_shape_are_known_without_gathering(zero):
    """Metadata without data, and the same as before the model was sharded."""
    module = model()
    wanted = as_source(module).manifest()
    inventory = as_source(zero.shard(module)).inventory()
    assert inventory.manifest == wanted
    assert inventory.collective
    assert zero.gathered == []


def test_all_ranks_gather_in_the_order_of_the_model(zero):
    module = zero.shard(model())
    list(as_source(module).tensors())
    assert zero.gathered == [parameter.ds_id for parameter in module.parameters()]


def test_each_is_let_go_before_the_next_is_gathered(zero):
    """G6, and promise 3: nothing stays gathered, also when the stream is abandoned."""
    module = zero.shard(model())
    before = len(zero.gathered)
    stream = as_source(module).inventory().stream()
    for count in (1, 2):
        next(stream)
        assert len(zero.gathered) == before + count
        assert zero.open == 0
        assert all(p.ds_status is Status.NOT_AVAILABLE for p in module.parameters())
        assert all(p.numel() == 0 for p in module.parameters())
    stream.close()
    assert len(zero.gathered) == before + 2


def test_t1_ties_are_kept(zero):
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    manifest = as_source(zero.shard(module)).manifest()
    assert manifest.aliases == {"1.weight": "0.weight"}


def test_what_is_whole_anyway_is_plain(zero):
    """Gathered by the user's own context, or small enough to be kept."""
    module = zero.shard(model())
    zero.gather(module[0].weight)
    assert as_value("w", module[0].weight) is module[0].weight
    list(as_source(module).tensors())
    assert module[0].weight.ds_id not in zero.gathered
    assert module[0].weight.ds_status is Status.AVAILABLE


def test_what_was_gathered_since_is_not_sharded_again(zero):
    module = zero.shard(model())
    stream = as_source(module).inventory().stream()
    zero.gather(module[0].weight)
    name, tensor = next(stream)
    assert name == "0.weight"
    assert_same(tensor, module[0].weight.data)
    assert module[0].weight.ds_status is Status.AVAILABLE


def test_one_source_sees_what_is_sharded_and_what_is_not(zero):
    """A placeholder is never taken for an empty tensor, nor for what it was before."""
    module = model()
    source = as_source(module)
    for _ in range(3):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        expected = values(module)
        assert_all_same({n: t.clone() for n, t in source.tensors()}, expected)
        zero.shard(module)
        assert_all_same({n: t.clone() for n, t in source.tensors()}, expected)
        assert source.manifest().spec("0.weight").shape == (4, 3)
        for parameter in module.parameters():
            zero.gather(parameter)
        assert_all_same({n: t.clone() for n, t in source.tensors()}, expected)


def test_a_pass_that_was_not_completed_is_refused_by_name(zero):
    module = zero.shard(model())
    module[0].bias.ds_status = Status.INFLIGHT
    with pytest.raises(SourceError, match=r"'0\.bias' cannot be sent.*INFLIGHT"):
        list(as_source(module).tensors())
    assert zero.open == 0


def test_what_deepspeed_cannot_gather_is_refused_by_name(zero):
    module = zero.shard(model())
    zero.gather = lambda parameter: (_ for _ in ()).throw(RuntimeError("lost a rank"))
    with pytest.raises(SourceError, match=r"'0\.weight' cannot be sent.*lost a rank"):
        list(as_source(module).tensors())


def test_without_deepspeed_placeholders_are_refused_by_name(zero, monkeypatch):
    """Promise 9."""
    module = zero.shard(model())
    monkeypatch.delitem(sys.modules, "deepspeed")
    with pytest.raises(SourceError, match=r"'0\.weight'.*ZeRO-3.*deepspeed"):
        as_source(module).manifest()
    names = as_source(module, SourceOptions(strict=False)).manifest().names()
    assert names == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_a_stream_of_placeholders_is_refused_by_name(zero):
    """A stream is walked on one rank; what the user gathers in it is plain."""
    module = zero.shard(model())
    with pytest.raises(SourceError, match=r"'0\.weight'.*sharded over ranks"):
        list(as_source(list(module.named_parameters())).tensors())

    def gathered():
        for name, parameter in module.named_parameters():
            with zero.zero.GatheredParameters([parameter], modifier_rank=None):
                yield name, parameter

    sent = {name: tensor.detach().clone() for name, tensor in as_source(gathered).tensors()}
    assert sent["0.weight"].shape == (4, 3)


@pytest.mark.parametrize("quant_storage", [torch.uint8, torch.bfloat16], ids=str)
def test_packed_parameters_are_gathered_and_then_dequantised(zero, quant_storage):
    """QLoRA under ZeRO-3: the shards are of the packed bytes."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    four = bitsandbytes.nn.Linear4bit(64, 32, quant_storage=quant_storage)
    module = nn.Sequential(four, bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False))
    module.to("cpu")
    expected = {name: tensor.detach().clone() for name, tensor in as_source(module).tensors()}
    zero.shard(module)
    source = as_source(module)
    assert source.inventory().collective
    assert_all_same({n: t.detach().clone() for n, t in source.tensors()}, expected)
    for layer, name in ((module[0], "0.weight"), (module[1], "1.weight")):
        weight = as_value("w", layer.weight)
        assert weight.collective
        assert_same(weight.read(), expected[name])


# ---------------------------------------------------------------- the real one


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(3.0))

    def forward(self, tokens):
        return self.norm(self.hidden(self.embed(tokens)))


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.live
@pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")
def test_two_ranks_of_deepspeed_send_the_same_whole_values():
    torch.multiprocessing.spawn(rank_of_deepspeed, (free_port(),), nprocs=2)


CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 10,
        "stage3_model_persistence_threshold": 1 << 20,
    },
    "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}},
    "bf16": {"enabled": True},
}


def rank_of_deepspeed(rank, port):
    os.environ.update(
        DS_ACCELERATOR="cpu",
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
    )
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    plain, module = Tied().to(torch.bfloat16), Tied()
    module.load_state_dict(plain.state_dict())
    sent = check_rank(rank, deepspeed, module)
    assert_same(sent["hidden.weight"], plain.hidden.weight.data)
    assert_same(sent["embed.weight"], plain.embed.weight.data)
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):  # sharded while it is made
        module = Tied()
    check_rank(rank, deepspeed, module)
    torch.distributed.destroy_process_group()


def check_rank(rank, deepspeed, module):
    """What is sent before the first step."""
    engine, *_ = deepspeed.initialize(model=module, config=CONFIG)
    source = as_source(engine)  # DeepSpeed's wrapper around the model
    assert source.inventory().collective
    assert source.manifest().aliases == {"head.weight": "embed.weight"}
    assert source.manifest().spec("hidden.weight").shape == (7, 8)
    sent = {name: tensor.detach().clone() for name, tensor in source.tensors()}
    assert set(sent) == set(Tied().state_dict()) - {"head.weight"}

    for _ in range(2):
        out = engine(torch.arange(4 * rank, 4 * rank + 4)[None]).float()
        engine.backward(out.square().sum() + out[..., 0].sum())
        engine.step()
    statuses = {name: p.ds_status.name for name, p in module.named_parameters()}
    assert set(statuses.values()) == {"AVAILABLE", "NOT_AVAILABLE"}  # small ones are kept whole
    shards = {name: p.ds_tensor.clone() for name, p in module.named_parameters()}
    trained = {name: tensor.detach().clone() for name, tensor in source.tensors()}
    stream = source.inventory().stream()
    next(stream)
    stream.close()
    for name, parameter in module.named_parameters():
        assert parameter.ds_status.name == statuses[name]
        assert_same(parameter.ds_tensor, shards[name])
        assert not torch.equal(trained[name], sent[name])
        everywhere = [torch.empty_like(trained[name]) for _ in range(2)]
        torch.distributed.all_gather(everywhere, trained[name])
        assert_same(*everywhere)
        whole = [torch.empty_like(shards[name]) for _ in range(2)]
        torch.distributed.all_gather(whole, shards[name])
        assert_same(torch.cat(whole)[: parameter.ds_numel], trained[name].flatten())
    return sent
