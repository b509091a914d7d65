"""The fast lane (`laya.net.lane`) says what the long way says, and is taken for what its table names and nothing else."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import pytest

from raw import post, read_response, read_stream, read_until
from scripted_upstream import DONE, SSE_HEAD, Close, Reset, ScriptedUpstream, Sleep, Split, answer, chunked, completion, stream
from server import Laya, running

# Laya whose lane tells on stderr which of its steps were taken; or is never taken.
PROGRAM = """
import json, runpy, sys
from laya.net import connection, lane

def watched(name, step):
    def call(*given):
        taken = {taken}
        print(json.dumps({{"event": "lane", "step": name, "taken": taken}}), file=sys.stderr, flush=True)
        return taken
    return call

lane_ask = lane.ask
connection.ask, lane.reply = watched("ask", lane.ask), watched("reply", lane.reply)
runpy.run_module("laya", run_name="__main__", alter_sys=True)
"""
ON, OFF = ("-c", PROGRAM.format(taken="step(*given)")), ("-c", PROGRAM.format(taken="False"))
TAKEN = [("ask", True), ("reply", True)]


def body(model: str = "m", text: str = "hello", **members) -> bytes:
    return json.dumps({"model": model, **members, "messages": [{"role": "user", "content": text}]}).encode()


def config(*ups: ScriptedUpstream) -> dict:
    backends = {f"up{n}": {"url": f"http://127.0.0.1:{up.port}/v1"} for n, up in enumerate(ups)}
    own = {"own": {"url": f"http://127.0.0.1:{ups[0].port}/v1", "headers": {"x-team": "red"}}}
    return {
        "backends": {**backends, **own},
        "routes": [
            {"name": "named", "match": "m", "to": "up0"},
            {"name": "renamed", "match": "other", "to": [{"backend": "up0", "model": "theirs"}]},
            {"name": "shared", "match": "both*", "to": list(backends)},
            {"name": "headed", "match": "headed", "to": "own"},
            {"name": "redacted", "match": "secret", "to": "up0", "redact": True},
            {"name": "sized", "match": "sized", "to": "up0", "max_prompt_tokens": 1000},
        ],
    }


@pytest.fixture(scope="module")
def up() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def laned(up, tmp_path_factory) -> Iterator[Laya]:
    with running(config(up), tmp_path_factory.mktemp("laned"), program=ON) as laya:
        yield laya


@pytest.fixture(scope="module")
def unlaned(up, tmp_path_factory) -> Iterator[Laya]:
    with running(config(up), tmp_path_factory.mktemp("unlaned"), program=OFF) as laya:
        yield laya


@pytest.fixture(autouse=True)
def _plain(up):
    up.script = lambda asked: [answer(completion("hi"))]
    up.asked.clear()


def steps(laya: Laya) -> list[tuple[str, bool]]:
    time.sleep(0.1)  # for the thread that reads its stderr
    return [(line["step"], line["taken"]) for line in laya.lines if line.get("event") == "lane"]


def ask_twice(laya: Laya, request: bytes) -> list[tuple[str, bool]]:
    """The lane's steps for `request` when its head, its model and the answer's head are known already."""
    with laya.connect() as sock:
        sock.sendall(request)
        read_response(sock)
        sock.sendall(request)  # the parser and the plan have met it: now the lane may know it
        read_response(sock)
        before = len(steps(laya))
        sock.sendall(request)
        read_response(sock)
    return steps(laya)[before:]


CHANGING = re.compile(rb"(date: [^\r]*|x-request-id: req-[0-9a-f]*|127\.0\.0\.1:\d+)")


def talk(laya: Laya, up: ScriptedUpstream, requests: list[bytes], script) -> tuple:
    """(bytes to the client, heads and bodies at the backend, metrics, log lines) of `requests` on one connection, with what
    differs from run to run left out."""
    up.script = script
    up.asked.clear()
    began = mark(laya)
    counted = dict(counts(laya))
    heard = b""
    with laya.connect() as sock:
        for request in requests:
            sock.sendall(request)
            if b'"stream": true' in request:
                heard += read_stream(sock)
            else:
                status, headers, payload = read_response(sock)
                heard += b"%d %r %b\n" % (status, sorted(headers.items()), payload)
    asked = [(CHANGING.sub(b"", one.head), one.body) for one in up.asked if one.method == "POST"]
    grown = {name: value - counted.get(name, 0) for name, value in counts(laya).items() if value != counted.get(name, 0)}
    ended = mark(laya)
    assert laya.wait_for(lambda: ended in [line["id"] for line in laya.events("request")])
    logged = laya.events("request")
    ids = [line["id"] for line in logged]
    lines = [
        {name: value for name, value in line.items() if name not in ("time", "id", "seconds")}
        for line in logged[ids.index(began) : ids.index(ended)] if line["path"] != "/metrics"
    ]  # fmt: skip
    return re.sub(rb"(b'date', b'[^']*'|req-[0-9a-f]*)", b"", heard), asked, grown, lines


def mark(laya: Laya) -> str:
    """The id of a request that stands in the log where the log is now."""
    name = f"mark-{time.monotonic_ns()}"
    laya.get("/v1/models", {"x-request-id": name})
    return name


def counts(laya: Laya) -> dict:
    """The counters of requests, and how many times each stage was observed."""
    found = {}
    for line in laya.get("/metrics")[1].decode().splitlines():
        if line.startswith(("laya_requests_total", "laya_stage_seconds_count")) and "page" not in line:
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


SCRIPTS = {
    "plain": lambda asked: [answer(completion("hi"))],
    "typed": lambda asked: [answer(completion("hi"), headers="Content-Type: application/json\r\nX-Own: 1\r\nServer: them\r\n")],
    "twice": lambda asked: [answer(completion("hi"), headers="set-cookie: a=1\r\nset-cookie: b=2\r\n")],
    "chunked": lambda asked: [
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(b"{}") + b"0\r\n\r\n"
    ],
    "in pieces": lambda asked: [Split(answer(completion("hi")), 40)],
    "large": lambda asked: [answer(completion("long " * 20_000))],
    "an error": lambda asked: [answer({"error": {"message": "no"}}, "400 Bad Request")],
    "closing": lambda asked: [answer(completion("hi"), headers="connection: close\r\n"), Close()],
    "empty": lambda asked: [answer(b"")],
    "no content": lambda asked: [b"HTTP/1.1 204 No Content\r\n\r\n"],
    "slow": lambda asked: [Sleep(0.05), answer(completion("hi"))],
}
REQUESTS = {
    "small": [post(body())] * 4,
    "long": [post(body(text="word " * 5000))] * 3,
    "different bodies": [post(body(text="x" * n)) for n in range(4)],
    "completions": [post(json.dumps({"model": "m", "prompt": "p"}).encode(), b"/v1/completions")] * 3,
    "an id": [post(body(), extra=b"X-Request-Id: mine-1\r\n")] * 3,
    "with a query": [post(body(), b"/v1/chat/completions?a=b")] * 3,
    "renamed": [post(body("other"))] * 3,
    "headed": [post(body("headed"))] * 3,
    "asking": [post(body(), extra=b"X-Laya-Session: s\r\n")] * 3,
    "unknown": [post(body())] * 2 + [post(body("nobody"))] + [post(body())],
    "not json": [post(body())] * 2 + [post(b"{]" + b" " * (len(body()) - 2))] + [post(body())],
    "model twice": [post(b'{"model": "m", "model": "m"}')] * 3,
    "no model": [post(b'{"messages": []}')] * 3,
}


@pytest.mark.parametrize("requests", REQUESTS.values(), ids=REQUESTS.keys())
def test_every_request_ends_as_on_the_long_way(laned, unlaned, up, requests):
    assert talk(laned, up, requests, SCRIPTS["plain"]) == talk(unlaned, up, requests, SCRIPTS["plain"])


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_every_answer_is_passed_on_as_on_the_long_way(laned, unlaned, up, script):
    requests = [post(body())] * 4
    assert talk(laned, up, requests, script) == talk(unlaned, up, requests, script)


def test_a_stream_is_passed_on_as_on_the_long_way(laned, unlaned, up):
    requests = [post(body(stream=True))] * 3
    script = lambda asked: [SSE_HEAD, *map(chunked, stream("a", "b")), DONE]  # noqa: E731
    assert talk(laned, up, requests, script) == talk(unlaned, up, requests, script)


@pytest.mark.parametrize("requests", [
    [post(body())], [post(body(text="word " * 5000))], [post(json.dumps({"model": "m", "prompt": "p"}).encode(), b"/v1/completions")],
    [post(body("headed"))], [post(body("both-of-them"))],
], ids=["small", "long", "completions", "headed", "pattern"])  # fmt: skip
def test_what_the_table_names_is_taken(laned, requests):
    assert ask_twice(laned, requests[0]) == TAKEN


@pytest.mark.parametrize("request_", [
    post(body("other")), post(body("secret")), post(body("sized")), post(body(), extra=b"X-Laya-Timing: 1\r\n"),
    post(body(), extra=b"Origin: http://localhost\r\n"), post(body(), extra=b"X-Laya-Target: up0\r\n"),
    post(body(), b"/v1/embeddings"), post(json.dumps({"model": "m", "input": "hi"}).encode(), b"/v1/responses"),
], ids=["renamed", "redacted", "sized", "timing", "origin", "target", "embeddings", "responses"])  # fmt: skip
def test_what_the_table_leaves_out_goes_the_long_way(laned, request_):
    assert not [step for step in ask_twice(laned, request_) if step[1]]


def test_an_answer_in_two_pieces_goes_the_long_way_back(laned, up):
    whole = answer(completion("hi"))
    up.script = lambda asked: [whole[:-5], Sleep(0.05), whole[-5:]]
    assert ask_twice(laned, post(body())) == [("ask", True), ("reply", False)]


def test_a_kept_connection_that_died_is_tried_again_fresh(laned, up):
    """(case 8) What the lane sent is a call like any other: nothing is lost when the backend had just closed."""
    ask_twice(laned, post(body()))
    up.script = lambda asked: [Reset()] if len(up.asked) == 1 else [answer(completion("again"))]
    up.asked.clear()
    with laned.connect() as sock:
        sock.sendall(post(body()))
        status, _, payload = read_response(sock)
    assert status == 200 and b"again" in payload
    assert laned.metric("laya_retries_total", reason="stale") >= 1


def test_a_client_that_leaves_cancels_what_the_lane_sent(laned, up):
    ask_twice(laned, post(body()))
    up.script = lambda asked: [Sleep(5), answer(completion("late"))]
    up.asked.clear()
    with laned.connect() as sock:
        sock.sendall(post(body()))
        assert up.wait_for(lambda: len(up.asked) == 1)
    assert up.wait_for(lambda: up.asked[0].closed_at is not None, 3)
    assert laned.wait_for(lambda: laned.metric("laya_requests_total", outcome="client_closed", route="named") >= 1)
    assert laned.metric("laya_backend_inflight", backend="up0") == 0 and laned.metric("laya_buffered_bytes") == 0


def test_requests_sent_together_are_answered_in_order(laned, up):
    up.script = lambda asked: [answer(completion(asked.json()["messages"][0]["content"]))]
    ask_twice(laned, post(body()))
    with laned.connect() as sock:
        sock.sendall(b"".join(post(body(text=f"number {n}")) for n in range(5)))
        found = [json.loads(read_one(sock))["choices"][0]["message"]["content"] for _ in range(5)]
    assert found == [f"number {n}" for n in range(5)]


def read_one(sock) -> bytes:
    """One answer, and not a byte of the next."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += sock.recv(1)
    length, payload = int(re.search(rb"content-length: (\d+)", head)[1]), b""
    while len(payload) < length:
        payload += sock.recv(length - len(payload))
    return payload


