"""Engines are started by spawning: CUDA, once used, does not survive a fork."""

import os

os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
