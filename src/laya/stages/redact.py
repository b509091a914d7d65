"""Personal data and secrets out of a request, before any model sees it.

In: a JSON body of any API, unpacked. Out: the body with placeholders, how many values of each kind were found, and the vault
that puts them back. Pure, any thread; one `Redactor` serves all requests. `docs/redaction.md` tells what is looked for.

The body is scanned as it stands, escapes and all, and walked only where something was found (`redact_json`). Strings whose
escapes or look-alikes could hide a value are decoded and scanned by themselves (`redact_text`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from laya.config import RedactConfig
from laya.errors import InvalidRequest
from laya.stages.detect.scan import Scanner, apart
from laya.stages.detect.window import Span
from laya.stages.redact_json import Place, decode_string, encode_string, firsts, locate, plain_view, splice
from laya.stages.redact_text import HIDING, Reading
from laya.stages.vault import Labels, Vault, taken_in

_WANTS_JSON = re.compile(rb'"json_(?:schema|object)"')
_ODD_ESCAPE = re.compile(rb"\\[u/]")
_MAX_KNOWN = 64  # secrets whose other occurrences are looked for: each is one pass more over the body
_MAX_KNOWN_BYTES = 512  # not key blocks


class Redacted(NamedTuple):
    """`vault` is None when the body was not changed."""

    body: bytes
    counts: dict[str, int]
    vault: Vault | None


class Redactor:
    """Raises ValueError naming the pattern of the settings that cannot be used."""

    def __init__(self, config: RedactConfig) -> None:
        self._mode = config.mode
        self._own = bool(config.patterns)
        self._scanner = Scanner(config.kinds, config.patterns)
        self._labels = Labels((*config.kinds, *config.patterns))

    def redact(self, body: bytes, api: str | None) -> Redacted:
        """Raises InvalidRequest (code `redaction_blocked`) in the mode `block` when anything was found.

        A body that is no JSON object (a form with a recording) is given back as it is.
        """
        if body.lstrip()[:1] != b"{":
            return Redacted(body, {}, None)
        view = plain_view(body)
        spans = [] if self._own else self._scanner.scan(view)
        finds = self._finds(body, view, spans, [])
        known = _known_secrets(body, view, finds)
        if known:  # what was told to be a secret in one place is one wherever it stands
            finds = self._finds(body, view, apart(spans + _occurrences(view, known)), known)
        counts: dict[str, int] = {}
        for find in finds:
            for _, _, kind in find.spans:
                counts[kind] = counts.get(kind, 0) + 1
        if not counts or self._mode == "report":
            return Redacted(body, counts, None)
        if self._mode == "block":
            kinds = ", ".join(sorted(counts))
            raise InvalidRequest(f"The request holds what must not be sent on here: {kinds}.", code="redaction_blocked")
        texts = [view, *(find.reading.data for find in finds if find.reading is not None)]
        vault = Vault(self._labels, taken_in(self._labels, texts), next(firsts(view, _WANTS_JSON, 13), None) is not None)
        return Redacted(splice(body, _edits(body, view, finds, vault)), counts, vault)

    def _finds(self, body: bytes, view: bytes, spans: list[Span], known: list[bytes]) -> list[_Find]:
        """What is to be replaced, by the string that it is in."""
        odd = [] if self._own else _odd_places(view)
        finds = []
        for place in locate(view, sorted(spans + odd) if odd else spans, every=self._own):
            if not self._own and all(kind for _, _, kind in place.spans):
                finds.append(_Find(place, place.spans, None, ""))
                continue
            text = decode_string(body[place.start : place.end])
            reading = Reading(text)
            finds.append(_Find(place, self._scan_reading(reading.data, place.key, known), reading, text))
        return finds

    def _scan_reading(self, data: bytes, key: bytes | None, known: list[bytes]) -> list[Span]:
        ahead = b'%b":"' % key if key else b""  # the member's name may say what the value is
        size = len(ahead)
        found = [(start - size, end - size, kind) for start, end, kind in self._scanner.scan(ahead + data) if start >= size]
        return apart(found + _occurrences(data, known)) if known else found


class _Find(NamedTuple):
    place: Place
    spans: list[Span]  # of the view, or of the reading where there is one
    reading: Reading | None
    text: str


def _odd_places(view: bytes) -> list[Span]:
    """Places, of no kind, of escapes and of characters that could hide a value: one of each in a string, which is then read."""
    patterns = [_ODD_ESCAPE] if b"\\" in view else []
    if not view.isascii():
        patterns.append(HIDING)
    return [(at, at, "") for pattern in patterns for at in firsts(view, pattern, 8)]


def _known_secrets(body: bytes, view: bytes, finds: list[_Find]) -> list[bytes]:
    """Secrets that were found, but those that JSON would write otherwise: the first of them, as there are seldom two."""
    known: dict[bytes, None] = {}
    for _, spans, reading, _ in finds:
        data = view if reading is None else reading.data
        for start, end, kind in spans:
            if kind == "secret" and end - start <= _MAX_KNOWN_BYTES:
                value = data[start:end]
                if value.isascii() and b"\\" not in value and b'"' not in value and b"\0" not in value:
                    known[value] = None
    return list(known)[:_MAX_KNOWN]


def _occurrences(data: bytes, known: list[bytes]) -> list[Span]:
    found = []
    for value in known:
        at = data.find(value)
        while at >= 0:
            found.append((at, at + len(value), "secret"))
            at = data.find(value, at + len(value))
    return found


def _edits(body: bytes, view: bytes, finds: list[_Find], vault: Vault) -> list[tuple[int, int, bytes]]:
    edits: list[tuple[int, int, bytes]] = []
    for place, spans, reading, text in finds:
        if reading is not None:
            if spans:
                edits.append((place.start, place.end, encode_string(_redacted(text, spans, reading, place.key, vault))))
            continue
        nested = _Nested(view, place.start, place.end, b"\1") if place.key == b"arguments" else None
        for start, end, kind in spans:
            while view[end - 1] == 0:
                end -= 1  # the first half of an escape
            raw = body[start:end]
            value = raw.decode("utf-8", "replace") if b"\\" not in raw else decode_string(raw)
            placeholder = vault.placeholder(kind, _meant(value, place.key)).encode()
            if place.key is None:
                placeholder = b'"%b"' % placeholder
            elif nested is not None and nested.is_bare(start, end):
                placeholder = b'\\"%b\\"' % placeholder
            edits.append((start, end, placeholder))
    return edits


def _redacted(text: str, spans: list[Span], reading: Reading, key: bytes | None, vault: Vault) -> str:
    pieces: list[str] = []
    at = 0
    nested = _Nested(reading.data, 0, len(reading.data), b'"') if key == b"arguments" else None
    for start, end, kind in spans:
        start_char, end_char = reading.span(start, end)
        placeholder = vault.placeholder(kind, _meant(text[start_char:end_char], key))
        if nested is not None and nested.is_bare(start, end):
            placeholder = f'"{placeholder}"'
        pieces += (text[at:start_char], placeholder)
        at = end_char
    pieces.append(text[at:])
    return "".join(pieces)


def _meant(value: str, key: bytes | None) -> str:
    """A value of a tool's arguments, which are JSON, without the escapes of that JSON: it is put back with its own."""
    if key != b"arguments" or "\\" not in value:
        return value
    try:
        return decode_string(value.encode("utf-8", "surrogatepass"))
    except ValueError:
        return value


class _Nested:
    """JSON inside a string: a number of it is replaced by a string, with quotes of its own, so that it stays valid."""

    def __init__(self, data: bytes, start: int, end: int, quote: bytes) -> None:
        self._data = data
        self._start = self._at = start
        self._end = end
        self._quote = quote
        self._quotes = 0

    def is_bare(self, start: int, end: int) -> bool:
        """The span stands where a value does, and in no string. Spans must be asked for in order."""
        data = self._data
        self._quotes += data.count(self._quote, self._at, start)
        self._at = start
        ahead = data[max(self._start, start - 16) : start].rstrip(b" \t\r\n\0")[-1:]
        follows = data[end : min(self._end, end + 16)].lstrip(b" \t\r\n\0")[:1]
        return ahead in (b":", b",", b"[") and follows in (b",", b"}", b"]") and self._quotes % 2 == 0
