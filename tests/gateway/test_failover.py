"""Several backends: who is asked next, who is left alone, and what the client sees when all fail."""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from laya.config import BackendConfig
from laya.net.clock import Clock
from laya.net.pool import Pool
from raw import post, read_all
from scripted_upstream import SSE_HEAD, Close, Hold, Reset, ScriptedUpstream, Sleep, answer, chunked, completion, delta
from server import Laya, running

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
DEAD = "http://127.0.0.1:9/v1"  # the discard port: nobody listens


@pytest.fixture
def several(tmp_path):
    """`several(script, script, ...)` gives a router over so many upstreams, named a, b, ..., and the upstreams."""
    with ExitStack() as stack:

        def make(*scripts, policy: str = "round_robin", extra: dict | None = None, **config):
            ups = [stack.enter_context(ScriptedUpstream(script)) for script in scripts]
            backends = {name: {"url": up.url, "health": None} for name, up in zip("abcd", ups, strict=False)}
            full = {
                "backends": {**backends, **(extra or {})},
                "routes": [{"name": "r", "match": "m", "to": [*backends, *(extra or {})], "policy": policy}],
                **config,
            }
            return stack.enter_context(running(full, tmp_path)), ups

        yield make


def good(asked) -> list:
    return [answer(completion("good"))]


def status(code: str, headers: str = "content-type: application/json\r\n"):
    return lambda asked: [answer({"error": {"message": "no", "type": "x", "param": None, "code": None}}, code, headers)]


def breaker(laya: Laya, backend: str) -> float:
    return laya.metric("laya_breaker_state", backend=backend)


@pytest.mark.parametrize("code", ["500 Internal Server Error", "502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout",
                                  "429 Too Many Requests"])  # fmt: skip
def test_a_faulty_answer_goes_to_the_next_backend_and_opens_the_breaker(several, code):
    """(cases 41, 43) Any retriable class; the client notices nothing; each move is counted with its reason."""
    laya, (a, b) = several(status(code), good)
    assert [laya.chat("m")[0] for _ in range(12)] == [200] * 12
    assert breaker(laya, "a") == 2 and len(a.asked) == 5
    assert laya.metric("laya_retries_total", reason=f"status_{code[:3]}") == 5
    assert json.loads(laya.get("/ready")[1])["components"]["backends"]["a"]["breaker"] == "open"


@pytest.mark.parametrize("steps", [[Reset()], [Close()]])
def test_a_backend_that_dies_without_a_byte_is_stepped_over_once(several, steps):
    """(case 41) The work may have been done twice: counted apart."""
    laya, _ = several(lambda asked: steps, good)
    assert [laya.chat("m")[0] for _ in range(4)] == [200] * 4
    assert laya.metric("laya_retries_total", reason="reset") >= 1


def test_an_ambiguous_death_is_not_tried_again_where_that_is_forbidden(tmp_path):
    with ScriptedUpstream(lambda asked: [Reset()]) as bad, ScriptedUpstream(good) as fine:
        config = {
            "backends": {"a": {"url": bad.url, "health": None, "retry_ambiguous": False}, "b": {"url": fine.url, "health": None}},
            "routes": [{"name": "r", "match": "m", "to": ["a", "b"], "policy": "round_robin"}],
        }
        with running(config, tmp_path) as laya:
            assert sorted(laya.chat("m")[0] for _ in range(4)) == [200, 200, 502, 502]


def test_client_errors_pass_and_count_for_nothing(several):
    """(case 44) 400, 401, 403, 404 and 422 are the backend's word: no retry, no breaker."""
    for code in ("400 Bad Request", "401 Unauthorized", "403 Forbidden", "404 Not Found", "422 Unprocessable Entity"):
        laya, (a, b) = several(status(code), status(code))
        assert {laya.chat("m")[0] for _ in range(12)} == {int(code[:3])}
        assert len(a.asked) == len(b.asked) == 6 and breaker(laya, "a") == breaker(laya, "b") == 0
        assert laya.stop() == 0


