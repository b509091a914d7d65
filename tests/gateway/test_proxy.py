"""A request through the real router to a scripted backend, byte by byte where it matters."""

from __future__ import annotations

import gzip
import json
import threading
import time

import pytest
import zstandard

from raw import post, read_all, read_response, read_stream, read_until, unchunk
from scripted_upstream import (
    DONE,
    SSE_HEAD,
    Close,
    Hold,
    Reset,
    ScriptedUpstream,
    Sleep,
    Split,
    answer,
    chunked,
    completion,
    delta,
    polite,
    stream,
)
from server import running

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
STREAM = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}).encode()


@pytest.fixture(autouse=True)
def _fresh(upstream):
    upstream.script = polite
    upstream.asked.clear()


def outcome(router, name: str) -> float:
    return router.metric("laya_requests_total", api="chat", outcome=name, backend="up")


def test_the_body_goes_up_and_the_answer_comes_back_untouched(router, upstream):
    upstream.script = lambda asked: [answer(b'{ "odd" :  "white space" }\n')]
    status, body, headers = router.call("POST", "/v1/chat/completions?x=1", BODY, {"authorization": "Bearer secret"})
    assert (status, body) == (200, b'{ "odd" :  "white space" }\n')
    asked = upstream.asked[0]
    assert asked.body == BODY and asked.target == "/v1/chat/completions?x=1"
    assert "authorization" not in asked.headers, "the client's key must not reach a backend"
    assert headers["x-laya-route"] == "all" and headers["x-laya-backend"] == "up"
    assert headers["x-request-id"] == asked.headers["x-request-id"]


def test_a_sane_request_id_is_kept_and_an_odd_one_replaced(router):
    assert router.call("POST", "/v1/chat/completions", BODY, {"x-request-id": "abc-1"})[2]["x-request-id"] == "abc-1"
    assert router.call("POST", "/v1/chat/completions", BODY, {"x-request-id": "a b"})[2]["x-request-id"] != "a b"


def test_server_timing_is_sent_when_asked(router):
    timing = router.call("POST", "/v1/chat/completions", BODY, {"x-laya-timing": "1"})[2]["server-timing"]
    assert [part.partition(";")[0] for part in timing.split(", ")] == ["route", "upstream", "total"]
    assert "server-timing" not in router.call("POST", "/v1/chat/completions", BODY)[2]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"a","model":"b"}', "model"), (b'{"model":"a","\\u006dodel":"b"}', "model"), (b'{"model":"a","Model":"b"}', "model"),
        (b'{"model":7}', "model"), (b"[]", None), (b"null", None), (b"", None), (b"{", None), (b"[" * 100_000, None),
        (b'{"model":"\xff"}', None), (BODY + b"x", None), ("{\"model\":\"m\"}".encode("utf-16"), None), (b'{"messages":[]}', None),
        (b'{"model":"\\ud800"}', None),
    ],
)  # fmt: skip
def test_a_body_that_parsers_could_read_differently_is_refused(router, upstream, body, param):
    """(cases 23, 31) Duplicate, escaped and case-variant keys, depth bombs, other encodings: 400 and never forwarded."""
    status, raw, _ = router.call("POST", "/v1/chat/completions", body)
    assert status == 400 and not upstream.asked
    error = json.loads(raw)["error"]
    assert error["type"] == "invalid_request_error" and (param is None or error["param"] == param)


def test_models_named_in_nested_objects_are_no_duplicates(router):
    body = json.dumps({"model": "m", "messages": [{"content": "a"}], "tools": [{"model": "x", "note": 'say "model"'}], "x": "mod\u00e9l"}).encode()
    assert router.call("POST", "/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"])
def test_a_packed_body_is_unpacked(router, upstream, pack):
    coding = "gzip" if pack is gzip.compress else "zstd"
    status, _, _ = router.call("POST", "/v1/chat/completions", pack(BODY), {"content-encoding": coding})
    assert status == 200 and upstream.asked[0].body == BODY and "content-encoding" not in upstream.asked[0].headers


