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

from laya.schema.codec import encode_json

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
# Lines that may wait: two seconds of a busy router, some 20 MiB at most.
MAX_LINES = 65536
# How long a line may wait: short enough to follow by eye, long enough to write many at once.
FLUSH_S = 0.2


class Log:
    """`event` costs the caller an append; formatting happens in the writer thread."""

    def __init__(self, level: str = "info", fd: int = 2) -> None:
        self.threshold = LEVELS[level]
        self.info_on = self.threshold <= 20
        self.dropped = 0
        self._fd = fd
        self._lines: deque[tuple] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="laya-log", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write what is there and end the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)
        self._flush()

    def event(self, level: str, name: str, **fields) -> None:
        if LEVELS[level] >= self.threshold:
            self._append((time.time(), level, name, fields))

    def access(self, record: tuple) -> None:
        """A finished request: `ACCESS_FIELDS` in order. The caller checks `info_on`."""
        self._append((time.time(), None, record, None))

    def _append(self, line: tuple) -> None:
        if len(self._lines) < MAX_LINES:
            self._lines.append(line)
        else:
            self.dropped += 1

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self._flush()

    def _flush(self) -> None:
        lines, out = self._lines, []
        while lines:
            out.append(_format(lines.popleft()))
            if len(out) == 512 or not lines:  # let the loop thread have the interpreter between batches
                try:
                    os.write(self._fd, b"".join(out))
                except OSError:
                    self.dropped += len(out)
                out.clear()


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


ACCESS_FIELDS = (
    "id", "client", "method", "path", "api", "route", "backend", "model", "status", "outcome", "seconds", "tokens",
)  # fmt: skip


def _format(line: tuple) -> bytes:
    at, level, name, fields = line
    if level is None:
        values = dict(zip(ACCESS_FIELDS, name, strict=True))
        tokens = values.pop("tokens")
        values["seconds"] = round(values["seconds"], 6)
        if tokens:
            values["prompt_tokens"], values["completion_tokens"] = tokens
        for key in ("id", "method", "path"):
            values[key] = values[key].decode("latin-1")
        level, name, fields = "info", "request", {k: v for k, v in values.items() if v != ""}
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03d}Z"
    return encode_json({"time": stamp, "level": level, "event": name, **fields}) + b"\n"
