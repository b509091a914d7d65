"""A wait that the first of an answer and a bound ends. Pure; loop thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Settled(Protocol):
    def settled(self, in_time: bool) -> None: ...


class Once:
    """The first of an answer and the bound decides; the other finds it settled."""

    __slots__ = ("store", "done", "timer", "over")

    def __init__(self, store: Settled, done: Callable[[str | None, bool], None]) -> None:
        self.store = store
        self.done = done
        self.timer: Any = None
        self.over = False

    def settle(self, target: str | None, in_time: bool) -> None:
        if self.over:
            return
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
        self.store.settled(in_time)
        self.done(target, in_time)
