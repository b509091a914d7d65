"""What each key may take: requests and tokens a minute, requests at the same time, prompts; and what is told of it."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading

import pytest

from laya.config import KeyConfig
from laya.errors import RateLimited
from laya.gateway.limits import MemoryLimits
from laya.gateway.metering import Metering, duration
from laya.gateway.usage import UsageWatch
from scripted_upstream import DONE, SSE_HEAD, Sleep, answer, chunked, completion, delta
from server import running

SECRETS = {"rpm": "sk-rpm-3f9d2c", "tpm": "sk-tpm-77ab01", "few": "sk-few-c0ffee", "short": "sk-short-5a5a5a", "free": "sk-free-12ab34"}


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(**members) -> KeyConfig:
    return KeyConfig(name="k", key="x", **members)


def test_requests_a_minute_fill_evenly_and_say_when_to_come_back():
    now = Time()
    limits = MemoryLimits(now)
    spent = [limits.take(key(rpm=6), 0) for _ in range(6)]
    assert spent == [None] * 6
    wait = limits.take(key(rpm=6), 0)
    assert wait.what == "requests" and wait.seconds == pytest.approx(10)
    now.now += 9.9
    assert limits.take(key(rpm=6), 0).seconds == pytest.approx(0.1)
    now.now += 0.2
    assert limits.take(key(rpm=6), 0) is None
    now.now += 3600
    assert limits.standing(key(rpm=6)) == ((6, 6, 0.0), None)


def test_tokens_are_settled_by_what_was_used():
    limits = MemoryLimits(now := Time())
    tokens = key(tpm=600)
    assert limits.take(tokens, 100) is None
    limits.settle(tokens, 100, 1100)
    assert limits.standing(tokens)[1].remaining == 0
    assert limits.take(tokens, 1).seconds == pytest.approx(50.1)
    now.now += 51
    assert limits.take(tokens, 1) is None
    limits.settle(tokens, 1, 0)
    assert limits.standing(tokens)[1].remaining == 10


def test_a_request_of_more_than_a_minute_is_served_when_the_minute_is_whole():
    limits = MemoryLimits(Time())
    assert limits.take(key(tpm=100), 5000) is None
    assert limits.take(key(tpm=100), 5000).seconds == pytest.approx(60)


def test_what_is_refused_takes_nothing():
    limits = MemoryLimits(Time())
    both = key(rpm=10, tpm=100)
    assert limits.take(both, 90) is None
    assert limits.take(both, 90).what == "tokens"
    assert limits.standing(both)[0].remaining == 9


def test_a_reload_keeps_a_bucket_unless_its_size_changed():
    limits = MemoryLimits(Time())
    for _ in range(3):
        limits.take(key(rpm=10), 0)
    assert limits.standing(key(rpm=10, tpm=5))[0].remaining == 7
    assert limits.standing(key(rpm=20))[0].remaining == 20


def test_requests_at_the_same_time_are_given_back_once():
    meter = Metering()
    few = key(max_concurrent=2)
    tickets = [meter.admit(few, 10) for _ in range(2)]
    with pytest.raises(RateLimited) as refused:
        meter.admit(few, 10)
    assert refused.value.retry_after and "'k'" in refused.value.message
    tickets[0].settle(None)
    assert meter.admit(few, 10)


@pytest.mark.parametrize(("seconds", "text"), [(0, b"0ms"), (0.012, b"12ms"), (1.5, b"1.5s"), (360, b"6m0s"), (61.2, b"1m1s")])
def test_durations_are_written_as_openai_writes_them(seconds, text):
    assert duration(seconds) == text


ANSWERS = {
    "chat": (b'{"choices":[{"message":{"content":"x"}}],"usage":{"prompt_tokens": 7, "completion_tokens": 5,"total_tokens":12}}', (7, 5)),
    "responses": (b'{"usage":{"input_tokens":3,"input_tokens_details":{"cached_tokens":2},"output_tokens":4}}', (3, 4)),
    "messages": (b'event: message_start\ndata: {"usage":{"input_tokens":9,"output_tokens":1}}\n\n'
                 b'data: {"type":"message_delta","usage":{"output_tokens":33}}\n\n', (9, 33)),
    "embeddings": (b'{"data":[],"usage":{"prompt_tokens":8,"total_tokens":8}}', (8, 0)),
    "none": (b'{"choices":[]}', None),
    "text that speaks of usage": (json.dumps({"content": '{"usage":{"prompt_tokens":1000}}'}).encode(), None),
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 7, 10**6])
@pytest.mark.parametrize("name", ANSWERS)
def test_usage_is_read_from_answers_of_every_api_in_any_chunking(name, size):
    data, tokens = ANSWERS[name]
    watch = UsageWatch()
    for start in range(0, len(data), size):
        watch.see(data[start : start + size])
    assert watch.tokens == tokens


def test_usage_is_found_at_the_end_of_a_long_answer():
    watch = UsageWatch()
    watch.see(b'{"content":"' + b"x" * 5_000_000 + b'","usage":{"prompt_tokens":1,"completion_tokens":2}}')
    assert watch.tokens == (1, 2)


# -- a server ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def laya(upstream, tmp_path_factory):
    directory = tmp_path_factory.mktemp("limits")
    digest = hashlib.sha256(SECRETS["free"].encode()).hexdigest()
    (directory / "keys.yaml").write_text(json.dumps({"keys": [{"name": "free", "sha256": digest}]}))
    config = {
        "auth": {
            "keys_file": "keys.yaml",
            "keys": [
                {"name": "rpm", "key": "${RPM}", "rpm": 3},
                {"name": "tpm", "key": SECRETS["tpm"], "tpm": 1000},
                {"name": "few", "key": SECRETS["few"], "max_concurrent": 2},
                {"name": "short", "key": SECRETS["short"], "max_prompt_tokens": 50},
            ],
        },
        "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"name": "all", "match": "*", "to": "up"}],
    }
    with running(config, directory, env={"RPM": SECRETS["rpm"]}) as server:
        server.directory = directory
        yield server


def ask(laya, name: str, text: str = "hi", **members):
    """(status, decoded body or raw, headers)."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **members}
    status, raw, headers = laya.call("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {SECRETS[name]}"})
    return status, json.loads(raw) if raw.startswith(b"{") else raw, headers


