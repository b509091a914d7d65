"""/health, /ready and /metrics, and which pages there are. Pure; loop thread.

In: functions that report each component's state. Out: status, content type and body.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laya.schema.codec import encode_json
from laya.telemetry import Exposition

JSON = b"application/json"


class Pages:
    """`components` gives for each component its state; the roles are ready when `ready()` says so."""

    def __init__(
        self, exposition: Exposition, *, ready: Callable[[], bool], healthy: Callable[[], bool], components: Callable[[], dict],
        metrics_open: bool, desk: Any = None,
    ) -> None:  # fmt: skip
        self.exposition = exposition
        self._ready = ready
        self._healthy = healthy
        self._components = components
        self.desk = desk  # answers /ui and what lies under it
        here = {b"/metrics", b"/ui", b"/ui/events", b"/ui/route"} if metrics_open else set()
        self.open = frozenset({b"/health", b"/ready", b"/"} | here)

    def has(self, path: bytes) -> bool:
        if path in (b"/health", b"/ready", b"/metrics", b"/", b"/v1/models"):
            return True
        if path.startswith(b"/v1/models/"):
            return len(path) > len(b"/v1/models/")
        return self.for_people(path)

    def for_people(self, path: bytes) -> bool:
        """Opened in a browser, which can ask for the key."""
        return self.desk is not None and self.desk.has(path)

    def render(self, path: bytes) -> tuple[int, bytes, bytes]:
        if path == b"/health":
            healthy = self._healthy()
            return (200 if healthy else 503), JSON, encode_json({"status": "ok" if healthy else "failed"})
        if path == b"/ready":
            ready = self._ready()
            body = {"status": "ready" if ready else "not ready", "components": self._components()}
            return (200 if ready else 503), JSON, encode_json(body)
        named = {"name": "laya", "apis": "/v1", "health": "/health", "metrics": "/metrics", "page": "/ui"}
        return 200, JSON, encode_json(named)
