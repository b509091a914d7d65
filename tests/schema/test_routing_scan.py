"""The routing scan in C agrees with the reader in Python on every body that it judges, and judges the common ones."""

from __future__ import annotations

import json
import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.errors import InvalidRequest
from laya.schema.fields import read_in_python, read_routing
from laya.schema.pieces import MAX_KEY_BYTES, MAX_MEMBERS, member_spans, spans_in_python

native_routing = pytest.importorskip("laya.schema.native_routing", reason="built without a C compiler: apt install gcc")
scan, spans = native_routing.scan, native_routing.spans

JUDGED = [
    b'{"model":"m"}', b' {"model" : "m" , "stream" : true}\r\n\t', b'{"stream":null,"model":"m"}', b'{"stream":false,"model":""}',
    b'{"model":"m","x":{"model":"n","Model":1}}', b'{"model":"m","x":"\\"model\\""}', b'{"model":"m","x":"\\ud83d\\ude00 \\u00e9"}',
    '{"model":"m","x":"é 😀"}'.encode(), b'{"model":"m","x":"\xff"}', b'{"model":"m","x":[-0.5e+10,0,1E2,true,false,null,[],{}]}',
    b'{"model":"m","x":' + b"[" * 60 + b"]" * 60 + b"}", b'{"model":"' + b"n" * 512 + b'"}', b'{"streams":1,"models":2,"model":"m"}',
    b'{"model":"m","x":"' + b"a" * 70_000 + b'"}', b'{"model":"m","x":"\x7f"}', b'{"model":"m","STREAM":1}',
]  # fmt: skip
LEFT = [
    b"", b"{}", b"[]", b'"model"', b'{"model":1}', b'{"model":null}', b'{"model":"m"', b'{"model":"m"}x', b'{"model":"m",}',
    b'{"model":"m","model":"m"}', b'{"model":"m","Model":"m"}', b'{"MODEL":"m"}', b'{"m\\u006fdel":"m"}', b'{"model":"\\u006d"}',
    '{"model":"é"}'.encode(), b'{"model":"m","stream":1}', b'{"model":"m","stream":true,"stream":true}', b'{"model":"m","x":01}',
    b'{"model":"m","x":1.}', b'{"model":"m","x":.5}', b'{"model":"m","x":+1}', b'{"model":"m","x":1e}', b'{"model":"m","x":-}',
    b'{"model":"m","x":"\n"}', b'{"model":"m","x":"\\x"}', b'{"model":"m","x":"\\u12"}', b'{"model":"m","x":"\\ud800"}',
    b'{"model":"m","x":"\\udc00"}', b'{"model":"m","x":"\\ud800\\ud800"}', b'{"model":"m","x":tru}', b'{"model":"m","x":[1,]}',
    b'{"model":"m","x":[1 2]}', b'{"model":"m" "x":1}', b'{"model":"m","x"}', b'{"model":"m",x:1}', b"\xef\xbb\xbf" + b'{"model":"m"}',
    b'{"model":"m","x":' + b"[" * 70 + b"]" * 70 + b"}", b'{"model":"' + b"n" * 513 + b'"}', b'{"model":"m","\xff":1}', b'{"model":"m","x":}',
    b'{"model":"m","x":"', b'{"model":"m","x":"\\', b'{"model":"m","x":"\\u', b"{", b'{"', b'{"model', b'{"model"', b'{"model":', b'{"model":"',
]  # fmt: skip


def in_python(body: bytes):
    try:
        fields = read_in_python(body)
    except InvalidRequest:
        return None
    return fields.model, fields.stream


@pytest.mark.parametrize("body", JUDGED)
def test_the_common_body_is_judged_and_both_agree(body):
    assert scan(body) == in_python(body) is not None


@pytest.mark.parametrize("body", LEFT)
def test_what_is_odd_is_left_to_python(body):
    assert scan(body) is None


@pytest.mark.parametrize("body", JUDGED + LEFT)
def test_a_body_ends_as_it_would_without_c(body):
    assert told(read_routing, body) == told(read_in_python, body)


@pytest.mark.parametrize("lost", [b'{"model":1}', b'"\\u006d"'])
def test_only_c_sees_that_a_lost_value_is_no_second_model(lost):
    """The one difference: Python is on the safe side."""
    body = b'{"model":"m","x":' + lost + b',"x":2}'
    assert scan(body) == ("m", None) and in_python(body) is None
    once = body.replace(b',"x":2', b"")
    assert scan(once) == in_python(once) == ("m", None)


def told(read, body: bytes):
    """What comes of a body, in words where it is refused."""
    try:
        fields = read(body)
        return fields.model, fields.stream, list(fields.members)
    except InvalidRequest as refused:
        return str(refused)


def test_what_is_not_bytes_is_a_type_error():
    with pytest.raises(TypeError):
        scan('{"model":"m"}')


values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.text(max_size=8), values, max_size=5), st.text(max_size=20), st.booleans(), st.booleans(), st.booleans())
def test_bodies_of_encoders_are_read_alike(members, model, stream, ascii_only, spaced):
    body = {**members, "model": model, "stream": stream}
    separators = (", ", ": ") if spaced else (",", ":")
    data = json.dumps(body, ensure_ascii=ascii_only, separators=separators).encode("utf-8", "replace")
    found = scan(data)
    assert found is None or found == in_python(data)
    if model.isascii() and "\\" not in json.dumps(model) and all(key.isascii() and key.isalnum() for key in members):
        assert found is not None or any(key.lower() == "model" for key in members if key != "model")


