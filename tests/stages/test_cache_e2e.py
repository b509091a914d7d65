"""The result cache as clients meet it: the real server before a scripted backend."""

from __future__ import annotations

import itertools
import json
import threading
import time

import pytest

from raw import post, read_until
from scripted_upstream import DONE, SSE_HEAD, Asked, Reset, Sleep, answer, chunked, completion, delta, stream
from server import running

_texts = itertools.count()


def ask(**members) -> dict:
    """A deterministic question that nobody asked before."""
    text = f"question {next(_texts)}"
    return {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": text}], **members}


def chat(laya, body: dict, headers: dict | None = None):
    """(x-laya-cache, body) of one that succeeds."""
    status, raw, found = laya.call("POST", "/v1/chat/completions", body, headers)
    assert status == 200, raw
    return found.get("x-laya-cache"), raw


def text_of(raw: bytes) -> str:
    """What a client reads, plain or streamed."""
    if not raw.startswith(b"data:"):
        return json.loads(raw)["choices"][0]["message"]["content"]
    events = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(c["delta"].get("content") or "" for event in events[:-1] for c in json.loads(event)["choices"])


def says(text: str):
    def script(asked: Asked) -> list:
        return stream(text[:2], text[2:]) if asked.json().get("stream") else [answer(completion(text))]

    return script


@pytest.fixture(scope="module")
def laya(upstream, tmp_path_factory):
    keys = [{"name": name, "key": f"key-of-{name}"} for name in ("one", "two")]
    config = {
        "auth": {"keys": keys},
        "backends": {
            "up": {"url": upstream.url, "health": None, "idle_timeout_s": 20},
            "same": {"url": upstream.url, "health": None},
        },
        "routes": [
            {"name": "all", "match": "*", "to": "up"},
            {"name": "other", "match": "other", "to": {"backend": "same", "model": "m"}},
            {"name": "un", "match": "uncached", "to": "up", "cache": False},
        ],
        "stages": {"cache": {"enabled": True, "ttl_s": 2}},
    }
    with running(config, tmp_path_factory.mktemp("cache")) as server:
        plain = server.call
        server.call = lambda method, path, body=None, headers=None, timeout=60: plain(
            method, path, body, {"x-api-key": "key-of-one", **(headers or {})}, timeout
        )
        yield server


@pytest.fixture(autouse=True)
def _answers(upstream):
    upstream.script = says("hello")
    upstream.asked.clear()


@pytest.mark.parametrize(("first", "then"), list(itertools.product([False, True], repeat=2)))
def test_a_repeated_question_is_answered_in_either_form_whichever_filled_it(laya, upstream, first, then):
    body, usage = ask(), {"stream_options": {"include_usage": True}}

    def script(asked: Asked) -> list:
        if not asked.json().get("stream"):
            return [answer(completion("hello"))]
        last = {"id": "chatcmpl-scripted", "object": "chat.completion.chunk", "created": 1, "model": "scripted", "choices": [],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}  # fmt: skip
        return [*stream("he", "llo")[:-1], chunked(b"data: " + json.dumps(last).encode() + b"\n\n"), DONE]

    upstream.script = script
    word, raw = chat(laya, {**body, "stream": first, **(usage if first else {})})
    assert (word, text_of(raw)) == ("miss", "hello")
    word, raw = chat(laya, {**body, "stream": then, "user": "someone else"})
    assert (word, text_of(raw)) == ("hit", "hello") and len(upstream.asked) == 1
    assert raw.startswith(b"data:") is then and b'"usage"' not in raw if then else json.loads(raw)["usage"]["total_tokens"] == 2


def test_the_answer_of_another_age_is_asked_for_anew(laya, upstream):
    """TTL and the request's Cache-Control."""
    body = ask()
    assert chat(laya, body)[0] == "miss"
    assert chat(laya, body, {"cache-control": "no-store"})[0] == "bypass"
    upstream.script = says("newer")
    word, raw = chat(laya, body, {"cache-control": "no-cache"})
    assert (word, text_of(raw)) == ("miss", "newer")
    assert text_of(chat(laya, body, {"cache-control": "max-age=60"})[1]) == "newer" and len(upstream.asked) == 3
    time.sleep(2.6)
    assert chat(laya, body)[0] == "miss"


def test_keys_do_not_share_answers(laya, upstream):
    """The tenant is part of the key (case 59)."""
    body = ask()
    chat(laya, body)
    assert chat(laya, body, {"x-api-key": "key-of-two"})[0] == "miss" and len(upstream.asked) == 2


def test_targets_do_not_share_answers(laya, upstream):
    """(case 59)"""
    body = ask()
    chat(laya, body)
    assert chat(laya, {**body, "model": "other"})[0] == "miss" and len(upstream.asked) == 2


@pytest.mark.parametrize("members", [{"temperature": 0.7}, {"temperature": None}])
def test_sampled_answers_pass_by(laya, upstream, members):
    """(case 60)"""
    body = {key: value for key, value in {**ask(), **members}.items() if value is not None}
    assert [chat(laya, body)[0] for _ in range(2)] == ["bypass", "bypass"] and len(upstream.asked) == 2


def test_a_route_without_a_cache_says_nothing_of_one(laya):
    assert chat(laya, ask(model="uncached"))[0] is None


@pytest.mark.parametrize(
    "script",
    [
        lambda asked: [answer({"error": {"message": "no"}}, "400 Bad Request")],
        lambda asked: [answer(completion("x"), "400 Bad Request")],
        lambda asked: [answer(completion("x") | {"choices": []})],
        lambda asked: [answer({**completion("x"), "error": {"message": "late"}})],
        lambda asked: [answer(completion("x"), headers="content-type: application/json\r\ncache-control: no-store\r\n")],
    ],
    ids=["an error", "an error that looks like an answer", "no choice", "an error at 200", "not to be stored"],
)  # fmt: skip
def test_errors_are_never_repeated(laya, upstream, script):
    """(case 60)"""
    body = ask()
    upstream.script = script
    laya.call("POST", "/v1/chat/completions", body)
    laya.call("POST", "/v1/chat/completions", body)
    assert len(upstream.asked) == 2


@pytest.mark.parametrize("end", [[Reset()], [chunked(b'data: {"error":{"message":"x"}}\n\n'), DONE], [b"0\r\n\r\n"]])
def test_a_stream_that_is_cut_is_not_repeated(laya, upstream, end):
    """(case 60)"""
    body = ask(stream=True)
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("half")), *end]
    with laya.connect() as sock:
        sock.sendall(post(json.dumps(body).encode(), extra=b"x-api-key: key-of-one\r\n"))
        read_until(sock, b"half")
        time.sleep(0.1)
    upstream.script = says("hello")
    word, raw = chat(laya, body)
    assert (word, text_of(raw)) == ("miss", "hello")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_responses_and_messages_pass_by(laya, upstream, path):
    """(case 61)"""
    body = {"model": "m", "temperature": 0, "max_tokens": 5, "input": "hi", "messages": [{"role": "user", "content": "hi"}]}
    words = [laya.call("POST", path, body)[2].get("x-laya-cache") for _ in range(2)]
    assert words == ["bypass", "bypass"] and len(upstream.asked) >= 2


