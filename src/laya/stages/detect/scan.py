"""Everything that is to be redacted in a text.

In: UTF-8 text. Out: spans in order, none touching another: (start, end, kind). Pure, any thread.
"""

from __future__ import annotations

from laya.stages.detect.emails import find_credentials, find_emails
from laya.stages.detect.numbers import find_numbers
from laya.stages.detect.own import OwnPatterns
from laya.stages.detect.secrets import find_lettered, find_secrets
from laya.stages.detect.window import Span, windows

NUMBERS = frozenset({"phone", "id", "card"})


class Scanner:
    """Built once from the kinds and patterns of the settings. Raises ValueError for a pattern that cannot be used."""

    def __init__(self, kinds: tuple[str, ...], patterns: dict[str, str]) -> None:
        self._kinds = frozenset(kinds) | frozenset(patterns)
        self._finders = [
            finder for finder, wanted in (
                (find_numbers, NUMBERS), (find_lettered, {"id"}), (find_emails, {"email"}),
                (find_credentials, {"secret"}), (find_secrets, {"secret"}),
            ) if not self._kinds.isdisjoint(wanted)
        ]  # fmt: skip
        if patterns:
            self._finders.append(OwnPatterns(patterns).find)

    def scan(self, text: bytes) -> list[Span]:
        found: list[Span] = []
        for window in windows(text):
            for finder in self._finders:
                finder(window, found)
        found = [span for span in found if span[2] in self._kinds]
        return apart(found)


def apart(found: list[Span]) -> list[Span]:
    """In order; spans that overlap become one, of the longest one's kind: nothing of either may be left."""
    if not found:
        return found
    found.sort()
    joined = [found[0]]
    longest = found[0]
    for span in found[1:]:
        start, end, _ = joined[-1]
        if span[0] >= end:
            joined.append(span)
            longest = span
            continue
        if span[1] - span[0] > longest[1] - longest[0]:
            longest = span
        joined[-1] = (start, max(end, span[1]), longest[2])
    return joined
