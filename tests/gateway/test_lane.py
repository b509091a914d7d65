"""The fast lane (`laya.net.lane`) says what the long way says, and is taken for what its table names and nothing else."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from email.utils import formatdate, parsedate_to_datetime
from types import SimpleNamespace

import pytest

from laya.config import BackendConfig
from laya.net.lane import MOST_LANES, Leg
from laya.telemetry import Telemetry
from raw import post, read_response, read_stream, read_until, unchunk
from scripted_upstream import SSE_HEAD, Close, Reset, ScriptedUpstream, Sleep, Split, answer, chunked, completion, delta
from server import ROOT, Laya, running

# Laya whose lane, in C or in Python, tells on stderr which of its steps were taken; or is never taken.
PROGRAM = '''
import json, os, runpy
import laya.app
from laya.net import connection, lane{imports}

def watched(name, step):
    def call(*given):
        taken = {taken}
        lanes = whole(given[0].exchange) if taken and name == "ask" and given[0].exchange is not None else 0
        line = json.dumps({{"event": "lane", "step": name, "taken": taken, "lanes": lanes}})
        os.write(2, line.encode() + b"\\n")  # in one piece, beside the log
        return taken
    return call

def whole(exchange):
    """How many lanes its head has. Raises AttributeError where the lane left out a slot of what it made."""
    for made in (exchange, exchange.call, exchange.fields):
        for slot in type(made).__slots__:
            getattr(made, slot)
    return len(exchange.plan.lanes)

{watch}
runpy.run_module("laya", run_name="__main__", alter_sys=True)
'''
ON_TRANSPORTS = """
laya.app.streams_on = lambda loop: None
laya.app.new_loop = lambda tls, real=laya.app.new_loop: real(tls=True)
"""
IN_C = ON_TRANSPORTS + """
native_lane.reply = watched("reply", native_lane.reply)
connection.ask = watched("ask", lane.prepared(connection.ClientConnection))
"""
ON_STREAMS = """
lane.watcher = lambda step, taken, connection: watched(step, lambda connection: taken)(connection)
lane.prepared(connection.ClientConnection)
"""
IN_PYTHON = ON_TRANSPORTS + """
lane.reply_in_python = watched("reply", lane.reply_in_python)
connection.ask = watched("ask", lane.ask_in_python)
"""
PROGRAMS = {
    "streams": PROGRAM.format(imports=", native_lane", taken="step(*given)", watch=ON_STREAMS),
    "c": PROGRAM.format(imports=", native_lane", taken="step(*given)", watch=IN_C),
    "python": PROGRAM.format(imports="", taken="step(*given)", watch=IN_PYTHON),
}
OFF = PROGRAM.format(imports="", taken="False", watch=IN_PYTHON)


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request) -> str:
    if request.param != "python":
        pytest.importorskip("laya.net.native_lane", reason="built without a C compiler: apt install gcc")
    return PROGRAMS[request.param]


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
def laned(up, program, tmp_path_factory) -> Iterator[Laya]:
    with running(config(up), tmp_path_factory.mktemp("laned"), program=("-c", program)) as laya:
        up.script = SCRIPTS["plain"]
        assert ask_twice(laya, post(body())) == TAKEN  # each test meets a lane that is there, alone too
        yield laya


@pytest.fixture(scope="module")
def unlaned(up, tmp_path_factory) -> Iterator[Laya]:
    with running(config(up), tmp_path_factory.mktemp("unlaned"), program=("-c", OFF)) as laya:
        yield laya


@pytest.fixture(autouse=True)
def _plain(up):
    up.script = lambda asked: [answer(completion("hi"))]
    up.asked.clear()


def posts(up: ScriptedUpstream) -> list:
    """What was asked, without the health probes that come in between."""
    return [asked for asked in up.asked if asked.method == "POST"]


def steps(laya: Laya) -> list[tuple[str, bool]]:
    return [(line["step"], line["taken"]) for line in lane_lines(laya)]


def lane_lines(laya: Laya) -> list[dict]:
    time.sleep(0.1)  # for the thread that reads its stderr
    return [line for line in laya.lines if line.get("event") == "lane"]


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
    asked = [(CHANGING.sub(b"", one.head), one.body) for one in posts(up)]
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


PIECES = [delta("one"), delta("two"), delta("three"), delta(None, "stop"), b"data: [DONE]\n\n"]
END = b"0\r\n\r\n"
CRLF = [piece.replace(b"\n", b"\r\n") for piece in PIECES]


def in_turn(*pieces: bytes) -> list:
    """Each in a segment of its own."""
    return [step for piece in pieces for step in (piece, Sleep(0.02))]


def size_as(data: bytes, form: bytes) -> bytes:
    return form % len(data) + b"\r\n" + data + b"\r\n"


STREAMS = {
    "a frame a segment": in_turn(*map(chunked, PIECES), END),
    "two frames a segment": in_turn(chunked(PIECES[0]) + chunked(PIECES[1]), *map(chunked, PIECES[2:]), END),
    "two frames a chunk": in_turn(chunked(PIECES[0] + PIECES[1]), *map(chunked, PIECES[2:]), END),
    "all at once": [b"".join(map(chunked, PIECES)) + END],
    "a frame in two chunks": in_turn(chunked(PIECES[0][:9]), chunked(PIECES[0][9:]), *map(chunked, PIECES[1:]), END),
    "a chunk in two segments": in_turn(chunked(PIECES[0])[:9], chunked(PIECES[0])[9:], *map(chunked, PIECES[1:]), END),
    "lines end in CR LF": in_turn(*map(chunked, CRLF), END),
    "large sizes": in_turn(*(size_as(piece, b"%X") for piece in PIECES), END),
    "long sizes": in_turn(*(size_as(piece, b"%08x") for piece in PIECES), END),
    "extensions": in_turn(*(size_as(piece, b"%x;a=b") for piece in PIECES), END),
    "comments": in_turn(chunked(b": ping\n\n"), *map(chunked, PIECES), END),
    "the mark of the end in a text": in_turn(chunked(b'data: {"a":"[DONE]"}\n\n'), *map(chunked, PIECES), END),
    "the mark in pieces": in_turn(*map(chunked, PIECES[:-1]), chunked(b"data: [DO"), chunked(b"NE]\n\n"), END),
    "nothing behind the mark": in_turn(*map(chunked, PIECES)),
    "no mark": in_turn(*map(chunked, PIECES[:-1]), END),
    "cut": [*in_turn(*map(chunked, PIECES[:2])), Reset()],
    "a malformed chunk": in_turn(chunked(PIECES[0]), b"5\r\nhello, world\r\n"),
    "a chunk without its end": in_turn(chunked(PIECES[0]), chunked(PIECES[1])[:-2] + b"xx"),
    "not a stream": [b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"] + in_turn(
        *map(chunked, PIECES), END
    ),
}  # fmt: skip


@pytest.mark.parametrize("steps", STREAMS.values(), ids=STREAMS.keys())
def test_every_stream_is_passed_on_as_on_the_long_way(laned, unlaned, up, steps):
    def script(asked):
        ends = any(type(step) is bytes and step.endswith(END) for step in steps)
        return [*([] if steps[0].startswith(b"HTTP") else [SSE_HEAD, Sleep(0.02)]), *steps, *([] if ends else [Close()])]

    assert streamed(laned, up, script) == streamed(unlaned, up, script)


def streamed(laya: Laya, up: ScriptedUpstream, script) -> tuple:
    """(payload, whether it ended well, counters) of a stream."""
    up.script = script
    before = counts(laya)
    with laya.connect() as sock:
        sock.sendall(post(body(stream=True)))
        head = read_until(sock, b"\r\n\r\n")
        data = head.partition(b"\r\n\r\n")[2]
        while not data.endswith(b"0\r\n\r\n") and (piece := sock.recv(65536)):
            data += piece
    assert laya.wait_for(lambda: sum(map(int, counts(laya).values())) > sum(map(int, before.values())))
    grown = {name: value - before.get(name, 0) for name, value in counts(laya).items() if value != before.get(name, 0)}
    return re.sub(rb"Backend [^\"]*", b"", unchunk(data)[0]), unchunk(data)[1], grown


def test_a_frame_in_a_chunk_of_its_own_takes_one_step_in_c(laned, up, program):
    up.script = lambda asked: [SSE_HEAD, Sleep(0.05), *in_turn(*map(chunked, PIECES), END)]
    before = len(steps(laned))
    with laned.connect() as sock:
        sock.sendall(post(body(stream=True)))
        read_stream(sock)
    taken = steps(laned)[before:].count(("reply", True))
    # The first frame is the time to the first token, and the last may come together with the end.
    assert len(PIECES) - 2 <= taken < len(PIECES) if "native_lane" in program else taken == 0


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
    post(body(), extra=b"X-Laya-Session: s\r\n"), post(body(), extra=b"X-Request-Id: mine\r\n"),
], ids=["renamed", "redacted", "sized", "timing", "origin", "target", "embeddings", "responses", "session", "an id"])  # fmt: skip
def test_what_the_table_leaves_out_goes_the_long_way(laned, request_):
    assert not [step for step in ask_twice(laned, request_) if step[1]]


def test_the_times_and_the_id_that_the_lane_writes_are_those_of_the_long_way(laned):
    assert ask_twice(laned, post(body())) == TAKEN
    with laned.connect() as sock:
        sock.sendall(post(body()))
        headers = read_response(sock)[1]
    date, name = headers[b"date"].decode(), headers[b"x-request-id"].decode()
    at = parsedate_to_datetime(date).timestamp()
    assert abs(time.time() - at) < 5 and formatdate(at, usegmt=True) == date
    assert re.fullmatch("req-[0-9a-f]{20}", name)
    assert laned.wait_for(lambda: name in [line["id"] for line in laned.events("request")])
    line = next(line for line in laned.events("request") if line["id"] == name)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) and 0 < line["seconds"] < 5
    assert -1 < datetime.fromisoformat(line["time"]).timestamp() - at < 5


def test_an_answer_in_two_pieces_goes_the_long_way_back(laned, up):
    whole = answer(completion("hi"))
    up.script = lambda asked: [whole[:-5], Sleep(0.05), whole[-5:]]
    assert ask_twice(laned, post(body())) == [("ask", True), ("reply", False), ("reply", False)]


def test_a_kept_connection_that_died_is_tried_again_fresh(laned, up):
    """(case 8) What the lane sent is a call like any other: nothing is lost when the backend had just closed."""
    ask_twice(laned, post(body()))
    up.script = lambda asked: [Reset()] if len(posts(up)) == 1 else [answer(completion("again"))]
    up.asked.clear()
    with laned.connect() as sock:
        sock.sendall(post(body()))
        status, _, payload = read_response(sock)
    assert status == 200 and b"again" in payload
    assert laned.metric("laya_retries_total", reason="stale") >= 1


def test_an_answer_takes_back_what_was_counted_against_its_backend(up, program, tmp_path):
    with running(config(up), tmp_path, program=("-c", program)) as laya:
        ask_twice(laya, post(body()))
        with laya.connect() as sock:
            for status in [500] * 4 + [200] + [500] * 4:  # five in a row would open the breaker
                up.script = lambda asked, status=status: [answer(completion("hi"), f"{status} Told")]
                sock.sendall(post(body()))
                assert read_response(sock)[0] == status
        assert laya.metric("laya_breaker_state", backend="up0") == 0


def test_a_client_that_leaves_cancels_what_the_lane_sent(laned, up):
    ask_twice(laned, post(body()))
    up.script = lambda asked: [Sleep(5), answer(completion("late"))]
    up.asked.clear()
    with laned.connect() as sock:
        sock.sendall(post(body()))
        assert up.wait_for(lambda: len(posts(up)) == 1)
    assert up.wait_for(lambda: posts(up)[0].closed_at is not None, 3)
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


def test_a_share_goes_to_each_of_several_targets(tmp_path, program):
    """The lane asks the balancer as the long way does, and its choice counts."""
    with ScriptedUpstream() as one, ScriptedUpstream() as two, running(config(one, two), tmp_path, program=("-c", program)) as laya:
        one.script = two.script = lambda asked: [answer(completion("hi"))]
        with laya.connect() as sock:
            for _ in range(40):
                sock.sendall(post(body("both-of-them")))
                assert read_response(sock)[0] == 200
        shares = [len(posts(up)) for up in (one, two)]
        assert sum(shares) == 40 and min(shares) >= 15
        assert steps(laya).count(("ask", True)) >= 30


def test_a_flood_of_model_names_keeps_the_lanes_bounded(laned):
    before = len(lane_lines(laned))
    with laned.connect() as sock:
        for number in range(200):
            sock.sendall(post(body(f"both-{number:04}")))
            assert read_response(sock)[0] == 200
    assert ask_twice(laned, post(body())) == TAKEN
    kept = [line["lanes"] for line in lane_lines(laned)[before:] if line["step"] == "ask" and line["taken"]]
    assert len(kept) > 150 and max(kept) == MOST_LANES


def test_a_cache_for_some_leaves_the_others_in_the_lane(up, program, tmp_path):
    cached = config(up)
    cached["routes"].append({"name": "kept", "match": "kept", "to": "up0", "cache": True})
    with running(cached, tmp_path, program=("-c", program)) as laya:
        assert ask_twice(laya, post(body())) == TAKEN
        kept = post(body("kept", temperature=0))
        assert ask_twice(laya, kept) == [("ask", True)]  # nothing went to the backend
        assert laya.metric("laya_cache_hits_total") == 2


def test_a_build_of_other_sources_is_not_used():
    """What an earlier version left in an editable installation would send requests that this one does not mean."""
    code = (
        "import sys, types; sys.modules['laya.net.native_lane'] = types.ModuleType('native_lane');"
        "from laya.net import connection, in_c, lane; assert not in_c.IN_C and connection.ask is lane.ask_in_python"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})


def test_a_second_interpreter_in_the_process_runs_without_the_lane_in_c():
    """What it keeps is kept once in a process; an interpreter that took it over would take it away from the first."""
    pytest.importorskip("laya.net.native_lane", reason="built without a C compiler: apt install gcc")
    pytest.importorskip("_xxsubinterpreters", reason="it has another name from Python 3.13 on")
    inner = (
        "import sys; sys.path[:] = {path!r}\ntry: import laya.net.native_lane\nexcept ImportError: pass\nelse: raise OSError"
    )
    code = (
        "import sys, _xxsubinterpreters as all; from laya.net import native_lane; name = all.create(isolated=False);"
        f"all.run_string(name, {inner!r}.format(path=sys.path)); all.destroy(name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})


def test_lanes_of_one_head_share_it():
    """Their bound counts on that: a head has up to four kilobytes."""
    backend = SimpleNamespace(name="up", pool=SimpleNamespace(clock=None, limits=None), breaker=None, settings=BackendConfig())
    candidate = SimpleNamespace(backend_state=backend, lines=b"x-laya-route: r\r\n")
    head = b"POST / HTTP/1.1\r\n"
    leg = Leg(candidate, head, "r", "chat", Telemetry())
    assert leg.head is head and leg.lines is candidate.lines


def planted(program: str, where: str, when: str) -> tuple[str, str]:
    """`program`, where the method `where` raises once, when `when` holds of its second argument and how often it was called."""
    plant = f"""
