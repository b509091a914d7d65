"""The edges of OpenAI's API with the real model, through raw bytes and through the SDK, sync and async."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

HI = [{"role": "user", "content": "Count to five."}]


def chat(served, raw: bytes) -> tuple[int, dict]:
    status, body, _ = served.call("POST", "/v1/chat/completions", raw)
    return status, json.loads(body)


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "assistant",
    [
        {"content": None, "tool_calls": [CALL]}, {"content": "", "tool_calls": [CALL]}, {"tool_calls": [CALL]}, {}, {"content": None},
        {"content": []}, {"content": "x", "refusal": "no"}, {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": None, "tool_calls": []}, {"content": "x", "function_call": {"name": "f", "arguments": "{}"}, "name": "bot"},
        {"content": "x", "reasoning_content": "hm", "audio": None, "annotations": []},
    ],
)  # fmt: skip
def test_assistant_turns_of_every_shape_are_taken(served, assistant):
    """(cases 20, 22)"""
    messages = [*HI, {"role": "assistant", **assistant}, {"role": "tool", "tool_call_id": "call_1", "content": "1"}, *HI]
    status, body, _ = served.chat("smol", messages=messages, max_tokens=1)
    assert status == 200, body


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"), ({"role": "user", "content": {"a": 1}}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]},
         "messages[0].content[1].type"),
        ({"content": "x"}, "messages[0].role"), ({"role": None, "content": "x"}, "messages[0].role"),
        ({"role": "assistant", "content": None, "tool_calls": ["x"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"), ("x", "messages[0]"),
    ],
)  # fmt: skip
def test_messages_that_mean_nothing_are_400_and_named(served, message, param):
    """(cases 20, 21, 22)"""
    status, body, _ = served.chat("smol", messages=[message])
    assert status == 400 and body["error"]["param"] == param, body


@pytest.mark.parametrize(
    "call",
    [
        {}, {"function": None}, {"function": "f"}, {"function": {}}, {"function": {"name": 5, "arguments": 5}}, {"id": 7},
        {"function": {"name": "f", "arguments": "not json"}}, {"function": {"name": "f", "arguments": {"already": "an object"}}},
    ],
)  # fmt: skip
def test_odd_calls_in_the_history_are_never_a_fault_of_ours(served, call):
    """(case 20)"""
    status, body, _ = served.chat("smol", messages=[*HI, {"role": "assistant", "tool_calls": [call]}, *HI], max_tokens=1)
    assert status in (200, 400), body


def test_parts_are_joined_and_null_members_are_as_if_absent(served):
    """(cases 21, 25)"""
    parts = user([{"type": "text", "text": "Count "}, {"type": "text", "text": "to five."}])
    nulls = dict.fromkeys(("stop", "tools", "tool_choice", "n", "seed", "top_p", "logit_bias", "response_format", "stream_options", "user"))
    one, other = (served.chat("smol", messages=m, max_tokens=4, temperature=0, **kw)[1] for m, kw in ((HI, {}), (parts, nulls)))
    assert one["usage"] == {**other["usage"], "prompt_tokens_details": one["usage"]["prompt_tokens_details"]}
    assert one["choices"][0]["message"] == other["choices"][0]["message"]


def test_ten_thousand_messages_are_refused_for_their_length(served):
    """(case 22)"""
    status, body, _ = served.chat("smol", messages=[{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(10_000)])
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "raw",
    [
        rb'{"messages": [{"role": "user", "content": "x \ud83d"}]}', rb'{"messages": [{"role": "user", "content": "x"}], "stop": ["\ude00"]}',
        rb'{"model": "\ud800", "messages": [{"role": "user", "content": "x"}]}', rb'{"messages": [{"role": "user", "content": "x"}], "user": "\udfff"}',
        rb'{"messages": [{"role": "\ud83d", "content": "x"}]}', rb'{"\ud83d": 1, "messages": [{"role": "user", "content": "x"}]}',
        rb'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}], "stream": true}',
        rb'{"messages": [{"role": "user", "content": "x"}], "cache_salt": "\ud83d"}',
        rb'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"k": "\ud83d"}}',
    ],
)  # fmt: skip
def test_lone_surrogates_are_400_wherever_they_stand(served, raw):
    """(case 23)"""
    status, body = chat(served, raw)
    assert status == 400 and body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"null", b"[]", b'"x"', b"{", b'{"model": "smol"} x', b'{"model": "smol", "messages": [}', b"\xff\xfe{\0}\0",
        b'\xef\xbb\xbf{"model": "smol"}', b'{"model": "smol", "messages": [{"role": "user", "content": "\xff"}]}', b"model=smol&messages=x",
        b'{"model": "smol", "model": "smol", "messages": [{"role": "user", "content": "x"}]}', b'{"Model": "smol"}',
        b'{"model": "smol", "messages": ' + b"[" * 100_000, b'{"model": "smol", "messages": [{"role": "user", "content": "x"}], "n": 1e400}',
        b'{"model": "smol", "messages": [{"role": "user", "content": "x"}], "seed": 99999999999999999999999}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_request_are_400(served, raw):
    """(case 31)"""
    status, body = chat(served, raw)
    assert status == 400 and body["error"]["type"] == "invalid_request_error" and "Traceback" not in body["error"]["message"]


def test_overlapping_stop_strings_end_at_the_first_that_is_whole(served):
    """(case 25)"""
    kw = {"model": "smol", "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 24}

    def ask(**members) -> dict:
        return json.loads(served.call("POST", "/v1/completions", {**kw, **members})[1])["choices"][0]

    whole = ask()["text"]
    inner = whole[4:8]
    for stops in ([inner, inner + whole[8]], [whole[4:9], inner], [inner, "zzz", "q", "ww", "vv", "uu"]):
        choice = ask(stop=stops)
        assert choice["finish_reason"] == "stop" and choice["text"] == whole[: whole.index(inner)]
    assert ask(stop=inner)["text"] == ask(stop=[inner])["text"] and ask(stop=None)["text"] == ask(stop=[])["text"] == whole


def test_the_newer_limit_wins_and_one_token_is_a_length(served):
    """(case 27)"""
    for members in ({"max_completion_tokens": 1}, {"max_completion_tokens": 1, "max_tokens": 50}, {"max_tokens": 1}):
        _, body, _ = served.chat("smol", "Tell me a story.", **members)
        assert body["usage"]["completion_tokens"] == 1 and body["choices"][0]["finish_reason"] == "length"
    assert served.chat("smol", "hi", max_tokens=None, max_completion_tokens=2)[0] == 200
    assert served.chat("smol", "Say yes.", max_tokens=1_000_000_000, temperature=0)[0] == 200


def test_what_is_not_offered_is_said(served):
    """(case 30)"""
    for members, param in (({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"max_tokens": 0}, "max_tokens"),
                           ({"prompt": []}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": [[]]}, "prompt[0]"),
                           ({"prompt": [-1]}, "prompt"), ({"prompt": [10**9]}, "prompt[0]"), ({"logprobs": 99}, "logprobs"),
                           ({"prompt": [1, "a"]}, "prompt[0]")):  # fmt: skip
        status, raw, _ = served.call("POST", "/v1/completions", {"model": "smol", "prompt": "x", **members})
        assert status == 400 and json.loads(raw)["error"]["param"] == param, raw
    status, raw, _ = served.call("POST", "/v1/completions", {"model": "smol", "prompt": "", "max_tokens": 1})
    assert status == 200


def test_a_bias_decides_and_heat_of_any_degree_is_served(served):
    """(case 30)"""
    _, body, _ = served.chat("smol", "hi", max_tokens=3, temperature=0, logit_bias={"42": 100})
    word = json.loads(served.call("POST", "/detokenize", {"model": "smol", "tokens": [42, 42, 42]})[1])["prompt"]
    assert body["choices"][0]["message"]["content"] == word
    for heat in (0, 1e-9, 5, 1e308):
        assert served.chat("smol", "hi", max_tokens=2, temperature=heat, seed=1)[0] == 200


def test_members_that_strict_clients_want_are_there_as_null(served):
    """(case 33)"""
    choice = served.chat("smol", "hi", max_tokens=1)[1]["choices"][0]
    assert choice["logprobs"] is None and choice["message"]["refusal"] is None and choice["finish_reason"] == "length"
    raw = served.call("POST", "/v1/chat/completions", {"model": "smol", "messages": HI, "max_tokens": 2, "stream": True})[1]
    chunks = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
    assert all({"index", "delta", "logprobs", "finish_reason"} <= set(c["choices"][0]) for c in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_several_streamed_choices_end_once_and_count_the_prompt_once(served):
    """(cases 17, 30)"""
    body = {"model": "smol", "messages": HI, "max_tokens": 5, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    raw = served.call("POST", "/v1/chat/completions", body)[1].decode()
    chunks = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert raw.count("[DONE]") == 1 and raw.rstrip().endswith("data: [DONE]")
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2] and chunks[-1]["choices"] == [] and all(c["usage"] is None for c in chunks[:-1])
    alone = served.chat("smol", messages=HI, max_tokens=1)[1]["usage"]["prompt_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens"] == alone and chunks[-1]["usage"]["completion_tokens"] <= 15


def test_the_async_client_streams_side_by_side(served):
    async def work() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
            async def one() -> str:
                stream = await client.chat.completions.create(model="smol", messages=HI, temperature=0, max_tokens=8, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            plain = await client.chat.completions.create(model="smol", messages=HI, temperature=0, max_tokens=8)
            return [plain.choices[0].message.content, *await asyncio.gather(*(one() for _ in range(4)))]

    assert len(set(asyncio.run(work()))) == 1


def test_the_sdks_streaming_helper_builds_the_whole_answer(client):
    asked = {"model": "smol", "messages": user("What is the capital of France? Answer briefly."), "temperature": 0}
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    plain = client.chat.completions.create(**asked)
    assert final.choices[0].message.content == plain.choices[0].message.content and "content.delta" in kinds


def test_errors_reach_the_sdk_as_its_own_classes(client):
    """(case 26)"""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smol", messages=user("word " * 3000))
    assert caught.value.code == "context_length_exceeded" and "1024" in caught.value.message
    assert caught.value.param == "messages" and caught.value.request_id
