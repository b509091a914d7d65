"""Pick a backend: pure decisions over the state that the caller keeps. Loop thread only.

In: candidates of a route, each with a breaker, a load and a weight. Out: the same candidates, best first; the caller goes
down the list as the retry table allows.
"""

from __future__ import annotations

import math
import random
from typing import Protocol

# Failures in a row that open a breaker: one or two happen to a healthy server that restarts a worker.
OPEN_AFTER = 5
# How long it stays open before one request may try; doubled at each failed try up to the last figure.
OPEN_S = 5.0
MAX_OPEN_S = 60.0
# The longest that a backend's own Retry-After keeps it out: one that asks for more is tried again by a single request a minute.
MAX_COOL_S = 60.0
# How far above its fair share of the running requests a target may be loaded before a shared prefix goes elsewhere
# (Mirrokni, Thorup, Zadimoghaddam: Consistent hashing with bounded loads, SODA 2018, whose figure this is).
LOAD_BOUND = 1.25


class Breaker:
    """closed -> open after OPEN_AFTER failures in a row -> half-open after its time, for exactly one request.

    Beside it `cool`: a backend that named the time after which it wants to be asked again is left alone so long.
    """

    __slots__ = ("failures", "open_until", "open_for", "probing", "cool_until")

    def __init__(self) -> None:
        self.failures = 0
        self.open_until = 0.0
        self.open_for = OPEN_S
        self.probing = False
        self.cool_until = 0.0

    @property
    def state(self) -> int:
        """0 closed, 1 half-open, 2 open: the value of the metric."""
        return 1 if self.probing else 2 if self.open_until else 0

    def allows(self, now: float) -> bool:
        if self.cool_until > now:
            return False
        return not self.open_until or (now >= self.open_until and not self.probing)

    def taken(self, now: float) -> bool:
        """A request goes to this backend. True: it is the probe, and must end in `succeeded`, `failed` or `released`."""
        if self.open_until and now >= self.open_until and not self.probing:
            self.probing = True
            return True
        return False

    def released(self) -> None:
        """The probe ended without telling anything about the backend (its client left)."""
        self.probing = False

    def succeeded(self) -> None:
        self.failures = 0
        self.open_until = 0.0
        self.open_for = OPEN_S
        self.probing = False

    def failed(self, now: float, probe: bool = False) -> None:
        """`probe`: the failed request was the one of the half-open state."""
        self.failures += 1
        if probe or (self.failures >= OPEN_AFTER and not self.open_until):
            self.open_until = now + self.open_for
            self.open_for = min(self.open_for * 2, MAX_OPEN_S)
        if probe:
            self.probing = False

    def hasten(self, now: float) -> None:
        """The backend has come back: the probe of an open breaker may go at once. What was counted stays."""
        self.open_until = min(self.open_until, now)

    def cool(self, now: float, seconds: float) -> None:
        """The backend asked to be left alone for a while (Retry-After)."""
        self.cool_until = now + min(seconds, MAX_COOL_S)


class Candidate(Protocol):
    name: str  # of its backend or engine
    weight: float

    @property
    def load(self) -> int: ...

    def usable(self, now: float) -> bool:
        """Breaker, health and its own wish to be left alone."""


def order(
    policy: str, candidates: list, turn: int, now: float, rng: random.Random | None = None, preferred: str | None = None
) -> list:
    """Candidates best first. Those that are not usable come last rather than never: a last try beats a made-up error.

    `turn` counts requests and drives round_robin, weighted and the breaking of ties. `preferred` is the name of the target that
    has the request's KV cache; it comes first if it is usable and, under `prefix`, not loaded beyond its bound.
    """
    if len(candidates) == 1:
        return candidates
    usable = [c for c in candidates if c.usable(now)]
    rest = [c for c in candidates if c not in usable] if len(usable) < len(candidates) else []
    if len(usable) > 1:
        usable = _ORDERS[policy](usable, turn, rng or random)
        if preferred is not None:
            usable = _with_first(usable, preferred, policy == "prefix")
    return usable + rest


def _with_first(usable: list, preferred: str, bounded: bool) -> list:
    for i, candidate in enumerate(usable):
        if candidate.name == preferred:
            if i == 0 or (bounded and over_bound(candidate, usable)):
                return usable
            return [candidate, *usable[:i], *usable[i + 1 :]]
    return usable


def over_bound(candidate: Candidate, usable: list) -> bool:
    """One request more would take the target beyond LOAD_BOUND times its share of all that run."""
    share = candidate.weight / sum(c.weight for c in usable)
    bound = math.ceil(LOAD_BOUND * share * (sum(c.load for c in usable) + 1))
    return candidate.load + 1 > bound


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
