"""What doctor says of a host with GPUs."""

import pytest
import torch

from weightsync.doctor import Subject, gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_host_with_gpus_has_no_problem():
    found = {finding.check: finding for finding in gpus.gpus(Subject())}
    assert set(found) == {"GPUs", "page-locked memory", "GPU links", "NCCL"}
    assert found["GPUs"].state == "ok"
    assert f"{torch.cuda.device_count()} x" in found["GPUs"].words
    assert found["page-locked memory"].state == "ok"
    assert found["NCCL"].state in ("ok", "warning")
