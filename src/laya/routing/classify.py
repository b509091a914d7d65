"""Which target a route with `classify` takes for one request.

In: the compiled rules, the last user message and a few facts about the request. Out: the targets of the first rule that holds,
with the reason in words. One Aho-Corasick pass over the message finds all words of all rules. Pure; called on the loop thread,
so what is read of a message is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ahocorasick
import msgspec

from laya.config import ClassifyRule, WhenConfig
from laya.routing.code import holds_code

# Read of a longer message: its first and last half of this, since instructions stand at the ends. A pass over so much
# text stays below 2 ms even when every character is a hit.
MAX_READ_CHARS = 16_384


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What conditions may ask besides the text. `prompt_tokens` is an estimate made before tokenising."""

    prompt_tokens: int
    max_tokens: int | None = None
    has_tools: bool = False
    has_images: bool = False


class Decision(msgspec.Struct, frozen=True):
    """`rule` is the index in the route's `classify`, -1 for the route's own `to`."""

    targets: tuple[Any, ...]
    rule: int
    reason: str


class _Seen(msgspec.Struct):
    """What the conditions look at."""

    facts: RequestFacts
    words: set[str]
    code: bool


# A condition's outcome: whether it holds, and what it saw.
_Condition = Callable[[_Seen], tuple[bool, str]]


class Classifier:
    """The rules of one route. `groups[i]` is what rule i sends to; `otherwise` the route's own targets, maybe none."""

    def __init__(self, rules: tuple[ClassifyRule, ...], groups: list[tuple[Any, ...]], otherwise: tuple[Any, ...]) -> None:
        whens = [rule.when or WhenConfig() for rule in rules]
        self.groups = groups
        self._whens = whens
        self._conditions = [_conditions(when) for when in whens]
        self._otherwise = otherwise
        self._asks_code = any(when.has_code is not None or when.no_code is not None for when in whens)
        self._words = ahocorasick.Automaton()
        for when in whens:
            for word in map(str.lower, when.any_words + when.all_words + when.no_words):
                self._words.add_word(word, (word, _spaced(word[0]), _spaced(word[-1])))
        if len(self._words):
            self._words.make_automaton()

    def decide(self, message: str, facts: RequestFacts) -> Decision:
        """The first rule that holds. The configuration guarantees that one does, or that there are targets besides."""
        if len(message) > MAX_READ_CHARS:
            half = MAX_READ_CHARS // 2
            message = f"{message[:half]}\n{message[-half:]}"
        seen = _Seen(facts, self._found(message), self._asks_code and holds_code(message))
        for index, conditions in enumerate(self._conditions):
            outcomes = [condition(seen) for condition in conditions]
            if all(held for held, _ in outcomes):
                reason = ", ".join(dict.fromkeys(what for _, what in outcomes))
                return Decision(self.groups[index], index, reason or "always")
        return Decision(self._otherwise, -1, "no rule held")

    def shown(self) -> list[dict[str, Any]]:
        """The rules in order: their conditions as written, and where they lead."""
        defaults = WhenConfig()
        return [
            {
                "rule": number + 1,
                "when": {
                    key: list(value) if isinstance(value, tuple) else value
                    for key in WhenConfig.__struct_fields__ if (value := getattr(when, key)) != getattr(defaults, key)
                },
                "targets": [target.shown() for target in group],
            }
            for number, (when, group) in enumerate(zip(self._whens, self.groups, strict=True))
        ]  # fmt: skip

    def _found(self, message: str) -> set[str]:
        """Words of any rule in the message: whole ones where their edge is of a script with spaces, else anywhere."""
        found: set[str] = set()
        if not len(self._words):
            return found
        text = message.lower()
        for end, (word, left, right) in self._words.iter(text):
            if word in found:
                continue
            before = end - len(word)
            if left and before >= 0 and _spaced(text[before]):
                continue
            if right and end + 1 < len(text) and _spaced(text[end + 1]):
                continue
            found.add(word)
            if len(found) == len(self._words):
                break
        return found


def _conditions(when: WhenConfig) -> list[_Condition]:
    """The given conditions of one `when`, cheap ones first. None given: always."""
    conditions: list[_Condition] = []
    if (most := when.max_prompt_tokens) is not None:
        conditions.append(lambda s: (s.facts.prompt_tokens <= most, f"prompt_tokens={s.facts.prompt_tokens}"))
    if (least := when.min_prompt_tokens) is not None:
        conditions.append(lambda s: (s.facts.prompt_tokens >= least, f"prompt_tokens={s.facts.prompt_tokens}"))
    if (answer := when.max_tokens_at_most) is not None:
        conditions.append(
            lambda s: (s.facts.max_tokens is not None and s.facts.max_tokens <= answer, f"max_tokens={s.facts.max_tokens}")
        )
    if (tools := when.has_tools) is not None:
        conditions.append(lambda s: (s.facts.has_tools == tools, "tools" if tools else "no tools"))
    if (images := when.has_images) is not None:
        conditions.append(lambda s: (s.facts.has_images == images, "images" if images else "no images"))
    code = when.has_code if when.has_code is not None else None if when.no_code is None else not when.no_code
    if code is not None:
        conditions.append(lambda s: (s.code == code, "code" if code else "no code"))
    return conditions + _word_conditions(when)


def _word_conditions(when: WhenConfig) -> list[_Condition]:
    conditions: list[_Condition] = []
    wanted, needed, banned = (tuple(map(str.lower, words)) for words in (when.any_words, when.all_words, when.no_words))
    if wanted:

        def any_word(seen: _Seen) -> tuple[bool, str]:
            hit = next((word for word in wanted if word in seen.words), None)
            return hit is not None, f"word {hit}"

        conditions.append(any_word)
    if needed:
        conditions.append(lambda s: (s.words.issuperset(needed), "all words"))
    if banned:
        conditions.append(lambda s: (s.words.isdisjoint(banned), "none of the words"))
    return conditions


def _spaced(char: str) -> bool:
    """Whether a character belongs to a word of a script that puts spaces between words."""
    return (char.isalnum() or char == "_") and not _is_cjk(ord(char))


def _is_cjk(code: int) -> bool:
    """CJK ideographs, kana, Hangul, their compatibility and half-width forms, and the supplementary ideographic planes."""
    return (
        0x2E80 <= code <= 0x9FFF or 0xAC00 <= code <= 0xD7AF or 0xF900 <= code <= 0xFAFF
        or 0xFF66 <= code <= 0xFFDC or 0x20000 <= code <= 0x3FFFF or 0x1100 <= code <= 0x11FF
    )  # fmt: skip
