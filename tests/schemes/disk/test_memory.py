"""What many updates leave in memory: nothing."""

import os

import torch

from tests.conftest import WAIT
from tests.live.processes import open_files, resident_bytes, return_memory_at_once

MIB = 1 << 20


def test_g3_files_and_memory_do_not_grow(run):
    """100 updates of 8 MiB in 3 files; the receiver holds the last version throughout."""
    return_memory_at_once()
    weights = {f"w{n}": torch.zeros(MIB) for n in range(2)}
    engine = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    sender = run.sender(weights, keep=1, shard_bytes=3 * MIB, durable=False)
    receiver = run.receiver(engine)
    files, memory = set(), []
    for number in range(100):
        weights["w0"][0] = number
        sender.update_weights(version=number)
        receiver.poll_and_apply(WAIT)
        assert engine["w0"][0] == number
        if number >= 20:
            files.add(open_files(os.getpid()))
            memory.append(resident_bytes(os.getpid()))
    assert len(files) == 1
    assert max(memory[-10:]) - min(memory[:10]) < 4 * MIB
    assert len(run.steps()) <= 2
