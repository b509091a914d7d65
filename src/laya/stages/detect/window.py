"""A slice of a text that is looked at, and the words around a place in it.

In: UTF-8 text (or JSON in which `\\\\` and `\\"` were made plain, see `redact_json`), cut into windows. Out: for each window
what the detectors search: the text, its digit shape, its token shape. Pure, any thread.

A window is small because each search in C holds the interpreter: 64 KiB take well below a millisecond.

Why the searches are on shapes. A shape is the text with each byte replaced by its class (`bytes.translate`, over 1 GB/s), in
which a fixed string such as six digits in a row is found by skipping (`bytes.find`, 0.4 to 3 GB/s). An automaton of all
keywords over the whole text is several times slower, so Aho-Corasick reads only the few bytes in front of a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator

import ahocorasick

WINDOW_BYTES = 64 * 1024
LEFT = 64  # bytes before a window that walking back may need: the longest number with its separators
RIGHT = 64  # bytes behind it, in which a candidate that begins at its end still shows its shape
NEAR = 5  # bytes before a number in which another one shows that no word announces this one
TAIL = 48  # how far before a value its keyword may stand: `"client_secret" => "` with blanks, or 12 CJK characters and a colon

Span = tuple[int, int, str]


def _table(classes: dict[bytes, bytes], other: bytes) -> bytes:
    table = bytearray(other * 256)
    for members, mark in classes.items():
        for byte in members:
            table[byte] = mark[0]
    return bytes(table)


DIGITS = b"0123456789"
CAPITALS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LETTERS = b"abcdefghijklmnopqrstuvwxyz" + CAPITALS
_NUMBER_SHAPE = _table({DIGITS: b"0", b" -.()/": b"-", CAPITALS: b"A"}, b"x")
_TOKEN_SHAPE = _table({DIGITS + LETTERS + b"_-/+": b"a"}, b" ")
_LOWER = bytes(range(256)).lower()
_RUN = b"a" * 16  # the shortest key with a prefix that is known, less one
WORD = frozenset(DIGITS + LETTERS + b"_")
_ESCAPED = frozenset(b"nrtbf")

# Keywords in front of a value, by what they announce.
KEYWORDS = {
    "phone": (
        "tel", "phone", "call", "mobile", "mobil", "fax", "cell", "whatsapp", "sms", "text", "dial", "ring", "reach",
        "contact", "appele", "joindre", "portable", "telefon", "teléfono", "téléphone", "handy", "电话", "電話", "手机",
        "手機", "热线", "my number", "his number", "her number", "our number", "your number", "móvil", "celular", "联系",
        "聯絡", "致电", "拨打", "座机", "传真", "号码",
    ),
    "pesel": ("pesel",),
    "cpf": ("cpf",),
    "aadhaar": ("aadhaar", "aadhar", "uidai", "आधार"),
    "bsn": ("bsn", "burgerservicenummer"),
    "nino": ("nino", "national insurance", "ni number", "ni no"),
    "steuer": ("steuer-id", "steuerid", "steuer-identifikationsnummer", "idnr", "steueridentifikationsnummer", "tax id"),
    "tckn": ("tckn", "t.c. kimlik", "tc kimlik", "kimlik no"),
    "za": ("south african id", "sa id", "rsa id", "id number"),
    "mynumber": ("mynumber", "マイナンバー", "個人番号"),
    "secret": (
        "secret", "token", "api_key", "apikey", "api-key", "api.key", "api key", "access_key", "accesskey", "access-key",
        "private_key", "privatekey", "auth", "credential", "密钥", "令牌", "password", "passwd", "passphrase", "pwd",
        "account_key", "accountkey", "signing_key", "encryption_key", "client_secret", "secret_key", "secretkey",
    ),
    "bearer": ("bearer", "basic"),
}  # fmt: skip


def _automaton() -> ahocorasick.Automaton:
    built = ahocorasick.Automaton()
    for tag, words in KEYWORDS.items():
        for word in words:
            key = word.encode().decode("latin-1")
            built.add_word(key, (tag, len(key)))
    built.make_automaton()
    return built


_WORDS = _automaton()


class Window:
    """Bytes `start` to `end` of `text` (absolute); `cut` and its shapes begin at `base`."""

    __slots__ = ("text", "start", "end", "base", "cut", "numbers", "phone_end", "_lower", "_runs")

    def __init__(self, text: bytes, start: int, end: int) -> None:
        self.text = text
        self.start = start
        self.end = end
        self.base = max(0, start - LEFT)
        self.cut = text if end - self.base >= len(text) else text[self.base : end + RIGHT]
        self.numbers = self.cut.translate(_NUMBER_SHAPE)
        self.phone_end = -9  # where the last telephone number ended: the next of a list needs no word of its own
        self._runs: list[tuple[int, int]] | None = None
        self._lower: bytes | None = None

    @property
    def lower(self) -> bytes:
        if self._lower is None:
            self._lower = self.cut.translate(_LOWER)
        return self._lower

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Runs of 16 and more bytes of a token's alphabet that begin here (start, end); an end may be cut at the margin."""
        if self._runs is None:
            self._runs = self._find_runs()
        return self._runs

    def _find_runs(self) -> list[tuple[int, int]]:
        shape, base, text, found = self.cut.translate(_TOKEN_SHAPE), self.base, self.text, []
        at, limit, size = shape.find(_RUN, self.start - base), self.end - base, len(shape)
        while 0 <= at < limit:
            end = shape.find(b" ", at)
            if end < 0:
                end = size
            if not at or shape[at - 1] == 32:  # else it began in the window before
                start = base + at
                if start and text[start - 1] == 92 and text[start] in _ESCAPED:
                    start += 1  # the letter of an escape
                found.append((start, base + end))
            at = shape.find(_RUN, end)
        return found

    def may_be_named(self, at: int) -> bool:
        """A name may stand before the number at `at`: no other number stands right there."""
        place = at - self.base
        return self.numbers.rfind(b"0", place - NEAR if place > NEAR else 0, place) < 0

    def before(self, at: int, tags: tuple[str, ...]) -> Iterator[tuple[str, bytes, int]]:
        """Keywords of these tags that end at most `TAIL` bytes before `at`, nearest first: (tag, the text between in lower
        case, where the keyword begins in `text`)."""
        start = max(0, at - TAIL)
        tail = self.text[start:at].lower()
        for end, (tag, length) in reversed(list(_WORDS.iter(tail.decode("latin-1")))):
            if tag in tags:
                yield tag, tail[end + 1 :], start + end + 1 - length


def windows(text: bytes) -> Iterator[Window]:
    for start in range(0, len(text), WINDOW_BYTES):
        yield Window(text, start, min(len(text), start + WINDOW_BYTES))


def after_word(text: bytes, at: int) -> bool:
    """What stands before `at` would make a value part of a longer word. The letter of an escape (`\\n`) is no such thing."""
    if at == 0 or text[at - 1] not in WORD:
        return False
    return not (at > 1 and text[at - 2] == 92 and text[at - 1] in _ESCAPED)


def before_word(text: bytes, at: int) -> bool:
    return at < len(text) and text[at] in WORD
