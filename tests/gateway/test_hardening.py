"""Found by trying to break the data plane: each was a fault once."""

from __future__ import annotations

import gzip
import io
import json
import os
import socket
import threading
import time

import pytest
import zstandard

from raw import post, read_all, read_response, read_stream, read_until
from scripted_upstream import SSE_HEAD, Close, Hold, Reset, Sleep, answer, chunked, completion, delta, polite
from server import running

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
STREAM = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}).encode()


@pytest.fixture(autouse=True)
def _fresh(upstream):
    upstream.script = polite
    upstream.asked.clear()


def config(url: str, server: dict | None = None, **backend) -> dict:
    return {
        "server": server or {}, "backends": {"up": {"url": url, "health": None, **backend}}, "routes": [{"match": "*", "to": "up"}],
    }  # fmt: skip


@pytest.mark.parametrize("page", [b"/health", b"/v1/models/x"])
def test_others_are_served_in_the_middle_of_a_burst_of_pages(router, page):
    """The burst is answered in order and whole; another client does not wait for its end."""
    count = 4000
    with router.connect() as sock, router.connect() as other:
        answers = []
        reader = threading.Thread(target=lambda: answers.append(read_answers(sock, count)))
        reader.start()
        sock.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % page * count)
        other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_response(other)[0] == 200
        reader.join(30)
    assert answers == [count]


def read_answers(sock: socket.socket, count: int) -> int:
    data, seen = b"", 0
    sock.settimeout(10)
    while seen < count:
        piece = sock.recv(1 << 20)
        if not piece:
            break
        data += piece
        seen += data.count(b"HTTP/1.1 ")
        data = data[-8:] if b"HTTP/1.1 " not in data[-8:] else b""
    return seen


def test_a_client_that_reads_none_of_its_pages_is_not_answered_without_bound(router):
    before = router.metric("laya_host_memory_bytes", kind="rss")
    with router.connect() as sock:
        sock.settimeout(1.0)
        burst = b"GET /v1/models/x HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4000
        try:
            for _ in range(60):
                sock.sendall(burst)
        except (TimeoutError, ConnectionError):
            pass
        assert router.metric("laya_host_memory_bytes", kind="rss") - before < 24 << 20


def test_bytes_sent_ahead_stay_counted_until_they_are_used(router, upstream):
    upstream.script = lambda asked: [Sleep(0.3), answer(completion("ok"))]
    ahead = post(b'{"model":"m","x":"' + b"a" * 60_000 + b'"}')
    with router.connect() as sock:
        sock.sendall(post(BODY) + ahead * 3)
        assert upstream.wait_for(lambda: len(upstream.asked) >= 2)
        assert router.metric("laya_buffered_bytes") >= 2 * 60_000
    assert router.wait_for(lambda: router.metric("laya_buffered_bytes") == 0)


@pytest.mark.parametrize("pack", ["gzip", "zstd"])
def test_what_a_body_unpacks_to_is_counted(upstream, tmp_path, pack):
    upstream.script = lambda asked: [Hold()]
    plain = b'{"model":"m","x":"' + b"a" * (30 << 20) + b'"}'
    packed = gzip.compress(plain, 1) if pack == "gzip" else zstandard.ZstdCompressor().compress(plain)
    extra = f"Content-Encoding: {pack}\r\n".encode()
    with running(config(upstream.url, {"max_buffered_bytes": "64MiB"}), tmp_path) as laya:
        socks = [laya.connect() for _ in range(6)]
        for sock in socks:
            sock.sendall(post(packed, extra=extra))
        assert laya.wait_for(lambda: laya.metric("laya_buffered_bytes") > 30 << 20)
        refused = [sock for sock in socks if b" 503 " in read_all(sock, 2.0)[:20]]
        assert len(refused) >= 4 and laya.metric("laya_buffered_bytes") <= 64 << 20
        for sock in socks:
            sock.close()
        assert laya.wait_for(lambda: laya.metric("laya_buffered_bytes") == 0)


def test_a_bomb_that_does_not_say_its_size_finds_no_room(router, upstream):
    out = io.BytesIO()
    with zstandard.ZstdCompressor(write_content_size=False).stream_writer(out, closefd=False) as writer:
        for _ in range(600):
            writer.write(b"\0" * (1 << 20))
    before = router.metric("laya_host_memory_bytes", kind="rss")
    assert router.call("POST", "/v1/chat/completions", out.getvalue(), {"content-encoding": "zstd"})[0] == 413
    assert router.metric("laya_host_memory_bytes", kind="rss") - before < 100 << 20
    two = zstandard.ZstdCompressor().compress(BODY) * 2
    assert router.call("POST", "/v1/chat/completions", two, {"content-encoding": "zstd"})[0] == 400


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages", b"/v1/embeddings"])
def test_a_clients_connection_header_cannot_take_the_backends_key_off(upstream, tmp_path, path):
    with running(config(upstream.url, key="k1", headers={"x-tenant": "a"}), tmp_path) as laya, laya.connect() as sock:
        sock.sendall(post(BODY, path=path, extra=b"Connection: keep-alive, authorization, x-tenant, x-own\r\nX-Own: 1\r\n"))
        read_until(sock, b"\r\n\r\n")
    asked = upstream.asked[0]
    assert asked.headers["authorization"] == "Bearer k1" and asked.headers["x-tenant"] == "a" and "x-own" not in asked.headers


