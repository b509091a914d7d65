"""Places in a JSON text: which string holds them, and whether it is text or a name that the protocol needs as it stands.

In: a body's bytes and places in it. Out: the strings with these places. Pure, any thread. The body is not decoded: what is not
changed keeps its bytes. It is walked as far as the last place and no further.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

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
_structure = re.compile(rb'["{}\[\]]').search
_MAX_STRIDE = 64 * 1024  # bytes that one search without a result may take before the interpreter can be given away
# Bytes of JSON that one call in C reads or writes: it holds the interpreter, and takes 5 ns a byte at worst.
_PIECE = 64 * 1024
_twofold = re.compile(rb'\\["\\]').search
_between_escapes = re.compile(rb"[ \xc0-\xff]").search  # a blank or a character's first byte: neither is part of an escape


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
    """JSON cut where no escape is."""
    at = 0
    while len(raw) - at > _PIECE and (cut := _between_escapes(raw, at + _PIECE)) is not None:
        yield raw[at : cut.start()]
        at = cut.start()
    yield raw[at:] if at else raw


def firsts(view: bytes, pattern: re.Pattern[bytes], width: int) -> Iterator[int]:
    """Where `pattern`, `width` bytes long at most, is found first in each string."""
    at = 0
    while 0 <= at < len(view):
        found = pattern.search(view, at, at + _MAX_STRIDE + width)
        if found is None:
            at += _MAX_STRIDE
        else:
            yield found.start()
            at = view.find(b'"', found.end())  # the string's end


def locate(view: bytes, spans: list[tuple[int, int, str]], every: bool = False) -> Iterator[Place]:
    """The places of `spans` (in order); with `every` all strings that are text. Spans in names are dropped, spans that leave
    their string are cut at its end."""
    stack: list[tuple[bool, bytes, int]] = []
    in_object, key, zone = False, b"", PROTOCOL
    at, index, count = 0, 0, len(spans)
    while every or index < count:
        found = _next(view, at)
        if found < 0:
            return
        while index < count and spans[index][0] < found:  # outside of strings: in a number
            start, end, kind = spans[index]
            if zone == FREE and _is_number(view, start, end):
                yield Place(start, end, None, FREE, [spans[index]])
            index += 1
        byte = view[found]
        at = found + 1
        if byte == 34:
            end = view.find(b'"', at)
            if end < 0:
                return
            name = in_object and _is_name(view, end + 1)
            if name:
                key = view[at:end]
            inside: list[tuple[int, int, str]] = []
            while index < count and spans[index][0] < end:
                inside.append((spans[index][0], min(end, spans[index][1]), spans[index][2]))
                index += 1
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
    """The text of a JSON string without its quotes. A lone surrogate stays one."""
    return "".join(map(_decode_piece, _pieces(raw)))


def _decode_piece(raw: bytes) -> str:
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


def splice(body: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    """`body` with each (start, end, bytes), in order, put in place."""
    pieces: list[Any] = []
    at = 0
    for start, end, new in edits:
        pieces += (body[at:start], new)
        at = end
    pieces.append(body[at:])
    return b"".join(pieces)
