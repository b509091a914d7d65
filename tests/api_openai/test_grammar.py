"""Grammars: compiled or refused in the preparation worker, harmless on the engine thread."""

from __future__ import annotations

import json
import time

import pytest

from laya.engine.grammar import MAX_TEXT, Grammar, GrammarCompiler
from laya.errors import InvalidRequest
from laya.gateway.api.structured import forced_calls
from laya.gateway.api.toolcalls import CallArguments, CallStart, ToolCallParser
from laya.schema.chat_style import ChatStyle

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False})


@pytest.fixture(scope="module")
def tokenizer(model_path):
    from laya.model.formats import open_checkpoint
    from laya.model.tokenizer import build_tokenizer

    return build_tokenizer(open_checkpoint(str(model_path)).tokenizer)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, tokenizer.eos_token_ids)


def allowed(grammar: Grammar) -> set[int]:
    mask = grammar.token_mask()
    return {i * 8 + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def takes(grammar: Grammar, tokenizer, text: str) -> bool:
    """Whether the text, in the model's tokens, is a whole answer: the end may follow it."""
    fork = grammar.fork()
    for token in tokenizer.encode(text, add_special=False):
        if token not in allowed(fork):
            return False
        fork.accept(token)
    return bool(allowed(fork) & tokenizer.eos_token_ids)


def test_a_schema_takes_what_fits_and_nothing_else(compiler, tokenizer):
    grammar = compiler.compile("json_schema", SCHEMA)
    assert takes(grammar, tokenizer, '{"a": 12}')
    assert not takes(grammar, tokenizer, '{"a": "x"}') and not takes(grammar, tokenizer, "{}")
    assert allowed(grammar.fork()) == allowed(grammar)  # forks do not move the original
    assert compiler.compile("json_schema", SCHEMA) is grammar


def test_a_regular_expression_and_json_objects(compiler, tokenizer):
    assert takes(compiler.compile("regex", "(red|green) [0-9]+"), tokenizer, "green 42")
    assert takes(compiler.compile("json_object", ""), tokenizer, '{"any": ["thing", 1]}')


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "foo"}'), ("json_schema", "[]"), ("json_schema", "{"), ("json_schema", '{"properties": {"a": "bar"}}'),
        ("json_schema", '{"$ref": "#/nowhere"}'), ("regex", "(foo"), ("regex", "[z-a]"), ("lark", "start: <<<"), ("lark", ""),
        ("json_schema", "[" * 5000), ("json_schema", " " * (MAX_TEXT + 1)), ("tool_calls", "start: missing_rule"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_the_clients_fault(compiler, kind, text):
    """(case 32)"""
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(kind, text)
    assert caught.value.param in ("response_format", "structured_outputs", "tools")


@pytest.mark.parametrize("text", ["foo**", "(a{1,1000}){1,1000}", "(a|aa)+$", "((a+)+)+b"])
def test_nasty_expressions_end_in_bounded_time(compiler, text):
    """(case 32)"""
    began = time.monotonic()
    try:
        allowed(compiler.compile("regex", text))
    except InvalidRequest:
        pass
    assert time.monotonic() - began < 30


def test_a_matcher_that_breaks_allows_nothing_and_raises_nothing():
    """(case 32)"""

    class Broken:
        def compute_bitmask(self):
            raise RuntimeError("inside")

        def is_stopped(self):
            return False

        def consume_token(self, token):
            raise RuntimeError("inside")

    grammar = Grammar(Broken())
    grammar.accept(1)
    assert grammar.token_mask() == b""


def test_a_token_outside_ends_in_the_failed_state_and_not_in_a_short_answer(compiler, tokenizer):
    """(case 32)"""
    grammar = compiler.compile("regex", "ok then").fork()
    grammar.accept(tokenizer.encode("zebra", add_special=False)[0])
    assert grammar.token_mask() == b""


def test_after_its_end_only_the_end_is_allowed(compiler, tokenizer):
    grammar = compiler.compile("regex", "ok").fork()
    for token in tokenizer.encode("ok", add_special=False):
        grammar.accept(token)
    assert allowed(grammar) == set(tokenizer.eos_token_ids)
    grammar.accept(min(tokenizer.eos_token_ids))
    assert allowed(grammar) <= set(tokenizer.eos_token_ids)


@pytest.mark.parametrize("style", ["hermes", "llama3", "mistral"])
def test_forced_calls_are_read_back_by_the_parser_of_their_style(compiler, tokenizer, style):
    tools = [
        {"name": 'odd "name"', "parameters": {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"],
                                              "additionalProperties": False, "$defs": {"n": {"type": "integer"}}}},
        {"name": "other"},
    ]  # fmt: skip
    key = "parameters" if style == "llama3" else "arguments"
    one = f'{{"name": "odd \\"name\\"", "{key}": {{"x": 5}}}}'
    two = f'{{"name": "other", "{key}": {{}}}}'
    answer = {
        "hermes": f"<tool_call>\n{one}\n</tool_call>\n<tool_call>\n{two}\n</tool_call>", "llama3": f"{one}; {two}",
        "mistral": f"[TOOL_CALLS][{one}, {two}]",
    }[style]  # fmt: skip
    several, single = (compiler.compile(*forced_calls(tools, style, several=many)) for many in (True, False))
    assert takes(several, tokenizer, answer) and not takes(single, tokenizer, answer)
    parser = ToolCallParser(ChatStyle(style), frozenset({'odd "name"', "other"}))
    pieces = parser.feed(answer) + parser.end()
    assert [p.name for p in pieces if isinstance(p, CallStart)] == ['odd "name"', "other"]
    assert [p.text for p in pieces if isinstance(p, CallArguments)] == ['{"x": 5}', "{}"]
