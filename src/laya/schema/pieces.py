"""The top level of a large JSON object, read in pieces: no step holds the interpreter for longer than half a millisecond.

In: a body of megabytes. Out: where its members are, or InvalidRequest for what `codec.decode_members` refuses too (a property
test compares both) and for shapes that no API has. msgspec reads such a body in one call and never lets go of the interpreter,
so the loop would wait although the call runs in another thread. Any thread but the loop's: between pieces this one sleeps.

Structure is followed here, token by token; every text and scalar, and whenever it works a whole run of values at once, is
judged by msgspec, on at most `PIECE` bytes. JSON makes that sound: what is valid between brackets of its own is a run of
whole values.

Where there was a C compiler at installation, one pass in C does it instead, with the interpreter let go (`native/routing.h`),
and this is for what that does not judge.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from laya.errors import InvalidRequest

spans: Callable[[bytes, int, int], list | None]
try:
    from laya.schema.native_routing import spans
except ImportError:  # installed without a C compiler

    def spans(body: bytes, most: int, longest_key: int) -> None:
        return None


# Bytes that msgspec gets at once: 0.2 ms at the most (it skips the densest JSON at 2.7 ms a MiB, text five times as fast).
PIECE = 64 * 1024
# Bytes that a regular expression gets at once: it takes up to 20 ns for each.
TEXT_PIECE = 16 * 1024
# Between two pieces. Long enough that the loop's thread, when it waits, is awake and has the interpreter before we ask again.
REST_S = 20e-6
# Tokens between two rests: about a microsecond each.
STEPS_A_TURN = 256
# Tokens that may need a step of their own. Documents, pictures and long talks need hundreds; a million take two seconds.
MAX_STEPS = 2_000_000
# No API has a hundred members at the top.
MAX_MEMBERS = 1024
MAX_KEY_BYTES = 1024
# As deep as msgspec goes before it meets Python's recursion limit.
MAX_DEPTH = 990
# A code unit of text spelled with escapes: \ud83d\ude00.
LONGEST_ESCAPE = 12

_valid: Any = msgspec.json.Decoder(msgspec.Raw).decode
_blanks = re.compile(rb"[ \t\r\n]*+").match
_text = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL).match
_scalar = re.compile(rb"[-+.0-9A-Za-z]++").match
_CLOSE = {b"{": b"}", b"[": b"]"}
_OPEN = {b"}": b"{", b"]": b"["}
_SEPARATORS = (b"},", b"],", b'",', b",")
_WINDOWS = (PIECE, PIECE // 16)
# Where no run was found none is looked for in the next bytes, and the search counts as so many steps.
TRY_AGAIN = 2048
# Commas tried for one run: elements have a few containers inside.
TRIES = 6
TURN_OF_NO_RUN = 200

Span = tuple[int, int]


def member_spans(body: bytes) -> list[tuple[Span, Span]]:
    """(where the key is, quotes included; where the value is) of each member, in order, repeated ones too. Raises
    InvalidRequest, or msgspec.DecodeError for what is no JSON."""
    found = spans(body, MAX_MEMBERS, MAX_KEY_BYTES)
    return found if found is not None else spans_in_python(body)


def spans_in_python(body: bytes) -> list[tuple[Span, Span]]:
    """The same without C, and for what `spans` does not judge."""
    return _Reader(body).members()


class _Reader:
    __slots__ = ("_body", "_size", "_steps", "_jump_from")

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._size = len(body)
        self._steps = 0
        self._jump_from = 0  # a run was looked for before this offset in vain

    def members(self) -> list[tuple[Span, Span]]:
        found: list[tuple[Span, Span]] = []
        at = self._skip(0)
        self._expect(at, b"{")
        at = self._skip(at + 1)
        if self._body[at : at + 1] != b"}":
            while True:
                key_end = self._string(at)
                value = self._colon(key_end)
                end = self._value(value)
                found.append(((at, key_end), (value, end)))
                if key_end - at > MAX_KEY_BYTES or len(found) > MAX_MEMBERS:
                    raise InvalidRequest("The body's top level is not that of any API: too many members, or a key too long.")
                at = self._skip(end)
                if self._body[at : at + 1] != b",":
                    break
                at = self._skip(at + 1)
            self._expect(at, b"}")
        if self._skip(at + 1) != self._size:
            self._invalid("trailing characters", at + 1)
        return found

    def _value(self, at: int) -> int:
        """Offset behind the value that begins at `at`."""
        return self._container(at) if self._body[at : at + 1] in _CLOSE else self._leaf(at)

    def _container(self, at: int) -> int:
        body, stack = self._body, []
        while True:  # a value begins at `at`
            self._step(1)
            first = body[at : at + 1]
            if first in _CLOSE:
                at = self._skip(at + 1)
                if body[at : at + 1] != _CLOSE[first]:
                    stack.append(_CLOSE[first])
                    if len(stack) > MAX_DEPTH:
                        raise InvalidRequest("The body is nested too deeply.")
                    at = self._next(at, stack[-1])
                    continue
                at += 1
            else:
                at = self._leaf(at)
            at = self._skip(at) if stack else at
            while stack and body[at : at + 1] == stack[-1]:
                self._step(1)
                stack.pop()
                at = self._skip(at + 1) if stack else at + 1
            if not stack:
                return at
            self._expect(at, b",")
            at = self._next(self._skip(at + 1), stack[-1])

    def _next(self, at: int, close: bytes) -> int:
        """Where the next value to look at begins, in a container that ends with `close`: past a run of values, and a key."""
        if at >= self._jump_from:
            at = self._run(at, close)
        return at if close == b"]" else self._colon(self._string(at))

    def _run(self, at: int, close: bytes) -> int:
        """Past as many whole values as can be judged without looking at each; `at` where none can."""
        while (comma := self._last_comma(at, close)) > 0:
            at = self._skip(comma + 1)
        self._jump_from = at + TRY_AGAIN
        self._step(TURN_OF_NO_RUN)
        return at

    def _last_comma(self, at: int, close: bytes) -> int:
        """A comma of this container with nothing but whole values before it, as far behind `at` as a piece reaches; or 0."""
        body, begin = self._body, _OPEN[close]
        for window in _WINDOWS:
            for separator in _SEPARATORS:
                stop = at + window
                for _ in range(TRIES):  # the last ones may be those of containers inside
                    stop = body.rfind(separator, at, stop)
                    if stop < 0:
                        break
                    comma = stop + len(separator) - 1
                    valid = comma > at and _is_valid(begin + body[at:comma] + close)
                    self._rest()
                    if valid:
                        return comma
        return 0

    def _leaf(self, at: int) -> int:
        return self._string(at) if self._body[at : at + 1] == b'"' else self._plain(at)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _string(self, at: int) -> int:
        """Offset behind the text whose quote is at `at`."""
        self._expect(at, b'"')
        body, at = self._body, at + 1
        while True:
            stop = min(at + PIECE, self._size)
            if body.find(b'"', at, stop) >= 0:
                stop = _text(body, at, min(at + TEXT_PIECE, stop)).end()
                if body[stop : stop + 1] == b'"':
                    if not _is_valid(b'"' + body[at : stop + 1]):
                        self._invalid("invalid text", at)
                    return stop + 1
            if stop == self._size:
                self._invalid("text without an end", at)
            at = self._part_of_text(at, stop)

    def _part_of_text(self, at: int, stop: int) -> int:
        """Where the text's next part begins: at most a whole escape before `stop`."""
        self._rest()
        for end in range(stop, max(at, stop - LONGEST_ESCAPE), -1):
            if _is_valid(b'"' + self._body[at:end] + b'"'):
                return end
        self._invalid("invalid text", at)

    def _plain(self, at: int) -> int:
        """Offset behind the number or word at `at`."""
        match = _scalar(self._body, at, at + PIECE)
        if match is None or match.end() == at + PIECE or not _is_valid(match[0]):
            self._invalid("invalid value", at)
        return match.end()

    def _colon(self, at: int) -> int:
        """Where the value behind a key that ends at `at` begins."""
        at = self._skip(at)
        self._expect(at, b":")
        return self._skip(at + 1)

    def _skip(self, at: int) -> int:
        """Past blanks."""
        while True:
            end = _blanks(self._body, at, at + PIECE).end()
            if end < at + PIECE:
                return end
            at = end
            self._rest()

    def _expect(self, at: int, byte: bytes) -> None:
        if self._body[at : at + 1] != byte:
            self._invalid(f"expected {byte.decode()!r}", at)

    # -- manners -------------------------------------------------------------------------------------------------------

    def _step(self, count: int) -> None:
        before = self._steps // STEPS_A_TURN
        self._steps += count
        if self._steps > MAX_STEPS:
            raise InvalidRequest("The body's values are too many and too small to be read.")
        if self._steps // STEPS_A_TURN != before:
            self._rest()

    def _rest(self) -> None:
        time.sleep(REST_S)

    def _invalid(self, what: str, at: int) -> NoReturn:
        raise InvalidRequest(f"The body is not valid JSON: {what} (byte {at})")


def _is_valid(value: bytes) -> bool:
    try:
        _valid(value)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True
