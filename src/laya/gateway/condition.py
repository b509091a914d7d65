"""Whether this process can serve, and how each part of it does: behind /health, /ready, /metrics and /ui.

In: the parts themselves, some of which are made later. Out: yes or no, plain dicts, and (name, labels, value) samples. Loop
thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from laya.gateway.backends import Backend
from laya.gateway.figures import Sample, routing_components
from laya.telemetry import resident_bytes

# States of an engine in which requests are served, or wait while its model is loaded for them.
_TAKES_REQUESTS = frozenset({"ready", "asleep", "waking", "unloading"})


class Condition:
    """`watchdog` is None without an engine; `gateway` and `reloader` are set once they are there."""

    def __init__(self, server, backends: dict[str, Backend], engines: dict[str, Any], watchdog: Any) -> None:
        self._server = server
        self._backends = backends
        self._engines = engines
        self._watchdog = watchdog
        self.gateway: Any = None
        self.reloader: Any = None
        self._degraded = False  # the session table, as the log was told last

    def on_tick(self, now: float) -> None:
        """Tell the log when the disk or Redis behind the session table goes away, and when it is back."""
        status = self.gateway.sessions.status()
        if (status["state"] == "degraded") != self._degraded:
            self._degraded = not self._degraded
            self.gateway.log.event("warning" if self._degraded else "info", "session_table", **status)

    def ready(self) -> bool:
        """This role can serve: an engine is ready, or some backend may be picked."""
        if self._server.draining:
            return False
        states = [engine.status() for engine in self._engines.values()]
        engine_ready = any(state["state"] in _TAKES_REQUESTS and not state.get("stuck") for state in states)
        return engine_ready or any(b.healthy is not False and b.breaker.state != 2 for b in self._backends.values())

    def healthy(self) -> bool:
        """The process lives; a dead engine matters only where nothing else could answer."""
        engines = self._engines
        return bool(self._backends) or not engines or any(e.status()["state"] != "failed" for e in engines.values())

    def components(self) -> dict[str, Any]:
        """The JSON of /ready."""
        server = self._server
        return {
            **({"watchdog": self._watchdog.status()} if self._watchdog is not None else {}),
            "server": {
                "draining": server.draining, "connections": len(server.connections), "buffered_bytes": server.ledger.held,
            },
            "engines": {name: engine.status() for name, engine in self._engines.items()},
            **routing_components(self.gateway),
            "config": self.reloader.status(),
        }  # fmt: skip

    def gauges(self) -> Iterator[Sample]:
        server = self._server
        yield "laya_connections", {}, len(server.connections)
        yield "laya_buffered_bytes", {}, server.ledger.held
        yield "laya_log_lines_dropped", {}, self.gateway.log.dropped
        yield "laya_host_memory_bytes", {"kind": "rss"}, resident_bytes()
        yield "laya_config_reload_failed", {}, int(self.reloader.failed)
        for name, engine in self._engines.items():
            figures = engine.figures()
            yield "laya_sequences_running", {"engine": name}, figures.sequences_running
            yield "laya_sequences_waiting", {"engine": name}, figures.sequences_waiting
            yield "laya_kv_blocks_used", {"engine": name}, figures.kv_blocks_used
            yield "laya_kv_blocks_total", {"engine": name}, figures.kv_blocks_total

    def counters(self) -> Iterator[Sample]:
        yield "laya_config_reloads", {}, self.reloader.reloads
        for name, engine in self._engines.items():
            figures = engine.figures()
            for kind in ("prompt", "cached", "generated"):
                yield "laya_tokens", {"engine": name, "kind": kind}, getattr(figures, f"{kind}_tokens")
            yield "laya_preemptions", {"engine": name}, figures.preemptions
