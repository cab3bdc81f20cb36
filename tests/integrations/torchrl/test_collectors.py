"""TorchRL's own collectors, with worker processes, over our scheme."""

import os
import signal
import time
from functools import partial

import pytest
import torch

import weightsync as ws

pytest.importorskip("torchrl")

from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

from tests.docs import run
from tests.integrations.torchrl.conftest import WAIT
from tests.integrations.torchrl.policies import (
    actions_are_of,
    change,
    scaled,
    shifted_by_number,
)
from weightsync.integrations.torchrl import TorchRLScheme

START = 180.0
"""Seconds in which worker processes have imported torchrl, on a machine that is busy."""


def collector_of(kind, scheme, workers=2, **options):
    return kind(
        [ContinuousActionVecMockEnv] * workers,
        frames_per_batch=10 * workers,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        trust_policy=True,
        track_policy_version=True,
        **options,
    )


@pytest.mark.live
@pytest.mark.timeout(600)
def test_two_workers_follow_the_trainer_bit_for_bit_and_a_killed_one_is_named(run_dir):
    """One test, as a start of two workers takes most of its time."""
    policy = scaled()
    change(policy, seed=0)
    page = run(
        "docs/integrations/torchrl.md",
        "collector",
        run_dir,
        make_env=ContinuousActionVecMockEnv,
        policy=policy,
    )
    scheme, collector = page["scheme"], page["collector"]
    try:
        batches = iter(collector)
        for number in range(4):
            data = next(batches)
            assert actions_are_of(data, policy)
            assert data["policy_version"].max() == number
            change(policy, seed=number + 1)
            assert not actions_are_of(data, policy)
            collector.update_policy_weights_()
        assert scheme.report.version.number == 4

        os.kill(collector.procs[1].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ws.ReceiverError, match=r"worker-1.*pid \d+.*dead"):
            collector.update_policy_weights_()
        assert time.monotonic() - began < 2 * WAIT
        with pytest.raises(ws.ReceiverError, match="worker-1"):  # it stays so
            collector.update_policy_weights_()
    finally:
        collector.shutdown(raise_on_error=False)
        scheme.shutdown()
    assert not os.path.exists(run_dir)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_that_cannot_start_is_reported_in_its_own_words(run_dir):
    def broken():
        raise RuntimeError("no such environment")

    scheme = TorchRLScheme(ws.DoubleBufferScheme(run_dir), timeout=START)
    with pytest.raises(RuntimeError, match="no such environment"):
        MultiSyncCollector(
            [ContinuousActionVecMockEnv, broken],
            scaled(),
            frames_per_batch=20,
            total_frames=-1,
            weight_sync_schemes={"policy": scheme},
        )
    scheme.shutdown()


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_that_never_wait_apply_whole_versions(run_dir):
    """Each step's action is of one of the versions that were sent; scale and shift of the same."""
    policy = scaled()
    change(policy, seed=0)
    scheme = TorchRLScheme(ws.DoubleBufferScheme(run_dir), timeout=START)
    collector = collector_of(MultiAsyncCollector, scheme, policy=policy)
    versions = [policy.module.scale.detach().clone()]
    shifts = [policy.module.shift.clone()]
    try:
        for number, data in enumerate(collector):
            made = [
                (data["observation"] * scale + shift).eq(data["action"]).all(-1)
                for scale, shift in zip(versions, shifts, strict=True)
            ]
            assert torch.stack(made).any(0).all()
            change(policy, seed=number + 1)
            collector.update_policy_weights_()
            versions.append(policy.module.scale.detach().clone())
            shifts.append(policy.module.shift.clone())
            if number == 30:
                break
        assert data["policy_version"].max() > 10
    finally:
        collector.shutdown(raise_on_error=False)
        scheme.shutdown()


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_factories_give_each_worker_weights_of_its_own(run_dir):
    scheme = TorchRLScheme(ws.DoubleBufferScheme(run_dir, slots=3), timeout=START)
    factories = [partial(shifted_by_number, number) for number in (1.0, 2.0)]
    collector = collector_of(MultiSyncCollector, scheme, policy_factory=factories)
    try:
        batches = iter(collector)

        def shifts():
            data = next(batches)
            return (data["action"] - data["observation"]).round().flatten(1)[:, 0].tolist()

        assert shifts() == [1, 2]
        collector.update_policy_weights_(
            {0: shifted_by_number(3.0), 1: shifted_by_number(4.0)},
        )
        assert shifts() == [3, 4]
        collector.update_policy_weights_(shifted_by_number(5.0), worker_ids=[1])
        assert shifts() == [3, 5]
    finally:
        collector.shutdown(raise_on_error=False)
        scheme.shutdown()


def test_a_collector_of_this_process_receives(run_dir, made):
    trainer = scaled()
    ours = ws.DoubleBufferScheme(run_dir)
    sending, receiving = (TorchRLScheme(ours, timeout=WAIT) for _ in range(2))
    made.extend((sending, receiving))
    sending.init_on_sender(model_id="policy", model=trainer)
    sending.connect()
    collector = Collector(
        ContinuousActionVecMockEnv,
        scaled(),
        frames_per_batch=10,
        total_frames=-1,
        weight_recv_schemes={"policy": receiving},
        trust_policy=True,
        track_policy_version=True,
    )
    try:
        batches = iter(collector)
        for number in range(3):
            change(trainer, seed=number)
            sending.send()
            collector.receive_weights()
            data = next(batches)
            assert actions_are_of(data, trainer)
            assert data["next", "policy_version"].max() == number + 1
    finally:
        collector.shutdown()


def test_a_collector_of_this_process_sends(run_dir, made):
    """As to a server elsewhere: whoever receives the run gets what the collector is given."""
    policy, server = scaled(), scaled()
    ours = ws.DoubleBufferScheme(run_dir)
    sending, receiving = (TorchRLScheme(ours, timeout=WAIT) for _ in range(2))
    made.extend((sending, receiving))
    collector = Collector(
        ContinuousActionVecMockEnv,
        policy,
        frames_per_batch=10,
        total_frames=-1,
        weight_sync_schemes={"policy": sending},
        trust_policy=True,
    )
    try:
        receiving.init_on_receiver(model_id="policy", model=server, worker_idx=0)
        receiving.connect()
        change(policy, seed=1)
        collector.update_policy_weights_()
        assert torch.equal(server.module.scale, policy.module.scale)
        assert torch.equal(server.module.shift, policy.module.shift)
    finally:
        collector.shutdown()
