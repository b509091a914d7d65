"""What routing costs: the decision, ten thousand rules, the session table in each mode, evictions, a kill -9.

    python benchmarks/routing.py [--quick] [--json]

The decision is timed in this process; the modes through real router processes over stub backends, a block of requests to each
in turn. `memory` is what the others are compared with. Everything is on loopback and every process started is ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # this tree's Laya, installed or not

from gateway_bench import machine  # noqa: E402
from gateway_bench.figures import number, table  # noqa: E402
from routing_bench import decision, sessions  # noqa: E402

# name -> (how it compares, target), from docs/routing.md
TARGETS: dict[str, tuple[str, float]] = {
    "decision_us_p50": ("<=", 10.0),
    "rules_10k_over_10": ("<=", 1.2),
    "hybrid_over_memory_p50": ("<=", 1.1),
    "persistent_added_p50_ms": ("<=", 1.0),
    "eviction_p99_ratio": ("<=", 1.5),
    "persistent_lost_at_kill": ("<=", 0.0),
}


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that have a target."""
    modes = figures["modes"]
    worst = max(modes[situation]["hybrid"]["p50_us"] / modes[situation]["memory"]["p50_us"] for situation in ("hit", "new"))
    added = max(modes[situation]["persistent"]["added_p50_us"] for situation in modes)
    killed = figures["kept_after_kill"]["persistent"]
    return {
        "decision_us_p50": figures["decision"]["decision_us_p50"],
        "rules_10k_over_10": figures["decision"]["rules_10k_over_10"],
        "hybrid_over_memory_p50": worst,
        "persistent_added_p50_ms": added / 1000,
        "eviction_p99_ratio": figures["storm"]["eviction_p99_ratio"],
        "persistent_lost_at_kill": float(killed["acknowledged"] - killed["kept"]),
    }


def met(name: str, value: float) -> str:
    return "yes" if value <= TARGETS[name][1] else "no"


def measure(quick: bool) -> dict[str, Any]:
    count, rounds = (1000, 3) if quick else (6000, 9)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        figures: dict[str, Any] = {
            "machine": {**machine.describe(), "sqlite": sessions.sqlite_version(), "laya": sessions.laya_version()},
            "decision": {**decision.decisions(rounds), **decision.steered(rounds), **decision.eviction(rounds)},
            "modes": sessions.modes(directory, count),
            "storm": sessions.storm(directory, count),
            "kept_after_kill": sessions.kept_after_kill(directory, count),
        }
    figures["ratios"] = ratios(figures)
    return figures


def report(figures: dict[str, Any]) -> str:
    rows = [("decision, in process", "")] + [(name, number(value)) for name, value in figures["decision"].items()]
    situations = [("sessions", "mode", "p50 us", "p99 us", "added p50 us", "added p99 us")]
    for situation, found in figures["modes"].items():
        for mode, each in found.items():
            keys = ("p50_us", "p99_us", "added_p50_us", "added_p99_us")
            situations.append((situation, mode, *(number(each[key]) for key in keys)))
    storm = figures["storm"]
    kept = [("kill -9", "acknowledged", "kept")]
    kept += [(mode, str(each["acknowledged"]), str(each["kept"])) for mode, each in figures["kept_after_kill"].items()]
    goals = [("figure", "value", "target", "met")]
    goals += [
        (name, number(value), f"{TARGETS[name][0]} {TARGETS[name][1]:g}", met(name, value))
        for name, value in figures["ratios"].items()
    ]
    evicted = f"evicting: p99 {number(storm['full_p99_us'])} us, with room for all {number(storm['room_p99_us'])} us"
    return "\n\n".join([json.dumps(figures["machine"]), table(rows), table(situations), evicted, table(kept), table(goals)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests: a minute instead of several")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    figures = measure(arguments.quick)
    print(json.dumps(figures, indent=2) if arguments.json else report(figures))


if __name__ == "__main__":
    main()
