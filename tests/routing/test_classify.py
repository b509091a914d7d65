"""Which rule of `classify` takes a request."""

from __future__ import annotations

import time

import pytest

from laya.config import loads
from laya.routing.classify import MAX_READ_CHARS, Decision, RequestFacts
from laya.routing.code import holds_code
from laya.routing.table import RouteTable

FACTS = RequestFacts(prompt_tokens=100, max_tokens=50)


def decide(rules: str, message: str = "", facts: RequestFacts = FACTS) -> Decision:
    head = "backends: {big: {url: 'http://h:1'}}\ninference: {}\n"
    text = f"{head}routes:\n- match: auto\n  classify: [{rules}, {{to: big}}]"
    return RouteTable.compile(loads(text)).match("auto").classify.decide(message, facts)


def holds(when: str, message: str = "", facts: RequestFacts = FACTS) -> bool:
    return decide(f"{{to: local, when: {{{when}}}}}", message, facts).rule == 0


def test_the_first_rule_that_holds_wins_and_says_why():
    rules = "{to: local, when: {any_words: [extract, 提取], max_prompt_tokens: 800, no_code: true}}, {to: big, when: {}}"
    decision = decide(rules, "Please EXTRACT the names.")
    assert (decision.targets[0].backend, decision.rule) == ("local", 0)
    assert decision.reason == "prompt_tokens=100, no code, word extract"
    assert decide(rules, "Write a poem.").rule == 1
    assert decide("{to: local, when: {has_tools: true}}").reason == "always"


def test_the_routes_own_targets_are_taken_when_no_rule_holds():
    text = "inference: {}\nroutes:\n- {match: auto, to: local, classify: [{to: local, when: {has_images: true}}]}"
    decision = RouteTable.compile(loads(text)).match("auto").classify.decide("", FACTS)
    assert (decision.rule, decision.targets[0].backend) == (-1, "local")


@pytest.mark.parametrize(
    ("word", "message", "found"),
    [
        ("extract", "extract this", True),
        ("extract", "Extract: a", True),
        ("extract", "extraction", False),
        ("extract", "re_extract", False),
        ("extract", "请extract关键词", True),
        ("提取", "请提取关键词", True),
        ("key words", "the key words, please", True),
        ("c++", "in c++17", True),
        ("c++", "xc++", False),
        ("été", "L'ÉTÉ!", True),
        ("été", "étés", False),
        ("키워드", "키워드를", True),
    ],
)
def test_words_are_whole_in_latin_script_and_anywhere_in_cjk(word, message, found):
    assert holds(f"any_words: ['{word}']", message) is found


def test_all_words_and_no_words():
    assert holds("all_words: [red, blue]", "Blue and red") and not holds("all_words: [red, blue]", "red")
    assert holds("no_words: [code]", "text") and not holds("no_words: [code]", "some code")


@pytest.mark.parametrize(
    ("when", "facts", "expected"),
    [
        ("max_prompt_tokens: 100", {}, True), ("max_prompt_tokens: 99", {}, False),
        ("min_prompt_tokens: 100", {}, True), ("min_prompt_tokens: 101", {}, False),
        ("max_tokens_at_most: 50", {}, True), ("max_tokens_at_most: 49", {}, False),
        ("max_tokens_at_most: 50", {"max_tokens": None}, False),
        ("has_tools: true", {"has_tools": True}, True), ("has_tools: false", {"has_tools": True}, False),
        ("has_images: true", {}, False), ("has_images: false", {}, True),
    ],
)  # fmt: skip
def test_conditions_on_the_request(when, facts, expected):
    given = RequestFacts(**{"prompt_tokens": 100, "max_tokens": 50, **facts})
    assert holds(when, "", given) is expected


@pytest.mark.parametrize(
    "message",
    [
        "Fix:\n```python\nx = 1\n```",
        "def f(a):\n    return g(a)\nclass B:\n    pass",
        "int main() {\n  int a = 1;\n  return a;\n}",
        "import os\nimport sys\nfrom a import b",
        "SELECT a FROM b\nSELECT c FROM d\nINSERT INTO t (a)",
        "<div>\n</div>\n</p>\n</body>",
    ],
)
def test_code_is_seen(message):
    assert holds_code(message) and holds("has_code: true", message) and not holds("no_code: true", message)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "From here on we go.\nLet us begin.\nImportant: class dismissed.",
        "Dear all;\nplease find attached\nthe list; thanks.",
        "请整理下面的文字。\n谢谢。",
        "for (more) read on\nif (any) doubt",
    ],
)
def test_prose_is_no_code(message):
    assert not holds_code(message) and holds("no_code: true", message) and holds("has_code: false", message)


def test_of_a_long_message_both_ends_are_read():
    filler = "lorem ipsum " * MAX_READ_CHARS
    assert holds("any_words: [extract]", "extract " + filler)
    assert holds("any_words: [extract]", filler + "extract")
    assert not holds("any_words: [extract]", filler + " extract " + filler)


def test_a_message_full_of_hits_costs_what_one_of_the_bound_costs():
    """A hundred times the text; the factor of ten is for a noisy machine."""
    rules = "{to: local, when: {any_words: [a, b], no_code: true}}, {to: local}"
    config = loads(f"inference: {{}}\nroutes:\n- {{match: x, classify: [{rules}]}}")
    classifier = RouteTable.compile(config).match("x").classify

    def seconds(message: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            classifier.decide(message, FACTS)
            times.append(time.perf_counter() - start)
        return min(times)

    bound = "a, " * (MAX_READ_CHARS // 3)
    assert seconds(bound * 100) < 10 * seconds(bound)
