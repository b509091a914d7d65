"""Heads remembered whole: a client's or a backend's head is mostly the same bytes as its last one.

In: a buffer that begins with a head. Out: a `Request` or `Response` equal to what `fast` makes of these bytes, or None (not
mine). Content-Length changes from message to message, so its digits are cut out of the key and read anew. A hit is an equality
of all other bytes, so it can prove nothing that parsing would not. The memo is part of `Limits`, because what is within them
is part of the verdict. Loop thread.

Heads hold credentials: they stay in this process's memory until the memo is full and emptied, and the last one of a connection
until its next message after that, or its end; nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

from laya.wire import fast
from laya.wire.messages import Limits, Request, Response

HEADS_KEPT = 512  # of each direction; emptied when full
HEAD_BYTES_KEPT = 4096  # with the bound above: 2 MiB at most; SDK heads have below 1 KiB
_LENGTH = b"ength: "
_BEFORE_LENGTH = frozenset([b"\nContent-L", b"\ncontent-l"])


def _key(buffer: bytes, head_end: int) -> tuple[bytes, bytes | None]:
    """(the head without the digits of its length, those digits or None where no length line was found)."""
    at = buffer.find(_LENGTH, 0, head_end)
    if at < 0:
        return buffer[:head_end], None
    start = at + 7
    stop = buffer.find(b"\r\n", start, head_end)
    if stop < 0:
        stop = head_end
    return buffer[:start] + buffer[stop:head_end], buffer[start:stop]


def _keeps(buffer: bytes, key: bytes, digits: bytes | None, message: Request | Response) -> bool:
    """Not a head with a repeated name: its list of fields holds the length a second time."""
    fields = message.fields
    if message.repeats or len(key) > HEAD_BYTES_KEPT or not fast.PER_MESSAGE.isdisjoint(fields):
        return False
    if digits is None:
        return b"content-length" not in fields  # spelled in a way that `_key` does not see
    at = buffer.find(_LENGTH)
    return buffer[at - 10 : at] in _BEFORE_LENGTH and fields.get(b"content-length") == digits


def _remember(memo: dict, key: bytes, message) -> None:
    if len(memo) >= HEADS_KEPT:
        memo.clear()
    memo[key] = message
    message.memo.kept = True


def read_request(buffer: bytes, head_end: int, limits: Limits) -> Request | None:
    """As `fast.read_request`."""
    key, digits = _key(buffer, head_end)
    known = limits.request_heads.get(key)
    if known is None:
        request = fast.read_request(buffer, head_end, limits)
        if request is not None and _keeps(buffer, key, digits, request):
            _remember(limits.request_heads, key, request.again(request.content_length, request.fields))
        return request
    if digits is None:
        return known.again(None, known.fields)
    try:
        length = fast.plain_number(digits)
    except fast.Odd:
        return None
    if length > limits.max_body_bytes:
        return None
    if digits == known.fields[b"content-length"]:  # not the number: a leading zero is forwarded as it came
        return known.again(length, known.fields)
    return known.again(length, {**known.fields, b"content-length": digits})


def read_response(buffer: bytes, head_end: int, limits: Limits, method: bytes) -> Response | None:
    """As `fast.read_response`."""
    if method == b"HEAD":
        return fast.read_response(buffer, head_end, limits, method)
    key, digits = _key(buffer, head_end)
    known = limits.response_heads.get(key)
    if known is None:
        response = fast.read_response(buffer, head_end, limits, method)
        if response is not None and _keeps(buffer, key, digits, response):
            _remember(limits.response_heads, key, response.again(response.content_length, response.fields))
        return response
    if digits is None:
        return known.again(None, known.fields)
    try:
        length = fast.plain_number(digits)
    except fast.Odd:
        return None
    if digits == known.fields[b"content-length"]:  # not the number: a leading zero is forwarded as it came
        return known.again(length, known.fields)
    return known.again(length, {**known.fields, b"content-length": digits})


def whole_in_python(data: bytes, heads: dict, max_head_bytes: int, max_body_bytes: int) -> tuple | None:
    """(known head, body, length's digits) when `data` is exactly one message whose head was seen before, else None.

    The most common segment by far, taken in one step: what it accepts, the long way accepts with the same result.
    """
    head_end = data.find(b"\r\n\r\n", 0, max_head_bytes)
    if head_end < 0:
        return None
    at = data.find(_LENGTH, 0, head_end)
    if at < 0:
        known = heads.get(data[:head_end])
        if known is None or known.chunked or len(data) != head_end + 4:
            return None
        return known, b"", None
    start = at + 7
    stop = data.find(b"\r\n", start, head_end + 2)
    digits = data[start:stop]
    known = heads.get(data[:start] + data[stop:head_end])
    if known is None or known.body is not None or not digits.isdigit() or len(digits) > fast.MAX_LENGTH_DIGITS:
        return None  # a body that is set already: a status that has none, whatever length is told
    length = int(digits)
    if len(data) != head_end + 4 + length or length > max_body_bytes:
        return None
    return known, data[head_end + 4 :], digits


whole: Callable[[bytes, dict, int, int], tuple | None]
try:
    from laya.wire.native_whole import whole
except ImportError:  # installed without a C compiler
    whole = whole_in_python
