"""Pages of memory that are there before anybody writes."""

import ctypes
import os
import resource

import pytest
import torch

from weightsync.pages import give_pages

MANY = 64 << 20


def faults_of_filling(memory):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.memset(memory.data_ptr(), 1, memory.nbytes)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def released(uname):
    return tuple(int(part) for part in uname.split(".")[:2])


needs_the_call = pytest.mark.skipif(
    released(os.uname().release) < (5, 14), reason="this kernel gives no pages ahead"
)


@needs_the_call
def test_nothing_is_left_to_the_first_write():
    memory = torch.empty(MANY, dtype=torch.uint8)
    give_pages(memory)
    assert faults_of_filling(memory) < 10


@needs_the_call
def test_it_can_be_stopped():
    memory = torch.empty(MANY, dtype=torch.uint8)
    give_pages(memory, stop=lambda: True)
    assert faults_of_filling(memory) > 10


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 3 << 20])
def test_what_is_written_stays(nbytes):
    memory = torch.full((nbytes,), 7, dtype=torch.uint8)
    give_pages(memory)
    assert torch.equal(memory, torch.full((nbytes,), 7, dtype=torch.uint8))
