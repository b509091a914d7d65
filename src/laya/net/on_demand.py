"""One backend that is a command: its states from stopped to ready and back.

In: its pool's calls at the gate, the supervisor's word that there is room, the process's end. Out: the gate opened and shut,
and events for the log. States: stopped -> starting -> ready -> (yielding) -> stopping -> stopped; `paused` between a failure
and the next try. Loop thread only.
"""

from __future__ import annotations

import asyncio
import random
import shlex
import socket
from collections.abc import Callable
from typing import Any

from laya.log import Log
from laya.net.asking import Asker
from laya.net.gated_pool import GatedPool
from laya.net.process import Process
from laya.net.room import Memory

# Between two looks at whether it is ready: far below what loading a model takes, and nothing to a server.
ASK_EVERY_S = 0.1
ASK_TIMEOUT_S = 2.0
# After a failure the next start waits so long, doubled up to the last figure with each failure in a row.
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0
# Ready for so long, it counts as sound: an earlier failure is forgotten.
STEADY_S = 60.0
# Below Linux's range of ports for any taker (from 32768), above those that services like.
_LOWEST_PORT, _HIGHEST_PORT, _PORT_TRIES = 20_000, 32_000, 100
# Failures in a row after which nothing but a request starts it again.
MAX_REVIVALS = 5


