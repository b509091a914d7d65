"""Heads that go out: what they say, what they drop, what they refuse to carry; read back by h11 and http.client."""

from __future__ import annotations

import email.utils
import http.client
import io
import time

import h11
import pytest

from laya.wire import reply
from laya.wire.inbound import Inbound
from laya.wire.messages import Limits
from laya.wire.outbound import Outbound

JSON = (b"content-type", b"application/json")


class _Socket:
    def __init__(self, data):
        self._file = io.BytesIO(data)

    def makefile(self, mode):
        return self._file


def read_by_stdlib(data, method="GET"):
    response = http.client.HTTPResponse(_Socket(data), method=method)
    response.begin()
    return response, response.read()


def h11_request(data):
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    return connection.next_event()


def response(status, headers, **framing):
    return reply.response_start(status, reply.header_lines(headers), **framing)


def test_a_response_head_with_a_length_is_read_by_a_stdlib_client():
    data = response(200, [JSON, (b"x-a", b"1")], content_length=2) + b"{}"
    read, body = read_by_stdlib(data)
    assert (read.status, read.reason, body) == (200, "OK", b"{}")
    assert read.headers["content-type"] == "application/json" and read.headers["x-a"] == "1"
    assert abs(email.utils.parsedate_to_datetime(read.headers["date"]).timestamp() - time.time()) < 5


def test_a_chunked_response_is_read_by_a_stdlib_client():
    data = response(200, [], chunked=True) + reply.chunk(b"ab") + reply.chunk(b"") + reply.chunk(b"c" * 300)
    _, body = read_by_stdlib(data + reply.LAST_CHUNK)
    assert body == b"ab" + b"c" * 300


def test_close_is_said_and_a_body_without_framing_ends_with_the_connection():
    """(case 9) HTTP/1.0 streaming."""
    read, body = read_by_stdlib(response(200, [], close=True) + b"to the end")
    assert body == b"to the end" and read.headers["connection"] == "close"
    assert read.headers["transfer-encoding"] is None and read.headers["content-length"] is None


def test_an_upstreams_framing_and_hop_by_hop_headers_are_dropped():
    """(case 4, case 5)"""
    given = [
        (b"content-length", b"999"), (b"transfer-encoding", b"chunked"), (b"connection", b"keep-alive, X-Secret"),
        (b"keep-alive", b"timeout=5"), (b"x-secret", b"1"), (b"date", b"long ago"), (b"trailer", b"x"), (b"te", b"x"),
        (b"upgrade", b"h2c"), (b"proxy-authenticate", b"x"), (b"content-encoding", b"gzip"), (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
    ]  # fmt: skip
    read, _ = read_by_stdlib(response(200, given, content_length=1) + b"x")
    names = [name for name, _ in read.headers.items()]
    assert names == ["date", "content-length", "content-encoding", "set-cookie", "set-cookie"]
    assert read.headers["content-length"] == "1"


@pytest.mark.parametrize("value", [b"a\r\nx: y", b"a\nb", b"a\rb", b"a\0b", b"\n\r"])
def test_a_value_that_could_split_a_message_is_refused(value):
    with pytest.raises(ValueError):
        reply.header_lines([JSON, (b"x-a", value)])
    with pytest.raises(ValueError):
        reply.open_request_head(b"GET", b"/", b"x", [(b"authorization", value)])


@pytest.mark.parametrize("name", [b"", b"a b", b"a:", b"a\r\n", b"\xc3\xa9"])
def test_a_name_that_is_no_token_is_refused(name):
    with pytest.raises(ValueError):
        reply.header_lines([(name, b"v")])


@pytest.mark.parametrize(
    "line", [(b"GE T", b"/", b"x"), (b"GET", b"/ a", b"x"), (b"GET", b"/\r\n", b"x"), (b"GET", b"/", b"x\ny")]
)
def test_a_request_line_that_could_split_is_refused(line):
    with pytest.raises(ValueError):
        reply.open_request_head(*line, [])


def test_length_and_chunked_together_are_refused():
    """(case 2)"""
    with pytest.raises(ValueError):
        reply.response_start(200, b"", content_length=1, chunked=True)


def test_a_request_head_is_read_by_h11_and_leaves_out_what_it_should():
    """(case 2, case 70)"""
    given = [
        (b"host", b"client-side"), (b"content-length", b"7"), (b"expect", b"100-continue"), (b"te", b"trailers"),
        (b"connection", b"upgrade, http2-settings"), (b"upgrade", b"h2c"), (b"http2-settings", b"AA"),
        (b"proxy-authorization", b"x"), (b"accept", b"*/*"), JSON,
    ]  # fmt: skip
    head = reply.open_request_head(b"POST", b"/v1/x?a=b", b"up:8000", given)
    request = h11_request(head + b"content-length: 3\r\n\r\n")
    assert (request.method, request.target) == (b"POST", b"/v1/x?a=b")
    assert list(request.headers) == [(b"host", b"up:8000"), (b"accept", b"*/*"), JSON, (b"content-length", b"3")]


def test_what_one_side_writes_the_other_side_reads():
    head = reply.open_request_head(b"POST", b"/v1/x", b"up", [JSON]) + b"transfer-encoding: chunked\r\n\r\n"
    inbound = Inbound(Limits())
    inbound.receive(head + reply.chunk(b"hello") + reply.LAST_CHUNK)
    assert inbound.next_event().body == b"hello"
    outbound = Outbound(Limits())
    outbound.expect(b"POST")
    outbound.receive(reply.CONTINUE + response(200, [JSON], chunked=True) + reply.chunk(b"hello") + reply.LAST_CHUNK)
    assert outbound.next_event().body == b"hello"


def test_every_known_status_has_its_phrase_and_others_are_served_too():
    assert reply.response_start(404, b"").startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert read_by_stdlib(reply.response_start(599, b"", content_length=0))[0].status == 599
    for status in (99, 600):
        with pytest.raises(ValueError):
            reply.response_start(status, b"")


def test_the_date_is_made_once_a_second(monkeypatch):
    made = []
    made_at = [1000.2]
    monkeypatch.setattr(reply.time, "time", lambda: made_at[0])
    monkeypatch.setattr(reply.email.utils, "formatdate", lambda second, usegmt: made.append(second) or f"date {second}")
    assert reply.http_date() == reply.http_date() == b"date 1000"
    made_at[0] = 1001.0
    assert reply.http_date() == b"date 1001" and made == [1000, 1001]
