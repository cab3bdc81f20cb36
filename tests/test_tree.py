"""Names of wrapped modules: those of the module inside, whatever the order of the wrapping."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel
from torch.optim.swa_utils import AveragedModel

import weightsync as ws
from tests.conftest import assert_all_same, send
from weightsync.tree import state_of


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.module = nn.Linear(2, 2)  # really called so: it keeps its name
        self._orig_mod = nn.Linear(2, 3)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Inner(), nn.BatchNorm1d(3)])
        self.head = nn.Linear(3, 3)


def plain():
    torch.manual_seed(0)
    return Model()


def child(wrap):
    def wrapped():
        model = plain()
        model.layers[0] = wrap(model.layers[0])
        return model

    return wrapped


def compiled(module):
    return torch.compile(module, backend="eager")


def in_place():
    model = plain()
    model.compile(backend="eager")
    return model


WRAPPED = {
    "compiled": lambda: compiled(plain()),
    "compiled child": child(compiled),
    "compiled in place": in_place,
    "data parallel": lambda: DataParallel(plain()),
    "compiled data parallel": lambda: compiled(DataParallel(plain())),
    "data parallel of a compiled one": lambda: DataParallel(compiled(plain())),
    "checkpointed child": child(checkpoint_wrapper),
    "compiled child, checkpointed": child(lambda m: checkpoint_wrapper(compiled(m))),
    "checkpointed child, compiled": child(lambda m: compiled(checkpoint_wrapper(m))),
    "averaged": lambda: AveragedModel(plain()),
    "averaged, compiled": lambda: compiled(AveragedModel(plain())),
    "everything": lambda: compiled(DataParallel(child(checkpoint_wrapper)())),
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_n3_n4_the_names_are_those_of_the_model_inside(ends, wrapped):
    model = plain()
    _, sent = send(ends, wrapped())
    assert_all_same(sent, model.state_dict())


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_engine_takes_the_names_of_the_model_inside(ends, wrapped):
    target = wrapped()
    sender, receiver = ends.pair(plain(), target)
    with torch.no_grad():
        for tensor in target.state_dict().values():
            tensor.zero_()
    sender.attach(receiver)
    sender.update_weights(version=1)
    assert receiver.verify_weights().checked == len(plain().state_dict())
    assert_all_same(dict(state_of(target)), plain().state_dict())


def test_two_tensors_under_one_name_are_an_error(ends):
    outer = DataParallel(plain())
    outer.add_module("head", nn.Linear(3, 3))  # beside the head of the model inside
    sender = ends.sender()
    with pytest.raises(ws.SourceError, match=r"'head\.weight'"):
        sender.update_weights(outer, version=1)


@pytest.fixture
def group_of_one(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel(ends, group_of_one):
    parallel = nn.parallel.DistributedDataParallel(plain())
    _, sent = send(ends, compiled(parallel))
    assert_all_same(sent, plain().state_dict())


def test_a_plain_container_that_is_sharded(ends, group_of_one):
    """Its class in FSDP2 has the name of the mixin that makes it one."""
    from torch.distributed.fsdp import fully_shard

    container = nn.Module()
    container.add_module("part", nn.Linear(4, 2))
    wanted = {name: tensor.detach().clone() for name, tensor in container.state_dict().items()}
    _, sent = send(ends, fully_shard(container))
    assert_all_same(sent, wanted)
