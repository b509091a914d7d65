"""The arithmetic: medians over runs, ratios between systems, and the tables. Pure: no clock, no process.

Figures are kept as `{point: {system: [run, run, ...]}}`, a run being a flat map of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

Run = dict[str, float]
Runs = dict[str, dict[str, list[Run]]]
Medians = dict[str, dict[str, Run]]

# ratio -> (how it compares, target); the reasons are in docs/benchmarks.md.
TARGETS: dict[str, tuple[str, float]] = {
    "throughput_c8_vs_nginx": (">=", 1.0),
    "throughput_c64_vs_nginx": (">=", 1.0),
    "throughput_c8_vs_vllm_router": (">=", 2.0),
    "throughput_c64_vs_vllm_router": (">=", 2.0),
    "throughput_c8_vs_litellm": (">=", 100.0),
    "throughput_c64_vs_litellm": (">=", 100.0),
    "throughput_c64_16k_vs_nginx": (">=", 0.9),
    "throughput_c512_16k_vs_nginx": (">=", 0.9),
    "p99_c512_16k_vs_nginx": ("<=", 1.0),
    "p99_c64_vs_nginx": ("<=", 1.3),
    "added_p50_c1_vs_nginx": ("<=", 1.5),
    "added_p50_c1_vs_vllm_router": ("<=", 1.0),
    "added_p50_c1_vs_smg": ("<=", 1.0),
    "sse_frame_added_us": ("<=", 20.0),
    "ttft_added_ms": ("<=", 0.3),
    "start_s": ("<=", 0.4),
    "resident_mib": ("<=", 60.0),
}
BASE = "straight"
US = "laya"


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of a sorted sequence; 0.0 of an empty one."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


def medians(runs: Runs) -> Medians:
    """The median of each figure over the runs; errors are added up, not averaged away."""
    return {
        point: {system: _median_run(found) for system, found in systems.items() if found} for point, systems in runs.items()
    }


def _median_run(found: list[Run]) -> Run:
    return {key: (sum if key == "errors" else median)(run[key] for run in found) for key in found[0]}


def ratios(figures: Medians, systems: dict[str, dict], us: str = US) -> dict[str, float | None]:
    """Every ratio of TARGETS and a few beside, of the system `us`; None where a system was not measured or a difference is lost
    in the noise."""

    def value(point: str, system: str, key: str) -> float | None:
        return figures.get(point, {}).get(system, {}).get(key)

    def over(point: str, other: str, key: str, ours: str = us) -> float | None:
        return divide(value(point, ours, key), value(point, other, key))

    def added(point: str, system: str, key: str) -> float | None:
        ours, straight = value(point, system, key), value(point, BASE, key)
        return None if ours is None or straight is None else ours - straight

    result: dict[str, float | None] = {}
    for peer in ("nginx", "vllm-router", "smg", "litellm"):
        name = peer.replace("-", "_")
        for point in ("c8", "c64", "c64_16k", "c512_16k"):
            result[f"throughput_{point}_vs_{name}"] = over(point, peer, "rps")
        for point in ("c64", "c512_16k"):
            result[f"p99_{point}_vs_{name}"] = over(point, peer, "p99_us")
        result[f"added_p50_c1_vs_{name}"] = divide(added("c1", us, "p50_us"), positive(added("c1", peer, "p50_us")))
        result[f"p99_steady_vs_{name}"] = over("steady", peer, "p99_us")
    result["throughput_c64_logged_vs_nginx_logged"] = over("c64", "nginx+log", "rps")
    result["throughput_c64_unlogged_vs_nginx"] = over("c64", "nginx", "rps", ours="laya-log")
    result["p99_steady_vs_straight"] = over("steady", BASE, "p99_us")
    result["sse_frame_added_us"] = added("stream", us, "frame_p50_us")
    result["sse_frame_added_nginx_us"] = added("stream", "nginx", "frame_p50_us")
    result["sse_frame_dense_added_us"] = added("stream_dense", us, "per_frame_us")
    result["sse_frame_dense_added_nginx_us"] = added("stream_dense", "nginx", "per_frame_us")
    result["sse_frame_cpu_us"] = value("stream", us, "cpu_us")
    result["ttft_added_ms"] = scaled(added("stream", us, "ttft_p50_us"), 1e-3)
    result["ttft_added_nginx_ms"] = scaled(added("stream", "nginx", "ttft_p50_us"), 1e-3)
    result["start_s"] = systems.get(us, {}).get("start_s")
    result["resident_mib"] = systems.get(us, {}).get("resident_ready_mib")
    return result


def divide(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def positive(number: float | None) -> float | None:
    return number if number is not None and number > 0 else None


def scaled(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


def met(name: str, number: float | None) -> str:
    """`yes`, `no`, or "" where there is no target or no figure."""
    if number is None or name not in TARGETS:
        return ""
    sign, target = TARGETS[name]
    return "yes" if (number >= target if sign == ">=" else number <= target) else "no"


def table(rows: Iterable[Sequence[str]]) -> str:
    """Rows (the first one is the heading) as a Markdown table with even columns."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three digits that count: 40123 -> 40,123; 1.2345 -> 1.23; nothing -> a dash."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3f}"
