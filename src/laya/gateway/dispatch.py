"""What may be tried after a failed call: the retry table, as a table.

In: what failed, on which kind of connection, what was tried before. Out: a `Next`. Pure: nothing here acts. Once a byte has
gone to the client the answer is always STOP.
"""

from __future__ import annotations

import enum


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
    "status": (False, True, False),  # 500, 502, 503, 504, 429 before the body
    "first_byte_timeout": (False, False, False),
    "idle_timeout": (False, False, False),
    "broken": (False, False, False),
}
RETRIABLE_STATUS = frozenset({429, 500, 502, 503, 504})
# Attempts on other backends for one request: enough to step over one sick backend and an unlucky second.
MAX_OTHERS = 2


class Attempts:
    """What was tried for one request. `stale` counts repeats on the same backend, `others` moves to another one."""

    __slots__ = ("tried", "stale", "others", "ambiguous")

    def __init__(self) -> None:
        self.tried: list[str] = []  # backend names, in order
        self.stale = 0
        self.others = 0
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
    if not other or not candidates_left or attempts.others >= MAX_OTHERS:
        return Next.STOP
    if ambiguous:
        if not retry_ambiguous or attempts.ambiguous:
            return Next.STOP
        attempts.ambiguous += 1
    attempts.others += 1
    attempts.stale = 0
    return Next.OTHER
