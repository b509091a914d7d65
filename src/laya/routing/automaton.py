"""Patterns with `*` compiled into one Aho-Corasick automaton: a name -> the one pattern that takes it.

In: patterns, once at start. Out: `PatternAutomaton.find(name)`, called on the loop thread for names that no exact rule takes.

How it works. The text before a pattern's first `*` must begin the name, the text after its last `*` must end it. The
automaton holds all these ends, anchored by a mark before and a mark behind the name, so that one pass in C finds which
beginnings and endings fit. They index the few patterns that are left, best first; the pieces between the stars are then
looked for from left to right, each at its first place, which decides a `*` pattern without going back.

Precedence: most literal characters, then the longer literal prefix. Two patterns equal in both that can match one name are
refused. This leaves for each beginning at most one candidate per count of literal characters, and `MAX_CANDIDATES` bounds the
nesting of beginnings, so a lookup is linear in the name however many rules there are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ahocorasick

from laya.errors import ConfigError

# Automaton states, one per character of the distinct ends: 10,000 rules of 50 characters; compiled in about half a second.
MAX_STATES = 500_000
# Patterns that one name can need to be compared with: each costs below a microsecond, so the worst name stays below 1 ms.
MAX_CANDIDATES = 1024
# Noncharacters, which Unicode keeps out of text. A name that has them is still matched rightly: places are compared too.
_START, _END = "\ufdd0", "\ufdd1"


class Pattern:
    """One rule with at least one star. `value` is what a match yields; `rank` 0 is the strongest of all."""

    __slots__ = ("text", "value", "prefix", "middles", "suffix", "literal_chars", "rank")

    def __init__(self, text: str, value: Any) -> None:
        pieces = text.split("*")
        self.text = text
        self.value = value
        self.prefix = pieces[0]
        self.suffix = pieces[-1]
        self.middles = tuple(piece for piece in pieces[1:-1] if piece)
        self.literal_chars = len(text) - len(pieces) + 1
        self.rank = 0

    def takes(self, name: str) -> bool:
        """Whether the whole name fits. Each middle piece is taken at its first place: a later one could only leave less."""
        end = len(name) - len(self.suffix)
        at = len(self.prefix)
        if at > end or not name.startswith(self.prefix) or not name.endswith(self.suffix):
            return False
        for piece in self.middles:
            at = name.find(piece, at, end)
            if at < 0:
                return False
            at += len(piece)
        return True


class PatternAutomaton:
    """Compiled patterns. Immutable after `__init__`, so any thread may call `find`."""

    def __init__(self, patterns: list[Pattern]) -> None:
        """Raises ConfigError for two patterns of equal strength that overlap, and beyond the bounds above."""
        self.patterns = sorted(patterns, key=lambda p: (-p.literal_chars, -len(p.prefix), p.text))
        for rank, pattern in enumerate(self.patterns):
            pattern.rank = rank
        _refuse_conflicts(self.patterns)
        _refuse_size(self.patterns)
        self._by_ends: dict[str, dict[str, list[Pattern]]] = {}
        for pattern in self.patterns:  # in order of rank, so each list is too
            self._by_ends.setdefault(pattern.prefix, {}).setdefault(pattern.suffix, []).append(pattern)
        self._ends = _anchored_ends(self.patterns)

    def find(self, name: str) -> Pattern | None:
        """The strongest pattern that takes `name`, or None."""
        if not self.patterns:
            return None
        last = len(name) + 1
        groups, suffixes = [], []
        for end, (prefix, suffix) in self._ends.iter(f"{_START}{name}{_END}"):
            if prefix is not None and end == len(prefix):
                groups.append(self._by_ends[prefix])
            if suffix is not None and end == last:
                suffixes.append(suffix)
        best, best_rank = None, len(self.patterns)
        for by_suffix in groups:
            for suffix in suffixes:
                for pattern in by_suffix.get(suffix, ()):
                    if pattern.rank >= best_rank:
                        break
                    if pattern.takes(name):
                        best, best_rank = pattern, pattern.rank
                        break
        return best


def _anchored_ends(patterns: list[Pattern]) -> ahocorasick.Automaton:
    """Marked beginnings and endings, each yielding (prefix, suffix). Both are set where a name's own marks make them alike."""
    prefixes = {_START + pattern.prefix: pattern.prefix for pattern in patterns}
    suffixes = {pattern.suffix + _END: pattern.suffix for pattern in patterns}
    ends = ahocorasick.Automaton()
    for key in prefixes.keys() | suffixes.keys():
        ends.add_word(key, (prefixes.get(key), suffixes.get(key)))
    if patterns:
        ends.make_automaton()
    return ends


def _refuse_conflicts(patterns: list[Pattern]) -> None:
    """Two patterns of equal strength have the same prefix length. They overlap exactly if the prefix is the same and one suffix
    ends the other: the stars between take the rest of both. Sorted by the reversed suffix such a pair has neighbours that
    overlap."""
    groups: dict[tuple[int, str], list[Pattern]] = {}
    for pattern in patterns:
        groups.setdefault((pattern.literal_chars, pattern.prefix), []).append(pattern)
    for group in groups.values():
        group.sort(key=lambda p: p.suffix[::-1])
        for one, other in pairwise(group):
            if other.suffix.endswith(one.suffix):
                raise ConfigError(
                    f'routes: the patterns "{one.text}" ({_owner(one)}) and "{other.text}" ({_owner(other)}) are equally '
                    "specific and can match the same name; allowed: one of them, or more literal characters in one"
                )


def _owner(pattern: Pattern) -> str:
    return f"route {getattr(pattern.value, 'name', pattern.value)}"


def _refuse_size(patterns: list[Pattern]) -> None:
    prefixes = {pattern.prefix for pattern in patterns}
    suffixes = {pattern.suffix for pattern in patterns}
    states = sum(map(len, prefixes)) + sum(map(len, suffixes)) + 2
    if states > MAX_STATES:
        raise ConfigError(
            f"routes: the rules need up to {states} matcher states; allowed: {MAX_STATES}. Use fewer or shorter patterns; "
            "names without * cost none"
        )
    counts: dict[str, set[int]] = {}
    for pattern in patterns:
        counts.setdefault(pattern.prefix, set()).add(pattern.literal_chars)
    deepest_suffix = _deepest({suffix[::-1]: 1 for suffix in suffixes})
    candidates = max(
        _deepest({prefix: len(strengths) for prefix, strengths in counts.items()}),
        _deepest(dict.fromkeys(prefixes, 1)) * deepest_suffix,
    )
    if candidates > MAX_CANDIDATES:
        raise ConfigError(
            f"routes: the patterns' ends nest so deeply that one name could need {candidates} comparisons; allowed: "
            f"{MAX_CANDIDATES}"
        )


def _deepest(weights: dict[str, int]) -> int:
    """The largest sum of weights along a chain of strings each of which begins the next."""
    deepest, chain, total = 0, [], 0
    for text in sorted(weights):
        while chain and not text.startswith(chain[-1]):
            total -= weights[chain.pop()]
        chain.append(text)
        total += weights[text]
        deepest = max(deepest, total)
    return deepest
