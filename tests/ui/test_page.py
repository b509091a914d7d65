"""The page in a real Chromium, used with mouse and keyboard."""

from __future__ import annotations

import json

import pytest

from browser import CHROMIUM, Browser
from scripted_upstream import SSE_HEAD, Hold, Sleep, chunked, delta, polite
from server import running

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")
HOSTILE = "<img src=x onerror=\"window.pwned=1\"><b>bold</b>"
LIVE = "document.querySelector('#live').innerText === 'live' && document.querySelector('#machine .big') !== null"


@pytest.fixture(scope="module")
def laya(upstream, model_path, tmp_path_factory):
    """An engine and two backends, one of which is not there."""
    config = {
        "backends": {"up": {"url": upstream.url, "health": None}, "away": {"url": "http://127.0.0.1:9/v1"}},
        "routes": [
            {"name": "small", "match": "small", "to": "local"},
            {"name": "dead", "match": "dead", "to": "away"},
            {"name": "rest", "match": "*", "to": "up"},
        ],
        "inference": {"model": str(model_path), "max_num_seqs": 2, "max_seq_len": 1024, "kv_cache": "64MiB"},
    }
    with running(config, tmp_path_factory.mktemp("ui"), "serve") as server:
        loaded = lambda: json.loads(server.get("/ready")[1])["components"]["engines"]["local"]["state"] == "ready"  # noqa: E731
        assert server.wait_for(loaded, 120)
        yield server


@pytest.fixture(scope="module")
def chromium():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def page(laya, chromium, upstream):
    upstream.script = polite
    chromium.look(1280, 900, dark=False)
    chromium.errors.clear()
    chromium.open(laya.url + "/ui")
    chromium.wait(LIVE)
    yield chromium
    assert [error for error in chromium.errors if "502" not in error and "401" not in error] == []


def rows(page, selector: str) -> list[str]:
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText)")


def ask(page, model: str, text: str) -> None:
    page.run("document.querySelector('#model').value = ''")
    page.click("#model")
    page.type(model)
    page.click("#message")
    page.type(text)
    page.click("#send")


def test_the_machine_comes_first_then_what_is_under_way(page, laya):
    names = rows(page, ".tile .name")
    assert names[:3] == ["GPU memory", "Host memory", "GPU temperature"] or names[0].startswith("GPU")
    assert names[-4:] == ["Requests", "Under way", "Waiting", "Generated"]
    assert "GiB" in page.text("#machine") and "router and engine" in page.text("header")
    panel = page.text("#engines")
    assert "SmolLM2-135M-Instruct" in panel and "ready" in panel and "KV blocks" in panel and "0 of" in panel
    page.wait("document.querySelector('#backends').innerText.includes('down')")
    assert any(row.startswith("up") and "closed" in row for row in rows(page, "#backends tr"))


def test_a_message_streams_from_a_backend_and_shows_among_the_requests(page):
    ask(page, "gpt-4o", "several words that come back")
    page.wait("document.querySelector('#told').innerText.startsWith('first token after')")
    assert "severalwordsthatcomeback" in page.text("#turns").replace(" ", "")
    assert "up, route rest" in page.text("#turns")
    page.wait("document.querySelector('#recent tbody tr')?.innerText.includes('gpt-4o')")
    assert "200" in page.text("#recent tbody tr") and "several" not in page.text("#recent")


def test_the_engine_answers_in_the_chat_box(page):
    ask(page, "small", "Say hello.")
    page.wait("/tokens? at/.test(document.querySelector('#told').innerText)", 60)
    assert "local, route small" in page.text("#turns")
    page.wait("document.querySelector('#latency').innerText.includes('decode')")


def test_a_backend_that_is_not_there_is_an_error_in_words(page):
    ask(page, "dead", "hello")
    page.wait("document.querySelector('.turn.bad') !== null")
    assert "50" in page.text(".turn.bad") and not page.run("document.querySelector('#send').disabled")


def test_what_clients_name_stays_text(page, laya, upstream):
    assert laya.chat(HOSTILE, "x")[0] == 200
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta(HOSTILE)), chunked(b"data: [DONE]\n\n"), b"0\r\n\r\n"]
    page.wait("document.querySelector('#recent').innerText.includes('onerror')")
    ask(page, HOSTILE, HOSTILE)
    page.wait("document.querySelector('#told').innerText.startsWith('first token after')")
    page.click("#explain")
    page.wait("document.querySelector('#explained').innerText.includes('onerror')")
    assert page.run("document.querySelectorAll('main img, main b:not(.engine b, .explained b)').length") == 0
    assert page.run("window.pwned") is None


def test_the_explainer_shows_rule_and_losers(page):
    page.click("#model")
    page.type("small")
    page.click("#explain")
    page.wait("!document.querySelector('#explained').hidden")
    text = page.text("#explained")
    assert "small goes to route small" in text and "not * (route rest)" in text and "target local" in text


def test_stop_ends_the_request_at_the_backend(page, upstream):
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("one ")), Hold()]
    before = len(upstream.asked)
    ask(page, "gpt-4o", "never ends")
    page.wait("document.querySelector('#turns').innerText.includes('one')")
    page.click("#stop")
    page.wait("document.querySelector('#told').innerText === 'stopped'")
    assert upstream.wait_for(lambda: all(asked.closed_at for asked in upstream.asked[before:]), 10)
    page.click("#clear")
    assert page.run("document.querySelector('#turns').hidden")


