"""What the gateway knows of each place that answers: where its API is, how busy it is, whether it may be picked.

In: configuration and pools at start. Out: `Backend` for forwarding, `Candidate` for picking. Loop thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from laya.gateway.backend_apis import BackendApis
from laya.gateway.dispatch import RETRIABLE_STATUS, retry_after_of
from laya.gateway.exchange import header_value
from laya.routing.balance import Breaker

CLIENT_PREFIX = b"/v1"
ROOT_PATHS = frozenset({b"/tokenize", b"/detokenize", b"/apply-template"})  # beside the API's base, not under it


class Backend:
    """One entry of `backends`, with its pool. `base` replaces /v1 of the client's path."""

    __slots__ = (
        "name", "settings", "pool", "authority", "headers", "header_names", "base", "breaker", "healthy", "apis", "link",
        "card", "process",
    )  # fmt: skip

    def __init__(self, name: str, settings, pool, *, link: bool = False) -> None:
        self.name = name
        self.settings = settings
        self.pool = pool
        self.link = link  # an engine process of ours: it is told whose each request is, and counts prompts itself
        self.card: dict | None = None  # what a link says of its model, as /v1/models shows it
        self.process: Any = None  # of a command: its state and output
        self.authority = pool.address.authority
        self.base = pool.address.base.encode()
        self.headers = [(key.lower().encode(), value.encode()) for key, value in settings.headers.items()]
        if settings.key:
            self.headers.append((b"authorization", b"Bearer " + settings.key.encode()))
        self.header_names = frozenset(name for name, _ in self.headers)
        self.breaker = Breaker()
        self.apis = BackendApis(settings.apis)
        self.healthy: bool | None = None  # by its health path; None: never asked

    def target(self, path: bytes, query: bytes) -> bytes:
        """The request target sent upstream: the client's (tidied) path under our base, its query string kept."""
        if path.startswith(CLIENT_PREFIX + b"/"):
            path = self.base + path[len(CLIENT_PREFIX) :]
        elif path in ROOT_PATHS:
            path = self.base.removesuffix(CLIENT_PREFIX) + path
        else:
            path = self.base + path
        return path + b"?" + query if query else path

    def answered(self, response, probe: bool, now: Callable[[], float]) -> None:
        """What the head of an answer says about this backend. `probe`: it answers the request of a half-open breaker."""
        if response.status in RETRIABLE_STATUS:
            self.breaker.failed(now(), probe)
            seconds = retry_after_of(response.fields, time.time())
            if seconds:
                self.breaker.cool(now(), seconds)
        elif self.breaker.failures:
            self.breaker.succeeded()


class Candidate:
    """A backend as one target of one route: with the name sent there and its share. `note` follows the route's name in
    x-laya-route where another route's target stands in."""

    engine = None
    __slots__ = ("backend_state", "name", "model", "weight", "breaker", "note", "max_prompt_tokens", "lines", "counts")

    def __init__(
        self, route: str, backend: Backend, model: str | None, weight: float | None, note: str = "",
        max_prompt_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.backend_state = backend
        self.name = backend.name
        self.model = model
        self.weight = backend.settings.weight if weight is None else weight
        self.breaker = backend.breaker
        self.note = note
        self.max_prompt_tokens = max_prompt_tokens
        self.counts = backend.link  # it holds prompts to the cap itself, token by token
        self.lines = b"x-laya-route: %b\r\nx-laya-backend: %b\r\n" % (header_value(route + note), header_value(backend.name))

    @property
    def load(self) -> int:
        return self.backend_state.pool.inflight

    def usable(self, now: float) -> bool:
        backend = self.backend_state
        return backend.healthy is not False and backend.breaker.allows(now)


class EngineCandidate:
    """An engine of this process as one target of a route."""

    model = None  # an engine answers to any name that a route gives it
    counts = True
    __slots__ = ("name", "engine", "weight", "note", "max_prompt_tokens")

    def __init__(self, name: str, engine, weight: float, note: str = "", max_prompt_tokens: int | None = None) -> None:
        self.name = name
        self.engine = engine
        self.weight = weight
        self.note = note
        self.max_prompt_tokens = max_prompt_tokens

    @property
    def load(self) -> int:
        figures = self.engine.figures()
        return figures.sequences_running + figures.sequences_waiting

    def usable(self, now: float) -> bool:
        return self.engine.state not in NOT_NOW


# States in which an engine refuses what is offered to it.
NOT_NOW = frozenset({"loading", "draining", "stopped", "failed"})
