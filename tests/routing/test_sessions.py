"""The session table: eviction, modes, and everything that SQLite can do to it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.routing.sessions.database import COLUMNS, Database
from laya.routing.sessions.hot import MAX_ROUNDS, HotTable
from laya.routing.sessions.journal import Journal
from laya.routing.sessions.store import DiskSessions, MemorySessions, session_key

SRC = Path(__file__).resolve().parents[2] / "src"


# -- the hot table -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("gp"), st.integers(0, 30)), max_size=400), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_the_hot_table_is_a_dict_that_forgets(operations, capacity):
    """What it answers is what was put last; it never holds more than its capacity."""
    table, model = HotTable(capacity), {}
    for n, (operation, key) in enumerate(operations):
        if operation == "p":
            table.put(key, n)
            model[key] = n
            assert table.get(key) == n
        elif (value := table.get(key)) is not None:
            assert value == model[key]
        assert len(table) <= capacity
        assert dict(table.items()).items() <= model.items()
    assert len(table) + table.evictions >= min(len(model), capacity)


def test_a_scan_does_not_push_out_what_is_in_use():
    table = HotTable(100)
    for key in range(50):
        table.put(key, key)
    for key in range(50):
        table.get(key)
    for key in range(1000, 11_000):  # ten thousand keys that never come back
        table.put(key, key)
        table.get(key % 50)
    assert sum(table.get(key) is not None for key in range(50)) >= 45


def test_no_operation_costs_more_when_the_table_is_full():
    """Steps of one eviction are bounded, also when every entry was just used."""
    table = HotTable(10_000)
    for _ in range(4):
        for key in range(10_000):
            table.put(key, key)
            table.get(key)
    steps = 0

    class Counted(dict):
        def __getitem__(self, key):
            nonlocal steps
            steps += 1
            return super().__getitem__(key)

    table._entries = Counted(table._entries)
    for key in range(20_000, 20_100):
        steps = 0
        table.put(key, key)
        assert steps <= MAX_ROUNDS + 1
    assert len(table) == 10_000


def test_a_session_is_scoped_by_key_and_route_and_kept_as_a_digest():
    keys = {session_key(scope, route, b"s") for scope in ("", "a") for route in ("r", "q")}
    assert len(keys) == 4 and all(len(key) == 16 for key in keys)
    assert session_key("\ud800", "r", b"\xff\x00") != session_key("", "r", b"\xff\x00")


# -- the modes ---------------------------------------------------------------------------------------------------------------


class Timers:
    """`later` by real threads: the loop's call_later for tests."""

    def __call__(self, seconds: float, call) -> threading.Timer:
        timer = threading.Timer(seconds, call)
        timer.daemon = True
        timer.start()
        return timer


class Table:
    """A store and its journal on one file; answers are waited for."""

    def __init__(self, path: Path, *, durable: bool = True, capacity: int = 100, timeout_s: float = 5.0, flush_s: float = 0.0):
        self.journal = Journal(str(path), flush_s=flush_s, post=lambda call: call())
        self.journal.start()
        self.store = DiskSessions(capacity, self.journal, durable=durable, timeout_s=timeout_s, later=Timers())

    def assign(self, key: bytes, target: str) -> float:
        """Seconds until the request may go on."""
        over = threading.Event()
        began = time.monotonic()
        if not self.store.assign(key, target, over.set):
            assert over.wait(10)
        return time.monotonic() - began

    def find(self, key: bytes) -> str | None:
        known = self.store.find(key)
        if known is not None or not self.store.may_fetch():
            return known
        answers, there = [], threading.Event()
        self.store.fetch(key, lambda target, in_time: (answers.append(target), there.set()))
        assert there.wait(10)
        return answers[0]

    def wait(self, condition, seconds: float = 10.0) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not condition():
            time.sleep(0.01)
        return condition()


@pytest.fixture
def table(tmp_path):
    made = []

    def make(**kw) -> Table:
        made.append(Table(tmp_path / "s.sqlite", **kw))
        return made[-1]

    yield make
    for each in made:
        each.journal.stop(10)


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def test_memory_mode_touches_no_disk():
    store = MemorySessions(2)
    assert not store.may_fetch() and store.assign(b"a", "x", lambda: None) and store.find(b"a") == "x"
    assert store.status()["state"] == "ok" and store.figures() == (1, 0)


