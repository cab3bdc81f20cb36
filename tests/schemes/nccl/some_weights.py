"""Tensors of every size that buckets meet: less than one, more than one, none."""

import torch

MIB = 1 << 20


def mixed(seed=0):
    torch.manual_seed(seed)
    return {
        "tiny": torch.randn(3),
        "large": torch.randn(5 * MIB // 4 + 3),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "strided": torch.randn(600, 700).t(),
        "odd": torch.ones(5, dtype=torch.bool),
        "exact": torch.randn(MIB // 2),
        "last": torch.randn(11).bfloat16(),
    }
