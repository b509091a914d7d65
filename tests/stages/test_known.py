"""A question whose very bytes were answered before (`gateway.known`): the short way says what the long way says, and nothing that
may differ from one request to the next is remembered."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from laya.gateway import known
from laya.gateway.caching import Caching
from laya.gateway.known import KnownBodies
from laya.gateway.staged import UNREAD
from raw import post, read_response, read_stream
from scripted_upstream import ScriptedUpstream, answer, completion, stream
from server import Laya, running

# Laya that tells on stderr which requests were answered the short way (or never answers so), and where in this a mark stands.
PROGRAM = """
import json, os, runpy
from laya.gateway.caching import Caching
from laya.gateway.front import Gateway

def tell(**members):  # in one write: the log's thread writes there too
    os.write(2, json.dumps(members).encode() + b"\\n")

whole, accept = Caching.answers, Gateway.accept

def answers(*given):
    taken = {taken}
    tell(event="short", taken=taken)
    return taken

def marked(self, connection, request, body):
    if request.path.startswith(b"/mark"):
        tell(event="mark", path=request.path.decode())
    accept(self, connection, request, body)

Caching.answers, Gateway.accept = answers, marked
runpy.run_module("laya", run_name="__main__", alter_sys=True)
"""
ON, OFF = ("-c", PROGRAM.format(taken="whole(*given)")), ("-c", PROGRAM.format(taken="False"))
CHANGING = re.compile(rb"(\(b'date', b'[^']*'\)|req-[0-9a-f]*|dur=[0-9.]*|re(set|maining)-[a-z]*', b'[0-9a-z.]*')")
_texts = itertools.count()


def question(text: str = "", model: str = "m", **members) -> bytes:
    text = text or f"question {next(_texts)}"
    return json.dumps({"model": model, "temperature": 0, "messages": [{"role": "user", "content": text}], **members}).encode()


def config(up: ScriptedUpstream, **more) -> dict:
    at = {"url": up.url, "health": None}
    return {
        "backends": {"up": at, "same": {**at}},
        "routes": [
            {"name": "redacted", "match": "secret", "to": "up", "redact": True},
            {"name": "shared", "match": "both", "to": ["up", "same"]},
            {"match": "*%", "to": "up"},
            {"name": "all", "match": "*", "to": "up"},
        ],
        "stages": {"cache": {"enabled": True, "ttl_s": 2}},
        **more,
    }


KEYS = {"auth": {"keys": [
    {"name": "one", "key": "key-of-one"}, {"name": "two", "key": "key-of-two"}, {"name": "few", "key": "key-of-few", "rpm": 4},
    {"name": "poor", "key": "key-of-poor", "tpm": 4000},
]}}  # fmt: skip


@pytest.fixture(scope="module")
def up() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def laya(up, tmp_path_factory) -> Iterator[Laya]:
    with running(config(up), tmp_path_factory.mktemp("open"), program=ON) as server:
        yield server


@pytest.fixture(scope="module")
def keyed(up, tmp_path_factory) -> Iterator[Laya]:
    with running(config(up, **KEYS), tmp_path_factory.mktemp("keyed"), program=ON) as server:
        yield server


@pytest.fixture(autouse=True)
def _answers(up):
    up.script = lambda asked: stream("he", "llo") if asked.json().get("stream") else [answer(completion("hello"))]
    up.asked.clear()


def ask(sock, body: bytes, extra: bytes = b"", path: bytes = b"/v1/chat/completions") -> tuple[int, bytes | None]:
    """(status, x-laya-cache)"""
    sock.sendall(post(body, path, extra))
    status, headers, _ = read_response(sock)
    return status, headers.get(b"x-laya-cache")


def warm(sock, body: bytes, extra: bytes = b"") -> None:
    """Asked, answered the long way from the cache, and so known."""
    assert [ask(sock, body, extra)[1] for _ in range(2)] == [b"miss", b"hit"]


def ways(laya: Laya, count: int) -> list[bool]:
    """Of the last `count` requests: whether each was answered the short way."""
    mark = f"/mark-{next(_texts)}"
    laya.call("GET", mark)
    assert laya.wait_for(lambda: mark in [line["path"] for line in laya.events("mark")]), (laya.other, laya.lines[-5:])
    return [line["taken"] for line in laya.events("short")][-count:]


KEY = b"x-api-key: key-of-%b\r\n"


# -- it says what the long way says --------------------------------------------------------------------------------------


def told(up, directory, program, more: dict, body: bytes, extra: bytes) -> tuple:
    """(answers, log lines, metrics) of the same question four times."""
    with running(config(up, **more), directory, program=program) as laya:
        with laya.connect() as sock:
            heard = []
            for _ in range(4):
                sock.sendall(post(body, extra=extra))
                if b'"stream": true' in body:
                    heard.append(read_stream(sock))
                else:
                    status, headers, raw = read_response(sock)
                    heard.append(CHANGING.sub(b"", repr((status, list(headers.items()), raw)).encode()))
        taken = ways(laya, 4)
        assert laya.wait_for(lambda: len(laya.events("request")) >= 4)
        lines = [
            {name: value for name, value in line.items() if name not in ("time", "id", "seconds")}
            for line in laya.events("request")[:4]
        ]
        counted = [
            laya.metric(name, **labels)
            for name, labels in (
                ("laya_cache_hits_total", {}), ("laya_cache_misses_total", {}), ("laya_requests_total", {"outcome": "ok"}),
                ("laya_key_tokens_total", {}),
            )
        ]  # fmt: skip
        return taken, heard, lines, counted


@pytest.mark.parametrize(
    ("more", "extra", "members"),
    [
        ({}, b"", {}), ({}, b"x-laya-timing: 1\r\n", {}), ({}, b"", {"stream": True}),
        (KEYS, KEY % b"one", {}), (KEYS, KEY % b"poor", {}), (KEYS, KEY % b"one", {"stream": True}),
    ],
)  # fmt: skip
def test_both_ways_say_the_same(up, tmp_path, more, extra, members):
    body = question(**members)
    on = told(up, tmp_path, ON, more, body, extra)
    off = told(up, tmp_path, OFF, more, body, extra)
    assert on[0] == [False, False, True, True] and off[0] == [False] * 4
    assert on[1:] == off[1:]


@pytest.mark.parametrize(
    ("path", "body"), [(b"/v1/embeddings", {"model": "m", "input": "x"}), (b"/v1/completions", {"model": "m", "prompt": "x", "seed": 1})]
)
def test_other_apis_go_it_too(laya, up, path, body):
    choice = {"index": 0, "text": "x", "finish_reason": "stop"}
    up.script = lambda asked: [answer({"object": "text_completion", "choices": [choice], "data": [{"embedding": [0.5]}], "usage": {}})]
    with laya.connect() as sock:
        assert [ask(sock, json.dumps(body).encode(), path=path)[1] for _ in range(4)] == [b"miss", b"hit", b"hit", b"hit"]
    assert ways(laya, 4) == [False, False, True, True] and len(up.asked) == 1


def test_large_bodies_are_known_up_to_a_bound(laya):
    with laya.connect() as sock:
        for size, short in ((known.LONGEST - 1000, True), (known.LONGEST + 1000, False)):
            body = question("long " + "x" * size)
            warm(sock, body)
            assert ask(sock, body) == (200, b"hit") and ways(laya, 1) == [short]


def test_a_head_that_is_never_the_same_again_is_not_kept(laya):
    """Clients that number their requests, and those whose heads only h11 reads."""
    body = question()
    with laya.connect() as sock:
        warm(sock, body)
        assert [ask(sock, body, b"x-request-id: mine\r\n") for _ in range(3)] == [(200, b"hit")] * 3
        for _ in range(3):
            sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
            sock.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            assert read_response(sock)[1][b"x-laya-cache"] == b"hit"
        assert ways(laya, 6) == [False] * 6


def test_pipelined_and_together(laya, up):
    body = question()
    with laya.connect() as sock:
        warm(sock, body)
        sock.sendall(post(body) * 20)
        raw = b""
        while raw.count(b"x-laya-cache: hit") < 20 or raw.count(b'"hello"') < 20:
            raw += sock.recv(65536)
        assert ask(sock, question()) == (200, b"miss")
    assert len(up.asked) == 2


# -- what may differ is asked anew ---------------------------------------------------------------------------------------


def test_an_answer_grows_too_old(laya, up):
    body = question()
    with laya.connect() as sock:
        warm(sock, body)
        assert ask(sock, body)[1] == b"hit" and ways(laya, 1) == [True]
        time.sleep(2.1)
        assert ask(sock, body)[1] == b"miss" and ways(laya, 1) == [False]
        assert ask(sock, body)[1] == b"hit"
    assert len(up.asked) == 2


@pytest.mark.parametrize(("control", "word"), [(b"no-store", b"bypass"), (b"no-cache", b"miss"), (b"max-age=0", b"miss")])
def test_cache_control_holds_for_a_known_body(laya, up, control, word):
    body, extra = question(), b"cache-control: %b\r\n" % control
    with laya.connect() as sock:
        warm(sock, body)
        assert [ask(sock, body, extra)[1] for _ in range(3)] == [word] * 3
        assert ask(sock, body)[1] == b"hit"
    assert len(up.asked) == 4


def test_the_age_that_a_request_takes_is_looked_at_each_time(laya, up):
    body, extra = question(), b"cache-control: max-age=1\r\n"
    with laya.connect() as sock:
        warm(sock, body, extra)
        assert ask(sock, body, extra)[1] == b"hit" and ways(laya, 1) == [True]
        time.sleep(1.1)
        assert ask(sock, body, extra)[1] == b"miss"
    assert len(up.asked) == 2


def test_keys_do_not_share_what_is_known(keyed, up):
    """(case 59)"""
    body = question()
    with keyed.connect() as sock:
        warm(sock, body, KEY % b"one")
        assert ask(sock, body, KEY % b"one")[1] == b"hit" and ways(keyed, 1) == [True]
        assert ask(sock, body, KEY % b"two")[1] == b"miss"
        assert ask(sock, body, KEY % b"none")[0] == ask(sock, body)[0] == 401
    assert len(up.asked) == 2


def test_limits_are_counted_on_the_short_way(keyed):
    body = question()
    with keyed.connect() as sock:
        warm(sock, body, KEY % b"few")
        assert [ask(sock, body, KEY % b"few") for _ in range(3)] == [(200, b"hit"), (200, b"hit"), (429, None)]
        assert ways(keyed, 2) == [True, True]
        body = question("x" * 3000)
        warm(sock, body, KEY % b"poor")
        left = set()
        for _ in range(10):  # each takes 750 tokens when it comes, and gives them back, since a hit costs none
            sock.sendall(post(body, extra=KEY % b"poor"))
            status, headers, _ = read_response(sock)
            assert (status, headers[b"x-laya-cache"]) == (200, b"hit") and ways(keyed, 1) == [True]
            left.add(int(headers[b"x-ratelimit-remaining-tokens"]) // 500)
        assert len(left) <= 2
    assert keyed.metric("laya_key_tokens_total", key="few", kind="generated") == 1.0


def test_a_route_with_several_targets_goes_the_long_way(laya, up):
    """(case 59)"""
    body = question(model="both")
    with laya.connect() as sock:
        assert [ask(sock, body)[1] for _ in range(6)] == [b"miss", b"miss", b"hit", b"hit", b"hit", b"hit"]
    assert ways(laya, 6) == [False] * 6 and len(up.asked) == 2


def test_a_redacted_body_goes_the_long_way_and_is_counted_each_time(laya, up):
    """(case 60)"""
    up.script = lambda asked: [answer(completion("call " + asked.json()["messages"][0]["content"].split()[-1]))]
    with laya.connect() as sock:
        for number in ("13800138000", "13900139000"):
            for _ in range(3):
                sock.sendall(post(question(f"the number is {number}", model="secret")))
                assert number.encode() in read_response(sock)[2]
    assert ways(laya, 6) == [False] * 6 and len(up.asked) == 1
    counts = lambda: [line.get("redacted") for line in laya.events("request") if line["route"] == "redacted"]  # noqa: E731
    assert laya.wait_for(lambda: len(counts()) == 6) and counts() == [{"phone": 1}] * 6


def test_a_stage_of_the_users_own_is_asked_each_time(up, tmp_path):
    (tmp_path / "shout.py").write_text(
        "class Shout:\n    asked = 0\n    def request(self, body, about):\n        self.asked += 1\n"
        "        return {**body, 'seed': self.asked}\nmake = Shout\n"
    )
    stages = {"cache": {"enabled": True}, "custom": ["shout:make"]}
    with running(config(up, stages=stages), tmp_path, program=ON) as laya, laya.connect() as sock:
        body = question()
        assert [ask(sock, body)[1] for _ in range(3)] == [b"miss"] * 3
    assert [asked.json()["seed"] for asked in up.asked] == [1, 2, 3]


# -- reloads -------------------------------------------------------------------------------------------------------------


LONG = {"stages": {"cache": {"enabled": True, "ttl_s": 60}}}


def reload(laya: Laya, **members) -> None:
    count = laya.metric("laya_config_reloads_total")
    laya.path.write_text(json.dumps({**json.loads(laya.path.read_text()), **members}))
    assert laya.wait_for(lambda: laya.metric("laya_config_reloads_total") == count + 1)


def test_a_key_that_a_reload_takes_away_is_refused_though_its_question_is_known(up, tmp_path):
    body = question()
    with running(config(up, **KEYS, **LONG), tmp_path, program=ON) as laya, laya.connect() as sock, laya.connect() as other:
        metric = laya.metric
        laya.get = lambda path, headers=None: laya.call("GET", path, headers={"x-api-key": "key-of-two"})[:2]
        warm(sock, body, KEY % b"one")
        assert ask(sock, body, KEY % b"one")[1] == b"hit" and ways(laya, 1) == [True]
        reload(laya, auth={"keys": [{"name": "two", "key": "key-of-two"}]})
        assert ask(sock, body, KEY % b"one")[0] == ask(other, body, KEY % b"one")[0] == 401
        reload(laya, auth={"keys": [*KEYS["auth"]["keys"][1:], {"name": "one", "key": "key-of-one", "routes": ["shared"]}]})
        assert ask(sock, body, KEY % b"one")[0] == 404  # known again, but the route is not its own any more
        reload(laya, auth=KEYS["auth"])
        assert [ask(sock, body, KEY % b"one")[1] for _ in range(2)] == [b"hit", b"hit"]
        assert metric("laya_cache_misses_total") == 1


def test_a_route_that_a_reload_changes_is_gone_anew(up, tmp_path):
    body = question()
    with running(config(up, **LONG), tmp_path, program=ON) as laya, laya.connect() as sock:
        warm(sock, body)
        assert ask(sock, body)[1] == b"hit" and ways(laya, 1) == [True]
        reload(laya, routes=[{"name": "new", "match": "*", "to": "same"}])
        assert ask(sock, body)[1] == b"miss"
        reload(laya, routes=[{"name": "new", "match": "*", "to": "same", "cache": False}])
        assert ask(sock, body)[1] is None
        reload(laya, routes=[{"name": "new", "match": "*", "to": "same", "redact": True}])
        assert ask(sock, body)[1] == b"hit"  # kept under the same target and with nothing to redact
        assert ask(sock, body)[1] == b"hit" and ways(laya, 1) == [False]
        reload(laya, stages={"cache": {"enabled": True, "ttl_s": 1}})
        assert ask(sock, body)[1] == b"miss"
    assert len(up.asked) == 4


def test_reloads_while_hits_run_end_none_of_them(up, tmp_path):
    body, over, wrong = question(), threading.Event(), []
    with running(config(up, **LONG), tmp_path) as laya:

        def hits() -> None:
            with laya.connect() as sock:
                while not over.is_set():
                    found = ask(sock, body)
                    if found[0] != 200 or found[1] not in (b"hit", b"miss"):
                        wrong.append(found)

        threads = [threading.Thread(target=hits) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(4):
            reload(laya, routes=[{"name": f"r{number}", "match": "*", "to": ("up", "same")[number % 2]}])
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong and len(up.asked) < 40


# -- bounds --------------------------------------------------------------------------------------------------------------


def test_a_flood_of_questions_costs_the_long_way_and_not_memory():
    bodies, plan, other = KnownBodies(), object(), object()
    first = object()
    bodies.add(plan, b"first", first)
    assert bodies.get(plan, b"first") is first and bodies.get(other, b"first") is None and bodies.get(plan, b"second") is None
    count = known.MOST_BYTES // (100 + known.ENTRY_BYTES)
    for number in range(3 * count):
        bodies.add(plan, b"%0100d" % number, first)
        assert sum(map(len, bodies._by_plan.values())) <= count
    assert bodies.get(plan, b"%0100d" % (3 * count - 1)) is first and bodies.get(plan, b"first") is None
    bodies.add(plan, b"x" * (known.LONGEST + 1), first)
    assert bodies.get(plan, b"x" * (known.LONGEST + 1)) is None
    for _ in range(3 * known.MOST_PLANS):
        bodies.add(last := object(), b"body", first)
        assert len(bodies._by_plan) <= known.MOST_PLANS
    assert bodies.get(last, b"body") is first
    bodies.forget()
    assert bodies.get(plan, b"%0100d" % (3 * count - 1)) is None


class Long(bytes):
    """What must not be looked up on the loop: to hash 31 MB takes it 20 ms."""

    __hash__ = None


def test_a_long_question_is_looked_up_nowhere_before_the_worker_has_read_it():
    parked = []
    gateway = SimpleNamespace(park=lambda *given: parked.append(given))
    caching = Caching(gateway, SimpleNamespace(max_bytes=1 << 20, ttl_s=1, any_temperature=False))
    plan, request = SimpleNamespace(key=None, api="chat", path=b"/"), SimpleNamespace(query=b"", fields={})
    body, target = Long(b"x" * (known.LONGEST + 1)), SimpleNamespace(name="up", model=None)
    caching._known.add(plan_of := object(), b"short", object())
    assert not caching.knows(plan_of, body) and caching.knows(plan_of, b"short")
    staged = SimpleNamespace(question=UNREAD)
    assert caching.enter(staged, request, body, plan, None, "m", None, [target], None) is None and len(parked) == 1


# -- together with a key's cap -------------------------------------------------------------------------------------------


def test_a_keys_cap_on_prompts_holds_on_a_route_with_a_cache(up, tmp_path):
    """Also for what would be answered from it, the short way and the long one."""
    keys = [{"name": "capped", "key": "key-of-capped", "max_prompt_tokens": 50}, {"name": "free", "key": "key-of-free"}]
    with running(config(up, auth={"keys": keys}), tmp_path, program=ON) as laya, laya.connect() as sock:
        body = question()
        assert [ask(sock, body, KEY % b"capped")[1] for _ in range(4)] == [b"miss", b"hit", b"hit", b"hit"]
        assert ways(laya, 4) == [False, False, True, True]
        long = question("much " * 400)
        warm(sock, long, KEY % b"free")
        assert [ask(sock, long, KEY % b"capped") for _ in range(3)] == [(400, None)] * 3
        assert ask(sock, long, KEY % b"free") == (200, b"hit")
        reload(laya, auth={"keys": [keys[0], {**keys[1], "max_prompt_tokens": 50}]})
        assert [ask(sock, long, KEY % b"free") for _ in range(2)] == [(400, None)] * 2
    assert len(up.asked) == 2
