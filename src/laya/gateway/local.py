"""An exchange that is answered by an in-process engine.

In: a `GenerationRequest` from an API's translator. Out: the engine's events, through the API's writer, as JSON or SSE. Loop
thread only; the engine's own thread never calls here.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import msgspec

from laya.errors import ContextLengthExceeded, InvalidRequest, LayaError
from laya.gateway.api import chat, completions, systemone
from laya.gateway.dispatch import Next
from laya.gateway.exchange import DONE, JSON_LINE, STREAMING, WAITING
from laya.gateway.moving import MovingExchange
from laya.schema.fields import READ_ON_LOOP, invalid_body
from laya.schema.generation import Delta, Finished, GenerationRequest, Queued, Started

SSE_LINES = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
# What an in-process engine answers itself; the other APIs need a backend that has them.
LOCAL_APIS: dict[str, Any] = {"chat": chat, "completions": completions, "systemone": systemone}
# Something is sent this often while a stream waits: under every idle limit seen in clients and proxies (15 s and up).
KEEP_ALIVE_S = 5.0


class Writer(Protocol):
    """An API's answer under construction: frames of a stream, or the one body."""

    stream: bool

    def head(self) -> bytes: ...

    def started(self, event: Started, first: int = 0) -> bytes:
        """`first` is the number of the first choice of this prompt."""

    def delta(self, event: Delta) -> bytes:
        """Frames for the stream; for a plain answer the text is kept and b"" returned."""

    def end(self, event: Finished) -> bytes:
        """The last frames of the stream, or the whole plain body."""

    def error(self, error: LayaError) -> bytes: ...

    def keep_alive(self) -> bytes: ...


