"""Personal data and secrets out of a request, before any model sees it.

In: a JSON body of any API, unpacked. Out: the body with placeholders, how many values of each kind were found, and the vault
that puts them back. Pure, any thread; one `Redactor` serves all requests. `docs/redaction.md` tells what is looked for.

The body is scanned as it stands, escapes and all, and walked only where something was found (`redact_json`). Strings whose
escapes or look-alikes could hide a value are decoded and scanned by themselves (`redact_text`).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import islice
from typing import NamedTuple

from laya.config import RedactConfig
from laya.errors import InvalidRequest
from laya.stages.detect.scan import Scanner, joined
from laya.stages.detect.window import Span
from laya.stages.redact_json import Edited, Place, decode_string, first_byte, firsts, locate, plain_view
from laya.stages.redact_text import HIDING, Reading
from laya.stages.vault import Labels, Vault, taken_in

_WANTS_JSON = re.compile(rb'"json_(?:schema|object)"')
_ODD_ESCAPE = re.compile(rb"\\[u/]")
_MAX_KNOWN = 64  # secrets whose other occurrences are looked for: each is one pass more over the body
_MAX_KNOWN_BYTES = 512  # not key blocks
# Bytes of one search in C for a known secret, or for quotes: it holds the interpreter, and takes up to 10 ns for each.
_STRIDE = 32 * 1024
# Of JSON inside a string: its quotes, and its escapes (which may be of a quote).
_TOKENS = re.compile(rb'(")|\\.', re.DOTALL)
_TOKENS_IN_VIEW = re.compile(rb"(\x00\x01)|\x00\\(?:\0.|[^\0])", re.DOTALL)
_LONGEST_TOKEN = 4


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
        self._kinds = (*config.kinds, *config.patterns)
        self._scanner = Scanner(config.kinds, config.patterns)
        self._labels = Labels(self._kinds)

    def redact(self, body: bytes, api: str | None) -> Redacted:
        """Raises InvalidRequest (code `redaction_blocked`) in the mode `block` when anything was found.

        A body that is no JSON object (a form with a recording) is given back as it is.
        """
        if first_byte(body) != b"{":
            return Redacted(body, {}, None)
        view = plain_view(body)
        finds = self._search(body, view, [])
        if finds.known:  # what was told to be a secret in one place is one wherever it stands
            finds = self._search(body, view, list(finds.known))
        counts = finds.counts()
        if not counts or self._mode == "report":
            return Redacted(body, counts, None)
        if self._mode == "block":
            kinds = ", ".join(sorted(counts))
            raise InvalidRequest(f"The request holds what must not be sent on here: {kinds}.", code="redaction_blocked")
        taken = taken_in(self._labels, view) | finds.taken
        vault = Vault(self._labels, taken, _wants_json(view))
        return Redacted(_masked(body, view, finds, vault), counts, vault)

    def check_name(self, model: str) -> None:
        """A model's name must reach the router and the backend as it is. Raises InvalidRequest when it holds what must not."""
        kinds = sorted({kind for _, _, kind in self._scanner.scan(model.encode("utf-8", "surrogatepass"))})
        if kinds and self._mode != "report":
            raise InvalidRequest(
                f"The model's name holds what must not be sent on here: {', '.join(kinds)}.", param="model",
                code="redaction_blocked",
            )  # fmt: skip

    def _search(self, body: bytes, view: bytes, known: list[bytes]) -> Finds:
        """What is to be replaced, by the string that it is in."""
        finds = Finds(self._kinds)
        spans: Iterable[Span] = [] if self._own else self._scanner.scan(view)
        if known and not self._own:
            spans = joined(merge(spans, *[_occurrences(view, value) for value in known]))
        odd = [] if self._own else _odd_places(view)
        for place in locate(view, merge(spans, *odd) if odd else spans, every=self._own):
            if not self._own and all(kind for _, _, kind in place.spans):
                finds.add(place, place.spans, view, read=False)
                continue
            data = Reading(body, view, place.start, place.end).data
            if b"[" in data:
                finds.taken |= taken_in(self._labels, data)
            finds.add(place, self._scan_reading(data, place.key, known), data, read=True)
        return finds

    def _scan_reading(self, data: bytes, key: bytes | None, known: list[bytes]) -> Iterator[Span]:
        ahead = b'%b":"' % key if key else b""  # the member's name may say what the value is
        size = len(ahead)
        spans = self._scanner.scan(b"".join([ahead, data]))
        found = ((start - size, end - size, kind) for start, end, kind in spans if start >= size)
        return joined(merge(found, *[_occurrences(data, value) for value in known])) if known else found


