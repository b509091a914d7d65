"""One request of a route with stages, or of a key: its answer passes here on the way to the client.

In: what the exchange within writes. Out: the same through the filters (the user's own stages, then the restorer) to the
client's connection, with the stages' header lines, and the key's tokens counted. JSON answers are read whole, event streams as
they come, everything else passes untouched. Large pieces and slow filters go through the preparation worker, in order. Loop
thread only, but for the filters' work.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from laya.errors import BadUpstream, LayaError, PayloadTooLarge
from laya.gateway.between import Between
from laya.gateway.error_forms import error_bytes, error_status
from laya.gateway.exchange import JSON_LINE
from laya.schema.codec import encode_json
from laya.wire.sse import frame

# Filters read some 20 MB/s at worst: this much is under a millisecond.
FILTER_ON_LOOP = 16 * 1024
# A JSON answer that is read whole; far above what any window gives.
MAX_WHOLE = 64 * 1024 * 1024
# Pieces of a stream that wait for a slow filter before its source is paused.
MAX_WAITING = 64


class Filter(Protocol):
    """`slow`: its work belongs in the worker whatever the size."""

    slow: bool

    def whole(self, body: bytes) -> bytes:
        """A JSON answer. Raises LayaError to end the request with it."""

    def feed(self, data: bytes) -> bytes:
        """A piece of an event stream, in any chunking."""

    def finish(self) -> bytes:
        """The stream has ended: what was held back."""


class Form(enum.IntEnum):
    NONE = 0  # nothing was sent yet
    PASSED = 1  # piece by piece, untouched
    STREAM = 2  # events, filtered as they come
    WHOLE = 3  # kept until it is whole


NONE, PASSED, STREAM, WHOLE = Form
UNREAD = object()


class Staged(Between):
    """`lines` are header lines that the stages add, `filters` what changes the answer, `ticket` what a key's limits gave."""

    __slots__ = (
        "redacted", "prepared", "prompt_tokens", "lines", "filters", "counts", "cache", "question", "ticket", "over", "limit_s",
        "_form", "_head", "_parts", "_size", "_jobs", "_begun",
    )  # fmt: skip

    def __init__(self, gateway, outer, request, body: bytes, plan) -> None:
        super().__init__(gateway, outer, request, body, plan)
        self.redacted = False
        self.prepared = False  # what all routes want was done
        self.prompt_tokens = 0  # estimated, where the key has a cap
        self.lines = b""
        self.filters: tuple[Filter, ...] = ()
        self.counts: dict[str, int] | None = None  # what was redacted, by kind
        self.cache = ""  # hit, miss or bypass; "" where the route has no cache
        self.question: Any = UNREAD  # of the cache; None: it passes by
        self.ticket: Any = None
        self.over = False
        self.limit_s = 0.0  # how long a slow filter may take
        self._form = NONE
        self._begun = False
        self._head: tuple[int, bytes] = (0, b"")
        self._parts: list[bytes] = []
        self._size = 0
        self._jobs: deque[tuple[Callable, Callable]] | None = None

    def ready_for(self, route) -> bool:
        """Everything that this route wants was done to the request."""
        return self.prepared and (self.redacted or not route.redact)

    def cached_as(self, word: str) -> None:
        """What the cache did for it: hit, miss or bypass."""
        self.cache = word
        self.lines = b"x-laya-cache: %b\r\n" % word.encode()
        if word == "hit" and self.ticket is not None:
            self.ticket.waive()

    def log_note(self) -> bytes:
        """Members of the access line: `cache`, and how much was redacted of each kind."""
        note = b',"cache":"%b"' % self.cache.encode() if self.cache else b""
        return note + b',"redacted":' + encode_json(self.counts) if self.counts else note

    # -- the exchange within answers -----------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self.outer.paused or (self._jobs is not None and len(self._jobs) > MAX_WAITING)

    @property
    def passes(self) -> bool:
        """Nothing is to be done with a whole answer."""
        return not (self.filters or self.over or self.outer.staged) and self.ticket is None

    def send(self, status: int, lines: bytes, body: bytes) -> None:
        self.outer.send(status, lines + self.lines, body)

    def done(self) -> None:
        self.close()
        self.outer.done()

    def reply(self, status: int, lines: bytes, body: bytes) -> None:
        if self.over:
            return
        if self.ticket is not None:
            self.ticket.answered(status)
            self.ticket.see(body)
        if body and self.filters and self._reads(lines):
            self._work(len(body), lambda: self._whole(body), lambda made: self._reply(status, lines, made))
        else:
            self._reply(status, lines, body)

    def start(self, status: int, lines: bytes, first: bytes = b"") -> None:
        if self.ticket is not None:
            self.ticket.answered(status)
            self.ticket.see(first)
        reads = not self.over and bool(self.filters) and self._reads(lines)
        if self.over:
            return
        if not reads:
            self._form = PASSED
            self.outer.start(status, lines + self.lines, first)
        elif kind_of(lines).startswith(b"text/event-stream"):
            self._form, self._head = STREAM, (status, lines)
            self._work(len(first), lambda: self._feed(first), self._start)
        else:
            self._form, self._head, self._parts, self._size = WHOLE, (status, lines), [first], len(first)

    def start_sized(self, status: int, lines: bytes, length: int) -> None:
        if self.ticket is not None:
            self.ticket.answered(status)
        reads = not self.over and bool(self.filters) and self._reads(lines)
        if self.over:
            return
        if reads:
            self._form, self._head = WHOLE, (status, lines)
        else:
            self._form = PASSED
            self.outer.start_sized(status, lines + self.lines, length)

    def write(self, data: bytes) -> bool:
        if self.over:
            return False
        if self.ticket is not None:
            self.ticket.see(data)
        if self._form is PASSED:
            return self.outer.write(data)
        if self._form is STREAM:
            self._work(len(data), lambda: self._feed(data), self.outer.write)
            return not self.over
        self._parts.append(data)
        self._size += len(data)
        if self._size > MAX_WHOLE:
            self._abort(PayloadTooLarge(f"The answer is larger than {MAX_WHOLE} bytes."))
        return not self.over

    def finish(self) -> None:
        if self.over:
            return
        if self._form is PASSED:
            self.close()
            self.outer.finish()
        elif self._form is STREAM:
            self._work(0, self._rest, self._finish)
        else:
            parts, self._parts = self._parts, []
            status, lines = self._head
            self._work(self._size, lambda: self._whole(b"".join(parts)), lambda made: self._reply(status, lines, made))

    def break_off(self, last: bytes = b"") -> None:
        if self.over:
            return
        if self._form is WHOLE:
            self._refuse(BadUpstream("The answer ended before it was complete."))
        elif self._form is STREAM:
            self._work(0, self._rest, lambda rest: self._break_off(rest + last))
        else:
            self._break_off(last)

    # -- the client's connection ---------------------------------------------------------------------------------------

    def cancel(self) -> None:
        exchange = self.exchange
        self.close()
        if exchange is not None:
            exchange.cancel()

    def end_with(self, error: LayaError) -> None:
        if not self.over:
            super().end_with(error)

    def shut_down(self, error: LayaError) -> None:
        if self._jobs:
            self._abort(error)  # the exchange may be over while its last pieces are still worked on
        else:
            self.end_with(error)

    def close(self) -> None:
        """Once: the request is over, also for its key. Exchange and connection let go of each other."""
        exchange, self.exchange = self.exchange, None
        self.over = True
        self._jobs = None
        ticket, self.ticket = self.ticket, None
        if ticket is not None:
            ticket.settle(exchange.tokens if exchange is not None else None)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _reads(self, lines: bytes) -> bool:
        """The filters can read this answer: JSON or events, in no content coding."""
        kind = kind_of(lines)
        if not kind.startswith((b"application/json", b"text/event-stream")):
            return False
        if value_of(lines, b"content-encoding") in (b"", b"identity"):
            return True
        self._abort(BadUpstream("The backend answered in a content coding that was not asked for."))
        return False

    def _whole(self, body: bytes) -> bytes:
        for step in self.filters:
            body = step.whole(body)
        return body

    def _feed(self, data: bytes) -> bytes:
        for step in self.filters:
            data = step.feed(data)
        return data

    def _rest(self) -> bytes:
        rest = b""
        for step in self.filters:
            rest = (step.feed(rest) if rest else b"") + step.finish()
        return rest

    def _start(self, first: bytes) -> None:
        self._begun = True
        status, lines = self._head
        self.outer.start(status, lines + self.lines, first)

    def _reply(self, status: int, lines: bytes, body: bytes) -> None:
        if not self.over:
            self.close()
            self.outer.reply(status, lines + self.lines, body)

    def _finish(self, rest: bytes) -> None:
        if not rest or self.outer.write(rest):
            self.close()
            self.outer.finish()

    def _break_off(self, last: bytes) -> None:
        self.close()
        self.outer.break_off(last)

    def _refuse(self, error: LayaError) -> None:
        path = self.plan.path
        hints = b"".join(b"%b: %b\r\n" % pair for pair in error.hint_headers())
        self._reply(error_status(path, error), JSON_LINE + hints, error_bytes(path, error))

    def _abort(self, error: LayaError) -> None:
        """A stage failed: the request ends with `error`, whatever the exchange within thinks of it."""
        if self.over:
            return
        exchange, begun = self.exchange, self._begun or self._form is PASSED
        self.close()
        if isinstance(exchange, Between):
            exchange.cancel()  # a generation that others may wait for
        elif exchange is not None:
            exchange.end_with(error)  # what it writes for it is dropped: its pieces may still be under way
        body = error_bytes(self.plan.path, error)
        if begun:
            self.outer.break_off(frame(body, b"error" if self.plan.api in ("messages", "responses") else None))
        else:
            hints = b"".join(b"%b: %b\r\n" % pair for pair in error.hint_headers())
            self.outer.reply(error_status(self.plan.path, error), JSON_LINE + hints + self.lines, body)

    # -- work in order -------------------------------------------------------------------------------------------------

    def _work(self, size: int, work: Callable[[], bytes], then: Callable[[bytes], Any]) -> None:
        """`then(work())`: at once where that is short and nothing waits before it, else in the worker, in order."""
        if self._jobs is None and size <= FILTER_ON_LOOP and not any(step.slow for step in self.filters):
            try:
                made = work()
            except LayaError as error:
                self._abort(error)
            except Exception as fault:
                self._abort(self.gateway.fault(fault))
            else:
                then(made)
            return
        if self._jobs is None:
            self._jobs = deque()
        self._jobs.append((work, then))
        if len(self._jobs) == 1:
            self._next()

    def _next(self) -> None:
        work = self._jobs[0][0]
        try:
            if any(step.slow for step in self.filters):
                self.gateway.offload_guest(work, self._worked, self.limit_s, self._late)
            else:
                self.gateway.offload(work, self._worked)
        except LayaError as error:
            self._abort(error)

    def _late(self) -> LayaError:
        """What this ends with when its slow filter takes longer than it may."""
        slow = [step for step in self.filters if step.slow]
        return next((step for step in slow if step.at_work), slow[0]).stage.late(self.limit_s)

    def _worked(self, made: bytes | LayaError) -> None:
        if self.over:
            return
        if isinstance(made, LayaError):
            self._abort(made)
            return
        _, then = self._jobs.popleft()
        then(made)
        if self.over:
            return
        if self._jobs:
            self._next()
        else:
            self._jobs = None
            self.on_writable()


def value_of(lines: bytes, name: bytes) -> bytes:
    """A header's value in rendered lines, in lower case; b"" where it is not there."""
    start = 0 if lines.startswith(name + b": ") else lines.find(b"\n" + name + b": ") + 1
    if start == 0 and not lines.startswith(name + b": "):
        return b""
    start += len(name) + 2
    return lines[start : lines.find(b"\r\n", start)].strip().lower()


def kind_of(lines: bytes) -> bytes:
    return value_of(lines, b"content-type")
