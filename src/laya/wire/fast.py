"""The common message, read fast. Whatever is outside the subset below is not judged here but goes to h11 untouched.

In: a buffer that begins with a head, and where the head's blank line is. Out: a `Request` or `Response` (body to come), or
None: "not mine". Nothing is refused here, so the answer to odd bytes is always policy's and h11's; `tools/fuzz_wire.py`
proves that both ways agree. Called by `inbound` and `outbound`, on the loop thread.

The subset, and why each line is drawn where it is:

| inside | outside, and why it is left to h11 |
|---|---|
| lines that end in CR LF, printable ASCII between | any other byte: tabs, 8-bit text and controls are rare and need judging |
| `METHOD SP /path SP HTTP/1.1`, a known method | HTTP/1.0, absolute form, `*`: rare, and each changes what follows |
| `HTTP/1.1 200..599 [reason]` | 1xx (another head follows), HTTP/1.0 (other connection rules) |
| `token ":" value`, no blank before the colon | folding, blanks in names: refusals, and policy words them |
| Host, Connection and the framing fields once | two lengths or hosts are refusals; lists of options name further fields |
| one Content-Length of at most 10 plain digits, or none | signs, lists, underscores, other digits; 10 digits hold 9 GB |
| no Transfer-Encoding in a request | a chunked request is rare, and smuggling lives there |
| Transfer-Encoding exactly `chunked`, no Content-Length, in a response | a body that ends with the connection, other codings |
| no Expect in a request | needs an answer before the body |
| no Upgrade in a request | h11 tracks the offer |
| Connection: `keep-alive` or `close`, or none | lists of options name further hop-by-hop fields |
| a Host of host characters, present | missing or odd: refusals |
| head, target, field count and declared body within the limits | over them: refusals |

Speed comes from a memo: clients repeat their lines word for word, so a line that was proved to be in the subset is found
by its bytes the next time. A hit is an equality of bytes: it can prove nothing that parsing would not. The memo is bounded,
what changes with each message is not kept, and nothing ever prints it (it has clients' keys in it). `recall` does the
same for whole heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laya.wire.messages import Limits, Request, Response
from laya.wire.policy import METHODS

PRINTABLE = bytes(range(0x20, 0x7F))
TOKEN_BYTES = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
HOST_BYTES = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-._~%!$&'()*+,;=:[]"
MAX_LENGTH_DIGITS = 10
# A second one of these changes what the head means. (Others may come again, as Set-Cookie and Vary do.)
ONCE = (b"host", b"connection", b"content-length", b"transfer-encoding")
REQUEST_OUTSIDE = frozenset([b"transfer-encoding", b"expect", b"upgrade"])
# New with each message: they would push out what will be seen again.
PER_MESSAGE = frozenset([
    b"x-request-id", b"request-id", b"x-client-request-id", b"x-correlation-id", b"traceparent", b"tracestate",
    b"idempotency-key", b"x-trace-id", b"x-codex-turn-metadata", b"cf-ray", b"server-timing",
    b"x-envoy-upstream-service-time",
])  # fmt: skip
MEMO_LINES = 1024  # a few dozen clients' worth of lines; clearing as many takes about 50 us, far below a stall of note
MEMO_LINE_BYTES = 160  # the user-agent lines of SDKs fit; 1024 entries stay below 0.6 MB


Pair = tuple[bytes, bytes]


class Odd(Exception):
    """Outside the subset."""


class LineMemo(dict):
    """Line -> what `parse(line)` made of it, bounded; emptied when full. `parse` returns (result, may be kept)."""

    __slots__ = ("_parse",)

    def __init__(self, parse: Callable[[bytes], tuple[Any, bool]]) -> None:
        super().__init__()
        self._parse = parse

    def __missing__(self, line: bytes) -> Any:
        result, keep = self._parse(line)
        if keep and len(line) <= MEMO_LINE_BYTES:
            if len(self) >= MEMO_LINES:
                self.clear()
            self[line] = result
        return result


def head_lines(head: bytes) -> list[bytes]:
    return head.split(b"\r\n")


def plain_number(value: bytes) -> int:
    if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:  # bytes.isdigit knows only 0-9
        raise Odd
    return int(value)


def split_field(line: bytes) -> tuple[bytes, bytes]:
    """(lower-case name, value without outer blanks) of one header line."""
    name, _, value = line.partition(b":")
    if not name or name.translate(None, TOKEN_BYTES) or value.translate(None, PRINTABLE) or len(name) == len(line):
        raise Odd
    return name.lower(), value.strip(b" ")


def fields_of(lines: list[bytes], memo: LineMemo) -> tuple[dict[bytes, bytes], list[Pair] | None]:
    """The fields by name, and all of them in order where a name is repeated; `lines` are the header lines alone."""
    pairs = list(map(memo.__getitem__, lines))
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields, None
    names = [name for name, _ in pairs]
    if any(names.count(name) > 1 for name in ONCE):
        raise Odd
    first: dict[bytes, bytes] = {}
    for name, value in pairs:
        first.setdefault(name, value)
    return first, pairs


def cut_body(buffer: bytes, start: int, length: int) -> bytes | None:
    """The body of `length` bytes at `start`, or None when it has not all come yet."""
    stop = start + length
    return buffer[start:stop] if len(buffer) >= stop else None


def _check_connection(value: bytes) -> None:
    if value.lower() not in (b"keep-alive", b"close"):
        raise Odd


def _request_line(line: bytes) -> tuple[tuple[bytes, bytes, bytes, bytes], bool]:
    parts = line.split(b" ")
    if len(parts) != 3 or parts[0] not in METHODS or parts[2] != b"HTTP/1.1" or parts[1][:1] != b"/":
        raise Odd
    if parts[1].translate(None, PRINTABLE):
        raise Odd
    path, question, query = parts[1].partition(b"?")
    return (parts[0], parts[1], path, query), not question


def _request_field(line: bytes) -> tuple[tuple[bytes, bytes], bool]:
    name, value = split_field(line)
    if name in REQUEST_OUTSIDE or (name == b"host" and value.translate(None, HOST_BYTES)):
        raise Odd
    if name == b"connection":
        _check_connection(value)
    return (name, value), name not in PER_MESSAGE


def _status_line(line: bytes) -> tuple[tuple[int, bytes], bool]:
    digits, rest = line[9:12], line[12:]
    if line[:9] != b"HTTP/1.1 " or len(digits) != 3 or not digits.isdigit() or not b"200" <= digits <= b"599":
        raise Odd
    if (rest and rest[:1] != b" ") or rest.translate(None, PRINTABLE):
        raise Odd
    return (int(digits), rest[1:]), True


def _response_field(line: bytes) -> tuple[tuple[bytes, bytes], bool]:
    name, value = split_field(line)
    if name == b"transfer-encoding" and value != b"chunked":
        raise Odd
    if name == b"connection":
        _check_connection(value)
    return (name, value), name not in PER_MESSAGE


REQUEST_LINES = LineMemo(_request_line)
REQUEST_FIELDS = LineMemo(_request_field)
STATUS_LINES = LineMemo(_status_line)
RESPONSE_FIELDS = LineMemo(_response_field)


def forget() -> None:
    """Empty the memos (for tests that change the functions above)."""
    for memo in (REQUEST_LINES, REQUEST_FIELDS, STATUS_LINES, RESPONSE_FIELDS):
        memo.clear()


def read_request(buffer: bytes, head_end: int, limits: Limits) -> Request | None:
    """The request whose head is buffer[:head_end] (its blank line left off), or None when it is odd."""
    lines = head_lines(buffer[:head_end])
    try:
        method, target, path, query = REQUEST_LINES[lines.pop(0)]
        fields, headers = fields_of(lines, REQUEST_FIELDS)
        value = fields.get(b"content-length")
        length = None if value is None else plain_number(value)
    except Odd:
        return None
    if b"host" not in fields or len(lines) > limits.max_headers or len(target) > limits.max_target_bytes:
        return None
    if length is not None and length > limits.max_body_bytes:
        return None
    return Request(method, target, path, query, fields, headers, False, _keep_alive(fields), length, False, False, None)


def read_response(buffer: bytes, head_end: int, limits: Limits, method: bytes) -> Response | None:
    """The response to `method`; its `body` is b"" where the status or the method allows none, else None."""
    lines = head_lines(buffer[:head_end])
    try:
        status, reason = STATUS_LINES[lines.pop(0)]
        fields, headers = fields_of(lines, RESPONSE_FIELDS)
        value = fields.get(b"content-length")
        length = None if value is None else plain_number(value)
    except Odd:
        return None
    chunked = b"transfer-encoding" in fields
    bodiless = method == b"HEAD" or status == 204 or status == 304
    if len(lines) > limits.max_headers or (chunked and length is not None):
        return None
    if length is None and not chunked and not bodiless:
        return None
    body = b"" if bodiless else None
    return Response(status, reason, fields, headers, False, _keep_alive(fields), length, chunked, body)


def _keep_alive(fields: dict[bytes, bytes]) -> bool:
    option = fields.get(b"connection")
    return option is None or option.lower() != b"close"


class LengthBody:
    """Reads a body of a known length that comes in several segments."""

    __slots__ = ("_left",)

    def __init__(self, length: int) -> None:
        self._left = length

    def feed(self, data: bytes) -> tuple[bytes, bytes, bool]:
        """(payload, bytes behind the body, whether the body is whole). A segment that lies inside is not copied."""
        size = len(data)
        if size <= self._left:
            self._left -= size
            return data, b"", self._left == 0
        payload, rest = data[: self._left], data[self._left :]
        self._left = 0
        return payload, rest, True

    def ends_at_eof(self) -> bool:
        return False
