"""Places in a JSON text: which string holds them, and whether it is text or a name that the protocol needs as it stands.

In: a body's bytes and places in it. Out: the strings with these places. Pure, any thread. The body is not decoded: what is not
changed keeps its bytes. It is walked as far as the last place and no further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import orjson

PROTOCOL, FREE, LEFT = 0, 1, 2  # members of the API; somebody's data, whose keys are data too; not to be touched

# Members whose strings are names, not text: a model, an id, a kind. What is not here is looked at, whatever it is.
_NAMES = frozenset(
    b"model role type id call_id tool_call_id tool_use_id item_id previous_response_id response_id prompt_cache_key object"
    b" tool_choice encoding_format service_tier finish_reason stop_reason status format detail media_type effort".split()
)
# What the upstream fetches or decodes: changed, it is broken. (A text document in `data` is text, and is looked at.)
_FETCHED = frozenset(b"url image_url file_url".split())
_BLOBS = frozenset(b"data file_data b64_json encrypted_content signature redacted_thinking".split())
_DATA_OBJECTS = frozenset(b"state input arguments metadata criteria".split())  # objects whose members the client invents
_LOGPROBS = frozenset(b"logprobs top_logprobs".split())
_is_blob = re.compile(rb"[A-Za-z0-9+/=_\-]{64}").match
_MAX_KEY = 256  # bytes of a member's name that are looked at: those that mean something are short
_structure = re.compile(rb'["{}\[\]]').search
# Bytes that one call in C works on, by what it takes for each: while it runs it holds the interpreter, and the loop waits.
_MAX_STRIDE = 32 * 1024  # a search: 20 ns at worst
_PIECE = 64 * 1024  # to replace some bytes by others: 5 ns
_TEXT_PIECE = 8 * 1024  # to decode, to look for placeholders, to replace look-alikes: 70 ns
_COPIED = 256 * 1024
_JOINED = 512  # pieces joined at once
_twofold = re.compile(rb'\\["\\]').search
# Where a string in a view may be cut: before a blank, a character beyond ASCII, an escape (but for the second half of a pair),
# or where no escape is near.
_between = re.compile(
    rb"[ \xc0-\xff\x00]|(?<!\x00)\\(?:(?!u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\))"
    rb"|(?<=[^\\\x00\x80-\xff]{12})"
).search


class Place(NamedTuple):
    """A string (the quotes left out) or, with `key` None, a bare number; `spans` lie in it, in order."""

    start: int
    end: int
    key: bytes | None
    zone: int
    spans: list[tuple[int, int, str]]


def plain_view(body: bytes) -> bytes:
    """The body with `\\\\` and `\\"` made unlike any syntax, at the same offsets: then each quote begins or ends a string.

    A backslash becomes NUL and backslash, a quote inside a string NUL and SOH.
    """
    if b"\\" not in body:
        return body
    pieces = list(_pieces(body))
    changed = [_plain(piece) for piece in pieces]
    return body if changed == pieces else b"".join(changed)


def _plain(piece: bytes) -> bytes:
    if _twofold(piece) is None:
        return piece
    # In two steps: the backslash of `\\\\` must not escape a quote behind it. JSON holds no STX (2) of its own.
    return piece.replace(b"\\\\", b"\0\2").replace(b'\\"', b"\0\1").replace(b"\2", b"\\")


def _pieces(raw: bytes) -> Iterator[bytes]:
    """JSON cut where no backslash stands before."""
    at = 0
    while at < len(raw):
        piece = raw[at : at + _PIECE]
        if at + _PIECE < len(raw) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]
        yield piece
        at += len(piece)


def parts_of(view: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where a string can be cut into parts that can be decoded by themselves: (start, end) of each."""
    while end - start > _TEXT_PIECE and (found := _between(view, start + _TEXT_PIECE, end)) is not None:
        yield start, found.start()
        start = found.start()
    yield start, end


def first_byte(body: bytes) -> bytes:
    """The first that is no white space."""
    for at in range(0, len(body), _PIECE):
        if rest := body[at : at + _PIECE].lstrip():
            return rest[:1]
    return b""


def firsts(view: bytes, pattern: re.Pattern[bytes], width: int, at: int = 0) -> Iterator[int]:
    """Where `pattern`, `width` bytes long at most, is found first in each string from `at` on."""
    while 0 <= at < len(view):
        found = pattern.search(view, at, at + _MAX_STRIDE + width)
        if found is None:
            at += _MAX_STRIDE
        else:
            yield found.start()
            at = view.find(b'"', found.end())  # the string's end


