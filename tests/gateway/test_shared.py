"""Several routers that share sessions, stored conversations and limits through a real Redis; and Redis away."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections import deque

import pytest

from laya.config import RouterConfig
from laya.config.structs import KeyConfig
from laya.gateway.shared_limits import SharedLimits
from laya.gateway.shared_store import SharedResponses
from laya.routing.sessions.redis_link import RedisLink, open_redis
from laya.routing.sessions.shared import SESSION_TTL_S, SharedSessions
from redis_server import RedisServer, redis_server
from scripted_upstream import ScriptedUpstream, answer, completion
from server import Laya, running

pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")


@pytest.fixture(scope="module")
def ups():
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(ScriptedUpstream()) for name in ("a", "b", "c")}


@pytest.fixture
def store(tmp_path):
    with redis_server(tmp_path) as server:
        yield server


def config(ups, redis: str, timeout_ms: float = 200, **more) -> dict:
    return {
        "backends": {name: {"url": up.url, "health": None} for name, up in ups.items()},
        "routes": [{"name": "m", "match": "m", "to": list(ups), "policy": "session"}],
        "router": {"mode": "shared", "redis": redis, "timeout_ms": timeout_ms, **more},
    }


@contextlib.contextmanager
def two(settings: dict, directory):
    with running(settings, directory) as first, running(settings, directory) as second:
        for router in (first, second):
            assert router.wait_for(lambda router=router: sessions_of(router)["state"] != "starting")
        yield first, second


def sessions_of(router: Laya) -> dict:
    return json.loads(router.get("/ready")[1])["components"]["sessions"]


def backend(router: Laya, session: str) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    status, raw, headers = router.call("POST", "/v1/chat/completions", body, {"x-laya-session": session})
    assert status == 200, raw
    return headers["x-laya-backend"]


# -- whole routers -----------------------------------------------------------------------------------------------------------


def test_a_session_keeps_its_backend_whichever_router_it_meets(ups, store, tmp_path):
    with two(config(ups, store.url), tmp_path) as (first, second):
        homes = {str(n): backend(first, str(n)) for n in range(12)}
        assert set(homes.values()) == set(ups)
        assert {session: backend(second, session) for session in homes} == homes
        assert sessions_of(second)["entries"] == 12 and sessions_of(second)["state"] == "ok"
        assert first.stop() == 0, "and it stays so when the other has gone"
        assert {session: backend(second, session) for session in homes} == homes
    key = next(iter(store.client().keys("laya:session:*")))
    assert 0 < store.client().ttl(key) <= SESSION_TTL_S and b"hi" not in key


def test_redis_away_means_local_operation_and_it_comes_back_by_itself(ups, store, tmp_path):
    with two(config(ups, store.url), tmp_path) as (first, second):
        before = {str(n): backend(first, str(n)) for n in range(4)}
        store.kill()
        new = {f"new-{n}": backend(first, f"new-{n}") for n in range(6)}
        assert {session: backend(first, session) for session in (*before, *new)} == {**before, **new}
        assert backend(second, "x") == backend(second, "x")
        assert first.wait_for(lambda: sessions_of(first)["state"] == "degraded")
        assert first.get("/ready")[0] == 200 and first.metric("laya_session_table_degraded") == 1
        assert first.wait_for(lambda: [line["state"] for line in first.events("session_table")] == ["degraded"])
        assert first.metric("laya_session_table_errors_total", kind="ConnectionError") >= 1
        store.start()
        for router in (first, second):
            assert router.wait_for(lambda router=router: sessions_of(router)["state"] == "ok")
        assert first.wait_for(lambda: sessions_of(first)["unwritten"] == 0)
        assert {session: backend(second, session) for session in new} == new, "what was assigned meanwhile is shared"
        assert first.metric("laya_session_table_degraded") == 0
        assert first.wait_for(lambda: [line["state"] for line in first.events("session_table")] == ["degraded", "ok"])


def test_a_redis_that_hangs_holds_no_request_beyond_the_bound(ups, store, tmp_path):
    with running(config(ups, store.url, timeout_ms=100), tmp_path) as router:
        backend(router, "warm")
        store.freeze()
        times = []
        for n in range(12):
            began = time.monotonic()
            home = backend(router, f"s{n}")
            times.append(time.monotonic() - began)
            assert backend(router, f"s{n}") == home, "without Redis the local table decides"
        assert max(times) < 1.0, times
        assert router.metric("laya_session_late_total") >= 1
        store.freeze(False)
        assert router.wait_for(lambda: sessions_of(router)["state"] == "ok" and sessions_of(router)["unwritten"] == 0)
        backend(router, "after")


def test_a_router_starts_without_redis(ups, tmp_path):
    with running(config(ups, f"unix://{tmp_path}/none.sock"), tmp_path) as router:
        assert backend(router, "s") == backend(router, "s")
        assert router.wait_for(lambda: sessions_of(router)["state"] == "degraded") and router.get("/ready")[0] == 200
        assert router.stop() == 0


def test_a_conversation_goes_on_at_another_router_and_is_deleted_at_both(store, tmp_path):
    seen: list[dict] = []

    def chat(asked) -> list:
        if asked.target.endswith("/responses"):
            return [answer({"error": {}}, "404 Not Found")]
        seen.append(asked.json())
        return [answer(completion("Well."))]

    with ScriptedUpstream(chat) as up, two(config({"up": up}, store.url, timeout_ms=2000), tmp_path) as (first, second):
        made = json.loads(first.call("POST", "/v1/responses", {"model": "m", "input": "One."})[1])
        assert store.client().exists(b"laya:response:\0" + made["id"].encode()) or first.wait_for(
            lambda: store.client().exists(b"laya:response:\0" + made["id"].encode())
        )
        assert json.loads(second.get(f"/v1/responses/{made['id']}")[1])["output"] == made["output"]
        more = {"model": "m", "input": "Two.", "previous_response_id": made["id"]}
        assert second.call("POST", "/v1/responses", more)[0] == 200
        assert [message["content"] for message in seen[-1]["messages"]][-1] == "Two." and len(seen[-1]["messages"]) == 3
        assert second.call("DELETE", f"/v1/responses/{made['id']}")[0] == 200
        assert first.wait_for(lambda: first.get(f"/v1/responses/{made['id']}")[0] == 404)


def test_a_limit_holds_over_all_routers_together(ups, store, tmp_path):
    settings = {**config(ups, store.url), "auth": {"keys": [{"name": "ci", "key": "k", "rpm": 6}]}}

    def ask(router: Laya) -> int:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        return router.call("POST", "/v1/chat/completions", body, {"authorization": "Bearer k"})[0]

    with two(settings, tmp_path) as (first, second):
        assert [ask(first) for _ in range(4)] == [200] * 4
        assert ask(second) == 200
        # Within a second the second router knows of the first one's four requests, and the first of the second's.
        assert second.wait_for(lambda: float(store.client().hget("laya:limit:ci:requests", "level") or 6) < 2.5)
        time.sleep(1.5)
        found = [ask(second), ask(first), ask(second), ask(first)]
        assert found.count(200) <= 2 and 429 in found


# -- its parts ---------------------------------------------------------------------------------------------------------------


class Loop:
    """The loop of one router: what the thread posts runs in `turn`; timers never come by themselves."""

    def __init__(self, server: RedisServer) -> None:
        self._posted: deque = deque()
        self.timers: list = []
        link = open_redis(RouterConfig(mode="shared", redis=server.url), self._posted.append)
        assert isinstance(link, RedisLink)
        self.link = link
        assert self.until(lambda: link.state == "ok")

    def later(self, seconds: float, call):
        self.timers.append(call)
        return self

    def cancel(self) -> None:
        """As a timer."""

    def turn(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def until(self, condition, seconds: float = 10.0) -> bool:
        until = time.monotonic() + seconds
        while not condition() and time.monotonic() < until:
            time.sleep(0.005)
            self.turn()
        return condition()

    def settle(self) -> None:
        """Everything sent so far is answered."""
        done: list = []
        self.link.send("PING", done=done.append)
        assert self.until(lambda: bool(done))

    def sessions(self) -> SharedSessions:
        return SharedSessions(100, self.link, timeout_s=1.0, later=self.later)

    def responses(self, max_bytes: int = 1 << 20, ttl_s: float = 60.0) -> SharedResponses:
        return SharedResponses(max_bytes=max_bytes, ttl_s=ttl_s, link=self.link, timeout_s=1.0, later=self.later)


@pytest.fixture
def loops(store):
    pair = Loop(store), Loop(store)
    yield pair
    for loop in pair:
        loop.link.stop(5.0)


KEY = b"0123456789abcdef"


def test_of_two_routers_that_meet_a_new_session_at_once_one_decides_for_both(loops):
    first, second = (loop.sessions() for loop in loops)
    first.assign(KEY, "a", lambda: None)
    loops[0].settle()
    second.assign(KEY, "b", lambda: None)
    assert second.find(KEY) == "b", "its first request has gone there"
    loops[1].settle()
    assert first.find(KEY) == second.find(KEY) == "a"


def test_a_router_learns_that_another_moved_a_session(loops):
    first, second = (loop.sessions() for loop in loops)
    for sessions, loop in zip((first, second), loops, strict=True):
        sessions.assign(KEY, "a", lambda: None)
        loop.settle()
    first.assign(KEY, "b", lambda: None)  # a is down
    loops[0].settle()
    assert second.find(KEY) == "a"
    second.on_tick(1000.0)
    loops[1].settle()
    assert second.find(KEY) == "b"
    first.on_tick(1000.0)
    first.assign(KEY, "c", lambda: None)
    first.assign(KEY, "a", lambda: None)
    for turn in range(3):
        first.on_tick(1001.0 + turn)
        loops[0].settle()
        assert first.find(KEY) == "a", "its own moves are no news"
    second.on_tick(1001.0)
    loops[1].settle()
    assert second.find(KEY) == "a"


def test_of_two_routers_that_move_a_session_at_once_both_go_by_the_last(loops):
    first, second = (loop.sessions() for loop in loops)
    for sessions, loop in zip((first, second), loops, strict=True):
        sessions.assign(KEY, "a", lambda: None)
        loop.settle()
    second.assign(KEY, "c", lambda: None)
    loops[1].settle()
    first.assign(KEY, "b", lambda: None)
    loops[0].settle()
    for sessions, loop in zip((first, second), loops, strict=True):
        sessions.on_tick(1000.0)
        loop.settle()
    assert first.find(KEY) == second.find(KEY) == "b"


def test_a_redis_that_lost_everything_learns_it_from_those_who_use_it(loops, store):
    sessions = loops[0].sessions()
    sessions.assign(KEY, "a", lambda: None)
    loops[0].settle()
    store.client().flushall()
    assert sessions.find(KEY) == "a"
    sessions.on_tick(1000.0)
    loops[0].settle()
    assert store.client().get(b"laya:session:" + KEY) == b"a"


def test_an_answer_of_redis_after_the_bound_changes_nothing_that_was_decided_meanwhile(loops, store):
    sessions, found = loops[0].sessions(), []
    store.freeze()
    sessions.fetch(KEY, lambda target, in_time: found.append((target, in_time)))
    loops[0].timers[-1]()
    assert found == [(None, True)] and sessions.late == 1
    sessions.assign(KEY, "b", lambda: None)
    store.freeze(False)
    loops[0].settle()
    assert found == [(None, True)] and sessions.find(KEY) == "b"


def test_whoever_waited_in_vain_is_the_last_to_wait_until_redis_speaks_again(loops, store):
    sessions, responses, found = loops[0].sessions(), loops[0].responses(), []
    store.freeze()
    sessions.fetch(KEY, lambda target, in_time: found.append(target))
    loops[0].timers[-1]()
    assert found == [None] and loops[0].link.state == "ok" and not sessions.may_fetch()
    responses.get("r", "ci", found.append)
    responses.delete("r", "ci", found.append)
    assert found == [None, None, False]
    store.freeze(False)
    assert loops[0].until(sessions.may_fetch)


def test_what_was_kept_is_written_before_anything_newer(store, monkeypatch):
    import laya.routing.sessions.redis_link as module

    monkeypatch.setattr(module, "GROUP", 10)
    back: list = []

    class Client:
        """`back` says what comes while the first of the kept writes are on their way."""

        def __init__(self) -> None:
            self._client = store.client()
            self.close = self._client.close

        def pipeline(self, transaction: bool):
            if self._client.ping() and back:
                link.send("SET", "x", back.pop(), keep=True)
            return self._client.pipeline(transaction=transaction)

    posted: deque = deque()
    link = RedisLink(Client, posted.append)
    store.kill()
    link.start()
    for n in range(40):
        link.send("SET", b"k%d" % n, "v", keep=True)
    link.send("SET", "x", "old", keep=True)
    until = time.monotonic() + 20
    while link.state != "degraded" and time.monotonic() < until:
        time.sleep(0.01)
    back.append("new")
    store.start()
    while link.status()["unwritten"] or link.state != "ok":
        assert time.monotonic() < until
        time.sleep(0.01)
    assert link.stop(5.0) and not back and store.client().get("x") == b"new"


def test_stored_conversations_stay_within_their_bytes_and_the_oldest_go(loops, store):
    responses = loops[0].responses(max_bytes=10_000)
    for n in range(10):
        responses.put(f"r{n}", "ci", b"x" * 3000)
        loops[0].settle()
    kept = {key.rpartition(b"\0")[2] for key in store.client().keys("laya:response:*")}
    assert kept == {b"r7", b"r8", b"r9"} and int(store.client().get("laya:responses:bytes")) == 9000
    found: list = []
    loops[1].responses().get("r9", "ci", found.append)
    loops[1].responses().get("r9", "other", found.append)
    loops[1].responses().get("r1", "ci", found.append)
    loops[1].settle()
    assert found == [b"x" * 3000, None, None], "another key's id is unknown"
    loops[1].responses().delete("r9", "ci", found.append)
    loops[1].settle()
    assert found[-1] is True and int(store.client().get("laya:responses:bytes")) == 6000
    assert store.client().zcard("laya:responses:age") == store.client().hlen("laya:responses:sizes") == 2


def test_a_conversation_is_found_locally_while_redis_is_away(loops, store):
    responses, found = loops[0].responses(), []
    store.kill()
    responses.put("r", "ci", b"value")
    assert loops[0].until(lambda: loops[0].link.state == "degraded")
    responses.get("r", "ci", found.append)
    responses.get("other", "ci", found.append)
    assert found == [b"value", None]
    store.start()
    assert loops[0].until(lambda: loops[0].link.state == "ok" and loops[0].link.status()["unwritten"] == 0)
    assert store.client().get(b"laya:response:ci\0r") == b"value"


def test_two_routers_take_from_one_bucket_and_neither_loses_what_it_took_while_redis_was_away(loops, store):
    key = KeyConfig(name="ci", key="k", rpm=60, tpm=6000)
    first, second = (SharedLimits(loop.link) for loop in loops)
    for _ in range(20):
        assert first.take(key, 100) is None
    first.settle(key, 100, 300)
    assert second.take(key, 100) is None
    now = 10.0

    def tick() -> None:
        nonlocal now
        now += 2.0
        for limits, loop in zip((first, second), loops, strict=True):
            limits.on_tick(now)
            loop.settle()

    tick()
    tick()
    for limits in (first, second):
        requests, tokens = limits.standing(key)
        assert 39 <= requests.remaining <= 42 and 3700 <= tokens.remaining <= 4000
    store.freeze()
    for _ in range(10):
        assert first.take(key, 100) is None
    store.freeze(False)
    tick()
    tick()
    assert 29 <= second.standing(key)[0].remaining <= 33


def test_what_waits_for_redis_is_bounded(store, monkeypatch):
    import laya.routing.sessions.redis_link as module

    monkeypatch.setattr(module, "MAX_PENDING", 50)
    loop = Loop(store)
    store.kill()
    sent = [loop.link.send("SET", b"k%d" % n, "v", keep=True) for n in range(80)]
    assert loop.until(lambda: loop.link.state == "degraded")
    sent += [loop.link.send("SET", b"k%d" % n, "v", keep=True) for n in range(80, 160)]
    assert sent.count(False) >= 100 and loop.link.status()["given_up"] == sent.count(False)
    store.start()
    assert loop.until(lambda: loop.link.status()["unwritten"] == 0)
    assert loop.link.stop(5.0) and store.client().dbsize() == sent.count(True)


def test_a_shared_table_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    import sys

    from laya.errors import DependencyError

    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(DependencyError, match=r"pip install 'laya-server\[shared\]'"):
        open_redis(RouterConfig(mode="shared", redis="unix:///x"), lambda call: None)


def test_no_thread_is_left_when_a_link_has_stopped(store):
    before = threading.active_count()
    loop = Loop(store)
    assert loop.link.stop(5.0) and threading.active_count() == before
