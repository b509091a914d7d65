"""The part of YAML that has one meaning, and the refusal of the rest."""

from __future__ import annotations

import pytest

from laya.config.node import Node
from laya.config.yaml_strict import parse
from laya.errors import ConfigError


def values(node: Node):
    if isinstance(node.value, dict):
        return {key: values(item) for key, item in node.value.items()}
    if isinstance(node.value, list):
        return [values(item) for item in node.value]
    return node.value


def refused(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text.encode() if isinstance(text, str) else text, "f.yaml")
    return str(caught.value)


def test_plain_scalars_have_one_meaning():
    text = (
        "a: null\nb: true\nc: 12\nd: -1.5\ne: text here\nf: '12'\ng: \"no\"\nh: 127.0.0.1\ni: 1.2.3\nj: gpt-4o\n"
        "k: |\n  0123\nl: ~\nm: FALSE\n"
    )
    assert values(parse(text.encode(), "f")) == {
        "a": None, "b": True, "c": 12, "d": -1.5, "e": "text here", "f": "12", "g": "no", "h": "127.0.0.1", "i": "1.2.3",
        "j": "gpt-4o", "k": "0123\n", "l": None, "m": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "written",
    ["no", "On", "YES", "off", "0123", "-017", "0o17", "0x1F", "0b101", "12:30:45", "1:30", "1e3", "1.5E-3", "1_000",
     "1_0.5", ".5", "5.", "00.5", ".inf", "-.INF", ".nan", "2024-08-06", "2024-08-06T10:00:00Z", "12345678901234567890", "="],
)  # fmt: skip
def test_a_trap_is_refused_unless_it_is_quoted(written):
    """(case 64)"""
    message = refused(f"inference:\n  model: {written}\n")
    assert message.startswith("f.yaml:2: inference.model: found ") and written in message and "quote" in message
    assert values(parse(f"inference:\n  model: '{written}'\n".encode(), "f")) == {"inference": {"model": written}}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: a: found the key twice, first on line 1"),
        ("x:\n  a: {b: 1, b: 2}\n", "f.yaml:2: x.a.b: found the key twice"),
        ("8001: x\n", "f.yaml:1: (top): found the key 8001, which is no text"),
        ("on: x\n", "f.yaml:1: (top): found \"on\" without quotes"),
        ("null: x\n", "found the key null"),
        ("? [a]\n: x\n", "found a key that is no plain text"),
        ("a:\n\tb: 1\n", "f.yaml:2: found a tab; allowed: spaces"),
        ("a: b: c\n", "f.yaml:1: not YAML: mapping values are not allowed"),
        ("a: [1\n", "f.yaml:2: not YAML:"),
        ("a: !!python/object:os.system x\n", "found the tag tag:yaml.org,2002:python/object:os.system"),
        ("a: !!str 3\n", "allowed: no tags"),
        ("base: &b {x: 1}\na:\n  <<: *b\n", "f.yaml:3: a: found a merge key"),
        ("a: *nothing\n", "f.yaml:1: a: *nothing refers to no anchor above it"),
        ("a: &a [*a]\n", "*a refers to no anchor above it"),
        ("a: 1\n---\nb: 2\n", "found a second document"),
        ("- a\n", "found a list; allowed: a map of sections"),
        ("just text\n", "allowed: a map of sections"),
        ("a: \x07\n", "f.yaml: not YAML:"),
        ("a: " + "[" * 40 + "]" * 40 + "\n", "more than 32 levels"),
        ("a: " + "[" * 5000 + "\n", "f.yaml:"),
    ],
)
def test_what_has_more_than_one_meaning_or_none_is_refused_with_its_line(text, part):
    """(case 64)"""
    assert part in refused(text)


def test_what_is_not_utf8_is_refused_with_its_line():
    """(case 64)"""
    assert refused(b"a: 1\nb: caf\xe9\n") == "f.yaml:2: found bytes that are not UTF-8; allowed: a UTF-8 text file"
    assert "not UTF-8" in refused("a: 1".encode("utf-16"))


def test_an_alias_is_a_copy():
    node = parse(b"a: &x {k: [1]}\nb: *x\n", "f")
    assert values(node) == {"a": {"k": [1]}, "b": {"k": [1]}}
    assert node.value["a"].value["k"] is not node.value["b"].value["k"]


def test_an_anchor_bomb_is_refused_quickly():
    """(case 64)"""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    assert "aliases for more than" in refused("\n".join(lines))


def test_a_file_beyond_the_bound_is_refused_unread():
    assert "allowed: at most" in refused(b"#" * ((8 << 20) + 1))