def test_a_backend_that_asks_for_rest_gets_it(several):
    """(case 44) Retry-After as a date, in milliseconds, huge: it is not asked again before, another one is."""
    for value in (
        f"retry-after: {email.utils.formatdate(time.time() + 30, usegmt=True)}", "retry-after-ms: 20000", "retry-after: 1e9",
    ):  # fmt: skip
        laya, (a, b) = several(status("429 Too Many Requests", value + "\r\n"), good)
        assert [laya.chat("m")[0] for _ in range(8)] == [200] * 8
        assert len(a.asked) == 1, value
        assert json.loads(laya.get("/ready")[1])["components"]["backends"]["a"]["asked_for_rest_s"] > 5
        assert laya.stop() == 0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("", "1"), ("retry-after: -5", "1"), ("retry-after: 7", "7"), ("retry-after: 1e9", "3600"), ("retry-after-ms: 1500", "2"),
     (f"retry-after: {email.utils.formatdate(0, usegmt=True)}", "1")],
)  # fmt: skip
def test_the_client_is_told_in_seconds_when_to_come_back(several, value, seconds):
    """(case 44) Whatever form the backend used, and if it said nothing."""
    laya, _ = several(status("429 Too Many Requests", f"content-type: application/json\r\n{value}\r\n" if value else "x: y\r\n"))
    code, _, headers = laya.call("POST", "/v1/chat/completions", BODY)
    assert code == 429 and headers["retry-after"] == seconds and int(headers["retry-after-ms"]) <= 3_600_000


def test_when_all_fail_the_last_backends_own_answer_is_passed_on(several):
    """(case 43) Not an invented error; and with every breaker open somebody is still asked."""
    laya, (a, b) = several(status("503 Service Unavailable"), status("503 Service Unavailable"))
    for _ in range(10):
        code, body, _ = laya.call("POST", "/v1/chat/completions", BODY)
        assert code == 503 and json.loads(body)["error"]["message"] == "no"
    assert breaker(laya, "a") == breaker(laya, "b") == 2 and laya.get("/ready")[0] == 503
    seen = len(a.asked) + len(b.asked)
    a.script = b.script = good
    assert laya.chat("m")[0] == 200 and len(a.asked) + len(b.asked) == seen + 1
    assert breaker(laya, "a") + breaker(laya, "b") == 2, "the one that answered is closed again"


def test_all_backends_down_at_the_start_is_an_error_at_once_and_mended_when_one_comes(tmp_path):
    """(case 44)"""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    config = {
        "backends": {"a": {"url": DEAD, "health": None}, "b": {"url": f"http://127.0.0.1:{port}/v1", "health": None}},
        "routes": [{"name": "r", "match": "m", "to": ["a", "b"]}],
    }
    with running(config, tmp_path) as laya:
        began = time.monotonic()
        code, body, _ = laya.chat("m")
        assert code == 502 and "cannot connect" in body["error"]["message"] and time.monotonic() - began < 5
        with ScriptedUpstream(good, port=port):
            assert laya.wait_for(lambda: laya.chat("m")[0] == 200)


def test_half_open_lets_exactly_one_request_through(several):
    """(case 43) While the probe is out all others go elsewhere; its success closes the breaker."""
    gate = threading.Event()

    def slow_then_good(asked):
        return [Sleep(1.0), answer(completion("a"))] if gate.is_set() else status("500 Internal Server Error")(asked)

    laya, (a, b) = several(slow_then_good, good)
    for _ in range(12):
        laya.chat("m")
    assert breaker(laya, "a") == 2
    gate.set()
    time.sleep(5.3)  # balance.OPEN_S, and a tick of the clock
    before = len(a.asked)
    threads = [threading.Thread(target=laya.chat, args=("m",)) for _ in range(12)]
    for thread in threads:
        thread.start()
    assert laya.wait_for(lambda: breaker(laya, "a") == 1, 5)
    time.sleep(0.3)
    assert len(a.asked) == before + 1
    for thread in threads:
        thread.join(20)
    assert breaker(laya, "a") == 0


