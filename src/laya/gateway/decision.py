"""A System One request at an in-process engine: its questions go to the engine one after the other.

Each is one scoring request, or three where its options are many; the next is offered when the one before is answered, so that
it finds the state in the prefix cache, and so that many questions take one place in the queue. Loop thread only.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter
from typing import Any

from laya.errors import LayaError
from laya.gateway.api.inquiry import Inquiry
from laya.gateway.exchange import WAITING
from laya.gateway.local import LocalExchange, Part
from laya.schema.generation import Delta, Finished, GenerationRequest


class DecisionExchange(LocalExchange):
    def begin(self, generations: list[Inquiry], writer: Any) -> None:
        self._routed_s = perf_counter() - self.began
        self.gateway.telemetry.stages["route"].observe(self._routed_s)
        self.writer = writer
        self.move(WAITING)
        self._open = len(generations)
        self._left = deque(generations)
        self._ask(self._left[0].first())

    def _ask(self, generation: GenerationRequest) -> None:
        part = Part(self, 0)
        self._parts = [part]
        try:
            part.handle = self.engine.submit(*self._capped([generation]), part)
        except LayaError as error:
            self.on_failed(error)

    def on_delta(self, event: Delta) -> None:
        """The end of one run over some options: it has no text."""

    def on_finished(self, event: Finished) -> None:
        inquiry = self._left[0]
        following = inquiry.heard(event.option_logprobs or ())
        if following is not None:
            self._open += 1  # the question goes on
        else:
            self.writer.decided(self._left.popleft())
        super().on_finished(event)
        if self._open:
            self._ask(following or self._left[0].first())
