"""Streams that a backend is silent in: what their clients hear meanwhile, and how it goes on."""

from __future__ import annotations

import gzip
import json
import time

import pytest

from raw import post, read_all
from scripted_upstream import SSE_HEAD, Asked, Close, ScriptedUpstream, Sleep, answer, chunked
from server import Laya, running

SILENCE_S = 6.5  # one sign of life is due after 5 s, a second one after 10
CHAT = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
CREATED = b'event: response.created\ndata: {"type":"response.created","sequence_number":4,"response":{"id":"resp_n"}}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_n"}}\n\n'
STARTED = b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n'
STOPPED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
PATHS = {"chat": b"/v1/chat/completions", "responses": b"/v1/responses", "messages": b"/v1/messages"}
END = b"0\r\n\r\n"


def stream(*pieces, head: bytes = SSE_HEAD) -> list:
    return [head, *(piece if isinstance(piece, Sleep) else chunked(piece) for piece in pieces), END]


# name -> (API, model, what the backend does)
SILENT = Sleep(SILENCE_S)
BETWEEN = {
    "chat": ("chat", "m", stream(CHAT, SILENT, DONE)),
    "inside": ("chat", "m", stream(CHAT + CHAT[:20], SILENT, CHAT[20:], DONE)),
    "torn": ("chat", "m", stream(b"data: " + b"x" * 70_000, SILENT, b"\n\n", DONE)),
    "renamed": ("chat", "alias", stream(CHAT, SILENT, DONE)),
    "packed": ("chat", "m", stream(gzip.compress(CHAT), SILENT, head=SSE_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n"))),
    "responses": ("responses", "m", stream(CREATED, SILENT, COMPLETED)),
    "messages": ("messages", "m", stream(STARTED, SILENT, STOPPED)),
    "flowing": ("chat", "m", stream(*[piece for _ in range(7) for piece in (CHAT, Sleep(1))], DONE)),
}  # fmt: skip
NO = answer({"error": {"message": "No room.", "code": "server_busy"}}, "503 Service Unavailable")
BEFORE = {
    "chat": ("chat", "m", [SILENT, *stream(CHAT, DONE)]),
    "whole": ("chat", "alias", [SILENT, b"".join(stream(b'data: {"model":"theirs","choices":[]}\n\n', DONE))]),
    "refused": ("chat", "m", [SILENT, NO]),
    "refused in pieces": ("chat", "m", [SILENT, NO[:-9], Sleep(0.1), NO[-9:]]),
    "plain": ("chat", "m", [SILENT, answer({"choices": []})]),
    "gone": ("chat", "m", [SILENT, Close()]),
    "messages": ("messages", "m", [SILENT, *stream(STARTED, STOPPED)]),
    "messages refused": ("messages", "m", [SILENT, NO]),
    "responses": ("responses", "m", [SILENT, *stream(CREATED, COMPLETED)]),
    "not asked for": ("chat", "m", [SILENT, answer({"choices": []})]),
}  # fmt: skip


def script(asked: Asked) -> list:
    body = asked.json()
    return {"between": BETWEEN, "before": BEFORE}[body["part"]][body["case"]][2]


@pytest.fixture(scope="module")
def laya(tmp_path_factory):
    with ScriptedUpstream(script) as upstream:
        own = {"url": upstream.url, "health": None, "apis": ["chat", "responses", "messages"], "retry_ambiguous": False}
        config = {
            "backends": {"up": own},
            "routes": [{"match": "m", "to": "up"}, {"match": "alias", "to": [{"backend": "up", "model": "theirs"}]}],
        }
        with running(config, tmp_path_factory.mktemp("vigil")) as served:
            yield served


def played(laya: Laya, part: str, cases: dict) -> dict[str, bytes]:
    """All cases of a part at once: case -> what its client got."""
    socks = {}
    for case, (api, model, _) in cases.items():
        body = {"model": model, "stream": case != "not asked for", "part": part, "case": case, "input": "x", "max_tokens": 5,
                "messages": [{"role": "user", "content": "x"}]}  # fmt: skip
        socks[case] = laya.connect()
        socks[case].sendall(post(json.dumps(body).encode(), PATHS[api], b"Connection: close\r\n"))
    got = {case: read_all(sock, 30) for case, sock in socks.items()}
    for sock in socks.values():
        sock.close()
    return got


def frames(data: bytes) -> bytes:
    """The body of a chunked answer."""
    rest, body = data.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def test_a_silent_backend_is_spoken_for_between_frames(laya):
    """(cases 11, 18) A comment on chat, a ping on Messages, response.in_progress once the response is known; never inside a frame."""
    got = {case: frames(data) for case, data in played(laya, "between", BETWEEN).items()}
    assert got["chat"] == CHAT + b":\n\n" + DONE
    assert got["inside"] == CHAT + b":\n\n" + CHAT + DONE
    assert got["torn"] == b"data: " + b"x" * 70_000 + b"\n\n" + DONE
    assert got["renamed"].count(b":\n\n") == 1 and got["renamed"].endswith(DONE)
    assert gzip.decompress(got["packed"]) == CHAT
    assert got["flowing"] == CHAT * 7 + DONE, "a stream that flows needs none"
    assert got["messages"] == STARTED + b'event: ping\ndata: {"type":"ping"}\n\n' + STOPPED
    first, sign, last = got["responses"].split(b"\n\n")[:3]
    assert (first + b"\n\n", last + b"\n\n") == (CREATED, COMPLETED)
    event = json.loads(sign.partition(b"data: ")[2])
    assert event["type"] == "response.in_progress" and event["sequence_number"] == 4 and event["response"]["id"] == "resp_n"


def test_a_stream_begins_without_the_backends_head_after_a_while(laya):
    """(cases 13, 14) What the backend says later comes inside it, refusals too; only who asked for a stream gets one."""
    began = time.monotonic()
    got = played(laya, "before", BEFORE)
    assert time.monotonic() - began < 25
    assert frames(got["chat"]) == b":\n\n" + CHAT + DONE
    assert frames(got["whole"]) == b':\n\ndata: {"model":"alias","choices":[]}\n\n' + DONE
    for case in ("refused", "refused in pieces", "plain", "gone"):
        assert got[case].startswith(b"HTTP/1.1 200") and b"[DONE]" not in got[case] and not got[case].endswith(END), case
        assert b'data: {"error":' in got[case] and (b"No room." in got[case]) == case.startswith("refused"), case
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    assert frames(got["messages"]) == ping + STARTED + STOPPED
    assert frames(got["messages refused"]).startswith(ping + b"event: error\ndata: ") and b"No room." in got["messages refused"]
    assert frames(got["responses"]) == CREATED + COMPLETED, "Responses clients wait for a head, but not long for an event"
    assert got["not asked for"].startswith(b"HTTP/1.1 200") and b"content-length" in got["not asked for"]
    assert laya.wait_for(lambda: laya.metric("laya_backend_inflight", backend="up") == 0)
