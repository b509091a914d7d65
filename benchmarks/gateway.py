"""How fast Laya forwards, beside nginx, vllm-router, the SGLang gateway (smg), LiteLLM and no gateway at all, in one run.

    python benchmarks/gateway.py                      about 25 minutes: five runs, systems in turn, medians
    python benchmarks/gateway.py --quick              two minutes: one short run of fewer points
    python benchmarks/gateway.py --peers DIR --json   peers from a virtual environment; the figures and ratios as JSON

Everything runs on loopback in front of one stub; what is measured and why is in docs/benchmarks.md. A peer that is not
installed is skipped by name. Needs wrk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gateway_bench import bodies, figures, frames, hey, machine, report, steady, systems, wrk
from gateway_bench.children import Child, NotStarted, free_port
from gateway_bench.stub import __file__ as STUB

RATE = 500  # requests a second of the constant-rate run: a busy team, far from any gateway's limit but LiteLLM's
STREAMS = 8
FRAME_INTERVAL_MS = 5.0  # 200 tokens a second for each stream: faster than any reader, as fast models are
DENSE_COUNT = 4  # times as many frames where they come without a pause: long enough against the start
QUICK_LIMIT_S = 120.0
SLOW = "litellm"  # starts for most of a minute: in the quick form it comes last and only if time is left
SLOW_NEEDS_S = 25.0  # for its loads in the quick form
SLOW_SECONDS = 3  # of one closed-loop run of it at least: with 64 connections its first answers take a second
STARTS_AGAIN_BELOW_S = 5.0  # a start that took longer is measured once
CROSS_CHECK = 8  # connections of the comparison with hey
NAMES = ("straight", "nginx", "nginx+log", "laya", "laya-log", systems.IN_PYTHON, "vllm-router", "smg", SLOW)


@dataclass(frozen=True)
class Extent:
    """How much is measured. A point is (connections, prompt size)."""

    points: tuple[tuple[int, int], ...]
    runs: int
    seconds: int
    frames: int
    steady_s: float
    cross_check: bool = False

    def method(self) -> str:
        return (
            f"{self.runs} run{'s' if self.runs > 1 else ''} of {self.seconds} s per point, systems in turn, medians; "
            f"streams: {STREAMS} x {self.frames} frames, one each {FRAME_INTERVAL_MS:g} ms; constant rate: {RATE}/s"
        )


S, L = bodies.SMALL_BYTES, bodies.LARGE_BYTES
FULL = Extent(tuple((c, size) for size in (S, L) for c in (1, 8, 64, 512)), runs=5, seconds=3, frames=400, steady_s=5)
QUICK = Extent(((1, S), (8, S), (64, S), (64, L), (512, L)), runs=1, seconds=1, frames=150, steady_s=1)


@dataclass
class System:
    """One that runs and answers."""

    name: str
    port: int
    child: Child
    launch: systems.Launch


class Bench:
    """Starts the systems, puts the loads on them in turn, keeps the figures."""

    def __init__(
        self, directory: Path, extent: Extent, peers: Path | None, wanted: set[str], exits: contextlib.ExitStack
    ) -> None:
        self.extent = extent
        self.told: dict[str, dict] = {}
        self.skipped: dict[str, str] = {}
        self.runs: figures.Runs = {}
        self._directory = directory
        self._peers = peers
        self._wanted = wanted
        self._exits = exits
        self._files = {size: bodies.write(directory, size) for size in {size for _, size in extent.points}}
        self._hello = bodies.bodies(S)[0]
        self._hello_file = directory / "hello"
        self._hello_file.write_bytes(self._hello)
        self._stub = self._start_stub()

    def _start_stub(self) -> System:
        port = free_port()
        command = [sys.executable, STUB, "--port", str(port), "--interval-ms", str(FRAME_INTERVAL_MS)]
        launch = systems.Launch(command, "this benchmark's stub")
        child = Child(command, cwd=self._directory)
        self._exits.callback(child.stop)
        child.wait_until_answers(port, bodies.http(self._hello, port), launch.start_limit_s)
        return System(figures.BASE, port, child, launch)

    # -- starting ------------------------------------------------------------------------------------------------------

    def start(self, names: tuple[str, ...], slow_limit_s: float | None = None) -> list[System]:
        """Those of `names` that are wanted and installed, answering."""
        running = [self._start(name, slow_limit_s) for name in names if name in self._wanted]
        return [system for system in running if system is not None]

    def _start(self, name: str, slow_limit_s: float | None) -> System | None:
        if name == figures.BASE:
            self.told[name] = {"version": self._stub.launch.version}
            return self._stub
        port = free_port()
        launch = self._launch(name, port)
        if launch is None:
            self.skipped[name] = "not installed (see --peers)"
            return None
        say(f"starting {name} {launch.version}")
        child = Child(launch.command, cwd=self._directory, env=launch.env)
        self._exits.callback(child.stop)
        try:
            limit = launch.start_limit_s if slow_limit_s is None else slow_limit_s
            seconds = child.wait_until_answers(port, bodies.http(self._hello, port), limit)
        except NotStarted as reason:
            child.stop()
            self.skipped[name] = str(reason)
            return None
        resident = child.resident_mib()
        starts = [seconds]
        if seconds < STARTS_AGAIN_BELOW_S:
            starts += [self._start_again(name) for _ in range(self.extent.runs - 1)]
        self.told[name] = {"version": launch.version, "start_s": statistics.median(starts), "resident_ready_mib": resident}
        return System(name, port, child, launch)

    def _start_again(self, name: str) -> float:
        """Seconds that another start of it takes; that one is stopped at once."""
        port = free_port()
        launch = self._launch(name, port)
        child = Child(launch.command, cwd=self._directory, env=launch.env)
        try:
            return child.wait_until_answers(port, bodies.http(self._hello, port), launch.start_limit_s)
        finally:
            child.stop()

    def _launch(self, name: str, port: int) -> systems.Launch | None:
        common = (port, self._stub.port, self._directory)
        if name == systems.IN_PYTHON:
            return systems.laya_in_python(*common)
        if name.startswith("laya"):
            return systems.laya(*common, "info" if name == "laya" else "warning")
        if name.startswith("nginx"):
            return systems.nginx(*common, "/dev/null combined" if name == "nginx+log" else "off", self._peers)
        if name == "vllm-router":
            return systems.vllm_router(*common, self._peers, free_port())
        if name == "smg":
            return systems.smg(*common, self._peers, free_port())
        return systems.litellm(*common, self._peers)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def measure(self, running: list[System]) -> None:
        """Every point, `runs` times, the systems in turn: A B C A B C."""
        if not running:
            return
        for system in running:
            wrk.run(system.port, 8, 1, self._files[S])  # warm up: code paths, pools, memos
        for number in range(self.extent.runs):
            say(f"run {number + 1} of {self.extent.runs}: {', '.join(system.name for system in running)}")
            for connections, size in self.extent.points:
                point = f"c{connections}" + ("_16k" if size == L else "")
                self._each(point, running, lambda s, c=connections, n=size: self._closed_loop(s, c, n))
            self._each("stream", running, self._streams)
            self._each("stream_dense", running, self._dense_streams)
            self._each("steady", running, self._steady)
            if self.extent.cross_check:
                self._each(f"c{CROSS_CHECK}_hey", running, self._hey)
        for system in running:
            self.told[system.name]["resident_loaded_mib"] = system.child.resident_mib()

    def _each(self, point: str, running: list[System], load: Callable[[System], figures.Run | None]) -> None:
        for system in running:
            run = load(system)
            if run is not None:
                self.runs.setdefault(point, {}).setdefault(system.name, []).append(run)

    def _closed_loop(self, system: System, connections: int, size: int) -> figures.Run | None:
        if connections > system.launch.most_connections:
            return None
        seconds = max(self.extent.seconds, SLOW_SECONDS) if system.name == SLOW else self.extent.seconds
        before = system.child.cpu_seconds()
        run = wrk.run(system.port, connections, seconds, self._files[size])
        used = system.child.cpu_seconds() - before
        return {**run, "cpu_us": used / max(1, run["requests"]) * 1e6}

    def _streams(self, system: System, count: int = 1, dense: bool = False) -> figures.Run:
        before = system.child.cpu_seconds()
        run = frames.run(system.port, STREAMS, self.extent.frames * count, dense=dense)
        used = system.child.cpu_seconds() - before
        return {**run, "cpu_us": used / max(1, run["frames"]) * 1e6}

    def _dense_streams(self, system: System) -> figures.Run | None:
        return None if system.name == SLOW else self._streams(system, DENSE_COUNT, dense=True)

    def _steady(self, system: System) -> figures.Run | None:
        if system.name == SLOW:
            return None  # it answers some 100 requests a second: at 500 only its queue would be measured
        return steady.run(system.port, RATE, self.extent.steady_s)

    def _hey(self, system: System) -> figures.Run:
        return hey.run(system.port, CROSS_CHECK, self.extent.seconds, self._hello_file)

    def result(self) -> dict:
        found = figures.medians(self.runs)
        return {
            "method": self.extent.method(), "wrk": wrk.version(), "systems": self.told, "skipped": self.skipped,
            "figures": found, "runs": self.runs, "ratios": figures.ratios(found, self.told),
        }  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(extent: Extent, peers: Path | None, wanted: set[str], quick: bool) -> dict:
    began = time.perf_counter()
    about = machine.describe()
    with contextlib.ExitStack() as exits:
        directory = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="laya-bench-")))
        bench = Bench(directory, extent, peers, wanted, exits)
        if not quick:
            bench.measure(bench.start(NAMES))
        else:
            bench.measure(bench.start(tuple(name for name in NAMES if name != SLOW)))
            left = QUICK_LIMIT_S - (time.perf_counter() - began) - SLOW_NEEDS_S
            if left > 0:
                bench.measure(bench.start((SLOW,), slow_limit_s=left))
            elif SLOW in wanted:
                bench.skipped[SLOW] = "no time left in the quick form"
        return {"machine": about, **bench.result()}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two minutes: one short run of fewer points")
    parser.add_argument("--json", action="store_true", help="print the figures and ratios as JSON")
    parser.add_argument("--peers", type=Path, help="virtual environment (or folder of programs) with the peers; else PATH")
    parser.add_argument("--only", help=f"systems to measure, with commas: of {', '.join(NAMES)}")
    parser.add_argument("--runs", type=int, help="how often each point is measured")
    parser.add_argument("--seconds", type=int, help="length of one closed-loop run")
    parser.add_argument("--cross-check", action="store_true", help=f"also ask with hey, {CROSS_CHECK} connections")
    chosen = parser.parse_args(given)
    chosen.only = set(chosen.only.split(",")) if chosen.only else set(NAMES)
    if unknown := chosen.only - set(NAMES):
        parser.error(f"no such system: {', '.join(sorted(unknown))}")
    return chosen


def main() -> int:
    chosen = arguments()
    if not wrk.available():
        say("wrk is not installed (Debian: apt install wrk)")
        return 1
    if chosen.cross_check and not hey.available():
        say("hey is not installed (Debian: apt install hey)")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the systems are stopped then too
    base = QUICK if chosen.quick else FULL
    extent = replace(
        base, runs=chosen.runs or base.runs, seconds=chosen.seconds or base.seconds, cross_check=chosen.cross_check
    )  # fmt: skip
    result = run(extent, chosen.peers, chosen.only, chosen.quick)
    print(json.dumps(result, indent=1) if chosen.json else report.render(result))
    return 1 if figures.US in result["skipped"] else 0  # a peer may be missing, what is measured may not


if __name__ == "__main__":
    sys.exit(main())
