"""A request or a question to an engine that comes and goes: it may wait for the model, and is counted until it ends.

In: calls of the gateway (cancel) and of the engine (events). Out: the listener's or the asker's calls, and `left` once, at the
end. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laya.errors import LayaError
from laya.schema.generation import (
    Delta,
    Engine,
    Finished,
    GenerationListener,
    GenerationRequest,
    Handle,
    Queued,
    Started,
)


class Visit:
    """The engine's listener and the gateway's handle in one."""

    __slots__ = ("request", "since", "_listener", "_handle", "_left")

    def __init__(
        self, request: GenerationRequest, listener: GenerationListener, since: float, left: Callable[[Visit], None]
    ) -> None:
        self.request = request
        self.since = since
        self._listener: GenerationListener | None = listener
        self._handle: Handle | None = None
        self._left = left

    def hand_over(self, engine: Engine) -> None:
        """Raises what `engine.submit` raises."""
        self._handle = engine.submit(self.request, self)

    def fail(self, error: LayaError) -> None:
        self.on_failed(error)

    def cancel(self) -> None:
        if self._end() is not None and self._handle is not None:
            self._handle.cancel()

    def on_queued(self, event: Queued) -> None:
        self._pass(self._listener.on_queued, event)

    def on_started(self, event: Started) -> None:
        self._pass(self._listener.on_started, event)

    def on_delta(self, event: Delta) -> None:
        self._pass(self._listener.on_delta, event)

    def on_finished(self, event: Finished) -> None:
        listener = self._end()
        if listener is not None:
            listener.on_finished(event)

    def on_failed(self, error: LayaError) -> None:
        listener = self._end()
        if listener is not None:
            listener.on_failed(error)

    def _pass(self, call: Callable[[Any], None], event: Any) -> None:
        """A listener that fails ends its request: the engine cancels it, and hears no more of it here."""
        try:
            call(event)
        except Exception:
            self._end()
            raise

    def _end(self) -> GenerationListener | None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._left(self)
        return listener


class Question:
    """Tokenising or its reverse: `put(engine, tell)` asks, `done(answer)` hears."""

    __slots__ = ("since", "_put", "_done", "_left")

    def __init__(
        self, put: Callable[[Engine, Callable[[Any], None]], None], done: Callable[[Any], None], since: float,
        left: Callable[[Question], None],
    ) -> None:  # fmt: skip
        self.since = since
        self._put = put
        self._done = done
        self._left = left

    def hand_over(self, engine: Engine) -> None:
        self._put(engine, self._tell)

    def fail(self, error: LayaError) -> None:
        self._tell(error)

    def _tell(self, answer: Any) -> None:
        self._left(self)
        self._done(answer)
