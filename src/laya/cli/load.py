"""The load of `laya bench`: so many connections, each asking again as soon as it was answered.

In: the running server and what is wanted. Out: a dict of counts, rates and quantiles. Threads block on sockets; whatever is
still under way when time is over is cut off and not counted.
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

from laya.cli.running import Running

# A word a token, near enough for most tokenizers; the first of a prompt is its number, so that no prefix is shared.
WORDS = ("river", "stone", "light", "table", "green", "paper", "night", "music", "train", "window", "garden", "winter", "bread")
ANSWER_S = 300.0  # a server may compute for so long before its answer counts as lost
GRACE_S = 5.0  # after the end, for threads to notice


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None
    concurrency: int
    duration_s: float
    requests: int | None
    prompt_words: int
    max_tokens: int
    stream: bool


class Load:
    """`run` once. Counts are guarded by one lock; times are in seconds until they are reported."""

    def __init__(self, running: Running, wanted: Wanted) -> None:
        self._running = running
        self._wanted = wanted
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._whole: list[float] = []
        self._first: list[float] = []
        self._between: list[float] = []
        self._tokens = [0, 0]
        self._unmeasured = 0
        self._ends = 0.0
        self._over = threading.Event()
        self._sockets: set[socket.socket] = set()

    def run(self) -> dict[str, Any]:
        began = time.perf_counter()
        self._ends = began + self._wanted.duration_s
        threads = [threading.Thread(target=self._client, daemon=True) for _ in range(self._wanted.concurrency)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._ends - time.perf_counter()))
        seconds = time.perf_counter() - began
        self._over.set()
        found = self._found(seconds)
        self._cut_off()
        until = time.perf_counter() + GRACE_S
        for thread in threads:
            thread.join(max(0.0, until - time.perf_counter()))
        return found

    def _cut_off(self) -> None:
        with self._lock:
            for sock in self._sockets:
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
            try:
                self._ask(connection, number)
            except (OSError, http.client.HTTPException, ValueError) as exc:
                self._fail(type(exc).__name__)
                connection.close()
                self._over.wait(0.1)  # a server that is gone is not asked a thousand times a second
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, number: int) -> None:
        began = time.perf_counter()
        if connection.sock is None:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets.add(connection.sock)
        headers = {"content-type": "application/json", **self._running.headers()}
        connection.request("POST", "/v1/chat/completions", json.dumps(self._body(number)), headers)
        response = connection.getresponse()
        if response.status != 200:
            response.read()
            self._fail(f"status {response.status}")
            self._over.wait(min(1.0, _retry_after(response)))
        elif self._wanted.stream:
            self._read_stream(response, began)
        else:
            usage = json.loads(response.read()).get("usage")
            self._count(began, usage, [])

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
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                ended = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                response.read()
                self._fail("error in the stream")
                return
            usage = event.get("usage") or usage
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
                times.append(time.perf_counter())
        if ended:
            self._count(began, usage, times)
        else:
            self._fail("stream without an end")

    def _count(self, began: float, usage: dict[str, int] | None, times: list[float]) -> None:
        now = time.perf_counter()
        with self._lock:
            if self._over.is_set():
                return
            self._whole.append(now - began)
            if times:
                self._first.append(times[0] - began)
                self._between += [b - a for a, b in itertools.pairwise(times)]
            if usage:
                self._tokens[0] += usage.get("prompt_tokens", 0)
                self._tokens[1] += usage.get("completion_tokens", 0)
            else:
                self._unmeasured += 1

    def _fail(self, kind: str) -> None:
        with self._lock:
            if not self._over.is_set():
                self._errors[kind] += 1

    def _found(self, seconds: float) -> dict[str, Any]:
        with self._lock:
            times = {"whole answer": self._whole, "first token": self._first, "between tokens": self._between}
            return {
                "ok": len(self._whole), "errors": dict(self._errors), "seconds": seconds, "unmeasured": self._unmeasured,
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


def _retry_after(response: http.client.HTTPResponse) -> float:
    text = response.getheader("retry-after") or ""
    return float(text) if text.isdigit() else 0.1
