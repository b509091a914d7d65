"""The parser of tool calls and thoughts: every case whole, one character at a time, and cut at random."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.gateway.api.jsonextent import JsonExtent
from laya.gateway.api.toolcalls import (
    CallArguments,
    CallEnd,
    CallStart,
    ReasoningPiece,
    TextPiece,
    ToolCallParser,
    parser_for,
    style_of_card,
)
from laya.schema.chat_style import ChatStyle, style_of

WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
HERMES, LLAMA, MISTRAL = ChatStyle("hermes"), ChatStyle("llama3"), ChatStyle("mistral")


def parse(style: ChatStyle, parts: list[str], **kw) -> tuple[str, str, list[tuple[str, str]]]:
    """(text, reasoning, calls) with the order of the calls' pieces checked."""
    parser = ToolCallParser(style, **kw)
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.end()
    text = "".join(p.text for p in pieces if isinstance(p, TextPiece))
    reasoning = "".join(p.text for p in pieces if isinstance(p, ReasoningPiece))
    starts = [p for p in pieces if isinstance(p, CallStart)]
    calls = []
    for number, start in enumerate(starts):
        own = [p for p in pieces if not isinstance(p, TextPiece | ReasoningPiece) and p.index == number]
        assert own[0] is start and isinstance(own[-1], CallEnd) and start.index == number
        calls.append((start.name, "".join(p.text for p in own if isinstance(p, CallArguments))))
    assert len({s.id for s in starts}) == len(starts) and parser.calls == len(starts)
    return text, reasoning, calls


