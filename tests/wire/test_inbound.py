"""Requests: what is read and what is refused, whole, one byte at a time, by either parser, with bytes behind it."""

from __future__ import annotations

import h11
import pytest

from laya.wire.inbound import Inbound
from laya.wire.messages import EOF, NEED_DATA, PAUSED, BodyData, EndOfBody, Limits, Refusal, Request

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: y\r\n\r\n"


def get(target=b"/", version=b"HTTP/1.1", fields=b"Host: x\r\n", method=b"GET"):
    return b"%b %b %b\r\n%b\r\n" % (method, target, version, fields)


def assert_refused(outcome, status):
    """Refused, and nothing of it was read to its end."""
    assert outcome[-1] == ("refused", status)
    assert not any(message["whole"] for message in outcome[:-1])


ACCEPTED = {
    "no body": (get(b"/v1/models?x=1"), b""),
    "length": (CHAT + b"Content-Length: 5\r\n\r\nhello", b"hello"),
    "zero length": (CHAT + b"Content-Length: 0\r\n\r\n", b""),
    "leading zeros": (CHAT + b"Content-Length: 005\r\n\r\nhello", b"hello"),
    "chunked": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1;ext=1\r\n!\r\n0\r\n\r\n", b"hello!"),
    "chunked with trailers": (CHAT + b"transfer-encoding: Chunked\r\n\r\n2\r\nhi\r\n0\r\nX-Sum: 1\r\n\r\n", b"hi"),
    "binary body": (CHAT + b"content-length: 6\r\n\r\n\x00\r\n\r\n\xff", b"\x00\r\n\r\n\xff"),
    "repeated field": (get(fields=b"Host: x\r\nX-A: 1\r\nX-A: 2\r\n"), b""),
    "8-bit value": (get(fields=b"Host: x\r\nX-A: \xe4\xbd\xa0\r\n"), b""),
    "upgrade offered": (get(fields=b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"), b""),
}


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.parametrize("behind", [b"", NEXT])
def test_a_well_formed_request_is_read(read_inbound, name, behind):
    data, body = ACCEPTED[name]
    outcome = read_inbound(data + behind)
    assert outcome[0]["body"] == body and outcome[0]["whole"]
    assert [message["target"] for message in outcome[1:-1]] == ([b"/next"] if behind else [])
    assert outcome[-1] is NEED_DATA


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_request_reads_as_h11_reads_it(read_inbound, name):
    data, body = ACCEPTED[name]
    referee = h11.Connection(h11.SERVER)
    referee.receive_data(data)
    head = referee.next_event()
    message = read_inbound(data)[0]
    assert (message["method"], message["target"], message["headers"]) == (head.method, head.target, list(head.headers))
    pieces = []
    while type(event := referee.next_event()) is h11.Data:
        pieces.append(bytes(event.data))
    assert type(event) is h11.EndOfMessage and b"".join(pieces) == body


def test_a_chunk_that_does_not_end_in_crlf_is_refused(read_inbound):
    """(case 1)"""
    data = CHAT + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":XX2\r\n1}\r\n0\r\n\r\n'
    assert_refused(read_inbound(data), 400)


@pytest.mark.parametrize(
    ("field", "status"),
    [
        (b"Transfer-Encoding: chunked", 400),
        (b"Transfer-Encoding: chunked,", 400),
        (b"Transfer-Encoding: chunked ", 400),
        (b"Transfer-Encoding: chunked\t", 400),
        (b"Transfer-Encoding: chunked, gzip", 400),
        (b"Transfer-Encoding: gzip, chunked", 400),
        (b"Transfer-Encoding: identity", 400),
        (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", 400),
        (b"Transfer-Encoding : chunked", 400),
        (b"Transfer-Encoding\t: chunked", 400),
        (b"X: y\r\n Transfer-Encoding: chunked", 400),
    ],
)
@pytest.mark.parametrize("length_first", [True, False])
def test_a_coding_beside_a_length_is_refused_and_nothing_behind_it_is_read(read_inbound, field, status, length_first):
    """(case 2)"""
    both = [b"Content-Length: 6", field] if length_first else [field, b"Content-Length: 6"]
    assert read_inbound(CHAT + b"\r\n".join(both) + b"\r\n\r\n" + SMUGGLED) == [("refused", status)]


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (b"gzip", 501), (b"gzip, chunked", 501), (b"identity", 501), (b"chunked, gzip", 501), (b"chunked,", 400), (b"", 400),
        (b"chunked, chunked", 400), (b"chunked;q=1", 400), (b'"chunked"', 400), (b"\x0bchunked", 400),
    ],
)  # fmt: skip
def test_a_coding_other_than_chunked_is_refused(read_inbound, value, status):
    """(case 2)"""
    assert read_inbound(CHAT + b"Transfer-Encoding: " + value + b"\r\n\r\n" + SMUGGLED) == [("refused", status)]


@pytest.mark.parametrize(
    "value", [b"5, 5", b"+5", b"5_0", b"0x5", b"-1", b"\xd9\xa5", b"5 0", b"", b"5.0", b"5\r\nContent-Length: 5", b"V"]
)
def test_a_length_that_is_no_plain_number_is_refused(read_inbound, value):
    """(case 3)"""
    assert read_inbound(CHAT + b"Content-Length: " + value + b"\r\n\r\nhello") == [("refused", 400)]


@pytest.mark.parametrize("value", [b"5 ", b" 5", b"5\t", b"\t5"])
def test_blanks_around_a_length_are_not_part_of_it(read_inbound, value):
    """(case 3)"""
    assert read_inbound(CHAT + b"Content-Length: " + value + b"\r\n\r\nhello" + NEXT)[0]["body"] == b"hello"


def test_two_differing_lengths_are_refused(read_inbound):
    """(case 3)"""
    head = CHAT + b"Content-Length: 47\r\nContent-Length: 0\r\n\r\n"
    assert read_inbound(head + NEXT) == [("refused", 400)]


def test_pipelined_requests_come_out_one_by_one_in_order(read_inbound):
    """(case 7)"""
    first, second = (CHAT + b"Content-Length: 1\r\n\r\n" + body for body in (b"1", b"2"))
    assert [message["body"] for message in read_inbound(first + second)[:-1]] == [b"1", b"2"]
    parser = Inbound(Limits())
    parser.receive(first + second)
    assert parser.next_event().body == b"1"
    assert parser.next_event() is PAUSED and parser.next_event() is PAUSED
    assert parser.buffered == len(second) and not parser.at_boundary
    parser.start_next()
    assert parser.next_event().body == b"2"
    assert parser.next_event() is NEED_DATA and parser.buffered == 0


def test_an_expectation_of_100_continue_is_told(read_inbound):
    """(case 8)"""
    head = CHAT + b"Expect: 100-Continue\r\nContent-Length: 5\r\n\r\n"
    assert read_inbound(head + b"hello")[0]["expect_continue"]
    parser = Inbound(Limits())
    parser.receive(head)
    request = parser.next_event()
    assert request.expect_continue and request.body is None and parser.next_event() is NEED_DATA
    parser.receive(b"hello")
    assert parser.next_event().data == b"hello" and type(parser.next_event()) is EndOfBody
    assert not read_inbound(head.replace(b"HTTP/1.1", b"HTTP/1.0") + b"hello")[0]["expect_continue"]
    assert_refused(read_inbound(CHAT + b"Expect: a miracle\r\n\r\n"), 400)


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        (b"1.1", b"", True), (b"1.1", b"Connection: close\r\n", False), (b"1.1", b"Connection: Close\r\n", False),
        (b"1.1", b"Connection: x, close\r\n", False), (b"1.1", b"Connection: keep-alive\r\n", True),
        (b"1.1", b"Connection: x\r\nConnection: close\r\n", False),
        (b"1.0", b"", False), (b"1.0", b"Connection: Keep-Alive\r\n", True), (b"1.0", b"Connection: close\r\n", False),
    ],
)  # fmt: skip
def test_keep_alive_follows_version_and_connection(read_inbound, version, connection, keep_alive):
    """(case 9)"""
    message = read_inbound(get(version=b"HTTP/" + version, fields=b"Host: x\r\n" + connection))[0]
    assert (message["keep_alive"], message["http10"]) == (keep_alive, version == b"1.0")


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"//v1//models", b"//v1//models", b""), (b"/v1/models/", b"/v1/models/", b""),
        (b"/v1/models?x=1?y", b"/v1/models", b"x=1?y"),
        (b"/%2e%2e/a", b"/%2e%2e/a", b""), (b"http://x/v1/models?a=b", b"/v1/models", b"a=b"), (b"HTTP://X", b"/", b""),
        (b"http://x?q", b"/", b"q"), (b"/a:b@c", b"/a:b@c", b""),
    ],
)  # fmt: skip
def test_path_and_query_are_taken_from_the_target_raw(read_inbound, target, path, query):
    """(case 9)"""
    message = read_inbound(get(target))[0]
    assert (message["target"], message["path"], message["query"]) == (target, path, query)


