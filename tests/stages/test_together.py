"""Stages together: what the cache holds of a redacted request, whose values come back, and what nobody ever sees."""

from __future__ import annotations

import json
import threading

import pytest

from scripted_upstream import Asked, Sleep, answer, completion, stream
from server import running

PLUGIN = '''
class Look:
    """Writes down what it sees."""
    def request(self, body, about):
        with open("seen.txt", "a") as file:
            file.write(repr(body))

    def answer(self, about):
        return self

    def delta(self, text, channel):
        with open("seen.txt", "a") as file:
            file.write(text)
        return text

    def end(self, channel):
        return ""
'''
FIRST, SECOND = "13800138000", "13912345678"


def echo(asked: Asked) -> list:
    text = asked.json()["messages"][-1]["content"]
    return stream(text[:9], text[9:20], text[20:]) if asked.json().get("stream") else [answer(completion(text))]


@pytest.fixture(scope="module")
def laya(upstream, tmp_path_factory):
    directory = tmp_path_factory.mktemp("together")
    (directory / "look.py").write_text(PLUGIN)
    config = {
        "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"name": "all", "match": "*", "to": "up"}],
        "stages": {"redact": {"enabled": True}, "cache": {"enabled": True}, "custom": ["look:Look"]},
    }
    with running(config, directory) as server:
        server.directory = directory
        yield server


def ask(laya, text: str, **members) -> tuple[str, str]:
    """(x-laya-cache, the answer's text)"""
    body = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": text}], **members}
    status, raw, headers = laya.call("POST", "/v1/chat/completions", body)
    assert status == 200, raw
    if not members.get("stream"):
        return headers["x-laya-cache"], json.loads(raw)["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
    return headers["x-laya-cache"], "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])


@pytest.mark.parametrize("streamed", [False, True])
def test_one_kept_answer_serves_requests_with_other_values(laya, upstream, streamed):
    """What is kept has placeholders, restored from the asking request's own map (cases 55, 60)."""
    upstream.script, before = echo, len(upstream.asked)
    text = f"call me at {{}} or not, {streamed}"
    assert ask(laya, text.format(FIRST), stream=streamed) == ("miss", text.format(FIRST))
    assert ask(laya, text.format(SECOND), stream=streamed) == ("hit", text.format(SECOND))
    assert ask(laya, text.format(SECOND), stream=not streamed)[1] == text.format(SECOND)
    assert FIRST.encode() not in b"".join(asked.body for asked in upstream.asked[before:])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_long_kept_answer_is_told_as_a_stream_with_its_values(laya, upstream, path):
    """In several deltas, with a value at each place where one is cut."""
    text = f"{FIRST} 你好 " * 40_000
    chat = path.endswith("chat/completions")
    member = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    choice = {"index": 0, "finish_reason": "stop"}
    upstream.script = lambda asked: [answer(completion(last_of(asked)) if chat else {
        "id": "c", "object": "text_completion", "choices": [{**choice, "text": last_of(asked)}], "usage": {"total_tokens": 1},
    })]  # fmt: skip
    for streamed, word in ((False, "miss"), (True, "hit")):
        body = {"model": "m", "temperature": 0, "stream": streamed, **member}
        status, raw, headers = laya.call("POST", path, body)
        assert (status, headers["x-laya-cache"]) == (200, word)
    choices = [c for line in raw.splitlines() if line.startswith(b"data: {") for c in json.loads(line[6:])["choices"]]
    assert "".join((c["delta"].get("content") if chat else c["text"]) or "" for c in choices) == text
    assert choices[-1]["finish_reason"] == "stop"


def last_of(asked: Asked) -> str:
    body = asked.json()
    return body["prompt"] if "prompt" in body else body["messages"][-1]["content"]


def test_twins_of_one_generation_get_their_own_values(laya, upstream):
    """(cases 55, 61)"""
    upstream.script, before = (lambda asked: [Sleep(0.7), *echo(asked)]), len(upstream.asked)
    found: dict[str, tuple[str, str]] = {}
    numbers = [FIRST, SECOND, "18612340000"]
    threads = [
        threading.Thread(target=lambda n=n: found.__setitem__(n, ask(laya, f"twins with {n}", stream=True))) for n in numbers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {number: text for number, (_, text) in found.items()} == {n: f"twins with {n}" for n in numbers}
    assert len(upstream.asked) == before + 1


def test_no_stage_behind_it_no_log_and_no_metric_sees_what_was_redacted(laya, upstream):
    """(case 60)"""
    upstream.script = echo
    ask(laya, f"nobody sees {FIRST}")
    seen = (laya.directory / "seen.txt").read_text() + laya.get("/metrics")[1].decode() + json.dumps(laya.lines)
    assert FIRST not in seen and SECOND not in seen and "nobody sees" in seen
    assert laya.metric("laya_redacted_total", kind="phone") >= 1
    assert laya.wait_for(lambda: any(line.get("redacted") == {"phone": 1} and line.get("cache") for line in laya.lines))
