"""How far the loading of a model has come: for the log, and for `/ready` through the engine's status. Engine thread.

In: layers read, from `model.load`. Out: `EngineBackend.progress`, and a line in the log now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from laya.engine.backend import EngineBackend
from laya.log import Log

# A line this often: loading takes from a second to minutes, and the log is for people.
_EVERY_S = 2.0


class LoadingProgress:
    """Called with (layers read, layers in all). `backend` is set before loading begins."""

    def __init__(self, name: str, post: Callable[[Callable[[], None]], Any], log: Log) -> None:
        self.backend: EngineBackend | None = None
        self._name = name
        self._post = post
        self._log = log
        self._told = time.monotonic()

    def __call__(self, done: int, layers: int) -> None:
        self.backend.progress = done, layers
        now = time.monotonic()
        if done == layers or now - self._told >= _EVERY_S:
            self._told = now
            progress = f"layer {done} of {layers}"
            event = partial(self._log.event, "info", "engine", engine=self._name, state="loading", progress=progress)
            self._post(event)
