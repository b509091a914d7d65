"""`benchmarks/stages.py` as a program: its arithmetic, its prompts, and what it times. No speed is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))  # after tests/, which has an `engine` too

import stages  # noqa: E402
from stages_bench import redacting, serving, texts  # noqa: E402


def times(p50: float) -> dict[str, float]:
    return {"p50_us": p50, "p99_us": 2 * p50}


FIGURES = {
    "machine": {"cores": 2},
    "redact": {
        "prose": {"100KB": 90.0, "1MB": 91.0, "ahocorasick": 60.0, "found": 25.0},
        "digits": {"100KB": 19.0, "1MB": 21.0, "ahocorasick": 18.0, "found": 0.0},
    },
    "serving": {"health": times(30), "hit": times(42), "plain_beside_stages": times(101), "plain_without_stages": times(100)},
    "first_token": {
        "prose_plain": times(100_000), "prose_redact": times(101_000), "digits_plain": times(100_000), "digits_redact": times(106_000),
    },
    "stall": {"plain_ms": 0.1, "redact_ms": 1.5},
    "off_checks_ns": 60.0,
}  # fmt: skip


def test_help_says_what_is_measured():
    done = subprocess.run([sys.executable, "benchmarks/stages.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout and "--json" in done.stdout


def test_every_target_has_its_figure():
    found = stages.ratios(FIGURES)
    assert set(found) == set(stages.TARGETS)
    assert found["cache_hit_over_health_p50"] == pytest.approx(1.4)
    assert found["first_token_digits"] == pytest.approx(1.06)
    assert found["off_beside_stages_p50"] == pytest.approx(1.01)
    assert found["off_checks_us"] == pytest.approx(0.06)
    verdicts = {name: stages.met(name, value) for name, value in found.items()}
    assert [name for name, verdict in verdicts.items() if verdict == "no"] == ["redact_digits_mb_s", "first_token_digits"]


def test_the_report_shows_all_of_it():
    told = stages.report({**FIGURES, "ratios": stages.ratios(FIGURES)})
    for name in (*stages.TARGETS, *FIGURES["serving"], *FIGURES["first_token"], "longest stall"):
        assert name in told


def test_prompts_are_the_same_in_every_run_and_of_the_size_asked_for():
    for make in (texts.prose, texts.dense):
        assert make(5000) == make(5000) and len(make(5000)) == 5000
    assert json.loads(texts.chat("hi", "m", seed=1)) == {"model": "m", "messages": [{"role": "user", "content": "hi"}], "seed": 1}


def test_redaction_is_timed_on_both_texts():
    found = redacting.speeds(1)
    assert set(found) == {"prose", "digits"}
    for figures in found.values():
        assert min(figures["100KB"], figures["1MB"], figures["ahocorasick"]) > 0
    assert found["prose"]["found"] >= 20


def test_requests_are_timed_through_real_routers(tmp_path):
    """One block of each kind: hits are hits, prompts that are to be redacted are answered, and the loop's stall is read."""
    found = serving.cached(tmp_path, 10)
    assert set(found) == {"health", "hit", "plain_beside_stages", "plain_without_stages"}
    tokens = serving.first_token(tmp_path, 2)
    assert set(tokens) == {"prose_plain", "prose_redact", "digits_plain", "digits_redact"}
    assert all(each["p50_us"] >= serving.FIRST_TOKEN_S * 1e6 for each in tokens.values())
    stall = serving.longest_stall(tmp_path, 1)
    assert set(stall) == {"plain_ms", "redact_ms"} and min(stall.values()) >= 0


def test_what_a_route_without_stages_is_asked_is_timed():
    assert 0 <= serving.off_checks_ns() < 1e6
