"""/ui over plain HTTP: the document, its events, the explainer, and who may look."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import re
import signal
import socket
import time

import pytest

from laya.cli.main import main
from laya.ui.desk import MAX_WATCHERS
from laya.ui.history import STEP_S, History, quantiles
from laya.ui.page import page
from server import running

SECRET = "the words of a prompt that nobody else may read"


class Watcher:
    """Reads events as a browser does."""

    def __init__(self, laya, headers: dict | None = None) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", laya.port, timeout=20)
        self.connection.request("GET", "/ui/events", headers=headers or {})
        self.response = self.connection.getresponse()
        self.status = self.response.status

    def next(self) -> dict:
        while True:
            line = self.response.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: "):
                return json.loads(line[6:])

    def close(self) -> None:
        self.response.close()
        self.connection.close()


def test_the_page_asks_for_nothing_from_elsewhere(router):
    status, body, headers = router.call("GET", "/ui")
    text = body.decode()
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert "/*" + "SCRIPT*/" not in text and "/*STYLE*/" not in text
    outside = [url for url in re.findall(r"https?://[^\s'\"`)]+", text) if not url.startswith("http://www.w3.org/")]
    assert outside == [] and not re.search(r"<(script|link|img)[^>]+(src|href)=\"(?!data:)", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "unsafe" not in policy


def test_the_policy_names_the_script_that_the_page_holds():
    made = page()
    script = re.search(rb"<script>(.*)</script>", made.body, re.DOTALL).group(1)
    assert base64.b64encode(hashlib.sha256(script).digest()) in made.lines


def test_events_tell_where_requests_went_and_nothing_of_what_they_said(router):
    assert router.chat("some-model", SECRET)[0] == 200
    time.sleep(1)  # frames are made once a second
    watcher = Watcher(router)
    assert watcher.response.getheader("content-type") == "text/event-stream"
    first, then = watcher.next(), watcher.next()
    watcher.close()
    assert 0.5 < then["at"] - first["at"] < 5
    newest = first["recent"][0]
    assert (newest["model"], newest["backend"], newest["status"], newest["outcome"]) == ("some-model", "up", 200, "ok")
    assert newest["api"] == "chat" and newest["ms"] > 0 and abs(newest["at"] - time.time()) < 60
    assert first["role"] == "router" and first["outcomes"]["ok"] >= 1 and first["components"]["backends"]["up"]["inflight"] == 0
    assert then["machine"]["host"]["total"] > 1 << 28 and then["machine"]["process"]["resident"] > 1 << 20
    assert {line["stage"] for line in then["minute"]["latency"]} >= {"route", "upstream"}
    assert SECRET not in json.dumps([first, then])


def test_probes_and_scrapes_are_no_requests_to_show(router):
    router.chat("before", "x")
    for path in ("/health", "/ready", "/metrics", "/ui", "/v1/models"):
        router.get(path)
    watcher = Watcher(router)
    watcher.next()  # may be another watcher's of a moment ago
    assert watcher.next()["recent"][0]["model"] == "before"
    watcher.close()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return True
    return False


def test_with_a_quiet_log_requests_are_kept_only_while_somebody_watches(upstream, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:  # such a log does not tell the port that was taken
        port = free.getsockname()[1]
    config = {
        "server": {"log_level": "warning", "port": port}, "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"match": "*", "to": "up"}],
    }  # fmt: skip
    with running(config, tmp_path, wait=False) as laya:
        laya.port, laya.url = port, f"http://127.0.0.1:{port}"
        assert laya.wait_for(lambda: answers(port), 60)
        laya.chat("unwatched", "x")
        watcher = Watcher(laya)
        assert watcher.next()["recent"] == []
        laya.chat("watched", "x")
        assert laya.wait_for(lambda: [row["model"] for row in watcher.next()["recent"]] == ["watched"])
        watcher.close()


def test_watchers_are_bounded_and_those_who_leave_make_room(router):
    watchers = [Watcher(router) for _ in range(MAX_WATCHERS)]
    assert {watcher.status for watcher in watchers} == {200}
    one_more = Watcher(router)
    assert one_more.status == 503 and one_more.response.getheader("retry-after")
    for watcher in [*watchers, one_more]:
        watcher.close()

    def room() -> bool:
        with contextlib.closing(Watcher(router)) as again:
            return again.status == 200

    assert router.wait_for(room)


@pytest.mark.parametrize("path", ["/ui/events", "/ui/route?model=a"])
def test_what_a_foreign_page_embeds_is_refused(router, path):
    for site, allowed in (("cross-site", False), ("same-site", False), ("same-origin", True), ("none", True)):
        connection = http.client.HTTPConnection("127.0.0.1", router.port, timeout=20)
        connection.request("GET", path, headers={"sec-fetch-site": site})
        with contextlib.closing(connection):
            assert connection.getresponse().status == (200 if allowed else 403), site
    assert router.get("/ui", {"sec-fetch-site": "cross-site"})[0] == 200  # a link that is followed


def test_an_explainer_asked_too_much_refuses(router):
    status, body = router.get("/ui/route?" + "&".join(f"a{number}=1" for number in range(50)))
    assert status == 400 and "more than 8 fields" in json.loads(body)["error"]["message"]


def test_a_head_request_for_events_ends(router):
    assert router.call("HEAD", "/ui/events", timeout=10)[0] == 200


def test_a_watcher_does_not_hold_up_the_drain(upstream, tmp_path):
    config = {
        "server": {"drain_timeout_s": 60}, "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"match": "*", "to": "up"}],
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        watcher = Watcher(laya)
        watcher.next()
        began = time.monotonic()
        assert laya.stop(signal.SIGTERM, timeout=30) == 0 and time.monotonic() - began < 20
        watcher.close()


@pytest.mark.parametrize("query", ["model=gpt-9", "model=x&message=hello", "model=%3Cb%3E"])
def test_the_explainer_says_what_laya_route_says(router, query, capsys):
    status, body = router.get("/ui/route?" + query)
    assert status == 200
    name = {"model=gpt-9": "gpt-9", "model=x&message=hello": "x", "model=%3Cb%3E": "<b>"}[query]
    assert main(["route", name, "--json", "--config", str(router.path)]) == 0
    assert json.loads(body) == json.loads(capsys.readouterr().out)


def test_the_explainer_needs_a_name_where_there_is_no_default(router):
    status, body = router.get("/ui/route")
    assert status == 400 and json.loads(body)["error"]["param"] == "model"


def basic(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"anyone:{key}".encode()).decode()}


def test_off_loopback_the_page_asks_for_a_key_and_apis_do_not_take_a_browsers_login(upstream, tmp_path):
    config = {
        "server": {"host": "0.0.0.0"}, "auth": {"keys": [{"name": "ops", "key": "s3cret-key"}]},
        "backends": {"up": {"url": upstream.url, "health": None}}, "routes": [{"match": "*", "to": "up"}],
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        laya.url = f"http://127.0.0.1:{laya.port}"
        for path in ("/ui", "/ui/events", "/ui/route?model=x"):
            status, _, headers = laya.call("GET", path)
            assert status == 401 and headers["www-authenticate"].startswith("Basic "), path
            assert laya.call("GET", path, headers=basic("wrong"))[0] == 401
            assert laya.call("GET", path, headers={"authorization": "Basic %%%"})[0] == 401
        assert laya.call("GET", "/ui", headers=basic("s3cret-key"))[0] == 200
        assert laya.call("GET", "/ui", headers={"authorization": "Bearer s3cret-key"})[0] == 200
        watcher = Watcher(laya, basic("s3cret-key"))
        assert watcher.status == 200 and watcher.next()["ready"] is True
        watcher.close()
        status, _, headers = laya.call("GET", "/v1/models", headers=basic("s3cret-key"))
        assert status == 401 and "www-authenticate" not in headers


class Engine:
    def __init__(self) -> None:
        self.generated = 0

    def figures(self):
        from laya.engine.figures import EngineFigures

        return EngineFigures(generated_tokens=self.generated, prompt_tokens=0, sequences_running=1)


def test_rates_and_quantiles_are_those_of_the_last_minute():
    from laya.telemetry import Telemetry

    telemetry, engine, now = Telemetry(), Engine(), 1000.0
    history = History(telemetry, {"e": engine}, {}, now)
    for _ in range(1000):
        telemetry.ttft.observe(5.0)  # long ago
    for _ in range(40):
        now += STEP_S
        engine.generated += 50
        telemetry.ttft.observe(0.02)
        history.on_tick(now)
    found = history.last_minute(now)
    assert found["generated_s"] == pytest.approx(10, rel=0.2) and found["window_s"] <= 70
    first = next(line for line in found["latency"] if line["stage"] == "first token")
    assert first["count"] <= 14 and 10 < first["p50"] <= 25
    assert history.series()["generated"][-1] == 10 and len(history.series()["running"]) == 40


def test_quantiles_of_one_bucket_and_beyond_the_last():
    bounds = (0.001, 0.01, 0.1)
    assert quantiles(bounds, [0, 0, 0, 0]) == {"count": 0}
    assert quantiles(bounds, [0, 100, 0, 0])["p50"] == pytest.approx(5.5)
    assert quantiles(bounds, [0, 0, 0, 5])["p99"] == 100.0