def test_a_share_goes_to_each_of_several_targets(tmp_path):
    """The lane asks the balancer as the long way does, and its choice counts."""
    with ScriptedUpstream() as one, ScriptedUpstream() as two, running(config(one, two), tmp_path, program=ON) as laya:
        one.script = two.script = lambda asked: [answer(completion("hi"))]
        with laya.connect() as sock:
            for _ in range(40):
                sock.sendall(post(body("both-of-them")))
                assert read_response(sock)[0] == 200
        shares = [sum(asked.method == "POST" for asked in up.asked) for up in (one, two)]
        assert sum(shares) == 40 and min(shares) >= 15
        assert steps(laya).count(("ask", True)) >= 30


def test_a_flood_of_model_names_keeps_the_lanes_bounded(laned):
    with laned.connect() as sock:
        for number in range(600):
            sock.sendall(post(body(f"both-{number:04}")))
            assert read_response(sock)[0] == 200
    assert ask_twice(laned, post(body())) == TAKEN


def test_a_mistake_in_the_lane_is_a_clean_500_and_the_next_request_is_served(up, tmp_path):
    """Whatever raises behind the point where the request has its exchange: the client hears it, the log has it, nothing leaks."""
    planted = PROGRAM.format(taken="step(*given)").replace("runpy.run", (
        "from laya.wire.outbound import Outbound\nreal = Outbound.expect\nfaults = [ZeroDivisionError]\n"
        "def expect(self, method):\n"
        "    if faults and sys._getframe(1).f_code is lane_ask.__code__: raise faults.pop()\n"
        "    real(self, method)\n"
        "Outbound.expect = expect\nrunpy.run"
    ), 1)  # fmt: skip
    with running(config(up), tmp_path, program=("-c", planted)) as laya, laya.connect() as sock:
        statuses = []
        for _ in range(5):
            sock.sendall(post(body()))
            statuses.append(read_response(sock)[0])
        assert sorted(statuses) == [200, 200, 200, 200, 500]
        assert laya.wait_for(lambda: laya.events("fault") and laya.events("fault")[0]["kind"] == "ZeroDivisionError")
        assert laya.metric("laya_backend_inflight", backend="up0") == 0 and laya.metric("laya_buffered_bytes") == 0
        assert ("ask", True) in steps(laya)


def test_a_reload_ends_the_lane_at_once(up, tmp_path):
    settings = config(up)
    with running(settings, tmp_path, program=ON) as laya:
        ask_twice(laya, post(body()))
        settings = {**json.loads(laya.path.read_text())}
        settings["routes"][0]["match"] = "moved"
        laya.path.write_text(json.dumps(settings))
        laya.process.send_signal(1)
        assert laya.wait_for(lambda: laya.metric("laya_config_reloads_total") == 1)
        with laya.connect() as sock:
            sock.sendall(post(body()))
            assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 404")
