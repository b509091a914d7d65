"""The second closed loop, to see whether wrk tells the truth: hey, another program in another language.

It costs far more processor time per request than wrk, so its figures are lower where client and gateway share cores; what must
agree is which system is faster and by about how much.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

RATE = re.compile(r"Requests/sec:\s+([\d.]+)")
LATENCY = re.compile(r"(\d+)%+ in ([\d.]+) secs")
STATUS = re.compile(r"\[(\d+)\]\s+(\d+) responses")


def available() -> bool:
    return shutil.which("hey") is not None


def run(port: int, connections: int, seconds: int, body: Path) -> dict[str, float]:
    """As `wrk.run`, with the one request in `body`: hey cannot vary it."""
    command = [
        "hey", "-z", f"{seconds}s", "-c", str(connections), "-m", "POST", "-T", "application/json", "-D", str(body),
        f"http://127.0.0.1:{port}/v1/chat/completions",
    ]  # fmt: skip
    return parse(subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60).stdout)


def parse(output: str) -> dict[str, float]:
    """hey's summary."""
    rate = RATE.search(output)
    if rate is None:
        raise RuntimeError(f"hey gave no result: {output[-500:]}")
    latencies = {int(percent): float(seconds) * 1e6 for percent, seconds in LATENCY.findall(output)}
    statuses = {int(status): int(count) for status, count in STATUS.findall(output)}
    return {
        "rps": float(rate[1]), "requests": sum(statuses.values()), "p50_us": latencies.get(50, 0.0),
        "p99_us": latencies.get(99, 0.0), "errors": sum(count for status, count in statuses.items() if status != 200),
    }  # fmt: skip