from collections import deque

import laya.log, laya.net.pool
from laya.net.pool import Pool
class Lines(deque):
    def append(self, line):
        deque.append(self, line)
class Waiting(deque):
    def append(self, call):
        deque.append(self, call)
laya.log.deque, laya.net.pool.deque = Lines, Waiting
real, count = {where}, 0
def failing(owner, given):
    global count
    if {when}:
        count += 1
        if count == 2:
            raise ZeroDivisionError
    return real(owner, given)
{where} = failing
"""
    return "-c", program.replace("runpy.run", plant + "runpy.run", 1)


def nearly(message: bytes, chance: random.Random) -> bytes:
    """`message` with a mistake, or a difference, in its head."""
    head, _, body = message.partition(b"\r\n\r\n")
    at, letter = chance.randrange(len(head)), chance.choice([b"0", b"9", b" ", b"\r", b"\n", b"\r\n", b":", b"x", b"X", b"\0", b"\x80"])
    length = b"%d" % len(body)
    lengths = [
        b"0" + length, b"+" + length, length + b" ", b" " + length, b"%d" % (len(body) + 1), b"%d" % (len(body) - 1),
        b"00000000000" + length, length + b"0000000000", b"", b"0", b"0x" + length, length + b", " + length,
    ]  # fmt: skip
    kind = chance.randrange(8)
    if kind == 0:
        head = head[:at] + letter + head[at + 1 :]
    elif kind == 1:
        head = head[:at] + letter + head[at:]
    elif kind == 2:
        head = head[:at] + head[at + 1 :]
    elif kind == 3:
        head = re.sub(rb"(?i)(content-length: )\d+", lambda found: found[1] + chance.choice(lengths), head)
    elif kind == 4:
        body += chance.choice([b" ", body, message])
    elif kind == 5:
        body = body[: chance.randrange(len(body))]
    elif kind == 6:
        return message[: chance.randrange(1, len(head) + 6)]
    else:
        head = head.swapcase()
    return head + b"\r\n\r\n" + body


def hear(sock) -> bytes:
    """What comes until nothing comes any more."""
    heard = b""
    sock.settimeout(0.05)
    try:
        while data := sock.recv(65536):
            heard += data
        return heard + b" and its end"
    except (TimeoutError, ConnectionResetError) as why:
        return heard + type(why).__name__.encode()


@pytest.mark.parametrize("last", [False, True], ids=["length amidst", "length last"])
def test_a_head_that_nearly_repeats_is_read_as_if_it_were_the_first(laned, unlaned, up, last):
    """A connection's last head is compared before it is looked up: nothing but the same head may pass for it."""
    extra = b"" if last else b"X-More: 1\r\n"
    found = {}
    for laya in (laned, unlaned):
        chance = random.Random(last)
        found[laya] = []
        for number in range(60):
            message = post(body(text="x" * chance.choice([1, 30, 300])), extra=extra)
            up.asked.clear()
            with laya.connect() as sock:
                for _ in range(3):
                    sock.sendall(post(body(), extra=extra))
                    read_response(sock)
                sock.sendall(nearly(message, chance))
                heard = CHANGING.sub(b"", hear(sock))
            asked = [(CHANGING.sub(b"", one.head), one.body) for one in posts(up)]
            found[laya].append((number, heard, asked))
    for one, other in zip(found[laned], found[unlaned], strict=True):
        assert one == other


