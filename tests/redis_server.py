"""A Redis of Debian's package on a socket file of its own, for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis


class RedisServer:
    """`start` and `kill` at any time; `freeze` stops it in the middle of things."""

    def __init__(self, directory: Path) -> None:
        self.socket = f"{directory}/redis.sock"
        self.url = f"unix://{self.socket}"
        self._directory = directory
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", self.socket, "--save", "", "--dir", str(self._directory)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until = time.monotonic() + 20
        while True:
            try:
                self.client().ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < until and self._process.poll() is None, "redis-server did not start"
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=self.socket)

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def freeze(self, frozen: bool = True) -> None:
        os.kill(self._process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[RedisServer]:
    assert shutil.which("redis-server"), "redis-server is missing: apt-get install redis-server"
    server = RedisServer(directory)
    server.start()
    try:
        yield server
    finally:
        server.kill()
