"""One command run for us: started off the loop, its output kept in a ring, ended with everything that it started.

In: words, a folder, and calls on the loop. Out: `on_exit()` once. The command runs under `leash.py`, so that its whole process
group ends with this process however that ends. Loop thread, but for the start itself: spawning copies page tables and waits
for an exec, which is no work for the loop.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

# What is kept of the output: a page of its last lines, which is where servers say why they end.
RING_BYTES = 16 * 1024
SHOWN_LINES, SHOWN_CHARS = 20, 300
# Reads of the output are this far apart: a command that floods it fills its own pipe, not our loop.
READ_EVERY_S = 0.01
# From SIGTERM to SIGKILL: a model server drains and frees its card in a few seconds.
GRACE_S = 10.0
# As we were started ourselves: what the engine sets for its own libraries is nothing to a command.
_ENVIRONMENT = dict(os.environ)
_LEASH = str(Path(__file__).with_name("leash.py"))
LEASH_WORD = "--leash"  # `laya --leash ...` is the same in a build that has no Python beside it


class Process:
    """`await start()` raises OSError when it cannot be spawned. `exit_code` is None while it runs."""

    def __init__(self, words: list[str], folder: str, on_exit: Callable[[], None]) -> None:
        self.exit_code: int | None = None
        self.stopping = False
        self._words = words
        self._folder = folder
        self._on_exit = on_exit
        self._ring = b""
        self._popen: subprocess.Popen | None = None
        self._output: asyncio.ReadTransport | None = None

    @property
    def pid(self) -> int | None:
        """Of the leash; the command is its child."""
        return self._popen.pid if self._popen is not None else None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        words = [*_leash_words(), f"{GRACE_S:g}", *self._words]
        spawn = partial(
            subprocess.Popen, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
            cwd=self._folder, env=_ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
        self._popen = await loop.run_in_executor(None, spawn)
        self._output, _ = await loop.connect_read_pipe(lambda: _Output(self, loop), self._popen.stdout)
        if self.stopping:
            self._let_go()

    def stop(self) -> None:
        """Ask it to end; it is killed when it does not within GRACE_S. `on_exit` comes when all of it is gone."""
        self.stopping = True
        self._let_go()

    def poll(self) -> None:
        """See whether it has ended. Called by the clock, and when its output ends."""
        if self._popen is None or self.exit_code is not None or self._popen.poll() is None:
            return
        self.exit_code = self._popen.returncode
        if self._output is not None:
            self._output.close()
        self._let_go()
        self._on_exit()

    def tail(self) -> list[str]:
        """The last lines of the output, each cut to a bound."""
        lines = self._ring.decode("utf-8", "replace").splitlines()
        return [line[:SHOWN_CHARS] for line in lines if line.strip()][-SHOWN_LINES:]

    def wrote(self, data: bytes) -> None:
        self._ring = (self._ring + data)[-RING_BYTES:]

    def _let_go(self) -> None:
        """The end of its stdin is what tells the leash to end it."""
        if self._popen is not None and self._popen.stdin is not None:
            self._popen.stdin.close()


class _Output(asyncio.Protocol):
    def __init__(self, process: Process, loop: asyncio.AbstractEventLoop) -> None:
        self._process = process
        self._loop = loop
        self._transport: asyncio.ReadTransport | None = None

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._process.wrote(data)
        self._transport.pause_reading()
        self._loop.call_later(READ_EVERY_S, self._go_on)

    def connection_lost(self, exc: Exception | None) -> None:
        # The pipe ends a moment before its holder can be waited for.
        self._loop.call_later(READ_EVERY_S, self._process.poll)

    def _go_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()


def _leash_words() -> list[str]:
    if getattr(sys, "frozen", False):  # one executable: it is its own interpreter
        return [sys.executable, LEASH_WORD]
    return [sys.executable, "-I", "-S", _LEASH]
