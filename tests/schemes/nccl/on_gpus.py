"""The way of buckets that stay on GPUs, with host memory and gloo in their place."""

import torch

from weightsync.device import device_of
from weightsync.schemes.nccl import publisher, reader


def pretend(state=None):
    """From now on this process takes the processor for a GPU."""
    for module in (publisher, reader):
        module.gpu_of = _processor


def _processor(place):
    return device_of(torch.device("cpu"))
