"""Every metric's name, help and buckets, and the plain accumulators behind them.

In: the loop thread adds to counters and histograms (an increment costs well under a microsecond, where a prometheus_client
`observe` costs one). Out: a `Snapshot` at a scrape, which `Exposition.render` turns into Prometheus
text on another thread.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable

STAGES = ("route", "queue", "prefill", "decode", "upstream", "serialise")
OUTCOMES = ("ok", "client_error", "refused", "upstream_error", "client_closed", "engine_error")

# A decade in three steps: coarse enough to stay small, fine enough to see a doubling.
FINE_BUCKETS = (
    5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0, 60.0, 300.0,
)  # fmt: skip

HELP = {
    "laya_requests": "Requests by route, backend, API and outcome.",
    "laya_retries": "Attempts made again, by reason.",
    "laya_stage_seconds": "Time of a request by stage.",
    "laya_time_to_first_token_seconds": "From the whole request to the first token sent.",
    "laya_inter_token_seconds": "Between two pieces of one stream.",
    "laya_connections": "Open client connections.",
    "laya_buffered_bytes": "Bodies of requests held in memory.",
    "laya_loop_stall_seconds": "Longest stall of the loop thread since the last scrape.",
    "laya_backend_up": "1 when the backend may be picked.",
    "laya_backend_inflight": "Requests at the backend now.",
    "laya_backend_loaded": "1 while the command of an on-demand backend runs and serves.",
    "laya_backend_waiting": "Requests that wait for an on-demand backend to be there.",
    "laya_backend_starts": "Times that the command of an on-demand backend was started.",
    "laya_breaker_state": "0 closed, 1 half-open, 2 open.",
    "laya_sequences_running": "Sequences that hold KV blocks.",
    "laya_sequences_waiting": "Requests waiting for the engine.",
    "laya_kv_blocks_used": "KV blocks held by sequences.",
    "laya_kv_blocks_total": "KV blocks in the pool.",
    "laya_tokens": "Tokens by kind: prompt, cached, generated.",
    "laya_preemptions": "Sequences that gave up their KV blocks for others.",
    "laya_host_memory_bytes": "Host memory by kind: rss and peak of this process, total and available of the machine, "
    "swap_used, and group_total and group_available of the tightest control group.",
    "laya_gpu_memory_bytes": "GPU memory by kind: used and total of the card, peak of what an engine has allocated.",
    "laya_gpu_temperature_celsius": "GPU temperature.",
    "laya_memory_protection": "0 calm, 1 past the soft mark (nothing is admitted), 2 past the hard mark (sequences are ended).",
    "laya_sequences_allowed": "How many sequences may run: concurrency opens step by step after the start.",
    "laya_plan_bytes": "The memory plan, by part.",
    "laya_log_lines_dropped": "Log lines lost because the writer fell behind.",
    "laya_sessions": "Sessions whose target is known in memory.",
    "laya_session_evictions": "Sessions that left memory to make room.",
    "laya_session_late": "Steps of the session table that did not end within router.timeout_ms.",
    "laya_session_table_degraded": "1 while the disk does not take the sessions.",
    "laya_session_table_errors": "What the disk refused, by kind.",
    "laya_responses_bytes": "Stored conversations in memory.",
    "laya_route_decisions": "Requests by what led to their target: a rule of `classify`, or an override.",
    "laya_retry_budget_exhausted": "Retries that the budget did not allow.",
    "laya_cache_hits": "Requests answered from the result cache, or with a twin's generation.",
    "laya_cache_misses": "Requests that the result cache could not answer.",
    "laya_cache_evictions": "Answers that left the result cache to make room.",
    "laya_cache_bytes": "Answers in the result cache.",
    "laya_key_tokens": "Tokens by key and kind: prompt, generated; of forwarded answers where they tell them.",
    "laya_stage_faults": "Requests that a stage of the user's own ended with a fault.",
    "laya_redacted": "Values that redaction found in requests, by kind.",
    "laya_config_reloads": "Configurations taken over while running.",
    "laya_config_reload_failed": "1 when the last reload was refused and the old configuration stays.",
}


class Histogram:
    """Counts per bucket (upper bounds in seconds, inclusive) and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = FINE_BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> Iterable[tuple[str, int]]:
        """(le, count) pairs as the exposition wants them, +Inf last."""
        running = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            running += count
            yield repr(bound), running
        yield "+Inf", running + self.counts[-1]


