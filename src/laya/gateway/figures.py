"""Routing's part of /ready and /metrics: backends, sessions, stored responses, decisions, retries.

In: the gateway's own state. Out: plain dicts and (name, labels, value) samples. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from laya.gateway.backends import Backend

BREAKER = ("closed", "half-open", "open")

Sample = tuple[str, dict[str, str], float]


def backend_status(backend: Backend, now: float) -> dict[str, Any]:
    status: dict[str, Any] = {
        "healthy": backend.healthy, "breaker": BREAKER[backend.breaker.state], "inflight": backend.pool.inflight,
    }  # fmt: skip
    if backend.breaker.cool_until > now:
        status["asked_for_rest_s"] = round(backend.breaker.cool_until - now, 1)
    if backend.process is not None:
        status["process"] = backend.process.status()
    return status


def routing_components(gateway) -> dict[str, Any]:
    """`backends`, `sessions` and `responses` of /ready."""
    now = gateway.now()
    components: dict[str, Any] = {
        "backends": {name: backend_status(backend, now) for name, backend in gateway.backends.items()},
        "sessions": gateway.sessions.status(),
    }
    if gateway.store is not None:
        components["responses"] = {"entries_in_memory": len(gateway.store), "bytes_in_memory": gateway.store.bytes}
    return components


def routing_gauges(gateway) -> Iterator[Sample]:
    for name, backend in gateway.backends.items():
        up = backend.healthy is not False and backend.breaker.state != 2
        yield "laya_backend_up", {"backend": name}, int(up)
        yield "laya_backend_inflight", {"backend": name}, backend.pool.inflight
        yield "laya_breaker_state", {"backend": name}, backend.breaker.state
        if backend.process is not None:
            yield "laya_backend_loaded", {"backend": name}, int(backend.process.state in ("ready", "yielding"))
            yield "laya_backend_waiting", {"backend": name}, backend.pool.held
    yield "laya_sessions", {}, gateway.sessions.figures()[0]
    yield "laya_session_table_degraded", {}, int(gateway.sessions.status()["state"] == "degraded")
    if gateway.store is not None:
        yield "laya_responses_bytes", {}, gateway.store.bytes
    if gateway.staging.caching is not None:
        yield "laya_cache_bytes", {}, gateway.staging.caching.cache.bytes


def routing_counters(gateway) -> Iterator[Sample]:
    for name, backend in gateway.backends.items():
        if backend.process is not None:
            yield "laya_backend_starts", {"backend": name}, backend.process.starts
    yield "laya_session_evictions", {}, gateway.sessions.figures()[1]
    yield "laya_session_late", {}, gateway.sessions.late
    for kind, times in gateway.sessions.status().get("errors", {}).items():
        yield "laya_session_table_errors", {"kind": kind}, times
    yield "laya_retry_budget_exhausted", {}, gateway.budget.exhausted
    for (route, rule, target), times in gateway.steering.decisions.items():
        yield "laya_route_decisions", {"route": route, "rule": rule, "backend": target}, times
    for stage in gateway.staging.customs:
        yield "laya_stage_faults", {"stage": stage.name}, stage.faults
    for (key, kind), tokens in gateway.staging.metering.tokens.items():
        yield "laya_key_tokens", {"key": key, "kind": kind}, tokens
    for kind, times in gateway.staging.redacted.items():
        yield "laya_redacted", {"kind": kind}, times
    if gateway.staging.caching is not None:
        cache = gateway.staging.caching.cache
        yield "laya_cache_hits", {}, cache.hits
        yield "laya_cache_misses", {}, cache.misses
        yield "laya_cache_evictions", {}, cache.evictions
