"""A Responses or Messages request that another server answers: passed on where it has the API, translated where it has chat.

In: a routed request with its raw body. Out: the backend's answer untouched, or its chat answer as the API's own. Whether a
backend has an API is configured (`apis`) or found out: 404, 405 or 501 sends the same request again, translated, and when
that is answered the backend is remembered as one without the API. Loop thread only.
"""

from __future__ import annotations

import re
from time import perf_counter, time

from laya.errors import BadUpstream, InvalidRequest, LayaError, PayloadTooLarge
from laya.gateway.api.answer import Answer
from laya.gateway.api.chat_answer import ChatAnswer, read_error
from laya.gateway.api.pieces import Piece
from laya.gateway.dispatch import MAX_RETRY_AFTER_S, retry_after_of
from laya.gateway.exchange import DONE, JSON_LINE, STREAMING, WAITING
from laya.gateway.local import KEEP_ALIVE_S, SSE_LINES
from laya.gateway.native_proxy import NativeProxy
from laya.gateway.proxy import HINTED_STATUS, REQUEST_DROP, ProxyExchange, hop_names, outcome_of_status
from laya.gateway.token_count import TokenCount
from laya.gateway.translation import COUNTS, WORK_ON_LOOP, Translation
from laya.gateway.vigil import HEAD_WAIT_S, is_stream
from laya.schema.codec import encode_members
from laya.wire.reply import open_request_head

# What a server says of a path that it does not know.
LACKING = frozenset({404, 405, 501})
# The largest plain answer that is read to be translated; far above what any window gives.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
# Bytes of JSON to a token: English text has about four, code and other scripts fewer. For counting where nobody can count.
BYTES_PER_TOKEN = 3.5
# What the client's head says for its own API and hop only.
_ITS_OWN = (b"anthropic-", b"x-stainless-", b"openai-", b"x-codex-")
_SAID_ANEW = frozenset({b"accept", b"accept-encoding", b"content-type", b"content-encoding"})
# How servers name the limit on the answer when it and the prompt are too much together.
_CAP = re.compile(r"max_(?:completion_)?tokens|in the completion")


