"""The real model behind the real server, through the `openai` SDK and raw sockets."""

from __future__ import annotations

import json
import threading
import time

import openai
import pytest

from raw import post, read_until

PARIS = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]


def test_the_capital_of_france_streamed_and_not(client):
    plain = client.chat.completions.create(model="smol", messages=PARIS, temperature=0)
    assert "Paris" in plain.choices[0].message.content and plain.choices[0].finish_reason == "stop"
    assert plain.model == "smol" and plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    chunks = list(client.chat.completions.create(
        model="smol", messages=PARIS, temperature=0, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1 and chunks[-2].choices[0].finish_reason == "stop"


def test_the_usage_chunk_comes_only_when_asked_for(client):
    """(cases 16, 17)"""
    for options in (None, {"include_usage": False}):
        kw = {} if options is None else {"stream_options": options}
        chunks = list(client.chat.completions.create(model="smol", messages=PARIS, temperature=0, max_tokens=3, stream=True, **kw))
        assert all(c.choices and c.usage is None for c in chunks)


def test_a_repeated_prompt_is_read_from_the_cache(client):
    messages = [{"role": "system", "content": "You know a lot about rivers. " * 10}, {"role": "user", "content": "Name one."}]
    first = client.chat.completions.create(model="smol", messages=messages, temperature=0, max_tokens=8)
    again = client.chat.completions.create(model="smol", messages=messages, temperature=0, max_tokens=8)
    assert again.usage.prompt_tokens_details.cached_tokens > 50
    assert again.choices[0].message.content == first.choices[0].message.content


def test_text_and_one_text_part_are_the_same_prompt(client):
    parts = [{"role": "user", "content": [{"type": "text", "text": PARIS[0]["content"]}]}]
    a, b = (client.chat.completions.create(model="smol", messages=m, temperature=0, max_tokens=4) for m in (PARIS, parts))
    assert a.usage.prompt_tokens == b.usage.prompt_tokens and a.choices[0].message.content == b.choices[0].message.content


def test_a_missing_model_takes_the_engine_and_an_unknown_one_is_404(served, client):
    assert served.chat(text="hi", max_tokens=1)[0] == 200
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=PARIS)
    assert caught.value.code == "model_not_found" and "smol" in caught.value.message
    assert client.chat.completions.create(model="gpt-4o", messages=PARIS, max_tokens=1).model == "gpt-4o"
    assert {m.id for m in client.models.list()} == {"smol", "gpt-4o", "local"}
    assert client.models.retrieve("smol").id == "smol"


def test_several_choices_interleave_and_count_the_prompt_once(client):
    """(case 30)"""
    kw = {"model": "smol", "messages": PARIS, "n": 3, "max_tokens": 6, "seed": 7}
    plain = client.chat.completions.create(**kw)
    assert [c.index for c in plain.choices] == [0, 1, 2] and plain.usage.completion_tokens <= 18
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**kw, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in plain.choices]


def test_the_same_seed_is_the_same_text_whatever_else_runs(client):
    def ask() -> str:
        kw = {"model": "smol", "messages": PARIS, "max_tokens": 20, "seed": 42, "temperature": 1.3}
        return client.chat.completions.create(**kw).choices[0].message.content

    alone = ask()
    others = [threading.Thread(target=lambda: client.chat.completions.create(model="smol", messages=PARIS, max_tokens=40))
              for _ in range(3)]  # fmt: skip
    for thread in others:
        thread.start()
    assert ask() == alone
    for thread in others:
        thread.join()


def test_logprobs_in_both_forms(client):
    chat = client.chat.completions.create(
        model="smol", messages=PARIS, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )  # fmt: skip
    entries = chat.choices[0].logprobs.content
    assert len(entries) == 4 and all(e.logprob <= 0 and len(e.top_logprobs) == 2 for e in entries)
    assert all(e.top_logprobs[0].logprob == pytest.approx(e.logprob, abs=1e-4) for e in entries)
    assert "".join(e.token for e in entries) == chat.choices[0].message.content
    text = client.completions.create(model="smol", prompt="The capital of France is", max_tokens=2, logprobs=2, echo=True, temperature=0)
    got = text.choices[0].logprobs
    assert text.choices[0].text.startswith("The capital of France is") and got.token_logprobs[0] is None
    assert len(got.tokens) == len(got.token_logprobs) == text.usage.total_tokens and "Paris" in text.choices[0].text


def test_completions_take_text_ids_and_lists(client):
    """(case 30)"""
    one = client.completions.create(model="smol", prompt="Once upon a", max_tokens=3, temperature=0).choices[0].text
    several = client.completions.create(model="smol", prompt=["Once upon a", "Two and two is"], max_tokens=3, temperature=0, n=2)
    assert [c.index for c in several.choices] == [0, 1, 2, 3] and several.choices[0].text == several.choices[1].text == one
    ids = client.completions.create(model="smol", prompt=[1, 2, 3], max_tokens=1)
    assert ids.usage.prompt_tokens == 3
    scored = client.completions.create(model="smol", prompt="Hello there", max_tokens=0, echo=True, logprobs=0)
    assert scored.choices[0].text == "Hello there" and scored.usage.completion_tokens == 0


