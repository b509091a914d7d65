"""SIGHUP and a changed file: new rules and backends while requests run."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest

from laya.config import loads
from laya.errors import ConfigError
from laya.gateway.reload import merged
from raw import post, read_stream, read_until
from scripted_upstream import DONE, SSE_HEAD, ScriptedUpstream, Sleep, answer, chunked, completion, delta
from server import Laya, running


def config(upstream: ScriptedUpstream, name: str = "one", **changes) -> dict:
    return {
        "backends": {name: {"url": upstream.url, "health": None}},
        "routes": [{"name": name, "match": "*", "to": name}],
        **changes,
    }


def write(laya: Laya, config: dict | str) -> None:
    """Put a new file in the old one's place, as an editor does."""
    text = config if isinstance(config, str) else json.dumps({**config, "server": {"port": 0, "drain_timeout_s": 5}})
    fresh = laya.path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, laya.path)


def backend_of(laya: Laya) -> str:
    return laya.chat("m")[2]["x-laya-backend"]


@pytest.fixture
def two():
    with ScriptedUpstream() as one, ScriptedUpstream() as other:
        yield one, other


def test_a_changed_file_brings_new_rules_on_connections_that_stay(two, tmp_path):
    """(case 65) Replaced by a rename, seen without a signal; the client's kept connection sees it too."""
    with running(config(two[0]), tmp_path) as laya, laya.connect() as sock:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
        sock.sendall(post(body))
        assert b"x-laya-backend: one" in read_until(sock, b"\r\n\r\n")
        write(laya, config(two[1], "other"))
        assert laya.wait_for(lambda: backend_of(laya) == "other", 15)
        sock.close()
        with laya.connect() as again:
            again.sendall(post(body))
            assert b"x-laya-backend: other" in read_until(again, b"\r\n\r\n")
        assert laya.metric("laya_config_reload_failed") == 0 and laya.metric("laya_config_reloads_total") == 1


def test_a_broken_file_keeps_the_old_rules_and_says_so(two, tmp_path):
    """(case 65) In /ready, the metric and the log; a good file mends it. SIGHUP twice is fine."""
    with running(config(two[0]), tmp_path) as laya:
        write(laya, "routes: [")
        laya.process.send_signal(signal.SIGHUP)
        laya.process.send_signal(signal.SIGHUP)
        assert laya.wait_for(lambda: laya.metric("laya_config_reload_failed") == 1)
        status, raw = laya.get("/ready")
        state = json.loads(raw)["components"]["config"]
        assert status == 200 and state["state"] == "kept the old one" and "yaml" in state["error"]
        assert backend_of(laya) == "one"
        assert laya.wait_for(lambda: any(line.get("event") == "config_reload_failed" for line in laya.lines))
        write(laya, config(two[1], "other"))
        laya.process.send_signal(signal.SIGHUP)
        assert laya.wait_for(lambda: backend_of(laya) == "other")
        assert laya.metric("laya_config_reload_failed") == 0
        assert laya.stop() == 0


def test_a_running_stream_keeps_its_backend_and_no_request_is_dropped(two, tmp_path):
    """(case 65) Reloads back and forth under load: every request is answered, the stream comes whole from where it began."""
    one, other = two
    one.script = lambda asked: (
        [SSE_HEAD, chunked(delta("a")), Sleep(4), chunked(delta("b")), chunked(delta(None, "stop")), DONE]
        if b'"stream"' in asked.body else [Sleep(0.02), answer(completion("x"))]
    )  # fmt: skip
    with running(config(one), tmp_path) as laya, laya.connect() as sock:
        sock.sendall(post(b'{"model":"m","stream":true,"messages":[]}'))
        read_until(sock, b"data: ")
        statuses: list[int] = []
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                statuses.append(laya.chat("m")[0])

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(4):
            write(laya, config((other, one)[turn % 2], ("other", "one")[turn % 2]))
            laya.process.send_signal(signal.SIGHUP)
            assert laya.wait_for(lambda turn=turn: laya.metric("laya_config_reloads_total") >= turn + 1)
        laya.wait_for(lambda: len(statuses) > 20)
        stop.set()
        for thread in threads:
            thread.join(20)
        sock.settimeout(10)
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            piece = sock.recv(65536)
            assert piece, rest
            rest += piece
        assert b'"b"' in rest and b"[DONE]" in rest
        assert len(statuses) > 20 and set(statuses) == {200}, statuses


def test_unchanged_backends_keep_their_counts_and_keys_can_change(two, tmp_path):
    secret = {"auth": {"keys": [{"name": "a", "key": "k1"}]}}
    with running(config(two[0], **secret), tmp_path) as laya:
        assert laya.chat("m")[0] == 401
        write(laya, config(two[0], auth={"keys": [{"name": "a", "key": "k2"}]}))
        laya.process.send_signal(signal.SIGHUP)
        call = ("POST", "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
        assert laya.wait_for(lambda: laya.call(*call, {"authorization": "Bearer k2"})[0] == 200)
        assert laya.call(*call, {"authorization": "Bearer k1"})[0] == 401
        assert two[0].connections == 1, "the pool of an unchanged backend stays"


def test_what_needs_a_restart_is_named_and_kept():
    old = loads("backends: {b: {url: 'http://h'}}\nroutes: [{match: a, to: b}]\n")
    new = loads("backends: {c: {url: 'http://h'}}\nroutes: [{match: a, to: c}]\nrouter: {cache_size: 7, default_model: a}\n"
                "server: {port: 1}\n")  # fmt: skip
    result, ignored = merged(old, new)
    assert ignored == ["router", "server"] and result.server == old.server
    assert (result.router.cache_size, result.router.default_model) == (old.router.cache_size, "a")
    assert list(result.backends) == ["c"] and result.routes == new.routes
    with pytest.raises(ConfigError, match="restart"):
        merged(old, loads("inference: {}\n"))


def test_a_stream_is_whole_after_its_route_is_gone(two, tmp_path):
    """(case 65) The route and the backend that it came by are no longer configured."""
    one, other = two
    one.script = lambda asked: [SSE_HEAD, chunked(delta("a")), Sleep(3), chunked(delta("b")), DONE]
    with running(config(one), tmp_path) as laya, laya.connect() as sock:
        sock.sendall(post(b'{"model":"m","stream":true,"messages":[]}'))
        write(laya, config(other, "other", routes=[{"name": "n", "match": "n", "to": "other"}]))
        laya.process.send_signal(signal.SIGHUP)
        assert laya.wait_for(lambda: laya.get("/v1/models/n")[0] == 200)
        assert read_stream(sock, 15).endswith(b"data: [DONE]\n\n")
