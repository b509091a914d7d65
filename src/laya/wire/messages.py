"""The events that the parsers of both sides hand out. Header names are lower-case, values stripped of outer blanks.

`fields` holds every header by name in order of arrival (a repeated name keeps its first value); `headers` is the full
list, repetitions included, and is what gets forwarded.
"""

from __future__ import annotations

import enum
from typing import Any


class Signal(enum.Enum):
    NEED_DATA = "need data"
    PAUSED = "paused"  # a whole message is out; `start_next` lets the one behind it through
    EOF = "eof"  # the peer closed at a message boundary


NEED_DATA = Signal.NEED_DATA
PAUSED = Signal.PAUSED
EOF = Signal.EOF


class Limits:
    """Bounds for one connection's parser, in bytes (and a count for headers)."""

    __slots__ = (
        "max_head_bytes", "max_headers", "max_target_bytes", "max_body_bytes", "max_chunk_line_bytes", "request_heads",
        "response_heads",
    )  # fmt: skip

    def __init__(
        self, *, max_head_bytes: int = 32768, max_headers: int = 128, max_target_bytes: int = 8192,
        max_body_bytes: int = 32 * 1024 * 1024, max_chunk_line_bytes: int = 256,
    ) -> None:  # fmt: skip
        self.max_head_bytes = max_head_bytes
        self.max_headers = max_headers
        self.max_target_bytes = max_target_bytes
        self.max_body_bytes = max_body_bytes
        self.max_chunk_line_bytes = max_chunk_line_bytes
        self.request_heads: dict[bytes, Request] = {}  # `recall`'s memo of heads within these limits
        self.response_heads: dict[bytes, Response] = {}


class Memo:
    """What the parser's callers derive from a head, kept as long as the parser remembers that head."""

    __slots__ = ("kept", "plan", "lines", "is_stream")

    def __init__(self) -> None:
        self.kept = False  # the parser does remember it: the next message with this head has this memo
        self.plan: Any = None  # of a request: the gateway's
        self.lines: bytes | None = None  # of a response: its header lines as they are passed on
        self.is_stream: bool | None = None  # of a response: its body is server-sent events


class Request:
    """One request's head. `body` is the whole body when it came along (b"" for none), else None and BodyData follows.

    `path` is the target's path without query, with a scheme and authority (absolute form) taken off; it is raw: not
    percent-decoded. `http10` tells that chunked coding must not be used in the answer.
    """

    __slots__ = (
        "method", "target", "path", "query", "fields", "_headers", "http10", "keep_alive", "content_length", "chunked",
        "expect_continue", "body", "memo",
    )  # fmt: skip

    def __init__(
        self, method: bytes, target: bytes, path: bytes, query: bytes, fields: dict[bytes, bytes],
        headers: list[tuple[bytes, bytes]] | None, http10: bool, keep_alive: bool, content_length: int | None, chunked: bool,
        expect_continue: bool, body: bytes | None, memo: Memo | None = None,
    ) -> None:  # fmt: skip
        self.method = method
        self.target = target
        self.path = path
        self.query = query
        self.fields = fields
        self._headers = headers  # None: no name was repeated, fields says it all
        self.http10 = http10
        self.keep_alive = keep_alive
        self.content_length = content_length  # None: chunked, or no body
        self.chunked = chunked
        self.expect_continue = expect_continue
        self.body = body
        self.memo = memo or Memo()

    def again(self, content_length: int | None, fields: dict[bytes, bytes]) -> Request:
        """The same head for another message: with its own length and no body yet; the memo is shared."""
        return Request(
            self.method, self.target, self.path, self.query, fields, self._headers, self.http10, self.keep_alive,
            content_length, self.chunked, self.expect_continue, None, self.memo,
        )  # fmt: skip

    @property
    def repeats(self) -> bool:
        """A header name came more than once."""
        return self._headers is not None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._headers if self._headers is not None else list(self.fields.items())


class Response:
    """One response's head from an upstream. `body` as in Request. Never 1xx: those are swallowed by the parser."""

    __slots__ = ("status", "reason", "fields", "_headers", "http10", "keep_alive", "content_length", "chunked", "body", "memo")

    def __init__(
        self, status: int, reason: bytes, fields: dict[bytes, bytes], headers: list[tuple[bytes, bytes]] | None, http10: bool,
        keep_alive: bool, content_length: int | None, chunked: bool, body: bytes | None, memo: Memo | None = None,
    ) -> None:  # fmt: skip
        self.status = status
        self.reason = reason
        self.fields = fields
        self._headers = headers
        self.http10 = http10
        self.keep_alive = keep_alive
        self.content_length = content_length  # None and not chunked: the body ends with the connection
        self.chunked = chunked
        self.body = body
        self.memo = memo or Memo()

    def again(self, content_length: int | None, fields: dict[bytes, bytes]) -> Response:
        """As `Request.again`; a status without a body keeps its empty one."""
        return Response(
            self.status, self.reason, fields, self._headers, self.http10, self.keep_alive, content_length, self.chunked,
            self.body, self.memo,
        )  # fmt: skip

    @property
    def repeats(self) -> bool:
        """A header name came more than once."""
        return self._headers is not None

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._headers if self._headers is not None else list(self.fields.items())


class BodyData:
    """A piece of a body; framing is gone."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data


class EndOfBody:
    """The message is whole. Trailers, if any, were checked and dropped."""

    __slots__ = ()


END_OF_BODY = EndOfBody()


class Refusal:
    """The bytes cannot be served: answer `status` and close. After it the parser hands out nothing more.

    On the upstream side it means that the response is broken (the status is then 502).
    """

    __slots__ = ("status", "message")

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        self.message = message

    def __repr__(self) -> str:
        return f"Refusal({self.status}, {self.message!r})"