@pytest.mark.parametrize("durable", [True, False])
def test_sessions_survive_a_clean_stop_and_cold_ones_come_from_the_disk(table, durable):
    first = table(durable=durable, capacity=10, flush_s=0.0 if durable else 60.0)
    for n in range(50):
        first.assign(key(n), f"t{n % 3}")
    assert first.journal.stop(10), "a clean stop loses nothing, though nothing was due"
    second = table(durable=durable, capacity=10)
    assert [second.find(key(n)) for n in range(50)] == [f"t{n % 3}" for n in range(50)]
    assert second.find(key(99)) is None and second.store.figures()[0] == 10
    second.assign(key(7), "moved")
    assert second.find(key(7)) == "moved"


def test_an_empty_disk_is_not_asked(table):
    made = table()
    assert made.wait(lambda: not made.store.may_fetch())


def test_last_use_times_are_written_lazily(table, tmp_path):
    made = table()
    made.assign(key(1), "a")
    made.store._wall = lambda: 5_000_000_000
    made.store.on_tick(1.0)  # the first tick sets the pace
    made.store.find(key(1))
    made.store.on_tick(1000.0)
    assert made.journal.stop(10)
    assert sqlite3.connect(tmp_path / "s.sqlite").execute("SELECT used FROM sessions").fetchone() == (5_000_000_000,)


# -- what can go wrong with the disk -------------------------------------------------------------------------------------------


def test_a_locked_database_holds_nobody_up_and_loses_nothing(table, tmp_path):
    """(case 73) Somebody holds BEGIN EXCLUSIVE: bounded waits, then none; writes queue and reach the disk afterwards."""
    made = table(timeout_s=0.05)
    made.assign(key(0), "before")
    other = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    waits = [made.assign(key(n), "during") for n in range(1, 40)]
    assert max(waits) < 2 and sum(wait < 0.02 for wait in waits) > 30
    assert made.wait(lambda: made.store.status()["state"] == "degraded")
    assert made.store.status()["reason"] == "locked" and made.store.late > 0
    assert made.find(key(20)) == "during"
    other.execute("COMMIT")
    assert made.wait(lambda: made.journal.pending == 0) and made.wait(lambda: made.journal.state == "ok")
    assert other.execute("SELECT count(*) FROM sessions").fetchone() == (40,)


@pytest.mark.parametrize("damage", [b"this is no database, and long enough to be read as one" * 100, None])
def test_a_damaged_file_is_put_aside_and_a_new_one_begun(table, tmp_path, damage):
    """(case 74) Not a database; or one whose pages were overwritten."""
    path = tmp_path / "s.sqlite"
    if damage is None:
        first = table()
        for n in range(2000):
            first.store.assign(key(n), "a" * 50, lambda: None)
        assert first.journal.stop(10)
        with open(path, "r+b") as file:
            file.seek(4096)
            file.write(os.urandom(30_000))
    else:
        path.write_bytes(damage)
    made = table()
    assert made.assign(key(1), "x") < 10 and made.find(key(1)) == "x"
    assert made.store.status()["errors"] == {"corrupt": 1} and (tmp_path / "s.sqlite.corrupt").exists()
    assert made.wait(lambda: made.store.status()["state"] == "ok")


def test_damage_that_comes_while_it_runs_is_survived(table, tmp_path):
    """(case 74) The next write or read that meets it starts a new file; requests go on."""
    made = table(capacity=5, timeout_s=1.0)
    for n in range(3000):
        made.store.assign(key(n), "a" * 50, lambda: None)
    assert made.wait(lambda: made.journal.pending == 0)
    made.journal.read("PRAGMA wal_checkpoint(TRUNCATE)", (), lambda rows: None)
    made.journal.read("PRAGMA shrink_memory", (), lambda rows: None)
    time.sleep(0.2)
    with open(tmp_path / "s.sqlite", "r+b") as file:
        file.seek(100)
        file.write(os.urandom(os.path.getsize(tmp_path / "s.sqlite") - 100))
    for n in range(3000):
        made.find(key(n))
        made.assign(key(n), "b")
        if "corrupt" in made.journal.errors:
            break
    assert made.wait(lambda: made.journal.errors.get("corrupt", 0) >= 1)
    assert made.wait(lambda: made.journal.state == "ok", 20)
    made.assign(key(5000), "c")
    assert made.find(key(5000)) == "c"


def test_a_read_only_file_serves_reads_and_memory(tmp_path):
    """(case 73) As another user's file is: writes fail, are told, and nothing waits for them."""
    path = tmp_path / "s.sqlite"
    first = Table(path)
    first.assign(key(1), "old")
    assert first.journal.stop(10)
    made = Table(path, timeout_s=0.2)
    made.find(key(1))
    made.journal.read("PRAGMA query_only=1", (), lambda rows: None)  # what the system says of a read-only file
    waits = [made.assign(key(n), "new") for n in range(2, 10)]
    assert made.wait(lambda: made.store.status()["state"] == "degraded") and made.store.status()["reason"] == "read_only"
    assert max(waits) < 2 and made.find(key(1)) == "old" and made.find(key(5)) == "new"
    made.journal.read("PRAGMA query_only=0", (), lambda rows: None)
    assert made.wait(lambda: made.journal.state == "ok" and made.journal.pending == 0)
    assert made.journal.stop(10)


