"""Engines are started by spawning: CUDA, once used, does not survive a fork."""

import os

from tests.live.conftest import peer  # noqa: F401

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