@pytest.fixture(autouse=True)
def _script(request):
    if "upstream" in request.fixturenames or "laya" in request.fixturenames:
        request.getfixturevalue("upstream").script = lambda asked: [answer(completion("ok"))]


def test_requests_beyond_the_rate_are_429_with_the_standard_headers(laya):
    found = [ask(laya, "rpm") for _ in range(4)]
    assert [status for status, _, _ in found] == [200, 200, 200, 429]
    assert [headers["x-ratelimit-remaining-requests"] for _, _, headers in found] == ["2", "1", "0", "0"]
    _, body, headers = found[-1]
    assert headers["x-ratelimit-limit-requests"] == "3" and re.fullmatch(r"\d+m?s|\d+(\.\d+)?s|\d+m\d+s", headers["x-ratelimit-reset-requests"])
    assert 1 <= int(headers["retry-after"]) <= 20 and 0 < int(headers["retry-after-ms"]) <= 20_000
    assert body["error"]["code"] == "rate_limit_exceeded" and body["error"]["type"] == "rate_limit_error"
    assert SECRETS["rpm"] not in json.dumps(body)
    assert ask(laya, "free")[0] == 200


def test_tokens_beyond_the_rate_are_refused_until_they_are_there(laya, upstream):
    upstream.script = lambda asked: [
        answer(completion("ok") | {"usage": {"prompt_tokens": 400, "completion_tokens": 900, "total_tokens": 1300}})
    ]
    status, _, headers = ask(laya, "tpm")
    assert status == 200 and int(headers["x-ratelimit-remaining-tokens"]) > 900
    assert laya.metric("laya_key_tokens_total", key="tpm", kind="prompt") == 400
    assert laya.metric("laya_key_tokens_total", key="tpm", kind="generated") == 900
    status, _, headers = ask(laya, "tpm")
    assert status == 429 and headers["x-ratelimit-remaining-tokens"] == "0" and 10 < int(headers["retry-after"]) < 60


def test_tokens_of_a_stream_are_counted_by_its_usage(laya, upstream):
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":21,"completion_tokens":34,"total_tokens":55}}\n\n'
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("x")), chunked(delta(None, "stop")), chunked(usage), DONE]
    before = laya.metric("laya_key_tokens_total", key="free", kind="generated")
    assert ask(laya, "free", stream=True)[1].endswith(b"data: [DONE]\n\n")
    assert laya.metric("laya_key_tokens_total", key="free", kind="generated") == before + 34


