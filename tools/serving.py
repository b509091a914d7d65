"""A Laya server as a child process, for the measurements: started from a configuration, watched through /proc and /metrics.

In: a configuration as a dict. Out: `Served`: its address, metrics, memory, threads, descriptors; ended when the block ends.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = str(ROOT / "src")


class Served:
    """`with Served(config) as server:` waits until the server listens; `ready()` until an engine serves.

    `data_limit` is a ulimit on the process's private memory in bytes (RLIMIT_DATA): beyond it allocations fail.
    """

    def __init__(self, config: dict, *, command: str = "serve", data_limit: int | None = None, env: dict | None = None) -> None:
        self.lines: list[dict] = []
        self._folder = tempfile.TemporaryDirectory(prefix="laya-")
        path = Path(self._folder.name) / "laya.yaml"
        path.write_text(json.dumps({**config, "server": {"port": 0, "drain_timeout_s": 5, **config.get("server", {})}}))
        self._listening = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "laya", command, "--config", str(path)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=self._folder.name,
            env={**os.environ, "PYTHONPATH": SOURCE, **(env or {})},
            preexec_fn=None if data_limit is None else lambda: _limit(data_limit),
        )  # fmt: skip
        self.pid = self.process.pid
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for raw in self.process.stderr:
            try:
                line = json.loads(raw)
            except ValueError:
                line = {"event": "text", "text": raw.decode(errors="replace").rstrip()}
            if line.get("event") != "request":  # thousands of those
                self.lines.append(line)
            if line.get("event") == "listening":
                self._listening.set()
        self._listening.set()

    def __enter__(self) -> Served:
        if not self._listening.wait(120) or self.process.poll() is not None:
            raise RuntimeError(f"the server did not start: {self.lines[-5:]}")
        self.url = next(line for line in self.lines if line.get("event") == "listening")["addresses"][0]
        self.port = int(self.url.rsplit(":", 1)[1])
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.stop()
        self._folder.cleanup()

    def stop(self, seconds: float = 30.0) -> int:
        """SIGTERM, then SIGKILL when it does not end; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def ready(self, seconds: float = 180.0) -> None:
        until = time.monotonic() + seconds
        while self.get("/ready")[0] != 200:
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server is not ready: {self.lines[-5:]}")
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metrics(self) -> dict[str, float]:
        """Every sample by name and labels as they are written."""
        samples = {}
        for line in self.get("/metrics")[1].decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def memory(self) -> dict[str, int]:
        """VmRSS, VmHWM, RssAnon, RssFile, VmData in bytes, and Threads."""
        figures = {}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM", "RssAnon", "RssFile", "VmData"):
                figures[name] = int(value.split()[0]) * 1024
            elif name == "Threads":
                figures[name] = int(value)
        return figures

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def _limit(data: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))


def empty_process() -> int:
    """Resident bytes of an interpreter that does nothing."""
    code = "print(next(line for line in open('/proc/self/status') if line.startswith('VmRSS')).split()[1])"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) * 1024
