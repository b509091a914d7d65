"""The result cache's rules without a server: which requests are the same, which answers are kept, how they are told again."""

from __future__ import annotations

import json
import time

import pytest

from laya.gateway.flight import events_of
from laya.routing.sessions.hot import HotTable
from laya.stages.cache import ENTRY_BYTES, Kept, ResultCache
from laya.stages.cache_key import FOREVER, LARGE, PASSED_OVER, Question, read_control, read_question
from laya.stages.replay import from_plain, from_stream, told_as_stream

CHAT = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "hi"}]}
SCOPE = ("", "/v1/chat/completions", "", "up", "m")


def question(body: dict | bytes = CHAT, api: str = "chat", scope=SCOPE, control=None, any_temperature=False):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_question(data, api, scope, control, any_temperature)


def completion(choices: list, **members) -> bytes:
    return json.dumps({"id": "c1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, **members}).encode()


def choice(text: str | None = "hello", reason: str = "stop", index: int = 0, **message) -> dict:
    message = {"role": "assistant", "content": text, "refusal": None, **message}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}


@pytest.mark.parametrize(
    "member",
    [
        {"num_ctx": 4096}, {"reasoning_effort": "low"}, {"logit_bias": {"5": -1}}, {"seed": 7}, {"parallel_tool_calls": False},
        {"foo": 1}, {"n": 2}, {"top_p": 0.5}, {"response_format": {"type": "json_object"}}, {"stop": ["x"]}, {"max_tokens": 5},
        {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"temperature": 0.0},
    ],
    ids=lambda member: next(iter(member)),
)  # fmt: skip
def test_every_member_that_may_change_an_answer_keeps_questions_apart(member):
    """Known members and one that nobody knows (case 59); 0.0 is another body than 0, and costs a miss at worst."""
    assert question({**CHAT, **member}).key != question().key


def test_who_asks_and_in_which_form_is_no_part_of_the_question():
    """(case 59)"""
    assert {"stream", "stream_options", "user", "metadata"} <= PASSED_OVER
    other = {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "user": "u", "metadata": {"a": "b"}}
    assert question(other).key == question().key
    spaced = b'{ "messages" : [{"role": "user", "content": "hi"}],\n "temperature": 0, "model": "m"}'
    assert question(spaced).key == question().key


def test_what_the_model_sees_in_another_order_is_another_question():
    tools = [{"name": "a"}, {"name": "b"}]
    assert question({**CHAT, "tools": tools}).key != question({**CHAT, "tools": tools[::-1]}).key


@pytest.mark.parametrize("place", range(len(SCOPE)))
def test_key_name_path_target_and_model_keep_questions_apart(place):
    """The tenant and the resolved target belong to the key (case 59)."""
    other = [*SCOPE[:place], "other", *SCOPE[place + 1 :]]
    assert question(scope=tuple(other)).key != question().key


def test_scopes_cannot_be_confused_by_what_is_written_in_them():
    assert question(scope=("a", "b", "", "", "")).key != question(scope=("a,b", "", "", "", "")).key


def test_a_member_given_twice_is_sent_as_the_key_saw_it():
    """Parsers disagree on repeated members: an answer to the first must not be kept for the second."""
    twice = b'{"model":"m","temperature":0,"messages":[{"role":"user","content":"A","content":"B"}]}'
    read = question(twice)
    assert json.loads(read.body)["messages"][0] == {"role": "user", "content": "B"} and b'"A"' not in read.body


@pytest.mark.parametrize(
    ("members", "taken"),
    [
        ({"temperature": 0}, True), ({"temperature": 0.0}, True), ({"temperature": 1, "seed": 3}, True), ({}, False),
        ({"temperature": 0.1}, False), ({"temperature": "0"}, False), ({"seed": None}, False), ({"temperature": None}, False),
        ({"temperature": False}, False),
    ],
)  # fmt: skip
def test_only_deterministic_requests_are_taken_unless_opted_in(members, taken):
    """(case 60)"""
    body = {"model": "m", "messages": [], **members}
    assert (question(body) is not None) is taken
    assert question(body, any_temperature=True) is not None


@pytest.mark.parametrize("api", ["responses", "messages", "audio", "images", "tokenize"])
def test_apis_that_the_cache_passes_by(api):
    """/v1/responses among them (case 61)."""
    assert question(api=api, any_temperature=True) is None


def test_apis_without_sampling_are_always_taken():
    assert question({"model": "e", "input": ["a"]}, api="embeddings") is not None


@pytest.mark.parametrize("body", [b"[]", b"{", b"", b'{"a":1e999}', b'{"a":"\xff"}', b"[" * 5000])
def test_what_is_no_json_object_passes_by(body):
    assert question(body, any_temperature=True) is None


@pytest.mark.parametrize(
    ("value", "age"),
    [
        (b"no-store", None), (b"no-cache", 0), (b"max-age=0", 0), (b"max-age=60", 60), (b"private", FOREVER),
        (b"max-age=60, No-Store", None), (b"max-age=60, no-cache", 0), (b"max-age=x", FOREVER), (b"max-age=-1", FOREVER),
    ],
)  # fmt: skip
def test_cache_control_of_a_request(value, age):
    assert read_control(value) == age


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (completion([choice()]), True), (completion([choice(reason="length")]), False), (completion([choice(reason="abort")]), False),
        (completion([choice(reason=None)]), False), (completion([]), False), (b'{"error":{"message":"x"}}', False),
        (b"not json", False), (completion([choice(), choice(reason="length", index=1)]), False),
        (completion([choice(reason="tool_calls")]), True), (completion([{"index": 0, "message": "odd", "finish_reason": "stop"}]), False),
        (completion([choice(reason="content_filter")]), False), (b'{"choices":[5]}', False),
    ],
)  # fmt: skip
def test_only_answers_that_ended_by_themselves_are_kept(body, kept):
    """Errors and cut answers are not (case 60)."""
    assert (from_plain("chat", body, question()) is not None) is kept


