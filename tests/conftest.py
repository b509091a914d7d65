"""What the end-to-end tests share: the real server as a process, and a scripted backend."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for folder in ("src", "tools", "tests"):
    sys.path.insert(0, str(ROOT / folder))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: children of the tests would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

from server import GEMMA, MODEL, Laya, running  # noqa: E402


@pytest.fixture(scope="session")
def model_path() -> Path:
    assert MODEL.is_file(), "the default model is missing: run `make model`"
    return MODEL


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    assert GEMMA.is_file(), "Gemma 3 270M is missing: run `make gemma`"
    return GEMMA


@pytest.fixture(scope="module")
def upstream():
    from scripted_upstream import ScriptedUpstream

    with ScriptedUpstream() as scripted:
        yield scripted


@pytest.fixture(scope="module")
def router(upstream, tmp_path_factory) -> Iterator[Laya]:
    """A router whose every model goes to the scripted upstream."""
    config = {
        "backends": {"up": {"url": upstream.url, "health": None, "first_byte_timeout_s": 5, "idle_timeout_s": 3}},
        "routes": [{"name": "all", "match": "*", "to": "up"}],
    }
    with running(config, tmp_path_factory.mktemp("router")) as laya:
        yield laya
