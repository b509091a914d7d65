"""Numbers written in groups, `138-0013-8000` or `(212) 555-0123`, and those behind a `+`.

In: a window. Out: spans. Pure, any thread. `numbers.py` says how candidates are found.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from laya.stages.detect import checksums, phones
from laya.stages.detect.cards import is_card
from laya.stages.detect.window import NEAR, RIGHT, WORD, Span, Window, after_word, before_word

_BACK = 14  # digits and separators of a form that may stand before the place where its shape shows: `1 85 05 7|8 006`
# One alternative a form, each of bounded length, tried at the beginning of a group.
_IDENTITIES = re.compile(
    rb"""
      (?P<chinese>\d{6}[ \-]\d{8}[ \-]\d{3}[\dXx])
    | (?P<card>\d{4}(?P<s1>[ \-])\d{4}(?P=s1)\d{4}(?P=s1)\d{4}(?:(?P=s1)\d{3})?(?!(?P=s1)?\d)
             | 3\d{3}(?P<s2>[ \-])\d{6}(?P=s2)\d{4,5} | 62\d{4}[ \-]\d{10,13})
    | (?P<french>[1-378][ .]?\d\d[ .]?\d\d[ .]?(?:\d\d|2[ABab])[ .]?\d{3}[ .]?\d{3}[ .]?\d\d)
    | (?P<american>\d{3}(?P<s3>[ \-])\d\d(?P=s3)\d{4})
    | (?P<brazilian>\d{3}\.\d{3}\.\d{3}-\d\d)
    | (?P<swiss>756\.\d{4}\.\d{4}\.\d\d)
    | (?P<belgian>\d\d\.\d\d\.\d\d-\d{3}\.\d\d)
    | (?P<korean>\d{6}-[1-8]\d{6})
    | (?P<nordic>\d{6}[\-+A](?:\d{4}|\d{3}[A-Ya-y]))
    | (?P<indian>[2-9]\d{3}(?P<s4>[ \-])\d{4}(?P=s4)\d{4}(?!(?P=s4)\d))
    """,
    re.X,
).match
_PHONES = re.compile(
    rb"""
      (?P<mobile>1[3-9]\d(?P<s1>[ \-.])\d{4}(?P=s1)\d{4} | 1[3-9]\d[ \-]\d{8} | 1[3-9]\d\d[ \-]\d{3}[ \-]\d{4})
    | (?P<landline>0(?:10|2\d|[3-9]\d\d)\)?[ \-]{0,2}(?:[1-9]\d{6,7}|[1-9]\d{2,3}[ \-]\d{4})(?:-\d{1,5})?)(?!\d|[ \-.]\d\d)
    | (?P<service>[48]00[ \-](?:\d{3}[ \-]\d{4}|\d{4}[ \-]\d{3}))
    | (?P<north>(?:1[ .\-]{1,2}\(?)?[2-9]\d\d\)?[ .\-]{0,2}[2-9]\d\d[ .\-]\d{4})
    | (?P<south>[1-9]\d\)?[ ]9?\d{4}-\d{4})
    | (?P<abroad>00[1-9]\d?\d?(?:[ .\-()]{1,2}\d{1,8}){1,6})
    | (?P<national>0[1-9]\d{0,3}\)?[ .\-/]{1,2}\d{2,8}(?:[ .\-]\d{2,6}){0,4})
    """,
    re.X,
).match
_ANY = re.compile(rb"(?P<announced>\d{2,5}(?:[ .\-]\d{2,8}){1,5})").match  # behind a word such as "phone"
_groups = re.compile(rb"[0-9]+").finditer
_PLUS = re.compile(rb"\+\(?[1-9](?:[ .\-()/]{0,2}[0-9]){6,16}").match
# What a shape must look like where a form begins, but for those that begin with 0: the lengths of its first two groups.
_first_groups = re.compile(
    rb"""
    (?: 0[\-.]{1,2}(?:00|000) | 00[\-.]{1,2}(?:00|0000|00000) | 000[\-.]{1,2}(?:00|000|0000|00000000)
      | 0000[\-.]{1,2}(?:000|0000|000000) | 000000[\-.]{1,2}(?:000|0000|000000?0|0{8}|0{10,13})
    )(?!0)
    """,
    re.X,
).match
_two_groups = re.compile(rb"00-000(?!0*+[a-z_][a-z0_])").search  # one letter may be a check sign
_third_group = re.compile(rb"0?[\-.]").match
_next_group = re.compile(rb"[\-.]0").search
Search = Callable[[Window, bytes, int, int], int]
_SEPARATORS = b" .-()/+"
Out = list[Span]


def find_grouped(window: Window, start: int, end: int, out: Out) -> None:
    """Chains of short groups that begin here, in the shape. Each is looked at from its beginning, once for each of the shapes
    that it may show."""
    for search, second in ((_pair, 3), (_dotted, 4), (_pairs, 3), (_dotted_pairs, 3)):
        _chains(window, start, end, search, second, out)


def _chains(window: Window, at: int, limit: int, search: Search, second: int, out: Out) -> None:
    """Places that `search` finds; their second group begins at `second`."""
    shape, stop, done = window.shape, limit + RIGHT, 0
    while (at := search(window, shape, at, stop)) >= 0 and at < limit:
        end = _chain(window, at, done, out)
        done = end or at + second  # behind the pair: a form may begin with its second group
        at = end or at + 1


def _pair(window: Window, shape: bytes, at: int, stop: int) -> int:
    """Two groups, the second of which is no beginning of a word, as where a hash follows a number."""
    found = _two_groups(shape, at, stop)
    return -1 if found is None else found.start()


def _dotted(window: Window, shape: bytes, at: int, stop: int) -> int:
    """Two groups with a dot between are mostly a decimal fraction: the forms looked for have a third."""
    at = shape.find(b"000.000", at, stop)
    while at >= 0 and _third_group(shape, at + 7) is None:
        at = shape.find(b"000.000", at + 4, stop)
    return at


def _pairs(window: Window, shape: bytes, at: int, stop: int, needle: bytes = b"00-00-00-00") -> int:
    """Four pairs, of a number that begins with the first of them, and that with 0: else they are of a date."""
    at = shape.find(needle, at, stop)
    while at >= 0 and (window.text[window.base + at] != 48 or (at and shape[at - 1] == 48)):
        at = shape.find(needle, at + 3, stop)
    return at


def _dotted_pairs(window: Window, shape: bytes, at: int, stop: int) -> int:
    return _pairs(window, shape, at, stop, b"00.00.00.00")


def _chain(window: Window, at: int, done: int, out: Out) -> int:
    """Look for a form that begins with a group of the chain around `at` and before that place; the end of the one that was
    found, 0 for none."""
    shape, base = window.shape, window.base
    ahead = shape[at - _BACK if at > _BACK else 0 : at]
    start = max(done, at - len(ahead) + len(ahead.rstrip(b"0-.ab")))  # with the letters of French numbers
    if shape[start] != 48 or (start and shape[start - 1] == 48):
        start = _next(shape, start, at + 1)
    while 0 <= start <= at:
        span = _read(window, base + start)
        if span is not None:
            out.append(span)
            if span[2] == "phone":
                window.phone_end = span[1]
            return span[1] - base
        start = _next(shape, start, at + 1)
    return 0


def _next(shape: bytes, start: int, end: int) -> int:
    """Where the next group begins, -1 for none."""
    found = _next_group(shape, start, end)
    return -1 if found is None else found.start() + 1


def _read(window: Window, start: int) -> Span | None:
    """The number whose first group begins at `start`."""
    text, shape, at = window.text, window.shape, start - window.base
    possible = text[start] == 48 or _first_groups(shape, at) is not None
    if not possible and shape.rfind(b"0", at - NEAR if at > NEAR else 0, at) >= 0 and not window.follows_phone(start):
        return None  # as most chains in tables of numbers
    before = text[start - 1] if start else 32
    if before in WORD and after_word(text, start):
        return None
    if before in b".-/" and text[start - 2 : start - 1].isalnum() and window.phone_end != start - 1:
        return None
    if possible:
        found = _IDENTITIES(text, start)
        if found is not None and (span := _checked_span(window, found, start, _ID_CHECKS)) is not None:
            return span
        found = _PHONES(text, start)
        if found is not None and (span := _checked_span(window, found, start, _PHONE_CHECKS)) is not None:
            return span
    if phones.may_be_announced(window, start) and (found := _ANY(text, start)) is not None:
        return _checked_span(window, found, start, _ANY_CHECKS)
    return None


def _checked_span(window: Window, found: re.Match[bytes], start: int, checks: dict[str, Callable]) -> Span | None:
    text, end = window.text, found.end()
    if before_word(text, end) or _goes_on(text, end):
        return None
    kind = checks[found.lastgroup](window, start, end)
    if not kind:
        return None
    opened = text[start - 1 : start] == b"(" and text.find(b")", start, end) >= 0
    return start - 1 if opened else start, end, kind


def _goes_on(text: bytes, end: int) -> bool:
    """More digits follow behind a sign: an address, a date, a longer chain."""
    return text[end : end + 1] in (b".", b"-") and text[end + 1 : end + 2].isdigit()


def read_bracketed(window: Window, at: int) -> Span | None:
    """The number whose last group begins at `at`, behind an area code in brackets."""
    text = window.text
    opened = text.rfind(b"(", max(0, at - 9), at)
    return _read(window, opened + 1) if opened >= 0 and text[opened + 1 : opened + 2].isdigit() else None


def find_international(window: Window, out: Out) -> None:
    """`+`, a country's code, and as many groups as a number there may have."""
    text, end = window.text, window.end
    start = text.find(b"+", window.start, end)
    while start >= 0:
        found = _PLUS(text, start)
        if found is not None and not after_word(text, start):
            stop = _abroad_end(text, start, found.end())
            if stop:
                out.append((start, stop, "phone"))
        start = text.find(b"+", start + 1, end)