@pytest.mark.parametrize("last", [False, True], ids=["length amidst", "length last"])
def test_an_answers_head_that_nearly_repeats_is_read_as_if_it_were_the_first(laned, unlaned, up, last):
    good = answer(completion("hi"))
    if last:
        good = b"HTTP/1.1 200 OK\r\nx-more: 1\r\ncontent-length: 3\r\n\r\n{ }"
    found = {}
    for laya in (laned, unlaned):
        chance = random.Random(last)
        found[laya] = []
        for number in range(24):
            bad = nearly(good, chance)
            up.script = lambda asked, bad=bad: [bad, Sleep(0.02), Close()] if b"bad" in asked.body else [good]
            with laya.connect() as sock:
                for text in ("good", "good", "good", "bad"):
                    sock.sendall(post(body(text=text)))
                    if text == "good":
                        read_response(sock)
                heard = re.sub(rb'req-[0-9a-f]*|"message":"[^"]*"', b"", CHANGING.sub(b"", hear(sock)))
            found[laya].append((number, bad, heard))
    for one, other in zip(found[laned], found[unlaned], strict=True):
        assert one == other


@pytest.mark.parametrize("lane", ["on", "off"])
def test_a_mistake_while_sending_is_a_clean_500_and_nothing_leaks(up, program, tmp_path, lane):
    program = program if lane == "on" else OFF
    with running(config(up), tmp_path, program=planted(program, "Waiting.append", "'/messages' not in str(given.head)")) as laya:
        ask_twice(laya, post(body()))
        up.script = lambda asked: [Sleep(0.5), answer(completion("hi"))]
        with laya.connect() as one, laya.connect() as two:
            one.sendall(post(body()))  # on the one idle connection; the next call has to wait in line
            assert up.wait_for(lambda: len(posts(up)) == 4)
            two.sendall(post(body()))
            assert read_response(two)[0] == 500
            assert read_response(one)[0] == 200
            two.sendall(post(body()))
            assert read_response(two)[0] == 200
        assert ends_clean(laya)


