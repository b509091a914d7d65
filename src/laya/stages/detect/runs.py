"""Runs of a token's alphabet (letters, digits, `_-/+`), which may be keys: 16 bytes and more.

In: a window. Out: (start, end) of each run that begins in it, in the text, in order. Pure, any thread.

What is taken for a key has a digit, or stands behind a sign of assignment. So where both are few, as in prose, runs are looked
for around them alone; elsewhere in a shape of the whole window. Both ways find the same keys.
"""

from __future__ import annotations

import re

from laya.stages.detect.window import DIGITS, ESCAPED, LETTERS, MAX_PLACES, Window

ALPHABET = DIGITS + LETTERS + b"_-/+"
_SHAPE = bytes([97 if byte in ALPHABET else 32 for byte in range(256)])
LEAST = 16  # the shortest key with a prefix that is known, less one
_RUN = b"a" * LEAST
_in_text = re.compile(rb"[A-Za-z0-9_\-/+]{16,}+")
_AHEAD = 5  # bytes before a key in which its sign stands
_assigned = re.compile(rb"[=:][^A-Za-z0-9_\-/+]{0,4}(?=[A-Za-z0-9_\-/+]{16})").match
_SHARE = 8  # of a window, one in so many bytes with digits
MAX_SIGNS = 64  # of assignment in a window: above, a search through all of it costs less
# Bytes before a digit in which its run begins: one that has no digit in so many is none that anybody drew by chance.
_BACK = 512


def runs_of(window: Window) -> list[tuple[int, int]]:
    """An end may be cut at the window's margin."""
    if window.runs is None:
        found = _around_digits(window)
        window.runs = _everywhere(window) if found is None else found
    return window.runs


def _around_digits(window: Window) -> list[tuple[int, int]] | None:
    """None where that would take longer than to look everywhere."""
    cut, base, digits = window.cut, window.base, window.digits
    if len(digits) > MAX_PLACES or sum(end - start for start, end in digits) > len(cut) // _SHARE or not cut.isascii():
        return None
    signs = _signs(cut, max(0, window.start - base - _AHEAD), window.end - base)
    if signs is None:
        return None
    at, found = 0, set()
    for start, end in digits:
        if end <= at:
            continue  # of the run before
        back = max(at, start - _BACK)
        at = back + len(cut[back:start].rstrip(ALPHABET))
        while (run := _in_text.search(cut, at, end + LEAST)) is not None and run.start() < end:
            at = _in_text.match(cut, run.start()).end()
            found.add((base + run.start(), base + at))
    for sign in signs:
        if (ahead := _assigned(cut, sign)) is not None:
            run = _in_text.match(cut, ahead.end())
            found.add((base + run.start(), base + run.end()))
    return [_unescaped(window.text, *run) for run in sorted(found) if window.start <= run[0] < window.end]


def _unescaped(text: bytes, start: int, end: int) -> tuple[int, int]:
    """A run without the letter of an escape (`\\n`)."""
    return (start + 1, end) if start and text[start - 1] == 92 and text[start] in ESCAPED else (start, end)


def _signs(cut: bytes, begin: int, end: int) -> list[int] | None:
    found: list[int] = []
    for sign in (b"=", b":"):
        at = cut.find(sign, begin, end)
        while at >= 0:
            found.append(at)
            if len(found) > MAX_SIGNS:
                return None
            at = cut.find(sign, at + 1, end)
    return found


def _everywhere(window: Window) -> list[tuple[int, int]]:
    shape, base = window.cut.translate(_SHAPE), window.base
    find, limit, size, found = shape.find, window.end - base, len(shape), []
    begin = window.start - base
    if begin and shape[begin - 1] == 97:  # a run that began in the window before
        begin = find(b" ", begin)
    at = find(_RUN, begin) if begin >= 0 else -1
    while 0 <= at < limit:
        end = find(b" ", at + LEAST)
        if end < 0:
            end = size
        found.append(_unescaped(window.text, base + at, base + end))
        at = find(_RUN, end)
    return found
