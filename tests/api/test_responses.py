"""/v1/responses over the real server and the `openai` SDK, translated for a backend that has only chat completions."""

from __future__ import annotations

import asyncio
import json

import openai
import pydantic
import pytest

from client_run import Call, Step
from scripted_upstream import SSE_HEAD, Close, Reset, Sleep, answer, chunked, completion, delta
from sdks import openai_client

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": False}


def events_of(laya, body: dict, key: str = "key-one") -> list[dict]:
    """The events of a stream, read as bytes; each `event:` line says what its data's type says."""
    status, raw, headers = laya.call("POST", "/v1/responses", {"model": "m", "stream": True, **body}, {"authorization": f"Bearer {key}"})
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), raw
    events = []
    for frame in raw.decode().strip().split("\n\n"):
        kind, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_plain_answer(gpt, backend):
    response = gpt.responses.create(model="m", input="hi", instructions="Be kind.", max_output_tokens=50, temperature=0.5)
    assert response.output_text == "Hello there." and response.status == "completed" and response.model == "m"
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (100, 20, 120)
    assert response.usage.input_tokens_details.cached_tokens == 64
    assert backend.asked == {
        "model": "m", "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}],
        "temperature": 0.5, "max_tokens": 50,
    }  # fmt: skip


def test_a_stream_has_every_event_once_and_in_order(translating, backend):
    """(case 15) The last event is response.completed, and the item that enters the history is whole."""
    events = events_of(translating, {"input": "hi"})
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    item = events[-2]["item"]
    assert item["content"] == [{"type": "output_text", "text": "Hello there. ", "annotations": [], "logprobs": []}]
    assert item["status"] == "completed" and events[-1]["response"]["output"] == [item]
    assert backend.asked["stream_options"] == {"include_usage": True}
    assert events[-1]["response"]["usage"]["total_tokens"] == 120


def test_the_sdk_helper_streams_and_parses(gpt, backend):
    class City(pydantic.BaseModel):
        name: str

    backend.play(Step('{"name":"Oslo"}'))
    assert gpt.responses.parse(model="m", input="hi", text_format=City).output_parsed == City(name="Oslo")
    form = backend.asked["response_format"]
    assert form["type"] == "json_schema" and form["json_schema"]["strict"] is True and "name" in form["json_schema"]["schema"]["properties"]
    with gpt.responses.stream(model="m", input="hi", text_format=City) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == City(name="Oslo") and kinds[-1] == "response.completed"


def test_the_async_sdk(translating, backend):
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{translating.url}/v1", api_key="key-two", max_retries=0, timeout=30) as client:
            text = ""
            async for event in await client.responses.create(model="m", input="hi", stream=True):
                text += event.delta if event.type == "response.output_text.delta" else ""
            return text

    assert asyncio.run(ask()).strip() == "Hello there."


def test_parallel_calls_of_functions_namespaces_and_custom_tools(gpt, translating, backend):
    """(case 29) Each with an id and its own place; a call is done only when the step has ended."""
    tools = [
        ADD, {"type": "web_search"}, {"type": "custom", "name": "patch", "description": "Apply a patch."},
        {"type": "namespace", "name": "mcp__calc", "tools": [{"type": "function", "name": "add", "parameters": {}}]},
        {"type": "tool_search", "execution": "client"},
    ]  # fmt: skip
    steps = Step("I look.", (
        Call("call_1", "add", {"a": 1}), Call("call_2", "mcp__calc__add", {}), Call("call_3", "patch", {"input": "*** Begin"}),
    ))  # fmt: skip
    backend.play(steps)
    response = gpt.responses.create(model="m", input="go", tools=tools)
    assert [tool["function"]["name"] for tool in backend.asked["tools"]] == ["add", "patch", "mcp__calc__add"]
    text, one, two, three = response.output
    assert text.content[0].text == "I look." and len({item.id for item in response.output}) == 4
    assert (one.type, one.name, one.call_id, one.arguments) == ("function_call", "add", "call_1", '{"a": 1}')
    assert (two.name, two.namespace, two.call_id, two.arguments) == ("add", "mcp__calc", "call_2", "{}")
    assert (three.type, three.name, three.input) == ("custom_tool_call", "patch", "*** Begin")
    backend.play(steps)
    events = events_of(translating, {"input": "go", "tools": tools})
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call", "function_call", "custom_tool_call"]
    assert done[1]["arguments"] == '{"a": 1}' and done[2]["namespace"] == "mcp__calc"
    kinds = [event["type"] for event in events]
    assert kinds[-1] == "response.completed" and kinds.count("response.function_call_arguments.done") == 2
    deltas = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta" and e["item_id"] == done[1]["id"]]
    assert "".join(deltas) == '{"a": 1}'


