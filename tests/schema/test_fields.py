"""What routing reads of a body is what any other JSON parser reads, or the body is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.errors import InvalidRequest
from laya.schema.fields import SMALL, read_routing

# Spellings as they stand between the quotes; several mean `model`.
KEYS = ["model", "Model", "MODEL", r"mod\u0065l", r"\u006dodel", "messages", "stream_options", "x", "é", r"\u00e9", "modèle"]
values = st.sampled_from(
    ['"a"', '"b"', "null", "1", "[]", '{"model":"c"}', r'"say \"model\""', r'"\u0066"', '"' + "word " * 600 + '"', '["model"]', "true"]
)
spaces = st.sampled_from(["", "", " ", "\n ", "\t"])


@st.composite
def bodies(draw):
    pairs = draw(st.lists(st.tuples(st.sampled_from(KEYS), values), max_size=7))
    style = draw(st.sampled_from(["compact", "spaced", "odd"]))
    out = []
    for key, value in pairs:
        blank = {"compact": "", "spaced": " "}.get(style) if style != "odd" else draw(spaces)
        before = draw(spaces) if style == "odd" else ""
        out.append(f'{before}"{key}"{before}:{blank}{value}')
    return ("{" + (", " if style == "spaced" else ",").join(out) + "}").encode()


@settings(max_examples=600, deadline=None)
@given(bodies())
def test_it_reads_what_everybody_reads_or_refuses(body):
    """(case 31) The referee keeps every member of the top level."""
    pairs = json.loads(body, object_pairs_hook=lambda pairs: pairs)
    named = [value for key, value in pairs if key.lower() == "model"]
    spelled = body.count(b'"model"') - sum(json.dumps(v).count('"model"') for k, v in json.loads(body).items())
    try:
        fields = read_routing(body)
    except InvalidRequest:
        plain = len(named) == 1 and pairs[[k.lower() for k, _ in pairs].index("model")][0] == "model" and b"\\u006" not in body
        assert not (plain and isinstance(named[0], str) and spelled == 1), "a plain body was refused"
        return
    assert len(named) <= 1, "a body with two models was accepted"
    assert fields.model == (named[0] if named else None)


@pytest.mark.parametrize("filler", ["", "x" * SMALL], ids=["small", "large"])
@pytest.mark.parametrize(
    "members",
    ['"model":"a","model":"b"', '"model": "a", "model": "b"', r'"model":"a","mod\u0065l":"b"', '"model":"a","MODEL":"b"', '"Model":"a"',
     '"model":7', '"model":"a","stream":"yes"', r'"mod\u0065l":"a"', '"model":"a","model":"a"'],
)  # fmt: skip
def test_these_are_refused_at_any_size(members, filler):
    with pytest.raises(InvalidRequest):
        read_routing(f'{{"messages":"{filler}",{members}}}'.encode())


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
@pytest.mark.parametrize("text", ["hi", "naïve café 模型 \" \\ \n " * 300])
def test_these_are_read_in_every_style(separators, text):
    request = {"messages": [{"content": text}], "model": "m/é模", "stream": True, "tools": [{"model": "x"}], "note": 'say "model"'}
    for ascii_only in (True, False):
        fields = read_routing(json.dumps(request, separators=separators, ensure_ascii=ascii_only).encode())
        assert fields.model == "m/é模" and fields.stream is True and set(fields.members) == set(request)