def test_a_folder_that_is_not_there_degrades_and_recovers(tmp_path):
    made = Table(tmp_path / "none" / "s.sqlite", timeout_s=0.1)
    assert made.assign(key(1), "a") < 2 and made.find(key(1)) == "a"
    assert made.wait(lambda: made.store.status()["state"] == "degraded")
    (tmp_path / "none").mkdir()
    assert made.wait(lambda: made.journal.state == "ok" and made.journal.pending == 0, 20)
    assert made.journal.stop(10)
    again = Table(tmp_path / "none" / "s.sqlite")
    assert again.find(key(1)) == "a" and again.journal.stop(10)


def test_a_full_disk_keeps_writes_for_later(table):
    """(case 73) SQLITE_FULL, made by a limit on pages."""
    made = table(timeout_s=0.1)
    made.assign(key(0), "a")
    made.journal.read("PRAGMA max_page_count=20", (), lambda rows: None)
    for n in range(2000):
        made.store.assign(key(n), "t" * 60, lambda: None)
    assert made.wait(lambda: made.store.status()["state"] == "degraded") and made.store.status()["reason"] == "full"
    assert made.assign(key(9999), "b") < 1 and made.find(key(9999)) == "b"
    made.journal.read("PRAGMA max_page_count=1000000", (), lambda rows: None)
    assert made.wait(lambda: made.journal.state == "ok" and made.journal.pending == 0, 20)


@pytest.mark.parametrize(
    ("statements", "reason", "moved"),
    [
        (["DROP TABLE sessions", "CREATE TABLE sessions (key BLOB PRIMARY KEY, target TEXT)"], "old_schema", True),
        (["PRAGMA user_version=99"], "newer_schema", False),
        (["PRAGMA application_id=7"], "not_ours", False),
    ],
)
def test_other_schemas_are_told_apart(table, tmp_path, statements, reason, moved):
    """An old schema is put aside; a newer one and another program's file are left alone, and the table lives in memory."""
    first = table()
    first.assign(key(1), "a")
    assert first.journal.stop(10)
    connection = sqlite3.connect(tmp_path / "s.sqlite", isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()
    made = table(timeout_s=0.1)
    made.assign(key(2), "b")
    assert made.find(key(2)) == "b" and made.wait(lambda: reason in made.journal.errors)
    assert (tmp_path / f"s.sqlite.{reason}").exists() == moved
    assert made.store.status()["state"] == ("ok" if moved else "degraded")


def test_a_second_process_goes_on_without_the_disk_until_it_is_free(table, tmp_path):
    """(case 72) The lock file keeps it out; when the first is gone it takes over, with what it learned meanwhile."""
    first = table()
    first.assign(key(1), "a")
    second = Table(tmp_path / "s.sqlite", timeout_s=0.1)
    assert second.assign(key(2), "b") < 2 and second.find(key(2)) == "b"
    assert second.wait(lambda: second.journal.state == "degraded") and second.journal.reason == "second_process"
    assert first.journal.stop(10)
    assert second.wait(lambda: second.journal.state == "ok" and second.journal.pending == 0, 20)
    assert second.find(key(1)) == "a" and second.journal.stop(10)


NURSERY = """
import os, sys, threading
from laya.routing.sessions.journal import Journal
from laya.routing.sessions.store import DiskSessions

def work(start):
    journal = Journal(sys.argv[1], flush_s=float(sys.argv[2]), post=lambda call: call())
    journal.start()
    store = DiskSessions(100, journal, durable=sys.argv[3] == "1", timeout_s=30, later=lambda s, c: threading.Timer(s, c))
    for n in range(start, 10**9):
        over = threading.Event()
        if not store.assign(n.to_bytes(16, "big"), "t", over.set):
            over.wait(30)
        os.write(1, b"%d\\n" % n)

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.write(1, b"%d\\n" % os.getpid())
        work(int(line))
    os.waitpid(pid, 0)
    os.write(1, b"over\\n")
"""
KILLS = 25  # of each mode: fifty in all


@pytest.mark.parametrize(("durable", "flush_s"), [(True, 0.0), (False, 0.02)])
def test_a_kill_in_the_middle_of_writing_loses_nothing_acknowledged(tmp_path, durable, flush_s):
    """(case 74) Killed at any moment, fifty times; the file stays sound. Persistent keeps all, hybrid all but the last flush_ms."""
    path = tmp_path / "s.sqlite"
    assert Table(path).journal.stop(10), "the file is there, with its tables"
    start, lost = 0, 0
    nursery = subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(path), str(flush_s), str(int(durable))], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SRC)},
    )  # fmt: skip
    with nursery:
        for turn in range(KILLS):
            nursery.stdin.write(b"%d\n" % start)
            nursery.stdin.flush()
            pid, acknowledged = int(nursery.stdout.readline()), int(nursery.stdout.readline())
            time.sleep(turn * 0.005)
            os.kill(pid, signal.SIGKILL)
            while (line := nursery.stdout.readline()) != b"over\n":
                acknowledged = int(line)
            connection = sqlite3.connect(path)
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            (kept,) = connection.execute("SELECT count(*) FROM sessions WHERE key >= ?", (key(start),)).fetchone()
            lost += max(0, acknowledged + 1 - start - kept)
            assert connection.execute("SELECT sessions = (SELECT count(*) FROM sessions) FROM totals").fetchone() == (1,)
            connection.close()
            start = acknowledged + 2  # one more may have been written and not told
        nursery.stdin.close()
    assert not durable or lost == 0


