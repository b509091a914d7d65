"""What an error of torch says about its device."""

from __future__ import annotations

import pytest
import torch

from laya.engine.step import DeviceLost
from laya.model.device_faults import contained


def raising(error: Exception):
    @contained
    def step():
        raise error

    return step


def test_a_sticky_error_of_the_driver_is_a_lost_device():
    """(case 53)"""
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")
    with pytest.raises(DeviceLost, match="illegal memory access"):
        raising(error)()


def test_running_out_of_memory_is_a_fault_of_one_step():
    with pytest.raises(torch.OutOfMemoryError):
        raising(torch.OutOfMemoryError("CUDA out of memory"))()


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), ValueError("x"), MemoryError()])
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)):
        raising(error)()