class TranslatedProxy(NativeProxy):
    """`_translation` None: the request is passed on as it came."""

    _translation: Translation | None = None
    _answer: Answer | None = None
    _chat: ChatAnswer | None = None
    _waits_for: tuple | None = None  # target and freshness of a send that waits for the translation
    _lacking = None  # the target that refused the path; not known yet whether it has chat
    _written: tuple[str, bytes] | None = None  # (model, body) of a large request
    _ours = False  # the conversation lies here: no backend can go on with it by itself
    _capped = True
    _encoding = b""
    _retry_after: float | None = None
    _last_sent = 0.0

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._body_parts: list[bytes] = []
        self._body_size = 0

    def start(self) -> None:
        self._send(self.targets[0])
        if self.sent_at:
            self.gateway.telemetry.stages["route"].observe(self.sent_at - self.began)

    def goes_on(self, target) -> bool:
        if target.engine is not None:
            return False
        self.guarded(self._send, target)
        return True

    # -- sending -------------------------------------------------------------------------------------------------------

    def _send(self, target, fresh_only: bool = False) -> None:
        if self._ours or target is self._lacking or target.backend_state.apis.lacks(self._api(), self.gateway.now()):
            self._send_translated(target, fresh_only)
        else:
            self._translation = None
            self.pass_on(target, fresh_only)

    def take_over(self, target, fresh_only: bool) -> None:
        self._ours = True
        self._send_translated(target, fresh_only)

    def held_by(self, backend: str, previous: str) -> None:
        """Go to the backend that has the conversation, if the route leads there."""
        holder = next((target for target in self.targets if target.name == backend), None)
        if holder is None or holder.engine is not None:
            super().held_by(backend, previous)
        else:
            self._joined = True
            self.pass_on(holder, False)

    def _api(self) -> str:
        return COUNTS[self.plan.path][0] if self.counts() else self.plan.api

    def _send_translated(self, target, fresh_only: bool) -> None:
        self._waits_for = (target, fresh_only)
        self.backend = target.name
        if not target.backend_state.apis.offers("chat"):
            where = f"backends.{target.name}.apis"
            raise InvalidRequest(f"The backend has neither this API nor chat completions, by {where}.", param="model")
        if self._translation is None:
            self.read()
        else:
            self.translated(self._translation, self._written)

    def prepared(self, translation: Translation) -> tuple[str, bytes] | None:
        """The body of a large request for the model of the target that waits for it: writing it is worth a worker too."""
        if self.counts() or len(self.body) <= WORK_ON_LOOP:
            return None
        model = self._waits_for[0].model or self.model
        return model, translation.form.encode(model, translation.stream)

    def translated(self, translation: Translation, made: tuple[str, bytes] | None) -> None:
        """Send it as a chat request; or count, which no chat API does: ask the server's tokenizer, else estimate."""
        self._translation = translation
        self._written = made
        target, fresh_only = self._waits_for
        if self.counts():
            TokenCount(self, target, translation.form.body, self._counted).start()
            return
        if self._answer is None:
            self._answer = translation.answer(self.model, self.keeper())
        self._chat, self._body_parts, self._body_size = ChatAnswer(), [], 0
        ProxyExchange._send(self, target, fresh_only)

    def _counted(self, tokens: int | None) -> None:
        if tokens is not None:
            self.answer_count(tokens)
            return
        body = self._translation.form.body
        size = len(encode_members([body["messages"], body.get("tools")]))
        self.answer_count(max(1, round(size / BYTES_PER_TOKEN)), b"x-laya-estimate: tokens\r\n")

    def _kept_heads(self) -> dict:
        return {} if self._translation is not None else super()._kept_heads()

    def _head_for(self, target) -> bytes:
        if self._translation is None:
            return super()._head_for(target)
        request, backend = self.request, target.backend_state
        drop = REQUEST_DROP | backend.header_names | _SAID_ANEW | hop_names(request)
        headers = [pair for pair in request.headers if pair[0] not in drop and not pair[0].startswith(_ITS_OWN)]
        accept = b"text/event-stream" if self._translation.stream else b"application/json"
        headers += [(b"content-type", b"application/json"), (b"accept", accept), (b"accept-encoding", b"identity")]
        path = backend.base + b"/chat/completions"
        return open_request_head(request.method, path, backend.authority, headers + backend.headers)

    def _body_for(self, target) -> bytes:
        translation = self._translation
        if translation is None:
            return super()._body_for(target)
        model, written = target.model or self.model, self._written
        if written is not None and written[0] == model and self._capped:
            return written[1]
        return translation.form.encode(model, translation.stream, capped=self._capped)

    # -- the backend's answer ------------------------------------------------------------------------------------------

    def on_upstream_head(self, response) -> None:
        if self._translation is None:
            if response.status in LACKING and self.target.backend_state.apis.unsure(self._api()):
                self._try_translated(response)
                return
            self.pass_head(response)
            return
        status = response.status
        backend = self.target.backend_state
        backend.answered(response, self.probe, self.gateway.now)
        self.probe = False
        if status >= 400 and self.state is not STREAMING and self._try_elsewhere(response):
            return
        if self.target is self._lacking and status < 400:
            backend.apis.found_lacking(self._api(), self.gateway.now())
        self.status = status
        self._retry_after = retry_after_of(response.fields, time()) if status in HINTED_STATUS else None
        self._encoding = response.fields.get(b"content-encoding", b"identity")
        self._sse = status < 400 and is_stream(response)
        if self._sse and self._answer.stream:
            self._begin()
        if response.body is not None:
            if response.body:
                self.on_upstream_data(response.body)
            if self.state is not DONE:
                self.on_upstream_end()

    def _try_translated(self, response) -> None:
        """The backend does not know the path, or not the model: a chat request will tell."""
        self.target.backend_state.answered(response, self.probe, self.gateway.now)
        self.probe = False
        self.call.cancel()
        self.gateway.telemetry.retry("no_such_api")
        self._lacking = self.target
        self.guarded(self._send_translated, self.target, False)

    def on_upstream_data(self, data: bytes) -> None:
        if self._translation is None:
            self.pass_data(data)
        else:
            self.guarded(self._read_data, data)

    def _read_data(self, data: bytes) -> None:
        if self._encoding not in (b"identity", b""):
            raise BadUpstream("The backend answered in a content coding that was not asked for.")
        if self._sse:
            self._write_pieces(self._chat.read_stream(data))
        else:
            self._keep_body(data)

    def _keep_body(self, data: bytes) -> None:
        self._body_size += len(data)
        if self._body_size > MAX_ANSWER_BYTES:
            raise PayloadTooLarge(f"The backend's answer is larger than {MAX_ANSWER_BYTES} bytes.")
        self._body_parts.append(data)

    def on_upstream_end(self) -> None:
        if self._translation is None:
            super().on_upstream_end()
            return
        self.gateway.telemetry.stages["upstream"].observe(perf_counter() - self.sent_at)
        self.guarded(self._read_end)

    def _read_end(self) -> None:
        body, self._body_parts = b"".join(self._body_parts), []
        if self.status >= 400:
            self._refused(body)
        else:
            self._end_translated(self._chat.finish_stream() if self._sse else self._chat.read_body(body))

    def _refused(self, body: bytes) -> None:
        """The backend's error in the API's form. A limit on the answer that it finds too high is left away: what then limits it
        is the room left, which is less."""
        error = read_error(self.status, body)
        if self.status == 400 and self._capped and self.state is WAITING and _CAP.search(error.message):
            self._capped = False
            self.gateway.telemetry.retry("max_tokens")
            ProxyExchange._send(self, self.target)
            return
        if self.status in HINTED_STATUS:
            error.retry_after = 1.0 if self._retry_after is None else min(self._retry_after, MAX_RETRY_AFTER_S)
        self.fail(error, outcome_of_status(error.status))

    def _end_translated(self, pieces: list[Piece]) -> None:
        chat, answer = self._chat, self._answer
        ending = chat.ending
        pieces = pieces + (chat.call_ends() if ending.reason != "length" else [])
        if ending.usage is not None:
            self.tokens = (ending.usage.prompt, ending.usage.completion)
        if not answer.stream:
            for piece in pieces:
                answer.piece(piece)
            self.answer(200, JSON_LINE, answer.end(ending), "ok")
            return
        if self.state is not STREAMING:  # it was asked for a stream and gave a plain answer
            self._begin()
        self._write_pieces(pieces)
        if self.state is STREAMING and self.connection.write(answer.end(ending)):
            self._end("ok")
            self.connection.finish()

    def on_upstream_failure(self, failure, message: str) -> None:
        if self._translation is not None and self._sse and self._chat.whole:
            self.guarded(self._end_translated, [])  # the model had stopped: nothing is missing but the end mark
        else:
            super().on_upstream_failure(failure, message)

    def _next(self, failure: str, error: LayaError) -> None:
        self.guarded(super()._next, failure, error)

    def may_begin(self) -> bool:
        """Not while the backend may still say that it lacks the API."""
        return not self.target.backend_state.apis.unsure(self._api())

    # -- the answer ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self.state is STREAMING:
            return
        self.move(STREAMING)
        self.status = 200
        self._last_sent = perf_counter()
        self.connection.start(200, SSE_LINES + self.own_lines(), self._answer.head(0))

    def _write_pieces(self, pieces: list[Piece]) -> None:
        out = b"".join([self._answer.piece(piece) for piece in pieces])
        if not out:
            return
        now = perf_counter()
        if not self.first_at:
            self.first_at = now
            self.gateway.telemetry.ttft.observe(now - self.began)
        self._last_sent = now
        connection = self.connection
        if connection.write(out) and connection.paused and not self._paused and self.call is not None:
            self._paused = True
            self.call.pause()

    def on_tick(self, now: float) -> None:
        answer = self._answer
        if self._translation is None:
            super().on_tick(now)
            return
        if answer is None or not answer.stream:
            return
        waited = perf_counter()
        if self.state is WAITING and not self.may_move() and waited - self.began > HEAD_WAIT_S:
            self._begin()
        elif self.state is STREAMING and waited - self._last_sent > KEEP_ALIVE_S:
            self._last_sent = waited
            self.connection.write(answer.keep_alive())

    # -- errors --------------------------------------------------------------------------------------------------------

    def fail(self, error: LayaError, outcome: str | None = None) -> None:
        if self.call is not None:
            self.call.cancel()  # it may still be under way where its answer could not be read
        super().fail(error, outcome)

    def _cut_off(self, error: LayaError) -> None:
        if self._translation is not None:
            self.finish_with(error, self._answer.error(error))
        else:
            super()._cut_off(error)
