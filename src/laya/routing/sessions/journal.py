"""SQLite behind one thread, one connection and a lock file: writes are committed in groups, reads answered in between.

In (loop thread): `write` and `read`, which only put into a queue. Out: their `done` on the loop thread, through `post`, many
in one call. Nothing here ever fails a request: what SQLite cannot do now is kept, tried again with growing pauses, and seen in
`status`. The file has one user: builds 3.7.0 to 3.51.2 can corrupt a write-ahead log that two connections reset, so
a second process that finds the lock file held goes on without the disk until it is free.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from laya.config import Config
from laya.routing.sessions.condition import condition
from laya.routing.sessions.database import Database, Unusable, is_lasting

# Writes kept while the disk does not take them: minutes of a busy router's new sessions; then the oldest are given up.
MAX_PENDING = 65_536
MAX_PENDING_BYTES = 64 * 1024 * 1024
# Jobs between the threads; beyond it the loop is told at once that the disk does not keep up.
MAX_INBOX = 65_536
# Writes of one transaction: bounds how long a read waits for it.
GROUP = 1024
# At a stop: how long a disk that fails may go on failing before what is unwritten is given up.
LAST_TRIES_S = 3.0
FIRST_RETRY_S, LAST_RETRY_S = 0.1, 5.0  # pauses between tries while the file is locked, full, read-only or another's

_WRITTEN = object()

Done = Callable[[Any], None]


class Write:
    """One statement. `slot`: a later write of the same slot replaces this one before it reached the disk."""

    __slots__ = ("slot", "sql", "params", "size", "done")

    def __init__(self, slot: Any, sql: str, params: tuple, size: int, done: Done | None) -> None:
        self.slot = slot
        self.sql = sql
        self.params = params
        self.size = size
        self.done = done


class Journal:
    """`flush_s`: how long a write may wait for others; 0 commits at once what has gathered meanwhile.

    `done` of a write gets the number of rows changed, or None when it was given up; of a read its rows, or None when they
    could not be read.
    """

    def __init__(self, path: str, *, flush_s: float, post: Callable[[Callable[[], None]], Any]) -> None:
        self.state = "starting"  # starting | ok | degraded; written by the thread, shown by anybody
        self.reason = ""  # why it is degraded, in one word of `database.kind_of`
        self.errors: dict[str, int] = {}  # kind -> times
        self.dropped = 0  # writes given up
        self._database = Database(path)
        self._flush_s = flush_s
        self._post = post
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # reads, _WRITTEN, and None to stop
        self._outbox: deque[Write] = deque()  # beside the queue, so that a write that may wait does not wake the thread
        self._announced = False  # the thread knows, or is about to, that something is in the outbox
        self._thread = threading.Thread(target=self._run, name="laya-table-writer", daemon=True)
        self._gathered: dict[Any, list[Write]] = {}  # slot -> its writes; only the last one's statement counts
        self._put_bytes = 0  # ever put into the queue, and ever taken out of it: each has one thread that changes it
        self._taken_bytes = 0
        self._bytes = 0
        self._due = 0.0
        self._retry_at = 0.0
        self._pause = FIRST_RETRY_S
        self._stop_by: float | None = None

    # -- loop thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def write(self, slot: Any, sql: str, params: tuple, done: Done | None = None, size: int = 0) -> bool:
        """False when the queue is full: the write is not kept, and `done` is not called."""
        if len(self._outbox) >= MAX_INBOX or self._put_bytes - self._taken_bytes > MAX_PENDING_BYTES:
            self.dropped += 1
            return False
        self._put_bytes += size
        self._outbox.append(Write(slot, sql, params, size, done))
        if not self._announced:
            self._announced = True
            self._inbox.put(_WRITTEN)
        return True

    def read(self, sql: str, params: tuple, done: Done) -> bool:
        """False as in `write`."""
        if self._inbox.qsize() >= MAX_INBOX:
            return False
        self._inbox.put((sql, params, done))
        return True

    def stop(self, timeout_s: float) -> bool:
        """Write what is left and end the thread. True when nothing was lost. The only call that blocks."""
        if self._thread.ident is None:
            return True
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.pending == 0

    @property
    def pending(self) -> int:
        """Writes not yet on disk."""
        return len(self._gathered) + len(self._outbox)

    def status(self) -> dict[str, Any]:
        return condition(self.state, self.pending, self.reason, self.errors, self.dropped)

    # -- the writer thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._open()
        while not self._over():
            self._take()
            now = time.monotonic()
            if self._has_writes() and now >= self._retry_at and (now >= self._due or self._stop_by is not None):
                self._flush()
            elif self.state != "ok" and now >= self._retry_at:
                self._open()
        self._database.close()

    def _over(self) -> bool:
        """Stopping, and everything is on disk or the disk has had its time."""
        return self._stop_by is not None and (not self._has_writes() or time.monotonic() > self._stop_by)

    def _has_writes(self) -> bool:
        return bool(self._gathered or self._outbox)

    def _take(self) -> None:
        """Wait for jobs until something else is due, then take those that are there."""
        due = self._next_due()
        try:
            job = self._inbox.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            for _ in range(GROUP):
                self._accept(job)
                job = self._inbox.get_nowait()
            self._accept(job)
        except queue.Empty:
            pass

    def _next_due(self) -> float | None:
        if self._has_writes():
            return max(0.0 if self._stop_by is not None else self._due, self._retry_at)
        if self._stop_by is not None:
            return 0.0
        return None if self.state == "ok" else self._retry_at

    def _accept(self, job) -> None:
        if job is None:
            self._stop_by = time.monotonic() + LAST_TRIES_S
        elif job is _WRITTEN:
            self._due = time.monotonic() + self._flush_s
        else:
            self._read(*job)

    def _collect(self) -> None:
        """Take writes out of the outbox. A write that comes after the mark is taken back announces itself anew."""
        self._announced = False
        for _ in range(GROUP):
            try:
                self._gather(self._outbox.popleft())
            except IndexError:
                return
        self._announced = True  # more is left: this thread comes back for it by itself

    def _gather(self, write: Write) -> None:
        self._taken_bytes += write.size
        earlier = self._gathered.pop(write.slot, [])  # popped: the order of slots is the order of their last writes
        self._bytes += write.size - sum(w.size for w in earlier)
        earlier = [Write(w.slot, "", (), 0, w.done) for w in earlier if w.done is not None]
        self._gathered[write.slot] = [*earlier, write]
        while len(self._gathered) > MAX_PENDING or self._bytes > MAX_PENDING_BYTES:
            self._give_up(next(iter(self._gathered)))

    def _give_up(self, slot: Any) -> None:
        writes = self._gathered.pop(slot)
        self._bytes -= sum(w.size for w in writes)
        self.dropped += 1
        self._tell([(w.done, None) for w in writes])

    def _read(self, sql: str, params: tuple, done: Done) -> None:
        if self._has_writes() and time.monotonic() >= self._retry_at:
            self._flush()  # what was written before is seen
        rows = None
        if self._database.is_open:
            try:
                rows = self._database.rows(sql, params)
            except Exception as error:
                if is_lasting(error):
                    self._failed(error)
                else:
                    self._count("refused")  # of this question alone, such as text that is no Unicode
        self._tell([(done, rows)])

    def _flush(self) -> None:
        self._collect()
        if not self._database.is_open and not self._open():
            return
        gathered = self._gathered
        try:
            counts = self._database.commit([(writes[-1].sql, writes[-1].params) for writes in gathered.values()])
        except Exception as error:
            if is_lasting(error):
                self._failed(error)
            else:
                self._one_by_one()
            return
        self._gathered = {}
        self._bytes = 0
        self._well()
        self._tell([(w.done, count) for writes, count in zip(gathered.values(), counts, strict=True) for w in writes])

    def _one_by_one(self) -> None:
        """Some write can never be stored (text that is no Unicode, a value too large): it is given up, the others are kept."""
        for slot, writes in list(self._gathered.items()):
            try:
                count = self._database.commit([(writes[-1].sql, writes[-1].params)])[0]
            except Exception as error:
                if is_lasting(error):
                    self._failed(error)
                    return
                self._count("refused")
                self._give_up(slot)
                continue
            del self._gathered[slot]
            self._bytes -= sum(w.size for w in writes)
            self._tell([(w.done, count) for w in writes])
        self._well()

    def _open(self) -> bool:
        try:
            moved = self._database.open()
        except (sqlite3.Error, OSError, Unusable) as error:
            self._failed(error)
            return False
        if moved:
            self._count(moved)
        self._well()
        return True

    def _well(self) -> None:
        self.state, self.reason = "ok", ""
        self._pause, self._retry_at = FIRST_RETRY_S, 0.0

    def _failed(self, error: BaseException) -> None:
        """Keep everything, say so, and try again later; a file that is damaged is left for a new one."""
        kind = self._database.failed(error)
        self._count(kind)
        self.state, self.reason = "degraded", kind
        self._collect()  # what waits in the outbox has a bound of its own there: here the oldest give way
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, LAST_RETRY_S)

    def _count(self, kind: str) -> None:
        self.errors[kind] = self.errors.get(kind, 0) + 1

    def _tell(self, results: list[tuple[Done | None, Any]]) -> None:
        calls = [(done, result) for done, result in results if done is not None]
        if calls:
            try:
                self._post(partial(_call, calls))
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more


def _call(calls: list[tuple[Done, Any]]) -> None:
    """One listener's fault must not keep the others waiting: it is raised when all were told."""
    fault: Exception | None = None
    for done, result in calls:
        try:
            done(result)
        except Exception as error:
            fault = error
    if fault is not None:
        raise fault


def open_journal(config: Config, post: Callable[[Callable[[], None]], Any]) -> Journal | None:
    """The journal of the modes that keep something on disk, started; None for the others."""
    router = config.router
    if router.mode not in ("hybrid", "persistent"):
        return None
    flush_s = router.flush_ms / 1000 if router.mode == "hybrid" else 0.0
    journal = Journal(config.path_of(router.path), flush_s=flush_s, post=post)
    journal.start()
    return journal
