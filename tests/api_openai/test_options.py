"""Options scored from few runs: every figure that is needed is asked for once, and the sums are those of each option alone."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from laya.engine.options import OptionPaths

END = 99


def figure(before: tuple[int, ...], token: int) -> float:
    """A made-up log-probability of a token behind others."""
    return -((sum((i + 1) * t for i, t in enumerate(before)) * 31 + token * 17) % 101) / 10 - 0.1


def told(paths: OptionPaths, prompt_tokens: int = 10) -> dict:
    """What a model would answer to everything that the runs ask; fails when a place is asked for twice."""
    figures, asked_nodes = {}, set()
    for run, path in enumerate(paths.paths):
        for position, (node, tokens) in paths.asked(run, prompt_tokens).items():
            depth = position - (prompt_tokens - 1)
            assert 0 <= depth <= len(path) and node not in asked_nodes
            asked_nodes.add(node)
            for token in tokens:
                figures[node, token] = figure(tuple(path[:depth]), token)
    return figures


options = st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=2, max_size=40, unique_by=tuple)


@given(options)
@settings(max_examples=300, deadline=None)
def test_the_sum_of_each_option_is_that_of_the_option_alone(ids):
    paths = OptionPaths(ids, END)
    totals = paths.totals(told(paths))
    for option, total in zip(ids, totals, strict=True):
        beginning = any(other[: len(option)] == option and other != option for other in ids)
        whole = [*option, END] if beginning or not option else option
        assert math.isclose(total, sum(figure(tuple(whole[:i]), token) for i, token in enumerate(whole)), abs_tol=1e-9)
    assert len(paths.paths) <= len(ids) and paths.longest == max(map(len, paths.paths))


def test_single_tokens_need_the_prompt_alone():
    paths = OptionPaths([[1], [2], [3]], END)
    assert paths.paths == [[]] and paths.asked(0, 7) == {6: (0, [1, 2, 3])}


def test_numbered_names_share_their_runs():
    """(case 79) 255 options, few runs."""
    ids = [[7, 8, *map(int, f"{i:03d}")] for i in range(255)]
    assert len(OptionPaths(ids, END).paths) == 26


def test_without_an_end_token_options_are_taken_as_they_are():
    paths = OptionPaths([[1], [1, 2]], None)
    assert paths.totals(told(paths)) == (figure((), 1), figure((), 1) + figure((1,), 2))
