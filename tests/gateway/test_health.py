"""Active health: who is picked, and that probing never touches the counts of real traffic."""

from __future__ import annotations

import json
import threading
import time

import pytest

from scripted_upstream import ScriptedUpstream, Sleep, answer, completion
from server import running


def with_health(code: str, delay: float = 0.0):
    """A backend that answers its health path with `code`, and completions after `delay`."""

    def script(asked):
        if asked.target == "/health":
            return [answer(b"", code)]
        return [Sleep(delay), answer(completion("x"))]

    return script


@pytest.mark.parametrize(
    ("code", "healthy", "asked"),
    [("200 OK", True, True), ("204 No Content", True, True), ("503 Service Unavailable", False, False), ("404 Not Found", None, True)],
)  # fmt: skip
def test_a_sick_backend_is_asked_last_and_a_missing_page_says_nothing(tmp_path, code, healthy, asked):
    with ScriptedUpstream(with_health(code)) as a, ScriptedUpstream(with_health("200 OK")) as b:
        config = {
            "backends": {"a": {"url": a.url}, "b": {"url": b.url}},
            "routes": [{"name": "r", "match": "*", "to": ["a", "b"], "policy": "round_robin"}],
        }
        with running(config, tmp_path) as laya:

            def state() -> dict:
                return json.loads(laya.get("/ready")[1])["components"]["backends"]

            assert laya.wait_for(lambda: state()["b"]["healthy"] is True and any(x.target == "/health" for x in a.asked))
            assert laya.wait_for(lambda: state()["a"]["healthy"] is healthy)
            assert [laya.chat("m")[0] for _ in range(6)] == [200] * 6
            assert any(x.target != "/health" for x in a.asked) == asked
            assert laya.metric("laya_backend_up", backend="a") == (healthy is not False)


def test_the_only_backend_is_asked_though_it_looks_sick_and_ready_says_no(tmp_path):
    with ScriptedUpstream(with_health("503 Service Unavailable")) as a:
        config = {"backends": {"a": {"url": a.url}}, "routes": [{"name": "r", "match": "*", "to": "a"}]}
        with running(config, tmp_path) as laya:
            assert laya.wait_for(lambda: laya.get("/ready")[0] == 503)
            assert laya.get("/health")[0] == 200 and laya.chat("m")[0] == 200


def test_probing_resets_no_count(tmp_path):
    """(cases 38, 68) Requests in flight stay counted through several probes, and never go below nothing."""
    with ScriptedUpstream(with_health("200 OK", delay=7.0)) as a:
        config = {"backends": {"a": {"url": a.url}}, "routes": [{"name": "r", "match": "*", "to": "a"}]}
        with running(config, tmp_path) as laya:
            threads = [threading.Thread(target=laya.chat, args=("m",)) for _ in range(3)]
            for thread in threads:
                thread.start()
            assert laya.wait_for(lambda: laya.metric("laya_backend_inflight", backend="a") == 3)
            probes = sum(x.target == "/health" for x in a.asked)
            until = time.monotonic() + 6.3
            while time.monotonic() < until:
                assert laya.metric("laya_backend_inflight", backend="a") == 3
                time.sleep(0.2)
            assert sum(x.target == "/health" for x in a.asked) > probes
            for thread in threads:
                thread.join(20)
            assert laya.metric("laya_backend_inflight", backend="a") == 0


def test_a_backend_that_comes_back_is_taken_in_again(tmp_path):
    with ScriptedUpstream(with_health("503 Service Unavailable")) as a, ScriptedUpstream(with_health("200 OK")) as b:
        config = {"backends": {"a": {"url": a.url}, "b": {"url": b.url}}, "routes": [{"name": "r", "match": "*", "to": ["a", "b"]}]}
        with running(config, tmp_path) as laya:
            assert laya.wait_for(lambda: laya.metric("laya_backend_up", backend="a") == 0)
            a.script = with_health("200 OK")
            assert laya.wait_for(lambda: laya.metric("laya_backend_up", backend="a") == 1, 15)
