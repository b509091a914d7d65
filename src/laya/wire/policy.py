"""What is refused beyond h11, on raw heads: the same answer whichever parser would have read them.

In: the bytes of a head, before h11 sees them (h11 forgives bare LF, folded fields and more, and what it forgave can no
longer be told from its events). Out: a `RequestFacts` / `ResponseFacts`, or `Refused` with the status a client would be
answered (towards an upstream every refusal counts as 502). Called by `parser` and `authority`, on the loop thread.

| refused | status | why |
|---|---|---|
| CR or LF alone, NUL and other controls (but HTAB), a first byte that cannot begin a message | 400 | readers disagree on them |
| folded field, blank before the colon, no colon | 400 | the field hides from the next reader |
| version other than HTTP/1.0, HTTP/1.1 | 400 | never 505: SDKs retry a 5xx |
| method outside METHODS (CONNECT and TRACE are) | 501 | we do not tunnel |
| target not `/...`, `http(s)://host/...`, or `*` with OPTIONS; authority unlike Host | 400 | the route would be guessed |
| Host missing in 1.1, repeated, or with characters no host has | 400 | RFC 9112 3.2 |
| Content-Length repeated (even alike), not plain digits, or beside Transfer-Encoding | 400 | request smuggling |
| Transfer-Encoding in 1.0, repeated, malformed or with `chunked` twice | 400 | request smuggling |
| another coding than `chunked` | 501 | RFC 9112 6.1 |
| a Connection header over 1 KiB | 400 | hundreds of options mean nothing |
| an expectation other than 100-continue | 400 | it cannot be met |
| target, head, field count, declared body over their bound | 414, 431, 431, 413 | memory |

`Upgrade` is not refused but never followed (RFC 9110 7.8): HTTP clients of Java offer h2c on every first request.
"""

from __future__ import annotations

import re

import h11

from laya.wire.messages import Limits

if tuple(int(part) for part in h11.__version__.split("+")[0].split(".")[:2]) < (0, 16):
    raise ImportError(f"h11 {h11.__version__} does not check what ends a chunk: 0.16 or later is needed")

