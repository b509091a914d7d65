"""Placeholders and the values behind them, for one request.

In: values as they are found. Out: placeholders to send, and texts with the values put back. A vault belongs to one request and
is gone with it: nothing is shared, so that no answer can hold another's values. One thread at a time.

A placeholder is `[KIND_N]`, N counting the distinct values of the kind as they first appear. The same history gives the same
placeholders, and an upstream's prefix cache goes on hitting. Numbers that the request's own text already has in such a form are
left out, so that this text comes back as it was. A model that writes `[Phone 1]` or `[PHONE\\_1]` means the same; a number that
was never given stays as the model wrote it.
"""

from __future__ import annotations

import re

from laya.stages.redact_json import encode_string
from laya.stages.restore import Restorer

MAX_LABEL = 24  # characters of a kind's name inside a placeholder
_MAX_DIGITS = 7  # more values than a body of 1 GiB has room for
_SHARDS = 64
_BETWEEN = r"\\?[_ -]{1,2}"  # also with Markdown's backslash
_BETWEEN_IN_VIEW = r"[\x00\\]{0,2}[_ -]{1,2}"
MAX_PLACEHOLDER = MAX_LABEL + _MAX_DIGITS + 7  # brackets, a blank or backslash within each, and up to three signs between


def label_of(kind: str) -> str:
    """The kind's name in a placeholder: capitals, digits and low lines."""
    return re.sub(r"[^A-Z0-9]+", "_", kind.upper()).strip("_")[:MAX_LABEL] or "VALUE"


class Labels:
    """The labels of all kinds of the settings, and the patterns that read placeholders; shared by all requests. Immutable."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self.by_kind = {kind: label_of(kind) for kind in kinds}
        self._names = tuple(sorted(set(self.by_kind.values()), key=len, reverse=True))
        form = rf"\[[ \\]?({self._any_name(_BETWEEN)}){_BETWEEN}([0-9]{{1,{_MAX_DIGITS}}})[ \\]?\]"
        self.find = re.compile(form, re.I)
        self.at_bytes = re.compile(form.encode(), re.I).match
        # In a view (`redact_json`): where a placeholder may begin, or an escape that may be part of one. There a backslash of
        # the text is NUL and backslash.
        self.trigger = re.compile(rf"\[[ \\\x00]{{0,3}}(?:{self._any_name(_BETWEEN_IN_VIEW)})|\\u00".encode(), re.I)

    def _any_name(self, between: str) -> str:
        return "|".join(name.replace("_", between) for name in self._names)

    def held(self, text: str) -> int:
        """Where the end of a text begins that could still become a placeholder; its length when there is none."""
        start = text.rfind("[", max(0, len(text) - MAX_PLACEHOLDER + 1))
        return start if start >= 0 and self._may_become(text[start + 1 :]) else len(text)

    def _may_become(self, rest: str) -> bool:
        rest = rest.replace("\\", "").upper().removeprefix(" ").replace("-", "_").replace(" ", "_")
        for name in self._names:
            if len(rest) <= len(name):
                if name.startswith(rest):
                    return True
            elif rest.startswith(name) and rest[len(name)] == "_":
                number = rest[len(name) + 1 :]
                if number == "" or number.strip("_").isdigit() and "]" not in number:
                    return True
        return False


class Vault:
    """`taken`: (label, number) of placeholders that the text itself has. `json_text`: the client asked for JSON."""

    __slots__ = ("labels", "json_text", "_values", "_numbers", "_taken")

    def __init__(self, labels: Labels, taken: set[tuple[str, int]], json_text: bool = False) -> None:
        self.labels = labels
        self.json_text = json_text
        self._values: dict[str, list[str | None]] = {}  # of each label, by number; None where a number is taken
        # The way back, in shards: one map of a million values would grow, at some moment, for twenty milliseconds.
        self._numbers: dict[str, list[dict[str, int]]] = {}
        self._taken = taken

    def placeholder(self, kind: str, value: str) -> str:
        label = self.labels.by_kind[kind]
        values = self._values.get(label)
        if values is None:
            values = self._values[label] = [None]
            self._numbers[label] = [{} for _ in range(_SHARDS)]
        numbers = self._numbers[label][hash(value) % _SHARDS]
        number = numbers.get(value)
        if number is None:
            while (label, len(values)) in self._taken:
                values.append(None)
            number = numbers[value] = len(values)
            values.append(value)
        return f"[{label}_{number}]"

    def restore(self, text: str, json_text: bool = False) -> str:
        """The text with the values put back; inside JSON text they are escaped as its strings need it."""

        def value(found: re.Match[str]) -> str:
            label = re.sub(_BETWEEN, "_", found[1]).upper()
            values, number = self._values.get(label, ()), int(found[2])
            known = values[number] if number < len(values) else None
            if known is None:
                return found[0]
            return encode_string(known).decode() if json_text else known

        return self.labels.find.sub(value, text) if "[" in text else text

    def is_json(self, text: str) -> bool:
        """The beginning of a text that is the JSON which the client asked for."""
        return self.json_text and text.lstrip()[:1] in ("{", "[")

    def restorer(self, api: str | None, events) -> Restorer:
        """`events` parses the answer's stream: a `wire.sse.EventStream`, or what has its `feed` and `finish`."""
        return Restorer(self, api, events)


def taken_in(labels: Labels, text: bytes) -> set[tuple[str, int]]:
    """Labels and numbers of everything in the text that reads as a placeholder."""
    found = set()
    at = text.find(b"[")
    while at >= 0:
        piece = text[at : at + 2 * MAX_PLACEHOLDER].replace(b"\0", b"")
        if (match := labels.at_bytes(piece)) is not None:
            label = re.sub(_BETWEEN.encode(), b"_", match[1]).decode().upper()
            found.add((label, int(match[2])))
        at = text.find(b"[", at + 1)
    return found
