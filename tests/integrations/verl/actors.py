"""verl's workers in small: actor ranks that shard a model, and rollout workers with replicas."""

import asyncio
import os

import ray
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import (
    CheckpointEngineManager,
    CheckpointEngineRegistry,
    CheckpointEngineWorker,
)
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

MODULE = "weightsync.integrations.verl"


def plain_model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 32)]
    return torch.nn.Sequential(*layers)


class Actor(Worker):
    """One rank of a sharded trainer: makes a checkpoint engine as verl's actor does."""

    def __init__(self, config):
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        ranks = torch.distributed.get_world_size()
        self.model = fully_shard(plain_model(), mesh=init_device_mesh("cpu", (ranks,)))
        self.extra = []
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=torch.distributed.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs[config.backend],
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, name, tensor):
        """One more weight, the first that is streamed; None for none any more."""
        self.extra = [] if tensor is None else [(name, tensor)]

    def weights(self):
        yield from self.extra
        for name, value in self.model.state_dict().items():
            yield name, value.full_tensor()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        sent = await self.checkpoint_engine.send_weights(self.weights(), global_steps=global_steps)
        return sent or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Adapter(BaseRollout):
    """Keeps what it is given; may refuse it, or stop in the middle."""

    def __init__(self):
        self.weights = {}
        self.steps = None
        self.way = "take"
        self.taking = False

    async def resume(self, tags): ...

    async def release(self): ...

    async def update_weights(self, weights, global_steps=None, **kwargs):
        async for name, tensor in weights:
            self.weights[name] = tensor.clone()
            self.taking = True
            if self.way == "refuse":
                raise RuntimeError("this layout is not mine")
            while self.way == "stop":
                await asyncio.sleep(0.01)
        self.taking = False
        self.steps = global_steps


class RolloutWorker(CheckpointEngineWorker):
    def __init__(self, rollout_config, model_config):
        super().__init__(rollout_config, model_config, Adapter())

    def held(self):
        return self.server_adapter.steps, self.server_adapter.weights

    def behave(self, way):
        """``take``, ``refuse`` or ``stop``; gives this process's number."""
        self.server_adapter.way, self.server_adapter.taking = way, False
        return os.getpid()

    def taking(self):
        return self.server_adapter.taking

    async def take_from_cache(self):
        """What a rollout does by itself, when its requests are done."""
        await self.server_adapter.update_weights(self.checkpoint_engine.get_weights())


class Replica(RolloutReplica):
    """One rollout worker, and no server."""

    def __init__(self, worker):
        self.workers, self.servers = [worker], []

    def get_ray_class_with_init_args(self): ...

    async def launch_servers(self): ...

    async def release_kv_cache(self): ...

    async def resume_kv_cache(self): ...


class Run:
    """A trainer of some ranks and its rollout workers, under verl's own manager."""

    def __init__(self, url, ranks=2, rollouts=3, **options):
        self.config = CheckpointEngineConfig(
            backend="weightsync",
            custom_backend_module=MODULE,
            engine_kwargs={"weightsync": {"url": url, **options}},
        )
        self.actor = self._group(ranks, Actor, config=self.config)
        self.workers = self.more(rollouts)
        self.replicas = [Replica(worker) for worker in self.workers]
        self.manager = CheckpointEngineManager(self.config, self.actor, list(self.replicas))
        self.expected = dict(plain_model().state_dict())

    def more(self, count):
        """Further rollout workers."""
        config = RolloutConfig(name="vllm", checkpoint_engine=self.config)
        made = self._group(count, RolloutWorker, rollout_config=config, model_config=None)
        return made.workers

    @staticmethod
    def _group(size, kind, **options):
        pool = RayResourcePool([size], use_gpu=False, max_colocate_count=1)
        return RayWorkerGroup(
            pool, RayClassWithInitArgs(ray.remote(kind), **options), use_gpu=False
        )

    def put_in_order(self):
        self.actor.add("", None)
        ray.get([worker.behave.remote("take") for worker in self.workers])

    def train(self):
        self.actor.train()
        self.expected = {name: tensor + 1 for name, tensor in self.expected.items()}

    def shutdown(self):
        """As a user may at the end of a script; whoever is dead is so."""
        ends = ["shutdown"] * self.actor.world_size
        ray.get(self.actor.execute_checkpoint_engine(ends))
        for worker in [*self.actor.workers, *self.workers]:
            ray.kill(worker)
