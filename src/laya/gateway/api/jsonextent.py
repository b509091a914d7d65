"""Where a JSON object or array ends in text that is still growing. Pure.

In: the same text again and again, longer each time, beginning with `{` or `[`. Out: the offset behind its closing bracket. Only
brackets and strings are looked at; whether it is valid JSON is the decoder's question.
"""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class JsonExtent:
    """Each character is looked at once, however often `find` is called."""

    __slots__ = ("_at", "_depth", "_in_string")

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """The offset behind the value's end, or None while it is open."""
        while True:
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, self._at)
            if found is None:
                self._at = len(text)
                return None
            character = found.group()
            if character == "\\":
                if found.end() == len(text):
                    self._at = found.start()  # what it escapes has not come yet
                    return None
                self._at = found.end() + 1
                continue
            self._at = found.end()
            if character == '"':
                self._in_string = not self._in_string
            elif character in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return self._at
