"""Stored conversations: scope, time, bytes, and the disk behind them."""

from __future__ import annotations

import threading

import pytest

from laya.gateway.store import ENTRY_BYTES, ResponseStore
from laya.routing.sessions.journal import Journal


class Wall:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def got(store: ResponseStore, id: str, scope: str = "a"):
    answers, there = [], threading.Event()
    store.get(id, scope, lambda value: (answers.append(value), there.set()))
    assert there.wait(10)
    return answers[0]


def deleted(store: ResponseStore, id: str, scope: str = "a"):
    answers, there = [], threading.Event()
    store.delete(id, scope, lambda value: (answers.append(value), there.set()))
    assert there.wait(10)
    return answers[0]


@pytest.fixture
def disk(tmp_path):
    journals = []

    def opened() -> Journal:
        journals.append(Journal(str(tmp_path / "t.sqlite"), flush_s=0.0, post=lambda call: call()))
        journals[-1].start()
        return journals[-1]

    yield opened
    for journal in journals:
        journal.stop(10)


def test_a_conversation_is_known_to_its_own_scope_alone():
    store = ResponseStore(max_bytes=10_000, ttl_s=60)
    store.put("r1", "a", b"one")
    assert (got(store, "r1"), got(store, "r1", "b"), got(store, "r2")) == (b"one", None, None)
    assert not deleted(store, "r1", "b") and deleted(store, "r1") and not deleted(store, "r1")
    assert got(store, "r1") is None and store.bytes == 0


def test_the_oldest_go_first_and_nothing_outlives_its_time():
    wall = Wall()
    store = ResponseStore(max_bytes=3 * (ENTRY_BYTES + 10), ttl_s=60, wall=wall)
    for i in range(5):
        store.put(f"r{i}", "a", b"x" * 10)
    assert [got(store, f"r{i}") is not None for i in range(5)] == [False, False, True, True, True]
    store.put("big", "a", b"x" * 10_000)
    assert got(store, "big") is None and len(store) == 3
    store.put("r4", "a", b"y")
    assert got(store, "r4") == b"y" and len(store) == 3
    wall.now += 60
    assert got(store, "r4") is None
    store.put("new", "a", b"z")
    assert len(store) == 1 and store.bytes == ENTRY_BYTES + 1


def test_a_restart_keeps_what_was_stored(disk):
    journal = disk()
    first = ResponseStore(max_bytes=10_000, ttl_s=60, journal=journal)
    first.put("r1", "a", b"one")
    first.put("r1", "a", b"two")
    first.put("r2", "a", b"three")
    assert deleted(first, "r2")
    assert journal.stop(10)
    second = ResponseStore(max_bytes=10_000, ttl_s=60, journal=disk())
    assert (got(second, "r1"), got(second, "r2"), got(second, "r1", "b")) == (b"two", None, None)
    assert deleted(second, "r1") and got(second, "r1") is None and not deleted(second, "r1")


def test_the_disk_is_bounded_in_bytes_and_time(disk):
    wall = Wall()
    journal = disk()
    store = ResponseStore(max_bytes=10_000, ttl_s=60, journal=journal, wall=wall)
    for i in range(50):
        wall.now += 0.1
        store.put(f"r{i}", "a", bytes(1000))
    rows, there = [], threading.Event()
    query = "SELECT count(*), (SELECT response_bytes FROM totals), sum(length(value)) FROM responses"
    journal.read(query, (), lambda found: (rows.extend(found), there.set()))
    assert there.wait(10) and rows[0][1] == rows[0][2] <= 10_000 and rows[0][0] >= 8
    cold = ResponseStore(max_bytes=10_000, ttl_s=60, journal=journal, wall=wall)
    assert got(cold, "r49") == bytes(1000) and got(cold, "r0") is None
    wall.now += 60
    assert got(cold, "r49") is None


def test_who_asks_for_what_is_being_made_waits_for_it():
    store = ResponseStore(max_bytes=10_000, ttl_s=60)
    answers: list[bytes | None] = []
    store.promise("r", "a")
    store.find("r", "a", answers.append)
    store.find("r", "b", answers.append)  # another key's: unknown at once
    assert answers == [None]
    store.settle("r", "a", b"made")
    store.find("r", "a", answers.append)
    assert answers == [None, b"made", b"made"]
    store.promise("lost", "a")
    store.find("lost", "a", answers.append)
    store.settle("lost", "a", None)
    assert answers[3:] == [None]