def test_an_answer_at_the_limit_that_the_request_set_is_whole():
    body = completion([choice(reason="length")], usage={"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6})
    assert from_plain("chat", body, question({**CHAT, "max_tokens": 5})) is not None
    assert from_plain("chat", body, question({**CHAT, "max_tokens": 6})) is None


def frames(*choices: dict, **members) -> list[bytes]:
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", **members}
    return [json.dumps({**head, "choices": [c]}).encode() for c in choices]


def test_a_stream_becomes_the_plain_answer_it_stands_for():
    deltas = [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 0, "delta": {"reasoning_content": "th"}},
        {"index": 0, "delta": {"reasoning_content": "ink"}},
        {"index": 0, "delta": {"content": "he"}, "logprobs": {"content": [{"token": "he", "logprob": -1}]}},
        {"index": 1, "delta": {"content": "other"}},
        {"index": 0, "delta": {"content": "llo"}, "logprobs": {"content": [{"token": "llo", "logprob": -2}]}},
        {"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}]}},
        {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}},
        {"index": 0, "delta": {"tool_calls": [{"index": 1, "id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}}]}},
        {"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}},
        {"index": 0, "delta": {}, "finish_reason": "tool_calls"},
        {"index": 1, "delta": {}, "finish_reason": "stop"},
    ]  # fmt: skip
    usage = json.dumps({"id": "c1", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}).encode()
    body, counted = from_stream("chat", [*frames(*deltas), usage, b"[DONE]"], None, question())
    answer = json.loads(body)
    first, second = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["id"] == "c1" and counted and answer["usage"]["total_tokens"] == 3
    assert first["message"]["content"] == "hello" and first["message"]["reasoning_content"] == "think"
    assert [entry["token"] for entry in first["logprobs"]["content"]] == ["he", "llo"]
    assert first["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert second["message"]["content"] == "other" and second["finish_reason"] == "stop" and second["message"]["refusal"] is None


@pytest.mark.parametrize("with_usage", [False, True])
def test_plain_to_stream_and_back_loses_nothing(with_usage):
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    usage = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 2}}
    body = completion([choice("你好"), choice(None, "tool_calls", 1, tool_calls=[call])], usage=usage, system_fingerprint="fp")
    told = told_as_stream("chat", body, with_usage)
    events = events_of(told)
    assert events[-1] == b"[DONE]" and told.endswith(b"data: [DONE]\n\n")
    chunks = [json.loads(event) for event in events[:-1]]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["id"] == "c1" for chunk in chunks)
    assert [("usage" in chunk) for chunk in chunks] == [with_usage] * len(chunks)
    back, counted = from_stream("chat", events, None if with_usage else (4, 5), question())
    again, before = json.loads(back), json.loads(body)
    assert counted and again["choices"] == before["choices"]
    assert {k: v for k, v in again.items() if k != "usage"} == {k: v for k, v in before.items() if k != "usage"}


def test_answers_with_numbers_of_any_size_are_kept_and_told_in_both_forms():
    """(case 31)"""
    body = completion([choice("a")], x=10**40)
    assert from_plain("chat", body, question()) == body
    events = events_of(told_as_stream("chat", body, False))
    assert json.loads(events[0])["x"] == 10**40 and json.loads(from_stream("chat", events, None, question())[0])["x"] == 10**40


def test_long_texts_and_tool_arguments_are_told_in_events_that_everybody_reads():
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "\u1234" * size})}}
             for n, size in ((1, 200_000), (2, 10), (3, 70_000))]  # fmt: skip
    body = completion([choice("é" * 150_000, "tool_calls", tool_calls=calls, reasoning_content="r" * 70_000)])
    told = told_as_stream("chat", body, False)
    assert max(map(len, events_of(told))) < 512 * 1024
    back, _ = from_stream("chat", events_of(told), (4, 5), question())
    assert json.loads(back)["choices"] == json.loads(body)["choices"]