def test_a_bomb_and_a_cut_packed_body_are_refused(router, upstream):
    bomb = zstandard.ZstdCompressor().compress(b"a" * (64 << 20))
    assert router.call("POST", "/v1/chat/completions", bomb, {"content-encoding": "zstd"})[0] == 413
    assert router.call("POST", "/v1/chat/completions", gzip.compress(BODY)[:-9], {"content-encoding": "gzip"})[0] == 400
    assert router.call("POST", "/v1/chat/completions", BODY, {"content-encoding": "br"})[0] == 415
    assert not upstream.asked


def test_paths_and_methods(router):
    """(case 9) No 500, no hang: tidy paths answer, others say 404 or 405."""
    assert router.get("//v1//models")[0] == 200 and router.get("/v1/models/")[0] == 200 and router.get("/v1/models?x=1")[0] == 200
    assert router.get("/nothing")[0] == 404 and router.get("/%2e%2e/etc")[0] == 404
    for path in ("/chat/completions", "/v1/v1/chat/completions"):  # a base URL without /v1, or with one too many
        status, raw = router.call("POST", path, {})[:2]
        assert status == 404 and json.loads(raw)["error"]["message"].endswith("Did you mean /v1/chat/completions?")
    assert not [line for line in router.lines if line.get("path") in ("/health", "/ready")]  # probes would drown the rest
    assert router.call("GET", "/v1/chat/completions")[0] == 405 and router.call("POST", "/health", b"")[0] == 405
    assert router.call("HEAD", "/health")[:2] == (200, b"") and router.call("HEAD", "/")[0] == 200
    assert router.call("OPTIONS", "/v1/chat/completions")[0] == 204


def test_a_foreign_host_and_a_foreign_origin_are_refused(router, upstream):
    assert router.call("POST", "/v1/chat/completions", BODY, {"host": "evil.example"})[0] == 421
    assert router.call("POST", "/v1/chat/completions", BODY, {"origin": "https://evil.example"})[0] == 403
    assert not upstream.asked


def test_a_chunked_request_is_forwarded_with_a_length(router, upstream):
    with router.connect() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i in range(0, len(BODY), 7):
            sock.sendall(chunked(BODY[i : i + 7]))
        sock.sendall(b"0\r\n\r\n")
        assert read_response(sock)[0] == 200
    assert upstream.asked[0].body == BODY and "transfer-encoding" not in upstream.asked[0].headers


@pytest.mark.parametrize(
    "framing",
    [b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked,", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity",
     b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", b"Transfer-Encoding : chunked"],
)  # fmt: skip
def test_two_framings_are_refused_and_smuggle_nothing(router, upstream, framing):
    """(case 2) One refusal a connection, then close; the backend sees nothing."""
    smuggled = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with router.connect() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n" + framing + b"\r\n\r\n" + smuggled)
        data = read_all(sock)
    assert data.count(b"HTTP/1.1 ") == 1 and data.split(b" ")[1] in (b"400", b"501") and b"connection: close" in data
    assert not upstream.asked


@pytest.mark.parametrize("value", [b"5, 5", b"+5", b"5_0", b"0x5", b"-1", b"\xd9\xa5", b"5\r\nContent-Length: 0", b"47\r\nContent-Length: 5"])
def test_an_odd_content_length_is_refused(router, upstream, value):
    """(case 3)"""
    with router.connect() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + value + b"\r\n\r\n" + BODY)
        data = read_all(sock)
    assert data.startswith(b"HTTP/1.1 400 ") and data.count(b"HTTP/1.1 ") == 1 and not upstream.asked


def test_pipelined_requests_are_answered_in_order(router, upstream):
    """(case 7) The first streams; the second waits its turn."""
    with router.connect() as sock:
        sock.sendall(post(STREAM) + post(BODY))
        data = read_until(sock, b'"object": "chat.completion",')
    assert data.index(b"[DONE]\n\n\r\n0\r\n\r\nHTTP/1.1 200") < data.index(b'"object": "chat.completion",')
    assert data.count(b"HTTP/1.1 200") == 2


