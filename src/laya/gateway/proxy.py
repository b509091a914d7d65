"""An exchange that is answered by another server: pick a backend, forward, pass the answer through, retry by the table.

In: a routed request with its raw body. Out: the backend's answer, bytes untouched, under our own head. Loop thread only.
"""

from __future__ import annotations

from time import perf_counter

from laya.errors import BadUpstream, LayaError, Unavailable, UpstreamTimeout
from laya.gateway.dispatch import RETRIABLE_STATUS, Attempts, Next, after_failure
from laya.gateway.exchange import STREAMING, WAITING, Exchange
from laya.schema.codec import encode_json, encode_members
from laya.wire.reply import header_lines, open_request_head

# Never forwarded upstream: what belongs to this hop, the client's credentials, our own controls.
REQUEST_DROP = frozenset({
    b"host", b"authorization", b"x-api-key", b"expect", b"x-request-id", b"x-laya-session", b"x-laya-target",
    b"x-laya-timing", b"cookie", b"proxy-authorization", b"forwarded", b"x-forwarded-for",
})  # fmt: skip
# Never forwarded to the client: names that are ours to set.
RESPONSE_DROP = frozenset({b"x-request-id", b"x-laya-route", b"x-laya-backend", b"server-timing", b"date", b"server"})
# How much of a stream's end is kept to see whether it was whole: `data: [DONE]` with blanks and line ends.
ENDS_WITH_DONE = frozenset({"chat", "completions"})
TAIL_BYTES = 64
FRAME_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
# An event longer than this is passed on in pieces: waiting for its end would cost memory and time.
MAX_PARTIAL = 64 * 1024