class Finds:
    """The places with something to replace. Kept as numbers: a million objects of Python would make its collector stop
    everybody for a third of a second."""

    __slots__ = ("known", "taken", "_kinds", "_keys", "_places", "_spans")

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.known: dict[bytes, None] = {}  # secrets: the first of them, as there are seldom two
        self.taken: set[tuple[str, int]] = set()
        self._kinds = kinds
        self._keys: list[bytes | None] = []
        self._places = array("q")  # start, end, whether it was read, number of spans
        self._spans = array("q")  # start, end, kind

    def add(self, place: Place, spans: Iterable[Span], data: bytes, read: bool) -> None:
        """`spans` are those of `data`: of the view, or of what was read."""
        before = len(self._spans)
        for start, end, kind in spans:
            self._spans.extend((start, end, self._kinds.index(kind)))
            if kind == "secret" and end - start <= _MAX_KNOWN_BYTES and len(self.known) < _MAX_KNOWN:
                value = data[start:end]
                # But for those that JSON would write otherwise.
                if value.isascii() and b"\\" not in value and b'"' not in value and b"\0" not in value:
                    self.known[value] = None
        if len(self._spans) > before:
            self._places.extend((place.start, place.end, read, (len(self._spans) - before) // 3))
            self._keys.append(place.key)

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for at in range(2, len(self._spans), 3):
            kind = self._kinds[self._spans[at]]
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    def __iter__(self) -> Iterator[tuple[int, int, bytes | None, bool, Iterator[Span]]]:
        """(start, end, key, whether it was read, spans) of each place. Its spans must be taken before the next."""
        spans = self._each()
        for number, key in enumerate(self._keys):
            start, end, read, count = self._places[4 * number : 4 * number + 4]
            yield start, end, key, bool(read), islice(spans, count)

    def _each(self) -> Iterator[Span]:
        for at in range(0, len(self._spans), 3):
            yield self._spans[at], self._spans[at + 1], self._kinds[self._spans[at + 2]]


def _wants_json(view: bytes) -> bool:
    """The client asks for JSON. A body without a low line, which is found out at once, does not."""
    line = view.find(b"_")
    return line >= 0 and next(firsts(view, _WANTS_JSON, 13, max(0, line - len(b'"json'))), None) is not None


def _odd_places(view: bytes) -> list[Iterator[Span]]:
    """Places, of no kind, of escapes and of characters that could hide a value: one of each in a string, which is then read."""
    patterns = [_ODD_ESCAPE] if b"\\" in view else []
    if not view.isascii():
        patterns.append(HIDING)
    return [((at, at, "") for at in firsts(view, pattern, 8)) for pattern in patterns]


def _occurrences(data: bytes, value: bytes) -> Iterator[Span]:
    size, begin = len(value), 0
    while begin < len(data):
        at = data.find(value, begin, begin + _STRIDE + size)
        if at < 0:
            begin += _STRIDE
        else:
            yield at, at + size, "secret"
            begin = at + size


def _masked(body: bytes, view: bytes, finds: Finds, vault: Vault) -> bytes:
    edited = Edited(body)
    for start, end, key, read, spans in finds:
        arguments = key == b"arguments"
        if read:
            reading = Reading(body, view, start, end)
            nested = _Nested(reading.data, 0, len(reading.data), _TOKENS) if arguments else None

            def made(span: Span, text: str, key=key, nested=nested) -> str:
                placeholder = vault.placeholder(span[2], _meant(text, key))
                return f'"{placeholder}"' if nested is not None and nested.is_bare(span[0], span[1]) else placeholder

            for edit in reading.edits(spans, made):
                edited.put(*edit)
            continue
        nested = _Nested(view, start, end, _TOKENS_IN_VIEW) if arguments else None
        for begins, ends, kind in spans:
            while view[ends - 1] == 0:
                ends -= 1  # the first half of an escape
            raw = body[begins:ends]
            value = raw.decode("utf-8", "replace") if b"\\" not in raw else decode_string(raw)
            placeholder = vault.placeholder(kind, _meant(value, key)).encode()
            if key is None:
                placeholder = b'"%b"' % placeholder
            elif nested is not None and nested.is_bare(begins, ends):
                placeholder = b'\\"%b\\"' % placeholder
            edited.put(begins, ends, placeholder)
    return edited.whole()


def _meant(value: str, key: bytes | None) -> str:
    """A value of a tool's arguments, which are JSON, without the escapes of that JSON: it is put back with its own."""
    if key != b"arguments" or "\\" not in value:
        return value
    try:
        return decode_string(value.encode("utf-8", "surrogatepass"))
    except ValueError:
        return value


class _Nested:
    """JSON inside a string: a number of it is replaced by a string, with quotes of its own, so that it stays valid. `tokens`
    finds its quotes and its escapes."""

    def __init__(self, data: bytes, start: int, end: int, tokens: re.Pattern[bytes]) -> None:
        self._data = data
        self._start = self._at = start
        self._end = end
        self._tokens = tokens
        self._quotes = 0

    def is_bare(self, start: int, end: int) -> bool:
        """The span stands where a value does, and in no string. Spans must be asked for in order."""
        data = self._data
        while self._at < start:
            stop = min(start, self._at + _STRIDE)
            for token in self._tokens.finditer(data, self._at, min(start, stop + _LONGEST_TOKEN)):
                if token.start() >= stop:
                    break
                self._at = token.end()
                self._quotes += token.lastindex == 1
            self._at = max(self._at, stop)
        ahead = data[max(self._start, start - 16) : start].rstrip(b" \t\r\n\0")[-1:]
        follows = data[end : min(self._end, end + 16)].lstrip(b" \t\r\n\0")[:1]
        return ahead in (b":", b",", b"[") and follows in (b",", b"}", b"]") and self._quotes % 2 == 0
