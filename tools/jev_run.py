"""Typed decisions against the outside referee: `jevcompat` on a real server, with and without a key, and their times.

    pip install jevcompat typesafe-sdk        (in any environment; --jevcompat names the program)
    python tools/jev_run.py --model models/SmolLM2-135M-Instruct.Q4_1.gguf

Ends with 0 when both runs are conformant. Times are of this machine at this moment.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from serving import ROOT, Served

KEY = "sk-jev-0123456789"
RUN_LIMIT_S = 900  # a slow machine takes minutes for the largest questions
STATE = "I was charged twice for March. Please refund me today, or I will dispute the charge with my bank."


def questions(count: int) -> dict:
    """One choice of `count` options with a sentence each."""
    options = {"Billing": "Payments, invoices, refunds"} | {f"Queue {i:03d}": f"Tickets of queue {i}" for i in range(1, count)}
    return {"queue": {"type": "choice", "instructions": "Which queue should this ticket go to?", "criteria": options}}


def seconds(url: str, body: dict) -> float:
    request = urllib.request.Request(
        f"{url}/v1/systemone", json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {KEY}"},
    )  # fmt: skip
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=RUN_LIMIT_S) as response:
        response.read()
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--jevcompat", default="jevcompat", help="the program")
    parser.add_argument("--window", type=int, default=4096)
    options = parser.parse_args()
    if shutil.which(options.jevcompat) is None:
        parser.error(f"there is no program {options.jevcompat}: pip install jevcompat typesafe-sdk, or --jevcompat PROGRAM")
    path = str(Path(options.model).resolve())
    inference = {"model": path, "name": "jev", "max_seq_len": options.window, "kv_cache": "256MiB"}
    worst = 0
    for keyed in (False, True):
        config: dict = {"inference": inference, "routes": [{"match": "jev", "to": "local"}]}
        if keyed:
            config["auth"] = {"keys": [{"name": "referee", "key": KEY}]}
        with Served(config) as server:
            server.ready()
            asked = [options.jevcompat, "test", server.url, *(["--key", KEY] if keyed else [])]
            worst = max(worst, subprocess.run(asked, timeout=RUN_LIMIT_S).returncode)
            for count in (3, 16, 64, 255):
                cold, warm = (seconds(server.url, {"state": STATE, "questions": questions(count)}) for _ in range(2))
                print(f"choice of {count} options: {cold:.2f} s cold, {warm:.2f} s warm")
    return worst


if __name__ == "__main__":
    sys.exit(main())