def test_embeddings_are_repeated_as_they_came(laya, upstream):
    made = json.dumps({"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [0.25, -1e-7]}]}).encode()
    upstream.script = lambda asked: [answer(made)]
    body = {"model": "e", "input": [f"text {next(_texts)}"]}
    first, second = (laya.call("POST", "/v1/embeddings", body) for _ in range(2))
    assert second[1] == made == first[1] and second[2]["x-laya-cache"] == "hit" and len(upstream.asked) == 1


def test_large_questions_and_answers_are_repeated_too(laya, upstream):
    """Those go through the worker: both more than the loop may read."""
    text = "long " * 40_000
    upstream.script = lambda asked: [answer(completion(text))]
    body = ask()
    body["messages"].append({"role": "user", "content": "x" * 300_000})
    assert chat(laya, body)[0] == "miss"
    assert laya.wait_for(lambda: chat(laya, body)[0] == "hit")
    word, raw = chat(laya, {**body, "stream": True})
    assert word == "hit" and text_of(raw) == text


# -- twins -------------------------------------------------------------------------------------------------------------


def together(laya, body: dict, count: int) -> list:
    """(x-laya-cache, body) of the same question asked `count` times at once."""
    results: list = []
    threads = [threading.Thread(target=lambda: results.append(chat(laya, body))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("streamed", [False, True])
def test_twins_share_one_generation(laya, upstream, streamed):
    """Fifty at once are one upstream call (case 61)."""

    def script(asked: Asked) -> list:
        if not streamed:
            return [Sleep(1.5), answer(completion("shared"))]
        return [SSE_HEAD, chunked(delta("sha")), Sleep(1.5), chunked(delta("red")), chunked(delta(None, "stop")), DONE]

    upstream.script = script
    results = together(laya, ask(stream=streamed), 50)
    assert [text_of(raw) for _, raw in results] == ["shared"] * 50 and len(upstream.asked) == 1
    assert sorted(word for word, _ in results) == ["hit"] * 49 + ["miss"]


def send(laya, body: dict):
    sock = laya.connect()
    sock.sendall(post(json.dumps(body).encode(), extra=b"x-api-key: key-of-one\r\n"))
    return sock


@pytest.mark.parametrize("streamed", [False, True])
def test_twins_survive_the_leaving_of_who_asked_first(laya, upstream, streamed):
    """(case 61)"""
    slow = says("survives")
    upstream.script = lambda asked: [*slow(asked)[:1], Sleep(3), *slow(asked)[1:]] if streamed else [Sleep(3), *slow(asked)]
    body = ask(stream=streamed)
    leader = send(laya, body)
    assert upstream.wait_for(lambda: len(upstream.asked) == 1)
    follower: list = []
    hits = laya.metric("laya_cache_hits_total")
    thread = threading.Thread(target=lambda: follower.append(chat(laya, body)))
    thread.start()
    assert laya.wait_for(lambda: laya.metric("laya_cache_hits_total") == hits + 1)  # it has joined
    leader.close()
    thread.join(20)
    assert [(word, text_of(raw)) for word, raw in follower] == [("hit", "survives")] and len(upstream.asked) == 1
    assert upstream.asked[0].closed_at is None
    assert chat(laya, body)[0] == "hit"


def test_a_generation_that_nobody_waits_for_is_cancelled(laya, upstream):
    """(case 61)"""
    upstream.script = lambda asked: [Sleep(30), answer(completion("late"))]
    body = ask()
    socks = [send(laya, body)]
    assert upstream.wait_for(lambda: len(upstream.asked) == 1)
    socks.append(send(laya, body))
    time.sleep(0.3)
    socks[0].close()
    time.sleep(0.3)
    assert upstream.asked[0].closed_at is None and len(upstream.asked) == 1
    socks[1].close()
    assert upstream.wait_for(lambda: upstream.asked[0].closed_at is not None)


def test_twins_get_the_error_that_the_one_generation_ended_with(laya, upstream):
    upstream.script = lambda asked: [Sleep(0.5), answer({"error": {"message": "bad"}}, "400 Bad Request")]
    body, results = ask(), []
    threads = [
        threading.Thread(target=lambda: results.append(laya.call("POST", "/v1/chat/completions", body)[:2])) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(upstream.asked) == 1 and {status for status, _ in results} == {400} and len(results) == 5


def test_every_client_gets_a_request_id_of_its_own(laya, upstream):
    body = ask()
    ids = [laya.call("POST", "/v1/chat/completions", body)[2]["x-request-id"] for _ in range(3)]
    assert len(set(ids)) == 3
    named = laya.call("POST", "/v1/chat/completions", body, {"x-request-id": "mine"})[2]
    assert named["x-request-id"] == "mine" and named["x-laya-route"] == "all" and named["x-laya-backend"] == "up"


def test_the_cache_is_in_metrics_and_log(laya, upstream):
    hits, misses = laya.metric("laya_cache_hits_total"), laya.metric("laya_cache_misses_total")
    body = ask()
    chat(laya, body)
    chat(laya, body)
    assert laya.metric("laya_cache_hits_total") == hits + 1 and laya.metric("laya_cache_misses_total") == misses + 1
    assert laya.metric("laya_cache_bytes") > 0
    assert laya.wait_for(lambda: [line["cache"] for line in laya.lines if line.get("cache")][-2:] == ["miss", "hit"])


def test_another_target_that_stood_in_does_not_fill_the_cache(upstream, tmp_path):
    """What is kept is an answer of the target in the key (case 59)."""
    config = {
        "backends": {
            "down": {"url": "http://127.0.0.1:9/v1", "health": None, "weight": 1000, "connect_timeout_s": 0.5},
            "up": {"url": upstream.url, "health": None, "weight": 0.001},
        },
        "routes": [{"match": "*", "to": ["down", "up"], "policy": "round_robin", "cache": True}],
    }
    with running(config, tmp_path) as laya:
        body = ask()
        words = [chat(laya, body) for _ in range(6)]
        backends = {text_of(raw) for _, raw in words}
        assert backends == {"hello"} and words[0][0] == "miss"
        assert {line["backend"] for line in laya.lines if line.get("cache") == "hit"} <= {"up"}


def test_a_reload_that_changes_a_backend_forgets_its_answers(upstream, tmp_path):
    config = {
        "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"match": "*", "to": "up", "cache": True}],
    }
    with running(config, tmp_path) as laya:
        body = ask()
        assert [chat(laya, body)[0] for _ in range(2)] == ["miss", "hit"]
        config["routes"][0]["name"] = "renamed"
        text = json.loads(laya.path.read_text())
        laya.path.write_text(json.dumps({**text, "routes": config["routes"]}))
        assert laya.wait_for(lambda: laya.metric("laya_config_reloads_total") == 1)
        assert chat(laya, body)[0] == "hit"
        config["backends"]["up"]["weight"] = 2
        laya.path.write_text(json.dumps({**text, **config}))
        assert laya.wait_for(lambda: laya.metric("laya_config_reloads_total") == 2)
        assert chat(laya, body)[0] == "miss"


FAULTY = """
import runpy
from laya.gateway.proxy import ProxyExchange

def on_tick(self, now):
    raise RuntimeError("a mistake")

ProxyExchange.on_tick = on_tick
runpy.run_module("laya", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("cache", [False, True])
def test_a_mistake_of_ours_is_a_clean_500_also_behind_the_stages(upstream, tmp_path, cache):
    upstream.script = lambda asked: [Sleep(3), answer(completion("late"))]
    config = {
        "auth": {"keys": [{"name": "one", "key": "key-of-one"}]},
        "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"match": "*", "to": "up", "cache": cache}],
    }
    with running(config, tmp_path, program=("-c", FAULTY)) as laya:
        status, body, _ = laya.call("POST", "/v1/chat/completions", ask(), {"x-api-key": "key-of-one"})
        assert status == 500 and json.loads(body)["error"]["type"] == "server_error", body
        assert laya.wait_for(lambda: laya.events("fault"))
        assert laya.metric("laya_requests_total", outcome="upstream_error") == 1
