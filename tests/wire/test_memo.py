"""What the parsers remember of lines and heads: never more than equal bytes prove, and never without bound."""

from __future__ import annotations

from laya.wire import fast, recall
from laya.wire.inbound import Inbound
from laya.wire.messages import Limits, Refusal, Request
from laya.wire.outbound import Outbound

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"


def get(fields):
    return b"GET / HTTP/1.1\r\n" + fields + b"\r\n"


def test_the_same_head_with_another_length_is_read_anew_each_time():
    limits = Limits(max_body_bytes=1000)
    for length in (5, 7, 0, 5, 1000):
        parser = Inbound(limits)
        parser.receive(CHAT + b"Content-Length: %d\r\nX-A: b\r\n\r\n" % length + b"b" * length)
        request = parser.next_event()
        assert (request.content_length, request.body) == (length, b"b" * length)
        assert request.headers == [(b"host", b"x"), (b"content-length", b"%d" % length), (b"x-a", b"b")]
    assert len(limits.request_heads) == 1
    for digits in (b"1001", b"+5", b"5, 5", b""):
        parser = Inbound(limits)
        parser.receive(CHAT + b"Content-Length: " + digits + b"\r\nX-A: b\r\n\r\n")
        assert type(parser.next_event()) is Refusal


def test_what_a_caller_derives_from_a_head_is_kept_with_it():
    limits = Limits()
    for turn in range(3):
        parser = Inbound(limits)
        parser.receive(CHAT + b"Content-Length: %d\r\n\r\n" % turn)
        memo = parser.next_event().memo
        assert memo.plan == (turn or None)
        memo.plan = turn + 1


def test_lines_and_heads_that_change_with_each_message_are_not_kept():
    fast.forget()
    limits = Limits()
    parser = Inbound(limits)
    parser.receive(get(fields=b"Host: x\r\nX-Request-Id: unique\r\n"))
    assert parser.next_event().fields[b"x-request-id"] == b"unique"
    assert b"Host: x" in fast.REQUEST_FIELDS and b"X-Request-Id: unique" not in fast.REQUEST_FIELDS
    assert not limits.request_heads


def test_the_memos_are_bounded():
    limits = Limits()
    for number in range(3 * fast.MEMO_LINES):
        parser = Inbound(limits)
        parser.receive(get(fields=b"Host: x\r\nX-Unique: %d\r\n" % number))
        assert parser.next_event().fields[b"x-unique"] == b"%d" % number
    assert len(fast.REQUEST_FIELDS) <= fast.MEMO_LINES
    assert len(limits.request_heads) <= recall.HEADS_KEPT


def test_a_remembered_response_head_never_answers_for_another_method():
    limits = Limits()
    parser = Outbound(limits)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    for method, sent, body in ((b"HEAD", head, b""), (b"GET", head + b"hello", b"hello"), (b"HEAD", head, b"")):
        parser.expect(method)
        parser.receive(sent)
        assert parser.next_event().body == body and parser.reusable


def test_a_head_is_judged_by_the_limits_of_its_own_connection():
    data = CHAT + b"Content-Length: 10\r\n\r\n" + b"b" * 10
    for limits, accepted in ((Limits(), True), (Limits(max_body_bytes=9), False), (Limits(max_headers=1), False)):
        for _ in range(2):
            parser = Inbound(limits)
            parser.receive(data)
            assert (type(parser.next_event()) is not Refusal) is accepted


def test_an_unfinished_head_is_never_taken_whole():
    """Found by the hour-long fuzz: without its blank line, a head of just the right size passed for a message of its own bytes."""
    limits = Limits()
    known = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    parser = Inbound(limits)
    parser.receive(known)
    assert type(parser.next_event()) is Request
    unfinished = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 61\r"
    assert recall.whole(known, limits.request_heads, limits.max_head_bytes, limits.max_body_bytes) is not None
    assert recall.whole(unfinished, limits.request_heads, limits.max_head_bytes, limits.max_body_bytes) is None
    assert Inbound(limits).take_whole(unfinished) is None
