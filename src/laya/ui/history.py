"""The last minutes in memory: how much work was done in each step of time, and the latencies of the last minute.

In: the telemetry's accumulators and the engines' figures, copied every `STEP_S` seconds (some 20 us). Out: series for drawing,
and counts of the last minute as `Window`. Loop thread only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import Any

import msgspec

from laya.telemetry import Histogram, Telemetry

STEP_S = 5.0  # fine enough to see a burst, coarse enough to cost nothing
STEPS = 120  # ten minutes: what one looks back at when something was odd just now
WINDOW_S = 60.0  # latencies and rates are those of the last minute


class Sample(msgspec.Struct, frozen=True):
    """Totals since the start, and what was under way, at `at` (seconds of the loop's clock)."""

    at: float
    requests: int
    prompt_tokens: int
    generated_tokens: int
    running: int
    waiting: int
    histograms: dict[str, tuple[int, ...]]


class History:
    """Give it to the clock; `engines` and `backends` may change in place."""

    def __init__(self, telemetry: Telemetry, engines: dict[str, Any], backends: dict[str, Any], now: float) -> None:
        self._histograms: dict[str, Histogram] = {
            **telemetry.stages, "first token": telemetry.ttft, "between tokens": telemetry.inter_token,
        }  # fmt: skip
        self._engines = engines
        self._backends = backends
        self._series: dict[str, Any] | None = None
        self._samples: deque[Sample] = deque([self._sample(now)], maxlen=STEPS + 1)

    def on_tick(self, now: float) -> None:
        if now - self._samples[-1].at >= STEP_S:
            self._samples.append(self._sample(now))
            self._series = None

    def series(self) -> dict[str, Any]:
        """`step_s`, and for each step, oldest first: requests and tokens a second, sequences running and waiting at its end."""
        if self._series is None:  # made once a step, and only when somebody looks
            self._series = self._drawn()
        return self._series

    def _drawn(self) -> dict[str, Any]:
        pairs = list(zip(self._samples, list(self._samples)[1:], strict=False))

        def rate(name: str) -> list[float]:
            return [round((getattr(b, name) - getattr(a, name)) / max(b.at - a.at, STEP_S / 2), 2) for a, b in pairs]

        return {
            "step_s": STEP_S, "requests": rate("requests"),
            "generated": rate("generated_tokens"), "prompt": rate("prompt_tokens"),
            "running": [b.running for _, b in pairs], "waiting": [b.waiting for _, b in pairs],
        }  # fmt: skip

    def last_minute(self, now: float) -> dict[str, Any]:
        """`window_s`, rates in it, and for each stage that had anything to time its count and quantiles in milliseconds."""
        newest = self._sample(now)
        oldest = next((s for s in self._samples if now - s.at <= WINDOW_S + STEP_S), newest)
        seconds = max(now - oldest.at, 1.0)
        latency = [
            {"stage": name, **quantiles(self._histograms[name].bounds, _less(counts, oldest.histograms[name]))}
            for name, counts in newest.histograms.items()
        ]
        return {
            "window_s": round(seconds, 1),
            "requests_s": round((newest.requests - oldest.requests) / seconds, 2),
            "prompt_s": round((newest.prompt_tokens - oldest.prompt_tokens) / seconds, 1),
            "generated_s": round((newest.generated_tokens - oldest.generated_tokens) / seconds, 1),
            "latency": [line for line in latency if line["count"]],
        }

    def _sample(self, now: float) -> Sample:
        figures = [engine.figures() for engine in self._engines.values()]
        return Sample(
            now,
            sum(self._histograms["route"].counts),
            sum(f.prompt_tokens for f in figures),
            sum(f.generated_tokens for f in figures),
            sum(f.sequences_running for f in figures) + sum(b.pool.inflight for b in self._backends.values()),
            sum(f.sequences_waiting for f in figures),
            {name: tuple(histogram.counts) for name, histogram in self._histograms.items()},
        )


def quantiles(bounds: tuple[float, ...], counts: list[int]) -> dict[str, float]:
    """`count`, and p50, p95 and p99 in milliseconds, from counts a bucket: within a bucket all lie evenly.

    `counts` has one more entry than `bounds` (seconds, upper): what lies beyond the last is shown as the last.
    """
    total = sum(counts)
    found: dict[str, float] = {"count": total}
    sums = list(accumulate(counts))
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)) if total else ():
        wanted = share * total
        at = min(bisect_left(sums, wanted), len(bounds) - 1)
        low = bounds[at - 1] if at else 0.0
        within = (wanted - (sums[at - 1] if at else 0)) / counts[at] if counts[at] else 1.0
        found[name] = round((low + (bounds[at] - low) * min(within, 1.0)) * 1000, 3)
    return found


def _less(new: tuple[int, ...], old: tuple[int, ...]) -> list[int]:
    return [a - b for a, b in zip(new, old, strict=True)]
