"""One bounded worker for what is too long for the loop: reading big bodies, unpacking, building big requests.

In: `offload(work, done)` on the loop thread. Out: `done(result)` on the loop thread, in order; a LayaError raised by the
work is its result.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from laya.errors import InternalError, LayaError, Unavailable

# Jobs that may wait. Each holds a body that the ledger has counted, so this bounds time rather than memory.
MAX_JOBS = 256
# How long the loop waits for the interpreter while this thread computes, each time that it gave it away: when it waits,
# and after each 16 events. Python's own 5 ms would make stalls of 10, a tenth of one stalls of 3. Only while a job runs:
# each switch costs some 10 us, and an engine that decodes beside a busy loop lost a tenth more of its speed with it.
SWITCH_S = 0.00002

_usual = sys.getswitchinterval()
_at_work = 0  # threads with a job
_lock = threading.Lock()


def _computing(more: int) -> None:
    global _at_work
    with _lock:
        _at_work += more
        sys.setswitchinterval(SWITCH_S if _at_work else _usual)


class Worker:
    def __init__(self, loop: asyncio.AbstractEventLoop, on_fault: Callable[[BaseException], None]) -> None:
        self._loop = loop
        self._on_fault = on_fault
        self._jobs: queue.Queue = queue.Queue(MAX_JOBS)
        self._thread: threading.Thread | None = None
        self._stopping = False

    def offload(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Raises Unavailable when too much waits already."""
        if self._thread is None:  # most routers never see a big body
            self._thread = threading.Thread(target=self._run, name="laya-worker", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait((work, done))
        except queue.Full:
            raise Unavailable("Too many large requests are being read just now.") from None

    def stop(self) -> None:
        if self._thread is not None:
            self._stopping = True
            try:
                self._jobs.put_nowait((None, None))
            except queue.Full:
                pass  # it looks at `_stopping` after each job
            self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            work, done = self._jobs.get()
            if work is None or self._stopping:
                return
            _computing(1)
            try:
                result = work()
            except LayaError as error:
                result = error
            except BaseException as fault:  # a fault of ours ends this request, not the worker
                self._on_fault(fault)
                result = InternalError("The server made a mistake; it is in its log.")
            _computing(-1)
            try:
                self._loop.call_soon_threadsafe(done, result)
            except RuntimeError:
                return  # the loop is closed: the process is going down