def test_a_stop_string_over_several_tokens_is_never_shown(client):
    """(case 24)"""
    kw = {"model": "smol", "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**kw).choices[0].text
    stop = whole[6:12]
    shown = "".join(c.choices[0].text for c in client.completions.create(**kw, stop=[stop], stream=True) if c.choices)
    assert shown == whole[: whole.index(stop)]
    assert client.completions.create(**kw, stop=["never said"]).choices[0].text == whole


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"messages": []}, "messages"), ({"messages": "x"}, "messages"), ({}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"n": 0}, "n"), ({"n": 1000}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": "10"}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"), ({"temperature": "0.7"}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"), ({"stop": [""]}, "stop"), ({"stop": ["a"] * 40}, "stop"),
        ({"seed": "a"}, "seed"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)  # fmt: skip
def test_bad_members_are_400_and_named(served, members, param):
    """(cases 20, 21, 22, 25, 27, 30)"""
    body = {"model": "smol", "messages": PARIS, **members}
    if members == {}:
        del body["messages"]
    status, raw, _ = served.call("POST", "/v1/chat/completions", body)
    error = json.loads(raw)["error"]
    assert status == 400 and error["type"] == "invalid_request_error", raw
    assert error["param"] == param or param in error["message"], raw


@pytest.mark.parametrize("raw", [b'{"temperature": NaN}', b'{"temperature": 1e400}', b'{"temperature": Infinity}', b'{"seed": 1e400}'])
def test_numbers_that_json_does_not_have_are_400(served, raw):
    """(case 30)"""
    body = raw[:-1] + b', "messages": [{"role": "user", "content": "x"}]}'
    assert served.call("POST", "/v1/chat/completions", body)[0] == 400


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "B"}],
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": None}, {"role": "user", "content": "B"}],
        [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "A"}],
        [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}],
        [{"role": "user", "content": "A"}, {"role": "system", "content": "Now."}, {"role": "user", "content": []}],
        [{"role": "user", "content": "A"}, {"role": "tool", "tool_call_id": "1", "content": "x"}],
    ],
)
def test_odd_but_allowed_conversations_are_served(served, messages):
    """(cases 20, 22)"""
    status, body, _ = served.chat("smol", messages=messages, max_tokens=1)
    assert status == 200, body


def test_the_window_is_right_at_its_edges(served):
    """(cases 26, 28, 52) 1024 tokens: a prompt of 1023 leaves room for one; 1024 and more are refused with both numbers."""
    def ask(length: int, **kw):
        return served.call("POST", "/v1/completions", {"model": "smol", "prompt": [5] * length, "max_tokens": 50, **kw})

    status, raw, _ = ask(1023)
    body = json.loads(raw)
    assert status == 200 and body["usage"] == {**body["usage"], "prompt_tokens": 1023, "completion_tokens": 1}
    assert body["choices"][0]["finish_reason"] == "length"
    for length in (1024, 1025, 3000):
        status, raw, _ = ask(length)
        error = json.loads(raw)["error"]
        assert status == 400 and error["code"] == "context_length_exceeded"
        assert "1024" in error["message"] and str(length) in error["message"]
    status, raw, _ = served.call("POST", "/v1/completions", {"model": "smol", "prompt": [5] * 1000, "max_tokens": 65535, "ignore_eos": True})
    assert status == 200 and json.loads(raw)["usage"]["completion_tokens"] == 24


def test_a_hopelessly_long_text_is_refused_at_once(served):
    began = time.monotonic()
    status, body, _ = served.chat("smol", "word " * 4_000_000)
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert time.monotonic() - began < 10


# A few hundredths of a second on a quiet machine; what was asked for would take far longer on any.
AT_ONCE_S = 4.0


def test_a_killed_client_frees_its_blocks_at_once(served):
    """(case 10)"""
    body = json.dumps({"model": "smol", "stream": True, "max_tokens": 900, "ignore_eos": True, "messages": PARIS}).encode()
    with served.connect() as sock:
        sock.sendall(post(body))
        read_until(sock, b'"content":"')  # the first frame goes out while it is queued
        assert served.wait_for(lambda: served.metric("laya_sequences_running", engine="local") == 1)
    assert served.wait_for(lambda: served.metric("laya_sequences_running", engine="local") == 0, AT_ONCE_S)
    assert served.wait_for(lambda: served.metric("laya_kv_blocks_used", engine="local") == 0, AT_ONCE_S)


def test_a_plain_client_that_leaves_is_dropped_too(served):
    body = json.dumps({"model": "smol", "max_tokens": 900, "ignore_eos": True, "messages": PARIS}).encode()
    with served.connect() as sock:
        sock.sendall(post(body))
        assert served.wait_for(lambda: served.metric("laya_sequences_running", engine="local") == 1)
    assert served.wait_for(lambda: served.metric("laya_sequences_running", engine="local") == 0, AT_ONCE_S)


def test_wild_sampling_never_breaks_a_stream(client):
    """(case 12) Bytes that are no UTF-8 come out as U+FFFD at the most; streamed and plain text are the same."""
    for seed in range(6):
        kw = {"model": "smol", "prompt": "The", "temperature": 5.0, "max_tokens": 60, "seed": seed}
        plain = client.completions.create(**kw).choices[0].text
        assert "".join(c.choices[0].text for c in client.completions.create(**kw, stream=True) if c.choices) == plain


def test_many_at_once_all_get_the_same_greedy_answer(client):
    answers: list[str] = []

    def ask() -> None:
        kw = {"model": "smol", "messages": PARIS, "temperature": 0, "max_tokens": 12}
        answers.append(client.chat.completions.create(**kw).choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 12 and all("Paris" in answer for answer in answers)


def test_apis_that_the_engine_lacks_are_a_clear_400(served):
    status, raw, _ = served.call("POST", "/v1/embeddings", {"model": "smol", "input": "x"})
    assert status == 400 and json.loads(raw)["error"]["param"] == "model"
