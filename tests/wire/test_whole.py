"""`recall.whole` in C and in Python recognise the same messages."""

from __future__ import annotations

import random
import time

import pytest

from laya.wire import recall
from laya.wire.messages import Limits, Request, Response

native_whole = pytest.importorskip("laya.wire.native_whole", reason="built without a C compiler: apt install gcc")

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
HEADS = [
    POST, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nx-a: 1\r\n\r\n{}",
    b"POST / HTTP/1.1\r\nHost: x\r\nX-Strength: 5\r\nContent-Length: 3\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: 12\r\nhost: x\r\n\r\n" + b"x" * 12,
]  # fmt: skip
ANSWERS = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 7\r\n\r\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def limits() -> Limits:
    """With every head above remembered."""
    limits = Limits(max_head_bytes=400, max_body_bytes=64)
    for data in HEADS:
        assert type(recall.read_request(data, data.find(b"\r\n\r\n"), limits)) is Request
    for data in ANSWERS:
        assert type(recall.read_response(data, data.find(b"\r\n\r\n"), limits, b"POST")) is Response
    return limits


def both(data: bytes, heads: dict, head: int = 400, body: int = 64):
    found = native_whole.whole(data, heads, head, body)
    expected = recall.whole_in_python(data, heads, head, body)
    assert found == expected and (found is None or found[0] is expected[0]), data
    return found


@pytest.mark.parametrize("data", HEADS + ANSWERS)
def test_a_known_head_is_recognised_or_not_by_both(limits, data):
    heads = limits.request_heads if data in HEADS else limits.response_heads
    found = both(data, heads)
    # Not kept: a name that looks like the length's. Not whole: a chunked body. Not by length: a status without a body.
    assert (found is not None) == (b"Strength" not in data and b"chunked" not in data and b"304" not in data)
    for cut in range(len(data)):
        assert both(data[:cut], heads) is None or data[:cut].endswith(b"\r\n\r\n")
    for other in (data + b"x", data + data, data.replace(b" ", b"  ", 1), b"\r\n\r\n" + data):
        both(other, heads)


@pytest.mark.parametrize("digits", [b"", b"+5", b"05", b"5 ", b" 5", b"\xb2", b"-1", b"5\t", b"0x5", b"5_0", b"00000000005", b"99999999999", b"5\r"])
def test_odd_lengths_are_odd_to_both(limits, digits):
    both(POST.replace(b": 5", b": " + digits), limits.request_heads)


def test_bounds_hold_to_the_byte(limits):
    end = POST.find(b"\r\n\r\n")
    assert both(POST, limits.request_heads, head=end + 4) and both(POST, limits.request_heads, head=end + 3) is None
    assert both(POST, limits.request_heads, body=5) and both(POST, limits.request_heads, body=4) is None


def test_wrong_arguments_are_a_type_error(limits):
    for given in ((), (bytearray(POST), {}, 1, 1), (POST, [], 1, 1), (POST, {}, "1", 1), (POST, {}, 1)):
        with pytest.raises(TypeError):
            native_whole.whole(*given)


def test_mutated_messages_are_recognised_alike(limits):
    chance, tried, known = random.Random(11), 0, 0
    until = time.monotonic() + 3
    while time.monotonic() < until:
        data = bytearray(chance.choice(HEADS + ANSWERS))
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(data) + 1)
            mark = chance.choice([b"\r\n", b"\r\n\r\n", b"ength: ", b"5", b"0", b"\x00", b"\xff", b" ", b":", b"Content-Length: 5\r\n"])
            data[at : at + chance.randrange(4)] = mark
        tried += 1
        known += both(bytes(data), limits.request_heads) is not None
        known += both(bytes(data), limits.response_heads) is not None
    assert tried > 1000 and known > 50
