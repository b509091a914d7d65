"""What an error of torch says about its device: lost for good, out of memory, or a fault of one step.

In: whatever a step raises. Out: the same error, or `DeviceLost` where no later call on the device can succeed. Engine thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from laya.engine.step import DeviceLost

# CUDA's own errors poison the process's context: every call after one fails too. Out of memory is not among them.
_STICKY: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)


def contained(step: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a runner whose device errors are told apart; after an out-of-memory error cached pages are given back."""

    @functools.wraps(step)
    def run(*args: Any) -> Any:
        try:
            return step(*args)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise
        except _STICKY as error:
            if is_sticky(error):
                raise DeviceLost(str(error).partition("\n")[0]) from error
            raise

    return run


def is_sticky(error: Exception) -> bool:
    """Whether the device is lost. Before torch had a class for it, its text was the only mark."""
    return type(error).__name__ == "AcceleratorError" or str(error).startswith("CUDA error:")
