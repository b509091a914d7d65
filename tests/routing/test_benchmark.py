"""The routing benchmark and the failover demonstration as programs: what they time is what they say. No speed is asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # after tests/, which has an `engine` too

import routing  # noqa: E402
from routing_bench import decision, sessions  # noqa: E402


def mode(memory: float, hybrid: float, persistent: float) -> dict:
    values = zip(("memory", "hybrid", "persistent"), (memory, hybrid, persistent), strict=True)
    return {name: {"p50_us": p50, "p99_us": 2 * p50, "added_p50_us": p50 - memory, "added_p99_us": 0.0} for name, p50 in values}


FIGURES = {
    "machine": {"cpu": "x"},
    "decision": {"decision_us_p50": 4.0, "rules_10k_over_10": 1.05},
    "modes": {"hit": mode(100, 101, 102), "new": mode(100, 125, 500), "full": mode(100, 300, 1300), "cold": mode(100, 200, 200)},
    "storm": {"full_p99_us": 30.0, "room_p99_us": 20.0, "eviction_p99_ratio": 1.5},
    "kept_after_kill": {name: {"acknowledged": 100, "kept": kept} for name, kept in (("memory", 0), ("hybrid", 70), ("persistent", 99))},
}


def test_the_ratios_take_the_worst_case_and_are_judged():
    found = routing.ratios(FIGURES)
    assert found["hybrid_over_memory_p50"] == 1.25 and found["persistent_added_p50_ms"] == 1.2
    assert found["persistent_lost_at_kill"] == 1.0 and set(found) == set(routing.TARGETS)
    judged = {name: routing.met(name, value) for name, value in found.items()}
    assert judged == {
        "decision_us_p50": "yes", "rules_10k_over_10": "yes", "hybrid_over_memory_p50": "no", "persistent_added_p50_ms": "no",
        "eviction_p99_ratio": "yes", "persistent_lost_at_kill": "no",
    }  # fmt: skip
    text = routing.report({**FIGURES, "ratios": found})
    assert "| persistent | 100" in text and "kill -9" in text


def test_the_timed_names_are_taken_by_their_rules():
    import random

    for rules in (10, 1000):
        compiled = decision.table(rules)
        assert all(compiled.match(name) for name in decision.names(rules, 300, random.Random(1)))
    picks = decision.selection(compiled)
    name, route = picks.route_of("model-00004", decision.PLAN)
    assert [candidate.name for candidate in picks.choose(route)][0].startswith("b")
    assert len(route.targets) == decision.BACKENDS


def test_a_named_target_is_made_once():
    """Heads that are kept for a target must not pile up under a header that comes again and again."""
    picks = decision.selection(decision.table(10))
    plan = SimpleNamespace(key=None, target="b1")
    _, route = picks.route_of("model-00004", plan)
    assert picks.override(route, plan) is picks.override(route, plan)


def test_the_modes_are_timed_over_real_processes(tmp_path):
    found = sessions.kept_after_kill(tmp_path, 20)
    assert found["memory"] == {"acknowledged": 20, "kept": 0} and found["persistent"] == {"acknowledged": 20, "kept": 20}
    assert found["hybrid"]["kept"] <= 20


@pytest.mark.parametrize("program", ["benchmarks/routing.py", "tools/failover_demo.py"])
def test_help_is_there(program):
    ended = subprocess.run([sys.executable, str(ROOT / program), "--help"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "usage:" in ended.stdout


def test_a_backend_killed_under_load_fails_nobody():
    """(cases 40, 41, 43) The demonstration itself, short."""
    command = [sys.executable, str(ROOT / "tools" / "failover_demo.py"), "--seconds", "15", "--clients", "8"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "no request without a byte sent failed" in ended.stdout, ended.stdout + ended.stderr