def test_the_keyboard_alone_is_enough(page):
    page.run("document.activeElement.blur()")
    page.key("Tab", 9)
    assert page.run("document.activeElement.className") == "skip"
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    page.wait("location.hash === '#try'")
    for _ in range(12):
        page.key("Tab", 9)
        if page.run("document.activeElement.id") == "message":
            break
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.type("typed only")
    page.key("Enter", 13)
    page.wait("document.querySelector('#turns').innerText.includes('typed only')")


@pytest.mark.parametrize("width", [320, 390, 768, 1100])
def test_nothing_is_wider_than_the_screen(page, width):
    page.look(width, 800, dark=False)
    page.wait(f"window.innerWidth === {width}")
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("[...document.querySelectorAll('section')].every((e) => e.hidden || e.getBoundingClientRect().width > 0)")


def test_dark_mode_is_dark_and_readable(page):
    def shades() -> tuple[int, int]:
        return tuple(
            page.run(f"getComputedStyle(document.querySelector('{where}')).{what}.match(/\\d+/g).slice(0, 3).map(Number).reduce((a, b) => a + b)")
            for where, what in (("#engines", "color"), ("#s-engines", "backgroundColor"))
        )  # fmt: skip

    ink, card = shades()
    assert card - ink > 450
    page.look(1280, 900, dark=True)
    ink, card = shades()
    assert ink - card > 450


def test_a_page_that_lost_the_server_says_so_and_comes_back(upstream, chromium, tmp_path):
    config = {"backends": {"up": {"url": upstream.url, "health": None}}, "routes": [{"match": "*", "to": "up"}]}
    with running(config, tmp_path) as server:
        chromium.open(server.url + "/ui")
        chromium.wait(LIVE)
        port = server.port
        server.stop()
        chromium.wait("document.querySelector('#live').innerText === 'connection lost'")
    with running({**config, "server": {"port": port}}, tmp_path):
        chromium.wait("document.querySelector('#live').innerText === 'live'")
    chromium.open("about:blank")


def test_long_names_do_not_push_a_figure_out_of_a_phones_sight(upstream, chromium, tmp_path):
    backend = "a-backend-with-a-long-name-indeed"
    config = {"backends": {backend: {"url": upstream.url, "health": None}}, "routes": [{"match": "*", "to": backend}]}
    with running(config, tmp_path) as server:
        upstream.script = lambda asked: [Sleep(0.02), *polite(asked)]
        assert server.chat("m" * 120)[0] == 200
        chromium.look(390, 800, dark=False)
        chromium.open(server.url + "/ui")
        chromium.wait("[...document.querySelectorAll('#recent td')].some((e) => e.innerText.endsWith('ms'))")
        assert chromium.run("document.querySelector('#recent').scrollWidth - document.querySelector('#recent').clientWidth") <= 0
    chromium.open("about:blank")


def test_the_chat_box_asks_for_a_key_where_one_is_needed(upstream, chromium, tmp_path):
    config = {
        "auth": {"keys": [{"name": "me", "key": "open-sesame"}]}, "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"match": "*", "to": "up"}],
    }  # fmt: skip
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("in")), Sleep(0.05), chunked(b"data: [DONE]\n\n"), b"0\r\n\r\n"]
    with running(config, tmp_path) as server:
        chromium.open(server.url + "/ui")
        chromium.wait("!document.querySelector('#key-field').hidden")
        ask(chromium, "x", "knock")
        chromium.wait("document.querySelector('.turn.bad') !== null && document.activeElement.id === 'key'")
        chromium.type("open-sesame")
        chromium.click("#send")
        chromium.wait("document.querySelector('#told').innerText.startsWith('first token after')")
        assert upstream.asked[-1].headers.get("authorization") is None  # the key stays here
    chromium.open("about:blank")


def test_off_loopback_the_browser_logs_in_with_the_key_and_the_page_lives(upstream, chromium, tmp_path):
    config = {
        "server": {"host": "0.0.0.0"}, "auth": {"keys": [{"name": "ops", "key": "open-sesame"}]},
        "backends": {"up": {"url": upstream.url, "health": None}}, "routes": [{"match": "*", "to": "up"}],
    }  # fmt: skip
    with running(config, tmp_path) as server:
        chromium.log_in("open-sesame")
        chromium.open(f"http://127.0.0.1:{server.port}/ui")
        chromium.wait(LIVE)
        chromium.click("#model")
        chromium.type("some-name")
        chromium.click("#explain")
        chromium.wait("document.querySelector('#explained').innerText.includes('some-name goes to route')")
        chromium.wait("!document.querySelector('#key-field').hidden")  # the login is for the page, the APIs ask for the key itself
        chromium.open("about:blank")
        chromium.call("Fetch.disable")


def test_a_hidden_page_stops_watching(page, laya):
    def watched() -> bool:
        return page.run("stream !== null")

    assert watched()
    page.run("Object.defineProperty(document, 'hidden', {value: true, configurable: true}); document.dispatchEvent(new Event('visibilitychange'))")
    assert not watched() and page.text("#live") == "paused"
    page.run("Object.defineProperty(document, 'hidden', {value: false, configurable: true}); document.dispatchEvent(new Event('visibilitychange'))")
    page.wait(LIVE)