def test_sessions_are_written_many_at_a_time_and_each_is_there(table, tmp_path):
    made = table(durable=False, flush_s=0.05, capacity=1000)
    for n in range(200):  # more than one statement takes, and no multiple of what it takes
        made.assign(key(n), f"t{n}")
        made.assign(key(n // 2), f"again{n}")
    assert made.journal.stop(10)
    found = dict(sqlite3.connect(tmp_path / "s.sqlite").execute("SELECT key, target FROM sessions"))
    assert found == {key(n): made.find(key(n)) for n in range(200)} and found[key(7)] == "again15"


def test_the_disk_forgets_the_least_recently_used_beyond_its_bound(table, tmp_path, monkeypatch):
    monkeypatch.setattr("laya.routing.sessions.database.MAX_SESSIONS", 100)
    made = table()
    stamps = iter(range(1, 1000))
    made.store._wall = lambda: next(stamps)
    for n in range(300):
        made.assign(key(n), "a")
    assert made.journal.stop(10)
    kept = sqlite3.connect(tmp_path / "s.sqlite").execute("SELECT key FROM sessions ORDER BY used").fetchall()
    assert 100 <= len(kept) <= 101 and kept[-1] == (key(299),)


def test_what_waits_for_a_dead_disk_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("laya.routing.sessions.journal.MAX_PENDING", 10)
    told = []
    journal = Journal(str(tmp_path / "none" / "s.sqlite"), flush_s=0.0, post=lambda call: call())
    journal.start()
    for n in range(50):
        journal.write(n, "INSERT INTO sessions VALUES (?, 'a', 1)", (key(n),), told.append)
    until = time.monotonic() + 10
    while journal.dropped < 40 and time.monotonic() < until:
        time.sleep(0.01)
    assert journal.dropped == 40 and journal.pending == 10 and told == [None] * 40
    assert not journal.stop(10), "it says that something was lost"


def test_a_value_that_no_database_takes_is_given_up_alone(table):
    """(case 23) A lone surrogate, a number beyond 64 bits: the others reach the disk, and the thread lives on."""
    made = table()
    told = []
    insert = "INSERT INTO sessions VALUES (?, ?, ?)"
    for n, (target, used) in enumerate([("a", 1), ("\ud800", 1), ("b", 2**70), ("c", 1)]):
        made.journal.write(n, insert, (key(n), target, used), lambda rows, n=n: told.append((n, rows)))
    assert made.wait(lambda: len(told) == 4) and sorted(told, key=str) == [(0, 1), (1, None), (2, None), (3, 1)]
    made.journal.read("SELECT ?", ("\ud800",), told.append)
    assert made.wait(lambda: len(told) == 5) and told[4] is None
    assert made.find(key(3)) == "c" and made.find(key(1)) is None
    assert made.journal.status()["errors"] == {"refused": 3} and made.journal.state == "ok"


def test_the_schema_is_what_the_check_expects(tmp_path):
    database = Database(str(tmp_path / "s.sqlite"))
    assert database.open() == ""
    for name, columns in COLUMNS.items():
        assert [row[1] for row in database.rows(f"PRAGMA table_info({name})", ())] == columns
    assert database.rows("PRAGMA journal_mode", ()) == [("wal",)]
    assert os.stat(tmp_path / "s.sqlite").st_mode & 0o077 == 0, "conversations are nobody else's"
    database.close()
    assert database.open() == "" and database.is_open
    database.close()