def test_options_of_the_whole_server_and_head(read_inbound):
    """(case 9)"""
    assert read_inbound(get(b"*", method=b"OPTIONS"))[0]["path"] == b"*"
    assert read_inbound(get(b"/health", method=b"HEAD"))[0]["method"] == b"HEAD"


REFUSED = {
    "bare LF lines": (b"GET / HTTP/1.1\nHost: x\n\n", 400),
    "one bare LF": (b"GET / HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", 400),
    "bare CR": (get(fields=b"Host: x\r\nA: b\rc\r\n"), 400),
    "NUL": (get(fields=b"Host: x\r\nA: b\x00\r\n"), 400),
    "obs-fold": (get(fields=b"Host: x\r\nA: b\r\n c\r\n"), 400),
    "fold first": (get(fields=b" a: b\r\nHost: x\r\n"), 400),
    "space before colon": (get(fields=b"Host : x\r\n"), 400),
    "no colon": (get(fields=b"Host: x\r\nnothing\r\n"), 400),
    "empty name": (get(fields=b"Host: x\r\n: v\r\n"), 400),
    "no host": (get(fields=b""), 400),
    "endless Connection": (get(fields=b"Host: x\r\nConnection: " + b"a," * 1000 + b"\r\n"), 400),
    "endless coding": (get(fields=b"Host: x\r\nTransfer-Encoding: " + b"a," * 1000 + b"\r\n"), 400),
    "two hosts": (get(fields=b"Host: x\r\nHost: x\r\n"), 400),
    "odd host": (get(fields=b"Host: x/y\r\n"), 400),
    "host with user": (get(fields=b"Host: u@x\r\n"), 400),
    "other authority": (get(b"http://y/"), 400),
    "other scheme": (get(b"ftp://x/"), 400),
    "no slash": (get(b"v1"), 400),
    "asterisk for GET": (get(b"*"), 400),
    "target with a tab": (get(b"/\ta"), 400),
    "8-bit target": (get(b"/\xe4"), 400),
    "two blanks": (b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no version": (b"GET /\r\nHost: x\r\n\r\n", 400),
    "version 1.2": (get(version=b"HTTP/1.2"), 400),
    "version 2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "lower-case version": (get(version=b"http/1.1"), 400),
    "lower-case method": (get(method=b"get"), 501),
    "connect": (get(b"x:443", method=b"CONNECT"), 501),
    "trace": (get(method=b"TRACE"), 501),
    "blank line first": (b"\r\n" + get(), 400),
    "TLS hello": (b"\x16\x03\x01\x02\x00", 400),
    "chunked in 1.0": (get(version=b"HTTP/1.0", fields=b"Transfer-Encoding: chunked\r\n"), 400),
    "extension over its bound": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"e" * 300 + b"\r\na\r\n0\r\n\r\n", 400),
    "LF in a chunk line": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n", 400),
    "sign in a chunk size": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n+1\r\na\r\n0\r\n\r\n", 400),
    "0x in a chunk size": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n", 400),
    "endless chunk size": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 300 + b"1\r\na\r\n0\r\n\r\n", 400),
    "folded trailer": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n0\r\na: b\r\n c\r\n\r\n", 400),
    "LF in trailers": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n0\r\na: b\n\r\n\r\n", 400),
    "endless trailers": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 7000, 431),
    "many trailers": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 1000 + b"\r\n", 431),
    "1000 fields": (get(fields=b"Host: x\r\n" + b"".join(b"A%d: b\r\n" % i for i in range(1000))), 431),
    "64 KiB line": (get(fields=b"Host: x\r\nA: " + b"a" * 65536 + b"\r\n"), 431),
    "10 KB target": (get(b"/" + b"a" * 10240), 414),
    "endless request line": (b"GET /" + b"a" * 9000, 414),
    "body over its bound": (CHAT + b"Content-Length: 33554433\r\n\r\n", 413),
    "length of 25 digits": (CHAT + b"Content-Length: 1000000000000000000000000\r\n\r\n", 413),
    "chunk over the bound": (CHAT + b"Transfer-Encoding: chunked\r\n\r\n2000001\r\n", 413),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("behind", [b"", NEXT])
