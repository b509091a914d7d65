"""Heads and chunks as bytes: what goes out to clients and upstreams.

In: status or request line and header pairs, names in lower case (as the parsers hand them out). Out: `bytes` to write.
Hop-by-hop and framing headers among the pairs are dropped: the framing is ours alone to say. A CR, LF or NUL in a value,
or a name that is no token, raises ValueError, so nothing a peer sent can split a message. Loop thread.

Rendering lines takes about 2 us; callers render once for each head that the parser remembers (`messages.Memo`) and put
the rest around the lines for each message.
"""

from __future__ import annotations

import email.utils
import http
import time
from collections.abc import Iterable

from laya.wire.fast import TOKEN_BYTES

# What one connection is told about itself (RFC 9110 7.6.1); names listed in Connection come on top.
HOP_BY_HOP = frozenset([
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
])  # fmt: skip
_RESPONSE_DROPS = HOP_BY_HOP | {b"content-length", b"date"}
# Host and Expect are ours to say; HTTP2-Settings goes with an Upgrade that is not passed on.
_REQUEST_DROPS = HOP_BY_HOP | {b"content-length", b"host", b"expect", b"http2-settings"}

LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_VISIBLE = bytes(range(0x21, 0x7F))
_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\ndate: " % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}
# The last second that was asked for, and its date.
_date_second = 0
_date = b""

Pair = tuple[bytes, bytes]


def http_date() -> bytes:
    """The `date` of now (IMF-fixdate), made anew once a second."""
    global _date_second, _date
    second = int(time.time())
    if second != _date_second:
        _date_second = second
        _date = email.utils.formatdate(second, usegmt=True).encode()
    return _date


def header_lines(headers: Iterable[Pair]) -> bytes:
    """A response's header lines to pass on; hop-by-hop and framing headers and `date` are left out."""
    return _rendered(headers, _RESPONSE_DROPS)


def response_start(
    status: int, lines: bytes, *, content_length: int | None = None, chunked: bool = False, close: bool = False
) -> bytes:
    """A response's head with `date`, around rendered header lines.

    Neither length nor chunked: no framing header (204, 304, or a body that ends with the connection).
    """
    status_line = _STATUS_LINES.get(status) or _other_status(status)
    if content_length is None:
        framing = b"\r\ntransfer-encoding: chunked\r\n" if chunked else b"\r\n"
    elif chunked:
        raise ValueError("both a length and chunked")
    else:
        framing = b"\r\ncontent-length: %d\r\n" % content_length
    return b"".join((status_line, http_date(), framing, lines, b"connection: close\r\n\r\n" if close else b"\r\n"))


def open_request_head(method: bytes, target: bytes, host: bytes, headers: Iterable[Pair]) -> bytes:
    """An upstream request's head without its framing and its end: the caller adds them for each request."""
    if (method + target + host).translate(None, _VISIBLE):
        raise ValueError("a blank or control byte in method, target or host")
    return b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" % (method, target, host, _rendered(headers, _REQUEST_DROPS))


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; b"" for no data, since an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _rendered(headers: Iterable[Pair], drops: frozenset[bytes]) -> bytes:
    pairs = list(headers)
    listed = [value for name, value in pairs if name == b"connection"]
    if listed:
        drops = drops.union(option.strip(b" \t").lower() for value in listed for option in value.split(b","))
    pairs = [pair for pair in pairs if pair[0] not in drops]
    lines = b"".join([b"%b: %b\r\n" % pair for pair in pairs])
    count = len(pairs)
    if lines.count(b"\r\n") != count or lines.count(b"\n") != count or lines.count(b"\r") != count or b"\0" in lines:
        raise ValueError("a header holds CR, LF or NUL")
    names = [name for name, _ in pairs]
    if b"" in names or b"".join(names).translate(None, TOKEN_BYTES):
        raise ValueError("a header name is not a token")
    return lines


def _other_status(status: int) -> bytes:
    if not 100 <= status <= 599:
        raise ValueError(f"no such HTTP status: {status}")
    return b"HTTP/1.1 %d \r\ndate: " % status
