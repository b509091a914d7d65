"""What an answer's form was asked to be: `response_format`, vLLM's `structured_outputs`, and calls that must be made.

In: members of a request. Out: the (kind, text) of a grammar for the engine, which compiles it. Pure; any thread.
"""

from __future__ import annotations

import json
import re
from typing import Any

from laya.errors import InvalidRequest
from laya.schema.codec import encode_members
from laya.schema.openai import ResponseFormat, Sampling

Grammar = tuple[str, str]
# Calls of one answer where the request allows several: a small model that need not stop may call for ever.
_MOST_CALLS = 16
# As `engine.grammar` writes JSON: one way to put white space.
_JSON_FORM = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
# style -> (before the calls, before each call's JSON, key of the arguments, after each, between two, after the calls)
_CALL_FORMS = {
    "hermes": ("", "<tool_call>\n", "arguments", "\n</tool_call>", "\n", ""),
    "llama3": ("", "", "parameters", "", "; ", ""),
    "mistral": ("[TOOL_CALLS][", "", "arguments", "", ", ", "]"),
}


def grammar_of(request: Sampling) -> Grammar | None:
    """Raises InvalidRequest naming the member at fault."""
    if request.response_format is not None and request.response_format.type != "text":
        return _of_format(request.response_format)
    asked = request.structured_outputs
    if asked is None:
        return None
    given = [key for key in ("json", "regex", "choice", "grammar", "json_object") if getattr(asked, key) not in (None, False)]
    if len(given) != 1 or getattr(asked, given[0]) in ("", []):
        raise InvalidRequest("Give one of json, regex, choice, grammar and json_object.", param="structured_outputs")
    if asked.json is not None:  # an empty object allows any JSON
        return "json_schema", asked.json if isinstance(asked.json, str) else encode_members(asked.json).decode()
    if asked.choice:
        return "regex", "|".join(re.escape(option) for option in asked.choice)
    if asked.json_object:
        return "json_object", ""
    return ("regex", asked.regex) if asked.regex else ("lark", asked.grammar or "")


def _of_format(form: ResponseFormat) -> Grammar:
    if form.type == "json_object":
        return "json_object", ""
    if form.type != "json_schema":
        raise InvalidRequest("The type must be text, json_object or json_schema.", param="response_format.type")
    schema = (form.json_schema or {}).get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest("A schema must be given as an object.", param="response_format.json_schema.schema")
    return "json_schema", encode_members(schema).decode()


def forced_calls(tools: list[dict[str, Any]], style: str, several: bool) -> Grammar:
    """A grammar that lets nothing through but calls of these tools (`function` members), in the model's own syntax."""
    begin, opening, key, closing, between, end = _CALL_FORMS.get(style, _CALL_FORMS["hermes"])
    more = f" ({_text(between)} call){{0,{_MOST_CALLS - 1}}}" if several else ""
    rules = [
        f"start: {_text(begin)} call{more} {_text(end)}" if begin else f"start: call{more}",
        f"call: {_text(opening)} body {_text(closing)}" if opening else "call: body",
        "body: " + " | ".join(f"body_{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "{key}": '
        rules.append(f"body_{i}: {_text(head)} arguments_{i} {_text('}')}")
        schema = tool.get("parameters") or {"type": "object"}
        rules.append(f"arguments_{i}: %json {encode_members({**schema, **_JSON_FORM}).decode()}")
    return "tool_calls", "\n".join(rules)


def _text(literal: str) -> str:
    """A string of the grammar's own syntax, which is JSON's."""
    return json.dumps(literal, ensure_ascii=False)
