"""Event streams: every dialect, in any segmentation, with the raw bytes kept; and the watch on streams passed on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.errors import BadUpstream
from laya.wire import sse

DIALECTS = {
    "plain": (b'data: {"a":1}\n\ndata: [DONE]\n\n', [(None, b'{"a":1}'), (None, b"[DONE]")]),
    "no space": (b'data:{"a":1}\n\n', [(None, b'{"a":1}')]),
    "only one space goes": (b"data:  a \n\n", [(None, b" a ")]),
    "CR LF": (b"data: a\r\n\r\ndata: b\r\n\r\n", [(None, b"a"), (None, b"b")]),
    "CR": (b"data: a\r\rdata: b\r\r", [(None, b"a"), (None, b"b")]),
    "mixed ends": (b"data: a\r\n\ndata: b\n\r\ndata: c\r\n\r", [(None, b"a"), (None, b"b"), (None, b"c")]),
    "byte-order mark": (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", [(None, b"a")]),
    "event": (b"event: ping\ndata: {}\n\nevent:x\nevent:y\ndata:z\n\n", [(b"ping", b"{}"), (b"y", b"z")]),
    "comments": (b": OPENROUTER PROCESSING\n\n:\ndata: a\n: b\n\n", [(None, b"a")]),
    "lines of data": (b"data: a\ndata:\ndata: b\n\n", [(None, b"a\n\nb")]),
    "no colon": (b"data\n\n", [(None, b"")]),
    "empty data": (b"data:\n\n", [(None, b"")]),
    "unknown fields": (b"id: 1\nretry: 5\nfoo: x\ndata: a\n\n", [(None, b"a")]),
    "blanks behind DONE, twice, and more": (
        b"data: [DONE]  \n\ndata: [DONE]\n\ndata: x\n\n", [(None, b"[DONE]  "), (None, b"[DONE]"), (None, b"x")],
    ),
    "blank lines": (b"\n\n\r\n\rdata: a\n\n\n\n\n", [(None, b"a")]),
    "not ended": (b"data: a\n\ndata: b\n", [(None, b"a")]),
    "UTF-8": ("data: 你好🚀\n\n".encode(), [(None, "你好🚀".encode())]),
}  # fmt: skip


def events(frames):
    return [(event, data) for event, data, _ in frames if data is not None]


def raw(frames):
    return b"".join(frame[2] for frame in frames)


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("step", [1, 2, 3, 1000])
def test_every_dialect_in_segments_of_any_size(name, step):
    """(case 11, case 18)"""
    data, expected = DIALECTS[name]
    stream = sse.EventStream()
    frames = [frame for at in range(0, len(data), step) for frame in stream.feed(data[at : at + step])]
    assert events(frames) == expected
    rest = stream.finish()
    assert raw(frames) + (rest[2] if rest else b"") == data
    assert stream.at_boundary


def test_a_frame_is_out_as_soon_as_its_last_byte_is_in():
    for end in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        stream = sse.EventStream()
        assert stream.feed(b"data: a" + end[:-1]) == [] or end == b"\r\n\r\n"
        stream = sse.EventStream()
        assert events(stream.feed(b"data: a" + end)) == [(None, b"a")]


def test_what_follows_the_last_blank_line_can_be_asked_for():
    stream = sse.EventStream()
    stream.feed(b"data: a\n\ndata: [DONE]")
    assert not stream.at_boundary
    assert stream.finish() == (None, b"[DONE]", b"data: [DONE]")
    assert stream.finish() is None


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_an_event_over_its_bound_is_refused(step):
    at_bound = b"data: " + b"a" * 92 + b"\n\n"
    over = b"data: " + b"a" * 93 + b"\n\n"
    stream = sse.EventStream(max_event_bytes=100)
    assert len([frame for at in range(0, 100, step) for frame in stream.feed(at_bound[at : at + step])]) == 1
    stream = sse.EventStream(max_event_bytes=100)
    with pytest.raises(BadUpstream):
        for at in range(0, len(over), step):
            stream.feed(over[at : at + step])


def test_many_frames_in_one_segment_and_one_frame_in_many():
    stream = sse.EventStream()
    assert len(stream.feed(b"data: a\n\n" * 5000)) == 5000
    big = sse.frame(b"x" * 200_000)
    frames = [frame for at in range(0, len(big), 100) for frame in stream.feed(big[at : at + 100])]
    assert [len(data) for _, data in events(frames)] == [200_000]


texts = st.lists(st.sampled_from([b"data: a", b"data:", b"event: e", b": c", b"x", b"", b"data: [DONE]"]), max_size=8)
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(texts, ends, st.lists(st.integers(0, 80), max_size=6))
def test_segments_never_change_what_is_read(lines, end, cuts):
    data = b"".join(line + end for line in lines)
    whole = sse.EventStream()
    expected = events(whole.feed(data))
    stream = sse.EventStream()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    frames = [frame for a, b in zip(edges, edges[1:], strict=False) for frame in stream.feed(data[a:b])]
    assert events(frames) == expected
    rest = stream.finish()
    assert raw(frames) + (rest[2] if rest else b"") == data


@given(st.binary(max_size=40), st.sampled_from([None, b"message_start"]))
def test_a_frame_written_is_read_back(data, event):
    (frame,) = sse.EventStream().feed(sse.frame(data, event))
    assert frame[0] == event
    assert frame[1] == data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def test_an_event_name_with_a_line_end_is_refused():
    with pytest.raises(ValueError):
        sse.frame(b"x", b"a\ndata: y")


def test_constants_are_frames():
    stream = sse.EventStream()
    assert events(stream.feed(sse.COMMENT + sse.DONE)) == [(None, b"[DONE]")] and stream.at_boundary


STREAMS = {
    "ends well": (b'data: {"a":1}\n\ndata: [DONE]\n\n', True, True),
    "no space, blanks behind": (b"data: x\n\ndata:[DONE] \t\r\n\r\n", True, True),
    "bytes behind": (b"data: [DONE]\n\ndata: [DONE]\n\n: bye\n\n", True, True),
    "never done": (b"data: x\n\n", False, True),
    "cut in a frame": (b"data: x\n\ndata: {", False, False),
    "cut behind a line": (b"data: x\n\ndata: y\r\n", False, False),
    "done spoken of": (b"data: " + json.dumps("data: [DONE]").encode() + b"\n\n", False, True),
    "CR": (b"data: x\r\rdata: [DONE]\r\r", True, True),
    "with a mark": (b"\xef\xbb\xbfdata: [DONE]\n\n", True, True),
    "nothing": (b"", False, True),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_the_watch_sees_how_a_stream_ended(name, step):
    """(case 13, case 18)"""
    data, done, at_boundary = STREAMS[name]
    watch = sse.StreamWatch()
    for at in range(0, len(data), step):
        watch.see(data[at : at + step])
    assert (watch.done, watch.at_boundary) == (done, at_boundary)
