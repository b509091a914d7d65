"""An exchange that is answered by another server: pick a backend, forward, pass the answer through, retry by the table.

In: a routed request with its raw body. Out: the backend's answer, bytes untouched, under our own head. Loop thread only.
"""

from __future__ import annotations

from time import perf_counter, time
from typing import Any

from laya.errors import BadUpstream, LayaError, Unavailable, UpstreamTimeout
from laya.gateway.dispatch import MAX_RETRY_AFTER_S, RETRIABLE_STATUS, Next, retry_after_of
from laya.gateway.exchange import STREAMING, WAITING
from laya.gateway.vigil import WatchedExchange, is_stream
from laya.schema.codec import encode_json
from laya.wire.reply import header_lines, open_request_head
from laya.wire.sse import StreamWatch

# Never forwarded upstream: what belongs to this hop, the client's credentials, our own controls.
REQUEST_DROP = frozenset({
    b"host", b"authorization", b"x-api-key", b"expect", b"x-request-id", b"x-laya-session", b"x-laya-target",
    b"x-laya-timing", b"x-laya-client", b"x-laya-max-prompt-tokens", b"cookie", b"proxy-authorization", b"forwarded",
    b"x-forwarded-for",
})  # fmt: skip
# Never forwarded to the client: names that are ours to set.
RESPONSE_DROP = frozenset({b"x-request-id", b"x-laya-route", b"x-laya-backend", b"server-timing", b"date", b"server"})
# APIs whose streams are whole only with `data: [DONE]`.
ENDS_WITH_DONE = frozenset({"chat", "completions"})
# Failures that tell nothing about the backend's health: our own queue, and a kept connection that it had closed.
SAYS_NOTHING = frozenset({"busy", "stale"})
# Answers that say when to come back.
HINTED_STATUS = frozenset({429, 503})
FRAME_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
# Times that one request waits for the same backend to come back: each is bounded by its pool, and each began with a refused
# connection.
MAX_WAITS = 3
# An event longer than this is passed on in pieces: waiting for its end would cost memory and time.
MAX_PARTIAL = 64 * 1024


