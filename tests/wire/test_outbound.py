"""Responses of upstreams: bodies of every framing, ends that lie, and what decides reuse and retry."""

from __future__ import annotations

import h11
import pytest

from laya.wire import authority
from laya.wire.messages import EOF, NEED_DATA, BodyData, EndOfBody, Limits, Refusal, Response
from laya.wire.outbound import MAX_INFORMATIONAL, Outbound

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = OK + b"Content-Length: 5\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def opened(data=b"", method=b"POST"):
    parser = Outbound(Limits())
    parser.expect(method)
    if data:
        parser.receive(data)
    return parser


ACCEPTED = {
    "length": (LENGTH + b"hello", b"hello"),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
    "chunked": (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
    "several chunks": (CHUNKED + b"2\r\nhe\r\n0003\r\nllo\r\n000\r\n\r\n", b"hello"),
    "upper-case size": (CHUNKED + b"A\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
    "extension": (CHUNKED + b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\n\r\n", b"hello"),
    "size padded with blanks": (CHUNKED + b"2\r\nhe\r\n3  \r\nllo\r\n0\r\n\r\n", b"hello"),
    "trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nX-A: 1\r\n\r\n", b"hello"),
    "size of 12 digits": (CHUNKED + b"000000000005\r\nhello\r\n0\r\n\r\n", b"hello"),
    "CR LF in the body": (CHUNKED + b"4\r\n\r\n\r\n\r\n0\r\n\r\n", b"\r\n\r\n"),
    "coding in capitals": (OK + b"transfer-encoding: CHUNKED\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"hello"),
    "two cookies": (OK + b"Set-Cookie: a\r\nSet-Cookie: b\r\nContent-Length: 0\r\n\r\n", b""),
    "early hints": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH + b"hello", b"hello"),
    "content coding": (OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", b"\x1f\x8b"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_well_formed_response_is_read(read_outbound, name):
    """(case 5, case 44)"""
    data, body = ACCEPTED[name]
    message, ending = read_outbound(data)
    assert (message["status"], message["body"], message["whole"]) == (200, body, True)
    assert ending is NEED_DATA
    assert read_outbound(data, eof=True)[-1] is EOF


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_response_reads_as_h11_reads_it(read_outbound, name):
    data, body = ACCEPTED[name]
    referee = h11.Connection(h11.CLIENT)
    referee.send(h11.Request(method="POST", target="/", headers=[("Host", "x")]))
    referee.send(h11.EndOfMessage())
    referee.receive_data(data)
    while type(head := referee.next_event()) is h11.InformationalResponse:
        pass
    message = read_outbound(data)[0]
    assert (message["status"], message["reason"], message["headers"]) == (head.status_code, head.reason, list(head.headers))
    pieces = []
    while type(event := referee.next_event()) is h11.Data:
        pieces.append(bytes(event.data))
    assert b"".join(pieces) == body


@pytest.mark.parametrize("name", ACCEPTED)
def test_bytes_behind_a_response_are_refused_and_end_the_connection(read_outbound, name):
    data, body = ACCEPTED[name]
    message, ending = read_outbound(data + b"H")
    assert message["body"] == body and ending == ("refused", 502)
    parser = opened(data + b"H")
    while type(parser.next_event()) is not Refusal:
        assert not parser.reusable


def test_several_responses_on_one_connection(read_outbound):
    outcome = read_outbound(LENGTH + b"hello", CHUNKED + b"1\r\na\r\n0\r\n\r\n", LENGTH + b"again")
    assert [message["body"] for message in outcome[:-1]] == [b"hello", b"a", b"again"]


@pytest.mark.parametrize(
    ("method", "head"),
    [
        (b"HEAD", LENGTH), (b"HEAD", CHUNKED), (b"HEAD", OK + b"\r\n"), (b"GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        (b"GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"),
    ],
)  # fmt: skip
def test_a_response_without_a_body_whatever_its_headers_say(read_outbound, method, head):
    message, ending = read_outbound(head, methods=[method])
    assert (message["body"], message["whole"], ending) == (b"", True, NEED_DATA)
    outcome = read_outbound(head, LENGTH + b"hello", methods=[method, b"GET"])
    assert outcome[1]["body"] == b"hello"


@pytest.mark.parametrize(
    "head", [OK + b"\r\n", b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\n"]
)
def test_a_body_that_ends_with_the_connection(read_outbound, head):
    message, ending = read_outbound(head + b"hello", eof=True)
    assert (message["body"], message["whole"], ending) == (b"hello", True, EOF)
    assert not read_outbound(head + b"hello")[0]["whole"]
    parser = opened(head)
    assert parser.next_event().body is None
    parser.receive_eof()
    assert type(parser.next_event()) is EndOfBody and not parser.reusable


TRUNCATED = {
    "in the head": OK + b"Content-Le",
    "before the head": b"",
    "after 103": b"HTTP/1.1 103 Early Hints\r\n\r\n",
    "in a counted body": LENGTH + b"hell",
    "in a chunk": CHUNKED + b"5\r\nhel",
    "between chunks": CHUNKED + b"5\r\nhello\r\n",
    "in a chunk line": CHUNKED + b"5\r\nhello\r\n1",
    "in the last chunk": CHUNKED + b"5\r\nhello\r\n0\r\n",
    "in trailers": CHUNKED + b"5\r\nhello\r\n0\r\na: b\r\n",
}


@pytest.mark.parametrize("name", TRUNCATED)
def test_a_cut_response_is_never_taken_for_a_whole_one(read_outbound, name):
    """(case 13)"""
    outcome = read_outbound(TRUNCATED[name], eof=True)
    assert outcome[-1] == ("refused", 502)
    assert not any(message["whole"] for message in outcome[:-1])


BROKEN = {
    "no HTTP": b"SSH-2.0-x\r\n\r\n",
    "HTML without head": b"<html></html>\r\n\r\n",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "four digits": b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
    "status 600": b"HTTP/1.1 600 OK\r\nContent-Length: 0\r\n\r\n",
    "status 099": b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n",
    "101": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "length and coding": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    "length list": OK + b"Content-Length: 5, 5\r\n\r\nhello",
    "signed length": OK + b"Content-Length: +5\r\n\r\nhello",
    "gzip coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    "two codings": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked in 1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 0\n\n",
    "fold": OK + b"A: b\r\n c\r\nContent-Length: 0\r\n\r\n",
    "NUL": OK + b"A: \x00\r\nContent-Length: 0\r\n\r\n",
    "1 MB head": OK + b"A: " + b"a" * 1_000_000,
    "chunk without end": CHUNKED + b"5\r\nhelloXX1\r\na\r\n0\r\n\r\n",
    "chunk end without LF": CHUNKED + b"5\r\nhello\rX1\r\na\r\n0\r\n\r\n",
    "signed size": CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n",
    "underscored size": CHUNKED + b"1_0\r\nhello\r\n0\r\n\r\n",
    "empty size": CHUNKED + b"\r\nhello\r\n0\r\n\r\n",
    "LF in size line": CHUNKED + b"5\nhello\r\n0\r\n\r\n",
    "endless extension": CHUNKED + b"5;" + b"a" * 1000,
    "endless 1xx": b"HTTP/1.1 100 Continue\r\n\r\n" * (MAX_INFORMATIONAL + 1) + LENGTH + b"hello",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_response_is_a_502(read_outbound, name):
    """(case 44)"""
    data = BROKEN[name]
    outcome = read_outbound(data if len(data) < 100_000 else data[:40_000])
    assert outcome[-1] == ("refused", 502)
    assert not any(message["whole"] for message in outcome[:-1])


def test_a_few_informational_responses_are_swallowed(read_outbound):
    """(case 44)"""
    assert read_outbound(b"HTTP/1.1 100 Continue\r\n\r\n" * MAX_INFORMATIONAL + LENGTH + b"hello")[0]["body"] == b"hello"


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        (LENGTH, True), (OK + b"Content-Length: 5\r\nConnection: close\r\n\r\n", False),
        (OK + b"Content-Length: 5\r\nConnection: x, Close\r\n\r\n", False),
        (OK + b"Content-Length: 5\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("fast_parser", [True, False])
def test_reuse_follows_version_and_connection(head, reusable, fast_parser):
    """(case 44)"""
    parser = Outbound(Limits(), fast=fast_parser)
    parser.expect(b"GET")
    parser.receive(head + b"hel")
    assert parser.next_event().body is None and not parser.reusable
    parser.receive(b"lo")
    pieces = [parser.next_event().data, parser.next_event().data]
    assert pieces == [b"hel", b"lo"] and type(parser.next_event()) is EndOfBody
    assert parser.reusable is reusable


def test_end_of_input_on_an_idle_connection_is_seen():
    """(case 40, case 42)"""
    parser = opened(LENGTH + b"hello")
    assert type(parser.next_event()) is Response and parser.reusable
    parser.receive_eof()
    assert parser.next_event() is EOF and not parser.reusable


def test_started_tells_whether_any_byte_of_the_response_came():
    """(case 40, case 41)"""
    parser = opened()
    assert not parser.started
    parser.receive(b"H")
    assert parser.started and parser.next_event() is NEED_DATA
    parser.receive(LENGTH[1:] + b"hello")
    parser.next_event()
    parser.expect(b"GET")
    assert not parser.started
    parser.receive_eof()
    assert type(parser.next_event()) is Refusal and not parser.started


def test_bytes_that_nobody_asked_for_are_refused():
    parser = Outbound(Limits())
    parser.receive(LENGTH)
    assert parser.next_event().status == 502
    with pytest.raises(RuntimeError):
        parser.expect(b"GET")


def test_a_streamed_chunk_is_one_event_and_is_not_held():
    parser = opened(CHUNKED)
    assert parser.next_event().body is None
    frame = b'data: {"x":1}\n\n'
    for _ in range(100):
        parser.receive(b"%x\r\n%b\r\n" % (len(frame), frame))
        assert parser.next_event().data == frame
        assert parser.next_event() is NEED_DATA and parser.buffered == 0
    parser.receive(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")
    assert parser.next_event().data == b"ab" and type(parser.next_event()) is EndOfBody and parser.reusable


def test_a_big_chunk_in_many_segments_is_handed_on_without_being_held():
    parser = opened(CHUNKED + b"%x\r\n" % 1_000_000)
    assert parser.next_event().body is None
    for _ in range(1000):
        parser.receive(b"d" * 1000)
        event = parser.next_event()
        assert type(event) is BodyData and len(event.data) == 1000 and parser.buffered == 0
    parser.receive(b"\r\n0\r\n\r\n")
    assert type(parser.next_event()) is EndOfBody


def test_many_tiny_chunks_come_out_in_bounded_portions():
    parser = opened(CHUNKED + b"1\r\na\r\n" * 40_000 + b"0\r\n\r\n")
    assert parser.next_event().body is None
    sizes = []
    while type(event := parser.next_event()) is BodyData:
        sizes.append(len(event.data))
    assert type(event) is EndOfBody and sum(sizes) == 40_000 and max(sizes) <= 512


def test_an_odd_chunk_line_hands_the_rest_to_h11(monkeypatch):
    parser = opened(CHUNKED + b"2\r\nhe\r\n3;ext\r\nllo\r\n")
    assert parser.next_event().body is None and parser.next_event().data == b"hello"
    parser.receive(b"0\r\n\r\n")
    assert type(parser.next_event()) is EndOfBody
    monkeypatch.setattr(authority, "read_response", None)  # the next response is the fast parser's again
    parser.expect(b"GET")
    parser.receive(LENGTH + b"hello")
    assert parser.next_event().body == b"hello"


def test_an_informational_head_costs_one_reading_by_h11_and_no_more(monkeypatch):
    read, real = [], authority.read_response
    monkeypatch.setattr(authority, "read_response", lambda head, *rest: read.append(head) or real(head, *rest))
    parser = opened(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH + b"hello")
    assert parser.next_event().body == b"hello"
    assert len(read) == 1 and read[0].startswith(b"HTTP/1.1 103")


def test_a_header_that_comes_twice_is_read_without_h11_every_time(monkeypatch):
    """(case 3) All of them in order, the first one by name, each time with the length that came."""
    monkeypatch.setattr(authority, "read_response", None)
    parser = opened()
    for body in (b"hello", b"you", b"hello"):
        length = b"Content-Length: %d\r\n" % len(body)
        parser.receive(OK + b"Set-Cookie: a=b\r\n" + length + b"Vary: x\r\nset-cookie: c=d\r\n\r\n" + body)
        response = parser.next_event()
        assert response.headers == [
            (b"set-cookie", b"a=b"), (b"content-length", b"%d" % len(body)), (b"vary", b"x"), (b"set-cookie", b"c=d"),
        ]  # fmt: skip
        assert response.fields[b"set-cookie"] == b"a=b" and list(response.fields) == [b"set-cookie", b"content-length", b"vary"]
        assert response.body == body
        parser.expect(b"POST")


def test_a_response_in_two_segments_after_one_that_was_whole():
    """(case 4) The declared length is what was read, and framing never leaks into the body."""
    parser = opened(LENGTH + b"hello")
    assert parser.next_event().body == b"hello"
    parser.expect(b"POST")
    parser.receive(OK + b"content-length: 3\r\n\r\n")
    response = parser.next_event()
    assert (response.body, response.content_length) == (None, 3)
    parser.receive(b"abc")
    assert parser.next_event().data == b"abc" and type(parser.next_event()) is EndOfBody


def test_a_piece_is_taken_at_once_only_where_it_is_exactly_one_chunk():
    parser = Outbound(Limits())
    parser.expect(b"POST")
    assert parser.take_piece(b"1\r\na\r\n") is None  # no head yet
    parser.receive(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    parser.next_event()
    assert parser.take_piece(b"5\r\nhello\r\n") == b"hello"
    for other in (
        b"5\r\nhello\r", b"5\r\nhello\rX", b"5\r\nhelloXX", b"5\r\nhell\r\n", b"5;a\r\nhello\r\n", b"+5\r\nhello\r\n",
        b"1\r\na\r\n1\r\nb\r\n", b"0\r\n\r\n", b"", b"5", b"\r\n\r\n",
    ):  # fmt: skip
        assert parser.take_piece(other) is None
    parser.receive(b"2\r\nh")
    assert parser.next_event().data == b"h"
    assert parser.take_piece(b"1\r\na\r\n") is None  # a chunk is under way
    parser.receive(b"i\r\n0\r\n\r\n")
    assert parser.next_event().data == b"i"
    assert type(parser.next_event()) is EndOfBody
    assert parser.take_piece(b"1\r\na\r\n") is None
