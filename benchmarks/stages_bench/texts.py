"""The prompts: prose with few values in it, and text that is dense with digits. The same in every run."""

from __future__ import annotations

import json
import random

WORDS = (
    "the report that we sent last week names three places where the pipe was found to leak and says which of them were mended "
    "since then please read it again and tell me in a few plain words what is left to do before the house can be lived in"
).split()
SEED = 8


def prose(size: int) -> str:
    """English sentences, and a value to redact about every 4 KB: an address, a telephone number, a card."""
    rng = random.Random(SEED)
    values = ("write to anna@example.com", "call +1 202-555-0143", "the card 4111 1111 1111 1111", "or ring 13800138000")
    parts, length, due = [], 0, 2048
    while length < size:
        sentence = " ".join(rng.choices(WORDS, k=rng.randint(6, 18))).capitalize() + ". "
        if length > due:
            due += 4096
            sentence += rng.choice(values) + ". "
        parts.append(sentence)
        length += len(sentence)
    return "".join(parts)[:size]


def dense(size: int) -> str:
    """A log: times, identifiers, sizes and hashes, some two fifths of it digits, hardly a value to redact."""
    rng = random.Random(SEED)
    parts, length = [], 0
    while length < size:
        line = (
            f"2026-11-{rng.randint(1, 30):02d}T{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}:"
            f"{rng.random() * 60:06.3f}Z id={rng.randint(0, 10**9)} size={rng.randint(0, 10**6)} "
            f"{rng.getrandbits(64):016x} took {rng.random() * 1000:.2f}\n"
        )
        parts.append(line)
        length += len(line)
    return "".join(parts)[:size]


def chat(text: str, model: str, **members) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": text}], **members}).encode()
