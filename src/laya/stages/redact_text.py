"""A string as the detectors read it: UTF-8 with look-alikes of ASCII made plain, and the way back to the string's own offsets.

In: a decoded JSON string. Out: bytes to scan; spans of them as spans of the string. Pure, any thread.

Made plain: full-width forms (`１３８`, `＠`), digits of other scripts, no-break spaces and hyphens, each one character for
one; and, where the string is JSON or code itself, its own `\\u0040` and `\\/`.
"""

from __future__ import annotations

import bisect
import re

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
_MOST = 1 << 60
_PIECE = 8 * 1024  # characters for one call in C: it holds the interpreter, and translating takes 70 ns for each
_INNER_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|/)")


class Reading:
    """`data` is to be scanned; `span(start, end)` gives offsets in the text for offsets in `data`."""

    __slots__ = ("data", "_plain", "_at", "_char", "_shifts")

    def __init__(self, text: str) -> None:
        plain = text
        if not text.isascii():
            plain = "".join([text[at : at + _PIECE].translate(_LOOK_ALIKES) for at in range(0, len(text), _PIECE)])
        self._shifts: list[tuple[int, int]] = []  # (offset behind an escape in the plain text, what to add from there on)
        if "\\u" in plain or "\\/" in plain:
            plain = self._unescape(plain)
        self._plain = plain
        pieces = [plain[at : at + _PIECE].encode("utf-8", "surrogatepass") for at in range(0, len(plain), _PIECE)]
        self.data = b"".join(pieces)
        self._at = self._char = 0

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Spans must be asked for in order."""
        return self._offset(start), self._offset(end)

    def _offset(self, at: int) -> int:
        if len(self.data) == len(self._plain):
            char = at
        else:
            self._char += len(self.data[self._at : at].decode("utf-8", "surrogatepass"))
            self._at = at
            char = self._char
        if not self._shifts:
            return char
        index = bisect.bisect_right(self._shifts, (char, _MOST)) - 1
        return char + (self._shifts[index][1] if index >= 0 else 0)

    def _unescape(self, text: str) -> str:
        pieces, at, size, shift = [], 0, 0, 0
        for found in _INNER_ESCAPE.finditer(text):
            before = text[at : found.start()]
            char = "/" if found[1] is None else chr(int(found[1], 16)).translate(_LOOK_ALIKES)
            pieces += (before, char)
            size += len(before) + 1
            shift += len(found[0]) - 1
            self._shifts.append((size, shift))
            at = found.end()
        pieces.append(text[at:])
        return "".join(pieces)
