"""A slice of a text that is looked at, and the words around a place in it.

In: UTF-8 text (or JSON in which `\\\\` and `\\"` were made plain, see `redact_json`), cut into windows. Out: for each window
what the detectors search: the text, its shape, where it has digits. Pure, any thread.

Why the searches are on shapes. A shape is the text with each byte replaced by its class (`bytes.translate`, over 1 GB/s), in
which a fixed string such as six digits in a row is found by skipping (`bytes.find`, and the literal beginning of a pattern of
`re`: 0.4 to 3 GB/s). An automaton of all keywords over the whole text is several times slower, so Aho-Corasick reads only the
few bytes in front of a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator

import ahocorasick

# Below 30,000 bytes with its margins `bytes.find` takes its quicker way; and a search in C holds the interpreter for 0.1 ms.
WINDOW_BYTES = 28 * 1024
LEFT = 64  # bytes before a window that walking back may need: the longest number with its separators
RIGHT = 64  # bytes behind it, in which a candidate that begins at its end still shows its shape
GAP = 16  # bytes without a digit between two numbers that are looked for apart; no form has so many between its groups
MAX_PLACES = 48  # with digits, in a window: where there are more, one search through the rest is cheaper
NEAR = 5  # bytes before a number in which another one shows that no word announces this one
TAIL = 48  # how far before a value its keyword may stand: `"client_secret" => "` with blanks, or 12 CJK characters and a colon

Span = tuple[int, int, str]


DIGITS = b"0123456789"
CAPITALS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LETTERS = b"abcdefghijklmnopqrstuvwxyz" + CAPITALS


# Digits are 0, what separates groups of them is - (but for the dot: most dots between digits are of decimal fractions), letters
# are small.
_SHAPE = bytes(range(256)).lower().translate(bytes.maketrans(DIGITS + b" ()/", b"0000000000----"))
WORD = frozenset(DIGITS + LETTERS + b"_")
ESCAPED = frozenset(b"nrtbf")  # the letters of escapes

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
    """Bytes `start` to `end` of `text` (absolute); `cut` and `shape` begin at `base`."""

    __slots__ = ("text", "start", "end", "base", "cut", "shape", "phone_end", "runs", "_digits")

    def __init__(self, text: bytes, start: int, end: int) -> None:
        self.text = text
        self.start = start
        self.end = end
        self.base = max(0, start - LEFT)
        self.cut = text if end - self.base >= len(text) else text[self.base : end + RIGHT]
        self.shape = self.cut.translate(_SHAPE)
        self.phone_end = -9  # where the last telephone number ended: the next of a list needs no word of its own
        self.runs: list[tuple[int, int]] | None = None  # see runs.py
        self._digits: list[tuple[int, int]] | None = None

    @property
    def digits(self) -> list[tuple[int, int]]:
        """Where digits stand in the shape (start, end), up to the margin's end: each place begins with one and ends with one.
        Prose has few of them, a table of numbers is one."""
        if self._digits is None:
            self._digits = self._find_digits()
        return self._digits

    def _find_digits(self) -> list[tuple[int, int]]:
        find, rfind, found = self.shape.find, self.shape.rfind, []
        at = find(b"0", self.start - self.base)
        while at >= 0:
            end, step = at + 1, GAP
            while (last := rfind(b"0", end, end + step)) >= 0:
                end, step = last + 1, 2 * step  # twice as far: a table is not read number by number
            if len(found) == MAX_PLACES:
                found.append((at, len(self.shape)))
                break
            found.append((at, end))
            at = find(b"0", end)
        return found

    def may_be_named(self, at: int) -> bool:
        """A name may stand before the number at `at`: no other number stands right there."""
        place = at - self.base
        return self.shape.rfind(b"0", place - NEAR if place > NEAR else 0, place) < 0

    def follows_phone(self, at: int) -> bool:
        """The last telephone number ended right before `at`."""
        return 0 <= at - self.phone_end <= NEAR

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
    return not (at > 1 and text[at - 2] == 92 and text[at - 1] in ESCAPED)


def before_word(text: bytes, at: int) -> bool:
    return at < len(text) and text[at] in WORD