def test_a_probe_whose_client_leaves_frees_the_place_for_the_next(several):
    laya, (a, b) = several(status("500 Internal Server Error"), good)
    for _ in range(12):
        laya.chat("m")
    a.script = lambda asked: [Hold()]
    time.sleep(5.3)
    for _ in range(2):  # one of two goes to a
        with laya.connect() as sock:
            sock.sendall(post(BODY))
            time.sleep(0.3)
    assert laya.wait_for(lambda: breaker(laya, "a") == 2)
    a.script = good
    assert laya.wait_for(lambda: laya.chat("m")[0] == 200 and breaker(laya, "a") == 0)


def test_retries_after_overload_are_kept_within_the_budget(several):
    """Overload everywhere: a fifth of the requests and a small store are tried twice, not all."""
    laya, (a, b) = several(status("503 Service Unavailable"), status("503 Service Unavailable"))
    with laya.connect() as sock:
        for _ in range(100):
            sock.sendall(post(BODY))
            data = b""
            while b"}}" not in data:
                data += sock.recv(65536)
    retries = laya.metric("laya_retries_total", reason="status_503")
    assert 10 <= retries <= 10 + 0.2 * 100 + 12, retries  # the store, the share, and one for each second it took
    assert laya.metric("laya_retry_budget_exhausted_total") >= 50


def test_aborts_at_random_moments_leave_no_count_behind(several):
    """(case 37) Before the head, in the pause before a retry, in the middle of a stream."""
    rng = random.Random(7)

    def moody(asked):
        return rng.choice([
            [Sleep(0.05), answer(completion("x"))], [Hold()], status("503 Service Unavailable")(asked), [Reset()],
            [SSE_HEAD, chunked(delta("a")), Sleep(0.1), chunked(delta("b")), Hold()],
        ])  # fmt: skip

    laya, _ = several(moody, moody, policy="least_busy", extra={"dead": {"url": DEAD, "health": None}})

    def one() -> None:
        with laya.connect() as sock:
            sock.sendall(post(BODY))
            time.sleep(rng.uniform(0, 0.15))

    for _ in range(6):
        threads = [threading.Thread(target=one) for _ in range(25)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    for backend in ("a", "b", "dead"):
        assert laya.wait_for(lambda backend=backend: laya.metric("laya_backend_inflight", backend=backend) == 0), backend
    assert all(state != 1 for state in (breaker(laya, "a"), breaker(laya, "b"))), "no probe is left hanging"


def test_nothing_is_tried_again_once_a_byte_has_gone_out(several):
    """(case 14) No text twice."""
    steps = [SSE_HEAD, chunked(delta("once")), Reset()]
    laya, (a, b) = several(lambda asked: steps, lambda asked: steps)
    with laya.connect() as sock:
        sock.sendall(post(BODY))
        data = read_all(sock)
    assert data.count(b"once") == 1 and b'"error"' in data and len(a.asked) + len(b.asked) == 1


def test_fallback_routes_stand_in_when_all_targets_are_down(several):
    laya, (a, b) = several(
        good, good,
        routes=[
            {"name": "big", "match": "big", "to": "dead", "fallback": ["small", "last"]},
            {"name": "small", "match": "small", "to": [{"backend": "a", "model": "tiny"}]},
            {"name": "last", "match": "last", "to": "b"},
        ],
        extra={"dead": {"url": DEAD, "health": None}},
        auth={"keys": [{"name": "all", "key": "k1"}, {"name": "few", "key": "k2", "routes": ["big", "last"]}]},
    )  # fmt: skip

    def ask(key: str):
        return laya.call("POST", "/v1/chat/completions", {"model": "big", "messages": []}, {"authorization": f"Bearer {key}"})

    for _ in range(8):
        code, _, headers = ask("k1")
        assert (code, headers["x-laya-route"], headers["x-laya-backend"]) == (200, "big; fallback=small", "a")
    assert a.asked[0].json()["model"] == "tiny"
    code, _, headers = ask("k2")
    assert (code, headers["x-laya-backend"]) == (200, "b"), "a key is not led to a route that it may not use"
    assert breaker(laya, "dead") == 2


def test_a_prompt_too_long_for_a_backend_goes_to_the_fallback_and_to_nobody_else(several):
    too_long = {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}}
    laya, (a, b, c) = several(
        lambda asked: [answer(too_long, "400 Bad Request")], lambda asked: [answer(too_long, "400 Bad Request")], good,
        routes=[
            {"name": "small", "match": "small", "to": ["a", "b"], "fallback": ["large"]},
            {"name": "large", "match": "large", "to": "c"},
            {"name": "alone", "match": "alone", "to": ["a", "b"]},
        ],
    )  # fmt: skip
    code, _, headers = laya.chat("small")
    assert (code, headers["x-laya-backend"], headers["x-laya-route"]) == (200, "c", "small; fallback=large")
    assert len(a.asked) + len(b.asked) == 1 and laya.metric("laya_retries_total", reason="too_long") == 1
    code, body, _ = laya.chat("alone")
    assert code == 400 and body["error"]["code"] == "context_length_exceeded"


