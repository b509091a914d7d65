"""/v1/messages over the real server and the `anthropic` SDK, translated for a backend that has only chat completions."""

from __future__ import annotations

import asyncio
import json

import anthropic
import pydantic
import pytest

from client_run import Call, Step
from scripted_upstream import SSE_HEAD, Close, Sleep, answer, chunked, completion, delta
from sdks import anthropic_client

HI = [{"role": "user", "content": "hi"}]
ADD = {"name": "add", "description": "Add.", "input_schema": {"$schema": "x", "type": "object", "properties": {"a": {"type": "integer"}}}}


def frames_of(laya, body: dict) -> list[tuple[str, dict]]:
    """(event, data) of a stream, read as bytes."""
    body = {"model": "m", "max_tokens": 100, "messages": HI, "stream": True, **body}
    status, raw, headers = laya.call("POST", "/v1/messages?beta=true", body, {"x-api-key": "key-one"})
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), raw
    frames = []
    for frame in raw.decode().strip().split("\n\n"):
        kind, data = frame.split("\n")
        frames.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert frames[-1][0] == frames[-1][1]["type"]
    return frames


def test_a_plain_answer(claude, backend):
    message = claude.messages.create(
        model="m", max_tokens=50, system="Be kind.", messages=HI, stop_sequences=["END"],
        extra_body={"temperature": 0.5, "top_k": 5},
    )  # fmt: skip
    assert message.content[0].text == "Hello there." and message.stop_reason == "end_turn" and message.role == "assistant"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (36, 64, 20)
    assert backend.asked == {
        "model": "m", "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}],
        "max_tokens": 50, "stop": ["END"], "temperature": 0.5, "top_k": 5,
    }  # fmt: skip


def test_a_stream_in_the_order_that_clients_need(translating, backend):
    kinds = [kind for kind, _ in frames_of(translating, {}) if kind != "ping"]
    assert kinds == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip


def test_the_sdk_streams_and_parses(claude, backend):
    class City(pydantic.BaseModel):
        name: str

    with claude.messages.stream(model="m", max_tokens=50, messages=HI) as stream:
        assert "".join(stream.text_stream).strip() == "Hello there."
        assert stream.get_final_message().usage.output_tokens == 20
    backend.play(Step('{"name":"Oslo"}'))
    assert claude.messages.parse(model="m", max_tokens=50, messages=HI, output_format=City).parsed_output == City(name="Oslo")
    assert backend.asked["response_format"]["json_schema"]["schema"]["properties"]["name"]


def test_the_async_sdk(translating, backend):
    async def ask() -> str:
        async with anthropic.AsyncAnthropic(base_url=translating.url, api_key="key-two", max_retries=0, timeout=30) as client:
            async with client.messages.stream(model="m", max_tokens=50, messages=HI) as stream:
                return (await stream.get_final_message()).content[0].text

    assert asyncio.run(ask()).strip() == "Hello there."


