"""A target with another name for the model: the client sees the name that it asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from laya.gateway.rename import ModelRename
from raw import post, read_stream
from scripted_upstream import DONE, SSE_HEAD, ScriptedUpstream, Split, answer, chunked, completion, delta
from server import Laya, running

CHAT = {"model": "big", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def renaming(upstream: ScriptedUpstream, tmp_path_factory) -> Iterator[Laya]:
    config = {
        "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"name": "big", "match": ["big", "org/*"], "to": [{"backend": "up", "model": "qwen3-8b"}]}],
    }
    with running(config, tmp_path_factory.mktemp("renaming")) as laya:
        yield laya


@pytest.fixture(autouse=True)
def _fresh(upstream):
    upstream.asked.clear()


def test_a_json_answer_names_the_model_asked_for_and_has_the_right_length(renaming, upstream):
    """(cases 4, 5, 35) Odd white space, a length that changes; the backend is asked for plain bytes."""
    text = 'says "model":"x" in its text'
    plain = json.dumps(completion(text, "qwen3-8b-2025"), indent=3).encode()
    for framed in (answer(plain), b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
                   + chunked(plain[:50]) + chunked(plain[50:]) + b"0\r\n\r\n"):  # fmt: skip
        upstream.script = lambda asked, framed=framed: [Split(framed, 40)]
        status, body, headers = renaming.call("POST", "/v1/chat/completions", {**CHAT, "model": "org/Big-1"}, {"accept-encoding": "gzip"})
        assert status == 200 and int(headers["content-length"]) == len(body)
        assert json.loads(body) == completion(text, "org/Big-1")
    assert upstream.asked[-1].headers["accept-encoding"] == "identity" and upstream.asked[-1].json()["model"] == "qwen3-8b"


def test_a_stream_names_the_model_asked_for_in_every_frame(renaming, upstream):
    """(cases 11, 18, 35) Split anywhere; comments and the end mark pass as they came."""
    frames = b": hello\r\n\r\n" + delta("你好", model="qwen3-8b") + delta(None, "stop", "qwen3-8b") + b"data: [DONE]\n\n"
    upstream.script = lambda asked: [SSE_HEAD, Split(chunked(frames[:60]) + chunked(frames[60:]) + b"0\r\n\r\n")]
    with renaming.connect() as sock:
        sock.sendall(post(json.dumps({**CHAT, "stream": True}).encode()))
        got = read_stream(sock)
    assert got.startswith(b": hello\r\n\r\n") and got.endswith(b"data: [DONE]\n\n") and b"qwen" not in got
    assert [json.loads(line[6:])["model"] for line in got.split(b"\n") if line.startswith(b"data: {")] == ["big", "big"]


def test_errors_other_types_and_large_answers_pass(renaming, upstream):
    """(cases 44, 5) A 200 with HTML, a 404 with JSON: untouched. A coding that was not asked for is a 502."""
    upstream.script = lambda asked: [answer(b"<html>", headers="content-type: text/html\r\n")]
    assert renaming.call("POST", "/v1/chat/completions", CHAT)[:2] == (200, b"<html>")
    upstream.script = lambda asked: [answer({"model": "qwen3-8b"}, "404 Not Found")]
    assert renaming.call("POST", "/v1/chat/completions", CHAT)[:2] == (404, b'{"model": "qwen3-8b"}')
    upstream.script = lambda asked: [answer(b"\x1f\x8b", headers="content-type: application/json\r\ncontent-encoding: gzip\r\n")]
    assert renaming.call("POST", "/v1/chat/completions", CHAT)[0] == 502
    big = json.dumps({"data": "x" * 300_000, "model": "qwen3-8b"}).encode()
    upstream.script = lambda asked: [answer(big)]
    assert json.loads(renaming.call("POST", "/v1/embeddings", CHAT)[1])["model"] == "big"


def test_an_answer_too_long_to_be_renamed_passes_whole(renaming, upstream):
    """Its length is not told, so it was collected in part; a reader that comes late is waited for."""
    body = b'{"model":"qwen3-8b","x":"' + b"a" * (18 << 20) + b'"}'
    pieces = [chunked(body[at : at + 65536]) for at in range(0, len(body), 65536)]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    upstream.script = lambda asked: [head, *pieces, b"0\r\n\r\n"]
    with renaming.connect() as sock:
        sock.sendall(post(json.dumps(CHAT).encode()))
        time.sleep(0.5)
        assert read_stream(sock, 30) == body


def test_a_cut_stream_still_ends_with_an_error(renaming, upstream):
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("a")), b"0\r\n\r\n"]
    with renaming.connect() as sock:
        sock.sendall(post(json.dumps({**CHAT, "stream": True}).encode()))
        data = b""
        while piece := sock.recv(65536):
            data += piece
    assert b'"error"' in data and b"[DONE]" not in data
    upstream.script = lambda asked: [SSE_HEAD, DONE]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a":{"model":"x"}}', b'{"a":{"model":"x"}}'),
        (b'{"model":{"x":1}}', b'{"model":{"x":1}}'),
        (b'{"type":"response.created","response":{"id":"r","model":"x"}}', b'{"type":"response.created","response":{"id":"r","model":"m"}}'),
        (b'{"type":"message_start","message":{"model":"x"}}', b'{"type":"message_start","message":{"model":"m"}}'),
        (b'{"model":"x"', b'{"model":"x"'),
        (b'["model"]', b'["model"]'),
        (b'{"n":1.10,"model":"x","big":12345678901234567890}', b'{"n":1.10,"model":"m","big":12345678901234567890}'),
    ],
)
def test_only_the_name_is_exchanged(data, expected):
    assert ModelRename("m").body(data) == expected
