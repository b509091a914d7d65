"""A string as the detectors read it: UTF-8 with look-alikes of ASCII made plain, and the way back to the string's own offsets.

In: a string of a body. Out: bytes to scan; for spans of them what becomes of the body. Pure, any thread. A string may have
megabytes: it is read in parts, so that no step holds the interpreter for long, and parts without a span keep their bytes.

Made plain: full-width forms (`１３８`, `＠`), digits of other scripts, no-break spaces and hyphens, each one character for
one; and, where the string is JSON or code itself, its own `\\u0040` and `\\/`.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from laya.stages.detect.window import Span
from laya.stages.redact_json import decode_string, encode_string, parts_of

_LOOK_ALIKES = {
    **{0xFF01 + offset: 0x21 + offset for offset in range(94)},
    **{start + digit: 48 + digit for start in (0x660, 0x6F0, 0x966, 0x9E6) for digit in range(10)},
    0xA0: 32, 0x2007: 32, 0x202F: 32, 0x3000: 32, **dict.fromkeys(range(0x2010, 0x2016), 45), 0x2212: 45,
}  # fmt: skip
# In UTF-8, those that can hide a value: digits, `@`, `+`, `-`, dashes and odd spaces. Full-width commas hide none.
HIDING = re.compile(
    rb"\xef\xbc[\x8b\x8d\x8e\x90-\x99\xa0]|\xef\xbd[\x81-\x9a]|\xef\xbc[\xa1-\xba]|\xd9[\xa0-\xa9]|\xdb[\xb0-\xb9]"
    rb"|\xe0(?:\xa5[\xa6-\xaf]|\xa7[\xa6-\xaf])|\xc2\xa0|\xe2\x80[\x87\x90-\x95\xaf]|\xe2\x88\x92|\xe3\x80\x80"
)
_INNER_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|/)")


class _Part(NamedTuple):
    """Bytes `start` to `end` of the body are `text`, whose plain form has `size` characters. `ends` and `shifts` (of the same
    length): from a place in the plain form on, so much is to be added."""

    start: int
    end: int
    text: str
    size: int
    ends: list[int]
    shifts: list[int]


class Reading:
    """`data` is to be scanned; `edits` gives what becomes of the body where `data` has spans."""

    __slots__ = ("data", "_parts", "_starts", "_met")

    def __init__(self, body: bytes, view: bytes, start: int, end: int) -> None:
        self._parts: list[_Part] = []
        self._starts: list[int] = []  # of the parts in `data`
        self._met = (0, 0, 0)  # the place that was asked for last: its part, its offset in `data`, its character
        pieces, size = [], 0
        for begins, ends in parts_of(view, start, end):
            text = decode_string(body[begins:ends])
            plain = text if text.isascii() else text.translate(_LOOK_ALIKES)
            places: list[int] = []
            shifts: list[int] = []
            if "\\u" in plain or "\\/" in plain:
                plain = _unescape(plain, places, shifts)
            pieces.append(plain.encode("utf-8", "surrogatepass"))
            self._parts.append(_Part(begins, ends, text, len(plain), places, shifts))
            self._starts.append(size)
            size += len(pieces[-1])
        self.data = b"".join(pieces)

    def edits(self, spans: Iterable[Span], made: Callable[[Span, str], str]) -> Iterator[tuple[int, int, bytes]]:
        """(start, end, new bytes) of the body. `made(span, text)` is what stands in the place of the text. Spans in order."""
        parts = self._parts
        index, char, new = 0, 0, None  # a part; how much of its text was dealt with; its new text, where it has one
        for span in spans:
            first = bisect_right(self._starts, span[0]) - 1
            last = max(first, bisect_left(self._starts, span[1]) - 1)
            if index < first:
                if new is not None:
                    yield self._edit(index, [*new, parts[index].text[char:]])
                index, char, new = first, 0, None
            begins, ends = self._char(first, span[0]), self._char(last, span[1])
            text = parts[first].text
            new = [] if new is None else new
            new.append(text[char:begins])
            if last == first:
                new.append(made(span, text[begins:ends]))
            else:
                between = [part.text for part in parts[first + 1 : last]]
                new.append(made(span, "".join([text[begins:], *between, parts[last].text[:ends]])))
                yield self._edit(first, new)
                for part in parts[first + 1 : last]:
                    yield part.start, part.end, b""
                index, new = last, []
            char = ends
        if new is not None:
            yield self._edit(index, [*new, parts[index].text[char:]])

    def _edit(self, index: int, new: list[str]) -> tuple[int, int, bytes]:
        part = self._parts[index]
        return part.start, part.end, encode_string("".join(new))

    def _char(self, index: int, at: int) -> int:
        """The character of a part's text at an offset in `data`."""
        part, begin = self._parts[index], self._starts[index]
        stop = self._starts[index + 1] if index + 1 < len(self._starts) else len(self.data)
        if stop - begin == part.size:  # ASCII
            char = at - begin
        else:
            known, before, char = self._met
            if known != index or before > at:
                before, char = begin, 0
            char += len(self.data[before:at].decode("utf-8", "surrogatepass"))
            self._met = (index, at, char)
        place = bisect_right(part.ends, char) - 1
        return char + part.shifts[place] if place >= 0 else char


def _unescape(text: str, ends: list[int], shifts: list[int]) -> str:
    pieces, at, size, shift = [], 0, 0, 0
    for found in _INNER_ESCAPE.finditer(text):
        before = text[at : found.start()]
        char = "/" if found[1] is None else chr(int(found[1], 16)).translate(_LOOK_ALIKES)
        pieces += (before, char)
        size += len(before) + 1
        shift += len(found[0]) - 1
        ends.append(size)
        shifts.append(shift)
        at = found.end()
    pieces.append(text[at:])
    return "".join(pieces)