@pytest.mark.parametrize("streamed", [False, True])
def test_parallel_tool_calls(claude, translating, backend, streamed):
    """(case 29)"""
    backend.play(Step("I look.", (Call("c1", "add", {"a": 1}), Call("c2", "add", {"a": 2}))))
    given = {"model": "m", "max_tokens": 50, "messages": HI, "tools": [ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    if streamed:
        with claude.messages.stream(**given) as stream:
            message = stream.get_final_message()
    else:
        message = claude.messages.create(**given)
    text, one, two = message.content
    assert text.text.strip() == "I look." and message.stop_reason == "tool_use"
    assert (one.id, one.name, one.input, two.id, two.input) == ("c1", "add", {"a": 1}, "c2", {"a": 2})
    assert backend.asked["tool_choice"] == "required" and backend.asked["parallel_tool_calls"] is False
    function = backend.asked["tools"][0]["function"]
    assert function == {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def test_calls_whose_parts_are_mixed_come_out_one_after_the_other(claude, backend):
    def part(index: int, text: str, head: bool = False) -> bytes:
        call = {"index": index, "function": {"arguments": text}}
        if head:
            call |= {"id": f"c{index}", "function": {"name": f"f{index}", "arguments": text}}
        return chunked(b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}).encode() + b"\n\n")

    parts = [part(0, '{"a"', True), part(1, '{"b"', True), part(0, ":1}"), part(1, ":2}")]
    backend.upstream.script = lambda asked: [SSE_HEAD, *parts, chunked(delta(None, "tool_calls")), b"0\r\n\r\n"]
    with claude.messages.stream(model="m", max_tokens=50, messages=HI, tools=[ADD]) as stream:
        one, two = stream.get_final_message().content
    assert (one.name, one.input, two.name, two.input) == ("f0", {"a": 1}, "f1", {"b": 2})


def test_what_means_the_same_makes_the_same_prompt(claude, backend):
    def sent(**given) -> list:
        claude.messages.create(model="m", max_tokens=5, **given)
        return backend.asked["messages"]

    plain = sent(system="Be kind.", messages=HI)
    marked = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": "hi", **marked}]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}, {"type": "text", "text": "Be kind.", **marked}]
    assert sent(system=system, messages=[{"role": "user", "content": blocks}]) == plain
    late = {"role": "system", "content": "News."}
    assert sent(messages=[*HI, late]) == sent(messages=[*HI, {"role": "system", "content": [{"type": "text", "text": "News."}]}])
    assert backend.asked["messages"] == [{"role": "user", "content": "hi\n\n<system-reminder>\nNews.\n</system-reminder>"}]


def test_tool_results_thoughts_and_images_go_back(claude, backend):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    claude.messages.create(model="m", max_tokens=5, tools=[ADD], thinking={"type": "adaptive", "display": "omitted"}, messages=[
        *HI,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."}, {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "c2", "name": "add", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}, image]},
            {"type": "tool_result", "tool_use_id": "c2", "content": "bad", "is_error": True}, {"type": "text", "text": "go on"},
        ]},
    ])  # fmt: skip
    _, assistant, one, two, user = backend.asked["messages"]
    assert assistant["content"] == "I look." and assistant["reasoning_content"] == "Hm."
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == ['{"a":1}', "{}"]
    assert (one["tool_call_id"], one["content"], two["tool_call_id"]) == ("c1", "2", "c2") and "bad" in two["content"]
    assert user["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, {"type": "text", "text": "go on"},
    ]  # fmt: skip


def test_a_deferred_tool_is_shown_once_it_was_found(claude, backend):
    tools = [{**ADD, "defer_loading": True}, {**ADD, "name": "search"}, {"type": "web_search_20250305", "name": "web_search"}]
    claude.messages.create(model="m", max_tokens=5, messages=HI, tools=tools)
    assert [tool["function"]["name"] for tool in backend.asked["tools"]] == ["search"]
    found = [
        *HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "search", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "add"}]},
        ]},
    ]  # fmt: skip
    claude.messages.create(model="m", max_tokens=5, messages=found, tools=tools)
    assert [tool["function"]["name"] for tool in backend.asked["tools"]] == ["add", "search"]


@pytest.mark.parametrize(("thinking", "shown"), [(None, None), ({"type": "enabled", "budget_tokens": 1024}, "Hm."), ({"type": "adaptive", "display": "omitted"}, "")])
def test_thoughts_are_shown_to_those_who_asked_for_them(claude, backend, thinking, shown):
    thought = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"Hm."}}]}\n\n'
    backend.upstream.script = lambda asked: [SSE_HEAD, chunked(thought), chunked(delta("Yes.")), chunked(delta(None, "stop")), b"0\r\n\r\n"]
    given = {} if thinking is None else {"thinking": thinking}
    with claude.messages.stream(model="m", max_tokens=2000, messages=HI, **given) as stream:
        content = stream.get_final_message().content
    if shown is None:
        assert [block.type for block in content] == ["text"]
    else:
        assert content[0].thinking == shown and content[0].signature and content[1].text == "Yes."


@pytest.mark.parametrize(("reason", "told"), [("length", "max_tokens"), ("stop", "end_turn"), ("content_filter", "refusal")])
def test_stop_reasons(claude, backend, reason, told):
    backend.upstream.script = lambda asked: [answer({"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": reason}]})]
    assert claude.messages.create(model="m", max_tokens=5, messages=HI).stop_reason == told


