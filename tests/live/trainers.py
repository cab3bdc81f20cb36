"""Sharded trainers: what their ranks run. The model is the same for every kind of sharding."""

import os
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

import weightsync as ws
from weightsync import together
from weightsync.transport import Publisher


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("scale", torch.rand(width))
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu()) * self.scale


class Model(nn.Module):
    """Odd sizes, so that no rank's share is even; a buffer, and a tie if wanted."""

    def __init__(self, width=10, tied=False, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(23, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 23, bias=False)
        self.temperature = nn.Parameter(torch.rand(1))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.temperature


def plain(seed=0, **options):
    """What every rank's model is, before it is sharded."""
    torch.manual_seed(seed)
    return Model(**options)


def join(state, rank, size, store, seconds=60.0, on_gpu=False):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if on_gpu:  # all on the first one, which NCCL takes for GPUs of several hosts
        os.environ["NCCL_HOSTID"] = f"rank {rank}"
        torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    state.rank, state.size = rank, size


def build(state, kind, device="cpu", **options):
    state.model = KINDS[kind](plain(**options).to(device))


def connect(state, path, timeout=30.0, model=True, scheme=None, **options):
    state.scheme = scheme or ws.DoubleBufferScheme(path)
    state.sender = state.scheme.create_sender(state.model if model else None, **options)
    state.sender.connect(timeout=timeout)
    return state.sender._epoch


def update(state, version=None, timeout=30.0, **options):
    return state.sender.update_weights(version=version, timeout=timeout, **options).to_dict()


def listen(state):
    state.heard = []
    state.sender.subscribe(lambda outcome: state.heard.append(outcome.version.number))


def heard(state):
    return state.heard


def train(state, seed):
    """One step of an optimiser over the sharded model, the same on every rank."""
    torch.manual_seed(seed)
    optimiser = torch.optim.SGD(state.model.parameters(), lr=0.1)
    optimiser.zero_grad()
    state.model(torch.randint(0, 23, (4, 5))).square().mean().backward()
    optimiser.step()
    optimiser.zero_grad()


def shards(state):
    """The bytes of all that this rank holds, to see that publishing changed nothing."""
    found = {}
    for module in state.model.modules():
        if hasattr(module, "reshard"):  # what FSDP2 gathered for itself is not what is meant
            module.reshard()
    for name, tensor in [*state.model.named_parameters(), *state.model.named_buffers()]:
        local = getattr(tensor, "_local_tensor", tensor).detach()
        found[name] = local.reshape(-1).view(torch.uint8).clone()
    return found


def whole(state):
    """What torch's own full state_dict says the whole model is."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(state.model, options=StateDictOptions(full_state_dict=True))


def end_senders(state):
    if getattr(state, "sender", None) is not None:
        state.sender.shutdown()
        state.sender = None


# -------------------------------------------------------------------- kinds of sharding


def _mesh(*shape, names=None):
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, shape, mesh_dim_names=names)


def fsdp2(model, layers="layers", **options):
    from torch.distributed.fsdp import fully_shard

    for layer in model.get_submodule(layers):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def fsdp2_offloaded(model):
    from torch.distributed.fsdp import CPUOffloadPolicy

    return fsdp2(model.cpu(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp2_ignoring(model):
    return fsdp2(model, ignored_params=set(model.head.parameters()))


def fsdp2_columns(model):
    from torch.distributed.tensor import Shard

    return fsdp2(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def fsdp2_checkpointed(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.layers[0] = checkpoint_wrapper(model.layers[0])
    return fsdp2(model)


def fsdp2_compiled(model):
    return torch.compile(fsdp2(model), backend="eager")


def fsdp2_not_resharded(model):
    model = fsdp2(model, reshard_after_forward=False)
    model(torch.zeros(1, 2, dtype=torch.int64))  # leaves whole parameters behind
    return model


def hybrid(model):
    return fsdp2(model, mesh=_mesh(2, dist.get_world_size() // 2, names=("replica", "shard")))


def tensor_parallel(model, mesh=None):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh or _mesh(dist.get_world_size())
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)
    return model


def two_dimensional(model):
    mesh = _mesh(2, dist.get_world_size() // 2, names=("data", "tensor"))
    tensor_parallel(model, mesh["tensor"])
    return fsdp2(model, mesh=mesh["data"])


def fsdp1(model, **options):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    device = next(model.parameters()).device
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, **options
    )


def fsdp1_original(model):
    return fsdp1(model, use_orig_params=True)


def fsdp1_whole(model):
    from torch.distributed.fsdp import ShardingStrategy

    return fsdp1(model, sharding_strategy=ShardingStrategy.NO_SHARD)


def data_parallel(model):
    return nn.parallel.DistributedDataParallel(model)


KINDS = {
    "fsdp2": fsdp2,
    "fsdp2, offloaded": fsdp2_offloaded,
    "fsdp2, head ignored": fsdp2_ignoring,
    "fsdp2, columns": fsdp2_columns,
    "fsdp2, checkpointed": fsdp2_checkpointed,
    "fsdp2, compiled": fsdp2_compiled,
    "fsdp2, not resharded": fsdp2_not_resharded,
    "fsdp2, hybrid": hybrid,
    "tensor parallel": tensor_parallel,
    "fsdp2 and tensor parallel": two_dimensional,
    "fsdp1": fsdp1,
    "fsdp1, original parameters": fsdp1_original,
    "fsdp1, not sharded": fsdp1_whole,
    "plain": lambda model: model,
    "ddp": data_parallel,
}


# -------------------------------------------------------------------- transports that misbehave


class Slow(Publisher):
    """Takes its time over every tensor, like a network to a slow receiver. Keeps what it got."""

    def __init__(self, seconds, fail_after=None):
        self.seconds = seconds
        self.fail_after = fail_after
        self.got = {}

    def open(self, deadline):
        return 1

    def prepare(self, manifest, deadline):
        pass

    def publish(self, version, weights, deadline, receivers=None, crew=None):
        from weightsync.transport import Published

        inventory = weights.inventory()
        for count, (name, tensor) in enumerate(inventory.tensors()):
            if count == self.fail_after:
                raise OSError("the network is gone")
            time.sleep(self.seconds)
            self.got[name] = tensor.detach().clone()
        manifest = inventory.manifest
        return Published(manifest.payload, len(manifest.tensors), None, 0.0, 0.0)

    def receivers(self):
        return []

    def wait_applied(self, version, deadline, receivers=None):
        return []

    def close(self):
        pass


def connect_slow(state, path, seconds, fail_after=None, bucket=together.BUCKET, **options):
    together.BUCKET = bucket
    state.sender = ws.DoubleBufferScheme(path).create_sender(state.model, **options)
    state.sender._publisher = Slow(seconds, fail_after)
    state.sender.connect(timeout=20)


def got(state):
    return state.sender._publisher.got


def failing_source(state, rank, words="out of memory"):
    """Have one rank's look at its model fail."""

    def inventory():
        raise ws.SourceError(words)

    if state.rank == rank:
        state.sender._source.inventory = inventory


def no_room(state):
    """Have the file system be all but full."""
    from weightsync.files import Directory

    Directory.free_bytes = lambda self: 10


def failing_rows(state, rank):
    """Have one rank fail while it writes its rows."""

    def contribute(ticket, inventory, deadline):
        raise OSError("no such rows")

    if state.rank == rank:
        state.sender._publisher.contribute = contribute


def elsewhere(state, rank):
    """Have one rank run on another host, to all that it says."""
    if state.rank == rank:
        together.socket = SimpleNamespace(gethostname=lambda: "elsewhere")


def here(state):
    together.socket = socket


def halves(state):
    """A mapping of DTensors instead of the module: what a sharded state_dict is."""
    state.model = {name: tensor * 1 for name, tensor in state.model.state_dict().items()}


def written(state):
    """How many bytes this rank would write itself, of a direct update."""
    inventory = state.sender._source.inventory()
    return sum(piece.tensor.nbytes for _, piece in inventory.pieces())


def peak_of_update(state, bucket):
    """How many bytes of memory of its own this rank takes for an update at most."""
    together.BUCKET = bucket
    over, seen = threading.Event(), [anonymous()]

    def watch():
        while not over.wait(0.0005):
            seen.append(anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    state.sender.update_weights()
    over.set()
    thread.join()
    return max(seen) - seen[0]


def anonymous():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def keep_updating(state, seconds):
    """Train and publish until the time is up, whatever fails. Returns how often it worked."""
    end = time.monotonic() + seconds
    good = 0
    while time.monotonic() < end:
        try:
            state.sender.update_weights(timeout=5)
            good += 1
        except ws.WeightSyncError:
            pass
    return good


def register(state):
    state.sender.register_model(state.model)


def connect_group(state, path):
    connect(state, path, model=False, group=dist.group.WORLD)


def publish_constants(state, seconds):
    """Fill all parameters with the version's number and publish, until the time is up."""
    end = time.monotonic() + seconds
    number = state.sender.version.number + 1 if state.sender.version else 1
    while time.monotonic() < end:
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.fill_(number)
        state.sender.update_weights(version=number, timeout=5)
        number += 1
    return number


def read_constants(state, path, seconds):
    """Read the newest version over and over; returns how many were read, and the torn ones."""
    from weightsync.deadline import Deadline

    end = time.monotonic() + seconds
    seen, torn = set(), []
    while time.monotonic() < end:
        subscriber = ws.DoubleBufferScheme(path).create_subscriber()
        try:
            subscriber.open(Deadline(1))
            version = subscriber.wait(None, Deadline(0.2))
            if version is None:
                continue
            with subscriber.snapshot(version, Deadline(1)) as snapshot:
                snapshot.verify()
                values = {
                    bound.item()
                    for name, tensor in snapshot
                    if not name.endswith("scale")
                    for bound in tensor.aminmax()
                }
            seen.add(version)
            if values != {float(version.number)}:
                torn.append((version, sorted(values)))
        except (ws.DeadlineError, ws.VersionGoneError, FileNotFoundError):
            pass
        finally:
            subscriber.close()
    return len(seen), torn


def torchrun(size, free_port):
    """The environment variables that torchrun gives each rank."""
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port),
        }
        for rank in range(size)
    ]


def run_page(state, page, name, run_dir, environment):
    """Execute a block of a page as a rank of a torchrun."""
    from tests.docs import run

    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    state.sender = run(page, name, run_dir, model=plain())["sender"]
