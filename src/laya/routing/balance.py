"""Pick a backend: pure decisions over the state that the caller keeps. Loop thread only.

In: candidates of a route, each with a breaker, a load and a weight. Out: the same candidates, best first; the caller goes
down the list as the retry table allows.
"""

from __future__ import annotations

import random
from typing import Protocol

# Failures in a row that open a breaker: one or two happen to a healthy server that restarts a worker.
OPEN_AFTER = 5
# How long it stays open before one request may try; doubled at each failed try up to the last figure.
OPEN_S = 5.0
MAX_OPEN_S = 60.0


class Breaker:
    """closed -> open after OPEN_AFTER failures in a row -> half-open after its time, for exactly one request."""

    __slots__ = ("failures", "open_until", "open_for", "probing")

    def __init__(self) -> None:
        self.failures = 0
        self.open_until = 0.0
        self.open_for = OPEN_S
        self.probing = False

    @property
    def state(self) -> int:
        """0 closed, 1 half-open, 2 open: the value of the metric."""
        return 1 if self.probing else 2 if self.open_until else 0

    def allows(self, now: float) -> bool:
        return not self.open_until or (now >= self.open_until and not self.probing)

    def taken(self, now: float) -> None:
        """A request goes to this backend."""
        if self.open_until and now >= self.open_until:
            self.probing = True

    def released(self) -> None:
        """That request ended without telling anything about the backend (its client left)."""
        self.probing = False

    def succeeded(self) -> None:
        self.failures = 0
        self.open_until = 0.0
        self.open_for = OPEN_S
        self.probing = False

    def failed(self, now: float) -> None:
        self.failures += 1
        if self.probing or (self.failures >= OPEN_AFTER and not self.open_until):
            self.open_until = now + self.open_for
            self.open_for = min(self.open_for * 2, MAX_OPEN_S)
        self.probing = False


class Candidate(Protocol):
    weight: float
    breaker: Breaker

    @property
    def load(self) -> int: ...


def order(policy: str, candidates: list, turn: int, now: float, rng: random.Random | None = None) -> list:
    """Candidates best first. Those whose breaker is open come last rather than never: a last try beats a made-up error.

    `turn` counts requests of the route and drives round_robin, weighted and the breaking of ties.
    """
    if len(candidates) == 1:
        return candidates
    usable = [c for c in candidates if c.breaker.allows(now)]
    rest = [c for c in candidates if not c.breaker.allows(now)]
    if len(usable) > 1:
        usable = _ORDERS[policy](usable, turn, rng or random)
    return usable + rest


def _rotated(candidates: list, turn: int, _) -> list:
    start = turn % len(candidates)
    return candidates[start:] + candidates[:start]


def _weighted(candidates: list, turn: int, _) -> list:
    """Smooth shares without state: the golden ratio spreads turns evenly over [0, 1)."""
    point = (turn * 0.6180339887498949) % 1.0 * sum(c.weight for c in candidates)
    for i, candidate in enumerate(candidates):
        point -= candidate.weight
        if point < 0:
            return [candidate, *candidates[:i], *candidates[i + 1 :]]
    return candidates


def _least_busy(candidates: list, turn: int, _) -> list:
    return sorted(_rotated(candidates, turn, None), key=lambda c: c.load / c.weight)


def _power_of_two(candidates: list, turn: int, rng) -> list:
    """The less busy of two drawn at random (Mitzenmacher 2001), then the rest."""
    first, second = rng.sample(candidates, 2)
    if second.load / second.weight < first.load / first.weight:
        first, second = second, first
    return [first, second, *(c for c in candidates if c is not first and c is not second)]


# Affinity policies pick by load where there is no affinity to follow.
_ORDERS = {
    "round_robin": _rotated,
    "weighted": _weighted,
    "least_busy": _least_busy,
    "power_of_two": _power_of_two,
    "prefix": _least_busy,
    "session": _least_busy,
}
