"""The retry table, row by row, as pure decisions."""

from __future__ import annotations

import pytest

from laya.gateway.dispatch import MAX_OTHERS, MAX_UNREACHABLE, RETRY, Attempts, Next, after_failure


def decide(failure: str, attempts: Attempts | None = None, **kw) -> Next:
    return after_failure(failure, attempts or Attempts(), **{"sent_to_client": False, "candidates_left": True, **kw})


@pytest.mark.parametrize("failure", RETRY)
def test_nothing_is_tried_again_once_the_client_has_a_byte(failure):
    assert decide(failure, sent_to_client=True) is Next.STOP


@pytest.mark.parametrize("failure", ["connect", "busy", "status"])
def test_these_move_to_another_backend_and_stop_where_there_is_none(failure):
    assert decide(failure) is Next.OTHER
    assert decide(failure, candidates_left=False) is Next.STOP


def test_a_stale_connection_is_tried_once_more_on_the_same_backend_then_elsewhere():
    attempts = Attempts()
    assert [decide("stale", attempts) for _ in range(2)] == [Next.SAME_FRESH, Next.OTHER]
    alone = Attempts()
    assert [decide("stale", alone, candidates_left=False) for _ in range(2)] == [Next.SAME_FRESH, Next.STOP]


def test_an_ambiguous_failure_moves_on_once_and_not_at_all_when_forbidden():
    attempts = Attempts()
    assert [decide("reset", attempts) for _ in range(2)] == [Next.OTHER, Next.STOP]
    assert decide("reset", retry_ambiguous=False) is Next.STOP


@pytest.mark.parametrize("failure", ["first_byte_timeout", "idle_timeout", "broken"])
def test_time_outs_and_broken_answers_are_final(failure):
    assert decide(failure) is Next.STOP


def test_moves_are_bounded():
    for failure, most in (("connect", MAX_UNREACHABLE), ("status", MAX_OTHERS)):
        attempts = Attempts()
        assert [decide(failure, attempts) for _ in range(most + 2)] == [Next.OTHER] * most + [Next.STOP] * 2
