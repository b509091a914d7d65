"""The closed loop: wrk with one thread, which asks again on each connection as soon as it has the answer."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "post.lua"
TIMEOUT_S = 10  # for one answer: LiteLLM with 64 connections needs two seconds


def available() -> bool:
    return shutil.which("wrk") is not None


def version() -> str:
    return subprocess.run(["wrk", "-v"], capture_output=True, text=True).stdout.split("[")[0].removeprefix("wrk ").strip()


def run(port: int, connections: int, seconds: int, bodies: Path) -> dict[str, float]:
    """Requests a second, p50 and p99 (us), and how many answers were refused (not 2xx) or broken."""
    command = [
        "wrk", "-t1", f"-c{connections}", f"-d{seconds}s", f"--timeout={TIMEOUT_S}s", "-s", str(SCRIPT),
        f"http://127.0.0.1:{port}/v1/chat/completions", "--", str(bodies),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    return parse(result.stdout)


def parse(output: str) -> dict[str, float]:
    """The line that post.lua writes at the end."""
    line = next((line for line in output.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise RuntimeError(f"wrk gave no result: {output[-500:]}")
    told = json.loads(line.removeprefix("RESULT "))
    return {
        "rps": told["requests"] / (told["duration_us"] / 1e6),
        "requests": told["requests"],
        "p50_us": told["p50_us"],
        "p99_us": told["p99_us"],
        "errors": told["refused"] + told["broken"],
    }
