"""Tokens of a forwarded answer, read from the `usage` in it as it passes.

In: the bytes of an answer of any API, plain or streamed, in any chunking. Out: (prompt, completion) where the answer tells
them. Nothing is decoded: the numbers are found by their names, which no JSON string holds without backslashes. Loop thread.
"""

from __future__ import annotations

import re

_COUNT = re.compile(rb'"(?:(prompt|input)|completion|output)_tokens"\s*:\s*(\d{1,12})')
_MARK = b'_tokens"'
# Longer than a name with its number: one that is split over two pieces is found in the second.
_TAIL = 64
# Usage stands at the end of an answer, in streams at the beginning too: of a long piece no more is searched.
_LOOKED_AT = 32 * 1024


class UsageWatch:
    __slots__ = ("prompt", "completion", "_tail")

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.completion: int | None = None
        self._tail = b""

    def see(self, data: bytes) -> None:
        if len(data) > _LOOKED_AT:
            data = data[-_LOOKED_AT:]
        data = self._tail + data if self._tail else data
        self._tail = data[-_TAIL:]
        if _MARK not in data:
            return
        for found in _COUNT.finditer(data):  # the last of each counts: streams tell them again as they grow
            if found[1] is not None:
                self.prompt = int(found[2])
            else:
                self.completion = int(found[2])

    @property
    def tokens(self) -> tuple[int, int] | None:
        if self.prompt is None and self.completion is None:
            return None
        return self.prompt or 0, self.completion or 0
