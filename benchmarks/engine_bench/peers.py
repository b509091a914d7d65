"""llama.cpp and transformers: how each is found, started and asked.

`llama-bench` and `llama-server` are looked for in a folder (a build's `bin`, or the build) and in PATH; what is not there is
named as skipped. transformers runs in a process of its own (`generate.py`), because its threads are set once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gateway_bench.children import Child, free_port

HERE = Path(__file__).resolve().parent
START_S = 60.0  # a model of 100 MB loads in one or two
RUN_S = 300.0  # the longest that one measurement of a peer may take


def find(program: str, folder: Path | None) -> str | None:
    for place in ([folder, folder / "bin", folder / "build" / "bin"] if folder else []):
        if os.access(place / program, os.X_OK):
            return str(place / program)
    return shutil.which(program)


class LlamaServer(Child):
    """llama-server with `slots` slots, each with room for `window` tokens; listens on `port`."""

    def __init__(self, program: str, model: Path, threads: int, slots: int, window: int) -> None:
        self.port = free_port()
        command = [program, "-m", str(model), "-t", str(threads), "-np", str(slots), "-c", str(slots * window)]
        super().__init__([*command, "--host", "127.0.0.1", "--port", str(self.port)], cwd=Path(tempfile.gettempdir()))

    def ready(self) -> None:
        self.wait_until_answers(self.port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", START_S)


def llama_bench(program: str, model: Path, threads: int, prompt: int, tokens: int) -> dict[str, float]:
    """Tokens/s of one repetition: `prefill` of `prompt` tokens, `decode` of `tokens` tokens; 0 leaves one out."""
    command = [program, "-m", str(model), "-t", str(threads), "-p", str(prompt), "-n", str(tokens), "-r", "1", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=True)
    rows = json.loads(done.stdout)
    return {"prefill" if row["n_prompt"] else "decode": row["avg_ts"] for row in rows}


def version(program: str) -> str:
    """What the program says, or the build's folder name: a build outside a git checkout does not know its number."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("version")]
    return lines[0].partition(":")[2].strip() if lines else "unknown"


def transformers_rate(model: Path, threads: int, tokens: int) -> dict | None:
    """`tokens_per_s` and `version` of `generate` in float32; None where transformers cannot be imported."""
    command = [sys.executable, str(HERE / "generate.py"), str(model), str(threads), str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    if done.returncode == 3:
        return None
    if done.returncode:
        raise RuntimeError(f"transformers: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])
