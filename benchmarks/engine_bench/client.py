"""The load on an OpenAI-style server: streamed completions from token ids, timed chunk by chunk. The same for every server.

Prompts are token ids, each prompt unlike all others, so neither tokenising nor a prefix cache plays a part; `ignore_eos` makes
every answer as long as asked for.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
from dataclasses import dataclass

TIMEOUT_S = 120.0
FIRST_ID, LAST_ID = 200, 40_000  # ordinary words of SmolLM2's vocabulary, behind its special tokens
_seeds = itertools.count(1)


@dataclass
class Stream:
    """One answer: when it was asked for, and when its first and last text came (perf_counter)."""

    asked: float
    first: float
    last: float
    tokens: int


def prompt(count: int) -> list[int]:
    chance = random.Random(next(_seeds))
    return [chance.randrange(FIRST_ID, LAST_ID) for _ in range(count)]


def complete(port: int, model: str, prompt_tokens: int, tokens: int) -> Stream:
    """One streamed answer of `tokens` tokens. Raises RuntimeError for any status but 200 and for a stream without text."""
    body = {
        "model": model, "prompt": prompt(prompt_tokens), "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "cache_prompt": False,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        asked = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read()[:300]!r}")
        first = last = 0.0
        for line in response:
            if line.startswith(b"data: {"):
                last = time.perf_counter()
                first = first or last
        if not first:
            raise RuntimeError("a stream without text")
        return Stream(asked, first, last, tokens)
    finally:
        connection.close()


def decode_rate(port: int, model: str, sequences: int, tokens: int, prompt_tokens: int = 32) -> float:
    """Tokens/s of all sequences together, while all of them decode: from the last one's first token to the first one's end.

    A stream's tokens are taken as evenly spread between its first and last text.
    """
    streams = together([(port, model, prompt_tokens, tokens)] * sequences)
    return shared_rate(streams)


def shared_rate(streams: list[Stream]) -> float:
    begin, end = max(stream.first for stream in streams), min(stream.last for stream in streams)
    if end <= begin:
        raise RuntimeError("the streams did not run side by side: ask for more tokens")
    return sum((stream.tokens - 1) / (stream.last - stream.first) for stream in streams)


def together(calls: list[tuple[int, str, int, int]]) -> list[Stream]:
    """All at the same time, one thread each."""
    streams: list[Stream] = []
    failures: list[Exception] = []

    def one(call: tuple[int, str, int, int]) -> None:
        try:
            streams.append(complete(*call))
        except Exception as error:  # told to the caller below
            failures.append(error)

    threads = [threading.Thread(target=one, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return streams


def first_token_s(port: int, model: str, prompt_tokens: int) -> float:
    """Seconds from the request to the first text."""
    stream = complete(port, model, prompt_tokens, 2)
    return stream.first - stream.asked
