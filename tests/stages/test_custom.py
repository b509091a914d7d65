"""Stages of the user's own: the example of docs/stages.md, faults, refusals, every API's texts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from laya.net.guests import MAX_HANGING
from raw import post, read_all
from scripted_upstream import DONE, SSE_HEAD, Sleep, answer, chunked, completion, stream
from server import running

ROOT = Path(__file__).resolve().parents[2]
# What the tests' stages do: the documentation's own example, and misbehaviour.
EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "stages.md").read_text(encoding="utf-8"), re.DOTALL).group(1)
MORE = '''
import time
from laya.errors import InvalidRequest

class Odd:
    def request(self, body, about):
        text = body.get("user", "")
        if text == "raise":
            raise RuntimeError("a secret of the request")
        if text == "exit":
            raise SystemExit("a secret of the request")
        if text == "refuse":
            raise InvalidRequest("not this one", param="user")
        if text == "list":
            return []
        if text == "unwritable":
            return {**body, "user": object()}
        if text == "model":
            return {**body, "model": "other"}
        if text == "about":
            return {**body, "user": "/".join(about)}

    def answer(self, about):
        return OddAnswer()

class OddAnswer:
    def delta(self, text, channel):
        if "explode" in text:
            raise RuntimeError("a secret of the answer")
        if "exit" in text:
            raise SystemExit("a secret of the answer")
        return chr(0xD800) if "half" in text else text

    def end(self, channel):
        return ""

class Slow:
    slow = True
    def answer(self, about):
        return SlowAnswer()

class SlowAnswer(OddAnswer):
    def delta(self, text, channel):
        time.sleep(0.01)
        return text.replace("slowly", "SLOWLY")
'''
BACKEND = {"health": None, "apis": ["chat", "completions", "responses", "messages"]}


@pytest.fixture(scope="module")
def laya(upstream, tmp_path_factory):
    directory = tmp_path_factory.mktemp("custom")
    (directory / "shout.py").write_text(EXAMPLE)
    (directory / "more.py").write_text(MORE)
    config = {
        "backends": {"up": {"url": upstream.url, **BACKEND}, "two": {"url": upstream.url, **BACKEND}},
        "routes": [{"name": "all", "match": "*", "to": "up"}, {"name": "other", "match": "other", "to": "two"}],
        "stages": {"custom": ["shout:make", "more:Odd", "more:Slow"]},
    }
    with running(config, directory) as server:
        yield server


def events(raw: bytes) -> list[dict]:
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]


def test_the_example_of_the_documentation_rewrites_request_and_answer(laya, upstream):
    upstream.script = lambda asked: [answer(completion("say please and thank you, please"))]
    status, body, _ = laya.chat("m", "hello")
    assert status == 200 and body["choices"][0]["message"]["content"] == "say PLEASE and thank you, PLEASE"
    sent = upstream.asked[-1].json()["messages"]
    assert sent[0] == {"role": "system", "content": "Be polite."} and sent[1]["content"] == "hello"


@pytest.mark.parametrize("size", [1, 3, 100])
def test_texts_of_a_stream_are_rewritten_over_any_cutting(laya, upstream, size):
    text = "say please and thank you, please"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    upstream.script = lambda asked: stream(*pieces)
    _, raw, _ = laya.call("POST", "/v1/chat/completions", {"model": "m", "stream": True, "messages": []})
    deltas = [choice["delta"] for event in events(raw) for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "say PLEASE and thank you, PLEASE"
    assert raw.endswith(b"data: [DONE]\n\n")


def frame(data: dict) -> bytes:
    return chunked(f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode())


def test_texts_of_completions_messages_and_responses_are_rewritten_too(laya, upstream):
    upstream.script = lambda asked: [answer({"choices": [{"index": 0, "text": "oh please", "finish_reason": "stop"}]})]
    _, raw, _ = laya.call("POST", "/v1/completions", {"model": "m", "prompt": "x"})
    assert json.loads(raw)["choices"][0]["text"] == "oh PLEASE"
    upstream.script = lambda asked: [answer({"type": "message", "content": [{"type": "text", "text": "oh please"}]})]
    _, raw, _ = laya.call("POST", "/v1/messages", {"model": "m", "max_tokens": 5, "messages": []})
    assert json.loads(raw)["content"][0]["text"] == "oh PLEASE"
    part = {"type": "output_text", "text": "oh please", "annotations": []}
    made = {"id": "r", "object": "response", "output": [{"type": "message", "content": [part]}]}
    upstream.script = lambda asked: [answer(made)]
    _, raw, _ = laya.call("POST", "/v1/responses", {"model": "m", "input": "x"})
    assert json.loads(raw)["output"][0]["content"][0]["text"] == "oh PLEASE"


def test_numbers_of_any_size_pass_a_stage(laya, upstream):
    """(case 31) In plain answers and in events, of each API."""
    big = 10**40
    plain = {"choices": [{"index": 0, "message": {"content": "please"}, "finish_reason": "stop"}], "x": big}
    upstream.script = lambda asked: [answer(plain)]
    assert laya.chat("m", "hi")[1] == {**plain, "choices": [{**plain["choices"][0], "message": {"content": "PLEASE"}}]}
    parts = {
        "chat/completions": [{"type": "x", "choices": [{"index": 0, "delta": {"content": "please "}, "finish_reason": "stop"}], "x": big}],
        "responses": [{"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": "please ", "x": big},
                      {"type": "response.completed", "response": {"id": "r", "output": []}, "x": big}],
        "messages": [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "please "}, "x": big}, {"type": "message_stop", "x": big}],
    }  # fmt: skip
    for path, sent in parts.items():
        upstream.script = lambda asked, sent=sent: [SSE_HEAD, *map(frame, sent), DONE]
        members = {"input": "x"} if path == "responses" else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
        found = events(laya.call("POST", f"/v1/{path}", {"model": "m", "stream": True, **members})[1])
        assert found[0]["x"] == big and "PLEASE" in json.dumps(found), path


def test_a_stream_of_messages_keeps_its_order_and_loses_nothing(laya, upstream):
    def delta(text):
        return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}

    parts = [
        {"type": "message_start", "message": {"usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        delta("oh ple"), delta("ase, pl"), {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}, {"type": "message_stop"},
    ]  # fmt: skip
    upstream.script = lambda asked: [SSE_HEAD, *(frame(part) for part in parts), b"0\r\n\r\n"]
    _, raw, _ = laya.call("POST", "/v1/messages", {"model": "m", "max_tokens": 5, "messages": [], "stream": True})
    found = events(raw)
    assert "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta") == "oh PLEASE, pl"
    assert [event["type"] for event in found][-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert found[-4]["type"] == "content_block_delta"


def test_a_stream_of_responses_tells_the_same_text_everywhere(laya, upstream):
    place = {"item_id": "i", "output_index": 0, "content_index": 0}
    part = {"type": "output_text", "text": "oh please, pl", "annotations": []}
    item = {"type": "message", "id": "i", "content": [part]}
    parts = [
        {"type": "response.created", "response": {"id": "r", "output": []}},
        {"type": "response.output_text.delta", **place, "delta": "oh plea"},
        {"type": "response.output_text.delta", **place, "delta": "se, pl"},
        {"type": "response.output_text.done", **place, "text": "oh please, pl"},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": [item]}},
    ]
    frames = [frame({**part, "sequence_number": number}) for number, part in enumerate(parts)]
    upstream.script = lambda asked: [SSE_HEAD, *frames, b"0\r\n\r\n"]
    _, raw, _ = laya.call("POST", "/v1/responses", {"model": "m", "input": "x", "stream": True})
    found = events(raw)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta") == "oh PLEASE, pl"
    texts = [found[-4]["text"], found[-3]["part"]["text"], found[-2]["item"]["content"][0]["text"]]
    texts.append(found[-1]["response"]["output"][0]["content"][0]["text"])
    assert texts == ["oh PLEASE, pl"] * 4


@pytest.mark.parametrize("how", ["raise", "exit", "list", "unwritable"])
def test_a_fault_is_that_requests_500_with_the_stages_name_and_no_more(laya, upstream, how):
    upstream.asked.clear()
    status, body, _ = laya.chat("m", "x", user=how)
    assert status == 500 and body["error"]["code"] == "stage_failed" and body["error"]["message"] == "The stage more:Odd failed."
    assert not upstream.asked and "secret" not in json.dumps(body)
    upstream.script = lambda asked: [answer(completion("fine"))]
    assert laya.chat("m", "x")[0] == 200
    assert laya.metric("laya_stage_faults_total", stage="more:Odd") >= 1
    assert laya.wait_for(lambda: any("more:Odd" in line.get("text", "") for line in laya.lines))
    assert "secret" not in json.dumps(laya.lines)


def test_a_stage_may_refuse_a_request(laya):
    status, body, _ = laya.chat("m", "x", user="refuse")
    assert status == 400 and body["error"] == {
        "message": "not this one", "type": "invalid_request_error", "param": "user", "code": None,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["explode", "exit", "half a pair"])
def test_a_fault_in_a_plain_answer_is_a_500(laya, upstream, text):
    upstream.script = lambda asked: [answer(completion(text))]
    status, body, _ = laya.chat("m", "x")
    assert status == 500 and "more:Odd" in body["error"]["message"] and "secret" not in json.dumps(body)


def test_a_fault_within_a_stream_ends_it_with_the_error(laya, upstream):
    begun, *rest = stream("good ", "explode ", "never ")[1:]
    upstream.script = lambda asked: [SSE_HEAD, begun, Sleep(0.3), *rest]
    with laya.connect() as sock:
        sock.sendall(post(b'{"model":"m","stream":true,"messages":[]}'))
        raw = read_all(sock)
    assert b"good" in raw and b"[DONE]" not in raw and b"never" not in raw and not raw.endswith(b"0\r\n\r\n")
    assert events(raw)[-1]["error"]["message"] == "The stage more:Odd failed."


def test_a_stage_may_change_the_model_and_so_the_route(laya, upstream):
    upstream.script = lambda asked: [answer(completion("x"))]
    assert laya.chat("m", "x", user="model")[2]["x-laya-route"] == "other"


def test_a_stage_is_told_where_the_request_goes(laya, upstream):
    upstream.script = lambda asked: [answer(completion("x"))]
    laya.chat("m", "x", user="about")
    assert upstream.asked[-1].json()["user"] == "chat/all/"


def test_slow_stages_keep_order_and_do_not_stop_the_loop(laya, upstream):
    upstream.script = lambda asked: stream(*(["slowly "] * 100))
    _, raw, _ = laya.call("POST", "/v1/chat/completions", {"model": "m", "stream": True, "messages": []})
    text = "".join(choice["delta"].get("content") or "" for event in events(raw) for choice in event["choices"])
    assert text == "SLOWLY " * 100 and raw.endswith(b"data: [DONE]\n\n")


def test_a_client_that_leaves_a_slow_stage_leaves_nothing_behind(laya, upstream):
    upstream.script = lambda asked: [SSE_HEAD, *stream(*(["slowly "] * 300))[1:-1], DONE]
    sock = laya.connect()
    body = b'{"model":"m","stream":true,"messages":[]}'
    sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert sock.recv(100)
    sock.close()
    assert laya.wait_for(lambda: laya.metric("laya_backend_inflight") == 0)
    upstream.script = lambda asked: [answer(completion("fine"))]
    assert laya.chat("m", "x")[0] == 200


HANGING = '''
import threading, time
from pathlib import Path

FREED = Path(__file__).with_name("freed")

def hang():
    while not FREED.exists():
        time.sleep(0.02)

class Hanging:
    def request(self, body, about):
        if body.get("user") == "hang":
            hang()

    def answer(self, about):
        return self

    def delta(self, text, channel):
        if "hang" in text:
            hang()
        return text

    def end(self, channel):
        return ""

class Promising:
    async def request(self, body, about):
        return body
'''


@pytest.fixture
def hanging(upstream, tmp_path):
    (tmp_path / "hanging.py").write_text(HANGING)
    config = {
        "backends": {"up": {"url": upstream.url, **BACKEND}}, "routes": [{"match": "*", "to": "up"}],
        "stages": {"custom": ["hanging:Hanging"], "custom_timeout_s": 0.5},
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        yield laya
        (tmp_path / "freed").touch()


def test_a_stage_that_hangs_ends_its_own_request_and_no_other(hanging, upstream):
    upstream.script = lambda asked: [answer(completion("fine"))]
    for _ in range(3):
        status, body, _ = hanging.chat("m", "x", user="hang")
        assert status == 500 and body["error"]["code"] == "stage_failed" and "hanging:Hanging" in body["error"]["message"]
        assert hanging.chat("m", "x")[0] == 200
        assert hanging.chat("m", "x" * 100_000)[0] == 200  # large bodies have another worker
    assert hanging.metric("laya_stage_faults_total") == 3


def test_a_stage_that_hangs_in_an_answer_ends_that_answer(hanging, upstream):
    upstream.script = lambda asked: [answer(completion("hang"))]
    status, body, _ = hanging.chat("m", "x")
    assert status == 500 and "hanging:Hanging" in body["error"]["message"]
    begun, *rest = stream("good ", "hang ", "never")[1:]
    upstream.script = lambda asked: [SSE_HEAD, begun, Sleep(0.3), *rest]
    with hanging.connect() as sock:
        sock.sendall(post(b'{"model":"m","stream":true,"messages":[]}'))
        raw = read_all(sock)
    assert b"good " in raw and b"stage_failed" in raw and b"never" not in raw and b"[DONE]" not in raw
    assert hanging.wait_for(lambda: hanging.metric("laya_backend_inflight") == 0)


def test_only_so_many_may_hang_and_those_that_return_make_room(hanging, upstream, tmp_path):
    upstream.script = lambda asked: [answer(completion("fine"))]
    said = [hanging.chat("m", "x", user="hang")[0] for _ in range(MAX_HANGING)]
    assert said == [500] * MAX_HANGING
    assert hanging.chat("m", "x")[0] == 503
    (tmp_path / "freed").touch()
    assert hanging.wait_for(lambda: hanging.chat("m", "x")[0] == 200)


def test_a_stage_must_not_promise_its_work(upstream, tmp_path):
    """A coroutine is no body: the stage is named."""
    (tmp_path / "hanging.py").write_text(HANGING)
    config = {"backends": {"up": {"url": upstream.url, **BACKEND}}, "routes": [{"match": "*", "to": "up"}]}
    with running({**config, "stages": {"custom": ["hanging:Promising"]}}, tmp_path) as laya:
        status, body, _ = laya.chat("m", "x")
        assert status == 500 and "hanging:Promising" in body["error"]["message"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere_to_be_found:make", "ModuleNotFoundError"), ("more_broken:make", "SyntaxError"), ("json:nothing", "AttributeError"),
        ("more:Fails", "RuntimeError: no licence"), ("collections:OrderedDict", "neither"),
    ],
)  # fmt: skip
def test_a_stage_that_cannot_be_had_keeps_the_server_from_starting(tmp_path, name, words):
    (tmp_path / "more_broken.py").write_text("def make(:\n")
    (tmp_path / "more.py").write_text("class Fails:\n    def __init__(self):\n        raise RuntimeError('no licence')\n")
    config = {"backends": {"b": {"url": "http://127.0.0.1:9"}}, "routes": [{"match": "*", "to": "b"}], "stages": {"custom": [name]}}
    with running(config, tmp_path, wait=False) as laya:
        assert laya.process.wait(30) == 78
        laya._reader.join(5)
        said = " ".join(laya.other)
        assert f"stages.custom: {name}" in said and words in said and not laya.lines


def test_check_says_so_before_anybody_starts(tmp_path):
    (tmp_path / "c.yaml").write_text("backends: {b: {url: 'http://127.0.0.1:9'}}\nroutes: [{match: '*', to: b}]\nstages: {custom: ['nowhere:x']}")
    done = subprocess.run(
        [sys.executable, "-m", "laya", "check", "--config", "c.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 78 and "stages.custom: nowhere:x" in done.stderr, done.stderr


def test_a_reload_takes_other_stages_and_keeps_the_old_where_one_cannot_be_had(upstream, tmp_path):
    (tmp_path / "shout.py").write_text(EXAMPLE)
    config = {"backends": {"up": {"url": upstream.url, **BACKEND}}, "routes": [{"match": "*", "to": "up"}]}
    with running(config, tmp_path) as laya:
        upstream.script = lambda asked: [answer(completion("please"))]
        assert laya.chat("m", "x")[1]["choices"][0]["message"]["content"] == "please"
        laya.path.write_text(json.dumps({**config, "stages": {"custom": ["shout:make"]}}))
        assert laya.wait_for(lambda: laya.chat("m", "x")[1]["choices"][0]["message"]["content"] == "PLEASE")
        laya.path.write_text(json.dumps({**config, "stages": {"custom": ["gone:make"]}}))
        assert laya.wait_for(lambda: laya.metric("laya_config_reload_failed") == 1)
        assert laya.chat("m", "x")[1]["choices"][0]["message"]["content"] == "PLEASE"
