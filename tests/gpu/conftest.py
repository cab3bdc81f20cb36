"""Engines are started by spawning: CUDA, once used, does not survive a fork."""

import os

from tests.live.conftest import peer  # noqa: F401

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

# NVLink multicast stays off: what it reserves belongs to all who share a host's GPUs.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
os.environ.setdefault("VLLM_ALLREDUCE_USE_SYMM_MEM", "0")
