"""Counting the tokens of a prompt for a backend that has chat but no counting API: its own tokenizer is asked, where it has one."""

from __future__ import annotations

import json

import pytest

from scripted_upstream import Asked, Close, Reset, ScriptedUpstream, answer
from server import running

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
MESSAGES = {"model": "m", "system": "Be kind.", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
RESPONSES = {"model": "m", "input": "hi"}
ASKS = [("/v1/messages/count_tokens?beta=true", MESSAGES), ("/v1/responses/input_tokens", RESPONSES)]
NO = answer({"error": {"message": "no such path"}}, "404 Not Found")


def vllm(asked: Asked) -> list:
    if asked.target != "/tokenize":
        return [NO]
    return [answer({"count": 7 + len(asked.json()["messages"]), "max_model_len": 9000, "tokens": [1] * 9, "token_strs": None})]


def llama_cpp(asked: Asked) -> list:
    if asked.target == "/tokenize":
        return [answer({"tokens": list(range(len(asked.json().get("content", "").split())))})]
    if asked.target == "/apply-template":
        return [answer({"prompt": " ".join(str(m["content"]) for m in asked.json()["messages"]) + " and more"})]
    return [NO]


@pytest.fixture(scope="module")
def upstream():
    with ScriptedUpstream() as made:
        yield made


@pytest.fixture
def laya(upstream, tmp_path):
    upstream.asked.clear()
    own = {"url": upstream.url, "health": None, "first_byte_timeout_s": 5, "retry_ambiguous": False, "key": "secret"}
    config = {
        "backends": {"told": {**own, "apis": ["chat"]}, "asked": own},
        "routes": [{"match": ["m", "big"], "to": [{"backend": "told", "model": "theirs"}]}, {"match": "unsure", "to": "asked"}],
    }
    with running(config, tmp_path) as served:
        yield served


def count(laya, path: str, body: dict) -> tuple[int, bool]:
    """(tokens, whether it is told to be an estimate)"""
    status, raw, headers = laya.call("POST", path, body)
    assert status == 200, raw
    return json.loads(raw)["input_tokens"], headers.get("x-laya-estimate") == "tokens"


def targets(upstream) -> list[str]:
    return [asked.target for asked in upstream.asked]


def test_a_server_that_counts_messages_is_asked(laya, upstream):
    upstream.script = vllm
    assert [count(laya, *ask) for ask in ASKS] == [(9, False), (8, False)]
    asked = upstream.asked[0]
    body = asked.json()
    assert body["model"] == "theirs" and body["messages"][0]["role"] == "system" and body["tools"][0]["function"]["name"] == "add"
    assert asked.headers["authorization"] == "Bearer secret" and targets(upstream) == ["/tokenize"] * 2
    large = {**RESPONSES, "input": "word " * 60_000}
    assert count(laya, "/v1/responses/input_tokens", large) == (8, False)


def test_a_server_that_counts_text_is_given_the_rendered_prompt(laya, upstream):
    upstream.script = llama_cpp
    assert [count(laya, *ask) for ask in ASKS] == [(5, False), (3, False)]
    assert targets(upstream)[:3] == ["/tokenize", "/apply-template", "/tokenize"]
    assert upstream.asked[1].json()["tools"] and upstream.asked[2].json()["parse_special"] is True


def test_a_server_without_a_tokenizer_is_asked_once_and_the_estimate_is_marked(laya, upstream):
    upstream.script = lambda asked: [NO]
    for path, body in ASKS * 2:
        tokens, estimated = count(laya, path, body)
        assert estimated and tokens > 0
    assert targets(upstream) == ["/tokenize"]


@pytest.mark.parametrize(
    "steps",
    [
        [answer(b"<html>")], [answer(b"[]")], [answer({})], [answer({"tokens": "x"})], [answer({"count": "x"})], [Close()], [Reset()],
        [answer({"count": 5}, "500 Internal Server Error")], [answer({"error": "bad"}, "400 Bad Request")],
        [answer(b'{"tokens":' + b"[" * 100_000)],
    ],
)  # fmt: skip
def test_whatever_a_tokenizer_says_the_count_is_answered(laya, upstream, steps):
    upstream.script = lambda asked: steps
    assert count(laya, *ASKS[0])[1]
    upstream.script = vllm
    assert count(laya, *ASKS[0]) == (9, False), "it is asked again"
    assert laya.wait_for(lambda: laya.metric("laya_backend_inflight", backend="told") == 0)


def test_an_api_that_turns_out_to_be_missing_is_counted_too(laya, upstream):
    upstream.script = vllm
    assert count(laya, "/v1/messages/count_tokens", {**MESSAGES, "model": "unsure"}) == (9, False)
    assert targets(upstream) == ["/v1/messages/count_tokens", "/tokenize"]
