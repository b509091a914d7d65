"""Requests with one member gone wrong, every member in turn: read, or refused by name; never a fault of ours."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from laya.errors import LayaError, NotFound
from laya.gateway.api import chat, completions, messages, responses, systemone
from laya.gateway.tokens import _decode_text, _prompt_of
from laya.model.chat_template import ChatTemplate
from laya.model.tool_prompt import ToolForm
from laya.schema.fields import invalid_body, read_routing
from laya.schema.generation import ChatPrompt, GenerationRequest, ModelCard

CARD = ModelCard(id="m", max_model_len=1000, chat=True, details={"device": "cpu"})
JUNK = [None, 5, -1, 1.5, True, "", "x", "\ud83d", [], [None], [5], {}, {"x": 1}, {"type": "x"}, "y" * 300, 10**30]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA, "strict": True}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
BODIES: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {
            "messages": [
                {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "n"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
                {"role": "tool", "tool_call_id": "c1", "content": "2"}, {"role": "user", "content": "u"},
            ],
            "tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "add"}}, "parallel_tool_calls": False,
            "stream": True, "stream_options": {"include_usage": True}, "stop": ["a", "b"], "n": 2, "seed": 1, "temperature": 0.5,
            "top_p": 0.5, "top_k": 4, "min_p": 0.1, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1.0}, "max_tokens": 4,
            "presence_penalty": 0.1, "frequency_penalty": 0.1, "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low", "user": "u",
        },
        {
            "messages": [{"role": "user", "content": "u"}], "max_completion_tokens": 3, "stop_token_ids": [1], "min_tokens": 1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        },
        {"messages": [{"role": "user", "content": "u"}], "structured_outputs": {"choice": ["a", "b"]}, "cache_salt": "s"},
    ],
    "completions": [
        {"prompt": ["a", "b"], "echo": True, "logprobs": 2, "n": 2, "best_of": 2, "suffix": None, "max_tokens": 3, "stop": "x"},
        {"prompt": [[1, 2], [3]], "seed": 3, "stream": True, "stream_options": {"include_usage": True}},
    ],
    "responses": [
        {
            "instructions": "i", "stream": True, "store": False, "parallel_tool_calls": True, "max_output_tokens": 5, "temperature": 0.1,
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
                {"type": "message", "role": "user", "content": "u", "id": "msg_1"},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "content": [{"text": "c"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "namespace": "mcp__a", "arguments": "{}", "status": "completed"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "2"}]},
                {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "o", "annotations": []}]},
                {"type": "additional_tools", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
                {"type": "item_reference", "id": "rs_1"},
            ],
            "tools": [
                {"type": "function", "name": "add", "description": "d", "parameters": SCHEMA, "strict": False}, {"type": "web_search"},
                {"type": "namespace", "name": "mcp__a", "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]},
                {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
            ],
            "tool_choice": {"type": "function", "name": "add"}, "reasoning": {"effort": "low", "summary": "auto"}, "include": ["x"],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "low"},
            "prompt_cache_key": "k", "client_metadata": {"a": "b"}, "metadata": {"a": "b"}, "truncation": "auto",
        },
        {"input": "hi", "background": False, "conversation": None, "prompt": None, "previous_response_id": None},
    ],
    "messages": [
        {
            "max_tokens": 5, "stream": True, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "document", "title": "t", "source": {"type": "text", "data": "d"}}]},
                {"role": "system", "content": [{"type": "text", "text": "later"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "is_error": False, "content": [
                        {"type": "text", "text": "2"}, {"type": "tool_reference", "tool_name": "late"},
                    ]},
                    {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "x"}]},
                    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
                ]},
            ],
            "tools": [{"name": "add", "description": "d", "input_schema": SCHEMA}, {"name": "late", "input_schema": {}, "defer_loading": True}],
            "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True}, "stop_sequences": ["x"], "top_k": 3,
            "thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"}, "metadata": {"user_id": "u"}, "temperature": 0.1,
            "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}, "context_management": {"edits": []},
        },
    ],
    "systemone": [
        {
            "state": {"a": [1]}, "questions": {
                "n": {"type": "noul", "instructions": ["i"], "criteria": {"true": "t", "false": {"x": 1}}},
                "c": {"type": "choice", "instructions": "i", "criteria": {"a": "x", "b": None, "c": {"k": 1}}},
                "s": {"type": "score", "criteria": ["low", {"label": "high"}]},
            },
        },
    ],
    "tokenize": [
        {"prompt": "x", "add_special_tokens": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}]}], "tools": [FUNCTION], "chat_template_kwargs": {"a": 1}},
    ],
}  # fmt: skip
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
TEMPLATES = [(ToolForm(text), ChatTemplate(text, {})) for text in (TURNS, f"{TURNS}{{{{ tools | tojson }}}}{CALLS}")]
TRANSLATED = {"responses": responses, "messages": messages}
LOCAL = {"chat": chat, "completions": completions, "systemone": systemone}


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every member and element, the innermost too."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))


def changed(body: dict, path: tuple, junk: Any, gone: bool = False) -> dict:
    made = copy.deepcopy(body)
    inner = made
    for step in path[:-1]:
        inner = inner[step]
    if gone:
        del inner[path[-1]]
    else:
        inner[path[-1]] = junk
    return made


def mutations(body: dict) -> Iterator[tuple[tuple, Any, dict]]:
    for path in places(body):
        for junk in JUNK:
            yield path, junk, changed(body, path, junk)
        yield path, "(gone)", changed(body, path, None, gone=True)


def rendered(generation: GenerationRequest) -> None:
    """The prompt's text by templates that know tools and that do not. Raises LayaError."""
    prompt = generation.prompt
    if isinstance(prompt, ChatPrompt):
        for form, template in TEMPLATES:
            fitted = form.fit(list(prompt.messages), list(prompt.tools) or None)
            assert template.render(*fitted, prompt.add_generation_prompt, **prompt.template_args).startswith("<")