class ProxyExchange(Exchange):
    """`targets` are what the route allows, best first; `_target` is where the call is now."""

    attempts: Attempts | None = None  # made at the first failure: most requests have none
    call = None
    _target = None
    _sse = False
    _tail = b""
    _partial = b""
    _paused = False
    _sent_at = 0.0

    def __init__(self, gateway, connection, request, body, plan, fields, route, targets) -> None:
        super().__init__(gateway, connection, request, body, plan)
        self.fields = fields
        self.route = route.name
        self.targets = targets

    def start(self) -> None:
        self._send(self.targets[0])
        self.gateway.telemetry.stages["route"].observe(self._sent_at - self.began)

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send(self, target, fresh_only: bool = False) -> None:
        backend = target.backend_state
        self._target = target
        self.backend = backend.name
        if self.state > WAITING:  # `move`, spelled out: every request passes here
            raise RuntimeError("a request was sent after its answer had begun")
        self.state = WAITING
        if backend.breaker.open_until:
            backend.breaker.taken(self.gateway.now())
        body = self._body_for(target)
        heads = self.plan.upstream_heads
        head = heads.get(backend)
        if head is None:
            head = heads[backend] = self._head_for(backend)
        head += b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (self.request_id, len(body))
        self._sent_at = perf_counter()
        self.call = backend.pool.submit(self, self.request.method, head, body, fresh_only)

    def _head_for(self, backend) -> bytes:
        """The upstream head but for the two lines that change with each request."""
        request = self.request
        drop = REQUEST_DROP | backend.header_names
        if self.plan.coded:
            drop |= {b"content-encoding"}  # the body was unpacked to be read
        headers = [pair for pair in request.headers if pair[0] not in drop] + backend.headers
        return open_request_head(request.method, backend.target(request), backend.authority, headers)

    def _body_for(self, target) -> bytes:
        """The client's bytes, unless the target wants another model name or the client gave none."""
        fields = self.fields
        name = target.model or (self.model if fields.model is None else None)
        if name is None or name == fields.model:
            return self.body
        return encode_members({**fields.members, "model": name})

    def _next(self, failure: str, error: LayaError) -> None:
        """Retry as the table says, or end with `error`."""
        untried = self._untried()
        decision = after_failure(
            failure, self.attempts, sent_to_client=self.state is STREAMING, candidates_left=bool(untried),
            retry_ambiguous=self._target.backend_state.settings.retry_ambiguous,
        )  # fmt: skip
        if decision is Next.STOP:
            self._give_up(error)
            return
        self.gateway.telemetry.retry(failure)
        if decision is Next.SAME_FRESH:
            self._send(self._target, fresh_only=True)
        else:
            self._send(untried[0])

    def _untried(self) -> list:
        if self.attempts is None:
            self.attempts = Attempts()
        self.attempts.tried.append(self.backend)
        return [t for t in self.targets if t.backend_state.name not in self.attempts.tried]

    def _give_up(self, error: LayaError) -> None:
        if self.state is STREAMING:
            self._cut_off(error)
        else:
            self.fail(error, "refused" if error.status == 503 else "upstream_error")

    # -- the backend's answer ------------------------------------------------------------------------------------------

    def on_upstream_head(self, response) -> None:
        status = response.status
        self._target.backend_state.answered(status, self.gateway.now)
        if status in RETRIABLE_STATUS and self._try_elsewhere(status):
            return
        self.status = status
        lines = response.memo.lines
        if lines is None:
            lines = response.memo.lines = header_lines([pair for pair in response.headers if pair[0] not in RESPONSE_DROP])
        self._sse = response.fields.get(b"content-type", b"").startswith(b"text/event-stream")
        body = response.body
        if body is not None and not self._sse:
            self.gateway.telemetry.stages["upstream"].observe(perf_counter() - self._sent_at)
            self.answer(status, lines, body, "ok" if status < 400 else _outcome(status))
            return
        self.move(STREAMING)
        lines += self.own_lines()
        if response.content_length is not None and not self._sse:
            self.connection.start_sized(status, lines, response.content_length)
        else:
            self.connection.start(status, lines)
        if body is not None:
            self.on_upstream_data(body)
            if self.state is STREAMING:
                self.on_upstream_end()

    def own_lines(self) -> bytes:
        lines = self._target.lines + b"x-request-id: " + self.request_id + b"\r\n"
        return lines + self._asked_lines() if self.plan.asks else lines

    def stage_times(self) -> list[tuple[bytes, float]]:
        if not self._sent_at:
            return []
        return [(b"route", self._sent_at - self.began), (b"upstream", perf_counter() - self._sent_at)]

    def _try_elsewhere(self, status: int) -> bool:
        untried = self._untried()
        if after_failure("status", self.attempts, sent_to_client=False, candidates_left=bool(untried)) is not Next.OTHER:
            return False
        self.call.cancel()
        self.gateway.telemetry.retry(f"status_{status}")
        self._send(untried[0])
        return True

    def on_upstream_data(self, data: bytes) -> None:
        if not self.first_at:
            self.first_at = perf_counter()
            if self._sse:
                self.gateway.telemetry.ttft.observe(self.first_at - self.began)
        if self._sse:
            data = self._whole_frames(data)
            self._tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self._tail + data)[-TAIL_BYTES:]
        connection = self.connection
        if connection.write(data) and connection.paused and not self._paused:
            self._paused = True
            self.call.pause()

    def _whole_frames(self, data: bytes) -> bytes:
        """What may go out: up to the last frame border, so that an error frame can always follow cleanly."""
        if self._partial:
            data = self._partial + data
            self._partial = b""
        if data.endswith(FRAME_ENDS):
            return data
        cut = max(data.rfind(end) + len(end) if end in data else 0 for end in FRAME_ENDS)
        if len(data) - cut > MAX_PARTIAL:
            return data
        self._partial = data[cut:]
        return data[:cut]

    def on_upstream_end(self) -> None:
        self.gateway.telemetry.stages["upstream"].observe(perf_counter() - self._sent_at)
        self._tail = (self._tail + self._partial)[-TAIL_BYTES:]
        if self._sse and self.status < 400 and not self._stream_is_whole():
            self._cut_off(BadUpstream("The backend ended its stream before the answer was complete."))
            return
        connection = self.connection
        connection.write(self._partial)
        self._end("ok" if self.status < 400 else _outcome(self.status))
        connection.finish()

    def _stream_is_whole(self) -> bool:
        return self.plan.api not in ENDS_WITH_DONE or b"[DONE]" in self._tail

    def on_upstream_failure(self, failure, message: str) -> None:
        kind = failure.value
        backend = self._target.backend_state
        if kind != "busy":
            backend.breaker.failed(self.gateway.now())
        if kind in ("first_byte_timeout", "idle_timeout"):
            error: LayaError = UpstreamTimeout(f"Backend {backend.name}: {message}.")
        elif kind == "busy":
            error = Unavailable(f"Backend {backend.name}: {message}.")
        else:
            error = BadUpstream(f"Backend {backend.name}: {message}.")
        self._next(kind, error)

    def _error_frame(self, error: LayaError) -> bytes:
        return b"data: " + encode_json(error.body()) + b"\n\n" if self._sse else b""

    def _end(self, outcome: str) -> None:
        self.call = None  # the call holds this exchange: without the cycle both are freed at once, not by the collector
        super()._end(outcome)

    # -- the connection's calls ----------------------------------------------------------------------------------------

    def on_writable(self) -> None:
        if self._paused:
            self._paused = False
            self.call.resume()

    def _release(self) -> None:
        if self.call is not None:
            self.call.cancel()
            self._target.breaker.released()


def _outcome(status: int) -> str:
    return "client_error" if status < 500 and status != 429 else "upstream_error"
