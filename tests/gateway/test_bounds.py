"""Bounds and listeners: memory under slow uploads, connections, TLS on both sides, CORS, keys."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import time
import urllib.request

import pytest

from raw import post, read_all, read_response, read_stream
from scripted_upstream import SSE_HEAD, Hold, ScriptedUpstream, chunked, delta, polite
from server import running

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()


def to(url: str, **server) -> dict:
    return {"server": server, "backends": {"up": {"url": url, "health": None}}, "routes": [{"match": "*", "to": "up"}]}


def test_three_hundred_slow_uploads_leave_memory_flat(upstream, tmp_path):
    """Each says 32 MiB and sends it bit by bit: beyond `max_buffered_bytes` a 503, and others are still served."""
    with running(to(upstream.url, max_buffered_bytes="64MiB"), tmp_path) as laya:
        assert laya.chat("m")[0] == 200
        before = laya.metric("laya_host_memory_bytes", kind="rss")
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (32 << 20)
        socks = [laya.connect() for _ in range(300)]
        refused = 0
        for sock in socks:
            sock.sendall(head)
        for _ in range(8):
            for sock in socks:
                try:
                    sock.sendall(b"x" * 65536)
                except OSError:
                    refused += 1
        held = laya.metric("laya_buffered_bytes")
        assert held <= 64 << 20
        assert laya.metric("laya_host_memory_bytes", kind="rss") - before < 160 << 20
        assert refused or any(b" 503 " in read_all(sock, 0.2) for sock in reversed(socks))
        for sock in socks:
            sock.close()
        assert laya.wait_for(lambda: laya.metric("laya_buffered_bytes") == 0)
        assert laya.chat("m")[0] == 200
        assert laya.stop() == 0


def test_connections_beyond_the_bound_get_a_503(upstream, tmp_path):
    with running(to(upstream.url, max_connections=10), tmp_path) as laya:
        socks = [laya.connect() for _ in range(10)]
        with laya.connect() as one_more:
            data = read_all(one_more, 3)
        assert b" 503 " in data and b"retry-after" in data
        for sock in socks:
            sock.close()
        assert laya.wait_for(lambda: laya.chat("m")[0] == 200)


def test_idle_connections_are_closed_after_their_time(upstream, tmp_path):
    with running(to(upstream.url, keepalive_timeout_s=0.5), tmp_path) as laya, laya.connect() as sock:
        sock.sendall(post(BODY))
        assert read_response(sock)[0] == 200
        began = time.monotonic()
        assert read_all(sock, 5) == b"" and time.monotonic() - began < 3


def test_a_reader_that_stopped_does_not_hold_the_backend_for_ever(upstream, tmp_path):
    """Unsent output is bounded: the backend is paused, and goes on when the reader does."""
    frame = delta("x" * 4000)
    upstream.script = lambda asked: [SSE_HEAD, *([chunked(frame)] * 5000), chunked(b"data: [DONE]\n\n"), b"0\r\n\r\n"]
    try:
        with running(to(upstream.url), tmp_path) as laya:
            before = laya.metric("laya_host_memory_bytes", kind="rss")
            socks = [laya.connect() for _ in range(20)]
            body = json.dumps({"model": "m", "stream": True, "messages": []}).encode()
            for sock in socks:
                sock.sendall(post(body))
            time.sleep(2)
            assert laya.metric("laya_host_memory_bytes", kind="rss") - before < 40 << 20, "20 x 20 MB were not kept"
            assert read_stream(socks[0], 60) == frame * 5000 + b"data: [DONE]\n\n"
            for sock in socks:
                sock.close()
            assert laya.wait_for(lambda: laya.metric("laya_backend_inflight", backend="up") == 0)
    finally:
        upstream.script = polite


def certificate(directory) -> tuple[str, str]:
    """A self-signed certificate for localhost: (certificate file, key file)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, False).add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (directory / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )  # fmt: skip
    (directory / "key.pem").write_bytes(secret)
    return str(directory / "cert.pem"), str(directory / "key.pem")


def test_tls_for_clients_and_to_backends(upstream, tmp_path):
    """A router behind a router: the first speaks TLS to clients, the second to the first."""
    cert, key = certificate(tmp_path)
    with running(to(upstream.url, tls={"certificate": cert, "key": key}), tmp_path) as inner:
        context = ssl.create_default_context(cafile=cert)
        request = urllib.request.Request(inner.url + "/v1/chat/completions", data=BODY, method="POST")
        with urllib.request.urlopen(request, context=context, timeout=10) as response:
            assert response.status == 200
        config = to(f"https://127.0.0.1:{inner.port}/v1")
        with running(config, tmp_path, env={"SSL_CERT_FILE": cert}) as outer:
            assert outer.chat("m")[0] == 200
            with outer.connect() as sock:
                sock.sendall(post(json.dumps({"model": "m", "stream": True, "messages": [{"content": "a b c"}]}).encode()))
                assert read_stream(sock).endswith(b"data: [DONE]\n\n")
        with running(config, tmp_path) as distrustful:
            status, body, _ = distrustful.chat("m")
            assert status == 502 and "certificate" in body["error"]["message"].lower()
        assert inner.stop() == 0


