"""Processes that the benchmark starts: each is known by its id, watched through /proc and ended by it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

POLL_S = 0.005  # how often a starting system is asked: the resolution of start times
STOP_S = 10.0  # to end after SIGTERM, before it is killed


class NotStarted(Exception):
    """A system did not answer in time, or ended; the text says how to see why."""


class Child:
    """One system's process, in a process group of its own, so that what it starts ends with it."""

    def __init__(self, command: list[str], *, cwd: Path, env: dict[str, str] | None = None, output: str = os.devnull) -> None:
        self.command = command
        self.began = time.perf_counter()
        with open(output, "ab") as sink:
            self.process = subprocess.Popen(
                command, cwd=cwd, env={**os.environ, **(env or {})}, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
            )  # fmt: skip
        self.pid = self.process.pid

    def wait_until_answers(self, port: int, request: bytes, limit_s: float) -> float:
        """Seconds from exec to the first 200 for `request`."""
        while time.perf_counter() - self.began < limit_s:
            if self.process.poll() is not None:
                raise NotStarted(f"ended with code {self.process.returncode}; run: {' '.join(self.command)}")
            if _answers(port, request):
                return time.perf_counter() - self.began
            time.sleep(POLL_S)
        raise NotStarted(f"did not answer in {limit_s:.0f} s; run: {' '.join(self.command)}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # the group is ours alone: workers that outlived their master
        self.process.wait(STOP_S)

    def pids(self) -> list[int]:
        """The process and all that descend from it."""
        parents: dict[int, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    after_name = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    parents.setdefault(int(after_name[1]), []).append(int(entry))
        found = [self.pid]
        for pid in found:
            found += parents.get(pid, [])
        return found

    def resident_mib(self) -> float:
        """Resident memory of all its processes, in MiB; pages that they share count in each."""
        pages = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def cpu_seconds(self) -> float:
        """Processor time of all threads of all its processes so far (threads that ended are not counted)."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    total += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
        return total / 1e9


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(port: int, request: bytes) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
            sock.sendall(request)
            return sock.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False