def test_the_routes_own_cap_sends_long_prompts_to_the_fallback_or_refuses_them(several):
    """max_prompt_tokens of a route whose targets are backends: by estimate, before anything is sent."""
    laya, (a, b) = several(
        good, good,
        routes=[
            {"name": "small", "match": "small", "to": "a", "max_prompt_tokens": 50, "fallback": ["large"]},
            {"name": "large", "match": "large", "to": "b", "max_prompt_tokens": 500},
            {"name": "alone", "match": "alone", "to": "a", "max_prompt_tokens": 50},
        ],
    )  # fmt: skip
    assert laya.chat("small", "short")[2]["x-laya-backend"] == "a"
    code, _, headers = laya.chat("small", "word " * 100)
    assert (code, headers["x-laya-backend"], headers["x-laya-route"]) == (200, "b", "small; fallback=large")
    for model, limit in (("small", 500), ("alone", 50)):
        code, body, _ = laya.chat(model, "word " * 1000)
        assert code == 400 and body["error"]["code"] == "context_length_exceeded" and str(limit) in body["error"]["message"]
    assert len(a.asked) == 1


class Heard:
    """A call's listener that keeps what it was told."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.told: list = []

    def on_upstream_head(self, response) -> None:
        self.told.append(response.status)
        self.over.set()

    def on_upstream_failure(self, failure, message: str) -> None:
        self.told.append(failure.value)
        self.over.set()


@pytest.mark.parametrize("dead_first", [True, False])
def test_a_name_with_a_dead_address_is_reached_by_its_other_one(dead_first):
    """(case 44)"""

    async def main(port: int) -> list:
        loop = asyncio.get_running_loop()

        async def getaddrinfo(host, number, **_):
            places = [("127.0.0.2", port), ("127.0.0.1", port)] if dead_first else [("127.0.0.1", port), ("127.0.0.2", port)]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

        loop.getaddrinfo = getaddrinfo
        pool = Pool("b", BackendConfig(url=f"http://two.example:{port}/v1"), Clock(loop, lambda stall: None), loop)
        heard = Heard()
        pool.submit(heard, b"POST", b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\n", b"{}")
        await asyncio.wait_for(heard.over.wait(), 10)
        pool.close()
        return heard.told

    with ScriptedUpstream(good) as upstream:
        assert asyncio.run(main(upstream.port)) == [200]
