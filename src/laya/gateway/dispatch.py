"""What may be tried after a failed call: the retry table, as a table; how soon, and how often.

In: what failed, on which kind of connection, what was tried before. Out: a `Next`, a delay. Pure: nothing here acts. Once a
byte has gone to the client the answer is always STOP.
"""

from __future__ import annotations

import email.utils
import enum
import math
import random


class Next(enum.Enum):
    STOP = "stop"  # tell the client
    SAME_FRESH = "same backend, fresh connection"
    OTHER = "another backend"


# failure -> (the same backend again?, another backend?, ambiguous: the work may have been done already)
RETRY = {
    "connect": (False, True, False),
    "stale": (True, True, False),
    "reset": (False, True, True),
    "busy": (False, True, False),
    "absent": (False, True, False),  # it is started on demand and could not be
    "status": (False, True, False),  # 500, 502, 503, 504, 429 before the body
    "too_long": (False, True, False),  # the prompt exceeds the window: a fallback's may be larger
    "refused": (False, True, False),  # an engine's queue is full, or it does not serve now
    "first_byte_timeout": (False, False, False),
    "idle_timeout": (False, False, False),
    "broken": (False, False, False),
}
RETRIABLE_STATUS = frozenset({429, 500, 502, 503, 504})
# Answers after which a pause is due: the backends are alive and loaded, and a crowd that comes at once loads the next one.
PAUSE_S, MAX_PAUSE_S = 0.025, 0.2
# Retries after such answers may add so much to the load: beyond it they make an overload worse (Envoy's and Finagle's figure).
BUDGET_SHARE = 0.2
# What a quiet router may always do, and the most that can be saved up.
BUDGET_PER_S, BUDGET_CAP = 1.0, 100.0
# A client is never told to stay away for longer: it would forget us, or sleep through a restart.
MAX_RETRY_AFTER_S = 3600.0
# Attempts on other backends for one request: enough to step over one sick backend and an unlucky second.
MAX_OTHERS = 2
# Connecting that fails has cost nobody work: a request may step over so many dead backends.
MAX_UNREACHABLE = 8


class Attempts:
    """What was tried for one request. `stale` counts repeats on the same backend, `others` moves to another one."""

    __slots__ = ("tried", "stale", "others", "unreachable", "ambiguous")

    def __init__(self) -> None:
        self.tried: list[str] = []  # backend names, in order
        self.stale = 0
        self.others = 0
        self.unreachable = 0
        self.ambiguous = 0


def after_failure(
    failure: str, attempts: Attempts, *, sent_to_client: bool, candidates_left: bool, retry_ambiguous: bool = True
) -> Next:
    """The next step after `failure` (a key of RETRY) in state `attempts`, which is updated with the decision."""
    if sent_to_client:
        return Next.STOP
    same, other, ambiguous = RETRY[failure]
    if same and attempts.stale == 0:
        attempts.stale += 1
        return Next.SAME_FRESH
    if not other or not candidates_left or attempts.others >= MAX_OTHERS or attempts.unreachable >= MAX_UNREACHABLE:
        return Next.STOP
    if ambiguous:
        if not retry_ambiguous or attempts.ambiguous:
            return Next.STOP
        attempts.ambiguous += 1
    if failure == "connect":
        attempts.unreachable += 1
    else:
        attempts.others += 1
    attempts.stale = 0
    return Next.OTHER


def pause(others: int, rng: random.Random | None = None) -> float:
    """Seconds before the next backend is asked after an answer that names overload: full jitter, doubling."""
    return (rng or random).uniform(0.0, min(MAX_PAUSE_S, PAUSE_S * 2**others))


class RetryBudget:
    """Retries that may still be made: a share of the requests seen, a little with time, a bounded store."""

    __slots__ = ("exhausted", "_left", "_requests", "_at")

    def __init__(self) -> None:
        self.exhausted = 0  # retries that were not made
        self._left = BUDGET_CAP / 10
        self._requests = 0
        self._at: float | None = None  # of the last call

    def take(self, requests: int, now: float) -> bool:
        """One retry. `requests` counts all requests so far, `now` is in seconds; both only grow."""
        since = 0.0 if self._at is None else max(0.0, now - self._at)
        earned = (requests - self._requests) * BUDGET_SHARE + since * BUDGET_PER_S
        self._requests, self._at = requests, now
        self._left = min(BUDGET_CAP, self._left + earned)
        if self._left < 1.0:
            self.exhausted += 1
            return False
        self._left -= 1.0
        return True


def retry_after_of(fields: dict[bytes, bytes], wall: float) -> float | None:
    """Seconds that a backend asks to be left alone: `retry-after-ms`, or `retry-after` in seconds or as a date.

    `wall` is the time of day in seconds. Never negative; None where there is nothing that can be read.
    """
    ms = _number(fields.get(b"retry-after-ms"))
    if ms is not None:
        return max(0.0, ms / 1000)
    raw = fields.get(b"retry-after")
    seconds = _number(raw)
    if seconds is None and raw:
        try:
            seconds = email.utils.parsedate_to_datetime(raw.decode("latin-1")).timestamp() - wall
        except (ValueError, OverflowError, OSError):
            return None
    return None if seconds is None else max(0.0, seconds)


def _number(raw: bytes | None) -> float | None:
    try:
        value = float(raw.decode("ascii")) if raw and b"_" not in raw else math.nan
    except ValueError:  # UnicodeDecodeError too
        return None
    return value if math.isfinite(value) else None