def _abroad_end(text: bytes, start: int, stop: int) -> int:
    """The end of the international number in text[start:stop], 0 for none; it ends where a group does."""
    given, ends, places = b"", [], []
    for group in _groups(text, start, stop):
        given += group[0]
        if group.end() < stop or not text[stop : stop + 1].isdigit():
            ends.append(len(given))
            places.append(group.end())
    skip = 2 if given[:2] == b"00" else 0
    count = phones.international(given[skip:], [end - skip for end in ends if end > skip])
    if not count:
        return 0
    end = places[ends.index(count + skip)]
    return 0 if before_word(text, end) or _goes_on(text, end) else end


def _digits(window: Window, start: int, end: int) -> bytes:
    return window.text[start:end].translate(None, _SEPARATORS)


def _checked(check: Callable[[bytes], bool], kind: str = "id") -> Callable[[Window, int, int], str]:
    return lambda window, start, end: kind if check(_digits(window, start, end)) else ""


def _american(window: Window, start: int, end: int) -> str:
    """A Social Security number has no check digit, but its grouping is nobody else's, and some groups were never given."""
    area, group, serial = (window.text[start:end].replace(b" ", b"-")).split(b"-")
    if area in (b"000", b"666") or group == b"00" or serial == b"0000" or area == b"123" and group == b"45":
        return ""
    if area[:1] == b"9":  # a taxpayer's number
        return "id" if group[:1] in b"56789" else ""
    return "id"


