"""Telephone numbers, identity numbers and cards: everything that is made of digits.

In: a window. Out: spans. Pure, any thread.

Candidates are found in the shape, where it has digits at all: eight digits in a row; a letter and six digits; two or three
groups of digits (`grouped.py`). Each form that is looked for holds one of them. What can be said by the bytes around it alone,
as for most runs of digits in hashes and behind `id=`, is said within the search. What stands at a candidate is then read by one
bounded pattern or none, and checked: by its check digits, by its grouping, or by a word in front of it. The time is linear: a
candidate costs a bounded amount.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from laya.stages.detect import checksums, grouped, phones
from laya.stages.detect.cards import is_card
from laya.stages.detect.window import CAPITALS, NEAR, RIGHT, Span, Window, after_word, before_word

_NAMED = frozenset({8, 9, 10, 12})
_NAMING = phones.ENDINGS | {b"sn", b"ar", b"ai", b"is"}  # and the ends of the names of identity numbers of these lengths
_LEAST = 6  # digits and separators of the shortest form, but for its letters
_MAX_SOLID = 19  # the longest card number; longer runs of digits are none of ours
# Runs of digits in a shape. The zeros at its beginning are spelled out: what is literal is searched for quickly.
_runs = re.compile(
    rb"""
    000000(?<!0{7})
    (?: 00 (?<![a-z0_]{2}[a-z_]0{8})  # not inside a word: a letter may be of `\n`, and another of a Taiwanese number
        (?: (?=000(?!0)|00000)  # eleven digits, thirteen and more: they may speak for themselves
          | (?=-?[a-z](?![a-z0_]))  # Spanish
          | (?<![a-z][\-=:\#]0{8}) | (?<=(?:%b)[\-=:\#]0{8})  # not behind one sign and a word that announces none (`id=`)
        )
        0*+ (?![a-z_][a-z0_])
      | (?<=[a-z]0{6}) (?<![a-z0_]{3}[a-z]0{6})
        (?: (?=-[0a]-|[a-d](?![a-z0_])) | 0(?=[a-z](?![a-z0_])) )  # six or seven digits: from Hong Kong, British, Spanish ...
    )
    """
    % b"|".join(sorted(ending for ending in _NAMING if len(ending) == 2)),
    re.X,
).finditer
_HONG_KONG = re.compile(rb"\(([0-9Aa])\)")
_letter = frozenset(CAPITALS).__contains__

Check = Callable[[Window, int, int], "Span | None"]
Out = list[Span]


def find_numbers(window: Window, out: Out) -> None:
    limit = window.end - window.base
    for start, end in window.digits:
        if end - start >= _LEAST and start < limit:
            _solid(window, start, min(end, limit), out)
            grouped.find_grouped(window, start, min(end, limit), out)
    grouped.find_international(window, out)


def _solid(window: Window, start: int, limit: int, out: Out) -> None:
    """Runs of digits that begin before `limit`, each looked at once."""
    shape, base = window.shape, window.base
    for found in _runs(shape, start, limit + RIGHT):
        at, end = found.span()
        if at >= limit:
            return
        length, begin = end - at, base + at
        if length in _NAMED and _behind_a_number(window, at, end):
            continue
        if length <= _MAX_SOLID:
            _keep(window, _BY_LENGTH[length](window, begin, base + end), out)


def _behind_a_number(window: Window, at: int, end: int) -> bool:
    """No word announces a run of the shape, since another number stands there: only letters of its own could tell."""
    shape, base, text = window.shape, window.base, window.text
    if shape.rfind(b"0", at - NEAR if at > NEAR else 0, at) < 0:
        return False
    start = base + at
    if text[start - 1] == 41 or text[start - 2] == 41 or window.follows_phone(start):
        return False
    return not (_letter(text[start - 1]) or (end < len(shape) and _letter(text[base + end])))


def _keep(window: Window, span: Span | None, out: Out) -> None:
    if span is not None:
        out.append(span)
        if span[2] == "phone":
            window.phone_end = span[1]


def _alone(text: bytes, start: int, end: int) -> bool:
    """No part of a longer word, of a decimal fraction, of a UUID or of another chain of digits."""
    if after_word(text, start) or before_word(text, end):
        return False
    if start > 1 and text[start - 1] in b".-+" and text[start - 2 : start - 1].isalnum():
        return False
    return not (end + 1 < len(text) and text[end] in b".-" and text[end + 1 : end + 2].isalnum() and text[end + 1] < 128)


def _behind(window: Window, start: int, firsts: bytes) -> int:
    """Where a number begins that has one of these letters in front, -1 for none."""
    text = window.text
    if start and text[start - 1] in firsts and not after_word(text, start - 1):
        return start - 1
    return -1


def _six(window: Window, start: int, end: int) -> Span | None:
    """Hong Kong `A123456(3)`; British `QQ 123456 C` behind its name."""
    text = window.text
    found = _HONG_KONG.match(text, end)
    letters = 2 if start > 1 and _letter(text[start - 2]) else 1
    begin = start - letters
    if begin < 0 or not _letter(text[start - 1]) or after_word(text, begin):
        return None
    if found is not None and checksums.hong_kong(text[begin:start], text[start:end], found[1]):
        return begin, found.end(), "id"
    if letters == 2 and text[end : end + 1] in (b"A", b"B", b"C", b"D") and not before_word(text, end + 1):
        if any(len(gap) < 24 for _, gap, _ in window.before(begin, ("nino",))):
            return begin, end + 1, "id"
    return None


def _seven(window: Window, start: int, end: int) -> Span | None:
    """Spanish NIE `X1234567L`, Singaporean `S1234567D`."""
    text = window.text
    if end >= len(text) or not _letter(text[end]) or before_word(text, end + 1):
        return None
    if (begin := _behind(window, start, b"XYZ")) >= 0 and checksums.spanish(text[begin : end + 1]):
        return begin, end + 1, "id"
    if (begin := _behind(window, start, b"STFGM")) >= 0:
        if checksums.singaporean(text[begin], text[start:end], text[end]):
            return begin, end + 1, "id"
    return None


def _eight(window: Window, start: int, end: int) -> Span | None:
    """Spanish DNI `12345678Z`; a local number behind its name."""
    text = window.text
    stop = end + 1 if text[end : end + 1] == b"-" else end
    if stop < len(text) and _letter(text[stop]) and not before_word(text, stop + 1) and not after_word(text, start):
        return (start, stop + 1, "id") if checksums.spanish(text[start:end] + text[stop : stop + 1]) else None
    return _announced(window, start, end)


def _nine(window: Window, start: int, end: int) -> Span | None:
    """Taiwanese `A123456789`; Dutch and telephone numbers behind their names."""
    text = window.text
    if start and _letter(text[start - 1]):
        if text[start] in b"1289" and not after_word(text, start - 1) and not before_word(text, end):
            if checksums.taiwanese(text[start - 1], text[start:end]):
                return start - 1, end, "id"
        return None
    return _announced(window, start, end, ("bsn", checksums.dutch))


def _ten(window: Window, start: int, end: int) -> Span | None:
    return _announced(window, start, end)


def _eleven(window: Window, start: int, end: int) -> Span | None:
    text = window.text
    if text[start] == 49 and text[start + 1] > 50 and _alone(text, start, end):
        return start, end, "phone"  # a Chinese mobile number; the identity numbers below do not begin with 13 to 19
    return _announced(
        window, start, end, ("pesel", checksums.polish), ("cpf", checksums.brazilian), ("steuer", checksums.german),
        ("tckn", checksums.turkish),
    )  # fmt: skip


def _twelve(window: Window, start: int, end: int) -> Span | None:
    return _announced(window, start, end, ("aadhaar", checksums.verhoeff), ("mynumber", checksums.japanese))


def _thirteen(window: Window, start: int, end: int) -> Span | None:
    text = window.text
    if not _alone(text, start, end):
        return None
    if text[start : start + 3] in (b"861",) and phones.chinese_mobile(text[start + 2 : end]):
        return start, end, "phone"
    key = text[end : end + 3]
    if key[:1] == b" " and key[1:].isdigit() and checksums.french(text[start:end] + key[1:]):
        return start, end + 3, "id"
    return _named(window, start, end, text[start:end], ("za", checksums.south_african))


def _fifteen(window: Window, start: int, end: int) -> Span | None:
    if _alone(window.text, start, end) and checksums.french(window.text[start:end]):
        return start, end, "id"
    return _card(window, start, end)


def _seventeen(window: Window, start: int, end: int) -> Span | None:
    """A Chinese identity number that ends with X."""
    text = window.text
    if text[end : end + 1] in (b"X", b"x") and not after_word(text, start) and not before_word(text, end + 1):
        if checksums.chinese(text[start : end + 1]):
            return start, end + 1, "id"
    return _card(window, start, end)


def _eighteen(window: Window, start: int, end: int) -> Span | None:
    text = window.text
    if not after_word(text, start) and not before_word(text, end) and checksums.chinese(text[start:end]):
        return start, end, "id"
    return _card(window, start, end)


def _card(window: Window, start: int, end: int) -> Span | None:
    digits = window.text[start:end]
    if is_card(digits) and _alone(window.text, start, end):
        return start, end, "card"
    return None


def _named(window: Window, start: int, end: int, digits: bytes, *forms: tuple[str, Callable[[bytes], bool]]) -> Span | None:
    """An identity number whose check digit alone says too little: its name must stand before it."""
    passed = tuple(tag for tag, check in forms if check(digits))
    if passed and any(True for _ in window.before(start, passed)):
        return start, end, "id"
    return None


def _announced(window: Window, start: int, end: int, *forms: tuple[str, Callable[[bytes], bool]]) -> Span | None:
    """A number behind its name: one of the identity numbers, or a telephone number."""
    text = window.text
    if start > 4 and (text[start - 1] == 41 or text[start - 2] == 41) and (span := grouped.read_bracketed(window, start)):
        return span
    announced = phones.may_be_announced(window, start)
    digits = text[start:end]
    passed = [tag for tag, check in forms if check(digits)] if forms and window.may_be_named(start) else []
    if not (announced or passed) or not _alone(text, start, end):
        return None
    if passed and any(True for _ in window.before(start, tuple(passed))):
        return start, end, "id"
    return (start, end, "phone") if announced and phones.is_announced(window, start, digits) else None


def _none(window: Window, start: int, end: int) -> Span | None:
    return None


_BY_LENGTH: tuple[Check, ...] = (
    *[_none] * 6, _six, _seven, _eight, _nine, _ten, _eleven, _twelve, _thirteen, _card, _fifteen, _card, _seventeen, _eighteen,
    _card,
)  # fmt: skip
