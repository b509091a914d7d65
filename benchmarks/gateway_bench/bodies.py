"""The chat requests that the loads send: no two alike, lengths spread around the named size.

A gateway that remembered whole messages would gain nothing: there are more different bodies than the memos of any system here
hold, and both text and length change from one request to the next. What stays the same is what a real client keeps: its
header lines (under 16 keys) and the model name.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

MODEL = "gpt-4o-mini"
SMALL_BYTES = 200
LARGE_BYTES = 16 * 1024
# Different bodies of each size: 4096 are 0.8 MB, 1024 large ones 16 MB, which the load generator still holds easily.
COUNTS = {SMALL_BYTES: 4096, LARGE_BYTES: 1024}
SPREAD = 0.25  # lengths are even between 75 % and 125 % of the size
SEED = 20_26  # the same bodies in every run
WORDS = (
    'the capital of France is "Paris" and what else do you know about its river bridges museums history please answer '
    "briefly in a list with one line each for function return value class import\n def if x == 1: print(x)\n"
).split(" ")
TEXT_WORDS = 20_000  # text to cut prompts out of, some 120 KB: prompts overlap, but begin anywhere


@cache
def bodies(size: int) -> list[bytes]:
    """All requests of about `size` bytes, each different from all others."""
    chance = random.Random(SEED + size)
    text = " ".join(chance.choice(WORDS) for _ in range(TEXT_WORDS))
    return [_body(size, number, chance, text) for number in range(COUNTS[size])]


def _body(size: int, number: int, chance: random.Random, text: str) -> bytes:
    wanted = int(size * chance.uniform(1 - SPREAD, 1 + SPREAD))
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{number}: "}],
        "temperature": round(chance.random(), 3),
        "max_tokens": chance.randrange(16, 512),
    }
    missing = wanted - len(_encode(request))
    start = chance.randrange(len(text) - missing)
    request["messages"][0]["content"] += text[start : start + missing]
    return _encode(request)


def _encode(request: dict) -> bytes:
    return json.dumps(request, separators=(",", ":")).encode()


def write(directory: Path, size: int) -> Path:
    """The file that post.lua reads: each body after a line with its length."""
    path = directory / f"bodies-{size}"
    path.write_bytes(b"".join(b"%d\n%b" % (len(data), data) for data in bodies(size)))
    return path


def streamed(frames: int, number: int, dense: bool = False) -> bytes:
    """A request for a stream of `frames` frames, at the stub's pace or (`dense`) as fast as it can."""
    text = f"{'dense' if dense else 'paced'} number {number}"
    return _encode({"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": frames})


def http(data: bytes, port: int, key: int = 0) -> bytes:
    """The whole request as bytes, as the common SDKs send it."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: application/json\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer bench-%d\r\nContent-Length: %d\r\n\r\n%b"
        % (port, key, len(data), data)
    )
