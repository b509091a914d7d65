"""Clients of every temper for the soak: short, long, streaming, slow, aborting, malformed, oversized.

In: a port and a random seed. Out: `Tally`: what came back, by kind and status, and everything that should not have. One
asyncio loop. Each client opens a connection of its own and checks its answer before it is counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

# Greedy answers to these must be the same for as long as the server lives.
QUESTIONS = (
    "What is the capital of France? Answer briefly.", "Name three colours.", "What is 2 plus 2?", "Write one word on the sea.",
)  # fmt: skip
LONGEST_S = 240.0  # far beyond any queue time-out: only a hang reaches it
_WORDS = ("river", "stone", "light", "paper", "winter", "engine", "garden", "copper", "window", "letter")
_MALFORMED = (
    b"GET\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)  # fmt: skip
_BAD_BODIES = (
    b"{", b"[]", b"null", b'{"messages": 5}', b'{"model": "smol", "messages": []}', b"\xff\xfe{", b"[" * 20000,
    b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "smol", "messages": [{"role": "user", "content": "\\ud83d"}]}',
    b'{"model": "smol", "messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
)  # fmt: skip


class Tally:
    """`wrong` holds what must not happen, at most a hundred of it."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()
        self.answers: dict[str, Counter[str]] = {}
        self.latencies: list[tuple[float, float]] = []  # (when, seconds) of a short request
        self.wrong: list[str] = []

    def complain(self, text: str) -> None:
        if len(self.wrong) < 100:
            self.wrong.append(text)

    def status(self, kind: str, status: int, headers: str) -> None:
        """429 and 503 are intended when they say when to come back; any other 5xx is a fault."""
        self.counts[kind, status] += 1
        if status >= 500 and status != 503:
            self.complain(f"{kind}: {status}")
        if status in (429, 503) and "retry-after:" not in headers.lower():
            self.complain(f"{kind}: {status} without Retry-After")


class Clients:
    def __init__(self, port: int, tally: Tally, seed: int) -> None:
        self.port, self.tally, self.random = port, tally, random.Random(seed)
        self.refused = False
        self.kinds = {
            "short": 6, "long": 2, "stream": 4, "slow": 1, "abort": 3, "malformed": 2, "bad": 2, "oversized": 1, "several": 1,
        }  # fmt: skip

    async def run(self, until: float) -> None:
        """One client after another until the time is up."""
        kinds, weights = list(self.kinds), list(self.kinds.values())
        while time.monotonic() < until:
            if self.refused:  # a client that is told to come back later does so, only sooner than it was told
                self.refused = False
                await asyncio.sleep(self.random.uniform(0.1, 1.0))
            (kind,) = self.random.choices(kinds, weights)
            try:
                async with asyncio.timeout(LONGEST_S):
                    await getattr(self, kind)()
            except TimeoutError:
                self.tally.complain(f"{kind}: no answer within {LONGEST_S:.0f} s")
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                self.tally.counts[kind, 0] += 1
                if kind not in ("malformed", "abort"):
                    self.tally.complain(f"{kind}: {type(error).__name__}")

    # -- the tempers ---------------------------------------------------------------------------------------------------

    async def short(self) -> None:
        question = self.random.choice(QUESTIONS)
        began = time.monotonic()
        status, body = await self._ask("short", self._chat(question, max_tokens=12))
        if status == 200:
            self.tally.latencies.append((began, time.monotonic() - began))
            self._same(question, json.loads(body)["choices"][0]["message"]["content"])

    async def long(self) -> None:
        status, body = await self._ask("long", self._chat(self._text(400), max_tokens=16, temperature=0.8))
        if status == 200 and json.loads(body)["usage"]["prompt_tokens"] < 400:
            self.tally.complain("long: the prompt was cut")

    async def several(self) -> None:
        status, body = await self._ask("several", self._chat("Say a word.", max_tokens=8, n=3, temperature=1.0))
        if status == 200 and len(json.loads(body)["choices"]) != 3:
            self.tally.complain("several: not three choices")

    async def stream(self) -> None:
        question = self.random.choice(QUESTIONS)
        text = await self._stream("stream", self._chat(question, max_tokens=12, stream=True), pause=0.0)
        if text is not None:
            self._same(question, text)

    async def slow(self) -> None:
        await self._stream("slow", self._chat(self._text(30), max_tokens=100, stream=True, ignore_eos=True), pause=0.05)

    async def abort(self) -> None:
        """Leave at a random moment: while queued, prefilled or answered."""
        reader, writer = await self._send(self._chat(self._text(200), max_tokens=200, stream=True, ignore_eos=True))
        try:
            await asyncio.wait_for(reader.read(1 << 16), self.random.random() * 2)
        except TimeoutError:
            pass
        self.tally.counts["abort", 1] += 1
        writer.transport.abort()

    async def malformed(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.random.choice(_MALFORMED))
        try:
            head = (await reader.read(1 << 16)).decode("latin-1")
            self.tally.status("malformed", int(head.split(" ")[1]) if " " in head else 0, head)
            if head.startswith("HTTP/1.1 2"):
                self.tally.complain("malformed: it was served")
        finally:
            writer.close()

    async def bad(self) -> None:
        status, _ = await self._ask("bad", self.random.choice(_BAD_BODIES))
        if status < 400:
            self.tally.complain("bad: it was served")

    async def oversized(self) -> None:
        status, body = await self._ask("oversized", self._chat(self._text(3000)))
        if status == 400 and b"context_length_exceeded" not in body:
            self.tally.complain("oversized: another 400")
        elif status == 200:
            self.tally.complain("oversized: it was served")

    # -- one request ---------------------------------------------------------------------------------------------------

    def _text(self, words: int) -> str:
        return " ".join(self.random.choice(_WORDS) for _ in range(words))

    def _chat(self, text: str, **members) -> bytes:
        body = {"model": "smol", "temperature": 0, "messages": [{"role": "user", "content": text}], **members}
        return json.dumps(body).encode()

    def _same(self, question: str, answer: str) -> None:
        self.tally.answers.setdefault(question, Counter())[answer] += 1

    async def _send(self, body: bytes):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        return reader, writer

    async def _ask(self, kind: str, body: bytes) -> tuple[int, bytes]:
        """(status, body) of a plain request; the server closes, so the end of the stream is the end of the answer."""
        reader, writer = await self._send(body)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            answer = await reader.read(-1)
        finally:
            writer.close()
        status = int(head.split(" ")[1])
        self.tally.status(kind, status, head)
        self.refused = status in (429, 503)
        return status, answer

    async def _stream(self, kind: str, body: bytes, pause: float) -> str | None:
        """The text of a whole stream; None where it was refused or ended by an error event that is intended."""
        reader, writer = await self._send(body)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status = int(head.split(" ")[1])
            self.tally.status(kind, status, head)
            self.refused = status in (429, 503)
            text, done, failed = [], False, False
            while line := await reader.readline():
                if pause and line.startswith(b"data:"):
                    await asyncio.sleep(pause)
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    failed = failed or "error" in event
                    text += [choice["delta"].get("content") or "" for choice in event.get("choices", ())]
        finally:
            writer.close()
        if status != 200:
            return None
        if failed:
            self.tally.counts[f"{kind} ended by an error", 200] += 1
            return None
        if not done:
            self.tally.complain(f"{kind}: the stream ended without [DONE] and without an error")
        return "".join(text)
