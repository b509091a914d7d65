"""Structured log lines on stderr, written by a thread of their own so that a slow terminal or disk stops nobody.

In: any thread appends an event. Out: one JSON object a line. Prompts, answers, keys and query strings are never given to it.
The queue is bounded; what does not fit is counted, not waited for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import deque
from functools import lru_cache

from laya.schema.codec import encode_json

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
# Lines joined to one piece for the writer, some 64 KiB: joined where the last of them arises, for ten microseconds once in a
# while. A writer that joined them would wake up to thousands, and hold the interpreter against the loop for as many.
BATCH = 256
# Pieces that may wait: a second of a busy router, some 20 MiB at most.
MAX_PIECES = 256
# Pieces of one write.
PIECES_A_WRITE = 16
# How long a line may wait: short enough to follow by eye, long enough to write many at once.
FLUSH_S = 0.2
# How long the end of the process waits for the reader of its last lines.
STOP_S = 5.0


class LogState:
    """What each request asks for, in slots for the lane. `lines`: fewer than BATCH, or a moment more."""

    __slots__ = ("info_on", "lines")


class Log(LogState):
    """A line is made where it arises: a thread that made them later would hold the interpreter for milliseconds, and the loop
    would wait for it. The writer thread only writes."""

    def __init__(self, level: str = "info", fd: int = 2) -> None:
        self.threshold = LEVELS[level]
        self.info_on = self.threshold <= 20
        self.dropped = 0
        self._fd = fd
        self.lines: deque[bytes] = deque()
        self._pieces: deque[bytes] = deque()
        self._order = threading.Lock()  # lines become pieces in the order they came, whoever joins them
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="laya-log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """What is there is written, and the thread ends; a reader that stands still keeps no process from its end."""
        self._stop.set()
        if self._thread is None:
            self._flush()
        else:
            self._thread.join(STOP_S)

    def event(self, level: str, name: str, **fields) -> None:
        if LEVELS[level] >= self.threshold:
            line = {"time": _stamp(int(time.time() * 1000)).decode(), "level": level, "event": name, **fields}
            try:
                self.line(encode_json(line) + b"\n")
            except (ValueError, TypeError):  # a value that no JSON can hold: the line is lost, the log goes on
                self.dropped += 1

    def line(self, line: bytes) -> None:
        """One that is ready made, with its end. The lane in C does the same."""
        self.lines.append(line)
        if len(self.lines) >= BATCH:
            self.join()

    def join(self) -> None:
        """A piece of the lines that are there. A finalizer may log in the midst of it, in its thread: who joins lines already
        takes the next ones in a moment."""
        if self._order.acquire(blocking=False):
            try:
                self._join()
            finally:
                self._order.release()

    def _join(self) -> None:
        """Lines that are there become a piece; `_order` is held. Their number is all that is lost where there is no room."""
        lines = [self.lines.popleft() for _ in range(min(len(self.lines), BATCH))]
        if len(self._pieces) >= MAX_PIECES:
            self.dropped += len(lines)
        elif lines:
            self._pieces.append(b"".join(lines))

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._order:
            for _ in range(0, len(self.lines), BATCH):
                self._join()
        pieces = self._pieces
        while pieces:
            out = [pieces.popleft() for _ in range(min(len(pieces), PIECES_A_WRITE))]
            try:
                self._write(out)
            except OSError:
                self.dropped += sum(piece.count(b"\n") for piece in out)

    def _write(self, pieces: list[bytes]) -> None:
        """All of it: a pipe takes a part at a time."""
        while pieces:
            sent = os.writev(self._fd, pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = pieces[0][sent:]


class _Forward(logging.Handler):
    """The standard library's records of our own rooms, as events. Of an exception only its kind and place are told."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level = next((name for name, number in reversed(LEVELS.items()) if record.levelno >= number), "debug")
        fields = {"logger": record.name, "text": record.getMessage()}
        if record.exc_info and record.exc_info[0] is not None:
            places = traceback.extract_tb(record.exc_info[2])[-4:]
            fields["kind"] = record.exc_info[0].__name__
            fields["where"] = [f"{os.path.basename(place.filename)}:{place.lineno}" for place in places]
        self._log.event(level, "log", **fields)


def forward_logging(log: Log) -> None:
    """Send what our modules log through `logging` to `log`, and nowhere else."""
    ours = logging.getLogger("laya")
    ours.handlers[:] = [_Forward(log)]
    ours.propagate = False
    ours.setLevel(log.threshold)


# Ids are of plain characters (the gateway keeps no others), outcomes a handful of words.
_ACCESS = b'{"time":"%b","level":"info","event":"request","id":"%b",%b,"status":%d,"outcome":"%b","seconds":%.6f%b}\n'


def access_line(
    request_id: bytes, who: bytes, status: int, outcome: str, seconds: float, tokens: tuple[int, int] | None, note: bytes
) -> bytes:
    """The line of a finished request; `who` is made by the function of that name, `note` members ready made."""
    counts = b',"prompt_tokens":%d,"completion_tokens":%d' % tokens if tokens else b""
    stamp = _stamp(int(time.time() * 1000))
    return _ACCESS % (stamp, request_id, who, status, outcome.encode(), seconds, counts + note)


@lru_cache(4)  # many requests end in the same millisecond
def _stamp(ms: int) -> bytes:
    return b"%b.%03dZ" % (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(ms // 1000)).encode(), ms % 1000)


@lru_cache(1024)  # the same few in every line
def who(client: str, method: bytes, path: bytes, api: str, route: str, backend: str, model: str) -> bytes:
    """The members that say whose request it was and where it went, as they stand between their neighbours."""
    members = {
        "client": client, "method": method.decode("latin-1"), "path": path.decode("latin-1"), "api": api, "route": route,
        "backend": backend, "model": model.encode("utf-8", "replace").decode(),
    }  # fmt: skip
    return encode_json(members)[1:-1]
