"""A small model in this process beside a large one by URL: classes, fallbacks and failover across the two."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from scripted_upstream import ScriptedUpstream, answer, completion, polite
from server import Laya, running


@pytest.fixture(scope="module")
def large() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream(lambda asked: [answer(completion("from the large one"))]) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def mixed(large, model_path, tmp_path_factory) -> Iterator[Laya]:
    config = {
        "inference": {"model": str(model_path), "max_seq_len": 256, "max_num_seqs": 2, "threads": 1, "name": "smol"},
        "backends": {"large": {"url": large.url, "health": None}, "dead": {"url": "http://127.0.0.1:9/v1", "health": None}},
        "routes": [
            {"name": "auto", "match": "auto", "classify": [
                {"to": "local", "when": {"max_prompt_tokens": 100, "any_words": ["extract", "keywords"], "no_code": True}},
                {"to": "large"},
            ]},
            {"name": "small", "match": "small", "to": "local", "fallback": ["big"]},
            {"name": "big", "match": "big", "to": "large"},
            {"name": "either", "match": "either", "to": ["dead", "local"], "policy": "session"},
            {"name": "both", "match": "both", "to": ["local", "large"], "policy": "round_robin"},
        ],
    }  # fmt: skip
    with running(config, tmp_path_factory.mktemp("mixed"), "serve") as laya:
        assert laya.wait_for(lambda: json.loads(laya.get("/ready")[1])["components"]["engines"]["local"]["state"] == "ready", 120)
        yield laya


@pytest.fixture(autouse=True)
def _fresh(large):
    large.script = lambda asked: [answer(completion("from the large one"))]
    large.asked.clear()


def test_simple_work_goes_to_the_small_model_and_the_rest_to_the_large_one(mixed, large):
    status, body, headers = mixed.chat("auto", "extract the keywords: cats, dogs", max_tokens=4)
    assert status == 200 and headers["x-laya-backend"] == "local" and body["model"] == "auto" and not large.asked
    assert headers["x-laya-route"] == "auto; rule=1; why=prompt_tokens=8, no code, word extract"
    status, body, headers = mixed.chat("auto", "Write a novel.", max_tokens=4)
    assert headers["x-laya-backend"] == "large" and body["choices"][0]["message"]["content"] == "from the large one"


def test_a_prompt_beyond_the_small_window_goes_to_the_fallback(mixed, large):
    status, body, headers = mixed.chat("small", "word " * 400, max_tokens=4)
    assert (status, headers["x-laya-backend"], headers["x-laya-route"]) == (200, "large", "small; fallback=big")
    assert json.loads(large.asked[0].body)["max_tokens"] == 4
    assert mixed.metric("laya_retries_total", reason="engine_too_long") == 1
    status, body, headers = mixed.chat("small", "word", max_tokens=4)
    assert (status, headers["x-laya-backend"], headers["x-laya-route"]) == (200, "local", "small")


def test_a_stream_beyond_the_small_window_goes_to_the_fallback_whole(mixed, large):
    large.script = polite
    status, raw, headers = mixed.call(
        "POST", "/v1/chat/completions",
        {"model": "small", "stream": True, "messages": [{"role": "user", "content": "word " * 400}]},
    )  # fmt: skip
    assert status == 200 and headers["x-laya-backend"] == "large" and raw.rstrip().endswith(b"data: [DONE]")


def test_a_dead_backend_gives_way_to_the_engine(mixed):
    for session in ("a", "b", "c"):
        for _ in range(2):
            status, _, headers = mixed.call(
                "POST", "/v1/chat/completions",
                {"model": "either", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}, {"x-laya-session": session},
            )  # fmt: skip
            assert status == 200 and headers["x-laya-backend"] == "local"
    assert mixed.metric("laya_retries_total", reason="connect") <= 3, "each session was moved once"


def test_an_api_that_the_engine_lacks_goes_to_the_backend_that_has_it(mixed, large):
    for _ in range(3):
        status, _, headers = mixed.call("POST", "/v1/embeddings", {"model": "both", "input": "x"})
        assert status == 200 and headers["x-laya-backend"] == "large"
    assert {mixed.chat("both", "hi", max_tokens=2)[2]["x-laya-backend"] for _ in range(4)} == {"local", "large"}


def test_the_override_reaches_engines_too(mixed, large):
    body = {"model": "big", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    status, _, headers = mixed.call("POST", "/v1/chat/completions", body, {"x-laya-target": "local"})
    assert (status, headers["x-laya-backend"], headers["x-laya-route"]) == (200, "local", "big; target")
    assert not large.asked
