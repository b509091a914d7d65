"""Mixed load against a real server for as long as wanted, and the proof that nothing leaks, drifts or breaks.

    python tools/soak.py --hours 12 | --minutes 2  [--clients 8] [--eat 1GiB] [--no-cap] [--json] [--model FILE]

The server runs with the default model under a ulimit on its private memory that is just above its plan. In the middle third a
second process eats `--eat` bytes of host memory, and the watchdog's soft mark is set so that this passes it: new work is then
refused with 503, which is intended. Checked while it runs: statuses, streams that end, greedy answers that never change.
Checked at rest: KV blocks, sequences, connections, threads, descriptors back where they were, resident memory flat, latency
flat. Exit code 0 only if all holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "src")]

from laya.config.units import parse_size  # noqa: E402
from laya.engine.machine import host_memory  # noqa: E402
from serving import Served  # noqa: E402
from soak_load import Clients, Tally  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MIB = 1 << 20
# Growth of resident memory that is noise: heaps settle within it, and an hour of a real leak passes it.
_NOISE_BYTES = 24 * MIB
# Latency of the last third against the first, on a machine that others use too.
_FLAT = 2.0
# Parts of the plan that this load can fill; the others are bounds which clients would have to fill one by one.
_FILLED = ("params", "kv", "activation", "runtime", "process", "tokenizer", "grammar", "queue", "blocks", "loading")
_SAMPLES = 60  # of memory and the like, over the whole run
_EATER = """
import sys, time
size = int(sys.argv[1])
held = bytearray(size)
for at in range(0, size, 4096):
    held[at] = 1
print("full", flush=True)
sys.stdin.read()
"""


def configuration(model: Path, soft: float = 0.95) -> dict:
    """A small window and queue, so that every bound is met often."""
    return {
        "server": {"max_buffered_bytes": "64MiB", "max_connections": 512, "log_level": "info"},
        "router": {"responses": {"max_bytes": "16MiB"}},
        "inference": {
            "model": str(model), "name": "smol", "max_seq_len": 1024, "max_num_seqs": 4, "queue_limit": 12,
            "queue_timeout_s": 60, "gpu_memory_utilization": 0.5, "watchdog": {"soft": round(soft, 4), "hard": 0.97},
        },
        "routes": [{"name": "default", "match": ["smol"], "to": "local"}],
    }  # fmt: skip


def mark(plan: int, eaten: int) -> float:
    """A soft mark that the server beside what runs now does not reach, and that the eater passes."""
    memory = host_memory()
    return min(0.95, memory.used_share + (0.85 * plan + 0.6 * eaten) / memory.total) if eaten else 0.95


def planned(config: dict) -> int:
    """Bytes of the plan's parts that can be filled, as `laya plan` tells them."""
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)
        file.flush()
        command = [sys.executable, "-m", "laya", "plan", "--json", "--config", file.name, "--gpu-memory", "0"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT / "src")})
    engine = json.loads(done.stdout)["engines"]["local"]
    return sum(size for part, size in (engine["device"] | engine["host"]).items() if part in _FILLED)


class Watch:
    """Samples of the server while it is loaded: (seconds since the start, figures)."""

    def __init__(self, server: Served) -> None:
        self.server, self.samples, self.began = server, [], time.monotonic()
        self.levels: set[str] = set()

    async def run(self, until: float, every: float) -> None:
        while time.monotonic() < until:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(min(every, max(0.0, until - time.monotonic())))

    def sample(self) -> None:
        began = time.monotonic()
        status, body = self.server.get("/ready")
        answered = time.monotonic() - began
        components = json.loads(body)["components"]
        self.levels.add(components["watchdog"]["level"])
        memory = self.server.memory()
        self.samples.append({
            "at": began - self.began, "rss": memory["VmRSS"], "threads": memory["Threads"], "ready": status,
            "descriptors": self.server.descriptors(), "ready_s": answered,
        })  # fmt: skip


async def eat(size: int, begin: float, end: float) -> None:
    """A second process that holds `size` bytes from `begin` to `end`."""
    if not size:
        return
    await asyncio.sleep(max(0.0, begin - time.monotonic()))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _EATER, str(size), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    await asyncio.sleep(max(0.0, end - time.monotonic()))
    process.stdin.close()
    await process.wait()


async def drive(server: Served, tally: Tally, watch: Watch, seconds: float, clients: int, eaten: int) -> None:
    now = time.monotonic()
    until = now + seconds
    await asyncio.gather(
        watch.run(until, max(1.0, seconds / _SAMPLES)),
        eat(eaten, now + seconds / 3, now + seconds * 2 / 3),
        *(Clients(server.port, tally, seed).run(until) for seed in range(clients)),
    )