def test_what_is_refused_and_with_which_status(read_inbound, name, behind):
    """(case 9)"""
    data, status = REFUSED[name]
    assert_refused(read_inbound(data + behind), status)


def test_a_counted_body_over_its_bound_is_refused(read_inbound):
    limits = Limits(max_body_bytes=10)
    chunks = b"".join(b"1\r\na\r\n" for _ in range(11)) + b"0\r\n\r\n"
    assert_refused(read_inbound(CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, limits), 413)
    at_bound = read_inbound(CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + chunks.replace(b"1\r\na\r\n", b"", 1), limits)
    assert at_bound[0]["body"] == b"a" * 10


def test_a_head_exactly_at_its_bound_is_read(read_inbound):
    data = get(fields=b"Host: x\r\nA: " + b"a" * 30 + b"\r\n")
    assert len(read_inbound(data, Limits(max_head_bytes=len(data)))) == 2
    assert read_inbound(data, Limits(max_head_bytes=len(data) - 1)) == [("refused", 431)]


@pytest.mark.parametrize("data", [b"GET / HT", get()[:-2], CHAT + b"Content-Length: 5\r\n\r\nhell"])
def test_end_of_input_inside_a_request_is_a_refusal(read_inbound, data):
    assert_refused(read_inbound(data, eof=True), 400)


