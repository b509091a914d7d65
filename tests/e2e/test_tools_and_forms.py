"""Tool calls and structured output with the real model, through the `openai` SDK."""

from __future__ import annotations

import json
import threading

import openai
import pytest
from pydantic import BaseModel

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "The weather of a city.",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city", "unit"], "additionalProperties": False, "$defs": {"unit": {"enum": ["C", "F"]}},
        },
    },
}  # fmt: skip
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
PERSON = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 20000000000}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


def form(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


class Person(BaseModel):
    name: str
    age: int


def test_a_named_tool_is_called_with_arguments_of_its_schema(client):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    done = client.chat.completions.create(model="smol", messages=ASK, tools=[CLOCK, WEATHER], tool_choice=choice, temperature=0)
    message = done.choices[0].message
    assert done.choices[0].finish_reason == "tool_calls" and message.content is None
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and call.id and call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("C", "F")


def test_a_required_call_is_streamed_in_deltas(client):
    """(case 29) Index and id and name in the first delta, arguments after it; the parts joined are the plain answer."""
    kw = {"model": "smol", "messages": ASK, "tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    plain = client.chat.completions.create(**kw).choices[0].message.tool_calls[0]
    chunks = list(client.chat.completions.create(**kw, stream=True))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].index == 0 and calls[0].id and calls[0].function.name == "get_weather" and calls[0].function.arguments == ""
    assert all(c.id is None and c.function.name is None for c in calls[1:])
    assert "".join(c.function.arguments for c in calls) == plain.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls" and calls[0].id != plain.id
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_several_calls_have_indices_of_their_own(client):
    """(case 29)"""
    done = client.chat.completions.create(
        model="smol", messages=ASK, tools=[CLOCK], tool_choice="required", parallel_tool_calls=True, seed=1, max_tokens=200,
        logit_bias={"2": -100}, stream=True,
    )  # fmt: skip
    starts = [c for chunk in done for c in chunk.choices[0].delta.tool_calls or () if c.id]
    assert [c.index for c in starts] == list(range(len(starts))) and len(starts) > 1
    assert len({c.id for c in starts}) == len(starts)


def test_the_conversation_goes_on_after_a_call(client):
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "C"}'}}
    messages = [
        *ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 C"},
    ]  # fmt: skip
    done = client.chat.completions.create(model="smol", messages=messages, tools=[WEATHER], max_tokens=12, temperature=0)
    shorter = client.chat.completions.create(model="smol", messages=messages[:1], tools=[WEATHER], max_tokens=1)
    assert done.usage.prompt_tokens > shorter.usage.prompt_tokens + 20
    hidden = client.chat.completions.create(model="smol", messages=ASK, tools=[WEATHER], tool_choice="none", max_tokens=1)
    assert hidden.usage.prompt_tokens < shorter.usage.prompt_tokens


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}], "tool_choice": "required"}, "tools"),
        ({"tools": "x"}, "tools"), ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "\ud83d"}}]}, None),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": form("x")}, "response_format.json_schema.schema"),
        ({"response_format": form({"type": "foo"})}, "response_format"),
        ({"response_format": form({"type": "object", "properties": {"a": "bar"}})}, "response_format"),
        ({"structured_outputs": {"regex": "(foo"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: <<<"}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_a_bad_form_is_that_clients_400_and_the_engine_lives_on(served, members, param):
    """(cases 23, 32)"""
    status, body, _ = served.chat("smol", "hi", max_tokens=4, **members)
    assert status == 400 and body["error"]["type"] == "invalid_request_error", body
    if param is not None:
        assert body["error"]["param"] == param
    assert served.chat("smol", "hi", max_tokens=1)[0] == 200


def test_a_schema_binds_the_answer_streamed_and_not(client):
    """(case 32) `maximum: 20000000000` among it."""
    kw = {"model": "smol", "messages": [{"role": "user", "content": "Invent a person."}], "response_format": form(PERSON)}
    plain = client.chat.completions.create(**kw, temperature=0)
    value = json.loads(plain.choices[0].message.content)
    assert set(value) == {"name", "age"} and isinstance(value["age"], int) and plain.choices[0].finish_reason == "stop"
    streamed = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**kw, temperature=0, stream=True))
    assert streamed == plain.choices[0].message.content
    for choice in client.chat.completions.create(**kw, temperature=2, n=3, seed=5).choices:
        assert set(json.loads(choice.message.content)) == {"name", "age"}


def test_json_object_is_json(client):
    done = client.chat.completions.create(
        model="smol", messages=[{"role": "user", "content": "JSON please."}], response_format={"type": "json_object"},
        temperature=0, max_tokens=200, extra_body={"min_tokens": 0},
    )  # fmt: skip
    if done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(done.choices[0].message.content), dict)
    assert done.choices[0].message.content.startswith("{")


def test_a_regex_and_a_choice_bind_completions_too(client):
    for outputs, allowed in (({"regex": "[0-9]{3}-[0-9]{2}"}, None), ({"choice": ["yes (a)", "no [b]"]}, {"yes (a)", "no [b]"})):
        text = client.completions.create(
            model="smol", prompt="Answer:", max_tokens=20, temperature=1, seed=3, extra_body={"structured_outputs": outputs}
        ).choices[0].text  # fmt: skip
        assert text in allowed if allowed else (len(text) == 6 and text[3] == "-")


def test_a_schema_binds_completions_too(client):
    """As vLLM has it; a form that was asked for is never passed over in silence."""
    text = client.completions.create(
        model="smol", prompt="A person:", max_tokens=60, temperature=0, extra_body={"response_format": form(PERSON)}
    ).choices[0].text  # fmt: skip
    assert set(json.loads(text)) == {"name", "age"}


def test_settings_against_a_form_never_break_the_request(client):
    """(case 32) The form wins over a minimum of tokens, stop ids and biases."""
    kw = {"model": "smol", "messages": ASK, "response_format": form(PERSON), "temperature": 0, "max_tokens": 120}
    for extra in ({"min_tokens": 100}, {"stop_token_ids": [2], "min_tokens": 3}, {"logit_bias": {"2": -100}}, {"ignore_eos": True}):
        done = client.chat.completions.create(**kw, extra_body=extra).choices[0]
        assert set(json.loads(done.message.content)) == {"name", "age"}


def test_the_sdks_parse_helper_works(client):
    done = client.chat.completions.parse(
        model="smol", messages=[{"role": "user", "content": "Bob is 42."}], response_format=Person, temperature=0, max_tokens=60
    )  # fmt: skip
    assert isinstance(done.choices[0].message.parsed, Person)
    tool = openai.pydantic_function_tool(Person)
    called = client.chat.completions.parse(
        model="smol", messages=[{"role": "user", "content": "Bob is 42."}], tools=[tool], tool_choice="required", temperature=0,
        max_tokens=80,
    )  # fmt: skip
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Person)


def test_a_grammar_of_one_request_does_not_touch_its_neighbours(client):
    alone = client.chat.completions.create(model="smol", messages=ASK, temperature=0, max_tokens=24).choices[0].message.content
    other = threading.Thread(target=lambda: client.chat.completions.create(
        model="smol", messages=ASK, response_format=form(PERSON), temperature=0, max_tokens=30
    ))  # fmt: skip
    other.start()
    assert client.chat.completions.create(model="smol", messages=ASK, temperature=0, max_tokens=24).choices[0].message.content == alone
    other.join()