def test_the_results_of_calls_go_back_as_tool_messages(gpt, backend):
    gpt.responses.create(model="m", input=[
        {"role": "developer", "content": "A"}, {"role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "namespace": "mcp__calc", "arguments": '{"a":1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "*** Begin"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "fine"},
        {"type": "an_item_of_next_year", "x": 1},
    ])  # fmt: skip
    assert backend.asked["messages"] == [
        {"role": "system", "content": "A\n\nB"}, {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "mcp__calc__add", "arguments": '{"a":1}'}},
            {"id": "c2", "type": "function", "function": {"name": "patch", "arguments": '{"input":"*** Begin"}'}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"}, {"role": "tool", "tool_call_id": "c2", "content": "fine"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("required", "required"), ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, "auto"),
    ],
)  # fmt: skip
def test_tool_choice_in_chat_words(gpt, backend, given, sent):
    other = {**ADD, "name": "other"}
    gpt.responses.create(model="m", input="go", tools=[ADD, other], tool_choice=given, parallel_tool_calls=False)
    assert backend.asked["tool_choice"] == sent and backend.asked["parallel_tool_calls"] is False
    allowed = isinstance(given, dict) and given["type"] == "allowed_tools"
    assert [tool["function"]["name"] for tool in backend.asked["tools"]] == (["add"] if allowed else ["add", "other"])