def _nordic(window: Window, start: int, end: int) -> str:
    text = window.text[start:end]
    if text[7:].isdigit() and text[6:7] != b"A" and checksums.swedish(text[:6] + text[7:]):
        return "id"
    return "id" if checksums.finnish(text[:6], text[7:]) else ""


def _announced(window: Window, start: int, end: int) -> str:
    return "phone" if phones.is_announced(window, start, _digits(window, start, end)) else ""


def _national(window: Window, start: int, end: int) -> str:
    pairs = window.text[start:end].translate(None, b"()").replace(b" ", b"-").replace(b".", b"-").split(b"-")
    if all(len(pair) == 2 for pair in pairs) and len(pairs) != 5:
        return ""  # in pairs only French numbers are written, which have five
    return "phone" if phones.national(_digits(window, start, end)) else ""


def _south(window: Window, start: int, end: int) -> str:
    """Brazilian: the area in brackets, or a mobile number, which begins with 9."""
    digits = _digits(window, start, end)
    return "phone" if window.text[start + 2 : start + 3] == b")" or (len(digits) == 11 and digits[2:3] == b"9") else ""


def _abroad(window: Window, start: int, end: int) -> str:
    return "phone" if _abroad_end(window.text, start, end) == end else ""


def _always(window: Window, start: int, end: int) -> str:
    return "phone"


_ID_CHECKS = {
    "chinese": _checked(checksums.chinese), "card": _checked(is_card, "card"), "french": _checked(checksums.french),
    "american": _american, "brazilian": _checked(checksums.brazilian), "swiss": _checked(checksums.swiss),
    "belgian": _checked(checksums.belgian), "korean": _checked(checksums.korean), "nordic": _nordic,
    "indian": _checked(checksums.verhoeff),
}  # fmt: skip
_PHONE_CHECKS = {
    "mobile": _checked(phones.chinese_mobile, "phone"), "landline": _always, "service": _always,
    "north": _checked(phones.north_american, "phone"), "south": _south, "abroad": _abroad, "national": _national,
}  # fmt: skip
_ANY_CHECKS = {"announced": _announced}
