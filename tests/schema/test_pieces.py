"""Large bodies read in pieces: the same members as msgspec finds in one go, whatever the pieces' size, or the same refusal."""

from __future__ import annotations

import json
import random

import msgspec
import pytest

from laya.errors import InvalidRequest
from laya.schema import pieces
from laya.schema.codec import decode_members
from laya.schema.fields import READ_ON_LOOP, read_routing

ROUNDS = 4000  # some seconds
LEAVES = [
    b"1", b"-0.5e+3", b"true", b"null", b'"a"', b'"\\n\\u00e9"', b'"\\ud83d\\ude00"', '"é😀"'.encode(), b'""', b'"\\""',
    b'"\\\\"', b'"' + b"x" * 70 + b'"', b"[]", b"{}", b"{ }", b"[\n]",
]  # fmt: skip
KEYS = [b'"k"', b'"a"', b'"model"', b'"\\u0061"']
BREAKS = [b'"', b"\\", b",", b"}", b"{", b"[", b"]", b":", b"\x00", b" ", b"\\u", b"\\ud800", b"0", b"-", b"\xff", b"e", b"\x7f"]


def value(rng: random.Random, depth: int) -> bytes:
    kind = rng.random()
    if not depth or kind < 0.5:
        return rng.choice(LEAVES)

    def blank() -> bytes:
        return rng.choice([b"", b"", b" ", b"\n\t"])

    items = range(rng.randint(0, 6))
    if kind < 0.75:
        return b"[" + b",".join(blank() + value(rng, depth - 1) + blank() for _ in items) + b"]"
    members = (blank() + rng.choice(KEYS) + blank() + b":" + blank() + value(rng, depth - 1) + blank() for _ in items)
    return b"{" + b",".join(members) + b"}"


def body(rng: random.Random) -> bytes:
    found = b"{" + b",".join(b'"k%d":%b' % (rng.randint(0, 3), value(rng, 4)) for _ in range(rng.randint(0, 5))) + b"}"
    if rng.random() < 0.4:
        return found
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(found) + 1)
        found = found[:at] + rng.choice([b"", *BREAKS]) + found[at + rng.randint(0, 2) :]
    return found


def by_msgspec(data: bytes) -> dict[str, bytes] | None:
    try:
        return {key: bytes(raw) for key, raw in decode_members(data).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def in_pieces(data: bytes) -> dict[str, bytes] | None:
    try:
        return {msgspec.json.decode(data[a:b]): data[c:d] for (a, b), (c, d) in pieces.spans_in_python(data)}
    except (InvalidRequest, msgspec.DecodeError, UnicodeDecodeError):
        return None


def test_pieces_of_any_size_give_what_msgspec_gives(monkeypatch):
    """(case 31) Repeated keys, escapes, surrogates, wrong UTF-8, blanks, broken structure."""
    monkeypatch.setattr(pieces._Reader, "_rest", lambda self: None)
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    valid = 0
    for _ in range(ROUNDS):
        piece = rng.choice([24, 40, 64, 200, 65536])
        monkeypatch.setattr(pieces, "PIECE", piece)
        monkeypatch.setattr(pieces, "TEXT_PIECE", rng.choice([14, 30, 16384]))
        monkeypatch.setattr(pieces, "_WINDOWS", (piece, max(8, piece // 16)))
        monkeypatch.setattr(pieces, "TRY_AGAIN", rng.choice([1, 20, 2048]))
        data = body(rng)
        expected = by_msgspec(data)
        assert in_pieces(data) == expected, f"seed {seed}: {data!r}"
        valid += expected is not None
    assert ROUNDS * 0.2 < valid < ROUNDS * 0.9  # both kinds were tried


LARGE = READ_ON_LOOP + 1
SHAPES = {
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "A" * LARGE}}]}]},
    "a talk": {"messages": [{"role": "user", "content": 'He said "no"\n\té😀. ' * 20} for _ in range(200)]},
    "many numbers": {"input": list(range(LARGE // 4))},
    "deep trees": {"input": [[[[["a", 1], [{}]], [[2]]], {"b": [[3]]}]] * (LARGE // 30)},
}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_large_body_reads_as_a_small_one(shape, indent):
    data = json.dumps({"model": "m", **SHAPES[shape], "stream": True}, indent=indent, ensure_ascii=shape != "a talk").encode()
    assert len(data) > READ_ON_LOOP
    fields = read_routing(data)
    assert (fields.model, fields.stream) == ("m", True)
    assert {key: bytes(raw) for key, raw in fields.members.items()} == by_msgspec(data)


FILLER = b'"input":"' + b"x" * LARGE + b'"'
REFUSED = {
    "model twice": b'{"model":"a","model":"b",%b}',
    "model in capitals": b'{"Model":"a",%b}',
    "model spelled with escapes": b'{"\\u006dodel":"a",%b}',
    "model is a number": b'{"model":1,%b}',
    "a name of megabytes": b'{"model":"' + b"m" * LARGE + b'",%b}',
    "no object": b"[%b]",
    "not ended": b'{"model":"a",%b',
    "more behind": b'{"model":"a",%b}}',
    "a comma too many": b'{"model":"a",%b,}',
    "a control byte": b'{"model":"a",%b,"b":"\x01"}',
    "too many members": b"{%b" + b"".join(b',"%d":1' % i for i in range(pieces.MAX_MEMBERS + 1)) + b"}",
    "too deep": b'{"model":"a",%b,"b":' + b"[" * 2000 + b"]" * 2000 + b"}",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_of_a_large_body(case):
    with pytest.raises(InvalidRequest):
        read_routing(REFUSED[case].replace(b"%b", FILLER))


def test_a_body_of_nothing_but_structure_ends_in_bounded_work(monkeypatch):
    monkeypatch.setattr(pieces, "MAX_STEPS", 1000)
    tree = b"[" + b"[1]," * 30 + b"1]"  # the last commas of a piece are always those inside: no run is found
    with pytest.raises(InvalidRequest, match="too many and too small"):
        pieces.spans_in_python(b'{"a":[' + (tree + b" ,") * 3000 + b"1]}")
