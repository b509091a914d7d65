"""Which of the running commands must make room for one that is wanted. Pure.

In: what each needs of host and GPU memory, and the limits. Out: what to stop now and what to let finish first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Memory(NamedTuple):
    """Bytes of the host's memory and of the GPU's. As a limit None means: not bounded."""

    host: int | None
    gpu: int | None


class Resident(Protocol):
    need: Memory
    last_used: float
    busy: bool  # requests are at it, or it is just starting for some
    leaving: bool  # it was asked to go and its memory will be free


class Room(NamedTuple):
    """`fits`: start it now. Else stop `idle` ones at once and let `busy` ones finish; then ask again."""

    fits: bool
    idle: list
    busy: list


def make_room(need: Memory, residents: Sequence[Resident], limit: Memory) -> Room:
    """Those idle for longest go first; a busy one only when all idle ones together are not enough."""
    lack = _lack(need, residents, limit)
    if not any(lack):
        return Room(True, [], [])
    lack = _lack(need, [resident for resident in residents if not resident.leaving], limit)  # what leaves is waited for
    chosen: list = []
    for resident in sorted((r for r in residents if not r.leaving), key=lambda r: (r.busy, r.last_used)):
        if not any(lack):
            break
        if any(short and own for short, own in zip(lack, resident.need, strict=True)):
            chosen.append(resident)
            lack = Memory(*(max(0, short - (own or 0)) for short, own in zip(lack, resident.need, strict=True)))
    return Room(False, [r for r in chosen if not r.busy], [r for r in chosen if r.busy])


def _lack(need: Memory, residents: Sequence[Resident], limit: Memory) -> Memory:
    """What is missing of each kind for `need` beside the residents."""
    taken = [sum(resident.need[kind] or 0 for resident in residents) for kind in (0, 1)]
    return Memory(*(
        0 if limit[kind] is None or not need[kind] else max(0, taken[kind] + need[kind] - limit[kind]) for kind in (0, 1)
    ))  # fmt: skip