PARIS = ("weather", '{"city": "Paris"}')
CASES = [
    (HERMES, "Just words.", ("Just words.", "", [])),
    (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>", ("", "", [PARIS])),
    (HERMES, f"Let me look.\n<tool_call>{WEATHER}</tool_call>\n", ("Let me look.", "", [PARIS])),
    (HERMES, f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>", ("", "", [PARIS, PARIS])),
    (HERMES, f"<tool_call>\n{WEATHER}\n{WEATHER}\n</tool_call> done", (" done", "", [PARIS, PARIS])),
    (HERMES, f"<tool_call>\n{WEATHER}\n</tool_cal", ("", "", [PARIS])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}"}}</tool_call>',
     ("", "", [("f", '{"a": "</tool_call>}"}')])),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", "", [("f", '{"a": 1}')])),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    (HERMES, '<tool_call>{"function": {"name": "f", "parameters": {"x": []}}}</tool_call>', ("", "", [("f", '{"x": []}')])),
    (HERMES, '<tool_call>{"name": }</tool_call>', ('<tool_call>{"name": }</tool_call>', "", [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "", [])),
    (HERMES, '<tool_call>{"name": "f", "argum', ('<tool_call>{"name": "f", "argum', "", [])),
    (HERMES, "<tool_call> no json", ("<tool_call> no json", "", [])),
    (HERMES, "a < b <tool <tool_cal", ("a < b <tool <tool_cal", "", [])),
    (HERMES, "text \n\n", ("text \n\n", "", [])),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Paris"}}', ("", "", [PARIS])),
    (LLAMA, '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', ("", "", [PARIS])),
    (LLAMA, f"{WEATHER}; {WEATHER}", ("", "", [PARIS, PARIS])),
    (LLAMA, '{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}', ("", "", [PARIS])),
    (LLAMA, '{"answer": 42}', ('{"answer": 42}', "", [])),
    (LLAMA, "{ a set }", ("{ a set }", "", [])),
    (LLAMA, '{"name": "Bob"', ('{"name": "Bob"', "", [])),
    (LLAMA, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", "", [])),
    (MISTRAL, f"[TOOL_CALLS][{WEATHER}, {WEATHER}]", ("", "", [PARIS, PARIS])),
    (MISTRAL, f"[TOOL_CALLS] [{WEATHER}]", ("", "", [PARIS])),
    (MISTRAL, f"[{WEATHER}]", ("", "", [PARIS])),
    (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]weather{"city": "Paris"}', ("", "", [PARIS, PARIS])),
    (MISTRAL, "[1, 2, 3] is a list", ("[1, 2, 3] is a list", "", [])),
    (MISTRAL, "[TOOL_CALLS]not a call", ("[TOOL_CALLS]not a call", "", [])),
    (ChatStyle("none", "tags"), "<think>\nHm.\n</think>\n\nYes.", ("Yes.", "Hm.\n", [])),
    (ChatStyle("none", "tags"), "No thoughts <think>.", ("No thoughts <think>.", "", [])),
    (ChatStyle("none", "tags"), "<think></think>Yes.", ("Yes.", "", [])),
    (ChatStyle("none", "tags"), "<thi", ("<thi", "", [])),
    (ChatStyle("none", "tags"), "<think>cut </th", ("", "cut </th", [])),
    (ChatStyle("none", "open"), "Hm </thin k></think> Yes.", ("Yes.", "Hm </thin k>", [])),
    (ChatStyle("hermes", "tags"), f"<think>Use <tool_call>?</think>\n<tool_call>{WEATHER}</tool_call>",
     ("", "Use <tool_call>?", [PARIS])),
    (ChatStyle("none", "none"), f"<think>x<tool_call>{WEATHER}", (f"<think>x<tool_call>{WEATHER}", "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("style", "answer", "expected"), CASES)
def test_an_answer_gives_the_same_pieces_wherever_it_is_cut(style, answer, expected):
    """(case 25)"""
    kw = {"names": frozenset({"weather"})}
    assert parse(style, [answer], **kw) == expected
    assert parse(style, list(answer), **kw) == expected
    for cut in range(1, len(answer)):
        assert parse(style, [answer[:cut], answer[cut:]], **kw) == expected


@given(st.lists(st.sampled_from(
    ["<tool_call>", "</tool_call>", WEATHER, "<think>", "</think>", "{", "}", "[", "]", '"', "\\", "\n", " ", "a", "[TOOL_CALLS]",
     '{"name": "x"', "<tool", "é🚀"]
), max_size=8), st.sampled_from([
    ChatStyle(calls, reasoning) for calls in ("hermes", "llama3", "mistral", "none") for reasoning in ("none", "tags", "open")
]))  # fmt: skip
@settings(max_examples=300, deadline=None)
def test_any_answer_parses_alike_whole_and_by_characters(parts, style):
    answer = "".join(parts)
    whole = parse(style, [answer])
    assert parse(style, list(answer)) == whole
    for _, arguments in whole[2]:
        assert isinstance(json.loads(arguments), dict)


def test_text_goes_out_as_soon_as_it_cannot_be_a_marker():
    """(case 25) Nothing is kept for ever."""
    parser = ToolCallParser(ChatStyle("hermes", "tags"))
    assert parser.feed("Hello") == [TextPiece("Hello")]
    assert parser.feed(" <tool") == []
    assert parser.feed("box>") == [TextPiece(" <toolbox>")]
    bare = ToolCallParser(LLAMA)
    assert bare.feed('{"na') == [] and bare.feed('med": 1') == [TextPiece('{"named": 1')]


def test_only_offered_tools_are_called_without_a_marker():
    answer = '{"name": "Bob", "parameters": {}}'
    assert parse(LLAMA, [answer], names=frozenset({"weather"})) == (answer, "", [])
    assert parse(LLAMA, [answer], names=frozenset({"Bob"}))[2] == [("Bob", "{}")]


def test_without_parallel_calls_the_first_one_counts():
    parser = parser_for("<tool_call>", parallel=False)
    pieces = parser.feed(f"<tool_call>{WEATHER}</tool_call><tool_call>{WEATHER}</tool_call>") + parser.end()
    assert [type(p) for p in pieces] == [CallStart, CallArguments, CallEnd]


def test_a_mistral_id_has_nine_letters_and_digits():
    start = ToolCallParser(MISTRAL).feed(f"[TOOL_CALLS][{WEATHER}]")[0]
    assert len(start.id) == 9 and start.id.isalnum()


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{% for t in tools %}<tool_call>{% endfor %}", ChatStyle("hermes")),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", ChatStyle("mistral")),
        ("Environment: ipython <|python_tag|>", ChatStyle("llama3")),
        ("{{ messages }}", ChatStyle("hermes")),
        ("{% if '</think>' in content %}..{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n"
         "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}", ChatStyle("hermes", "tags")),
        ("{% if '</think>' in content %}..{% endif %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
         ChatStyle("hermes", "open")),
    ],
)  # fmt: skip
def test_the_template_shows_the_style(template, style):
    assert style_of(template) == style
    assert style_of_card({"chat_style": {"calls": style.calls, "reasoning": style.reasoning}}) == style


def test_the_style_can_be_overridden_and_thinking_switched_off():
    assert style_of("<tool_call>", "mistral").calls == "mistral"
    off = parser_for("", style=ChatStyle("none", "open"), thinking=False)
    assert off.feed("Yes.") == [TextPiece("Yes.")]
    plain = parser_for("<tool_call>", tools=False)
    assert plain.feed("<tool_call>") == [TextPiece("<tool_call>")]


def test_the_extent_ends_at_the_matching_bracket():
    text = '{"a": "}\\"}", "b": [{}]} rest'
    for cut in range(text.index(" rest")):
        extent = JsonExtent()
        extent.find(text[:cut])
        assert extent.find(text) == text.index(" rest")
