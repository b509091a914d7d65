"""The C library's heap, told when to give memory back: glibc keeps what was freed, and a plan counts what is resident.

In: calls from the engine thread around loading, and from the watchdog's when memory is short. Out: nothing. Where the C
library is not glibc every call does nothing. Thread-safe, as malloc is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
# Pairs of bytes: blocks from the first on are mapped one by one, and go back when they are freed; the heap's end goes back
# when more than the second is free there.
# While loading: pieces of weights, dequantised once, go back at once.
_LOADING = (1 << 20, 2 << 20)
# In service a step's usual temporaries are used again: with half of these figures a prefill step of a small model clears
# 70,000 pages, with these fewer than a thousand. Larger ones (logits of many rows) would leave holes of their size in a heap,
# and clearing them costs little beside computing them.
_SERVING = (2 << 20, 16 << 20)


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
            return library
    except (OSError, TypeError):
        pass
    return None


_library = _glibc()


@contextmanager
def loading() -> Iterator[None]:
    """Keep the peak of what runs inside near what it leaves behind."""
    _thresholds(*_LOADING)
    try:
        yield
    finally:
        _thresholds(*_SERVING)
        trim()


def trim() -> None:
    """Give back free pages of every heap; milliseconds for each gigabyte that is held."""
    if _library is not None:
        _library.malloc_trim(0)


def _thresholds(mapped: int, kept: int) -> None:
    if _library is not None:
        _library.mallopt(_M_MMAP_THRESHOLD, mapped)
        _library.mallopt(_M_TRIM_THRESHOLD, kept)


def loaded_tightly(load: Callable[[], tuple]) -> Callable[[], tuple]:
    """`load` run with `loading` around it."""

    def run() -> tuple:
        with loading():
            return load()

    return run
