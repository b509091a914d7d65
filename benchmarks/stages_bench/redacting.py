"""Redaction in this process: megabytes a second, beside what pyahocorasick alone does on the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import ahocorasick

from laya.config import RedactConfig
from laya.stages.redact import Redactor
from stages_bench.texts import chat, dense, prose

# What any finder must look at: digits, the sign of an address, the beginnings of secrets.
MARKS = (*"0123456789", "@", "sk-", "ghp_", "AKIA", "xoxb-", "AIza", "hf_", "eyJ", "Bearer ", "-----BEGIN", "password", "token")
SIZES = {"100KB": 100_000, "1MB": 1_000_000}
BLOCK = 5


def speeds(rounds: int) -> dict[str, dict[str, float]]:
    """{text: {size: MB/s, ..., "ahocorasick": MB/s, "found": values in 100 KB}}; medians over `rounds`."""
    redactor = Redactor(RedactConfig(enabled=True))
    result = {}
    for name, make in (("prose", prose), ("digits", dense)):
        bodies = {label: chat(make(size), "m") for label, size in SIZES.items()}
        works: dict[str, Callable[[], object]] = {
            label: lambda body=body: redactor.redact(body, "chat") for label, body in bodies.items()
        }
        text = bodies["1MB"].decode()
        works["ahocorasick"] = lambda text=text: _search(text)
        sizes = {**{label: len(body) for label, body in bodies.items()}, "ahocorasick": len(text)}
        found = {label: sizes[label] / seconds / 1e6 for label, seconds in _medians(works, rounds).items()}
        found["found"] = float(sum(redactor.redact(bodies["100KB"], "chat").counts.values()))
        result[name] = found
    return result


def _medians(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of each work, a block of each in turn, so that the machine's moods fall on all alike."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(max(1, rounds // BLOCK)):
        for name, work in works.items():
            work()  # what the one before took from the processor's caches
            for _ in range(BLOCK):
                began = perf_counter()
                work()
                spent[name].append(perf_counter() - began)
    return {name: median(found) for name, found in spent.items()}


def _automaton() -> ahocorasick.Automaton:
    automaton = ahocorasick.Automaton()
    for mark in MARKS:
        automaton.add_word(mark, 1)
    automaton.make_automaton()
    return automaton


_MARKED = _automaton()


def _search(text: str) -> int:
    return sum(1 for _ in _MARKED.iter(text))