class LocalExchange(MovingExchange):
    writer: Writer | None = None
    read_on_loop = READ_ON_LOOP // 4  # bytes; building every member costs several times what skipping them does
    _routed_s = 0.0
    _last_sent = 0.0
    _last_delta = 0.0

    def __init__(self, gateway, connection, request, body, plan, route, candidate) -> None:
        super().__init__(gateway, connection, request, body, plan)
        self.rule = route
        self.route = route.name
        self.backend = candidate.name
        self.engine = candidate.engine
        self.stand_in = candidate.note
        self._cap = candidate.max_prompt_tokens
        self._parts: list[Part] = []
        self._open = 0  # parts that have not finished
        self._usage = Finished(prompt_tokens=0, cached_tokens=0, completion_tokens=0)

    def start(self) -> None:
        """Read the request in full, then offer it. Raises LayaError for what can be said at once."""
        api = LOCAL_APIS.get(self.plan.api)
        if api is None:
            raise InvalidRequest(f"The model {self.model!r} does not offer this API.", param="model")
        if self.plan.boundary is not None:
            raise InvalidRequest(f"The model {self.model!r} reads text only: send JSON, not a form with files.")
        client = self.client_name()
        if len(self.body) > self.read_on_loop:
            self.gateway.offload(lambda: self._read(api, client), lambda result: self._have_read(api, result))
        else:
            self._have_read(api, self._read(api, client))

    def _read(self, api, client: str) -> tuple:
        """Any thread: touches nothing that changes."""
        try:
            request = api.decode(self.body)
        except (ValueError, RecursionError) as exc:  # msgspec's errors and UnicodeDecodeError are ValueErrors
            raise invalid_body(exc) from None
        return api.generations_of(request, self.request_id.decode("latin-1"), client, self.engine.card), request

    def _have_read(self, api, result) -> None:
        if self.state is DONE:
            return  # the client left while the body was read in a worker
        if isinstance(result, LayaError):
            self.fail(result)
            return
        generations, request = result
        self.begin(generations, api.writer_of(request, self.model, len(generations), self.engine.card))

    def begin(self, generations: list[GenerationRequest], writer: Writer) -> None:
        """Offer every prompt of the request to the engine."""
        self._routed_s = perf_counter() - self.began
        self.gateway.telemetry.stages["route"].observe(self._routed_s)
        self.writer = writer
        self.move(WAITING)
        self._open = len(generations)
        try:
            for i, generation in enumerate(self._capped(generations)):
                part = Part(self, i * generation.sampling.n)
                self._parts.append(part)
                part.handle = self.engine.submit(generation, part)
        except LayaError as error:
            self.on_failed(error)

    def _capped(self, generations: list[GenerationRequest]) -> list[GenerationRequest]:
        """With the shortest of the prompt caps, which the engine checks when it has counted the tokens."""
        cap = self.prompt_cap(self._cap)
        if cap is None:
            return generations
        return [msgspec.structs.replace(generation, max_prompt_tokens=cap) for generation in generations]

    # -- the engine's events, through the parts ------------------------------------------------------------------------

    def on_queued(self, event: Queued) -> None:
        if self.writer.stream and self.state is WAITING:
            self.move(STREAMING)
            self.status = 200
            self.connection.start(200, SSE_LINES + self.own_lines(), self.writer.head())
            self._last_sent = perf_counter()

    def on_started(self, event: Started, first: int) -> None:
        self._write(self.writer.started(event, first))

    def on_delta(self, event: Delta) -> None:
        now = perf_counter()
        telemetry = self.gateway.telemetry
        if not self.first_at:
            self.first_at = now
            telemetry.ttft.observe(now - self.began)
        else:
            telemetry.inter_token.observe(now - self._last_delta)
        self._last_delta = now
        self._write(self.writer.delta(event))

    def on_finished(self, event: Finished) -> None:
        stages = self.gateway.telemetry.stages
        stages["queue"].observe(event.queue_s)
        stages["prefill"].observe(event.prefill_s)
        stages["decode"].observe(event.decode_s)
        usage = self._usage = Finished(
            prompt_tokens=self._usage.prompt_tokens + event.prompt_tokens,
            cached_tokens=self._usage.cached_tokens + event.cached_tokens,
            completion_tokens=self._usage.completion_tokens + event.completion_tokens,
            queue_s=max(self._usage.queue_s, event.queue_s),
            prefill_s=max(self._usage.prefill_s, event.prefill_s),
            decode_s=max(self._usage.decode_s, event.decode_s),
        )
        self._open -= 1
        if self._open:
            return
        self.tokens = (usage.prompt_tokens, usage.completion_tokens)
        begun = perf_counter()
        last = self.writer.end(usage)
        stages["serialise"].observe(perf_counter() - begun)
        if self.state is STREAMING:
            connection = self.connection
            if connection.write(last):
                self._end("ok")
                connection.finish()
        else:
            self.answer(200, JSON_LINE, last, "ok")

    def on_failed(self, error: LayaError) -> None:
        """One part failed: the others are of no use without it."""
        self._release()
        if self.state is STREAMING:
            self._cut_off(error)
        elif len(self.targets) < 2 or not self._try_elsewhere(error):
            self.fail(error)

    def _try_elsewhere(self, error: LayaError) -> bool:
        """A full queue and a fault go to any other target, a prompt beyond the window to a fallback."""
        too_long = isinstance(error, ContextLengthExceeded)
        if not too_long and error.status not in (429, 503) and error.code != "engine_error":
            return False
        left = [target for target in self.untried() if target.note or not too_long]
        failure = "too_long" if too_long else "refused"
        if self.next_after(failure, left) is not Next.OTHER:
            return False
        self.gateway.telemetry.retry(f"engine_{failure}")
        self.move_to(left[0], failure)
        return True

    def _error_frame(self, error: LayaError) -> bytes:
        return self.writer.error(error)

    def stage_times(self) -> list[tuple[bytes, float]]:
        usage = self._usage
        times = [(b"route", self._routed_s)]
        if usage.completion_tokens:
            times += [(b"queue", usage.queue_s), (b"prefill", usage.prefill_s), (b"decode", usage.decode_s)]
        return times

    # -- the connection's calls ----------------------------------------------------------------------------------------

    def on_tick(self, now: float) -> None:
        if self.state is STREAMING and perf_counter() - self._last_sent > KEEP_ALIVE_S:
            self._write(self.writer.keep_alive())

    def _write(self, data: bytes) -> None:
        if data and self.state is STREAMING:
            self._last_sent = perf_counter()
            self.connection.write(data)

    def _release(self) -> None:
        super()._release()
        for part in self._parts:
            part.cancel()


class Part:
    """One prompt of the request: listens to its generation and shifts its choice numbers into the request's."""

    __slots__ = ("exchange", "first", "handle", "closed")

    def __init__(self, exchange: LocalExchange, first: int) -> None:
        self.exchange = exchange
        self.first = first
        self.handle = None
        self.closed = False

    def cancel(self) -> None:
        if not self.closed and self.handle is not None:
            self.handle.cancel()
        self.closed = True

    def _tell(self, step: Callable[..., None], *arguments: Any) -> None:
        """A mistake of ours ends the exchange, and never leaves its client waiting."""
        try:
            step(*arguments)
        except Exception as fault:
            self.exchange.on_fault(fault)

    def on_queued(self, event: Queued) -> None:
        if not self.closed:
            self._tell(self.exchange.on_queued, event)

    def on_started(self, event: Started) -> None:
        if not self.closed:
            self._tell(self.exchange.on_started, event, self.first)

    def on_delta(self, event: Delta) -> None:
        if not self.closed:
            event = msgspec.structs.replace(event, index=event.index + self.first) if self.first else event
            self._tell(self.exchange.on_delta, event)

    def on_finished(self, event: Finished) -> None:
        if not self.closed:
            self.closed = True
            self._tell(self.exchange.on_finished, event)

    def on_failed(self, error: LayaError) -> None:
        if not self.closed:
            self.closed = True
            self._tell(self.exchange.on_failed, error)