METHODS = frozenset([b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"])
# A request line is the target and: 7 bytes of method, 8 of version, 2 blanks; the rest allows a longer, odd method.
REQUEST_LINE_ROOM = 64
MAX_LENGTH_DIGITS = 20  # what h11 reads; 19 digits hold 2**63

# A list of this size has hundreds of options or codings; reading more than is ever meant would hold the loop for ms.
MAX_LIST_BYTES = 1024

_OFFENCE = re.compile(rb"(?<!\r)\n|\r[^\n]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_DIGITS = re.compile(rb"[0-9]+")
_HOST = re.compile(rb"[0-9A-Za-z\-._~%!$&'()*+,;=:\[\]]*")
_TARGET = re.compile(rb"[\x21-\x7e]+")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)
_STATUS_LINE = re.compile(rb"(HTTP/1\.[01]) ([1-5][0-9][0-9])(?: [\t\x20-\x7e\x80-\xff]*)?")


class Refused(Exception):
    """These bytes are not served: the `status` to answer and a `message` of our own words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Framing:
    """What a head says about the body and the connection, read from its raw lines."""

    __slots__ = ("http10", "content_length", "chunked", "keep_alive", "fields")

    def __init__(self, http10: bool, fields: dict[bytes, list[bytes]], limits: Limits | None) -> None:
        self.http10 = http10
        self.fields = fields
        self.chunked = transfer_coding(fields, http10)
        self.content_length = content_length(fields, limits)
        tokens = connection_tokens(fields.get(b"connection", ()))
        self.keep_alive = b"close" not in tokens and (not http10 or b"keep-alive" in tokens)


class RequestFacts(Framing):
    __slots__ = ("method", "target", "path", "query", "expect_continue")


class ResponseFacts(Framing):
    __slots__ = ("status",)


def check_bytes(buffer: bytes, start: int, stop: int, line_bound: int | None) -> None:
    """Refuse the first offending byte of buffer[start:stop], where buffer[:start] was checked before.

    `line_bound` is how far the first line may reach (None: no such bound). The earliest offence decides, so that the
    answer does not depend on how the bytes were cut into segments.
    """
    if stop and buffer[0] <= 0x20:  # a TLS hello, a stray CRLF: no need to wait for the rest
        raise Refused(400, "the message begins with a byte that no message begins with")
    offence = _OFFENCE.search(buffer, max(0, start - 1), stop)
    if line_bound is not None and start <= line_bound < stop and buffer.find(b"\n", 0, line_bound + 1) < 0:
        if offence is None or offence.end() - 1 >= line_bound:
            raise Refused(414, "the request target is too long")
    if offence is not None:
        raise Refused(400, "the head holds a control byte or a line that does not end in CR LF")


def request_facts(lines: list[bytes], limits: Limits) -> RequestFacts:
    """The facts of a request head, given as its lines without line ends; raises `Refused`."""
    parts = lines[0].split(b" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise Refused(400, "malformed request line")
    method, target, version = parts
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise Refused(400, "only HTTP/1.0 and HTTP/1.1 are spoken here")
    if method not in METHODS:
        raise Refused(501, "this method is not implemented")
    if len(target) > limits.max_target_bytes:
        raise Refused(414, "the request target is too long")
    fields = field_lists(lines, limits)
    facts = RequestFacts(version == b"HTTP/1.0", fields, limits)
    facts.method = method
    facts.target = target
    facts.path, facts.query = split_target(method, target, one_host(fields, facts.http10))
    facts.expect_continue = expects_continue(fields) and not facts.http10
    return facts


def response_facts(lines: list[bytes], limits: Limits) -> ResponseFacts:
    """The facts of a response head. A declared length has no bound here: the body is passed on, not kept."""
    match = _STATUS_LINE.fullmatch(lines[0])
    if match is None:
        raise Refused(400, "malformed status line")
    facts = ResponseFacts(match[1] == b"HTTP/1.0", field_lists(lines, limits), None)
    facts.status = int(match[2])
    if facts.status == 101:
        raise Refused(400, "a switch of protocols that nobody asked for")
    return facts


def field_lists(lines: list[bytes], limits: Limits) -> dict[bytes, list[bytes]]:
    """Values by lower-case name, outer blanks off, in order of arrival. lines[0] is the start line."""
    if len(lines) - 1 > limits.max_headers:
        raise Refused(431, "too many header fields")
    fields: dict[bytes, list[bytes]] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name):
            raise Refused(400, "malformed header field")
        fields.setdefault(name.lower(), []).append(value.strip(b" \t"))
    return fields


def one_host(fields: dict[bytes, list[bytes]], http10: bool) -> bytes | None:
    hosts = fields.get(b"host")
    if hosts is None:
        if http10:
            return None
        raise Refused(400, "the Host header is missing")
    if len(hosts) > 1 or not _HOST.fullmatch(hosts[0]):
        raise Refused(400, "the Host header is repeated or malformed")
    return hosts[0]


def split_target(method: bytes, target: bytes, host: bytes | None) -> tuple[bytes, bytes]:
    """(path, query) of a target in origin, absolute or asterisk form; neither is percent-decoded."""
    if target.startswith(b"/"):
        path, _, query = target.partition(b"?")
        return path, query
    if target == b"*" and method == b"OPTIONS":
        return target, b""
    match = _ABSOLUTE.fullmatch(target)
    if match is None or not match[1] or not _HOST.fullmatch(match[1]):
        raise Refused(400, "malformed request target")
    if host is not None and match[1].lower() != host.lower():
        raise Refused(400, "the request target names another host than the Host header")
    path, _, query = match[2].partition(b"?")
    return path or b"/", query


def content_length(fields: dict[bytes, list[bytes]], limits: Limits | None) -> int | None:
    """The declared length. `int` alone would take ``+5`` and ``5_0``, so the digits are checked first."""
    values = fields.get(b"content-length")
    if values is None:
        return None
    if b"transfer-encoding" in fields:
        raise Refused(400, "Content-Length beside Transfer-Encoding")
    if len(values) > 1 or not _DIGITS.fullmatch(values[0]):
        raise Refused(400, "Content-Length is repeated or not a plain number")
    if len(values[0]) > MAX_LENGTH_DIGITS:
        raise Refused(413, "the body is too large")
    length = int(values[0])
    if limits is not None and length > limits.max_body_bytes:
        raise Refused(413, f"the body is larger than {limits.max_body_bytes} bytes")
    return length


def transfer_coding(fields: dict[bytes, list[bytes]], http10: bool) -> bool:
    """Whether the body is chunked. Everything but exactly one `chunked` is refused."""
    values = fields.get(b"transfer-encoding")
    if values is None:
        return False
    if http10 or len(values) > 1 or b"content-length" in fields:
        raise Refused(400, "Transfer-Encoding is repeated, beside Content-Length or in an HTTP/1.0 message")
    if values[0].lower() == b"chunked":
        return True
    if len(values[0]) > MAX_LIST_BYTES:
        raise Refused(400, "malformed Transfer-Encoding")
    codings = [coding.strip(b" \t").lower() for coding in values[0].split(b",")]
    if codings.count(b"chunked") > 1 or not all(_TOKEN.fullmatch(coding) for coding in codings):
        raise Refused(400, "malformed Transfer-Encoding")
    raise Refused(501, "only the transfer coding chunked is implemented")


def connection_tokens(values: list[bytes] | tuple[bytes, ...]) -> set[bytes]:
    if sum(map(len, values)) > MAX_LIST_BYTES:
        raise Refused(400, "the Connection header is too long")
    return {token.strip(b" \t").lower() for value in values for token in value.split(b",")}


def expects_continue(fields: dict[bytes, list[bytes]]) -> bool:
    values = fields.get(b"expect")
    if values is None:
        return False
    if len(values) > 1 or values[0].lower() != b"100-continue":
        raise Refused(400, "unknown expectation")
    return True
