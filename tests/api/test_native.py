"""Backends that have the APIs themselves, or not, or nobody knows: passed on, translated, remembered."""

from __future__ import annotations

import json
import time

import pytest

from client_run import ChatModel, Step
from raw import post, read_all, read_until
from scripted_upstream import SSE_HEAD, Asked, Close, Hold, Reset, ScriptedUpstream, Sleep, answer, chunked
from server import Laya, running

RESPONSE = {"id": "resp_native", "object": "response", "output": [], "status": "completed"}
MESSAGE = {"id": "msg_native", "type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn"}
HI = {"model": "m", "input": "hi", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def native(asked: Asked) -> list:
    return [answer(RESPONSE if asked.target.startswith("/v1/responses") else MESSAGE)]


@pytest.fixture(scope="module")
def backends():
    with ScriptedUpstream() as a, ScriptedUpstream() as b:
        yield a, b


@pytest.fixture(scope="module")
def laya(backends, tmp_path_factory):
    a, b = backends
    own = {"health": None, "first_byte_timeout_s": 5, "idle_timeout_s": 5}
    config = {
        "backends": {
            "asked": {"url": a.url, **own}, "told": {"url": b.url, "apis": ["chat", "messages"], **own},
            "third": {"url": a.url, **own}, "dead": {"url": "http://127.0.0.1:9/v1", **own}, "fourth": {"url": b.url, **own},
            "patient": {"url": b.url, "health": None, "apis": ["chat"]},
        },
        "routes": [
            {"name": "asked", "match": "m", "to": "asked"}, {"name": "told", "match": "told", "to": "told"},
            {"name": "third", "match": "third", "to": "third"}, {"name": "fourth", "match": "fourth", "to": "fourth"},
            {"name": "patient", "match": "patient", "to": "patient"},
            {"name": "moves", "match": "moves", "to": ["dead", "told"], "policy": "round_robin"},
        ],
    }  # fmt: skip
    with running(config, tmp_path_factory.mktemp("native")) as laya:
        yield laya


@pytest.fixture(autouse=True)
def _fresh(backends):
    for upstream in backends:
        upstream.script = native
        upstream.asked.clear()


def targets(upstream: ScriptedUpstream) -> list[str]:
    return [asked.target for asked in upstream.asked]


@pytest.mark.parametrize(("path", "made"), [("/v1/responses", RESPONSE), ("/v1/messages?beta=true", MESSAGE)])
def test_a_backend_that_has_the_api_is_passed_on_to_untouched(laya, backends, path, made):
    status, raw, _ = laya.call("POST", path, HI, {"anthropic-beta": "x", "anthropic-version": "2026-10-21"})
    asked = backends[0].asked[0]
    assert (status, json.loads(raw), asked.target) == (200, made, path)
    assert asked.json() == HI and asked.headers["anthropic-beta"] == "x"


def test_counting_is_passed_on_where_the_backend_counts(laya, backends):
    backends[0].script = lambda asked: [answer({"input_tokens": 77})]
    status, raw, headers = laya.call("POST", "/v1/messages/count_tokens", HI)
    assert json.loads(raw) == {"input_tokens": 77} and "x-laya-estimate" not in headers
    assert targets(backends[0]) == ["/v1/messages/count_tokens"]


@pytest.mark.parametrize("status", ["404 Not Found", "405 Method Not Allowed", "501 Not Implemented"])
def test_a_model_that_is_missing_is_not_taken_for_a_missing_api(laya, backends, status):
    """Nothing is remembered when chat does not answer either; the client gets the backend's last word."""
    backends[0].script = lambda asked: [answer({"error": {"message": "no model m"}}, status)]
    code, raw, _ = laya.call("POST", "/v1/responses", HI)
    assert code == int(status[:3]) and json.loads(raw)["error"]["message"] == "no model m"
    assert targets(backends[0]) == ["/v1/responses", "/v1/chat/completions"]
    backends[0].script = native
    assert json.loads(laya.call("POST", "/v1/responses", HI)[1]) == RESPONSE


def test_a_missing_api_is_found_out_once(laya, backends):
    backends[0].script = ChatModel([Step("from chat")])
    body = {**HI, "model": "third"}
    before = laya.metric("laya_retries_total", reason="no_such_api")
    assert json.loads(laya.call("POST", "/v1/responses", body)[1])["output"][0]["content"][0]["text"] == "from chat"
    assert json.loads(laya.call("POST", "/v1/responses", body)[1])["status"] == "completed"
    assert targets(backends[0]) == ["/v1/responses", "/v1/chat/completions", "/v1/chat/completions"]
    assert laya.metric("laya_retries_total", reason="no_such_api") == before + 1
    assert json.loads(laya.call("POST", "/v1/messages", body)[1])["content"][0]["text"] == "from chat", "each API for itself"


def test_configured_apis_are_not_asked_about(laya, backends):
    backends[1].script = ChatModel([Step("from chat")])
    body = {**HI, "model": "told"}
    assert json.loads(laya.call("POST", "/v1/responses", body)[1])["output"][0]["content"][0]["text"] == "from chat"
    assert targets(backends[1]) == ["/v1/chat/completions"]
    assert laya.call("POST", "/v1/messages", body)[0] == 404, "it says that it has this one"
    assert targets(backends[1]) == ["/v1/chat/completions", "/v1/messages"]


def test_a_dead_backend_is_stepped_over(laya, backends):
    backends[1].script = ChatModel([Step("from the other")])
    for _ in range(4):
        status, raw, _ = laya.call("POST", "/v1/responses", {**HI, "model": "moves"})
        assert status == 200 and b"from the other" in raw


def test_the_clients_own_headers_stay_behind_and_the_answer_is_asked_for_plain(laya, backends):
    backends[1].script = ChatModel([Step("x")])
    headers = {"anthropic-version": "1", "x-codex-window-id": "a", "x-stainless-os": "b", "accept-encoding": "zstd", "x-mine": "y"}
    laya.call("POST", "/v1/responses?x=1", {**HI, "model": "told"}, headers)
    asked = backends[1].asked[0]
    assert asked.target == "/v1/chat/completions" and asked.headers["accept-encoding"] == "identity" and asked.headers["x-mine"] == "y"
    assert not [name for name in asked.headers if name.startswith(("anthropic", "x-codex", "x-stainless"))]


def test_a_coding_that_was_not_asked_for_is_a_clear_502(laya, backends):
    """(case 5)"""
    backends[1].script = lambda asked: [answer(b"\x1f\x8b", headers="content-encoding: gzip\r\n")]
    assert laya.call("POST", "/v1/responses", {**HI, "model": "told"})[0] == 502


STREAMS = {
    "responses": [
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{"id":"resp_n"}}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":1,'
        b'"delta":"\\"type\\":\\"response.completed\\""}\n\n',
    ],
    "messages": [b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n'],
}
ENDS = {
    "responses": b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_n"}}\n\n',
    "messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
}


def stream(laya: Laya, api: str, model: str = "m") -> bytes:
    with laya.connect() as sock:
        body = json.dumps({**HI, "model": model, "stream": True}).encode()
        sock.sendall(post(body, f"/v1/{api}".encode(), b"Connection: close\r\n"))
        return read_all(sock, 30)


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_whole_stream_passes_untouched(laya, backends, api):
    frames = [*STREAMS[api], ENDS[api]]
    backends[0].script = lambda asked: [SSE_HEAD, *map(chunked, frames), b"0\r\n\r\n"]
    data = stream(laya, api)
    assert all(frame in data for frame in frames) and data.endswith(b"0\r\n\r\n")
    assert b"response.failed" not in data and b"event: error" not in data


@pytest.mark.parametrize("end", [[Close()], [Reset()], [b"0\r\n\r\n"]], ids=["fin", "reset", "clean end too early"])
@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_stream_that_is_cut_ends_in_the_apis_own_error(laya, backends, api, end):
    """(cases 13, 14) A text that only speaks of the last event is not taken for it."""
    backends[0].script = lambda asked: [SSE_HEAD, *map(chunked, STREAMS[api]), chunked(b"event: cut"), Sleep(0.1), *end]
    data = stream(laya, api)
    last = data.rpartition(b"event: ")[2]
    if api == "messages":
        assert last.startswith(b"error") and b'"type":"error"' in last
    else:
        assert last.startswith(b"response.failed") and b'"sequence_number":2' in last and b'"id":"resp_n"' in last
    assert data.count(b"response.created") <= 2 and data.endswith(b"0\r\n\r\n"), "nothing is sent twice"


@pytest.mark.parametrize("end", [[Close()], [Reset()], [Hold()]], ids=["fin", "reset", "silence"])
@pytest.mark.parametrize("api", ["responses", "messages"])
def test_nothing_follows_the_last_event_whatever_comes_of_the_connection(laya, backends, api, end):
    """(case 15)"""
    frames = [*STREAMS[api], ENDS[api]]
    backends[0].script = lambda asked: [SSE_HEAD, *map(chunked, frames), Sleep(0.1), *end]
    data = stream(laya, api)
    assert ENDS[api] in data and data.endswith(b"0\r\n\r\n")
    assert data.rpartition(b"event: ")[2] == ENDS[api].rpartition(b"event: ")[2] + b"\r\n0\r\n\r\n"


def test_a_stream_begins_without_the_backends_word_after_a_while(laya, backends):
    """Clients give up on a silent server; what the backend says later comes inside the stream."""
    backends[1].script = lambda asked: [Sleep(6), answer({"error": {"message": "No."}}, "400 Bad Request")]
    began = time.monotonic()
    data = stream(laya, "responses", "patient")
    assert data.startswith(b"HTTP/1.1 200") and b"response.in_progress" in data and time.monotonic() - began < 30
    last = data.rpartition(b"event: ")[2]
    assert last.startswith(b"response.failed") and b"No." in last


def test_a_translated_stream_that_outlives_the_drain_is_told_so(backends, tmp_path):
    """(case 75)"""
    backends[1].script = lambda asked: [SSE_HEAD, chunked(b": wait\n\n"), Sleep(30)]
    config = {
        "server": {"drain_timeout_s": 0.5}, "routes": [{"match": "*", "to": "up"}],
        "backends": {"up": {"url": backends[1].url, "health": None, "apis": ["chat"]}},
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        socks = [laya.connect(), laya.connect()]
        for sock, api in zip(socks, (b"responses", b"messages"), strict=True):
            sock.sendall(post(json.dumps({**HI, "stream": True}).encode(), b"/v1/" + api))
            read_until(sock, b"event: ping" if api == b"messages" else b"response.in_progress")
        assert laya.stop() == 0
        ends = [read_all(sock) for sock in socks]
    assert b"event: response.failed" in ends[0] and b"event: error" in ends[1]
    assert all(end.endswith(b"0\r\n\r\n") for end in ends)


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_a_client_that_leaves_cancels_the_translated_work(laya, backends, api):
    """(case 10)"""
    backends[1].script = lambda asked: [SSE_HEAD, chunked(b": wait\n\n"), Sleep(20)]
    with laya.connect() as sock:
        sock.sendall(post(json.dumps({**HI, "model": "told" if api == "responses" else "fourth", "stream": True}).encode(), f"/v1/{api}".encode()))
        assert backends[1].wait_for(lambda: bool(backends[1].asked))
        sock.settimeout(5)
        sock.recv(10)
    assert backends[1].wait_for(lambda: backends[1].asked[0].closed_at is not None, 3)
    assert laya.wait_for(lambda: laya.metric("laya_backend_inflight", backend="told") == 0)
