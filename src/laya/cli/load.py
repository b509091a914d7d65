"""The load of `laya bench`: so many connections, each asking again as soon as it was answered.

In: the running server and what is wanted. Out: a dict of counts, rates and quantiles. Threads block on sockets; whatever is
still under way when time is over, or at Ctrl-C, is cut off and not counted.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import socket
import threading
import time
from collections import Counter
from typing import Any

import msgspec

from laya.cli.running import Running, reason_of

# A word a token, near enough for most tokenizers; the first of a prompt is its number, so that no prefix is shared.
WORDS = ("river", "stone", "light", "table", "green", "paper", "night", "music", "train", "window", "garden", "winter", "bread")
ANSWER_S = 300.0  # a server may compute for so long before its answer counts as lost
GRACE_S = 5.0  # after the end, for threads to notice
MAX_REASON = 64 * 1024  # bytes of an error that are read for its words
PAUSE_S = 0.1  # after a failure: a server that is gone is not asked a thousand times a second


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None
    concurrency: int
    duration_s: float
    requests: int | None
    prompt_words: int
    max_tokens: int
    stream: bool


class Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    delta: Delta | None = None


class Told(msgspec.Struct):
    """What is read of an answer, whole or one event of it; servers put null where they have nothing to say."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class Load:
    """`run` once. Counts are guarded by one lock; times are in seconds until they are reported."""

    def __init__(self, running: Running, wanted: Wanted) -> None:
        self._running = running
        self._wanted = wanted
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}  # of the first of each kind, in the server's words
        self._whole: list[float] = []
        self._first: list[float] = []
        self._between: list[float] = []
        self._tokens = [0, 0]
        self._unmeasured = 0
        self._under_way = 0
        self._ends = 0.0
        self._over = threading.Event()
        self._sockets: dict[int, socket.socket] = {}  # of each thread the last one: a response may hold it on its own

    def run(self) -> dict[str, Any]:
        began = time.perf_counter()
        self._ends = began + self._wanted.duration_s
        threads = [threading.Thread(target=self._client, daemon=True) for _ in range(self._wanted.concurrency)]
        interrupted = False
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, self._ends - time.perf_counter()))
        except KeyboardInterrupt:
            interrupted = True
        seconds = time.perf_counter() - began
        self._over.set()
        found = {**self._found(seconds), "interrupted": interrupted}
        self._cut_off()
        until = time.perf_counter() + GRACE_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.perf_counter()))
        return found

    def _cut_off(self) -> None:
        with self._lock:
            for sock in self._sockets.values():
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it has just ended by itself

    def _client(self) -> None:
        connection = self._running.connection(ANSWER_S)
        while not self._over.is_set():
            number = next(self._numbers)
            if self._wanted.requests is not None and number >= self._wanted.requests:
                break
            self._count_under_way(1)
            try:
                self._ask(connection, number)
            except (OSError, http.client.HTTPException, msgspec.MsgspecError, UnicodeError) as exc:
                self._fail(_kind(exc))
                connection.close()
                self._over.wait(PAUSE_S)
            finally:
                self._count_under_way(-1)
        connection.close()

    def _count_under_way(self, more: int) -> None:
        with self._lock:
            self._under_way += more

    def _ask(self, connection: http.client.HTTPConnection, number: int) -> None:
        began = time.perf_counter()
        if connection.sock is None:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets[threading.get_ident()] = connection.sock
        headers = {"content-type": "application/json", **self._running.headers()}
        connection.request("POST", "/v1/chat/completions", json.dumps(self._body(number)), headers)
        response = connection.getresponse()
        if response.status != 200:
            self._fail(f"status {response.status}", reason_of(response.read(MAX_REASON)))
            response.read()
            self._over.wait(min(1.0, _retry_after(response)))
        elif not self._wanted.stream:
            told = msgspec.json.decode(response.read(), type=Told)
            if told.choices is None:
                raise msgspec.ValidationError("no choices")
            self._count(began, told.usage, [])
        elif response.getheader("content-type", "").startswith("text/event-stream"):
            self._read_stream(response, began)
        else:
            response.read()
            self._fail("answer without a stream")
            self._over.wait(PAUSE_S)

    def _body(self, number: int) -> dict[str, Any]:
        words = random.Random(number).choices(WORDS, k=self._wanted.prompt_words - 1)
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": " ".join([str(number), *words])}], "max_tokens": self._wanted.max_tokens,
        }  # fmt: skip
        if self._wanted.model is not None:
            body["model"] = self._wanted.model
        if self._wanted.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def _read_stream(self, response: http.client.HTTPResponse, began: float) -> None:
        usage, times, ended = None, [], False
        while line := response.readline():
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if not data or ended:
                continue
            if data == b"[DONE]":
                ended = True
                continue
            event = msgspec.json.decode(data, type=Told)
            if event.error is not None:  # nothing good comes after it, and a server may cut the connection there
                raise http.client.HTTPException("error in the stream")
            usage = event.usage or usage
            if any(choice.delta is not None and choice.delta.content for choice in event.choices or ()):
                times.append(time.perf_counter())
        response.read()  # so that the connection knows that this one is over
        if ended:
            self._count(began, usage, times)
        else:
            self._fail("stream without an end")

    def _count(self, began: float, usage: Usage | None, times: list[float]) -> None:
        now = time.perf_counter()
        with self._lock:
            if self._over.is_set():
                return
            self._whole.append(now - began)
            if times:
                self._first.append(times[0] - began)
                self._between += [b - a for a, b in itertools.pairwise(times)]
            if usage:
                self._tokens[0] += usage.prompt_tokens or 0
                self._tokens[1] += usage.completion_tokens or 0
            else:
                self._unmeasured += 1

    def _fail(self, kind: str, reason: str = "") -> None:
        with self._lock:
            if not self._over.is_set():
                self._errors[kind] += 1
                self._reasons.setdefault(kind, reason)

    def _found(self, seconds: float) -> dict[str, Any]:
        with self._lock:
            times = {"whole answer": self._whole, "first token": self._first, "between tokens": self._between}
            return {
                "ok": len(self._whole), "errors": dict(self._errors), "reasons": dict(self._reasons),
                "seconds": seconds, "unmeasured": self._unmeasured, "cut_off": self._under_way,
                "requests_s": len(self._whole) / seconds,
                "prompt_tokens": self._tokens[0], "prompt_s": self._tokens[0] / seconds,
                "generated_tokens": self._tokens[1], "generated_s": self._tokens[1] / seconds,
                "latency_ms": {name: quantiles(values) for name, values in times.items() if values},
            }  # fmt: skip


def quantiles(seconds: list[float]) -> dict[str, float]:
    """p50, p95 and p99 in milliseconds: each a value that was measured."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {name: ordered[round(share * last)] * 1000 for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}


def _kind(exc: Exception) -> str:
    """A failure in a few words; a plain OSError (no descriptor left, no route) says nothing by its name."""
    if isinstance(exc, msgspec.MsgspecError | UnicodeError):
        return "answer that is no chat completion"
    if type(exc) is http.client.HTTPException:
        return str(exc)
    return exc.strerror or "OSError" if type(exc) is OSError else type(exc).__name__


def _retry_after(response: http.client.HTTPResponse) -> float:
    text = response.getheader("retry-after") or ""
    return float(text) if text.isascii() and text.isdigit() else PAUSE_S