def locate(view: bytes, spans: Iterable[tuple[int, int, str]], every: bool = False) -> Iterator[Place]:
    """The places of `spans` (in order); with `every` all strings that are text. Spans in names are dropped, spans that leave
    their string are cut at its end."""
    spans = iter(spans)
    span = next(spans, None)
    stack: list[tuple[bool, bytes, int]] = []
    in_object, key, zone = False, b"", PROTOCOL
    at = 0
    while every or span is not None:
        found = _next(view, at)
        if found < 0:
            return
        while span is not None and span[0] < found:  # outside of strings: in a number
            if zone == FREE and _is_number(view, span[0], span[1]):
                yield Place(span[0], span[1], None, FREE, [span])
            span = next(spans, None)
        byte = view[found]
        at = found + 1
        if byte == 34:
            end = view.find(b'"', at)
            if end < 0:
                return
            name = in_object and _is_name(view, end + 1)
            if name:
                key = view[at : min(end, at + _MAX_KEY)]
            inside: list[tuple[int, int, str]] = []
            while span is not None and span[0] < end:
                inside.append((span[0], min(end, span[1]), span[2]))
                span = next(spans, None)
            if (inside or every) and (zone == FREE or (not name and zone == PROTOCOL and _is_text(view, key, at, end))):
                yield Place(at, end, b"" if name else key, zone, inside)
            at = end + 1
        elif byte in b"{[":
            stack.append((in_object, key, zone))
            in_object = byte == 123
            if zone == PROTOCOL:
                zone = FREE if in_object and key in _DATA_OBJECTS else LEFT if key in _LOGPROBS else PROTOCOL
        elif stack:
            in_object, key, zone = stack.pop()


def _next(view: bytes, at: int) -> int:
    """The next quote or bracket, -1 for none."""
    while at < len(view):
        found = _structure(view, at, at + _MAX_STRIDE)
        if found is not None:
            return found.start()
        at += _MAX_STRIDE
    return -1


def _is_name(view: bytes, at: int) -> bool:
    while view[at : at + 1] in (b" ", b"\n", b"\t", b"\r"):
        at += 1
    return view[at : at + 1] == b":"


def _is_text(view: bytes, key: bytes, start: int, end: int) -> bool:
    if key in _NAMES or (view.startswith(b"data:", start) and b";base64," in view[start : start + 100]):
        return False
    if key in _FETCHED:
        return not view.startswith((b"http:", b"https:"), start)
    return key not in _BLOBS or _is_blob(view, start, end) is None


def _is_number(view: bytes, start: int, end: int) -> bool:
    return view[start - 1 : start] in (b":", b",", b"[", b" ", b"\n", b"\t") and (
        view[end : end + 1] in (b",", b"}", b"]", b" ", b"\n", b"\r", b"\t")
    )


def decode_string(raw: bytes) -> str:
    """The text of a JSON string, or of a part of one, without quotes. A lone surrogate stays one."""
    try:
        return orjson.loads(b'"%b"' % raw)
    except orjson.JSONDecodeError:
        return json.loads(b'"%b"' % raw, strict=False)


def encode_string(text: str) -> bytes:
    """A JSON string without its quotes."""
    return b"".join([_encode_piece(text[at : at + _PIECE]) for at in range(0, len(text), _PIECE)])


def _encode_piece(text: str) -> bytes:
    try:
        return orjson.dumps(text)[1:-1]
    except TypeError:  # lone surrogates
        return json.dumps(text)[1:-1].encode()


class Edited:
    """A copy of a body with other bytes in some places, which must be given in order."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._pieces: list[bytes] = []
        self._last: list[bytes] = []  # not joined yet: to join a million small pieces at once takes 50 ms
        self._at = 0

    def put(self, start: int, end: int, new: bytes) -> None:
        self._copy(start)
        self._last.append(new)
        self._at = end

    def whole(self) -> bytes:
        if self._at == 0 and not self._last:
            return self._body
        self._copy(len(self._body))
        self._pieces.append(b"".join(self._last))
        return b"".join(self._pieces)  # which gives the interpreter away where it is long

    def _copy(self, end: int) -> None:
        if end - self._at <= _COPIED and len(self._last) < _JOINED:  # as mostly
            self._last.append(self._body[self._at : end])
            return
        for at in range(self._at, end, _COPIED):
            self._last.append(self._body[at : min(end, at + _COPIED)])
            if len(self._last) > _JOINED or end - self._at > _COPIED:
                self._pieces.append(b"".join(self._last))
                self._last.clear()
