"""The work of strangers: stages of the user's own, which may hang.

In: `offload(work, done, limit_s, late)` on the loop thread. Out: `done(result)` on the loop thread, in order; where the work
takes longer than its limit, `done(late())` at once: its thread is left to itself, and another one goes on with the rest. No
thread of Python can be ended from outside, so only so many may hang; beyond that no more work is taken until one returns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from laya.errors import LayaError, Unavailable
from laya.net.worker import MAX_JOBS, Worker

# Threads that hang: each keeps a request's body.
MAX_HANGING = 8
Work, Done, Late = Callable[[], Any], Callable[[Any], None], Callable[[], LayaError]


class Job:
    __slots__ = ("work", "done", "limit_s", "late", "timer", "is_late")

    def __init__(self, work: Work, done: Done, limit_s: float, late: Late) -> None:
        self.work = work
        self.done = done
        self.limit_s = limit_s
        self.late = late
        self.timer: asyncio.TimerHandle | None = None
        self.is_late = False


class GuestWorker:
    def __init__(self, loop: asyncio.AbstractEventLoop, on_fault: Callable[[BaseException], None]) -> None:
        self.hanging = 0
        self._loop = loop
        self._on_fault = on_fault
        self._worker: Worker | None = None
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None

    def offload(self, work: Work, done: Done, limit_s: float, late: Late) -> None:
        """The limit begins when the work does. Raises Unavailable when too much waits, or hangs."""
        if self.hanging >= MAX_HANGING:
            raise Unavailable("The stages of this server hang.")
        if len(self._waiting) >= MAX_JOBS:
            raise Unavailable("Too many requests wait for the stages of this server.")
        self._waiting.append(Job(work, done, limit_s, late))
        if self._running is None:
            self._next()

    def stop(self) -> None:
        """What runs is not waited for: its thread ends with the process."""
        self._waiting.clear()
        if self._worker is not None and self._running is None:
            self._worker.stop()

    def _next(self) -> None:
        job = self._running = self._waiting.popleft() if self._waiting else None
        if job is None:
            return
        worker = self._worker = self._worker or Worker(self._loop, self._on_fault)
        job.timer = self._loop.call_later(job.limit_s, self._give_up, job)
        worker.offload(job.work, lambda result: self._returned(job, worker, result))

    def _returned(self, job: Job, worker: Worker, result: Any) -> None:
        if job.is_late:
            self.hanging -= 1
            worker.stop()  # it has nothing to do, and ends at once
            return
        job.timer.cancel()
        self._end(job, result)

    def _give_up(self, job: Job) -> None:
        job.is_late = True
        self.hanging += 1
        self._worker = None
        self._end(job, job.late())

    def _end(self, job: Job, result: Any) -> None:
        try:
            job.done(result)
        finally:
            self._next()