def test_no_more_requests_at_the_same_time_than_the_key_may(laya, upstream):
    upstream.script = lambda asked: [Sleep(1.5), answer(completion("ok"))]
    results: list = []
    threads = [threading.Thread(target=lambda: results.append(ask(laya, "few")[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert upstream.wait_for(lambda: laya.metric("laya_backend_inflight") == 2)
    status, body, headers = ask(laya, "few")
    assert status == 429 and "retry-after" in headers and "under way" in body["error"]["message"]
    for thread in threads:
        thread.join(20)
    assert results == [200, 200] and ask(laya, "few")[0] == 200


def test_a_client_that_leaves_gives_its_place_back(laya, upstream):
    upstream.script = lambda asked: [Sleep(20), answer(completion("ok"))]
    body = json.dumps({"model": "m", "messages": []}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: %b\r\ncontent-length: %d\r\n\r\n"
    socks = [laya.connect() for _ in range(2)]
    for sock in socks:
        sock.sendall(head % (SECRETS["few"].encode(), len(body)) + body)
    assert upstream.wait_for(lambda: laya.metric("laya_backend_inflight") == 2)
    for sock in socks:
        sock.close()
    upstream.script = lambda asked: [answer(completion("ok"))]
    assert laya.wait_for(lambda: ask(laya, "few")[0] == 200)


def test_a_prompt_beyond_the_keys_cap_is_refused_before_a_backend_sees_it(laya, upstream):
    upstream.asked.clear()
    status, body, _ = ask(laya, "short", "word " * 100)
    assert status == 400 and body["error"]["code"] == "context_length_exceeded" and "50 tokens" in body["error"]["message"]
    assert ask(laya, "short", "word " * 30_000)[0] == 400 and not upstream.asked
    assert ask(laya, "short", "word " * 20)[0] == 200


def test_a_key_is_in_no_log_no_metric_no_error_and_no_upstream(laya, upstream):
    """(cases 69, 70)"""
    upstream.asked.clear()
    for name, secret in SECRETS.items():
        ask(laya, name)
        laya.call("POST", "/v1/chat/completions", b"{", {"x-api-key": secret})
        laya.call("GET", "/v1/models", None, {"authorization": f"Bearer {secret}x"})
    laya.call("GET", "/v1/models", None, {"authorization": "Bearer \xff\xfe"})
    seen = laya.get("/metrics")[1].decode() + laya.get("/ready")[1].decode() + json.dumps(laya.lines) + str(laya.other)
    seen += "".join(asked.head.decode("latin-1") + asked.body.decode() for asked in upstream.asked)
    for secret in SECRETS.values():
        assert secret not in seen and hashlib.sha256(secret.encode()).hexdigest() not in seen
    assert 'key="free"' in laya.get("/metrics")[1].decode()


def test_a_reload_reads_the_file_of_keys_again(laya):
    new = "sk-new-99aa88"
    digest = hashlib.sha256(new.encode()).hexdigest()
    assert laya.call("GET", "/v1/models", None, {"x-api-key": new})[0] == 401
    path = laya.directory / "keys.yaml"
    before = path.read_text()
    path.write_text(json.dumps({"keys": [*json.loads(before)["keys"], {"name": "new", "sha256": digest}]}))
    laya.process.send_signal(signal.SIGHUP)
    assert laya.wait_for(lambda: laya.call("GET", "/v1/models", None, {"x-api-key": new})[0] == 200)
    assert laya.metric("laya_key_tokens_total", key="free", kind="prompt") > 0


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"name": "a"}, "neither key nor sha256"), ({"name": "a", "sha256": "ab"}, "64 lower-case hex digits"),
        ({"name": "a", "key": "x", "sha256": "0" * 64}, "both key and sha256"),
    ],
)  # fmt: skip
def test_wrong_keys_in_the_file_are_refused_by_name(tmp_path, keys, words):
    (tmp_path / "k.yaml").write_text(json.dumps({"keys": [keys]}))
    config = {"auth": {"keys_file": "k.yaml"}, "backends": {"b": {"url": "http://127.0.0.1:9"}}, "routes": [{"match": "*", "to": "b"}]}
    with running(config, tmp_path, wait=False) as laya:
        assert laya.process.wait(30) == 78
        laya._reader.join(5)
        assert words in " ".join(laya.other) and "k.yaml" in " ".join(laya.other)
