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


def speeds(rounds: int) -> dict[str, dict[str, float]]:
    """{text: {size: MB/s, ..., "ahocorasick": MB/s, "found": values in 100 KB}}; medians over `rounds`."""
    redactor = Redactor(RedactConfig(enabled=True))
    result = {}
    for name, make in (("prose", prose), ("digits", dense)):
        found: dict[str, float] = {}
        for label, size in SIZES.items():
            body = chat(make(size), "m")
            found[label] = len(body) / _seconds(lambda body=body: redactor.redact(body, "chat"), rounds) / 1e6
        text = chat(make(SIZES["1MB"]), "m").decode()
        found["ahocorasick"] = len(text) / _seconds(lambda text=text: _search(text), rounds) / 1e6
        found["found"] = float(sum(redactor.redact(chat(make(SIZES["100KB"]), "m"), "chat").counts.values()))
        result[name] = found
    return result


def _seconds(work: Callable[[], object], rounds: int) -> float:
    work()
    spent = []
    for _ in range(rounds):
        began = perf_counter()
        work()
        spent.append(perf_counter() - began)
    return median(spent)


def _automaton() -> ahocorasick.Automaton:
    automaton = ahocorasick.Automaton()
    for mark in MARKS:
        automaton.add_word(mark, 1)
    automaton.make_automaton()
    return automaton


_MARKED = _automaton()


def _search(text: str) -> int:
    return sum(1 for _ in _MARKED.iter(text))
