"""What the stages cost: redaction, the result cache, and the route that has none.

    python benchmarks/stages.py [--quick] [--json]

Redaction is timed in this process, beside pyahocorasick alone; the rest through real router processes, a few requests of each
kind in turn. Everything is on loopback and every process started is ended.
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
from stages_bench import redacting, serving  # noqa: E402

# name -> (how it compares, target); docs/stages.md tells them
TARGETS: dict[str, tuple[str, float]] = {
    "redact_prose_mb_s": (">=", 80.0),
    "redact_digits_mb_s": (">=", 20.0),
    # The same targets as ratios, for a machine on which pyahocorasick alone does other than 88 and 25 MB/s.
    "redact_prose_vs_pyahocorasick": (">=", 80 / 88),
    "redact_digits_vs_pyahocorasick": (">=", 20 / 25),
    "loop_stall_ms": ("<=", 2.0),
    "first_token_prose": ("<=", 1.05),
    "first_token_digits": ("<=", 1.05),
    "cache_hit_over_health_p50": ("<=", 1.5),
    "off_beside_stages_p50": ("<=", 1.02),  # within the noise of two runs of one server
    "off_checks_us": ("<=", 0.2),  # a thousandth of a request's time: what no measurement of requests could show
}


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    """The figures that have a target."""
    redact, serves, tokens = figures["redact"], figures["serving"], figures["first_token"]
    return {
        "redact_prose_mb_s": redact["prose"]["100KB"],
        "redact_digits_mb_s": redact["digits"]["100KB"],
        "redact_prose_vs_pyahocorasick": redact["prose"]["100KB"] / redact["prose"]["ahocorasick"],
        "redact_digits_vs_pyahocorasick": redact["digits"]["100KB"] / redact["digits"]["ahocorasick"],
        "loop_stall_ms": figures["stall"]["redact_ms"],
        "first_token_prose": tokens["prose_redact"]["p50_us"] / tokens["prose_plain"]["p50_us"],
        "first_token_digits": tokens["digits_redact"]["p50_us"] / tokens["digits_plain"]["p50_us"],
        "cache_hit_over_health_p50": serves["hit"]["p50_us"] / serves["health"]["p50_us"],
        "off_beside_stages_p50": serves["plain_beside_stages"]["p50_us"] / serves["plain_without_stages"]["p50_us"],
        "off_checks_us": figures["off_checks_ns"] / 1000,
    }


def met(name: str, value: float) -> str:
    sign, target = TARGETS[name]
    return "yes" if (value >= target if sign == ">=" else value <= target) else "no"


def measure(quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        figures: dict[str, Any] = {
            "machine": machine.describe(),
            "redact": redacting.speeds(40 if quick else 200),
            "serving": serving.cached(directory, 500 if quick else 6000),
            "first_token": serving.first_token(directory, 4 if quick else 30),
            "stall": serving.longest_stall(directory, 4 if quick else 40),
            "off_checks_ns": serving.off_checks_ns(),
        }
    figures["ratios"] = ratios(figures)
    return figures


def report(figures: dict[str, Any]) -> str:
    sizes = [("redaction, MB/s", "100 KB", "1 MB", "pyahocorasick alone", "values in 100 KB")]
    for name, found in figures["redact"].items():
        sizes.append((name, *(number(found[key]) for key in ("100KB", "1MB", "ahocorasick", "found"))))
    times = [("through the router", "p50 us", "p99 us")]
    for name, found in {**figures["serving"], **figures["first_token"]}.items():
        times.append((name, number(found["p50_us"]), number(found["p99_us"])))
    stall = figures["stall"]
    stalls = f"longest stall: {number(stall['redact_ms'])} ms with redaction, {number(stall['plain_ms'])} ms without"
    goals = [("figure", "value", "target", "met")]
    for name, value in figures["ratios"].items():
        goals.append((name, number(value), f"{TARGETS[name][0]} {TARGETS[name][1]:.3g}", met(name, value)))
    return "\n\n".join([json.dumps(figures["machine"]), table(sizes), table(times), stalls, table(goals)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests: half a minute instead of two")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    figures = measure(arguments.quick)
    print(json.dumps(figures, indent=2) if arguments.json else report(figures))


if __name__ == "__main__":
    main()
