"""A route that looks at the request itself: which rule took it, seen in the header, the metrics and the log; overrides."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from laya.gateway.facts import estimate_tokens, prompt_bytes, read_facts
from laya.schema.fields import read_routing
from scripted_upstream import ScriptedUpstream, answer, completion
from server import Laya, running

CODE = "Explain this:\n```python\nprint(1)\n```"


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[ScriptedUpstream, ScriptedUpstream]]:
    def named(asked):
        return [answer(completion("x", asked.json()["model"]))]

    with ScriptedUpstream(named) as small, ScriptedUpstream(named) as large:
        yield small, large


@pytest.fixture(scope="module")
def laya(two, tmp_path_factory) -> Iterator[Laya]:
    words = ["keywords", "extract", "提取", "关键词"]
    config = {
        "backends": {"small": {"url": two[0].url, "health": None}, "large": {"url": two[1].url, "health": None}},
        "routes": [
            {"name": "auto", "match": "auto", "classify": [
                {"to": [{"backend": "small", "model": "tiny"}], "when": {"max_prompt_tokens": 800, "any_words": words, "no_code": True}},
                {"to": "small", "when": {"max_tokens_at_most": 8, "has_images": False}},
                {"to": "large", "when": {"has_tools": True}},
                {"to": "large"},
            ]},
            {"name": "plain", "match": "plain", "to": "small"},
            {"name": "gpu", "match": "gpu", "to": "large"},
        ],
        "auth": {"keys": [{"name": "all", "key": "k1"}, {"name": "few", "key": "k2", "routes": ["plain"]},
                          {"name": "auto", "key": "k3", "routes": ["auto"]}]},
    }  # fmt: skip
    with running(config, tmp_path_factory.mktemp("classify")) as laya:
        yield laya


def ask(laya: Laya, text="hi", model: str = "auto", key: str = "k1", headers: dict | None = None, **members):
    body = {"model": model, "messages": [{"role": "system", "content": "extract"}, {"role": "user", "content": text}], **members}
    status, raw, got = laya.call("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {key}", **(headers or {})})
    return status, json.loads(raw), got


@pytest.mark.parametrize(
    ("text", "members", "backend", "rule"),
    [
        ("Please extract the names.", {}, "small", "1"),
        ("请提取要点", {}, "small", "1"),
        ("extract " + CODE, {}, "large", "4"),
        ("extract " + "long text " * 400, {}, "large", "4"),
        ("Write a poem.", {}, "large", "4"),
        ("Write a poem.", {"max_tokens": 5}, "small", "2"),
        ("Write a poem.", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "large", "3"),
        ([{"type": "text", "text": "extract it"}, {"type": "image_url", "image_url": {"url": "x"}}], {}, "small", "1"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], {"max_tokens": 5}, "large", "4"),
    ],
)
def test_the_first_rule_that_holds_decides(laya, text, members, backend, rule):
    """Only the last user message is looked at for words: the system message has one of them all the time."""
    before = laya.metric("laya_route_decisions_total", route="auto", rule=rule, backend=backend)
    status, _, headers = ask(laya, text, **members)
    assert status == 200 and headers["x-laya-backend"] == backend
    route = headers["x-laya-route"]
    assert route.startswith("auto") and f"rule={rule}" in route.replace("%3D", "=")
    assert laya.metric("laya_route_decisions_total", route="auto", rule=rule, backend=backend) == before + 1


def test_the_reason_is_in_the_header_and_the_log(laya):
    _, body, headers = ask(laya, "extract the names", headers={"x-request-id": "look-for-me"})
    assert headers["x-laya-route"] == "auto; rule=1; why=prompt_tokens=7, no code, word extract"
    assert body["model"] == "auto", "what the client asked for, though the target has another name"

    def logged() -> list[dict]:
        return [line for line in laya.lines if line.get("event") == "decision" and line["id"] == "look-for-me"]

    assert laya.wait_for(logged)
    line = logged()[0]
    assert (line["route"], line["backend"]) == ("auto", "small") and "word extract" in line["why"]


def test_a_large_body_is_decided_off_the_loop(laya):
    _, _, headers = ask(laya, "x " * 60_000)
    assert headers["x-laya-backend"] == "large"


def test_the_override_names_the_target(laya, two):
    status, _, headers = ask(laya, "extract", headers={"x-laya-target": "large"})
    assert (status, headers["x-laya-backend"], headers["x-laya-route"]) == (200, "large", "auto; target")
    status, body, headers = ask(laya, "extract", headers={"x-laya-target": "small"})
    assert headers["x-laya-backend"] == "small" and two[0].asked[-1].json()["model"] == "tiny", "the route's own name for it"
    assert "x-laya-target" not in two[0].asked[-1].headers
    assert laya.metric("laya_route_decisions_total", route="auto", rule="override", backend="large") >= 1


def test_the_override_is_refused_where_the_key_forbids_it(laya):
    assert ask(laya, model="plain", key="k2", headers={"x-laya-target": "small"})[0] == 200
    status, body, _ = ask(laya, model="plain", key="k2", headers={"x-laya-target": "large"})
    assert status == 403 and body["error"]["type"] == "permission_error"
    assert ask(laya, key="k3", headers={"x-laya-target": "large"})[0] == 200, "a target of a route that it may use"
    status, body, _ = ask(laya, headers={"x-laya-target": "nowhere\xe9"})
    assert status == 400 and "x-laya-target" in body["error"]["message"]


def test_models_lists_auto(laya):
    status, raw, _ = laya.call("GET", "/v1/models", headers={"authorization": "Bearer k1"})
    assert status == 200 and "auto" in [entry["id"] for entry in json.loads(raw)["data"]]


@pytest.mark.parametrize(
    ("body", "tokens", "text"),
    [
        ({"prompt": "abcd" * 10}, 10, "abcd" * 10),
        ({"prompt": ["a", "b"]}, 2, "a\nb"),
        ({"prompt": [1, 2, 3]}, 0, ""),
        ({"instructions": "be good", "input": "hello there"}, 5, "hello there"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "one"}]}, {"role": "assistant", "content": "two"}]}, 2, "one"),
        ({"system": [{"type": "text", "text": "abcd"}], "messages": [{"role": "user", "content": "efgh"}]}, 2, "efgh"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, 2, "b"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, 1, ""),
        ({"messages": 7}, 0, ""),
        ({"messages": [None, 3, {"role": 7}]}, 0, ""),
        ({"messages": [{"role": "user", "content": {"deep": [[[[[[["x"]]]]]]]}}]}, 0, ""),
        ({}, 0, ""),
    ],
)  # fmt: skip
def test_facts_are_read_from_every_apis_shape(body, tokens, text):
    facts, found = read_facts(read_routing(json.dumps({"model": "m", **body}).encode()))
    assert (facts.prompt_tokens, found) == (tokens, text)


def test_tokens_are_estimated_by_script():
    assert estimate_tokens("a" * 400) == 100 and estimate_tokens("你好世界") == 4 and estimate_tokens("") == 0
    assert 4 <= estimate_tokens("hello 你好") <= 5


def test_requests_that_begin_alike_have_prompts_that_begin_alike():
    one = read_routing(b'{"messages":[{"role":"system","content":"s"},{"role":"user","content":"a"}],"model":"m","x":1}')
    two = read_routing(b'{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":"b"}]}')
    assert prompt_bytes(one)[:50] == prompt_bytes(two)[:50]