def test_a_long_stream_is_joined_in_time_with_its_length():
    """A quarter of a million pieces: with the square of it this would take minutes."""
    deltas = [{"index": 0, "delta": {"content": "word "}} for _ in range(250_000)]
    events = [*frames(*deltas, {"index": 0, "delta": {}, "finish_reason": "stop"}), b"[DONE]"]
    began = time.monotonic()
    body, _ = from_stream("chat", events, (1, 2), question())
    assert json.loads(body)["choices"][0]["message"]["content"] == "word " * 250_000
    assert time.monotonic() - began < 60


LONG = {**CHAT, "messages": [{"role": "user", "content": "x" * LARGE}]}


@pytest.mark.parametrize("change", [
    {"temperature": 0, "seed": 1}, {"max_tokens": 5}, {"messages": [{"role": "user", "content": "x" * LARGE + "y"}]}, {"num_ctx": 1},
])  # fmt: skip
def test_large_questions_are_kept_apart_and_told_apart_from_their_form_as_small_ones_are(change):
    asked = question(LONG)
    assert question({**LONG, **change}).key != asked.key
    assert question(dict(reversed(LONG.items()))).key == asked.key
    again = question({**LONG, "stream": True, "stream_options": {"include_usage": True}, "user": "u", "metadata": {"a": 1}})
    assert again.key == asked.key and (again.stream, again.wants_count) == (True, True)
    assert question(LONG, scope=("other", *SCOPE[1:])).key != asked.key


def test_large_questions_that_are_sampled_or_ambiguous_pass_by():
    text = json.dumps(LONG)
    assert question({**LONG, "temperature": 1}) is None and question({**LONG, "temperature": 1}, any_temperature=True) is not None
    assert question(f'{text[:-1]}, "seed": 7}}'.encode()) is not None
    assert question(f'{text[:-1]}, "model": "again"}}'.encode()) is None
    assert question(f"{text[:-1]},}}".encode()) is None


def test_completions_are_told_in_both_forms():
    text = {"id": "t", "object": "text_completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}]}  # fmt: skip
    body = json.dumps(text).encode()
    assert from_plain("completions", body, question()) == body
    back, counted = from_stream("completions", events_of(told_as_stream("completions", body, False)), None, question())
    assert json.loads(back) == text and not counted


@pytest.mark.parametrize(
    "events",
    [
        [], [b"[DONE]"], frames(choice()), [*frames({"index": 0, "delta": {"content": "x"}}), b"[DONE]"],
        [b'{"error":{"message":"x"}}', b"[DONE]"], [b"nonsense", b"[DONE]"], [b'{"choices":[1]}', b"[DONE]"],
        [b'{"choices":{"a":1}}', b"[DONE]"],
        [*frames({"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}), *frames({"index": 0, "delta": {}})],
    ],
)  # fmt: skip
def test_a_stream_that_is_cut_or_odd_is_not_kept(events):
    """(case 60)"""
    assert from_stream("chat", events, None, question()) is None


# -- the store ---------------------------------------------------------------------------------------------------------


def cache(max_bytes: int = 1 << 20, ttl_s: float = 60) -> ResultCache:
    return ResultCache(HotTable(max_bytes), max_bytes=max_bytes, ttl_s=ttl_s)


def named(number: int, **members) -> Question:
    return Question(key=b"%d" % number, body=b"", stream=False, wants_count=True, limit=None, **members)


def test_an_answer_is_found_until_it_is_too_old_for_the_cache_or_the_asker():
    store = cache(ttl_s=60)
    store.keep(named(1), Kept(b"a", True), now=100)
    assert store.find(named(1), 159).body == b"a"
    assert store.find(named(1), 160) is None
    assert store.find(named(1, max_age=30), 131) is None and store.find(named(1, max_age=30), 129).body == b"a"
    assert store.find(named(1, max_age=0), 100) is None


def test_who_needs_the_numbers_of_tokens_does_not_get_an_answer_without():
    store = cache()
    store.keep(named(1), Kept(b"a", False), now=0)
    assert store.find(named(1), 0) is None
    assert store.find(Question(key=b"1", body=b"", stream=True, wants_count=False, limit=None), 0) is not None


def test_the_cache_stays_within_its_bytes_and_keeps_what_is_used():
    store = cache(max_bytes=1 << 20)
    body = b"x" * 10_000
    for number in range(500):
        store.keep(named(number), Kept(body, True), now=0)
        store.find(named(0), 0)
        assert store.bytes <= 1 << 20
    assert store.find(named(0), 0) is not None and store.evictions >= 300
    assert store.bytes > (1 << 20) * 0.9


def test_one_answer_never_pushes_out_all_others():
    store = cache(max_bytes=1 << 20)
    store.keep(named(1), Kept(b"x" * (200 << 10), True), now=0)
    assert store.bytes == 0


def test_an_answer_that_grows_is_counted_anew():
    table = HotTable(1000)
    table.put("a", 1, 100)
    table.put("b", 2, 800)
    table.put("a", 3, 500)
    assert table.weight <= 1000 and table.weight == sum({"a": 500, "b": 800}[key] for key, _ in table.items())
    table.put("huge", 1, 1001)
    assert "huge" not in table and ENTRY_BYTES > 0
