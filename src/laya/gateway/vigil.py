"""Signs of life for the client of a stream that a silent backend answers.

In: the connection's ticks, four times a second. Out: the stream's head where the backend has not begun after a while, and
between its frames something real every few seconds. A stream that flows pays nothing: when bytes last came is read off the
upstream connection's own deadline. Loop thread only.
"""

from __future__ import annotations

from typing import Any

from laya.errors import BadUpstream, LayaError
from laya.gateway.api.chat_answer import read_error
from laya.gateway.exchange import STREAMING, WAITING
from laya.gateway.local import KEEP_ALIVE_S, SSE_LINES
from laya.gateway.rename import RenamingExchange
from laya.wire.sse import COMMENT, StreamWatch

# A stream is begun without the backend's word after so long: clients want a sign of life, and past it hardly any error comes
# that another backend could mend (those come at once).
HEAD_WAIT_S = 5.0
# Responses is not among them: no event can be made before the answer has its id, its clients' idle clock counts events only
# (300 s), and before a head they wait without a limit.
BEGUN_EARLY = frozenset({"chat", "completions", "messages"})
# Of an error's body that comes when the stream has begun: its words are all that can still be told.
MAX_REFUSAL = 64 * 1024
BODILESS = (204, 304)


class WatchedExchange(RenamingExchange):
    """`_spoke_at` is the clock's time of our own last sign of life."""

    _watch: StreamWatch | None = None  # of a stream
    _spoke_at = 0.0
    _waits_since = 0.0

    def on_tick(self, now: float) -> None:
        if self.state is STREAMING:
            if self._sse:
                self._speak(now)
        elif self.state is WAITING and self.fields.stream and self.plan.api in BEGUN_EARLY:
            if not self._waits_since:
                self._waits_since = now
            if now - self._waits_since > HEAD_WAIT_S and not self.may_move() and self.may_begin():
                self._begin_early(now)

    def may_move(self) -> bool:
        """It is between two backends, or not even connected with this one: the next may be asked still."""
        return self._timer is not None or self.call is None or (self.call.connection is None and len(self.targets) > 1)

    def may_begin(self) -> bool:
        """Nothing but an answer can come of the call that is under way."""
        return True

    def has_ended(self) -> bool:
        """The last event of the stream has gone to the client: whatever comes of the connection, nothing may follow."""
        return self._watch is not None and self._watch.done

    def sign_of_life(self) -> bytes:
        """What may stand between two frames, and is real for the API's clients."""
        return COMMENT

    def _speak(self, now: float) -> None:
        watch, call = self._watch, self.call
        if call is None or call.connection is None or self.connection.paused or self.has_ended() or not watch.at_boundary:
            return
        if now - max(call.connection.heard_at, self._spoke_at) > KEEP_ALIVE_S:
            self._spoke_at = now
            self.connection.write(self.sign_of_life())

    # -- a stream that was begun before the backend had said anything ----------------------------------------------------

    def _begin_early(self, now: float) -> None:
        self.move(STREAMING)
        self.status = 200
        self._sse = True
        self._watch = StreamWatch()
        self._spoke_at = now
        self.connection.start(200, SSE_LINES + self.own_lines(), self.sign_of_life())

    def _late_head(self, response) -> None:
        """The backend's head, when the client has one already."""
        if response.status >= 400 or not is_stream(response):
            self._told_late(response)
            return
        if self.target.model is not None and self._renames(response, b""):
            return
        if response.body is not None:
            self.on_upstream_data(response.body)
            if self.state is STREAMING:
                self.on_upstream_end()

    def _told_late(self, response) -> None:
        refusal = LateRefusal(self, response.status)
        if response.body is None:
            self.call.listener = refusal
        else:
            refusal.on_upstream_data(response.body)
            refusal.on_upstream_end()


class LateRefusal:
    """Listens in an exchange's place to an answer that is no stream, and ends the begun stream with its words."""

    def __init__(self, exchange: Any, status: int) -> None:
        self._exchange = exchange
        self._status = status
        self._body = b""

    def on_upstream_data(self, data: bytes) -> None:
        self._body = (self._body + data)[:MAX_REFUSAL]

    def on_upstream_end(self) -> None:
        error: LayaError = BadUpstream("The backend answered a request for a stream without one.")
        if self._status >= 400:
            error = read_error(self._status, self._body)
        self._exchange.end_with(error)

    def on_upstream_failure(self, failure, message: str) -> None:
        self.on_upstream_end()

    def on_fault(self, fault: Exception) -> None:
        self._exchange.on_fault(fault)


def is_stream(response) -> bool:
    """The answer is server-sent events that can be read, and has a body to hold them."""
    fields = response.fields
    return (
        fields.get(b"content-type", b"").lower().startswith(b"text/event-stream") and response.status not in BODILESS
        and fields.get(b"content-encoding", b"identity") == b"identity"
    )  # fmt: skip
