"""What the gateway knows of each place that answers: where its API is, how busy it is, whether it may be picked.

In: configuration and pools at start. Out: `Backend` for forwarding, `Candidate` for picking. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from laya.gateway.dispatch import RETRIABLE_STATUS
from laya.gateway.exchange import header_value
from laya.routing.balance import Breaker

BROKEN_STATUS = RETRIABLE_STATUS - {429}  # a busy backend is not a broken one
CLIENT_PREFIX = b"/v1"


class Backend:
    """One entry of `backends`, with its pool. `base` replaces /v1 of the client's path."""

    __slots__ = ("name", "settings", "pool", "authority", "headers", "header_names", "base", "breaker", "healthy")

    def __init__(self, name: str, settings, pool) -> None:
        self.name = name
        self.settings = settings
        self.pool = pool
        self.authority = pool.address.authority
        self.base = pool.address.base.encode()
        self.headers = [(key.lower().encode(), value.encode()) for key, value in settings.headers.items()]
        if settings.key:
            self.headers.append((b"authorization", b"Bearer " + settings.key.encode()))
        self.header_names = frozenset(name for name, _ in self.headers)
        self.breaker = Breaker()
        self.healthy: bool | None = None  # by its health path; None: never asked

    def target(self, request) -> bytes:
        """The request target sent upstream: the client's path under our base, its query string kept."""
        path = request.path
        if path.startswith(CLIENT_PREFIX + b"/"):
            path = path[len(CLIENT_PREFIX) :]
        path = self.base + path
        return path + b"?" + request.query if request.query else path

    def answered(self, status: int, now: Callable[[], float]) -> None:
        if status in BROKEN_STATUS:
            self.breaker.failed(now())
        elif self.breaker.failures:
            self.breaker.succeeded()


class Candidate:
    """A backend as one target of one route: with the name sent there and its share."""

    engine = None
    __slots__ = ("backend_state", "model", "weight", "breaker", "lines")

    def __init__(self, route: str, backend: Backend, model: str | None, weight: float | None) -> None:
        self.backend_state = backend
        self.model = model
        self.weight = backend.settings.weight if weight is None else weight
        self.breaker = backend.breaker
        self.lines = b"x-laya-route: %b\r\nx-laya-backend: %b\r\n" % (header_value(route), header_value(backend.name))

    @property
    def load(self) -> int:
        return self.backend_state.pool.inflight


class EngineCandidate:
    """An engine of this process as one target of a route."""

    __slots__ = ("name", "engine", "weight", "breaker")

    def __init__(self, name: str, engine, weight: float) -> None:
        self.name = name
        self.engine = engine
        self.weight = weight
        self.breaker = Breaker()  # stays closed: a dead engine says so itself

    @property
    def load(self) -> int:
        figures = self.engine.figures()
        return figures.sequences_running + figures.sequences_waiting
