"""The bounded queue before the engine, and the only way in: offers and aborts cross from the loop thread here.

In (loop thread): `reserve`, `release`, `offer`, `abort`, `pause`, `shed`, `close`; none blocks longer than a short lock. Out
(engine thread): `take`, `withdraw`, `take_aborts`, `take_shed`, `expire`, `wait`. What waits is bounded in choices and in
prompt tokens; the order is `lanes.Lanes`'.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from laya.engine.lanes import Lanes
from laya.engine.pace import ServiceRate
from laya.engine.prepare import Prepared
from laya.engine.settings import EngineSettings
from laya.errors import LayaError, RateLimited


class Offer:
    """A prepared request on its way to the engine. `owner` hears of it; the engine only passes it back."""

    __slots__ = ("prepared", "owner", "client", "tokens", "choices", "reserved", "taken", "submitted_at", "group")

    def __init__(self, prepared: Prepared, owner: Any, submitted_at: float) -> None:
        self.prepared = prepared
        self.owner = owner
        self.client = prepared.request.client
        self.tokens = len(prepared.prompt_ids)
        self.reserved = prepared.request.sampling.n  # places kept while it was prepared
        self.choices = prepared.choices
        self.taken = 0  # choices handed to the engine; written under the admission's lock
        self.submitted_at = submitted_at
        self.group: Any = None  # the engine thread's own record once a choice was taken


class Admission:
    """`choices` and `tokens` are what waits (a token stands for a prompt token), preparation included."""

    def __init__(self, settings: EngineSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = ServiceRate()
        self._settings = settings
        self._clock = clock
        self._changed = threading.Condition()
        self._woken = False
        self._lanes = Lanes(settings.prefill_chunk_tokens)
        self._aborts: list[Offer] = []
        self._refusal: Callable[[], LayaError] | None = None
        self._pause: Callable[[], LayaError] | None = None
        self._shed: tuple[int, Callable[[], LayaError]] | None = None
        self._reserved = 0
        self._queued = 0
        self._tokens = 0
        self._next_expiry = float("inf")

    @property
    def waiting(self) -> int:
        """Choices that wait, those in preparation included."""
        return self._reserved + self._queued

    @property
    def queued(self) -> int:
        """Choices that the engine could take now."""
        return self._queued

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    # -- loop thread ---------------------------------------------------------------------------------------------------------

    def reserve(self, choices: int) -> None:
        """Keep places while the request is prepared. Raises RateLimited over the bound, or what `close` was given."""
        with self._changed:
            self._refuse_closed()
            if self._pause is not None:
                raise self._pause()
            if self.waiting and self.waiting + choices > self._settings.queue_limit:
                raise self._full(f"{self.waiting} requests wait and the limit is {self._settings.queue_limit}")
            self._reserved += choices

    def release(self, choices: int) -> None:
        """Give reserved places back: the request will not be offered."""
        with self._changed:
            self._reserved -= choices

    def offer(self, offer: Offer) -> None:
        """Queue a reserved request. Raises RateLimited when its tokens exceed the bound; its places are then given back."""
        with self._changed:
            self._reserved -= offer.reserved
            self._refuse_closed()
            if self._tokens and self._tokens + offer.tokens > self._settings.queue_tokens:
                raise self._full(f"{self._tokens} prompt tokens wait and the limit is {self._settings.queue_tokens}")
            self._lanes.add(offer)
            self._queued += offer.choices
            self._tokens += offer.tokens
            self._next_expiry = min(self._next_expiry, offer.submitted_at + self._settings.queue_timeout_s)
            self._wake()

    def abort(self, offer: Offer) -> None:
        """The client has gone: choices that wait are dropped at once, running ones before the next step."""
        with self._changed:
            self._drop(offer)
            if offer.taken:
                self._aborts.append(offer)
                self._wake()

    def pause(self, refusal: Callable[[], LayaError] | None) -> None:
        """Refuse new requests with `refusal()` and start nothing that waits; None goes on. What runs is not touched."""
        with self._changed:
            self._pause = refusal
            if refusal is None:
                self._wake()

    def shed(self, requests: int, error: Callable[[], LayaError]) -> None:
        """The engine shall end its newest `requests` running ones with `error()` before its next step."""
        with self._changed:
            self._shed = (requests, error)
            self._wake()

    def close(self, refusal: Callable[[], LayaError]) -> list[Offer]:
        """Refuse everything from now on with `refusal()`; returns the offers of which nothing was taken. Any thread."""
        with self._changed:
            self._refusal = refusal
            untaken = [offer for offer in self._lanes if not offer.taken]
            for offer in untaken:
                self._drop(offer)
            self._wake()
            return untaken

    def wake(self) -> None:
        with self._changed:
            self._wake()

    # -- engine thread -------------------------------------------------------------------------------------------------------

    def take(self, fits: Callable[[Offer], bool], longest: int | None = None) -> tuple[Offer, int] | None:
        """The next choice to start, as (offer, choice number), or None. `fits` is called under the lock: keep it short."""
        if not self._queued or self._pause is not None:
            return None
        with self._changed:
            offer = self._lanes.pick(fits, longest)
            if offer is None:
                return None
            index = offer.taken
            if index == 0:
                self._tokens -= offer.tokens
            offer.taken += 1
            self._queued -= 1
            if offer.taken == offer.choices:
                self._lanes.remove(offer)
            return offer, index

    def withdraw(self, offer: Offer) -> None:
        """Its request has failed: drop the choices that were not taken yet."""
        with self._changed:
            self._drop(offer)

    def take_aborts(self) -> list[Offer]:
        if not self._aborts:
            return []
        with self._changed:
            aborts, self._aborts = self._aborts, []
            return aborts

    def take_shed(self) -> tuple[int, Callable[[], LayaError]] | None:
        """What `shed` was last given, once."""
        if self._shed is None:
            return None
        with self._changed:
            shed, self._shed = self._shed, None
            return shed

    def expire(self) -> list[Offer]:
        """Drop and return the offers that waited longer than `queue_timeout_s`. Any thread."""
        now = self._clock()
        if now < self._next_expiry:
            return []
        with self._changed:
            limit = self._settings.queue_timeout_s
            untaken = [offer for offer in self._lanes if not offer.taken]
            late = [offer for offer in untaken if offer.submitted_at + limit <= now]
            for offer in late:
                self._drop(offer)
            expiries = [offer.submitted_at + limit for offer in untaken if offer.submitted_at + limit > now]
            self._next_expiry = min(expiries, default=float("inf"))
            return late

    def wait(self, longest_s: float) -> None:
        """Sleep until something is offered, aborted or closed, an offer expires, or `longest_s` has passed."""
        with self._changed:
            if not self._woken:
                self._changed.wait(max(0.0, min(longest_s, self._next_expiry - self._clock())))
            self._woken = False

    # -- under the lock ------------------------------------------------------------------------------------------------------

    def _drop(self, offer: Offer) -> None:
        left = offer.choices - offer.taken
        if left == 0:
            return
        self._lanes.remove(offer)
        self._queued -= left
        if offer.taken == 0:
            self._tokens -= offer.tokens
        offer.choices = offer.taken

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify()

    def _refuse_closed(self) -> None:
        if self._refusal is not None:
            raise self._refusal()

    def _full(self, why: str) -> RateLimited:
        return RateLimited(f"The engine's queue is full: {why}.", retry_after=self.rate.seconds_for(self.waiting))