MARKS = [
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"model", b"Model", b"stream", b"true", b"null", b"0", b"-", b"e", b".", b"\\u",
    b"\\ud83d", b"\x00", b"\x1f", b"\x80", b"\xff", b" ", b"\n", b'"model":"x"', b'"stream":false,', b"\\u006", b"1e5",
]  # fmt: skip


def mutated(chance: random.Random) -> bytes:
    body = bytearray(chance.choice(JUDGED + LEFT)[:400])
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(body) + 1)
        body[at : at + chance.randrange(4) * chance.randrange(2)] = chance.choice(MARKS)
    return bytes(body)


def test_mutated_bodies_are_read_alike():
    chance, judged = random.Random(7), 0
    until = time.monotonic() + 4
    while time.monotonic() < until:
        body = mutated(chance)
        found = scan(body)
        judged += found is not None
        assert found is None or found == in_python(body), body
    assert judged > 50, "the fuzz must reach what the scan judges"


def spans_or_none(body: bytes):
    try:
        return spans_in_python(body)
    except (InvalidRequest, msgspec.DecodeError, RecursionError):
        return None


@pytest.mark.parametrize("body", JUDGED + LEFT)
def test_members_are_found_where_python_finds_them(body):
    found = spans(body, MAX_MEMBERS, MAX_KEY_BYTES)
    assert found is None or found == spans_or_none(body)
    assert found is not None or body not in JUDGED


@pytest.mark.parametrize("body", [
    b'{"a":1}', b' { "a\\u0062" : [1, {"x": 2}] , "a" : "\xc3\xa9" }\n', b"{" + b",".join(b'"k%d":%d' % (n, n) for n in range(1024)) + b"}",
    b'{"' + b"k" * 1022 + b'":1}',
])  # fmt: skip
def test_any_keys_are_found(body):
    assert spans(body, MAX_MEMBERS, MAX_KEY_BYTES) == spans_in_python(body)


def test_too_many_members_and_too_long_keys_are_left_to_python():
    many = b"{" + b",".join(b'"k%d":%d' % (n, n) for n in range(1025)) + b"}"
    for body in (many, b'{"' + b"k" * 1023 + b'":1}', b"{}", b"[]"):
        assert spans(body, MAX_MEMBERS, MAX_KEY_BYTES) is None
    with pytest.raises(InvalidRequest):
        member_spans(many)
    for wrong in ((), (b"{}",), ("{}", 1, 1), (b"{}", "1", 1)):
        with pytest.raises(TypeError):
            spans(*wrong)
    for most in (-1, 4097):
        with pytest.raises(ValueError):
            spans(b"{}", most, 1)


def test_members_of_mutated_bodies_are_found_alike():
    chance, found = random.Random(3), 0
    until = time.monotonic() + 3
    while time.monotonic() < until:
        body = mutated(chance)
        here = spans(body, MAX_MEMBERS, MAX_KEY_BYTES)
        found += here is not None
        assert here is None or here == spans_or_none(body), body
    assert found > 50


def test_a_large_body_is_renamed_in_pieces():
    body = b'{ "stream" : true, "model" : "mine" , "messages": [{"role":"user","content":"' + b"a" * 60_000 + b'"}]}'
    pieces = read_routing(body).renamed("th\u00e9irs")
    assert isinstance(pieces, tuple) and b"".join(pieces) == body.replace(b'"mine"', '"th\u00e9irs"'.encode())
    small = read_routing(b'{"model":"mine","n":1}').renamed("theirs")
    assert json.loads(small) == {"model": "theirs", "n": 1}


GOOD = [b"\\\\", b'\\"', b"\\n", b"\\/", b"\\t", b"\\b", b"\\f", b"\\r", b"\\u00e9", b"\\ud83d\\ude00", "é".encode(), b"\x7f", b"\\\\\\\\"]
BAD = [b"\\x", b"\n", b"\\ud800", b"\\\n", b"\\u12", b"\\\xe9", b"\x00", b"\\N"]


def test_long_strings_end_where_they_end_wherever_their_escapes_lie():
    """They are read in blocks: escapes, runs of backslashes and what is forbidden, at and across every border of these."""
    chance = random.Random(11)
    judged = 0
    for _ in range(40_000):
        pieces = [b"a" * chance.randrange(chance.choice((3, 70, 200))) for _ in range(chance.randrange(1, 8))]
        for _ in range(chance.randrange(12)):
            pieces.insert(chance.randrange(len(pieces) + 1), chance.choice(GOOD))
        bad = chance.random() < 0.3
        if bad:
            pieces.insert(chance.randrange(len(pieces) + 1), chance.choice(BAD))
        text = b"".join(pieces)
        tail = chance.choice([b"}", b',"stream":true}', b',"y":"' + b"b" * 200 + b'"}'])
        found = scan(b'{"model":"m","x":"' + text + b'"' + tail)
        if not bad:
            judged += 1
            assert found == ("m", True if b"stream" in tail else None), text
        else:  # a piece that is bad alone may be good behind a backslash that belongs to it
            assert found is None or found == in_python(b'{"model":"m","x":"' + text + b'"' + tail), text
        assert scan(b'{"model":"m","x":"' + text) is None
    assert judged > 20_000


def test_a_long_key_with_an_escape_is_left_to_python():
    for before in (0, 63, 64, 127, 128, 200):
        key = b"k" * before + b"\\u006d" + b"k" * 200
        assert scan(b'{"model":"m","' + key + b'":1}') is None
        assert scan(b'{"model":"m","' + b"k" * before + "é".encode() + b"k" * 200 + b'":1}') is None
        assert scan(b'{"model":"m","' + b"k" * before + b'":1}') == ("m", None)
