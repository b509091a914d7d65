"""Which of many options to show a model that reads slowly: those with most in common with what the question is about.

In: the options' texts, and the state with the instructions. Out: the numbers of the best ones, in their own order. Shared
groups of three letters are counted, rarer ones for more, so that "refund" finds "Refunds and payments". Pure; any thread.
"""

from __future__ import annotations

import math
from collections import Counter

# A processor reads some hundred tokens a second and clients wait ten seconds: so many options with a sentence each fit.
SHOWN_ON_CPU = 16
_MOST_TEXT = 20_000  # characters of the state that are looked at: a few milliseconds of work


def most_shown(details: dict) -> int | None:
    """How many options a question may show, by the details of a model's card; None: all."""
    return details.get("decision_options") or (SHOWN_ON_CPU if str(details.get("device")).startswith("cpu") else None)


def shortlist(options: list[str], about: str, count: int) -> list[int]:
    """`count` numbers, or all where there are no more; equals are taken in their own order."""
    if len(options) <= count:
        return list(range(len(options)))
    wanted = _threes(about[:_MOST_TEXT])
    found = [_threes(option) for option in options]
    spread = Counter(three for threes in found for three in threes)
    weight = {three: math.log(len(options) / times) for three, times in spread.items()}
    scores = [sum(weight[three] for three in threes & wanted) / math.sqrt(len(threes) or 1) for threes in found]
    best = sorted(range(len(options)), key=lambda i: (-scores[i], i))[:count]
    return sorted(best)


def _threes(text: str) -> set[str]:
    text = f" {' '.join(text.lower().split())} "
    return {text[i : i + 3] for i in range(len(text) - 2)}