def test_expect_continue_gets_a_go_or_a_final_answer(router):
    """(case 8)"""
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with router.connect() as sock:
        sock.sendall(head % (b"/v1/chat/completions", len(BODY)))
        assert read_until(sock, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert read_response(sock)[0] == 200
    for path, length, status in ((b"/nothing", 5, b"404"), (b"/v1/chat/completions", 10**9, b"413")):
        with router.connect() as sock:
            sock.sendall(head % (path, length))
            assert read_all(sock).startswith(b"HTTP/1.1 " + status)


def test_http_1_0_streams_without_chunks(router):
    """(case 9)"""
    with router.connect() as sock:
        sock.sendall(post(STREAM, version=b"1.0"))
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and body.endswith(b"data: [DONE]\n\n") and body.startswith(b"data: ")


def test_a_stream_split_at_every_byte_arrives_unchanged(router, upstream):
    """(case 11) Multi-byte characters across segments."""
    frames = delta("你好🚀") + delta(None, "stop") + b"data: [DONE]\n\n"
    upstream.script = lambda asked: [SSE_HEAD, Split(chunked(frames[:40]) + chunked(frames[40:]) + b"0\r\n\r\n")]
    with router.connect() as sock:
        sock.sendall(post(STREAM))
        assert read_stream(sock) == frames


@pytest.mark.parametrize(
    "frames",
    [b'data:{"a":1}\n\ndata: [DONE]\n\n', b'data: {"a":1}\r\n\r\ndata: [DONE]\r\n\r\n', b'data: {"a":1}\r\rdata: [DONE]\r\r',
     b': OPENROUTER PROCESSING\n\nevent: x\ndata: {"a":\ndata: 1}\n\ndata: [DONE]  \n\n', b'\xef\xbb\xbfdata: 1\n\ndata: [DONE]\n\ndata: [DONE]\n\n',
     b"data: 1\n\ndata: [DONE]\n\n: bye\n"],
)  # fmt: skip
def test_dialects_of_sse_pass(router, upstream, frames):
    """(case 18)"""
    upstream.script = lambda asked: [SSE_HEAD, chunked(frames), b"0\r\n\r\n"]
    with router.connect() as sock:
        sock.sendall(post(STREAM))
        assert read_stream(sock) == frames


@pytest.mark.parametrize("end", [[Close()], [Reset()], [b"0\r\n\r\n"], [b"zz\r\n"]], ids=["fin", "rst", "no-done", "garbage"])
def test_a_stream_that_dies_ends_with_an_error_and_no_done(router, upstream, end):
    """(cases 13, 14, 19) Half an answer never looks whole, is not tried again, and is counted as the backend's fault."""
    before = outcome(router, "upstream_error")
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("one")), chunked(delta("two")[:20]), Sleep(0.1), *end]
    with router.connect() as sock:
        sock.sendall(post(STREAM))
        data = read_all(sock)
    payload, whole = unchunk(data.partition(b"\r\n\r\n")[2])
    frames = [frame for frame in payload.split(b"\n\n") if frame]
    assert not whole and b"[DONE]" not in payload and b"finish_reason\": \"stop" not in payload
    assert json.loads(frames[-1].removeprefix(b"data: "))["error"]["code"] == "upstream_error"
    assert len(upstream.asked) == 1 and outcome(router, "upstream_error") == before + 1


