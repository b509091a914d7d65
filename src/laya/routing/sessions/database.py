"""The SQLite file of sessions and stored responses: opening it, its lock file, its schema, and what its errors mean.

In: the table writer's thread, the only one that calls here once it runs. Out: rows, counts, or sqlite3.Error, OSError and
`Unusable`, which `failed` names in one word.

The write-ahead log with `synchronous=NORMAL` keeps every commit through a kill -9 of this process; a power cut may lose the
last ones, which costs a session its affinity and never the file's soundness.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Sequence
from itertools import chain, groupby
from operator import itemgetter

VERSION = 1  # of the schema below, in `user_version`
APPLICATION_ID = 0x4C61_7961  # "Laya"
# How long SQLite waits for a lock: the thread has readers to answer, and comes back by itself.
BUSY_MS = 50
# Rows of sessions kept on disk, and how many are removed at a time beyond it: 100 MB, and a few milliseconds.
MAX_SESSIONS = 1_000_000
TRIM_ROWS = 1000
# Sessions written by one statement, as many as fit of the first, then of the next. SQLite lets go of the interpreter for each
# statement: one at a time, a group took it from the loop some hundred times.
ROWS_AT_ONCE = (64, 8, 1)

SCHEMA = """
CREATE TABLE sessions (key BLOB PRIMARY KEY, target TEXT NOT NULL, used INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX sessions_used ON sessions (used);
CREATE TABLE responses (
  scope TEXT NOT NULL, id TEXT NOT NULL, value BLOB NOT NULL, created REAL NOT NULL, PRIMARY KEY (scope, id));
CREATE INDEX responses_created ON responses (created);
CREATE TABLE totals (sessions INTEGER NOT NULL, response_bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER sessions_in AFTER INSERT ON sessions BEGIN UPDATE totals SET sessions = sessions + 1; END;
CREATE TRIGGER sessions_out AFTER DELETE ON sessions BEGIN UPDATE totals SET sessions = sessions - 1; END;
CREATE TRIGGER responses_in AFTER INSERT ON responses
  BEGIN UPDATE totals SET response_bytes = response_bytes + length(NEW.value); END;
CREATE TRIGGER responses_changed AFTER UPDATE ON responses
  BEGIN UPDATE totals SET response_bytes = response_bytes + length(NEW.value) - length(OLD.value); END;
CREATE TRIGGER responses_out AFTER DELETE ON responses
  BEGIN UPDATE totals SET response_bytes = response_bytes - length(OLD.value); END;
"""
COLUMNS = {
    "sessions": ["key", "target", "used"],
    "responses": ["scope", "id", "value", "created"],
    "totals": ["sessions", "response_bytes"],
}


PUT_SESSION = (
    "INSERT INTO sessions VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET target = excluded.target, used = excluded.used"
)
_PUT_SESSIONS = {rows: PUT_SESSION.replace("(?, ?, ?)", ", ".join(["(?, ?, ?)"] * rows)) for rows in ROWS_AT_ONCE}


class Unusable(Exception):
    """The file must not be used: another process has it, or it is not ours. `args[0]` is the kind."""


class Database:
    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._lock: int | None = None

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def open(self) -> str:
        """Open and check. Returns why an old file was moved aside ("corrupt", "old_schema"), or ""."""
        self._take_lock()
        moved = ""
        try:
            self._connect()
        except (sqlite3.DatabaseError, Unusable) as error:
            kind = self.failed(error)
            if kind not in ("corrupt", "old_schema"):
                raise
            self._move_aside(kind)
            self._connect()
            moved = kind
        return moved

    def rows(self, sql: str, params: Sequence) -> list[tuple]:
        return self._connection.execute(sql, params).fetchall()

    def commit(self, statements: list[tuple[str, Sequence]]) -> list[int]:
        """All statements in one transaction, or none. The number of rows that each changed."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            counts: list[int] = []
            for sql, group in groupby(statements, key=itemgetter(0)):
                found = [params for _, params in group]
                if sql is PUT_SESSION:
                    self._put_sessions(found)
                    counts += [1] * len(found)
                else:
                    counts += [connection.execute(sql, params).rowcount for params in found]
            self._trim()
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return counts

    def failed(self, error: BaseException) -> str:
        """The kind of an error; a damaged file is closed, so that the next `open` puts it aside."""
        kind = kind_of(error)
        if kind in ("corrupt", "old_schema", "io"):
            self._disconnect()
        return kind

    def close(self) -> None:
        self._disconnect()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _take_lock(self) -> None:
        """The lock goes with the process, however it ends. The file stays: removing it would race with another's lock."""
        if self._lock is not None:
            return
        lock = os.open(self._path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise Unusable("second_process") from None
        self._lock = lock

    def _connect(self) -> None:
        self._disconnect()
        if not os.path.exists(self._path):
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))  # conversations are nobody else's
        connection = sqlite3.connect(
            self._path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        self._connection = connection
        fresh = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if not fresh:
            self._check()
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA journal_size_limit=16777216")  # a log that once grew does not keep its size
        if fresh:
            self._create()

    def _check(self) -> None:
        """Ours, sound and of this version. A newer file or another program's is left alone."""
        connection = self._connection
        ours = connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("malformed: the file does not pass its check")
        if not ours:
            raise Unusable("not_ours")
        if version > VERSION:
            raise Unusable("newer_schema")
        for table, columns in COLUMNS.items():
            if [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] != columns:
                raise Unusable("old_schema")

    def _create(self) -> None:
        self._connection.executescript(
            f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={VERSION}; COMMIT;"
        )

    def _put_sessions(self, rows: list[Sequence]) -> None:
        done = 0
        for size in ROWS_AT_ONCE:
            while len(rows) - done >= size:
                values = list(chain.from_iterable(rows[done : done + size]))
                self._connection.execute(_PUT_SESSIONS[size], values)
                done += size

    def _trim(self) -> None:
        """Within the transaction: the least recently used sessions beyond the bound, a few at a time."""
        count = self._connection.execute("SELECT sessions FROM totals").fetchone()[0]
        if count > MAX_SESSIONS:
            self._connection.execute(
                "DELETE FROM sessions WHERE key IN (SELECT key FROM sessions ORDER BY used LIMIT ?)",
                (min(TRIM_ROWS, count - MAX_SESSIONS),),
            )

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except sqlite3.Error:
                pass  # of a damaged file; its descriptors are closed all the same

    def _move_aside(self, kind: str) -> None:
        """Keep the file for whoever wants to look at it, once: the next one replaces it."""
        self._disconnect()
        for suffix in ("", "-wal", "-shm"):
            if os.path.exists(self._path + suffix):
                os.replace(self._path + suffix, f"{self._path}.{kind}{suffix}")


def kind_of(error: BaseException) -> str:
    """One word for the metric and /ready."""
    if isinstance(error, Unusable):
        return str(error.args[0])
    if isinstance(error, OSError):
        return "read_only" if isinstance(error, PermissionError) else "io"
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    kind = _KINDS.get(code)
    if kind is None:
        kind = "corrupt" if "malformed" in str(error) else "error"
    return kind


def is_lasting(error: BaseException) -> bool:
    """The file cannot be used just now, whatever is asked of it; else it is the statement or its values that are at fault."""
    return isinstance(error, sqlite3.Error | OSError | Unusable) and kind_of(error) != "error"


_KINDS = {
    sqlite3.SQLITE_BUSY: "locked",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_CORRUPT: "corrupt",
    sqlite3.SQLITE_NOTADB: "corrupt",
    sqlite3.SQLITE_READONLY: "read_only",
    sqlite3.SQLITE_CANTOPEN: "read_only",
    sqlite3.SQLITE_PERM: "read_only",
    sqlite3.SQLITE_AUTH: "read_only",
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_IOERR: "io",
}