def test_a_stop_sequence_is_named(claude, backend):
    choice = {"index": 0, "message": {"content": "x"}, "finish_reason": "stop", "stop_reason": "END"}
    backend.upstream.script = lambda asked: [answer({"choices": [choice]})]
    message = claude.messages.create(model="m", max_tokens=5, messages=HI, stop_sequences=["END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def test_a_backend_that_dies_in_its_stream_is_an_error_event(translating, claude, backend):
    """(case 13)"""
    backend.upstream.script = lambda asked: [SSE_HEAD, chunked(delta("half")), Sleep(0.1), Close()]
    frames = frames_of(translating, {})
    assert frames[-1][0] == "error" and frames[-1][1]["error"]["type"] == "api_error"
    assert "message_stop" not in [kind for kind, _ in frames] and "message_delta" not in [kind for kind, _ in frames]
    with pytest.raises(anthropic.APIStatusError), claude.messages.stream(model="m", max_tokens=5, messages=HI) as stream:
        stream.get_final_message()


def test_pings_while_the_backend_is_slow(translating, backend):
    backend.upstream.script = lambda asked: [SSE_HEAD, Sleep(6), chunked(delta("late")), chunked(delta(None, "stop")), b"0\r\n\r\n"]
    kinds = [kind for kind, _ in frames_of(translating, {})]
    assert kinds.count("ping") >= 2 and kinds[-1] == "message_stop"


def test_errors_have_the_form_and_the_words_that_clients_act_on(translating, claude, backend):
    with pytest.raises(anthropic.AuthenticationError) as caught:
        anthropic_client(translating, "wrong").messages.create(model="m", max_tokens=5, messages=HI)
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "authentication_error"
    long = {"error": {"message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4900 in the messages)"}}
    backend.upstream.script = lambda asked: [answer(long, "400 Bad Request")]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5000 tokens > 4096 maximum"):
        claude.messages.create(model="m", max_tokens=5, messages=HI)
    backend.upstream.script = lambda asked: [answer(b"{}", "503 Service Unavailable")]
    with pytest.raises(anthropic.APIStatusError) as overloaded:
        claude.messages.create(model="m", max_tokens=5, messages=HI)
    assert overloaded.value.status_code == 503 and overloaded.value.response.headers["retry-after"] == "1"
    assert overloaded.value.body["error"]["type"] == "overloaded_error"


def test_wrong_requests_name_the_member(translating, backend):
    """(cases 20-23)"""
    cases = [
        ({"messages": [{"role": "clown", "content": "x"}]}, "messages.0.role: "), ({"messages": []}, "messages: "),
        ({"messages": HI, "max_tokens": 0}, "max_tokens: "), ({"messages": HI, "temperature": "hot"}, "temperature: "),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text: "),
        ({"messages": HI, "tools": [ADD], "tool_choice": {"type": "tool", "name": "no"}}, "tool_choice.name: "),
        ({"messages": HI, "tool_choice": {"type": "any"}}, "tool_choice: "),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.source: "),
    ]  # fmt: skip
    for body, start in cases:
        status, raw, _ = translating.call("POST", "/v1/messages", {"model": "m", "max_tokens": 5, **body}, {"x-api-key": "key-one"})
        error = json.loads(raw)["error"]
        assert status == 400 and error["message"].startswith(start), (body, error)
    status, raw, _ = translating.call("POST", "/v1/messages", {"model": "m", "messages": HI}, {"x-api-key": "key-one"})
    assert status == 400 and "max_tokens" in json.loads(raw)["error"]["message"]


@pytest.mark.parametrize(
    "message",
    [
        "`max_tokens` must be at most 4096",
        "This model's maximum context length is 4096 tokens. However, you requested 8010 tokens (10 in the messages, 8000 in the "
        "completion).",
    ],
)
def test_a_limit_that_the_backend_finds_too_high_is_left_away(claude, backend, message):
    """(case 26)"""
    refused = {"error": {"message": message}}
    backend.upstream.script = lambda asked: [
        answer(refused, "400 Bad Request") if "max_tokens" in asked.json() else answer(completion("fits"))
    ]
    assert claude.messages.create(model="m", max_tokens=8000, messages=HI).content[0].text == "fits"


def test_a_large_request_is_worked_on_beside_the_loop(claude, backend, translating):
    text = "many words " * 200_000
    assert claude.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": text}]).content[0].text
    assert backend.asked["messages"] == [{"role": "user", "content": text}] and backend.asked["model"] == "m"
    assert claude.messages.count_tokens(model="m", messages=[{"role": "user", "content": text}]).input_tokens > 400_000


def test_counting_where_nobody_can_count_is_marked_as_an_estimate(translating, claude, backend):
    assert claude.messages.count_tokens(model="m", system="Be kind. " * 50, messages=HI, tools=[ADD]).input_tokens > 100
    body = {"model": "m", "messages": HI}
    headers = translating.call("POST", "/v1/messages/count_tokens?beta=true", body, {"x-api-key": "key-one"})[2]
    assert headers["x-laya-estimate"] == "tokens"
