"""One request's life, from the whole request to the one place where it ends.

In: the front makes one for each request. Out: exactly one answer on the connection and exactly one `finish`, whatever
happens in between. The states are the table below; the picture in docs/architecture.md is drawn from it. Loop thread only.
"""

from __future__ import annotations

import enum
from functools import lru_cache
from time import perf_counter

from laya.errors import LayaError
from laya.gateway.error_forms import error_bytes, error_status

JSON_LINE = b"content-type: application/json\r\n"


class State(enum.IntEnum):
    ACCEPTED = 0  # routed or being read in a worker; nothing was asked of a backend
    WAITING = 1  # a backend or engine works on it; nothing was sent to the client
    STREAMING = 2  # the answer's head has gone out: no retry, no error status any more
    DONE = 3


TRANSITIONS = (  # indexed by state
    frozenset({State.WAITING, State.STREAMING, State.DONE}),
    frozenset({State.WAITING, State.STREAMING, State.DONE}),  # WAITING again: a retry
    frozenset({State.DONE}),
    frozenset(),
)


ACCEPTED, WAITING, STREAMING, DONE = State  # looking a member up through its class costs more than a transition


class Exchange:
    """What every kind of exchange has. Subclasses release their backend in `_release`.

    Defaults stand on the class: an exchange that needs few of them pays for few.
    """

    state = ACCEPTED
    route = ""  # names for metrics and log; "" until known
    backend = ""
    model = ""
    note = ""  # what led to this backend, beside the route's name: a rule of `classify`, an override
    stand_in = ""  # the fallback route whose target this is
    first_at = 0.0  # when the first byte of the answer was written
    status = 0
    tokens: tuple[int, int] | None = None  # prompt, completion

    def __init__(self, gateway, connection, request, body: bytes, plan) -> None:
        self.gateway = gateway
        self.connection = connection
        self.request = request
        self.body = body
        self.plan = plan  # what the gateway made of the head
        before = connection.exchange
        if before is None:
            self.request_id: bytes = plan.request_id or gateway.new_request_id()
            self.began = perf_counter()
        else:  # which held the request's place until it was read: one request, one id, and all of its time
            self.request_id, self.began = before.request_id, before.began

    # -- called by the connection --------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """The client has gone."""
        if self.state is not DONE:
            self._release()
            self._end("client_closed")

    def shut_down(self, error: LayaError) -> None:
        """The process ends and cannot wait."""
        self.end_with(error)

    def on_fault(self, fault: Exception) -> None:
        """A mistake of ours while this exchange was served: a clean 500, or a cut where the answer has begun."""
        error = self.gateway.fault(fault)
        if self.state is DONE and self.connection.exchange is self:
            self.connection.break_off()  # the answer was given, and then the books could not be kept
        else:
            self.end_with(error)

    def end_with(self, error: LayaError) -> None:
        """End with `error` from whatever state: an answer, a cut where one has begun, nothing where it is over."""
        if self.state is DONE:
            return
        self._release()
        if self.state is STREAMING:
            self._cut_off(error)
        else:
            self.fail(error)

    def on_writable(self) -> None:
        """The client reads again."""

    def on_tick(self, now: float) -> None:
        """Four times a second, for what must be sent while nothing happens."""

    # -- whose request it is -------------------------------------------------------------------------------------------

    def client_name(self) -> str:
        """Who shares an engine fairly with others: whom a router of ours names, else the key, else the address."""
        plan = self.plan
        return plan.client or (plan.key.name if plan.key is not None else self.connection.peer)

    def named(self) -> tuple[str, bytes, bytes, str, str, str, str]:
        """Whose request it is and where it went, as `log.who` takes it."""
        plan = self.plan
        return (
            self.client_name(), self.request.method, plan.path[:256], plan.api or "page", self.route, self.backend,
            self.model[:128],
        )  # fmt: skip

    def prompt_cap(self, cap: int | None) -> int | None:
        """The shortest of `cap` (a route's), the key's, and what a router of ours names; None: none is set."""
        plan = self.plan
        caps = [c for c in (cap, plan.cap, plan.key.max_prompt_tokens if plan.key is not None else None) if c]
        return min(caps) if caps else None

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def move(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"an exchange cannot go from {self.state.name} to {state.name}")
        self.state = state

    def answer(self, status: int, lines: bytes, body: bytes, outcome: str) -> None:
        """The whole answer, then the end. `lines` are rendered header lines; our own are added."""
        self.status = status
        if not self.first_at:
            self.first_at = perf_counter()
        lines += self.own_lines()
        connection = self.connection
        if not connection.staged or connection.passes:
            connection.send(status, lines, body)
            self._end(outcome)
            connection.done()
        else:  # what stands between has work to do with the answer, and keeps accounts until the exchange ends
            self._end(outcome)
            connection.reply(status, lines, body)

    def fail(self, error: LayaError, outcome: str | None = None) -> None:
        """An error before anything was sent: its status and body are the answer."""
        lines = JSON_LINE + b"".join(b"%b: %b\r\n" % pair for pair in error.hint_headers())
        path = self.plan.path
        self.answer(error_status(path, error), lines, error_bytes(path, error), outcome or outcome_of(error))

    def own_lines(self) -> bytes:
        """x-request-id, route and backend, and what the client asked for."""
        lines = b"x-request-id: " + self.request_id + b"\r\n"
        if self.route:
            lines += b"x-laya-route: " + self._route_value() + b"\r\n"
        if self.backend:
            lines += b"x-laya-backend: " + header_value(self.backend) + b"\r\n"
        return lines + self._asked_lines() if self.plan.asks else lines

    def _route_value(self) -> bytes:
        if self.note or self.stand_in:  # words that differ from request to request: not for the memo
            return header_value.__wrapped__(self.route + self.note + self.stand_in)
        return header_value(self.route)

    def _asked_lines(self) -> bytes:
        """What is sent only to some: stage times, permission for a page's origin, where a key's limits stand."""
        fields, key = self.request.fields, self.plan.key
        lines = b"" if key is None else self.gateway.staging.metering.lines(key)
        if b"x-laya-timing" in fields:
            lines += b"server-timing: " + self._server_timing() + b"\r\n"
        if b"origin" in fields:
            lines += b"".join(b"%b: %b\r\n" % pair for pair in self.gateway.access.cors_headers(fields[b"origin"]))
        return lines

    def _server_timing(self) -> bytes:
        """Stages so far in milliseconds, as the Server-Timing header wants them."""
        stages = [*self.stage_times(), (b"total", perf_counter() - self.began)]
        return b", ".join(b"%b;dur=%.3f" % (name, seconds * 1000) for name, seconds in stages)

    def stage_times(self) -> list[tuple[bytes, float]]:
        """(stage, seconds) of those that are over."""
        return []

    def _end(self, outcome: str) -> None:
        """The one place where an exchange ends."""
        if self.state is DONE:  # `move`, spelled out: every request passes here
            raise RuntimeError("an exchange ended twice")
        self.state = DONE
        self.gateway.finished(self, outcome)

    def _cut_off(self, error: LayaError) -> None:
        """The answer was begun and cannot be finished: say so where the form allows it, and never end it cleanly."""
        connection = self.connection
        last = self._error_frame(error)
        self._end(outcome_of(error))
        connection.break_off(last)

    def _error_frame(self, error: LayaError) -> bytes:
        """The error in the form of the begun answer; b"" where there is none."""
        return b""

    def _release(self) -> None:
        """Give back what a backend or engine holds for this exchange."""


def outcome_of(error: LayaError) -> str:
    """The metric's outcome for an error of ours."""
    if error.code == "engine_error":
        return "engine_error"
    if error.status in (429, 503):
        return "refused"
    return "client_error" if error.status < 500 else "upstream_error"


@lru_cache(1024)  # names of routes and backends: those of the configuration
def header_value(text: str) -> bytes:
    """A name as a header value: what is not visible ASCII is percent-encoded."""
    if text.isascii() and text.isprintable():
        return text.encode()
    return b"".join(b"%c" % byte if 0x21 <= byte <= 0x7E else b"%%%02X" % byte for byte in text.encode("utf-8", "replace"))
