"""Redaction as clients meet it: the real server, a scripted backend that says back what it was sent, the engine in process."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from raw import post, read_all, read_until, unchunk
from redaction import EMAIL, PHONE, chunk, content_of, events_of, frames
from scripted_upstream import SSE_HEAD, Asked, Close, ScriptedUpstream, Sleep, Split, answer, chunked, completion
from server import Laya, running

TEXT = f"call {PHONE} or write to {EMAIL}, 你好"
MASKED = "call [PHONE_1] or write to [EMAIL_1], 你好"
OTHER = "13900139000"


def last_text(body: dict) -> str:
    return body["messages"][-1]["content"]


def echo(asked: Asked) -> list:
    """Each API's answer with the request's last text, streamed one character a delta and one byte a segment."""
    body = asked.json()
    if asked.target.endswith("/embeddings"):
        return [answer({"object": "list", "data": [{"embedding": [0.5]}], "input": body["input"], "usage": {"prompt_tokens": 1}})]
    if asked.target.endswith("/completions") and "prompt" in body:
        return [answer({"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": body["prompt"], "finish_reason": "stop"}]})]
    if not body.get("stream"):
        return [answer(completion(last_text(body)))]
    calls = [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "send", "arguments": ""}}]
    arguments = json.dumps({"to": last_text(body), "note": "[PHONE_1]"}, ensure_ascii=False)
    tail = [chunk(finish="stop")]
    if body.get("tools"):
        tail = [chunk(tool_calls=calls)]
        tail += [chunk(tool_calls=[{"index": 0, "function": {"arguments": char}}]) for char in arguments]
        tail.append(chunk(finish="tool_calls"))
    stream = frames(chunk(role="assistant"), *[chunk(char) for char in last_text(body)], *tail, "[DONE]")
    return [SSE_HEAD, Split(chunked(stream), 1), b"0\r\n\r\n"]


def native(asked: Asked) -> list:
    """A backend that has Responses and Messages itself."""
    body = asked.json()
    if asked.target.startswith("/v1/messages"):
        text = last_text(body)
        events = [
            {"type": "message_start", "message": {"id": "m", "type": "message", "role": "assistant", "content": []}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            *[{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": char}} for char in text],
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"},
        ]  # fmt: skip
    else:
        item = {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": body["input"]}]}
        deltas = [
            {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "item_id": "m", "delta": char}
            for char in body["input"]
        ]
        response = {"id": "r", "object": "response", "status": "completed", "output": [item]}
        events = [*deltas, {"type": "response.output_item.done", "output_index": 0, "item": item}, {"type": "response.completed", "response": response}]
    return [SSE_HEAD, chunked(frames(*events, names=True)), b"0\r\n\r\n"]


@pytest.fixture(scope="module")
def own_upstream():
    with ScriptedUpstream(native) as scripted:
        yield scripted


@pytest.fixture(scope="module")
def laya(upstream, own_upstream, tmp_path_factory):
    config = {
        "server": {"log_level": "debug"},
        "backends": {
            "up": {"url": upstream.url, "health": None, "apis": ["chat", "completions", "embeddings"]},
            "own": {"url": own_upstream.url, "health": None, "apis": ["chat", "responses", "messages"]},
        },
        "routes": [
            {"name": "all", "match": "*", "to": "up"}, {"name": "own", "match": "own", "to": "own"},
            {"name": "open", "match": "open", "to": "up", "redact": False},
        ],
        "stages": {"redact": {"enabled": True, "patterns": {"employee": r"EMP-\d{6}"}}},
    }  # fmt: skip
    with running(config, tmp_path_factory.mktemp("redaction")) as server:
        yield server


@pytest.fixture(autouse=True)
def _fresh(upstream):
    upstream.script = echo
    upstream.asked.clear()


def ask(laya: Laya, path: str, body: dict, expected: int = 200) -> bytes:
    status, raw, _ = laya.call("POST", path, {"model": "m", **body})
    assert status == expected, raw
    return raw


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_a_plain_chat_goes_out_masked_and_comes_back_whole(laya, upstream):
    """(cases 4 and 57)"""
    raw = ask(laya, "/v1/chat/completions", {"messages": user(TEXT + " EMP-123456")})
    assert last_text(upstream.asked[-1].json()) == MASKED + " [EMPLOYEE_1]"
    assert json.loads(raw)["choices"][0]["message"]["content"] == TEXT + " EMP-123456"


def test_a_streamed_chat_with_a_tool_call(laya, upstream):
    """One character a delta, one byte a segment. (cases 11, 54 and 57)"""
    tools = [{"type": "function", "function": {"name": "send", "description": f"not to {PHONE}", "parameters": {}}}]
    raw = ask(laya, "/v1/chat/completions", {"messages": user(TEXT), "tools": tools, "stream": True})
    assert PHONE not in upstream.asked[-1].body.decode()
    assert content_of(raw.replace(b"data: [DONE]\n\n", b"")) == TEXT and raw.endswith(b"data: [DONE]\n\n")
    calls = [call for event in events_of(raw)[:-1] for call in event["choices"][0]["delta"].get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"to": TEXT, "note": PHONE}


def test_completions_and_embeddings(laya, upstream):
    """(case 57)"""
    raw = ask(laya, "/v1/completions", {"prompt": TEXT})
    assert upstream.asked[-1].json()["prompt"] == MASKED and json.loads(raw)["choices"][0]["text"] == TEXT
    raw = ask(laya, "/v1/embeddings", {"input": [TEXT, "x"]})
    assert upstream.asked[-1].json()["input"] == [MASKED, "x"] and json.loads(raw)["input"] == [TEXT, "x"]


@pytest.mark.parametrize(("model", "stream"), [("m", False), ("m", True), ("own", True)])
def test_responses_translated_and_passed_on(laya, upstream, own_upstream, model, stream):
    raw = ask(laya, "/v1/responses", {"model": model, "input": TEXT, "instructions": "be brief", "stream": stream})
    sent = (own_upstream if model == "own" else upstream).asked[-1].body.decode()
    assert PHONE not in sent and "[PHONE_1]" in sent
    if not stream:
        assert json.loads(raw)["output"][0]["content"][0]["text"] == TEXT
        return
    events = events_of(raw)
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == TEXT
    done = next(event for event in events if event["type"] == "response.output_item.done")
    assert done["item"]["content"][0]["text"] == TEXT
    assert events[-1]["type"] == "response.completed" and events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT


@pytest.mark.parametrize("model", ["m", "own"])
def test_messages_translated_and_passed_on(laya, upstream, own_upstream, model):
    body = {"model": model, "max_tokens": 99, "system": f"never call {PHONE}", "messages": user(TEXT), "stream": True}
    raw = ask(laya, "/v1/messages", body)
    sent = (own_upstream if model == "own" else upstream).asked[-1].body.decode()
    assert PHONE not in sent and EMAIL not in sent
    events = events_of(raw)
    assert "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta") == TEXT
    assert events[-1]["type"] == "message_stop"


def test_a_large_body_is_redacted_in_the_worker(laya, upstream):
    text = "lorem ipsum dolor 42 sit amet. " * 12_000 + TEXT
    raw = ask(laya, "/v1/chat/completions", {"messages": user(text)})
    assert json.loads(raw)["choices"][0]["message"]["content"] == text
    assert PHONE not in upstream.asked[-1].body.decode()


def test_requests_at_the_same_time_get_their_own_values(laya, upstream):
    """(case 55)"""

    def slow(asked: Asked) -> list:
        return [Sleep(0.2), *echo(asked)]

    upstream.script = slow
    numbers = [f"1380013{8000 + number}" for number in range(16)]
    got: dict[str, str] = {}

    def one(number: str) -> None:
        got[number] = content_of(ask(laya, "/v1/chat/completions", {"messages": user(f"x {number}"), "stream": True}).split(b"data: [DONE]")[0])

    threads = [threading.Thread(target=one, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: f"x {number}" for number in numbers}
    assert {last_text(asked.json()) for asked in upstream.asked} == {"x [PHONE_1]"}


def test_the_first_words_do_not_wait_for_the_rest(laya, upstream):
    """(case 56)"""
    upstream.script = lambda asked: [SSE_HEAD, chunked(frames(chunk("first words [PHONE_1] and"))), Sleep(8), b"0\r\n\r\n"]
    body = json.dumps({"model": "m", "messages": user(PHONE), "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", laya.port), timeout=10) as sock:
        sock.sendall(post(body))
        read_until(sock, f"first words {PHONE} and".encode(), 5)


def test_an_upstream_that_dies_after_half_a_placeholder(laya, upstream):
    """(case 13)"""
    upstream.script = lambda asked: [SSE_HEAD, chunked(frames(chunk("at [PHONE_1] [PHO"))), Close()]
    body = json.dumps({"model": "m", "messages": user(PHONE), "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", laya.port), timeout=10) as sock:
        sock.sendall(post(body))
        raw, whole = unchunk(read_all(sock).partition(b"\r\n\r\n")[2])
    events = events_of(raw)
    assert "error" in events[-1] and not whole
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert said == f"at {PHONE} [PHO" and b"[DONE]" not in raw


def test_errors_that_repeat_the_prompt_have_the_values(laya, upstream):
    upstream.script = lambda asked: [answer({"error": {"message": f"bad: {last_text(asked.json())}", "type": "invalid_request_error"}}, "400 Bad Request")]
    raw = ask(laya, "/v1/chat/completions", {"messages": user(TEXT)}, 400)
    assert json.loads(raw)["error"]["message"] == f"bad: {TEXT}"


def test_a_route_that_does_not_redact_sends_what_came(laya, upstream):
    body = {"model": "open", "messages": user(TEXT)}
    ask(laya, "/v1/chat/completions", body)
    assert last_text(upstream.asked[-1].json()) == TEXT


def test_nothing_redacted_is_in_a_log_or_a_metric(laya, upstream):
    """(case 70)"""
    ask(laya, "/v1/chat/completions", {"messages": user(f"{OTHER} {EMAIL}")})
    page = laya.get("/metrics")[1].decode()
    assert laya.wait_for(lambda: any("phone" in json.dumps(line) for line in laya.lines))
    logged = json.dumps(laya.lines, ensure_ascii=False) + "".join(laya.other)
    for value in (PHONE, OTHER, EMAIL, "EMP-123456"):
        assert value not in logged and value not in page


def test_nothing_is_stored_where_it_is_redacted(laya):
    raw = ask(laya, "/v1/responses", {"input": TEXT, "store": True}, 400)
    assert b"store" in raw
    status, raw, _ = laya.call("POST", "/v1/responses", {"model": "m", "input": TEXT})
    assert status == 200 and json.loads(raw)["store"] is False
    assert laya.get(f"/v1/responses/{json.loads(raw)['id']}")[0] == 404


def test_block_refuses_before_anything_is_sent(upstream, tmp_path):
    config = {
        "backends": {"up": {"url": upstream.url, "health": None}}, "routes": [{"name": "all", "match": "*", "to": "up"}],
        "stages": {"redact": {"enabled": True, "mode": "block"}},
    }  # fmt: skip
    with running(config, tmp_path) as blocking:
        before = len(upstream.asked)
        raw = ask(blocking, "/v1/chat/completions", {"messages": user(TEXT)}, 400)
        error = json.loads(raw)["error"]
        assert error["code"] == "redaction_blocked" and error["type"] == "invalid_request_error"
        assert PHONE not in raw.decode() and "phone" in error["message"] and len(upstream.asked) == before
        ask(blocking, "/v1/chat/completions", {"messages": user("nothing in it")})


@pytest.mark.parametrize("backend", ["up", "own"])
def test_report_counts_and_lets_conversations_go_on(upstream, own_upstream, tmp_path, backend):
    """Nothing is replaced, so nothing is refused: what is stored, what is sent and what is answered is as without redaction."""
    config = {
        "backends": {
            "up": {"url": upstream.url, "health": None, "apis": ["chat"]},
            "own": {"url": own_upstream.url, "health": None, "apis": ["responses"]},
        },
        "routes": [{"match": "*", "to": backend}],
        "stages": {"redact": {"enabled": True, "mode": "report"}},
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        streams = {"stream": True} if backend == "own" else {}
        raw = ask(laya, "/v1/responses", {"input": TEXT, "store": True, **streams})
        assert PHONE in raw.decode() and "PHONE_1" not in raw.decode()
        first = json.loads(raw)["id"] if backend == "up" else "r"
        ask(laya, "/v1/responses", {"input": "and now?", "previous_response_id": first, **streams})
        assert laya.metric("laya_redacted_total", kind="phone") >= 1


def test_a_pattern_that_cannot_be_used_stops_the_start(tmp_path):
    config = {
        "backends": {"up": {"url": "http://127.0.0.1:9/v1"}}, "routes": [{"name": "all", "match": "*", "to": "up"}],
        "stages": {"redact": {"enabled": True, "patterns": {"bad": "(a"}}},
    }  # fmt: skip
    with running(config, tmp_path, wait=False) as refused:
        assert refused.process.wait(60) == 78
        refused.stop()
        assert "stages.redact.patterns.bad: " in str(refused.other)


def test_the_engine_in_process_sees_placeholders_only(model_path, tmp_path):
    """The model repeats a text; what it repeats of the placeholder comes back as the value."""
    config = {
        "inference": {"model": str(model_path), "name": "smol", "max_seq_len": 1024, "max_num_seqs": 2, "kv_cache": "64MiB"},
        "stages": {"redact": {"enabled": True}},
    }
    body = {"model": "smol", "temperature": 0, "max_tokens": 24}
    prompt = f"Repeat: number {PHONE}. number {PHONE}. number {PHONE}. number"
    with running(config, tmp_path, "serve") as served:
        served.wait_ready()
        plain = json.loads(ask(served, "/v1/completions", {**body, "prompt": prompt}))["choices"][0]["text"]
        streamed = ask(served, "/v1/completions", {**body, "prompt": prompt, "stream": True})
        texts = [event["choices"][0]["text"] for event in events_of(streamed)[:-1] if event["choices"]]
        assert plain.startswith(f" {PHONE}. number {PHONE}") and "".join(texts) == plain


def test_a_value_in_the_name_of_the_model_is_refused_and_told_nowhere(laya, upstream):
    """The router and the backend need the name as it is. (case 58)"""
    before = len(upstream.asked)
    status, body, _ = laya.call("POST", "/v1/chat/completions", {"model": f"m-{EMAIL}", "messages": []})
    error = json.loads(body)["error"]
    assert status == 400 and error["code"] == "redaction_blocked" and error["param"] == "model" and EMAIL not in error["message"]
    assert len(upstream.asked) == before and not any(EMAIL in json.dumps(line) for line in laya.lines)
