"""Reads a case whole, one byte at a time, and with either parser; all must agree before a test looks at the outcome."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import fuzz_wire  # noqa: E402


def _read(requests, turns, methods, limits, eof):
    longest = max(map(len, turns))
    case = fuzz_wire.Case(requests, turns, list(range(1, longest)), limits, methods, eof)
    difference = fuzz_wire.difference(case)
    assert difference is None, difference
    return fuzz_wire.read(case, fast=True, cut=True)


@pytest.fixture
def read_inbound():
    """data -> [request facts..., ending]; the ending is a Signal or ("refused", status)."""

    def read(data, limits=fuzz_wire.ROOMY, eof=False):
        return _read(True, [data], [b""], limits, eof)

    return read


@pytest.fixture
def read_outbound():
    """The same for the responses to requests of the given methods, one block of bytes each."""

    def read(*turns, methods=None, limits=fuzz_wire.ROOMY, eof=False):
        return _read(False, list(turns), methods or [b"POST"] * len(turns), limits, eof)

    return read
