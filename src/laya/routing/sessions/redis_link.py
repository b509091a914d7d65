"""Redis (or Valkey) behind one thread: commands go out many at a time, answers come back to the loop in one batch.

In (loop thread): `send`, which only puts into a queue. Out: `done` on the loop thread, through `post`. Nothing here ever fails
a request: while Redis is away writes are kept within a bound, questions are answered with `AWAY`, and the thread tries again
with growing pauses. A thread and the blocking client rather than asyncio's: names are looked up, connections made and megabytes
of stored conversations encoded without the loop, and one round trip serves whatever gathered during the one before.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from laya.config import RouterConfig
from laya.errors import DependencyError
from laya.routing.sessions.condition import condition

# Commands that may wait, and their bytes: beyond it new ones are given up, and their senders told at once.
MAX_PENDING = 65_536
MAX_PENDING_BYTES = 64 * 1024 * 1024
# Commands of one round trip: bounds how long an answer waits for others.
GROUP = 256
# Longest silence of Redis within a command, and to connect. Requests never wait for it: it only decides when Redis is away.
TIMEOUT_S = 1.0
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 2.0  # pauses between tries while it is away
LAST_TRIES_S = 3.0  # at a stop: how long what is unsent may be tried


class _Away:
    def __repr__(self) -> str:
        return "AWAY"


AWAY = _Away()  # the answer of a Redis that gave none
Done = Callable[[Any], None]


class Command(NamedTuple):
    words: tuple
    keep: bool  # a write: sent later when it cannot be sent now
    size: int
    done: Done | None


class RedisLink:
    """`connect()` makes a client of the redis package; it is used on the thread alone."""

    def __init__(self, connect: Callable[[], Any], post: Callable[[Callable[[], None]], Any]) -> None:
        self.state = "starting"  # starting | ok | degraded; written by the thread, shown by anybody
        self.reason = ""
        self.silent = False  # a question was not answered within its asker's bound, and nothing since; of the loop thread
        self.errors: dict[str, int] = {}  # kind -> times
        self.dropped = 0  # writes given up
        self._connect = connect
        self._post = post
        self._client: Any = None
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._put_bytes = 0  # ever put into the queue, and ever done with: each has one thread that changes it
        self._done_bytes = 0
        self._kept: deque[Command] = deque()  # of the thread: writes that Redis has not taken yet
        self._retry_at = 0.0
        self._pause = FIRST_RETRY_S
        self._stop_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="laya-shared-table", daemon=True)

    # -- loop thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def send(self, *words: Any, done: Done | None = None, keep: bool = False, size: int = 0) -> bool:
        """One command. `done(answer)` once, `AWAY` where Redis gave none; with `keep` a write that is tried until Redis has it.

        False when too much waits: nothing is sent, and `done` is not called.
        """
        if self._inbox.qsize() + len(self._kept) >= MAX_PENDING or self._put_bytes - self._done_bytes > MAX_PENDING_BYTES:
            self.dropped += keep
            return False
        self._put_bytes += size
        self._inbox.put(Command(words, keep, size, done))
        return True

    @property
    def answers(self) -> bool:
        """Worth waiting for: it is there, and has not just let somebody wait in vain."""
        return self.state == "ok" and not self.silent

    def stop(self, timeout_s: float) -> bool:
        """Send what is left and end the thread. True when nothing was lost. The only call that blocks."""
        if self._thread.ident is None:
            return True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not self._kept

    def status(self) -> dict[str, Any]:
        return condition(self.state, len(self._kept) + self._inbox.qsize(), self.reason, self.errors, self.dropped)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._exchange([])  # so that its state is known before the first request needs it
        while self._stop_by is None or (self._kept and time.monotonic() < self._stop_by):
            commands = self._take()
            if time.monotonic() < self._retry_at:
                self._put_off(commands, first=False)
            elif self._write_kept():
                if commands or self.state != "ok":
                    self._exchange(commands)
            else:
                self._put_off(commands, first=False)
        if self._client is not None:
            self._client.close()

    def _take(self) -> list[Command]:
        """Wait for commands, at most until the next try is due; then take those that are there."""
        commands: list[Command] = []
        due = self._retry_at if self._kept or self.state != "ok" else None
        if self._stop_by is not None:
            due = min(self._stop_by, self._retry_at)
        try:
            job = self._inbox.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            while True:
                if job is None:
                    self._stop_by = time.monotonic() + LAST_TRIES_S
                else:
                    commands.append(job)
                if len(commands) >= GROUP:
                    return commands
                job = self._inbox.get_nowait()
        except queue.Empty:
            return commands

    def _write_kept(self) -> bool:
        """What was kept goes before anything newer: a question must find it, and an old value must not replace a newer one."""
        while self._kept:
            self._exchange([self._kept.popleft() for _ in range(min(len(self._kept), GROUP))])
            if self.state != "ok":
                return False
        return True

    def _exchange(self, commands: list[Command]) -> None:
        """One round trip for all of them, in order."""
        try:
            if self._client is None:
                self._client = self._connect()
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command.words)
            if not commands:
                pipeline.ping()  # is it back?
            answers = pipeline.execute(raise_on_error=False)
        except Exception as error:  # the client's own classes, the socket's and the resolver's
            self._failed(type(error).__name__)
            self._put_off(commands, first=True)
            return
        lasting = next((name for name in map(_lasting, answers) if name), None)
        if lasting:
            self._failed(lasting)
        else:
            self.state, self.reason, self._pause, self._retry_at = "ok", "", FIRST_RETRY_S, 0.0
        self._answered(commands, answers[: len(commands)])

    def _answered(self, commands: list[Command], answers: list) -> None:
        results, kept = [], []
        for command, answer in zip(commands, answers, strict=True):
            if isinstance(answer, Exception):
                if command.keep and _lasting(answer):
                    kept.append(command)
                    continue
                self._count("refused")
                answer = AWAY
            self._done_bytes += command.size
            results.append((command.done, answer))
        self._kept.extendleft(reversed(kept))
        self._tell(results)

    def _put_off(self, commands: list[Command], first: bool) -> None:
        """Writes are kept, in their order; questions are answered: there is nobody to ask."""
        writes = [command for command in commands if command.keep]
        if first:
            self._kept.extendleft(reversed(writes))
        else:
            self._kept.extend(writes)
        asked = [command for command in commands if not command.keep]
        self._done_bytes += sum(command.size for command in asked)
        self._tell([(command.done, AWAY) for command in asked])

    def _failed(self, kind: str) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._count(kind)
        self.state, self.reason = "degraded", kind
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, LAST_RETRY_S)

    def _count(self, kind: str) -> None:
        self.errors[kind] = self.errors.get(kind, 0) + 1

    def _tell(self, results: list[tuple[Done | None, Any]]) -> None:
        calls = [(done, answer) for done, answer in results if done is not None]
        if calls:
            try:
                self._post(partial(self._call, calls))
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

    def _call(self, calls: list[tuple[Done, Any]]) -> None:
        """On the loop. One listener's fault must not keep the others waiting: it is raised when all were told."""
        self.silent = False
        fault: Exception | None = None
        for done, answer in calls:
            try:
                done(answer)
            except Exception as error:
                fault = error
        if fault is not None:
            raise fault


# Errors of Redis itself that pass: it loads its data, is a replica just now, has no memory left, or wants a password.
_LASTING = ("BusyLoading", "ReadOnly", "OutOfMemory", "NoPermission", "Authentication", "MasterDown", "ClusterDown", "TryAgain")


def _lasting(answer: Any) -> str | None:
    """The kind of an error after which the same command may succeed later."""
    name = type(answer).__name__
    return name if isinstance(answer, Exception) and name.startswith(_LASTING) else None


def open_redis(router: RouterConfig, post: Callable[[Callable[[], None]], Any]) -> RedisLink | None:
    """The link of the mode `shared`, started; None for the others. Raises DependencyError where the package is missing."""
    if router.mode != "shared" or router.redis is None:
        return None
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as exc:
        raise DependencyError(
            f"router.mode shared needs the redis package ({exc}); bring it with: pip install 'laya-server[shared]'"
        ) from None
    connect = partial(
        Redis.from_url, router.redis, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0),
        single_connection_client=True,
    )  # fmt: skip
    link = RedisLink(connect, post)
    link.start()
    return link
