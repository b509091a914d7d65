"""Which command must go for another: pure decisions."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from laya.net.room import Memory, make_room


@dataclass(eq=False)
class Fake:
    need: Memory
    last_used: float = 0.0
    busy: bool = False
    leaving: bool = False


def one(host: int, gpu: int = 0, **more) -> Fake:
    return Fake(Memory(host, gpu), **more)


LIMIT = Memory(10, None)


def test_what_fits_beside_the_others_starts():
    assert make_room(Memory(4, 0), [one(6)], LIMIT) == (True, [], [])
    assert make_room(Memory(0, 0), [one(60)], LIMIT).fits, "what was not declared is not counted"
    assert make_room(Memory(100, 0), [], Memory(None, None)).fits


def test_the_one_idle_for_longest_goes_first_and_no_more_than_is_needed():
    old, new = one(4, last_used=1.0), one(4, last_used=2.0)
    assert make_room(Memory(4, 0), [new, old], LIMIT) == (False, [old], [])
    assert make_room(Memory(8, 0), [new, old], LIMIT) == (False, [old, new], [])


def test_busy_ones_finish_first_and_only_where_idle_ones_are_not_enough():
    busy, idle = one(5, busy=True, last_used=0.0), one(5, last_used=9.0)
    assert make_room(Memory(5, 0), [busy, idle], LIMIT) == (False, [idle], [])
    assert make_room(Memory(10, 0), [busy, idle], LIMIT) == (False, [idle], [busy])


def test_what_leaves_already_is_waited_for():
    assert make_room(Memory(5, 0), [one(6, leaving=True), one(4)], LIMIT) == (False, [], [])


def test_only_those_that_hold_the_kind_of_memory_that_is_lacking_go():
    on_host, on_card = one(8, 0, last_used=1.0), one(0, 8, last_used=2.0)
    assert make_room(Memory(1, 8), [on_host, on_card], Memory(10, 10)) == (False, [on_card], [])


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.booleans(), st.floats(0, 9)), max_size=6),
    st.integers(0, 8), st.integers(0, 8),
)  # fmt: skip
def test_whoever_is_chosen_makes_room(items, host, gpu):
    residents = [one(h, g, busy=busy, last_used=used) for h, g, busy, used in items]
    limit, need = Memory(20, 20), Memory(host, gpu)
    room = make_room(need, residents, limit)
    left = [resident for resident in residents if resident not in (*room.idle, *room.busy)]
    if any(sum(r.need[kind] for r in residents) + need[kind] > limit[kind] and need[kind] for kind in (0, 1)):
        assert not room.fits and (room.idle or room.busy)
    assert make_room(need, left, limit).fits
    assert all(resident.busy for resident in room.busy) and not any(resident.busy for resident in room.idle)
