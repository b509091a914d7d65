"""How much the detectors find, and how much of what they find is right, on the labelled lines of `corpus/`.

A line marks each value as `⟦kind|value⟧`; a value counts as found only when kind, beginning and end agree. The figures are
printed: `pytest -s tests/stages/test_redact_corpus.py`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from laya.stages.detect.scan import Scanner
from redaction import chat, redact, restorer

KINDS = ("phone", "id", "card", "email", "secret")
MARK = re.compile(r"⟦(\w+)\|(.*?)⟧")
LINES = [
    (path.stem, line)
    for path in sorted((Path(__file__).parent / "corpus").glob("*.txt"))
    for line in path.read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("# Marked")
]


def unmarked(line: str) -> tuple[str, set[tuple[int, int, str]]]:
    """The line itself, and its values as spans of its UTF-8."""
    text, spans, at = "", set(), 0
    for mark in MARK.finditer(line):
        text += line[at : mark.start()]
        start = len(text.encode())
        text += mark[2]
        spans.add((start, len(text.encode()), mark[1]))
        at = mark.end()
    return text + line[at:], spans


def test_recall_and_precision_of_each_kind_on_the_labelled_corpus():
    """(cases 57 and 58)"""
    assert len(LINES) >= 400
    scanner = Scanner(KINDS, {})
    right, missed, wrong = Counter(), Counter(), Counter()
    notes = []
    for name, line in LINES:
        text, wanted = unmarked(line)
        found = set(scanner.scan(text.encode()))
        right.update(kind for _, _, kind in found & wanted)
        missed.update(kind for _, _, kind in wanted - found)
        wrong.update(kind for _, _, kind in found - wanted)
        if found != wanted:
            notes.append(f"{name}: {text}\n  missed {sorted(wanted - found)}, wrong {sorted(found - wanted)}")
    print()
    for kind in KINDS:
        recall = right[kind] / (right[kind] + missed[kind])
        precision = right[kind] / (right[kind] + wrong[kind])
        print(f"{kind:7} {right[kind] + missed[kind]:4} values: recall {recall:.4f}, precision {precision:.4f}")
        assert right[kind] + missed[kind] >= 40, kind
        assert recall >= 0.99 and precision >= 0.98, "\n".join(notes)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_whole_corpus_comes_back_as_it_was(ascii_only):
    texts = [unmarked(line)[0] for _, line in LINES]
    body = chat(*texts)
    if ascii_only:
        body = json.dumps(json.loads(body)).encode()
    found = redact(body)
    assert json.loads(restorer(found).whole(found.body)) == json.loads(body)
    left = "\n".join(message["content"] for message in json.loads(found.body)["messages"])
    assert [value for _, line in LINES for _, value in MARK.findall(line) if value in left] == []
