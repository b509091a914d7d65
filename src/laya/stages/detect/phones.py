"""Is a run of digits a telephone number? Pure, any thread.

In: the bytes of a candidate. Out: whether it is one, or how much of it. A number without `+`, separators or a word in front of
it is taken for one only where its form says so by itself (Chinese mobile): a ten-digit number alone is more often an order.
"""

from __future__ import annotations

import re

from laya.stages.detect.window import Window

# Country calling codes: how many digits a national number has there. The others have between seven and twelve.
_NATIONAL = {
    b"1": (10, 10), b"7": (10, 10), b"20": (8, 10), b"27": (9, 9), b"30": (10, 10), b"31": (9, 9),
    b"32": (8, 9), b"33": (9, 9), b"34": (9, 9), b"36": (8, 9), b"39": (6, 11), b"40": (9, 9),
    b"41": (9, 9), b"43": (7, 13), b"44": (9, 10), b"45": (8, 8), b"46": (7, 10), b"47": (8, 8),
    b"48": (9, 9), b"49": (6, 12), b"52": (10, 11), b"54": (10, 11), b"55": (10, 11), b"60": (8, 10),
    b"61": (9, 9), b"62": (8, 12), b"63": (8, 10), b"64": (8, 10), b"65": (8, 8), b"66": (8, 9),
    b"81": (9, 10), b"82": (8, 10), b"84": (8, 10), b"86": (10, 11), b"90": (10, 10), b"91": (10, 10),
    b"92": (9, 10), b"971": (8, 9), b"972": (8, 9), b"852": (8, 8), b"853": (8, 8), b"886": (8, 9),
    b"351": (9, 9), b"353": (7, 9), b"358": (6, 11), b"420": (9, 9), b"380": (9, 9),
}  # fmt: skip
_TWO_DIGIT = frozenset(
    b"20 27 28 30 31 32 33 34 36 39 40 41 43 44 45 46 47 48 49 51 52 53 54 55 56 57 58 60 61 62 63 64 65 66 81 82 83 84 86 89"
    b" 90 91 92 93 94 95 98".split()
)
_OTHER = (7, 12)
_NORTH_AMERICAN = re.compile(rb"[2-9]\d\d[2-9]\d{6}")
# Between a word such as "phone" and its number: "number is", "me at", "：", but no digit, no line's end and no other noun.
_GAP = re.compile(
    r"(?:s|ed|ing|ephone|efon|éfono|éphone|efono|efonnummer|r|z|le|ular|ulare)?(?:[_-]?(?:number|no|num|nr))?(?![a-z])"
    r"(?:[\s\"':=#.,()\[\]{}<>*|\x00\x01/+：（\-]"
    r"|\b(?:numbers?|no|nr|num|phone|me|us|him|her|them|at|on|is|to|or|cell|call|mobile|home|work|office|line|desk|contact"
    r"|dial|the|my|your|his|our|numéro|au|le|mon|por|al|el|número|es|ist|unter|meine|nummer|it|was|please)\b"
    r"|电话|電話|手机|手機|号码|号|是|为|請|请|我|您|联系|拨打|方式|或|本人|客服|热线|座机|传真|人|的)*+"
)
# Most numbers that no word announces show it by the last two letters in front of them: these are those of such words.
_SIGNS = b" \t:=\"'#.,()[]{}<>*|/+-\x00\x01\\"
ENDINGS = frozenset(
    b"el ne le il ax ll pp ms xt al ng ch ct le re on dy ed rs er no nr um me us im em at is to or rk ce sk he my ur au es st"
    b" in it as se um ile ro ar".split()
) | frozenset(bytes([a]) for a in b"lr")
_LISTED = re.compile(rb" ?(?:[,;/|]|or|and|\xe3\x80\x81|\xe6\x88\x96|\xe5\x92\x8c|\xef\xbc\x8c) ?").fullmatch


def word_announces(gap: bytes) -> bool:
    """`gap` lies between a keyword of the tag `phone` and a number (lower case)."""
    return b"\n" not in gap and b"\\n" not in gap and _GAP.fullmatch(gap.decode("utf-8", "replace")) is not None


def country_code(digits: bytes) -> bytes:
    """The calling code that international digits begin with; b"" for none that exists."""
    if digits[:1] in (b"1", b"7"):
        return digits[:1]
    if digits[:2] in _TWO_DIGIT:
        return digits[:2]
    return digits[:3] if digits[:1] in (b"2", b"3", b"4", b"5", b"6", b"8", b"9") and digits[1:3] != b"" else b""


def international(digits: bytes, ends: list[int]) -> int:
    """How many of the `digits` behind a `+` (or `00`) are the number, 0 for none. It ends where a group does: `ends` has the
    counts of digits at which one ends, rising."""
    code = country_code(digits)
    if not code:
        return 0
    low, high = _NATIONAL.get(code, _OTHER)
    skipped = 1 if digits[len(code) : len(code) + 1] == b"0" and code not in (b"1", b"39") else 0  # +44 (0)20 ...
    for count in reversed(ends):
        national = count - len(code)
        if low <= national <= high + skipped and count <= 15 + skipped:
            if code == b"1" and not _NORTH_AMERICAN.fullmatch(digits[1:count]):
                continue
            if code not in _NATIONAL and count < 9:
                continue
            return count
    return 0


def chinese_mobile(digits: bytes) -> bool:
    return len(digits) == 11 and digits[:1] == b"1" and digits[1:2] in b"3456789"


def north_american(digits: bytes) -> bool:
    if len(digits) == 11 and digits[:1] == b"1":
        digits = digits[1:]
    return _NORTH_AMERICAN.fullmatch(digits) is not None and len(set(digits)) > 2


def national(digits: bytes) -> bool:
    """Digits that begin with a trunk 0, written in groups: nine to twelve of them, area code and number both."""
    return 9 <= len(digits) <= 12 and digits[:2] != b"00" and len(set(digits)) > 2


def may_be_announced(window: Window, start: int) -> bool:
    """What stands before a number does not rule out that a word announces it."""
    if window.follows_phone(start):
        return True
    word = window.text[max(0, start - 10) : start].rstrip(_SIGNS)[-2:]
    return word.lower() in ENDINGS or word[-1:] >= b"\x80"


def is_announced(window: Window, start: int, digits: bytes) -> bool:
    """Digits behind a word such as "phone", or behind another number that was: anything of a telephone number's length that is
    no mere sequence. Ask `may_be_announced` first."""
    if not 7 <= len(digits) <= 12 or len(set(digits)) <= 2 or digits in b"01234567890123456789":
        return False
    if window.follows_phone(start) and _LISTED(window.text, window.phone_end, start):
        return True
    return any(word_announces(gap) for _, gap, _ in window.before(start, ("phone",)))