@pytest.mark.parametrize("lane", ["on", "off"])
def test_a_mistake_of_the_balancer_is_a_clean_500_and_the_connection_stays(up, program, tmp_path, lane):
    """The lane meets it before there is an exchange that could answer."""
    plant = """
from laya.gateway.selection import Selection
real, count = Selection.choose, 0
def failing(owner, route, *given):
    global count
    count += route.name == "shared"
    if count > 3 and route.name == "shared":
        raise ZeroDivisionError
    return real(owner, route, *given)
Selection.choose = failing
"""
    program = (program if lane == "on" else OFF).replace("runpy.run", plant + "runpy.run", 1)
    with running(config(up, up), tmp_path, program=("-c", program)) as laya:
        with laya.connect() as sock:
            for model, status in [("both-of-them", 200)] * 3 + [("both-of-them", 500)] * 2 + [("m", 200)]:
                sock.sendall(post(body(model)))
                assert read_response(sock)[0] == status
        assert ends_clean(laya)


@pytest.mark.parametrize("lane", ["on", "off"])
def test_a_mistake_in_the_books_ends_the_connection_and_nothing_leaks(up, program, tmp_path, lane):
    """The answer has gone out by then: it is whole, and the next request finds another connection."""
    program = program if lane == "on" else OFF
    with running(config(up), tmp_path, program=planted(program, "Lines.append", "b'chat/completions' in given")) as laya:
        with laya.connect() as sock:
            for _ in range(2):
                sock.sendall(post(body()))
                assert read_response(sock)[0] == 200
            assert sock.recv(1) == b""
        assert ask_twice(laya, post(body())) == (TAKEN if lane == "on" else [("ask", False)])
        assert ends_clean(laya)