class ProxyExchange(WatchedExchange):
    """`target` is where the call is now."""

    call = None
    probe = False  # this request is the one that a half-open breaker lets through
    target = None
    _sse = False
    _partial = b""
    sent_at = 0.0
    _waits = 0
    leg: Any = None  # of `net.lane`, which sent the request

    def __init__(self, gateway, connection, request, body, plan, fields, route, targets) -> None:
        super().__init__(gateway, connection, request, body, plan)
        self.fields = fields
        self.rule = route
        self.route = route.name
        self.targets = targets

    def start(self) -> None:
        self._send(self.targets[0])
        self.gateway.telemetry.route.observe(self.sent_at - self.began)

    def goes_on(self, target) -> bool:
        if target.engine is not None:
            return False
        self._send(target)
        return True

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send(self, target, fresh_only: bool = False) -> None:
        backend = target.backend_state
        self.target = target
        self.backend = backend.name
        if self.state > WAITING:  # `move`, spelled out: every request passes here
            raise RuntimeError("a request was sent after its answer had begun")
        self.state = WAITING
        body = self._body_for(target)
        heads = self._kept_heads()
        head = heads.get(target)
        if head is None:
            head = heads[target] = self._head_for(target)
        if backend.link:
            head += self._for_engine(target)
        length = len(body) if type(body) is bytes else sum(map(len, body))
        head += b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (self.request_id, length)
        if backend.breaker.open_until:  # last, when nothing can go wrong any more before the request is out
            self.probe = backend.breaker.taken(self.gateway.now())
        self.sent_at = perf_counter()
        self.call = backend.pool.submit(self, self.request.method, head, body, fresh_only)

    def _kept_heads(self) -> dict:
        return self.plan.upstream_heads

    def _head_for(self, target) -> bytes:
        """The upstream head but for the two lines that change with each request."""
        request, backend = self.request, target.backend_state
        drop = REQUEST_DROP | backend.header_names | hop_names(request)
        if self.plan.coded:
            drop |= {b"content-encoding"}  # the body was unpacked to be read
        headers = [pair for pair in request.headers if pair[0] not in drop] + backend.headers
        if target.model is not None or self.connection.reads_answers:  # by us: for the client's name of the model, or stages
            headers = [pair for pair in headers if pair[0] != b"accept-encoding"] + [(b"accept-encoding", b"identity")]
        return open_request_head(request.method, backend.target(self.plan.path, request.query), backend.authority, headers)

    def _for_engine(self, target) -> bytes:
        """What an engine process must know to treat the request as if it had come to it: whose it is, and its cap."""
        lines = b"x-laya-client: %b\r\n" % self.client_name().encode()
        cap = self.prompt_cap(target.max_prompt_tokens)
        return lines if cap is None else lines + b"x-laya-max-prompt-tokens: %d\r\n" % cap

    def _body_for(self, target) -> bytes | tuple[bytes | memoryview, ...]:
        """The client's bytes, unless the target wants another model name or the client gave none."""
        fields = self.fields
        name = target.model or (self.model if fields.model is None else None)
        if name is None or name == fields.model:
            return self.body
        return fields.renamed(name)

    def _next(self, failure: str, error: LayaError) -> None:
        """Retry as the table says, or end with `error`."""
        left = self.untried()
        decision = self.next_after(failure, left, retry_ambiguous=self.target.backend_state.settings.retry_ambiguous)
        if decision is Next.STOP:
            if failure != "connect" or not self._wait_for_it():
                self._give_up(error)
            return
        self.gateway.telemetry.retry(failure)
        if decision is Next.SAME_FRESH:
            self._send(self.target, fresh_only=True)
        else:
            self.move_to(left[0], failure)

    def _wait_for_it(self) -> bool:
        """Nothing was sent, and there is nobody else to ask: a backend that comes back by itself is waited for."""
        backend = self.target.backend_state
        if not backend.pool.waits or self._waits >= MAX_WAITS:
            return False
        self._waits += 1
        self.gateway.telemetry.retry("waited")
        self._send(self.target)
        return True

    def _give_up(self, error: LayaError) -> None:
        if self.state is STREAMING:
            self._cut_off(error)
        else:
            self.fail(error, "refused" if error.status == 503 else "upstream_error")

    # -- the backend's answer ------------------------------------------------------------------------------------------

    def on_upstream_head(self, response) -> None:
        status = response.status
        self.target.backend_state.answered(response, self.probe, self.gateway.now)
        self.probe = False
        if status >= 400 and self._try_elsewhere(response):
            return
        self.status = status
        if self.state is STREAMING:
            self._late_head(response)
            return
        lines = response.memo.lines
        if lines is None:
            lines = _lines_of(response)
            if status not in HINTED_STATUS:  # their lines hold a time that runs on
                response.memo.lines = lines
        self._sse = is_stream(response)
        if self._sse:
            self._watch = StreamWatch()
        if self.target.model is not None and self._renames(response, lines):
            return
        body = response.body
        if body is not None and not self._sse:
            self.gateway.telemetry.upstream.observe(perf_counter() - self.sent_at)
            self.answer(status, lines, body, "ok" if status < 400 else outcome_of_status(status))
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
        if self.note:
            self.stand_in = self.target.note
            return super().own_lines()
        lines = self.target.lines + b"x-request-id: " + self.request_id + b"\r\n"
        return lines + self._asked_lines() if self.plan.asks else lines

    def stage_times(self) -> list[tuple[bytes, float]]:
        if not self.sent_at:
            return []
        return [(b"route", self.sent_at - self.began), (b"upstream", perf_counter() - self.sent_at)]

    def _try_elsewhere(self, response) -> bool:
        """An answer that names overload or a fault goes to any other target, one that names the window to a fallback."""
        too_long = response.body is not None and b"context_length_exceeded" in response.body
        if response.status not in RETRIABLE_STATUS and not too_long:
            return False
        left = [target for target in self.untried() if target.note or not too_long]
        failure = "too_long" if too_long else "status"
        if self.next_after(failure, left) is not Next.OTHER:
            return False
        self.call.cancel()
        self.gateway.telemetry.retry("too_long" if too_long else f"status_{response.status}")
        self.move_to(left[0], failure)
        return True

    def on_upstream_data(self, data: bytes) -> None:
        if self._rename is not None:
            if self._collected is not None or self._backlog:
                return self._collect(data)
            if self._sse:
                try:
                    data = self._rename.feed(data)
                except LayaError as error:
                    self._release()
                    self._cut_off(error)
                    return
        if not self.first_at:
            self.first_at = perf_counter()
            if self._sse:
                self.gateway.telemetry.ttft.observe(self.first_at - self.began)
        if self._sse:
            data = self._whole_frames(data)
        if self.connection.write(data):
            self.hold_back()
        if self._sse:
            self._watch.see(data)  # when it is on its way already

    def hold_back(self) -> None:
        """The backend's connection is not read while the client does not read ours."""
        if self.connection.paused and not self._paused:
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
        self.gateway.telemetry.upstream.observe(perf_counter() - self.sent_at)
        if self._rename is not None:
            if self._collected is not None:
                self._answer_renamed()
                return
            self._partial += b"".join(self._backlog) + self._rename.rest()
            self._backlog = ()
        if self._sse:
            self._watch.see(self._partial)
        if self._sse and self.status < 400 and not self._stream_is_whole():
            self._cut_off(BadUpstream("The backend ended its stream before the answer was complete."))
            return
        connection = self.connection
        if self._partial and not connection.write(self._partial):
            return  # the reader was cut off, and this exchange cancelled with it
        self._end("ok" if self.status < 400 else outcome_of_status(self.status))
        connection.finish()

    def _stream_is_whole(self) -> bool:
        return self.plan.api not in ENDS_WITH_DONE or self._watch.done

    def on_upstream_failure(self, failure, message: str) -> None:
        kind = failure.value
        backend = self.target.backend_state
        if self.state is STREAMING and self.has_ended():
            self._whole_but_cut()
            return
        if kind not in SAYS_NOTHING:
            backend.breaker.failed(self.gateway.now(), self.probe)
        elif self.probe:
            backend.breaker.released()
        self.probe = False
        if kind in ("first_byte_timeout", "idle_timeout"):
            error: LayaError = UpstreamTimeout(f"Backend {backend.name}: {message}.")
        elif kind in ("busy", "absent"):
            error = Unavailable(f"Backend {backend.name}: {message}.")
        else:
            error = BadUpstream(f"Backend {backend.name}: {message}.")
        self._next(kind, error)

    def _cut_off(self, error: LayaError) -> None:
        if self.has_ended():
            self._whole_but_cut()
        else:
            super()._cut_off(error)

    def _whole_but_cut(self) -> None:
        """The mark of the end had come: the client has everything, only the connection ended badly."""
        connection = self.connection
        self._end("ok")
        connection.finish()

    def _error_frame(self, error: LayaError) -> bytes:
        return b"data: " + encode_json(error.body()) + b"\n\n" if self._sse else b""

    def _end(self, outcome: str) -> None:
        self.call = None  # the call holds this exchange: without the cycle both are freed at once, not by the collector
        super()._end(outcome)

    # -- the connection's calls ----------------------------------------------------------------------------------------

    def on_writable(self) -> None:
        if self._backlog and not self._pass_backlog():
            return
        if self._paused and self.call is not None:
            self._paused = False
            self.call.resume()

    def _release(self) -> None:
        super()._release()
        if self.call is not None:
            self.call.cancel()
        if self.probe:
            self.probe = False
            self.target.breaker.released()


def _lines_of(response) -> bytes:
    """The header lines that are passed on. 429 and 503 always say when to come back, in seconds and in milliseconds."""
    pairs = [pair for pair in response.headers if pair[0] not in RESPONSE_DROP]
    if response.status not in HINTED_STATUS:
        return header_lines(pairs)
    seconds = retry_after_of(response.fields, time())
    hint = Unavailable("", retry_after=1.0 if seconds is None else min(seconds, MAX_RETRY_AFTER_S))
    return header_lines([pair for pair in pairs if not pair[0].startswith(b"retry-after")] + hint.hint_headers())


def hop_names(request) -> frozenset[bytes]:
    """`connection` and the headers it lists: they are for this hop, and must not take our own with them."""
    listed = request.fields.get(b"connection")
    if listed is None:
        return frozenset()
    return frozenset(name.strip().lower() for name in listed.split(b",")) | {b"connection"}


def outcome_of_status(status: int) -> str:
    return "client_error" if status < 500 and status != 429 else "upstream_error"
