"""The loop thread's side of one request: who listens, whether it was cancelled, how far it has come.

Loop thread only, but for `cancelled`, which the preparation worker reads to skip work in vain.
"""

from __future__ import annotations

import logging
from typing import Any

from laya.engine.admission import Admission, Offer
from laya.engine.prepare import Prepared
from laya.errors import LayaError
from laya.schema.generation import Delta, Finished, GenerationListener, GenerationRequest, Queued, Started

log = logging.getLogger("laya.engine")


class Submission:
    """The `Handle` of the gateway and the `owner` of the engine's events. Its listener hears exactly one last event."""

    __slots__ = ("request", "submitted_at", "_listener", "_admission", "_offer", "_reserved")

    def __init__(self, request: GenerationRequest, listener: GenerationListener, admission: Admission, now: float) -> None:
        """Reserves the places in the queue. Raises what `Admission.reserve` raises."""
        admission.reserve(request.sampling.n)
        self.request = request
        self.submitted_at = now
        self._listener: GenerationListener | None = listener
        self._admission = admission
        self._offer: Offer | None = None
        self._reserved = True

    @property
    def cancelled(self) -> bool:
        return self._listener is None

    def cancel(self) -> None:
        if self._listener is None:
            return
        self._listener = None
        self._release()
        if self._offer is not None:
            self._admission.abort(self._offer)

    def prepared(self, result: Prepared | LayaError) -> None:
        """The preparation worker's result: queue the work, or tell why not."""
        if self._listener is None:
            return
        if isinstance(result, LayaError):
            self.deliver(result)
            return
        offer = Offer(result, self, self.submitted_at)
        self._reserved = False  # `offer` turns the places into queued work, or gives them back
        try:
            self._admission.offer(offer)
        except LayaError as error:
            self.deliver(error)
            return
        self._offer = offer
        self.deliver(Queued(offer.tokens))

    def deliver(self, event: Any) -> None:
        """Call the listener; a listener that fails loses its request, and nobody else's."""
        listener = self._listener
        if listener is None:
            return
        try:
            if type(event) is Delta:
                listener.on_delta(event)
            elif type(event) is Started:
                listener.on_started(event)
            elif type(event) is Queued:
                listener.on_queued(event)
            elif type(event) is Finished:
                self._listener = None
                listener.on_finished(event)
            else:
                self._listener = None
                self._release()
                listener.on_failed(event)
        except Exception:
            log.exception("request %s: its listener failed", self.request.id)
            self.cancel()

    def _release(self) -> None:
        if self._reserved:
            self._reserved = False
            self._admission.release(self.request.sampling.n)