def test_a_connection_whose_request_was_not_read_is_not_used_again(tmp_path):
    """The backend answers after the head of a large request and reads no more."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted = []

    def serve() -> None:
        while len(accepted) < 2:
            sock, _ = listener.accept()
            accepted.append(sock)
            sock.recv(65536)
            sock.sendall(answer(b'{"error":{"message":"slow down"}}', "429 Too Many Requests") if len(accepted) == 1 else answer(b"{}"))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with running(config(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", first_byte_timeout_s=5), tmp_path) as laya:
        assert laya.chat("m", "word " * 4_000_000)[0] == 429
        assert laya.call("POST", "/v1/chat/completions", BODY)[0] == 200
    thread.join(5)
    for sock in (*accepted, listener):
        sock.close()


def test_calls_in_line_get_their_own_attempt_when_connecting_fails(tmp_path):
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        port = full.getsockname()[1]
        with running(config(f"http://127.0.0.1:{port}/v1", max_inflight=1), tmp_path) as laya:
            results: list[int] = []
            threads = [threading.Thread(target=lambda: results.append(laya.chat("m")[0])) for _ in range(4)]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert results == [502] * 4 and time.monotonic() - began < 15


def test_a_half_closed_client_that_does_not_read_is_let_go(upstream, tmp_path):
    upstream.script = lambda asked: [answer(b"x" * (64 << 20))]
    with running(config(upstream.url, {"keepalive_timeout_s": 1}), tmp_path) as laya:
        with laya.connect() as sock:
            sock.sendall(post(BODY))
            assert upstream.wait_for(lambda: bool(upstream.asked))
            time.sleep(0.3)
            sock.shutdown(socket.SHUT_WR)
            assert laya.wait_for(lambda: laya.metric("laya_connections") == 1, 8)


def test_a_reader_that_takes_nothing_loses_its_place(upstream, tmp_path):
    upstream.script = lambda asked: [answer(b"x" * (64 << 20))]
    with running(config(upstream.url, {"body_timeout_s": 1}), tmp_path) as laya, laya.connect() as sock:
        sock.sendall(post(BODY))
        assert laya.wait_for(lambda: laya.metric("laya_backend_inflight", backend="up") == 1)
        assert laya.wait_for(lambda: laya.metric("laya_backend_inflight", backend="up") == 0, 8)


def test_the_head_time_out_holds_for_every_request_of_a_connection(upstream, tmp_path):
    server = {"header_timeout_s": 0.5, "keepalive_timeout_s": 30}
    with running(config(upstream.url, server), tmp_path) as laya, laya.connect() as sock:
        sock.sendall(post(BODY))
        assert read_response(sock)[0] == 200
        sock.sendall(b"POST /v1/chat")
        began = time.monotonic()
        assert b" 408 " in read_all(sock, 10) and time.monotonic() - began < 5


def test_head_has_no_body_however_it_is_sent(router):
    with router.connect() as sock:
        sock.sendall(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n")
        time.sleep(0.1)
        sock.sendall(b"{}GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        first = read_until(sock, b"\r\n\r\n")
        head, _, rest = first.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and not rest.startswith(b"{")
    with router.connect() as sock:
        sock.sendall(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        read_until(sock, b"\r\n\r\n")
        sock.sendall(b"BROKEN\r\n\r\n")
        assert b'{"error"' in read_all(sock)


def test_a_tidied_path_goes_up_tidy(router, upstream):
    assert router.call("POST", "//v1//chat/completions/?x=1", BODY)[0] == 200
    assert upstream.asked[0].target == "/v1/chat/completions?x=1"


def test_the_end_mark_is_a_line_and_not_a_word(router, upstream):
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("this says [DONE]")), b"0\r\n\r\n"]
    with router.connect() as sock:
        sock.sendall(post(STREAM))
        data = read_all(sock)
    assert b"upstream_error" in data, "content that says so does not end a stream"
    upstream.script = lambda asked: [SSE_HEAD, chunked(b"data: [DONE]\n\n"), chunked(b": " + b"x" * 200 + b"\n\n"), b"0\r\n\r\n"]
    with router.connect() as sock:
        sock.sendall(post(STREAM))
        assert b"error" not in read_stream(sock), "a comment may follow"
    for end in (Close(), Reset()):
        upstream.script = lambda asked, end=end: [SSE_HEAD, chunked(delta("a")), chunked(b"data: [DONE]\n\n"), Sleep(0.1), end]
        with router.connect() as sock:
            sock.sendall(post(STREAM))
            assert read_stream(sock).endswith(b"data: [DONE]\n\n"), "everything had come"


def test_half_an_answer_to_http_1_0_ends_with_a_reset(router, upstream):
    upstream.script = lambda asked: [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", chunked(b"half"), Sleep(0.1), Close()]
    with router.connect() as sock:
        sock.sendall(post(BODY, version=b"1.0"))
        sock.settimeout(5)
        with pytest.raises(ConnectionResetError):
            while sock.recv(65536):
                pass


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
def test_a_status_without_a_body_has_none(router, upstream, status):
    upstream.script = lambda asked: [f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\n\r\n".encode()]
    with router.connect() as sock:
        sock.sendall(post(BODY) + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        data = read_until(sock, b'{"status":"ok"}')
    head = data.partition(b"\r\n\r\n")[0]
    assert status[:3].encode() in head and b"transfer-encoding" not in head and b"content-length" not in head


def test_an_early_refusal_is_logged_and_has_an_id(router):
    before = len([line for line in router.lines if line.get("event") == "request" and line.get("path") == "/nothing"])
    with router.connect() as sock:
        sock.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n")
        data = read_all(sock)
    assert data.startswith(b"HTTP/1.1 404 ") and b"x-request-id: " in data
    assert router.wait_for(lambda: len([li for li in router.lines if li.get("event") == "request" and li.get("path") == "/nothing"]) > before)


def test_a_live_unix_socket_is_not_taken_over(upstream, tmp_path):
    path = str(tmp_path / "laya.sock")
    with running(config(upstream.url, {"unix_socket": path}), tmp_path) as first:
        with running(config(upstream.url, {"unix_socket": path}), tmp_path, wait=False) as second:
            assert second.process.wait(20) == 78
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(path)
            sock.sendall(post(BODY))
            assert read_response(sock)[0] == 200
        first.process.kill()
        first.process.wait(5)
    assert os.path.exists(path), "left behind by a kill"
    with running(config(upstream.url, {"unix_socket": path}), tmp_path) as third:
        assert third.stop() == 0
    assert not os.path.exists(path)


def test_an_informational_head_does_not_start_the_idle_clock(upstream, tmp_path):
    upstream.script = lambda asked: [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", Sleep(2.0), answer(completion("ok"))]
    with running(config(upstream.url, first_byte_timeout_s=10, idle_timeout_s=0.5), tmp_path) as laya:
        assert laya.chat("m")[0] == 200


def test_one_byte_chunks_pass_in_both_directions(router, upstream):
    body = json.dumps({"model": "m", "messages": [{"content": "y" * 3000}]}).encode()
    upstream.script = lambda asked: [SSE_HEAD, b"".join(chunked(b"%c" % byte) for byte in delta("z" * 4000) + b"data: [DONE]\n\n"), b"0\r\n\r\n"]
    with router.connect() as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        sock.sendall(b"".join(chunked(b"%c" % byte) for byte in body) + b"0\r\n\r\n")
        assert read_stream(sock) == delta("z" * 4000) + b"data: [DONE]\n\n"
    assert upstream.asked[0].body == body


def test_what_comes_behind_answers_that_nobody_reads_is_not_kept(router, upstream):
    """A body may be long, and its client still has answers to read: until then it waits in the kernel."""
    upstream.script = lambda asked: [answer(b"x" * (200 << 10))]
    before = router.metric("laya_host_memory_bytes", kind="rss")
    with router.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for count in range(1, 41):
            sock.sendall(post(BODY))
            upstream.wait_for(lambda count=count: len(upstream.asked) == count, 0.1)
        sent, head = 0, b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (32 << 20)
        sock.settimeout(1.0)
        try:
            sock.sendall(head)
            while sent < 64 << 20:
                sent += sock.send(b"x" * 262144)
        except (TimeoutError, ConnectionError):
            pass
        assert sent < 16 << 20
        assert router.metric("laya_host_memory_bytes", kind="rss") - before < 16 << 20


def test_a_client_that_reads_its_pages_late_gets_them_all(router):
    """It is not read while it does not read; what it had sent meanwhile is answered then."""
    count = 20_000
    with router.connect() as sock:
        burst = b"GET /v1/models/x HTTP/1.1\r\nHost: localhost\r\n\r\n" * count
        writer = threading.Thread(target=sock.sendall, args=(burst,), daemon=True)
        writer.start()
        time.sleep(0.5)
        assert read_answers(sock, count) == count
        writer.join(10)


def test_a_reader_that_is_only_slow_is_not_cut_off(upstream, tmp_path):
    """The kernel asks for more only when a good part of what it holds is gone: until then its own count tells."""
    upstream.script = lambda asked: [SSE_HEAD, *[chunked(delta("x" * 4000))] * 4000]
    limits = {"body_timeout_s": 3}
    with running(config(upstream.url, limits), tmp_path) as laya, laya.connect() as sock:
        sock.sendall(post(STREAM))
        until = time.monotonic() + 6
        while time.monotonic() < until:
            assert sock.recv(4000)
            time.sleep(0.05)
        assert laya.metric("laya_backend_inflight", backend="up") == 1
