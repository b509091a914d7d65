"""h11, the authority on syntax, behind policy: reads the messages that the fast parser leaves alone.

In: a whole raw head (its blank line included) and then the segments of its body. Out: a `Request` or `Response` and a
reader for the body; `Refused` when policy or h11 says no. One h11 connection lives as long as one message. Called by
`inbound` and `outbound`, on the loop thread.
"""

from __future__ import annotations

import h11

from laya.wire.guard import ChunkGuard, LengthGuard, OpenGuard
from laya.wire.messages import Limits, Request, Response
from laya.wire.policy import REQUEST_LINE_ROOM, Refused, check_bytes, request_facts, response_facts

Guard = LengthGuard | ChunkGuard | OpenGuard


def read_request(head: bytes, limits: Limits) -> tuple[Request, H11Body]:
    """The request of a head and the reader of its body (a body of no bytes is `done` at once)."""
    check_bytes(head, 0, len(head) - 2, limits.max_target_bytes + REQUEST_LINE_ROOM)
    facts = request_facts(head[:-4].split(b"\r\n"), limits)
    connection = h11.Connection(h11.SERVER, _incomplete_bound(limits))
    event = _read_head(connection, head)
    fields, headers = _fields(event.headers)
    request = Request(
        event.method, bytes(event.target), facts.path, facts.query, fields, headers, facts.http10, facts.keep_alive,
        facts.content_length, facts.chunked, facts.expect_continue, None,
    )  # fmt: skip
    guard = ChunkGuard(limits, bounded=True) if facts.chunked else LengthGuard(facts.content_length or 0)
    return request, H11Body(connection, guard)


def read_response(head: bytes, limits: Limits, method: bytes) -> tuple[Response, H11Body | None]:
    """The response to `method`; no reader for 1xx, which have no body and are followed by another head."""
    check_bytes(head, 0, len(head) - 2, None)
    facts = response_facts(head[:-4].split(b"\r\n"), limits)
    connection = h11.Connection(h11.CLIENT, _incomplete_bound(limits))
    connection.send(h11.Request(method=method, target=b"/", headers=[(b"host", b"")]))
    connection.send(h11.EndOfMessage())
    event = _read_head(connection, head)
    fields, headers = _fields(event.headers)
    response = Response(
        event.status_code, bytes(event.reason), fields, headers, facts.http10, facts.keep_alive, facts.content_length,
        facts.chunked, None,
    )  # fmt: skip
    if facts.status < 200:
        return response, None
    guard: Guard
    if method == b"HEAD" or facts.status in (204, 304):
        guard = LengthGuard(0)
    elif facts.chunked:
        guard = ChunkGuard(limits, bounded=False)
    elif facts.content_length is not None:
        guard = LengthGuard(facts.content_length)
    else:
        guard = OpenGuard()
    return response, H11Body(connection, guard)


class H11Body:
    """Reads one body through h11, each segment seen by the guard first."""

    __slots__ = ("_connection", "_guard")

    def __init__(self, connection: h11.Connection, guard: Guard) -> None:
        self._connection = connection
        self._guard = guard

    def feed(self, data: bytes) -> tuple[bytes, bytes, bool]:
        """(payload, bytes not used, whether the body is whole); `data` may be empty to ask for a body of no bytes."""
        taken = self._guard.admit(data)
        if taken:
            self._connection.receive_data(data[:taken])
        pieces = []
        ended = False
        while not ended:
            event = _next_event(self._connection)
            if type(event) is h11.Data:
                pieces.append(event.data)
            elif type(event) is h11.EndOfMessage:
                ended = True
            else:
                break
        if ended != self._guard.done:
            raise Refused(400, "the end of the body is ambiguous")
        return b"".join(pieces), data[taken:], ended

    def ends_at_eof(self) -> bool:
        return type(self._guard) is OpenGuard


def _incomplete_bound(limits: Limits) -> int:
    # What h11 may hold of an unfinished event: chunk lines and trailers, which the guard has bounded already.
    return limits.max_head_bytes + limits.max_chunk_line_bytes


def _read_head(connection: h11.Connection, head: bytes) -> h11.Request | h11.Response | h11.InformationalResponse:
    connection.receive_data(head)
    event = _next_event(connection)
    if not isinstance(event, h11.Request | h11.Response | h11.InformationalResponse):
        raise Refused(400, "malformed head")
    return event


def _next_event(connection: h11.Connection) -> object:
    try:
        return connection.next_event()
    except h11.RemoteProtocolError as error:  # its text quotes the bytes at fault: not for logs
        raise Refused(501 if error.error_status_hint == 501 else 400, "malformed HTTP message") from error


def _fields(headers: h11.Headers) -> tuple[dict[bytes, bytes], list[tuple[bytes, bytes]] | None]:
    """First value by name, and the full list if a name is repeated."""
    full = [(bytes(name), bytes(value)) for name, value in headers]
    fields: dict[bytes, bytes] = {}
    for name, value in full:
        fields.setdefault(name, value)
    return fields, full if len(fields) != len(full) else None