def decoded(decode, raw: bytes):
    """As the gateway does it."""
    try:
        return decode(raw)
    except (ValueError, RecursionError) as exc:
        raise invalid_body(exc) from None


def generations(api: str, raw: bytes) -> list[GenerationRequest]:
    """All that is done with a body before an engine sees it. Raises LayaError."""
    read_routing(raw)
    if api == "tokenize":
        _prompt_of(decoded(_decode_text, raw))
        return []
    if api in LOCAL:
        request = decoded(LOCAL[api].decode, raw)
        made = LOCAL[api].generations_of(request, "r", "c", CARD)
        LOCAL[api].writer_of(request, "m", len(made), CARD)
        return [inquiry.first() for inquiry in made] if api == "systemone" else made
    request = decoded(TRANSLATED[api].decode, raw)
    kept = {id: b'{"type":"reasoning","summary":[]}' for id in TRANSLATED[api].references_of(request)}
    translation = TRANSLATED[api].translate(request, None, kept)
    translation.answer("m", None).head(0)
    json.loads(translation.form.encode("m", translation.stream))
    chat_request = translation.form.in_process()
    chat.parser_of(chat_request, CARD)
    return chat.generations_of(chat_request, "r", "c", CARD)


@pytest.mark.parametrize(("api", "body"), [(api, body) for api, bodies in BODIES.items() for body in bodies])
def test_a_member_gone_wrong_is_read_or_refused_by_name(api, body):
    """(cases 20-23, 27, 29-31, 80-84)"""
    for generation in generations(api, json.dumps({"model": "m", **body}).encode()):
        rendered(generation)
    for path, junk, made in mutations(body):
        try:
            for generation in generations(api, json.dumps({"model": "m", **made}).encode()):
                rendered(generation)
        except NotFound:
            assert api == "responses", path
        except LayaError as refused:
            assert refused.status in (400, 422), (path, junk, refused)
            named = refused.param or getattr(refused, "loc", None) is not None
            assert named or junk == "\ud83d", (path, junk, refused.message)
        except Exception as fault:
            raise AssertionError(f"{path} = {junk!r}: {fault!r}") from fault