def test_a_plain_answer_cut_short_is_not_taken_for_whole(router, upstream):
    upstream.script = lambda asked: [b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf", Sleep(0.1), Close()]
    with router.connect() as sock:
        sock.sendall(post(BODY))
        data = read_all(sock)
    assert b"content-length: 100" in data and len(data.partition(b"\r\n\r\n")[2]) < 100


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
def test_a_client_that_leaves_ends_the_work_at_the_backend(router, upstream, body):
    """(case 10)"""
    upstream.script = lambda asked: [*([SSE_HEAD, chunked(delta("one"))] if body is STREAM else []), Hold()]
    before = outcome(router, "client_closed")
    with router.connect() as sock:
        sock.sendall(post(body))
        assert upstream.wait_for(lambda: bool(upstream.asked))
        if body is STREAM:
            read_until(sock, b"one")
        left = time.monotonic()
    assert upstream.wait_for(lambda: upstream.asked[0].closed_at is not None)
    assert upstream.asked[0].closed_at - left < 1.0
    assert router.wait_for(lambda: outcome(router, "client_closed") == before + 1)
    assert router.metric("laya_backend_inflight", backend="up") == 0


def test_a_client_that_leaves_is_seen_however_much_it_sent_ahead(router, upstream):
    """(case 10)"""
    upstream.script = lambda asked: [Hold()]
    with router.connect() as sock:
        sock.sendall(post(BODY))
        assert upstream.wait_for(lambda: bool(upstream.asked))
        sock.settimeout(0.3)
        try:
            for _ in range(64):
                sock.sendall(post(b'{"model":"m","x":"' + b"a" * 65536 + b'"}'))
        except (TimeoutError, ConnectionError):
            pass
    assert upstream.wait_for(lambda: upstream.asked[0].closed_at is not None, 3)


@pytest.mark.parametrize("face", [Close(), Reset()], ids=["fin", "rst"])
def test_a_stale_pooled_connection_is_replaced_without_the_client_noticing(router, upstream, face):
    """(cases 40, 41) The backend closes as the next request comes in: once more on a fresh connection, counted."""
    before = router.metric("laya_retries_total", reason="stale")
    seen = []

    def script(asked):
        seen.append(asked.connection)
        return [face] if len([c for c in seen if c == asked.connection]) > 1 else [answer(completion("ok"))]

    upstream.script = script
    for _ in range(6):
        assert router.chat("m")[0] == 200
    assert router.metric("laya_retries_total", reason="stale") > before


def test_an_idle_connection_closed_by_the_backend_is_noticed_at_once(router, upstream):
    """(case 42)"""
    upstream.script = lambda asked: [answer(completion("ok")), Sleep(0.05), Close()]
    before = router.metric("laya_retries_total", reason="stale")
    for _ in range(4):
        assert router.chat("m")[0] == 200
        time.sleep(0.2)
    assert router.metric("laya_retries_total", reason="stale") == before


def test_a_fresh_connection_that_dies_is_not_tried_again_on_the_same_backend(router, upstream):
    """(case 41) The only backend there is: one try, 502."""
    upstream.script = lambda asked: [Reset()]
    router.call("POST", "/v1/chat/completions", BODY)  # takes a pooled connection, if one is left
    upstream.asked.clear()
    status, raw, _ = router.call("POST", "/v1/chat/completions", BODY)
    assert status == 502 and len(upstream.asked) == 1 and json.loads(raw)["error"]["code"] == "upstream_error"


def test_a_backend_that_does_not_answer_is_a_504(router, upstream):
    """The upstream request is closed; nothing is tried again."""
    upstream.script = lambda asked: [Hold()]
    began = time.monotonic()
    status, raw, _ = router.call("POST", "/v1/chat/completions", BODY)
    assert status == 504 and 4 < time.monotonic() - began < 8 and len(upstream.asked) == 1
    assert upstream.wait_for(lambda: upstream.asked[0].closed_at is not None)


def test_silence_inside_a_stream_is_an_error_in_the_stream(router, upstream):
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("one")), Hold()]
    with router.connect() as sock:
        sock.sendall(post(STREAM))
        data = read_all(sock)
    assert b"upstream_timeout" in data and b"[DONE]" not in data


def test_a_slow_reader_stops_the_backend_and_gets_everything(router, upstream):
    """Back-pressure: what is in flight stays bounded, and nothing is lost."""
    frame, count = delta("x" * 1000), 20_000
    upstream.script = lambda asked: [SSE_HEAD, *([chunked(frame)] * count), DONE]
    with router.connect() as sock:
        sock.sendall(post(STREAM))
        time.sleep(1.0)
        held = router.metric("laya_host_memory_bytes", kind="rss")
        assert read_stream(sock, 60) == frame * count + b"data: [DONE]\n\n"
    assert 0 < held < 200 << 20