def at_rest(server: Served, seconds: float = 30.0) -> dict[str, float]:
    """What is left when nobody asks: waits until it is nothing, or tells what stays."""
    names = ("laya_kv_blocks_used", "laya_sequences_running", "laya_sequences_waiting")
    until = time.monotonic() + seconds
    while True:
        metrics = server.metrics()
        left = {name: metrics[f'{name}{{engine="local"}}'] for name in names}
        left["connections"] = metrics["laya_connections"] - 1  # the one that asks
        left["buffered_bytes"] = metrics["laya_buffered_bytes"]
        if not any(left.values()) or time.monotonic() > until:
            return left
        time.sleep(0.2)


def findings(tally: Tally, watch: Watch, rest: dict, before: dict, after: dict) -> list[str]:
    """Everything that is not as it should be."""
    wrong = list(tally.wrong)
    wrong += [f"at rest: {name} is {value:.0f}" for name, value in rest.items() if value]
    for name in ("threads", "descriptors"):
        if after[name] > before[name] + 2:  # the interpreter's own pool may add a thread or two for good
            wrong.append(f"{name}: {before[name]} before, {after[name]} after")
    early, late = _thirds([sample["rss"] for sample in watch.samples])
    if late > early + _NOISE_BYTES:
        wrong.append(f"resident memory grew from {early / MIB:.0f} to {late / MIB:.0f} MiB")
    first, last = _thirds([seconds for _, seconds in tally.latencies])
    if last > _FLAT * first + 0.5:
        wrong.append(f"a short request took {first:.2f} s at first and {last:.2f} s at the end")
    wrong += [f"{kind}: none was answered" for kind in ("short", "long", "stream", "several") if not tally.counts[kind, 200]]
    wrong += [f"{len(answers)} different greedy answers to {question!r}" for question, answers in tally.answers.items()
              if len(answers) > 1]  # fmt: skip
    return wrong


def _thirds(values: list[float]) -> tuple[float, float]:
    """Medians of the first third after the warm-up, and of the last third."""
    third = max(1, len(values) // 3)
    return statistics.median(values[third // 3 : third] or values or [0.0]), statistics.median(values[-third:] or [0.0])


def soak(model: Path, seconds: float, clients: int, eaten: int, cap: bool) -> dict:
    plan = planned(configuration(model))
    config = configuration(model, mark(plan, eaten))
    with Served(config, data_limit=plan if cap else None) as server:
        server.ready()
        tally, watch = Tally(), Watch(server)
        asyncio.run(drive(server, tally, watch, min(10.0, seconds / 4), clients, 0))  # every lazy part is made now
        at_rest(server)
        before = {"threads": server.memory()["Threads"], "descriptors": server.descriptors()}
        watch = Watch(server)
        asyncio.run(drive(server, tally, watch, seconds, clients, eaten))
        rest, metrics, memory = at_rest(server), server.metrics(), server.memory()
        after = {"threads": memory["Threads"], "descriptors": server.descriptors()}
        code = server.stop()
    wrong = findings(tally, watch, rest, before, after) + ([] if code == 0 else [f"the server ended with {code}"])
    early, late = _thirds([sample["rss"] for sample in watch.samples])
    first, last = _thirds([s for _, s in tally.latencies])
    return {
        "passed": not wrong, "wrong": wrong, "seconds": seconds, "plan_bytes": plan, "capped": cap,
        "peak_bytes": memory["VmHWM"], "private_bytes": memory["VmData"], "rss_early": early, "rss_late": late,
        "rss_slope_bytes_per_hour": (late - early) / (seconds * 2 / 3) * 3600,
        "latency_early_s": first, "latency_late_s": last, "ready_worst_s": max(s["ready_s"] for s in watch.samples),
        "before": before, "after": after, "at_rest": rest, "watchdog_levels": sorted(watch.levels),
        "answers": {f"{kind} {status}": count for (kind, status), count in sorted(tally.counts.items())},
        "greedy": {question: dict(answers) for question, answers in tally.answers.items()},
        "generated_tokens": metrics.get('laya_tokens_total{engine="local",kind="generated"}', 0.0),
        "samples": watch.samples,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--hours", type=float)
    length.add_argument("--minutes", type=float)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--eat", type=parse_size, default=parse_size("1GiB"), help="bytes for the second process; 0: none")
    parser.add_argument("--no-cap", action="store_true", help="no ulimit on the server's memory")
    parser.add_argument("--json", action="store_true", help="print everything, samples included")
    parser.add_argument("--model", type=Path, default=MODEL)
    arguments = parser.parse_args()
    seconds = arguments.hours * 3600 if arguments.hours is not None else arguments.minutes * 60
    report = soak(arguments.model, seconds, arguments.clients, arguments.eat, not arguments.no_cap)
    if not arguments.json:
        del report["samples"]
    print(json.dumps(report, indent=2, ensure_ascii=False))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
