"""A System One request at an in-process engine: its questions go to the engine one after the other.

Each is one scoring request; the next is offered when the one before is answered, so that it finds the state in the prefix
cache, and so that many questions take one place in the queue. Loop thread only.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter

from laya.errors import LayaError
from laya.gateway.api.systemone import DecisionWriter
from laya.gateway.exchange import WAITING
from laya.gateway.local import LocalExchange, Part
from laya.schema.generation import Delta, Finished, GenerationRequest


class DecisionExchange(LocalExchange):
    read_on_loop = 1024  # bytes: narrowing down 255 options takes ten milliseconds

    def begin(self, generations: list[GenerationRequest], writer: DecisionWriter) -> None:
        self._routed_s = perf_counter() - self.began
        self.gateway.telemetry.stages["route"].observe(self._routed_s)
        self.writer = writer
        self.move(WAITING)
        self._open = len(generations)
        self._left = deque(self._capped(generations))
        self._ask()

    def _ask(self) -> None:
        part = Part(self, 0)
        self._parts = [part]
        try:
            part.handle = self.engine.submit(self._left[0], part)
        except LayaError as error:
            self.on_failed(error)

    def on_delta(self, event: Delta) -> None:
        """The end of one run over some options: it has no text."""

    def on_finished(self, event: Finished) -> None:
        self.writer.decided(self._left.popleft().options, event)
        super().on_finished(event)
        if self._open:
            self._ask()