def test_a_big_answer_passes_with_its_length(router, upstream):
    big = b"[" + b"1," * 5_000_000 + b"1]"
    upstream.script = lambda asked: [answer(big)]
    status, body, headers = router.call("POST", "/v1/chat/completions", BODY)
    assert status == 200 and body == big and headers["content-length"] == str(len(big))


def test_a_big_body_passes(router, upstream):
    text = "wort " * 2_000_000
    status, _, _ = router.chat("m", text)
    assert status == 200 and upstream.asked[0].json()["messages"][0]["content"] == text


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", b"HTTP/1.1 200 OK\r\nconnection: close\r\n"],
    ids=["1xx", "close"],
)
def test_unusual_but_valid_answers_pass(router, upstream, head):
    """(case 44)"""
    tail = answer(b"{}") if head.endswith(b"\r\n\r\n") else b"content-length: 2\r\n\r\n{}"
    upstream.script = lambda asked: [head + tail, *([] if head.endswith(b"\r\n\r\n") else [Close()])]
    for _ in range(3):
        assert router.call("POST", "/v1/chat/completions", BODY)[:2] == (200, b"{}")


@pytest.mark.parametrize("coding", ["gzip", "br", "zstd"])
def test_a_coded_answer_passes_untouched(router, upstream, coding):
    """(case 5) Bytes and header both stay."""
    packed = gzip.compress(b"{}")
    upstream.script = lambda asked: [answer(packed, headers=f"content-type: application/json\r\ncontent-encoding: {coding}\r\n")]
    status, body, headers = router.call("POST", "/v1/chat/completions", BODY, {"accept-encoding": coding})
    assert (status, body, headers["content-encoding"]) == (200, packed, coding)


def test_a_response_head_beyond_the_bound_is_a_502(router, upstream):
    """(case 44)"""
    upstream.script = lambda asked: [b"HTTP/1.1 200 OK\r\nx: " + b"a" * (1 << 20) + b"\r\ncontent-length: 0\r\n\r\n"]
    assert router.call("POST", "/v1/chat/completions", BODY)[0] == 502


def test_client_errors_of_the_backend_pass_and_are_not_tried_again(router, upstream):
    """(case 44)"""
    for status in ("400 Bad Request", "401 Unauthorized", "404 Not Found", "422 Unprocessable Content"):
        upstream.asked.clear()
        upstream.script = lambda asked, status=status: [answer(b'{"error":1}', status)]
        assert router.call("POST", "/v1/chat/completions", BODY)[:2] == (int(status[:3]), b'{"error":1}')
        assert len(upstream.asked) == 1
    assert router.metric("laya_breaker_state", backend="up") == 0


