"""The pattern automaton against a scan that tries every pattern, and its bounds."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.errors import ConfigError
from laya.routing.automaton import MAX_CANDIDATES, Pattern, PatternAutomaton

# Few letters, so that pieces overlap; a non-BMP one, a combining mark and the automaton's own marks, so that none is special.
ALPHABET = "aab/é模\u0301😀\ufdd0\ufdd1"
names = st.text(ALPHABET, max_size=12)
patterns = st.text(ALPHABET + "***", min_size=1, max_size=8).filter(lambda text: "*" in text)


def naive(texts: list[str], name: str) -> str | None:
    """The definition: regular expressions, all of them, best by precedence."""
    taking = [t for t in texts if re.fullmatch(".*".join(map(re.escape, t.split("*"))), name, re.DOTALL)]
    return min(taking, key=lambda t: (-(len(t) - t.count("*")), -t.index("*")), default=None)


def compiled(texts: list[str]) -> PatternAutomaton:
    return PatternAutomaton([Pattern(text, text) for text in texts])


def compatible(texts: list[str]) -> list[str]:
    """The texts in order, without those that conflict with one before."""
    kept: list[str] = []
    for text in texts:
        try:
            compiled([*kept, text])
            kept.append(text)
        except ConfigError:
            pass
    return kept


@settings(max_examples=300, deadline=None)
@given(st.lists(patterns, max_size=8), st.lists(names, min_size=1, max_size=8), st.data())
def test_it_finds_what_a_naive_scan_finds(texts, some_names, data):
    texts = compatible(texts)
    automaton = compiled(texts)
    if texts:  # names that fit a pattern are rare by chance
        filled = data.draw(st.sampled_from(texts)).split("*")
        some_names = [*some_names, *(data.draw(names).join(filled) for _ in range(3))]
    for name in some_names:
        found = automaton.find(name)
        assert (found and found.text) == naive(texts, name)


@settings(max_examples=200, deadline=None)
@given(patterns, patterns)
def test_two_patterns_are_refused_exactly_if_they_tie_on_some_name(one, other):
    tie = len(one.replace("*", "")) == len(other.replace("*", "")) and one.index("*") == other.index("*")
    # A name that both take, if there is any: the common prefix, everything between, the longer suffix.
    longer = max(one.rsplit("*", 1)[1], other.rsplit("*", 1)[1], key=len)
    prefix = one[: one.index("*")]
    middle = "".join(one.split("*")[1:-1]) + "".join(other.split("*")[1:-1])
    witness = prefix + middle + longer
    both = naive([one], witness) and naive([other], witness)
    try:
        compiled([one, other])
        refused = False
    except ConfigError as exc:
        refused = True
        assert one in str(exc) and other in str(exc)
    assert refused == bool(tie and both)


@settings(max_examples=100, deadline=None)
@given(st.lists(patterns, max_size=6), names, st.randoms(use_true_random=False))
def test_the_order_in_the_file_does_not_matter(texts, name, random):
    texts = compatible(texts)
    shuffled = list(texts)
    random.shuffle(shuffled)
    one, other = compiled(texts).find(name), compiled(shuffled).find(name)
    assert (one and one.text) == (other and other.text)


@pytest.mark.parametrize(
    ("pattern", "takes", "leaves"),
    [
        ("x/*", ["x/", "x/y"], ["x", "X/y", "ax/"]),
        ("*", ["", "a", "模型"], []),
        ("a*a", ["aa", "aba"], ["a", "ab"]),
        ("ab*ba", ["abba", "abxba"], ["aba"]),
        ("*a*a*", ["aa", "bab a"], ["a"]),
        ("**a", ["a", "ba"], ["ab"]),
        ("a*b*c", ["abc", "abbc", "axbxc"], ["acb", "ac"]),
        ("é*", ["é1"], ["e\u03011"]),
    ],
)
def test_what_a_star_stands_for(pattern, takes, leaves):
    automaton = compiled([pattern])
    assert [name for name in takes if automaton.find(name) is None] == []
    assert [name for name in leaves if automaton.find(name) is not None] == []


def test_no_patterns_take_nothing():
    assert compiled([]).find("a") is None


def test_marks_within_a_name_add_no_comparisons(monkeypatch):
    """A name made of the automaton's own marks must not make every ending look like one of the name's."""
    automaton = compiled(["a*", "*b", "a*b"])
    compared = []
    takes = Pattern.takes
    monkeypatch.setattr(Pattern, "takes", lambda self, name: compared.append(self.text) or takes(self, name))
    assert automaton.find("c" + "\ufdd0a" * 50 + "b\ufdd1" * 50) is None
    assert compared == []


def test_ten_thousand_patterns_compile_soon_and_answer_like_ten():
    """The ratio is loose: it tells a scan of all the rules (a thousandfold) from the automaton on a noisy machine."""
    few = compiled([f"org-{i:05d}/*" for i in range(10)])
    many = compiled([f"org-{i:05d}/*" for i in range(10_000)] + [f"*-v{i:05d}" for i in range(5_000)])

    def seconds(automaton: PatternAutomaton) -> float:
        best = float("inf")
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(200):
                assert automaton.find("org-00007/some-model-8b") is not None
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(many) < 10 * seconds(few)


def test_rules_that_would_make_a_lookup_slow_are_refused():
    nested = [f"{'a' * i}*" for i in range(1, 250)] + [f"*{'a' * i}" for i in range(1, 250)]
    with pytest.raises(ConfigError, match=rf"nest so deeply .* allowed: {MAX_CANDIDATES}"):
        compiled(nested)


def test_rules_that_would_make_a_large_automaton_are_refused():
    with pytest.raises(ConfigError, match="matcher states; allowed: 500000"):
        compiled([f"{i:05d}{'x' * 240}*" for i in range(2_100)])


def test_the_worst_name_under_allowed_rules_stays_cheap():
    """Nested beginnings just below the bound, and a name that fits them all."""
    texts = [f"{'a' * i}*b{'c' * (i % 3)}" for i in range(1, 200)]
    automaton = compiled(texts)
    name = "a" * 400 + "b"
    assert naive(texts, name) == automaton.find(name).text