def test_a_page_of_an_allowed_origin_may_read_the_answer(upstream, tmp_path):
    with running(to(upstream.url, cors_origins=["https://app.example"]), tmp_path) as laya:
        origin = {"origin": "https://app.example"}
        status, _, headers = laya.call("OPTIONS", "/v1/chat/completions", headers={
            **origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type",
        })  # fmt: skip
        assert status == 204 and headers["access-control-allow-headers"] == "authorization, content-type"
        headers = laya.call("POST", "/v1/chat/completions", BODY, origin)[2]
        assert headers["access-control-allow-origin"] == "https://app.example"
        assert laya.call("POST", "/v1/chat/completions", BODY, {"origin": "https://evil.example"})[0] == 403


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    with ScriptedUpstream() as up:
        config = {
            "auth": {"keys": [{"name": "ci", "key": "sk-one", "routes": ["a"]}, {"name": "all", "key": "sk-two"}]},
            "backends": {"up": {"url": up.url, "health": None}},
            "routes": [{"name": "a", "match": "a", "to": "up"}, {"name": "b", "match": "b", "to": "up"}],
        }  # fmt: skip
        with running(config, tmp_path_factory.mktemp("keyed")) as laya:
            yield laya


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer sk-one"}, {"authorization": "bearer sk-one"}, {"x-api-key": "sk-one"}, {"authorization": "Bearer  sk-one "}],
)
def test_a_known_key_is_taken_in_every_form(keyed, headers):
    """(case 71)"""
    body = {"model": "a", "messages": [{"content": "x"}]}
    assert keyed.call("POST", "/v1/chat/completions", body, headers)[0] == 200


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer sk-On\xe9"}, {"authorization": "Basic sk-one"}, {"x-api-key": "sk-one-more"}]
)
def test_another_key_is_a_401(keyed, headers):
    """(cases 69, 71)"""
    status, raw, _ = keyed.call("POST", "/v1/chat/completions", {"model": "a", "messages": []}, headers)
    assert status == 401 and json.loads(raw)["error"]["code"] == "invalid_api_key" and b"sk-" not in raw


def test_a_key_sees_only_its_routes(keyed):
    body = {"model": "b", "messages": [{"content": "x"}]}
    status, raw, _ = keyed.call("POST", "/v1/chat/completions", body, {"x-api-key": "sk-one"})
    assert status == 404 and json.loads(raw)["error"]["message"] == "The model 'b' does not exist for this key. Its models: a."
    assert keyed.call("POST", "/v1/chat/completions", body, {"x-api-key": "sk-two"})[0] == 200
    assert keyed.call("GET", "/v1/models")[0] == 401 and keyed.get("/health")[0] == 200 and keyed.get("/metrics")[0] == 200


def test_keys_are_in_no_log_and_no_metric(keyed):
    """(case 70)"""
    keyed.call("POST", "/v1/chat/completions", {"model": "a", "messages": []}, {"x-api-key": "sk-one"})
    assert "sk-one" not in json.dumps(keyed.lines) and b"sk-one" not in keyed.get("/metrics")[1]


def test_junk_models_make_no_series_and_do_not_break_the_exposition(router):
    """(cases 66, 67)"""
    from prometheus_client.parser import text_string_to_metric_families

    before = len(router.get("/metrics")[1])
    for i in range(200):
        router.chat(f'junk"\\{i}\n')
    status, text, headers = router.call("GET", "/metrics")
    assert headers["Content-Type" if "Content-Type" in headers else "content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert len(text) < before + 2000 and text.endswith(b"\n") and b"NaN" not in text
    names = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {"laya_requests", "laya_stage_seconds", "laya_backend_up"} <= names
    assert router.call("GET", "/metrics/")[0] == 200


def test_a_scrape_stays_quick_while_many_streams_run(router, upstream):
    """(case 67) A hundred here; what is measured is that a scrape does not wait for them."""
    upstream.script = lambda asked: [SSE_HEAD, chunked(delta("one")), Hold()]
    socks = [router.connect() for _ in range(50)]
    try:
        for sock in socks:
            sock.sendall(post(json.dumps({"model": "m", "stream": True, "messages": []}).encode()))
        assert upstream.wait_for(lambda: len(upstream.asked) >= 50)
        assert router.metric("laya_backend_inflight", backend="up") >= 50
    finally:
        for sock in socks:
            sock.close()
        upstream.script = polite
    assert router.wait_for(lambda: router.metric("laya_backend_inflight", backend="up") == 0)


def test_two_servers_cannot_share_a_port(router, tmp_path):
    import subprocess
    import sys

    config = to("http://127.0.0.1:9/v1", port=router.port)
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "laya", "router", "--config", str(tmp_path / "c.yaml")], capture_output=True, timeout=30
    )  # fmt: skip
    assert done.returncode == 78 and b"cannot listen" in done.stderr


