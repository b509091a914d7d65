"""What the gateway and the engine cost each other: chats forwarded at a constant rate while the engine decodes a full batch.

    python benchmarks/mixed.py [--json] [--quick] [--model FILE] [--threads N] [--set KEY=VALUE ...]

One `laya serve` with an engine and a backend (a stub). 500 requests a second are sent, each when it is due (open loop), through
Laya and straight to the stub, in turn, while the engine decodes its full batch for clients of its own; and the engine is
measured without that load. Exit 1: a target is missed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "src")]

from engine_bench import client, ratios  # noqa: E402
from gateway_bench import machine, steady  # noqa: E402
from gateway_bench.children import Child, free_port  # noqa: E402
from gateway_bench.figures import number, table  # noqa: E402
from gateway_bench.systems import laya_config  # noqa: E402
from serving import Served  # noqa: E402

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SEQUENCES = 8  # the full batch
WINDOW = 1024
RATE = 500  # requests a second
START_S = 120.0  # for the model to load, on a slow machine
# What runs beside the engine's batch, in turn, and what the engine's tokens/s are then called.
LOADS = {"idle": "engine_alone", "straight": "engine_beside_straight", "gateway": "engine_loaded"}


class Batch:
    """Clients that keep the engine's batch full; tokens are read from the server's own counter."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._stop = threading.Event()
        self._failures: list[Exception] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(SEQUENCES)]

    def __enter__(self) -> Batch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _ask(self) -> None:
        while not self._stop.is_set():
            try:
                client.complete(self._server.port, "m", 32, 256)
            except Exception as error:  # raised where the block ends
                self._failures.append(error)
                return

    def generated(self) -> float:
        return self._server.metrics()['laya_tokens_total{engine="local",kind="generated"}']


def rate_during(batch: Batch, port: int | None, seconds: float) -> tuple[float, dict[str, float]]:
    """Tokens/s of the engine while requests go to `port` (None: none do), and their figures."""
    before, began = batch.generated(), time.perf_counter()
    if port is None:
        time.sleep(seconds)
    run = steady.run(port, RATE, seconds) if port is not None else {}
    return (batch.generated() - before) / (time.perf_counter() - began), run


def measure(server: Served, stub_port: int, rounds: int, seconds: float) -> tuple[ratios.Samples, int]:
    """Samples by name, and errors in all."""
    samples: ratios.Samples = defaultdict(list)
    errors = 0
    ports = {"straight": stub_port, "gateway": server.port}
    for name, port in ports.items():  # without the engine: what a loaded path is compared with
        samples[f"{name}_p99_us_engine_idle"].append(steady.run(port, RATE, seconds)["p99_us"])
    with Batch(server) as batch:
        time.sleep(3.0)  # prompts are read, all sequences decode
        for done in range(rounds):
            for load in LOADS:
                tokens, run = rate_during(batch, ports.get(load), seconds)
                samples[LOADS[load]].append(tokens)
                for key in ("p50_us", "p99_us", "late_p99_us"):
                    if key in run:
                        samples[f"{load}_{key}"].append(run[key])
                errors += int(run.get("errors", 0))
            print(f"round {done + 1} of {rounds}", file=sys.stderr)
    return samples, errors


def wait_for_engine(server: Served) -> None:
    """`/ready` is for the server as a whole, which has a backend from the start."""
    until = time.monotonic() + START_S
    while json.loads(server.get("/ready")[1])["components"]["engines"]["local"]["state"] != "ready":
        if time.monotonic() > until:
            raise RuntimeError(f"the engine is not ready: {server.lines[-5:]}")
        time.sleep(0.1)


def configuration(model: Path, threads: int | None, stub_port: int, settings: dict) -> dict:
    engine = {"model": str(model), "name": "m", "max_num_seqs": SEQUENCES, "max_seq_len": WINDOW, **settings}
    if threads is not None:
        engine["threads"] = threads
    # The rules of the gateway's own benchmark: forwarding does the same work here.
    config = laya_config(0, stub_port, "info")
    config["routes"].insert(0, {"name": "local", "match": "m", "to": "local"})
    return {**config, "inference": engine}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="all figures as JSON")
    parser.add_argument("--quick", action="store_true", help="one round of 3 s a load")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--threads", type=int, help="torch threads of the engine (default: Laya's own, the cores less one)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of `inference`, to compare")
    arguments = parser.parse_args()
    if not arguments.model.exists():
        print(f"skipped: {arguments.model} is not there (laya pull default)", file=sys.stderr)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    described = machine.describe()
    settings = {key: json.loads(value) for key, _, value in (item.partition("=") for item in arguments.set)}
    rounds, seconds = (1, 3.0) if arguments.quick else (5, 5.0)
    stub_port = free_port()
    with ExitStack() as stack:
        stub = Path(steady.__file__).parent / "stub.py"
        backend = Child([sys.executable, str(stub), "--port", str(stub_port)], cwd=Path(tempfile.gettempdir()))
        stack.callback(backend.stop)
        backend.wait_until_answers(stub_port, b"GET /health HTTP/1.1\r\nHost: stub\r\n\r\n", 30.0)
        server = stack.enter_context(Served(configuration(arguments.model, arguments.threads, stub_port, settings)))
        wait_for_engine(server)
        client.decode_rate(server.port, "m", SEQUENCES, 64)  # concurrency opens
        samples, errors = measure(server, stub_port, rounds, seconds)
    found = ratios.medians(samples)
    result = ratios.mixed_ratios(found)
    if arguments.json:
        head = {"machine": described, "model": arguments.model.name, "rate": RATE, "sequences": SEQUENCES, "errors": errors}
        print(json.dumps({**head, "settings": settings, "medians": found, "ratios": result}, indent=2))
    else:
        print(json.dumps(described, indent=2))
        print(f"errors: {errors}\n")
        print(table([["figure", "median"], *[[name, number(value)] for name, value in found.items()]]))
        print()
        print(table(ratios.verdicts(result)))
    return 1 if errors else 0  # a missed target is a finding


if __name__ == "__main__":
    raise SystemExit(main())
