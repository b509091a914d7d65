"""How many tokens a chat prompt has, asked of the backend that would answer it.

In: a translated request that only wants a number, and a target with chat completions but without the counting API. Out: `done`
with the number, or None where the backend cannot tell. vLLM's `/tokenize` takes messages and counts; llama.cpp's takes text,
which its `/apply-template` makes of them. A server that has neither is remembered. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from laya.gateway.exchange import WAITING
from laya.schema.codec import encode_members
from laya.wire.reply import open_request_head

# The largest answer that is read: a window of a million tokens as a list of numbers.
MAX_ANSWER = 16 * 1024 * 1024
API = "tokenize"
_TEMPLATE_MEMBERS = ("messages", "tools", "chat_template_kwargs")


class _Told(msgspec.Struct):
    """What either server may say. `tokens` stays raw: only their number is wanted."""

    count: int | None = None
    tokens: msgspec.Raw = msgspec.Raw(b"")
    prompt: str | None = None


_decode = msgspec.json.Decoder(_Told).decode


class TokenCount:
    """The listener of its own calls. `exchange` is cancelled through its `call`, as always."""

    def __init__(self, exchange: Any, target: Any, body: dict[str, Any], done: Callable[[int | None], None]) -> None:
        self._exchange = exchange
        self._backend = target.backend_state
        self._model = target.model or exchange.model
        self._members = {key: body[key] for key in _TEMPLATE_MEMBERS if body.get(key) is not None}
        self._done = done
        self._next: Callable[[_Told], None] = self._counted
        self._status = 0
        self._parts: list[bytes] = []
        self._size = 0

    def start(self) -> None:
        if not self._backend.apis.may_have(API, self._exchange.gateway.now()):
            self._done(None)
            return
        self._exchange.move(WAITING)
        self._ask(b"/tokenize", {"model": self._model, "add_generation_prompt": True, **self._members}, self._counted)

    # -- what is asked ---------------------------------------------------------------------------------------------------

    def _counted(self, told: _Told) -> None:
        if told.count is not None:
            self._done(max(0, told.count))
        elif bytes(told.tokens).strip() == b"[]":  # it looked for `content` alone: llama.cpp
            self._ask(b"/apply-template", self._members, self._rendered)
        else:
            self._lacking()

    def _rendered(self, told: _Told) -> None:
        if told.prompt is None:
            self._lacking()
            return
        self._ask(b"/tokenize", {"content": told.prompt, "add_special": True, "parse_special": True}, self._numbered)

    def _numbered(self, told: _Told) -> None:
        tokens = bytes(told.tokens).strip()
        if tokens[:1] != b"[":
            self._lacking()
        else:
            self._done(0 if tokens == b"[]" else tokens.count(b",") + 1)

    def _ask(self, path: bytes, members: dict[str, Any], following: Callable[[_Told], None]) -> None:
        self._next, self._parts, self._size = following, [], 0
        exchange = self._exchange
        exchange.work(len(exchange.body), lambda: encode_members(members), lambda body: self._send(path, body))

    def _send(self, path: bytes, body: bytes) -> None:
        exchange, backend = self._exchange, self._backend
        headers = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity"), *backend.headers]
        head = open_request_head(b"POST", backend.target(path, b""), backend.authority, headers)
        head += b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (exchange.request_id, len(body))
        exchange.call = backend.pool.submit(self, b"POST", head, body)

    # -- what comes back -------------------------------------------------------------------------------------------------

    def on_upstream_head(self, response) -> None:
        self._status = response.status
        if response.body is not None:
            self.on_upstream_data(response.body)
            self.on_upstream_end()

    def on_upstream_data(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_ANSWER:
            self._parts.append(data)

    def on_upstream_end(self) -> None:
        self._exchange.call = None
        self._exchange.guarded(self._read)

    def _read(self) -> None:
        if self._status != 200 or self._size > MAX_ANSWER:
            self._lacking()
            return
        try:
            told = _decode(b"".join(self._parts))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            self._lacking()
            return
        self._next(told)

    def _lacking(self) -> None:
        """A server that does not know the path is not asked again for a while; one that refuses this prompt is."""
        if self._status in (404, 405, 501):
            self._backend.apis.found_lacking(API, self._exchange.gateway.now())
        self._done(None)

    def on_upstream_failure(self, failure, message: str) -> None:
        self._exchange.call = None
        self._exchange.guarded(self._done, None)

    def on_fault(self, fault: Exception) -> None:
        self._exchange.on_fault(fault)
