"""Schemes of TorchRL's over a run of the test's own, ended after it."""

import pytest
import torch

import weightsync as ws

pytest.importorskip("torchrl")

from weightsync.integrations.torchrl import TorchRLScheme

WAIT = 10.0
"""Seconds for whatever should take none."""


@pytest.fixture
def made():
    """Schemes to be shut down after the test, receivers first."""
    schemes = []
    yield schemes
    for scheme in reversed(schemes):
        scheme.shutdown()


@pytest.fixture
def pair(run_dir, made):
    """Makes a connected scheme of the trainer's and one for each worker, in this process."""

    def make(model, *policies, worker_options=None, scheme=None, **options):
        slots = len(policies) + 1 if len(policies) > 1 else 2
        ours = scheme or ws.DoubleBufferScheme(run_dir, slots=slots)
        sending = TorchRLScheme(ours, timeout=WAIT, **options)
        made.append(sending)
        receiving = [TorchRLScheme(ours, timeout=WAIT, **options) for _ in policies]
        made.extend(receiving)
        sending.init_on_sender(model_id="policy", model=model, num_workers=len(policies))
        connect_all(sending, receiving, policies, **(worker_options or {}))
        return sending, receiving[0] if len(receiving) == 1 else receiving

    return make


def connect_all(sending, receiving, policies, context=None):
    """What trainer and workers do at the same time: each waits for the other."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as threads:
        waits = [threads.submit(sending.connect)]
        for number, (scheme, policy) in enumerate(zip(receiving, policies, strict=True)):
            scheme.context = context
            scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=number)
            waits.append(threads.submit(scheme.connect, worker_idx=number))
        for wait in waits:
            wait.result(WAIT)


def filled(module, value):
    """The module, all of its floating-point tensors set to a value."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.fill_(value)
    return module
