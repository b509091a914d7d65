"""The routing scan in C agrees with the reader in Python on every body that it judges, and judges the common ones."""

from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.errors import InvalidRequest
from laya.schema.fields import read_in_python, read_routing

native_routing = pytest.importorskip("laya.schema.native_routing", reason="built without a C compiler: apt install gcc")
scan = native_routing.scan

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
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(),
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


def differences(seconds: float, seed: int) -> tuple[int, int]:
    """(bodies tried, bodies judged) by mutation; fails on the first on which the two disagree."""
    chance = random.Random(seed)
    tried = judged = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        body = bytearray(chance.choice(JUDGED + LEFT)[:400])
        for _ in range(chance.randrange(1, 5)):
            at = chance.randrange(len(body) + 1)
            body[at : at + chance.randrange(4) * chance.randrange(2)] = chance.choice(MARKS)
        body = bytes(body)
        found = scan(body)
        tried += 1
        judged += found is not None
        assert found is None or found == in_python(body), (seed, body)
    return tried, judged


def test_mutated_bodies_are_read_alike():
    tried, judged = differences(4, 7)
    assert tried > 1000 and judged > 50, "the fuzz must reach what the scan judges"