def ends_clean(laya: Laya) -> bool:
    found = laya.wait_for(lambda: laya.events("fault") and laya.events("fault")[0]["kind"] == "ZeroDivisionError")
    return found and laya.metric("laya_backend_inflight", backend="up0") == 0 and laya.metric("laya_buffered_bytes") == 0


def test_what_the_lane_sent_is_the_last_of_its_connection_in_a_drain(up, program, tmp_path):
    with running(config(up), tmp_path, program=("-c", program)) as laya:
        ask_twice(laya, post(body()))
        up.script = lambda asked: [Sleep(0.5), answer(completion("hi"))]
        up.asked.clear()
        with laya.connect() as sock:
            sock.sendall(post(body()))
            assert up.wait_for(lambda: len(posts(up)) == 1)
            laya.process.send_signal(signal.SIGTERM)
            status, headers, _ = read_response(sock)
            assert (status, headers[b"connection"]) == (200, b"close") and sock.recv(1) == b""
        assert laya.process.wait(10) == 0


def test_a_reload_ends_the_lane_at_once(up, program, tmp_path):
    settings = config(up)
    with running(settings, tmp_path, program=("-c", program)) as laya:
        ask_twice(laya, post(body()))
        settings = {**json.loads(laya.path.read_text())}
        settings["routes"][0]["match"] = "moved"
        laya.path.write_text(json.dumps(settings))
        laya.process.send_signal(signal.SIGHUP)
        assert laya.wait_for(lambda: laya.metric("laya_config_reloads_total") == 1)
        with laya.connect() as sock:
            sock.sendall(post(body()))
            assert read_until(sock, b"\r\n").startswith(b"HTTP/1.1 404")