class Telemetry:
    """The accumulators of one process."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str, str], int] = {}  # route, backend, api, outcome
        self.retries: dict[str, int] = {}
        self.stages = {stage: Histogram() for stage in STAGES}
        self.route, self.upstream = self.stages["route"], self.stages["upstream"]  # of every proxied request
        self.ttft = Histogram()
        self.inter_token = Histogram()
        self.longest_stall = 0.0
        self.gauges: list[Callable[[], Iterable[tuple[str, dict[str, str], float]]]] = []
        self.counters: list[Callable[[], Iterable[tuple[str, dict[str, str], float]]]] = []

    def count(self, labels: tuple[str, str, str, str]) -> None:
        """One request more of this route, backend, API and outcome."""
        self.requests[labels] = self.requests.get(labels, 0) + 1

    def retry(self, reason: str) -> None:
        self.retries[reason] = self.retries.get(reason, 0) + 1

    def take_longest_stall(self) -> float:
        stall, self.longest_stall = self.longest_stall, 0.0
        return stall


class Snapshot:
    """All samples of one moment, as plain values: taking it is the loop's work, the text another thread's."""

    def __init__(self, telemetry: Telemetry) -> None:
        names = ("route", "backend", "api", "outcome")
        self.counters = [("laya_requests", dict(zip(names, key, strict=True)), n) for key, n in telemetry.requests.items()]
        self.counters += [("laya_retries", {"reason": reason}, n) for reason, n in telemetry.retries.items()]
        self.counters += [sample for source in telemetry.counters for sample in source()]
        self.gauges: list = [("laya_loop_stall_seconds", {}, telemetry.take_longest_stall())]
        self.gauges += [sample for source in telemetry.gauges for sample in source()]
        self.stages = [(stage, list(h.cumulative()), h.total) for stage, h in telemetry.stages.items()]
        self.waits = [
            ("laya_time_to_first_token_seconds", list(telemetry.ttft.cumulative()), telemetry.ttft.total),
            ("laya_inter_token_seconds", list(telemetry.inter_token.cumulative()), telemetry.inter_token.total),
        ]

    def collect(self):
        """prometheus_client's collector interface."""
        from prometheus_client.core import HistogramMetricFamily

        yield from _families("counter", self.counters)
        yield from _families("gauge", self.gauges)
        stages = HistogramMetricFamily("laya_stage_seconds", HELP["laya_stage_seconds"], labels=["stage"])
        for stage, buckets, total in self.stages:
            stages.add_metric([stage], buckets, total)
        yield stages
        for name, buckets, total in self.waits:
            yield HistogramMetricFamily(name, HELP[name], buckets=buckets, sum_value=total)


class Exposition:
    """Prometheus text 0.0.4 of a `Telemetry`."""

    content_type = b"text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, telemetry: Telemetry) -> None:
        import prometheus_client  # noqa: F401 - 15 ms, paid at start and not at the first scrape or by `laya check`

        self._telemetry = telemetry

    def snapshot(self) -> Snapshot:
        """Loop thread."""
        return Snapshot(self._telemetry)

    @staticmethod
    def render(snapshot: Snapshot) -> bytes:
        """The text: a few milliseconds of work for any thread but the loop's."""
        from prometheus_client import generate_latest

        return generate_latest(snapshot)


def _families(kind: str, samples):
    """Group (name, labels, value) samples of one kind into metric families."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    families: dict[str, object] = {}
    for name, labels, value in samples:
        family = families.get(name)
        if family is None:
            family = families[name] = make(name, HELP[name], labels=list(labels))
        family.add_metric([str(v) for v in labels.values()], value)
    return families.values()


def resident_bytes() -> int:
    """Resident memory of this process; 0 where /proc is not there."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
