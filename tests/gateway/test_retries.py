"""How soon and how often: Retry-After in every form, the pause, the budget. Pure."""

from __future__ import annotations

import email.utils
import random

import pytest

from laya.gateway.dispatch import BUDGET_CAP, BUDGET_SHARE, MAX_PAUSE_S, RetryBudget, pause, retry_after_of

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, None),
        ({b"retry-after": b"7"}, 7.0),
        ({b"retry-after": b"0.5"}, 0.5),
        ({b"retry-after": b"-3"}, 0.0),
        ({b"retry-after": b"1e9"}, 1e9),
        ({b"retry-after": b"nan"}, None),
        ({b"retry-after": b"inf"}, None),
        ({b"retry-after": b"soon"}, None),
        ({b"retry-after": b"\xd9\xa5"}, None),
        ({b"retry-after": email.utils.formatdate(NOW + 30, usegmt=True).encode()}, 30.0),
        ({b"retry-after": email.utils.formatdate(NOW - 30, usegmt=True).encode()}, 0.0),
        ({b"retry-after": b"Wed, 99 Oct 2015 07:28:00 GMT"}, None),
        ({b"retry-after-ms": b"250"}, 0.25),
        ({b"retry-after-ms": b"250", b"retry-after": b"9"}, 0.25),
        ({b"retry-after-ms": b"x", b"retry-after": b"9"}, 9.0),
        ({b"retry-after": b""}, None),
    ],
)
def test_retry_after_is_read_in_every_form(fields, seconds):
    """(case 44) Seconds, a date, milliseconds, negative, huge, nonsense."""
    found = retry_after_of(fields, NOW)
    assert found == seconds if seconds is None else found == pytest.approx(seconds, abs=1)


def test_pauses_are_spread_and_bounded():
    rng = random.Random(1)
    pauses = [pause(others, rng) for others in range(8) for _ in range(50)]
    assert all(0 <= p <= MAX_PAUSE_S for p in pauses) and len(set(pauses)) > 300


def test_the_budget_allows_a_share_of_the_requests():
    budget = RetryBudget()
    made = sum(budget.take(requests, 0.0) for requests in range(1, 10_001))  # every request wants a retry
    assert made == pytest.approx(10_000 * BUDGET_SHARE + BUDGET_CAP / 10, abs=2) and budget.exhausted == 10_000 - made


def test_a_quiet_router_may_retry_and_cannot_save_up_without_bound():
    budget = RetryBudget()
    assert all(budget.take(n, 10.0 * n) for n in range(1, 50))
    assert sum(budget.take(10_000_000, 1e6) for _ in range(1000)) == BUDGET_CAP
