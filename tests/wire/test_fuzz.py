"""The differential fuzz in short form, and the proof that it can find something: planted bugs must be found."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fuzz_wire
from laya.wire import chunked, fast, recall

SECONDS_TO_FIND = 30  # each is found within a second or two; the bound is for a busy machine


@pytest.fixture
def plant(monkeypatch):
    """Replace one function of the fast parser, with the memos emptied before and after."""

    def forget():
        fast.forget()
        for limits in (fuzz_wire.ROOMY, fuzz_wire.TIGHT):
            limits.request_heads.clear()
            limits.response_heads.clear()

    def put(module, name, replacement):
        monkeypatch.setattr(module, name, replacement)
        forget()

    yield put
    monkeypatch.undo()
    forget()


def _number_of_int(value):
    try:
        return int(value)
    except ValueError:
        raise fast.Odd from None


def _lines_ended_by_lf(head):
    return [line.removesuffix(b"\r") for line in head.split(b"\n")]


def _field_with_blank_before_colon(line):
    name, _, value = line.partition(b":")
    return _split_field(name.rstrip(b" ") + b":" + value)


def _last_of_two_wins(lines, memo):
    return dict(map(memo.__getitem__, lines)), None


def _body_one_short(buffer, start, length):
    body = _cut_body(buffer, start, length)
    return body[:-1] if body else body


def _size_of_int(line):
    try:
        return int(line, 16)
    except ValueError:
        return None


def _any_number_is_the_length(buffer, key, digits, message):
    return digits is None or b"content-length" in message.fields


def _whole_one_short(data, heads, max_head_bytes, max_body_bytes):
    found = _whole(data, heads, max_head_bytes, max_body_bytes)
    return found and (found[0], found[1][:-1], found[2])


def _piece_one_short(body, data):
    found = _one(body, data)
    return found and found[:-1]


_one = chunked.ChunkedBody.one
_whole = recall.whole
_split_field = fast.split_field
_cut_body = fast.cut_body

PLANTED = {
    "lenient digits in Content-Length": (fast, "plain_number", _number_of_int),
    "LF as line end": (fast, "head_lines", _lines_ended_by_lf),
    "space before the colon": (fast, "split_field", _field_with_blank_before_colon),
    "last of two lengths wins": (fast, "fields_of", _last_of_two_wins),
    "body one byte short": (fast, "cut_body", _body_one_short),
    "a chunk in a segment of its own one byte short": (chunked.ChunkedBody, "one", _piece_one_short),
    "lenient digits in a chunk size": (chunked, "chunk_size", _size_of_int),
    "body one byte short when taken whole": (recall, "whole", _whole_one_short),
    "the wrong number of a remembered head may change": (recall, "_keeps", _any_number_is_the_length),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(plant, bug):
    """(case 3)"""
    plant(*PLANTED[bug])
    report = fuzz_wire.run(SECONDS_TO_FIND, seed=20)
    assert report.failure is not None, f"seed {report.seed} did not find {bug!r} in {report.counts['cases']} cases"
    assert fuzz_wire.difference(report.failure)  # what was shrunk still shows it


def test_without_a_planted_bug_nothing_is_found():
    seed = random.randrange(2**32)
    report = fuzz_wire.run(3, seed)
    assert report.failure is None, f"seed {seed}: {report.failure}\n{report.detail}"
    assert report.counts["messages read whole"] > 20, f"seed {seed}: {report.counts}"


def test_the_fuzz_reads_many_messages_with_the_fast_parser(plant):
    served, parsed = [], []
    for served_by, module in ((served, recall), (parsed, fast)):
        for name in ("read_request", "read_response"):
            plant(module, name, _counting(served_by, getattr(module, name)))
    assert fuzz_wire.run(2, seed=3).failure is None
    assert served.count(True) > len(served) * 0.2 > 10
    remembered = served.count(True) - parsed.count(True)
    assert remembered > served.count(True) * 0.2


def _counting(served, read):
    def counted(*arguments):
        message = read(*arguments)
        served.append(message is not None)
        return message

    return counted


names = st.sampled_from([b"a", b"host", b"Content-Length", b"Transfer-Encoding", b"Connection", b"x y", b"", b"Expect"])
values = st.sampled_from([b"5", b"x", b"chunked", b"close", b"+5", b"", b"100-continue"]) | st.binary(max_size=6)
colons = st.sampled_from([b": ", b":", b" : ", b":\t", b""])
fields = st.lists(st.tuples(names, colons, values).map(b"".join), max_size=6)
ends = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n"])
starts = st.sampled_from(fuzz_wire.REQUEST_LINES[:6] + fuzz_wire.STATUS_LINES[:8])
chunks = st.sampled_from([b"5\r\nhello\r\n0\r\n\r\n", b"5\r\nhello\r\n0\r\nx: y\r\n\r\n", b"5 ;a\r\nhello\r\n"])
bodies = st.sampled_from([b"", b"hello"]) | chunks | st.binary(max_size=20)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.booleans(), starts, fields, ends, bodies, st.lists(st.integers(0, 200), max_size=5), st.booleans())
def test_any_head_reads_alike_whichever_parser_reads(requests, start, lines, end, body, cuts, eof):
    data = end.join([start, *lines, b"Host: x", b"", b""]) + body
    case = fuzz_wire.Case(requests, [data], sorted(cuts), fuzz_wire.ROOMY, [b"POST"], eof)
    assert fuzz_wire.difference(case) is None