def test_aborts_at_random_moments_leave_no_count_behind(router, upstream):
    """(case 37)"""
    upstream.script = lambda asked: [Sleep(0.02), *stream("a", "b"), Sleep(0.02)]

    def abort(i: int) -> None:
        with router.connect() as sock:
            sock.sendall(post(STREAM if i % 2 else BODY)[: 60 + i * 7])
            time.sleep(i % 10 * 0.008)

    threads = [threading.Thread(target=abort, args=(i,)) for i in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert router.wait_for(lambda: router.metric("laya_backend_inflight", backend="up") == 0)
    assert router.wait_for(lambda: router.metric("laya_buffered_bytes") == 0)
    assert router.wait_for(lambda: router.metric("laya_connections") == 1)


def test_slow_bodies_time_out_and_hold_nobody_up(upstream, tmp_path):
    """(case 6)"""
    config = {
        "server": {"body_timeout_s": 0.5, "header_timeout_s": 0.5},
        "backends": {"up": {"url": upstream.url, "health": None}}, "routes": [{"match": "*", "to": "up"}],
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        slow = [laya.connect() for _ in range(20)]
        for i, sock in enumerate(slow):
            sock.sendall(post(BODY)[: -len(BODY) + 1] if i % 2 else b"POST /v1/chat")
        assert laya.chat("m")[0] == 200
        for sock in slow:
            assert b"HTTP/1.1 408 " in read_all(sock)
            sock.close()
        assert laya.stop() == 0


def test_a_refused_connection_moves_on_to_the_next_backend(upstream, tmp_path):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "backends": {
            "dead": {"url": f"http://127.0.0.1:{port}/v1", "health": None}, "up": {"url": upstream.url, "health": None},
        },
        "routes": [{"match": "*", "to": ["dead", "up"], "policy": "round_robin"}],
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        assert [laya.chat("m")[0] for _ in range(8)] == [200] * 8
        assert laya.metric("laya_retries_total", reason="connect") >= 4
        assert laya.metric("laya_backend_inflight", backend="dead") == 0
        assert laya.stop() == 0


def test_a_target_may_rename_the_model_and_a_missing_name_takes_the_default(upstream, tmp_path):
    config = {
        "router": {"default_model": "small"},
        "backends": {"up": {"url": upstream.url, "health": None, "key": "k1", "headers": {"x-team": "a"}}},
        "routes": [{"name": "renamed", "match": "small", "to": [{"backend": "up", "model": "qwen3-8b"}]}, {"match": "b", "to": "up"}],
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        for model in ("small", None):
            upstream.asked.clear()
            status, _, headers = laya.chat(model, top_p=0.5)
            assert status == 200 and headers["x-laya-route"] == "renamed"
            asked = upstream.asked[0]
            assert asked.json()["model"] == "qwen3-8b" and asked.json()["top_p"] == 0.5
            assert asked.headers["authorization"] == "Bearer k1" and asked.headers["x-team"] == "a"
        status, body, _ = laya.chat("nope")
        assert status == 404 and body["error"]["code"] == "model_not_found" and "small" in body["error"]["message"]
        listed = [entry["id"] for entry in json.loads(laya.get("/v1/models")[1])["data"]]
        assert listed == ["small", "b"]
        assert laya.stop() == 0


def test_unix_sockets_on_both_sides(tmp_path):
    import socket

    with ScriptedUpstream(path=str(tmp_path / "up.sock")) as up:
        config = {
            "server": {"unix_socket": str(tmp_path / "laya.sock")},
            "backends": {"up": {"url": up.url, "base": "/v1", "health": None}}, "routes": [{"match": "*", "to": "up"}],
        }  # fmt: skip
        with running(config, tmp_path) as laya:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(tmp_path / "laya.sock"))
                sock.sendall(post(BODY))
                assert read_response(sock)[0] == 200
            assert laya.stop() == 0
        assert not (tmp_path / "laya.sock").exists()


def test_sigterm_lets_a_stream_finish_and_exits_0(upstream, tmp_path):
    """(case 75)"""
    config = {"backends": {"up": {"url": upstream.url, "health": None}}, "routes": [{"match": "*", "to": "up"}]}
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("one")), Sleep(1.0), chunked(delta("two")), DONE]
    with running(config, tmp_path) as laya:
        with laya.connect() as sock, laya.connect() as idle:
            sock.sendall(post(STREAM))
            read_until(sock, b"one")
            laya.process.terminate()
            assert read_all(idle, 2) == b""
            rest = read_all(sock)
        assert b"two" in rest and rest.endswith(b"0\r\n\r\n")
        assert laya.process.wait(5) == 0


def test_a_stream_that_never_ends_is_ended_at_the_drain_limit(upstream, tmp_path):
    """(case 76) With an error in the stream; a second signal ends it at once."""
    config = {
        "server": {"drain_timeout_s": 1}, "backends": {"up": {"url": upstream.url, "health": None}},
        "routes": [{"match": "*", "to": "up"}],
    }  # fmt: skip
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("one")), Hold()]
    with running(config, tmp_path) as laya:
        with laya.connect() as sock:
            sock.sendall(post(STREAM))
            read_until(sock, b"one")
            laya.process.terminate()
            rest = read_all(sock)
        assert b'"error"' in rest and b"[DONE]" not in rest
        assert laya.process.wait(5) == 0
