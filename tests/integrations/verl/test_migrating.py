"""docs/migrating/verl.md: verl takes both configurations, and makes the engines that they name."""

import pytest
import yaml

from tests.docs import blocks

pytest.importorskip("verl")

from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig


def configured(name):
    """What verl makes of a block of the page."""
    document = yaml.safe_load(blocks("docs/migrating/verl.md", "yaml")[name])
    return CheckpointEngineConfig(**document["actor_rollout_ref"]["rollout"]["checkpoint_engine"])


def test_before_a_migration():
    config = configured("before")
    assert (config.backend, config.engine_kwargs) == ("nccl", {"nccl": {"rebuild_group": True}})


def test_after_a_migration(run_dir):
    config = configured("after")
    import_external_libs(config.custom_backend_module)
    options = config.engine_kwargs[config.backend]
    assert options["url"] == "shm:///dev/shm/run42"
    options = {**options, "url": f"shm://{run_dir}"}
    size = config.update_weights_bucket_megabytes << 20
    made = CheckpointEngineRegistry.new(config.backend, bucket_size=size, is_master=True, **options)
    try:
        assert type(made).__module__ == "weightsync.integrations.verl"
        assert made.prepare()["next"]
    finally:
        made.shutdown()
