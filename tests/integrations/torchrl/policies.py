"""What collectors' worker processes import: a policy whose output is the same in any batch."""

import torch
from tensordict.nn import TensorDictModule
from torch import nn


class Scaled(nn.Module):
    """Element by element, so that a batch and a single step give the same bits."""

    def __init__(self, size=7):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("shift", torch.zeros(size), persistent=False)

    def forward(self, observation):
        return observation * self.scale + self.shift


def scaled():
    return TensorDictModule(Scaled(), in_keys=["observation"], out_keys=["action"])


def shifted_by_number(number):
    """A factory of policies that differ between workers."""
    policy = scaled()
    policy.module.shift.fill_(number)
    return policy


def change(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        policy.module.scale.copy_(torch.randn(7, generator=generator))
        policy.module.shift.copy_(torch.randn(7, generator=generator))


def actions_are_of(data, policy):
    """Whether a batch's actions are, bit for bit, what the policy makes of its observations."""
    wanted = policy.module(data["observation"])
    return torch.equal(data["action"], wanted)