def test_end_of_input_between_requests_is_eof():
    parser = Inbound(Limits())
    assert parser.at_boundary and parser.next_event() is NEED_DATA
    parser.receive(get())
    assert type(parser.next_event()) is Request
    parser.receive_eof()
    assert parser.next_event() is NEED_DATA
    parser.start_next()
    assert parser.next_event() is EOF


def test_nothing_comes_out_after_a_refusal_and_nothing_is_held():
    parser = Inbound(Limits())
    parser.receive(b"nonsense\r\n\r\n" + NEXT)
    assert type(parser.next_event()) is Refusal
    parser.receive(NEXT * 100)
    assert parser.next_event() is NEED_DATA and parser.buffered == 0


def test_a_body_in_many_segments_is_handed_on_and_not_held():
    parser = Inbound(Limits())
    parser.receive(CHAT + b"Content-Length: 300000\r\n\r\nfirst")
    request = parser.next_event()
    assert request.body is None and request.content_length == 300000
    assert parser.buffered == 5 and parser.next_event().data == b"first"
    segment = b"s" * 1000
    for _ in range(299):
        parser.receive(segment)
        event = parser.next_event()
        assert type(event) is BodyData and event.data is segment  # not copied
        assert parser.buffered == 0 and parser.next_event() is NEED_DATA
    parser.receive(b"s" * 995 + NEXT)
    assert len(parser.next_event().data) == 995
    assert type(parser.next_event()) is EndOfBody and parser.next_event() is PAUSED


def test_many_tiny_chunks_come_out_in_bounded_portions():
    """A segment full of one-byte chunks must not hold the loop for long in one call."""
    parser = Inbound(Limits())
    parser.receive(CHAT + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 5000 + b"0\r\n\r\n")
    assert parser.next_event().body is None
    sizes = []
    while type(event := parser.next_event()) is BodyData:
        sizes.append(len(event.data))
    assert type(event) is EndOfBody and sum(sizes) == 5000 and max(sizes) <= 32


def test_start_next_out_of_turn_is_the_callers_fault():
    parser = Inbound(Limits())
    with pytest.raises(RuntimeError):
        parser.start_next()
