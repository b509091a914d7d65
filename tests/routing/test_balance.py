"""Picking a target: pure decisions."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from laya.routing.balance import LOAD_BOUND, MAX_COOL_S, MAX_OPEN_S, OPEN_AFTER, OPEN_S, Breaker, order
from laya.routing.prefix import FIRST_MARK, LAST_MARK, PrefixTable


class Candidate:
    def __init__(self, name: str, load: int = 0, weight: float = 1.0) -> None:
        self.name = name
        self.load = load
        self.weight = weight
        self.breaker = Breaker()
        self.healthy = True

    def usable(self, now: float) -> bool:
        return self.healthy and self.breaker.allows(now)


def names(found: list) -> str:
    return "".join(candidate.name for candidate in found)


def some(*loads: int) -> list[Candidate]:
    return [Candidate(name, load) for name, load in zip("abcd", loads, strict=False)]


def test_round_robin_takes_turns_and_weights_are_kept():
    candidates = some(0, 0, 0)
    assert [names(order("round_robin", candidates, turn, 0.0))[0] for turn in range(6)] == list("abcabc")
    weighted = [Candidate("a", weight=1), Candidate("b", weight=3)]
    firsts = Counter(names(order("weighted", weighted, turn, 0.0))[0] for turn in range(4000))
    assert abs(firsts["b"] - 3000) < 20


def test_least_busy_takes_the_least_loaded_for_its_weight_and_breaks_ties_fairly():
    assert names(order("least_busy", some(3, 1, 2), 0, 0.0)) == "bca"
    assert names(order("least_busy", [Candidate("a", 4, 4.0), Candidate("b", 2, 1.0)], 0, 0.0))[0] == "a"
    firsts = Counter(names(order("least_busy", some(0, 0, 0), turn, 0.0))[0] for turn in range(300))
    assert firsts == {"a": 100, "b": 100, "c": 100}


def test_power_of_two_avoids_the_busiest():
    rng = random.Random(1)
    firsts = Counter(names(order("power_of_two", some(0, 5, 9), turn, 0.0, rng))[0] for turn in range(600))
    assert firsts["c"] == 0 and firsts["a"] > firsts["b"] > 0


@pytest.mark.parametrize("policy", ["round_robin", "weighted", "least_busy", "power_of_two", "prefix", "session"])
def test_what_is_not_usable_comes_last_and_is_never_left_out(policy):
    candidates = some(0, 0, 0)
    candidates[0].healthy = False
    candidates[1].breaker.cool(0.0, 10.0)
    for turn in range(6):
        assert names(order(policy, candidates, turn, 1.0)) == "cab"
    candidates[2].healthy = False
    assert sorted(names(order(policy, candidates, 0, 1.0))) == list("abc")


def test_a_session_sticks_to_its_target_and_a_prefix_within_its_bound():
    """(case 39) Beyond the bound, and on a miss, by load."""
    candidates = some(3, 0, 0)
    assert names(order("session", candidates, 0, 0.0, preferred="a"))[0] == "a"
    assert names(order("prefix", candidates, 0, 0.0, preferred="a"))[0] != "a"
    assert names(order("prefix", some(2, 2, 1), 0, 0.0, preferred="a"))[0] == "a"
    assert names(order("prefix", some(5, 1, 2), 0, 0.0, preferred=None))[0] == "b"
    assert names(order("prefix", candidates, 0, 0.0, preferred="gone"))[0] != "a"
    candidates[0].healthy = False
    assert names(order("session", candidates, 0, 0.0, preferred="a"))[0] != "a"
    load = Counter()
    for turn in range(1000):  # one prefix for all: no target gets more than its bound
        busy = [Candidate(name, load[name]) for name in "abcd"]
        load[order("prefix", busy, turn, 0.0, preferred="a")[0].name] += 1
    assert load["a"] == max(load.values()) <= LOAD_BOUND * 250 + 1


def test_a_breaker_opens_after_failures_in_a_row_and_lets_exactly_one_probe_through():
    """(case 43)"""
    breaker = Breaker()
    for _ in range(OPEN_AFTER - 1):
        breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(OPEN_AFTER):
        assert breaker.allows(0.0)
        breaker.failed(0.0)
    assert not breaker.allows(OPEN_S - 0.1) and breaker.state == 2
    assert breaker.allows(OPEN_S) and breaker.taken(OPEN_S) and breaker.state == 1
    assert not breaker.allows(OPEN_S) and not breaker.taken(OPEN_S), "one probe at a time"
    breaker.failed(OPEN_S)  # another request, sent before it opened: it is not the probe
    assert breaker.state == 1 and not breaker.allows(OPEN_S)
    breaker.failed(OPEN_S, probe=True)
    assert not breaker.allows(OPEN_S + 2 * OPEN_S - 0.1) and breaker.allows(OPEN_S + 2 * OPEN_S), "the second time is longer"
    assert breaker.taken(100.0)
    breaker.released()
    assert breaker.allows(100.0) and breaker.taken(100.0)
    breaker.succeeded()
    assert breaker.allows(100.0) and breaker.state == 0 and not breaker.taken(100.0)


def test_a_backend_that_is_back_is_probed_at_once_and_by_one_request():
    breaker = Breaker()
    breaker.hasten(1.0)
    assert breaker.state == 0 and breaker.allows(0.0)
    for _ in range(OPEN_AFTER):
        breaker.failed(0.0)
    breaker.hasten(1.0)
    assert breaker.state == 2 and breaker.failures == OPEN_AFTER
    assert breaker.taken(1.0) and not breaker.allows(1.0)


def test_the_time_a_breaker_stays_open_is_bounded_as_is_the_rest_a_backend_asks_for():
    breaker, now = Breaker(), 0.0
    for _ in range(OPEN_AFTER):
        breaker.failed(now)
    for _ in range(10):
        now = breaker.open_until
        assert breaker.taken(now)
        breaker.failed(now, probe=True)
        assert breaker.open_until - now <= MAX_OPEN_S
    resting = Breaker()
    resting.cool(0.0, 1e9)
    assert not resting.allows(MAX_COOL_S - 0.1) and resting.allows(MAX_COOL_S)


def test_the_longest_known_beginning_wins_and_an_overflow_does_not_move_it():
    table = PrefixTable()
    system = b"s" * 1000
    first = table.marks("r", system + b"a" * 4000)
    assert table.find(first) is None
    table.assign(first, "x")
    other = table.marks("r", system + b"b" * 4000)
    assert table.find(other) == "x", "the shared beginning"
    table.assign(other, "y")  # x was too busy
    assert table.find(table.marks("r", system + b"b" * 9000)) == "y"
    assert table.find(table.marks("r", system + b"c" * 9000)) == "x"
    assert table.find(table.marks("q", system)) is None, "another route"
    table.move(first, "z")
    assert table.find(first) == "z"


def test_marks_are_few_however_long_the_prompt_is():
    assert PrefixTable.marks("r", b"x" * (FIRST_MARK - 1)) == []
    assert len(PrefixTable.marks("r", b"x" * (10 * LAST_MARK))) == len(PrefixTable.marks("r", b"x" * LAST_MARK)) <= 10