class OnDemandBackend:
    """`advance()` is the supervisor's: called whenever what it decides by has changed."""

    def __init__(self, backend, folder: str, advance: Callable[[], None], log: Log, *, show_output: bool) -> None:
        settings = backend.settings
        self.backend = backend
        self.pool: GatedPool = backend.pool
        self.need = Memory(settings.memory or 0, settings.gpu_memory or 0)
        self.state = "stopped"
        self.starts = 0
        self.retired = False
        self.revive = False  # it died while it was wanted: start it again without being asked
        self.retry_at = 0.0
        self._failures = 0
        self._failed_to_start = ""
        self._ready_at = 0.0
        self._folder = folder
        self._advance = advance
        self._log = log
        self._show_output = show_output
        self._process: Process | None = None
        self._tail: list[str] = []  # of the process before
        self._task: asyncio.Task | None = None
        self.pool.absent = "it is not running"
        self.pool.on_wanted = self._wanted
        self.pool.on_unreachable = self._unreachable

    # -- what the supervisor decides by --------------------------------------------------------------------------------

    @property
    def resident(self) -> bool:
        """It holds its memory, or is about to."""
        return self.state in ("starting", "ready", "yielding", "stopping")

    @property
    def last_used(self) -> float:
        return self.pool.last_used

    @property
    def busy(self) -> bool:
        return self.state == "starting" or self.pool.running > 0

    @property
    def leaving(self) -> bool:
        return self.state in ("yielding", "stopping")

    @property
    def wanted(self) -> bool:
        return not self.retired and not self.resident and (self.pool.held > 0 or self.revive)

    # -- the supervisor's calls ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self.state = "starting"
        self._process = None
        self._failed_to_start = ""
        self.revive = False
        self.starts += 1
        self.pool.absent = "it is starting"
        self.pool.renew()
        self._task = asyncio.get_running_loop().create_task(self._start())

    def give_way(self) -> None:
        """Let what runs finish, then stop: another backend needs the memory."""
        if self.state == "ready":
            self.state = "yielding"
            self.pool.hold("another backend has its memory")
            self._told("yielding")

    def stay(self) -> None:
        """Nobody needs its memory any more."""
        if self.state == "yielding" and not self.retired:
            self.state = "ready"
            self.pool.open()

    def stop(self, why: str) -> None:
        if self.state in ("starting", "ready", "yielding"):
            self.state = "stopping"
            self.pool.shut("it is stopping")
            self._told("stopping", why=why)
            if self._process is not None:
                self._process.stop()
            else:  # its task has not run yet
                self._task.cancel()
                self._stopped()

    def retire(self) -> None:
        """It is not configured any more: what runs there ends, then it stops. The gate was cleared by `pool.retire`."""
        self.retired = True
        if self.state in ("ready", "yielding") and self.pool.running:
            self.state = "yielding"
            self.pool.hold("it is not configured any more")
        else:
            self.stop("not configured")

    def on_tick(self, now: float) -> None:
        if self._process is not None:
            self._process.poll()
        if self.state == "ready":
            if self._failures and now - self._ready_at > STEADY_S:
                self._failures = 0
            idle_s = self.backend.settings.idle_unload_s
            if idle_s is not None and not self.pool.inflight and now - self.pool.last_used >= idle_s:
                self.stop("idle")
        elif self.state == "yielding" and not self.pool.running:
            self.stop("another backend needs its memory")
        elif self.state == "paused" and now >= self.retry_at:
            self.state = "stopped"
            self._failed_to_start = ""

    # -- its life ------------------------------------------------------------------------------------------------------

    def _wanted(self) -> None:
        if self._failed_to_start:  # it was tried a moment ago: nobody waits for a command that is wrong
            reason = self._failed_to_start
            self.pool.loop.call_soon(lambda: self.pool.turn_away(reason))
        elif not self.resident:
            self._advance()

    async def _start(self) -> None:
        settings = self.backend.settings
        failure, process = "", None
        try:
            port = self.pool.address.port = free_port()
            process = self._process = Process(words_of(settings.command, port), self._folder, lambda: self._ended(process))
            self._told("starting", port=port)
            async with asyncio.timeout(settings.start_timeout_s):
                await process.start()
                while self.state == "starting" and not await self._answers():
                    await asyncio.sleep(ASK_EVERY_S)
        except TimeoutError:
            failure = f"it was not ready within {settings.start_timeout_s:g} s"
        except (OSError, ValueError) as exc:  # ValueError: a NUL in the command
            failure = f"it cannot be started: {getattr(exc, 'strerror', None) or type(exc).__name__}"
        if self._process is not process or self.state != "starting":  # it has ended, or was stopped, meanwhile
            if self._process is process and failure and process.pid is None:
                self._stopped()  # and never came to be: nobody will tell of its end
            return
        if failure:
            self._fail_start(failure)
            return
        self.state = "ready"
        self._ready_at = self.pool.clock.now
        self.pool.last_used = self.pool.clock.now
        self._told("ready")
        self.pool.open()
        self._advance()

    def _unreachable(self) -> None:
        """Connecting failed: it has died and that is not seen yet, or it takes no connections for a while."""
        if self.state == "ready":
            self.pool.shut("it takes no connections")
            self._task = asyncio.get_running_loop().create_task(self._come_back())

    async def _come_back(self) -> None:
        process = self._process
        until = self.pool.clock.now + self.backend.settings.start_timeout_s
        while self.state == "ready" and self._process is process:
            if await self._answers():
                if self.state == "ready" and self._process is process:
                    self.pool.open()
                return
            if self.pool.clock.now > until:
                self.revive = True
                self.stop("it does not answer")
                return
            await asyncio.sleep(ASK_EVERY_S)

    async def _answers(self) -> bool:
        """Its health path says that it serves; a server without that page serves when it answers at all."""
        health = self.backend.settings.health
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                async with Asker(self.pool.address, self.backend.authority, self.backend.headers) as asker:
                    if health is None:
                        return True
                    answer = await asker.ask(health)
        except (OSError, TimeoutError):
            return False
        return answer is not None and answer[0] < 500 and answer[0] != 429

    def _fail_start(self, failure: str) -> None:
        """Nothing will come of this start: those that wait hear why."""
        process = self._process
        tail = process.tail() if process is not None else []
        self._log.event("error", "backend_start_failed", backend=self.backend.name, text=failure, output=tail)
        if self._show_output and tail:
            failure += f"; its last line: {tail[-1]}"
        self._failed_to_start = f"it did not start: {failure}"
        self._pause()
        if process is not None and process.pid is not None and process.exit_code is None:
            self.state = "stopping"  # and paused when it has gone
            self.pool.shut("it is stopping")
            process.stop()
        self.pool.turn_away(self._failed_to_start)
        self._advance()

    def _ended(self, process: Process) -> None:
        """The process and all that it started are gone."""
        was, self._tail = self.state, process.tail()
        self._process = None
        if was == "starting":
            self._process = process  # for its output
            self._fail_start(f"the command ended with code {process.exit_code}")
            self._process = None
        elif was == "stopping":
            self._stopped()
        else:
            self._log.event(
                "error", "backend_died", backend=self.backend.name, code=process.exit_code, output=self._tail
            )  # fmt: skip
            self.pool.shut("it has died and is started again")
            self.revive = was == "ready" and self._failures < MAX_REVIVALS
            self._pause()
        self._advance()

    def _stopped(self) -> None:
        """Its memory is free."""
        self._process = None
        if self._failed_to_start and self.retry_at > self.pool.clock.now:
            self.state = "paused"
        else:
            self.state, self._failed_to_start = "stopped", ""
        self.pool.absent = "it is not running"
        self._told("stopped")

    def _pause(self) -> None:
        self.state = "paused"
        self.retry_at = self.pool.clock.now + min(LAST_PAUSE_S, FIRST_PAUSE_S * 2**self._failures)
        self._failures += 1

    def _told(self, state: str, **more: Any) -> None:
        self._log.event("info", "backend", backend=self.backend.name, state=state, **more)

    def status(self) -> dict[str, Any]:
        """For /ready. The output may hold anything, so only those on this machine see it there."""
        status: dict[str, Any] = {
            "state": self.state, "starts": self.starts, "waiting": self.pool.held, "memory": self.need.host,
        }  # fmt: skip
        process = self._process
        if process is not None and self.resident:
            status["pid"], status["port"] = process.pid, self.pool.address.port
        if self.state == "paused":
            status["next_try_s"] = round(max(0.0, self.retry_at - self.pool.clock.now), 1)
        if self._show_output:
            status["output"] = process.tail() if process is not None else self._tail
        return status


def words_of(command: str, port: int) -> list[str]:
    """The command's words as a shell would split them, with the port filled in. Raises ValueError for open quotes."""
    return [word.replace("{port}", str(port)) for word in shlex.split(command)]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now, outside of those that the kernel gives to whoever asks for any: between
    our look and the command's bind nobody else gets it."""
    for _ in range(_PORT_TRIES):
        port = random.randrange(_LOWEST_PORT, _HIGHEST_PORT + 1)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port was found")
