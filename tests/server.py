"""The real server as a process, for the end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = ROOT / "models" / "gemma-3-270m-q4_k_m.gguf"


class Laya:
    """`python -m laya` as a user starts it, on a port of the system's choice."""

    def __init__(
        self, config: dict, directory: Path, command: str = "router", env: dict | None = None, wait: bool = True,
        program: tuple[str, ...] = ("-m", "laya"),
    ) -> None:  # fmt: skip
        config = {**config, "server": {"port": 0, "drain_timeout_s": 5, **config.get("server", {})}}
        path = directory / f"laya-{time.monotonic_ns()}.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        self.path = path
        self.lines: list[dict] = []
        self.other: list[str] = []
        self._listening = threading.Event()
        self.process = subprocess.Popen(
            [sys.executable, *program, command, "--config", str(path)],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **(env or {})},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            assert self._listening.wait(60), f"the server did not start: {self.other} {self.lines}"
            self.url = next(a for a in self.event("listening")["addresses"] if not a.startswith("unix:"))
            self.port = int(self.url.rsplit(":", 1)[1])

    def _read(self) -> None:
        for raw in self.process.stderr:
            try:
                self.lines.append(json.loads(raw))
            except ValueError:
                self.other.append(raw.decode(errors="replace").rstrip())
                continue
            if self.lines[-1].get("event") == "listening":
                self._listening.set()
        self._listening.set()

    def event(self, name: str) -> dict:
        return next(line for line in self.lines if line.get("event") == name)

    def events(self, name: str) -> list[dict]:
        return [line for line in self.lines if line.get("event") == name]

    def get(self, path: str, headers: dict | None = None) -> tuple[int, bytes]:
        return self.call("GET", path, headers=headers)[:2]

    def call(self, method: str, path: str, body=None, headers: dict | None = None, timeout: float = 60):
        """(status, body, headers) of one request on a connection of its own."""
        data = json.dumps(body).encode() if isinstance(body, dict | list) else body
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("content-type", "application/json")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read(), dict(error.headers)

    def chat(self, model: str | None = None, text: str = "hi", **members):
        """(status, decoded body, headers) of a plain chat completion."""
        body = {"messages": [{"role": "user", "content": text}], **members}
        if model is not None:
            body["model"] = model
        status, raw, headers = self.call("POST", "/v1/chat/completions", body)
        return status, json.loads(raw), headers

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def metric(self, name: str, **labels) -> float:
        """The value of one sample; 0.0 where it is not there."""
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.get("/metrics")[1].decode()):
            for sample in family.samples:
                if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items()):
                    return sample.value
        return 0.0

    def wait_for(self, condition, seconds: float = 10.0) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if condition():
                return True
            time.sleep(0.02)
        return bool(condition())

    def wait_ready(self, seconds: float = 120.0) -> None:
        assert self.wait_for(lambda: self.process.poll() is not None or self.get("/ready")[0] == 200, seconds), self.get("/ready")
        assert self.process.poll() is None, self.other

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code


@contextlib.contextmanager
def running(config: dict, directory: Path, command: str = "router", **kw) -> Iterator[Laya]:
    laya = Laya(config, directory, command, **kw)
    try:
        yield laya
    finally:
        if laya.process.poll() is None:
            laya.process.kill()
            laya.process.wait(10)