def test_the_answer_that_reached_its_limit_is_incomplete(translating, backend, gpt):
    """(case 15)"""
    backend.upstream.script = lambda asked: [SSE_HEAD, chunked(delta("half")), chunked(delta(None, "length")), chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"]
    last = events_of(translating, {"input": "hi"})[-1]
    assert last["type"] == "response.incomplete" and last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["usage"] is None, "nothing is invented where the backend told nothing"


def test_a_call_that_was_cut_never_enters_the_history(translating, backend):
    part = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c","function":{"name":"add","arguments":"{\\"a"}}]}}]}\n\n'
    backend.upstream.script = lambda asked: [SSE_HEAD, chunked(part), chunked(delta(None, "length")), chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"]
    events = events_of(translating, {"input": "hi", "tools": [ADD]})
    assert not [event for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("end", [[Close()], [Reset()], [b"0\r\n\r\n"]], ids=["fin", "reset", "clean end without a reason"])
def test_a_backend_that_dies_in_its_stream_ends_in_response_failed(translating, backend, end):
    """(cases 13, 15) No call that was under way is told as done."""
    call = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c","function":{"name":"add","arguments":"{}"}}]}}]}\n\n'
    backend.upstream.script = lambda asked: [SSE_HEAD, chunked(delta("half")), chunked(call), Sleep(0.1), *end]
    events = events_of(translating, {"input": "hi", "tools": [ADD]})
    assert [event["type"] for event in events].count("response.failed") == 1 and events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error" and events[-1]["response"]["id"] == events[0]["response"]["id"]
    assert [e["item"]["type"] for e in events if e["type"] == "response.output_item.done"] == ["message"]
    assert translating.metric("laya_requests_total", api="responses", outcome="upstream_error") >= 1


def test_an_error_told_inside_the_stream(translating, backend):
    frame = b'data: {"error":{"message":"This model\'s maximum context length is 10 tokens","code":"context_length_exceeded"}}\n\n'
    backend.upstream.script = lambda asked: [SSE_HEAD, chunked(frame), b"0\r\n\r\n"]
    last = events_of(translating, {"input": "hi"})[-1]
    assert last["type"] == "response.failed" and last["response"]["error"]["code"] == "context_length_exceeded"


def test_errors_keep_their_status_and_words(gpt, backend):
    body = {"error": {"message": "Too much of it.", "type": "invalid_request_error", "code": "weird", "param": None}}
    backend.upstream.script = lambda asked: [answer(body, "400 Bad Request")]
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model="m", input="hi")
    assert caught.value.code == "weird" and "Too much of it." in caught.value.message
    backend.upstream.script = lambda asked: [answer(b"busy", "429 Too Many Requests", "retry-after: 7\r\n")]
    with pytest.raises(openai.RateLimitError) as limited:
        gpt.responses.create(model="m", input="hi")
    assert limited.value.response.headers["retry-after"] == "7"


def test_a_limit_that_the_backend_finds_too_high_is_left_away(gpt, backend):
    """(case 26) What then limits the answer is the room left, which is less."""
    refused = {"error": {"message": "max_tokens is too large: 99999. The model supports at most 4096", "code": None}}
    backend.upstream.script = lambda asked: [
        answer(refused, "400 Bad Request") if "max_tokens" in asked.json() else answer(completion("fits"))
    ]
    assert gpt.responses.create(model="m", input="hi", max_output_tokens=99999).output_text == "fits"


def test_signs_of_life_while_the_backend_is_slow(translating, backend):
    """A repeated response.in_progress: one client does not count comments."""
    backend.upstream.script = lambda asked: [SSE_HEAD, Sleep(6), chunked(delta("late")), chunked(delta(None, "stop")), b"0\r\n\r\n"]
    kinds = [event["type"] for event in events_of(translating, {"input": "hi"})]
    assert kinds.count("response.in_progress") >= 2 and kinds[-1] == "response.completed"


def test_wrong_requests_name_the_member(translating, backend):
    """(cases 20-23)"""
    cases = [
        ({"input": [{"role": "clown", "content": "x"}]}, "input[0].role"), ({"input": 7}, "input"), ({}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": "x", "temperature": "hot"}, "temperature"), ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tools": [ADD], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
    ]  # fmt: skip
    for body, param in cases:
        status, raw, _ = translating.call("POST", "/v1/responses", {"model": "m", **body}, {"authorization": "Bearer key-one"})
        error = json.loads(raw)["error"]
        assert (status, error["param"]) == (400, param), (body, error)


def test_a_backend_without_chat_cannot_be_translated_for(gpt, backend):
    with pytest.raises(openai.BadRequestError, match="chatless"):
        gpt.responses.create(model="nothing", input="hi")


def test_a_websocket_is_told_to_come_back_with_a_post(translating):
    headers = {"authorization": "Bearer key-one", "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    assert translating.call("GET", "/v1/responses", headers=headers)[0] == 426
    assert translating.call("GET", "/v1/responses", headers={"authorization": "Bearer key-one"})[0] == 405


def test_ids_are_unique_for_ever(gpt, backend):
    """Across answers, and unlike those of a server started before."""
    ids = {gpt.responses.create(model="m", input="hi").id for _ in range(5)}
    assert len(ids) == 5 and all(len(id) > 20 for id in ids)


def test_counting_where_nobody_can_count_is_marked_as_an_estimate(translating, backend):
    body = {"model": "m", "input": "words " * 100}
    status, raw, headers = translating.call("POST", "/v1/responses/input_tokens", body, {"authorization": "Bearer key-one"})
    assert status == 200 and json.loads(raw)["object"] == "response.input_tokens" and headers["x-laya-estimate"] == "tokens"
    assert 100 < json.loads(raw)["input_tokens"] < 400
    assert openai_client(translating).responses.input_tokens.count(model="m", input="hi").input_tokens > 0
