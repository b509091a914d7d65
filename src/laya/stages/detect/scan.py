"""Everything that is to be redacted in a text.

In: UTF-8 text. Out: spans in order, none touching another: (start, end, kind). Pure, any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from laya.stages.detect.emails import find_credentials, find_emails
from laya.stages.detect.numbers import find_numbers
from laya.stages.detect.own import OwnPatterns
from laya.stages.detect.secrets import find_lettered, find_secrets
from laya.stages.detect.window import Span, Window, windows

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

    def scan(self, text: bytes) -> Iterator[Span]:
        """As they are found: a text of megabytes may hold a million, which nobody should sort at once."""
        return joined(span for window in windows(text) for span in self._in(window))

    def _in(self, window: Window) -> list[Span]:
        found: list[Span] = []
        for finder in self._finders:
            finder(window, found)
        return sorted([span for span in found if span[2] in self._kinds])


def joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Of spans in order; those that overlap become one, of the longest one's kind: nothing of either may be left."""
    start = end = longest = 0
    kind = ""
    for begins, ends, its_kind in spans:
        if begins >= end:
            if end:
                yield start, end, kind
            start, end, kind, longest = begins, ends, its_kind, ends - begins
            continue
        if ends - begins > longest:
            kind, longest = its_kind, ends - begins
        start, end = min(start, begins), max(end, ends)
    if end:
        yield start, end, kind
