"""Properties of redaction that hold whatever the texts, their escapes and the cutting of the stream are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from laya.stages import redact_json, redact_text
from laya.stages.detect import runs, window
from laya.stages.detect.scan import Scanner
from redaction import CARD, EMAIL, IDENTITY, PHONE, SECRET, chat, chunk, content_of, frames, redact, restorer, through

VALUES = (
    PHONE, EMAIL, IDENTITY, CARD, SECRET, "+44 20 7946 0958", "(212) 555-0123", "219-09-9999", "carol.chen@example.org",
    "13900139000", "sk-proj-a1B2c3D4e5F6g7H8i9J0k1L2", "１３８００１３８０００",
)  # fmt: skip
# Texts around values: signs, words of several scripts, things that look like placeholders or escapes, but nothing that a value
# could become part of.
PIECES = st.sampled_from((
    " ", ", ", "\n", "\t", "。", "电话 ", "é ", "🚀", '"', '\\"', "\\ ", "\\n", "{", "} ", "[", "] ", "[PHONE_1]", "[EMAIL_2] ", "[phone 3]",
    "[PHONE_", "&lt;", "\u2028", " / ", "word ", "<b> ", "\x00", "\x7f", "'", "`", " $", "\ufeff", "ＡＢ ", "\xa0",
))  # fmt: skip
TEXTS = st.lists(st.one_of(PIECES, st.sampled_from([f" {value} " for value in VALUES])), max_size=12).map("".join)
ANY = st.text(max_size=40)


def written(value, seed: int) -> bytes:
    """JSON of the value, with characters of its strings escaped at random."""
    choose = random.Random(seed)

    def string(text: str) -> str:
        out = ""
        for char in text:
            units = char.encode("utf-16-be", "surrogatepass")
            escape = "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
            plain = json.dumps(char, ensure_ascii=choose.random() < 0.3)[1:-1]
            out += escape if choose.random() < 0.15 else "\\/" if char == "/" and choose.random() < 0.5 else plain
        return f'"{out}"'

    def any_value(item) -> str:
        space = choose.choice(["", " ", "\n"])
        if isinstance(item, str):
            return string(item)
        if isinstance(item, dict):
            return "{" + ("," + space).join(f"{string(key)}:{space}{any_value(value)}" for key, value in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ("," + space).join(map(any_value, item)) + "]"
        return json.dumps(item)

    return any_value(value).encode("utf-8", "surrogatepass")


def nested(body: dict) -> list:
    """The messages with the arguments decoded, as JSON inside JSON may be escaped in more ways than one."""
    *messages, last = body["messages"]
    return [messages, json.loads(last["tool_calls"][0]["function"]["arguments"])]


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(0, 2**32))
def test_redacted_and_restored_is_what_it_was_and_nothing_of_a_value_is_left(texts, seed):
    body = json.loads(chat(*texts))
    body["messages"].append({"role": "assistant", "tool_calls": [
        {"id": "c", "function": {"name": "f", "arguments": written({"a": texts[0], "b": [texts[-1]]}, seed).decode()}}]})  # fmt: skip
    raw = written(body, seed)
    found = redact(raw)
    if found.vault is None:
        assert found.body == raw and not any(value in text for value in VALUES for text in texts)
        return
    assert nested(json.loads(restorer(found).whole(found.body))) == nested(body)
    left = json.loads(found.body)
    strings = [message["content"] for message in left["messages"][:-1]]
    arguments = left["messages"][-1]["tool_calls"][0]["function"]["arguments"]
    strings += [json.loads(arguments)["a"], json.loads(arguments)["b"][0], arguments, found.body.decode("utf-8", "replace")]
    assert [(value, text) for value in VALUES for text in strings if value in text] == []
    again = redact(found.body)
    assert again.body == found.body and again.counts == {}


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(0, 2**32), st.lists(st.integers(0, 100_000), max_size=30), st.integers(1, 9))
def test_a_stream_in_any_cutting_restores_what_a_whole_answer_does(text, seed, cuts, width):
    found = redact(chat(" ".join(VALUES), text))
    told = json.loads(found.body)["messages"][1]["content"]
    pieces = [told[at : at + width] for at in range(0, len(told), width)]
    stream = b"".join(b"data: " + written(chunk(piece), seed + at) + b"\n\n" for at, piece in enumerate(pieces) if "\n" not in piece)
    told = "".join(piece for piece in pieces if "\n" not in piece)
    stream += frames(chunk(finish="stop"), "[DONE]")
    out = through(restorer(found), stream.replace(b":\n", b":").replace(b",\n", b","), cuts)
    assert content_of(out) == restorer(found)._vault.restore(told)


@settings(max_examples=100, deadline=None)
@given(ANY, st.sampled_from(VALUES), ANY)
def test_no_text_makes_redaction_fail_or_changes_what_comes_back(before, value, behind):
    body = chat(f"{before}\n{value}\n{behind}", before + behind)
    found = redact(body)
    if found.vault is not None:
        assert json.loads(restorer(found).whole(found.body)) == json.loads(body)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_json_never_raise(data):
    for body in (data, b'{"messages":[{"content":"13800138000 ' + data):
        try:
            json.loads(body)
        except ValueError:
            found = redact(b"{" + data)  # the gateway has refused it before; here it must only not end in a fault
            assert isinstance(found.body, bytes)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='ab 1"\\\n/é你😀\ud83d\ude00', max_size=120), st.booleans(), st.integers(2, 9))
def test_reading_in_pieces_is_reading_at_once(text, ascii_only, piece):
    body = b'"%b"' % json.dumps(text, ensure_ascii=ascii_only)[1:-1].encode("utf-8", "surrogatepass")

    def read():
        view = redact_json.plain_view(body)
        parts = list(redact_json.parts_of(view, 1, len(body) - 1))
        try:
            decoded = "".join([redact_json.decode_string(body[start:end]) for start, end in parts])
        except ValueError as error:
            return view, type(error)
        encoded = json.loads(b'"%b"' % redact_json.encode_string(decoded))
        return view, decoded, encoded, redact_text.Reading(body, view, 1, len(body) - 1).data

    at_once = read()
    with patch.object(redact_json, "_PIECE", piece), patch.object(redact_json, "_TEXT_PIECE", piece):
        assert read() == at_once


@settings(max_examples=150, deadline=None)
@given(ANY, st.lists(st.tuples(st.sampled_from(VALUES), ANY), min_size=1, max_size=4), st.booleans(), st.integers(1, 30))
def test_values_across_the_parts_of_a_long_string_are_found_and_put_back(before, values, ascii_only, piece):
    """(case 57)"""
    text = f"caf\u00e9\u3000{before} " + " ".join(f"{value} \\u0041 {behind}" for value, behind in values)
    body = chat(text, f"{text} [PHONE_1]")
    body = json.dumps(json.loads(body)).encode() if ascii_only else body
    at_once = redact(body)
    with patch.object(redact_json, "_TEXT_PIECE", piece), patch.object(redact_json, "_COPIED", piece):
        found = redact(body)
        assert json.loads(found.body) == json.loads(at_once.body) and found.counts == at_once.counts
        if found.vault is not None:
            assert json.loads(restorer(found).whole(found.body)) == json.loads(body)


@settings(max_examples=60, deadline=None)
@given(ANY, st.sampled_from(VALUES), ANY)
def test_values_are_found_and_put_back_wherever_a_search_begins_anew(before, value, behind):
    body = chat(f"{before}\n{value}\n{behind}", behind)
    at_once = redact(body)
    with patch.object(redact_json, "_MAX_STRIDE", 3):
        found = redact(body)
        assert found.body == at_once.body
        if found.vault is not None:
            assert json.loads(restorer(found).whole(found.body)) == json.loads(body)


LINES = sorted({line for path in (Path(__file__).parent / "corpus").glob("*.txt") for line in path.read_bytes().splitlines()})
KEY = b"QwErTyUiOpAsDfGhJkLzXcVbNmQwErTyUi"  # without a digit
DENSE = st.one_of(
    st.sampled_from(LINES), st.sampled_from(VALUES).map(str.encode), st.text("ab =:.-@+7\n", max_size=40).map(str.encode),
    st.sampled_from([b"api_key = " + KEY, b"token " + KEY, b"bearer: " + KEY, KEY, b"x" * 600 + b"1", b"phone "]),
    st.integers(1, 12).map(lambda count: b"some plain words of prose. " * count),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(DENSE, min_size=4, max_size=30), st.integers(0, 40), st.integers(100, 700))
def test_what_is_found_does_not_depend_on_how_dense_with_digits_the_text_around_it_is(pieces, places, size):
    """Where digits are few, numbers and keys are looked for around them alone; in windows of any size."""
    text = b" ".join(pieces)
    scanner = Scanner(("phone", "id", "card", "email", "secret"), {})
    with patch.object(window, "WINDOW_BYTES", size):
        around = list(scanner.scan(text))
        with patch.object(window, "MAX_PLACES", places):
            partly = list(scanner.scan(text))
        with patch.object(window, "MAX_PLACES", 0), patch.object(runs, "MAX_PLACES", -1):
            everywhere = list(scanner.scan(text))
    assert around == everywhere == partly
