"""An answer gets its values back: whole, streamed in any cutting, in each API, in text and in JSON inside JSON."""

from __future__ import annotations

import json

import pytest

from laya.config import RedactConfig
from laya.stages.redact import Redactor
from laya.stages.vault import MAX_PLACEHOLDER
from redaction import EMAIL, PHONE, chat, chunk, content_of, events_of, frames, redact, restorer, through

DONE = "[DONE]"
QUOTED = Redactor(RedactConfig(patterns={"note": r'<"[^>]*>'}))
NOTE = '<"a\n\\b">'


def asked(**members):
    return redact(chat(f"{PHONE} {EMAIL} 13900139000", **members))


def test_a_placeholder_of_one_character_a_delta_and_one_byte_a_segment():
    """(case 54)"""
    text = "你好🚀 call [PHONE_1] or [PHONE_2], [EMAIL_1]! [1] [x"
    stream = frames(chunk(role="assistant"), *[chunk(char) for char in text], chunk(finish="stop"), DONE)
    out = through(restorer(asked()), stream)
    assert content_of(out) == f"你好🚀 call {PHONE} or 13900139000, {EMAIL}! [1] [x"
    assert events_of(out)[-1] == DONE and events_of(out)[-2]["choices"][0]["delta"] == {}


def test_what_cannot_become_a_placeholder_is_not_held():
    """The delay is bounded by the longest placeholder. (cases 54 and 56)"""
    machine = restorer(asked())
    for text in ("Hello", " [1", "[link](x)", "a[0]", "[PHONY", "[phone call]", "[" + "P" * 3 + "Z"):
        assert content_of(machine.feed(frames(chunk(text)))) == text
    assert content_of(machine.feed(frames(chunk("x" * 5000 + "[PHONE_")))) == "x" * 5000
    assert content_of(machine.feed(frames(chunk("9" * 40)))) == "[PHONE_" + "9" * 40
    longest = ""
    for char in "[PHONE_1" + " " * 60:
        longest = max(longest, "" if content_of(machine.feed(frames(chunk(char)))) else longest + char, key=len)
    assert len(longest) <= MAX_PLACEHOLDER


def test_a_frame_without_placeholders_passes_byte_for_byte():
    odd = b': comment\r\nid: 7\r\ndata:{"choices":[ {"index":0 ,"delta":{"content":"a [b] \\u00e9"}} ]}\r\n\r\n'
    assert restorer(asked()).feed(odd) == odd
    assert restorer(asked()).feed(b": keep-alive\n\n") == b": keep-alive\n\n"
    with_placeholder = odd.replace(b"[b]", b"[PHONE_1]")
    assert restorer(asked()).feed(with_placeholder).startswith(b": comment\r\nid: 7\r\ndata:{")


@pytest.mark.parametrize("written", ["[phone_1]", "[Phone 1]", "[PHONE-1]", "[ PHONE_1 ]", "[PHONE\\_1]", "[PHONE_01]"])
def test_a_placeholder_that_the_model_altered_is_restored(written):
    """(case 54)"""
    machine = restorer(asked())
    assert content_of(through(machine, frames(*[chunk(char) for char in f"<{written}>"], chunk(finish="stop")))) == f"<{PHONE}>"
    whole = json.dumps({"choices": [{"message": {"content": f"<{written}>"}}]}).encode()
    assert json.loads(restorer(asked()).whole(whole))["choices"][0]["message"]["content"] == f"<{PHONE}>"


@pytest.mark.parametrize("written", ["[PHONE_3]", "[PHONE_0]", "[CARD_1]", "[PHONE_1", "PHONE_1", "[PHONE1]", "[PHONE_12345678]", "[TELEPHONE_1]"])
def test_a_placeholder_that_the_model_invented_stays_as_it_is(written):
    """(case 54)"""
    stream = frames(*[chunk(char) for char in f"<{written}>"], chunk(finish="stop"))
    assert content_of(through(restorer(asked()), stream)) == f"<{written}>"


def test_two_requests_with_the_same_placeholder_have_each_its_own_value():
    """(case 55)"""
    one, other = redact(chat(PHONE)), redact(chat("13900139000"))
    assert one.body == other.body
    first, second = restorer(one), restorer(other)
    outs = [b"", b""]
    for char in "[PHONE_1]":
        outs[0] += first.feed(frames(chunk(char)))
        outs[1] += second.feed(frames(chunk(char)))
    assert [content_of(out) for out in outs] == [PHONE, "13900139000"]


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_numbers_of_any_size_pass_beside_a_value(api):
    """(case 31) In the event that is changed, and in the frame with what was held back."""
    big = 10**40
    if api == "chat":
        parts = [{**chunk("[PHONE"), "x": big}, {**chunk("_1] [x"), "x": big}, {**chunk(finish="stop"), "x": big}]
    elif api == "responses":
        head = {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "x": big}
        parts = [{**head, "delta": "[PHONE"}, {**head, "delta": "_1] [x"}, {**head, "type": "response.output_text.done", "text": "[PHONE_1] [x"}]
    else:
        head = {"type": "content_block_delta", "index": 0, "x": big}
        parts = [{**head, "delta": {"type": "text_delta", "text": text}} for text in ("[PHONE", "_1] [x")]
        parts.append({"type": "content_block_stop", "index": 0, "x": big})
    out = through(restorer(asked(), api), frames(*parts, names=api != "chat"))
    told = [event for event in events_of(out) if isinstance(event, dict)]
    assert sum(event.get("x") == big for event in told) >= len(parts) and PHONE in out.decode() and b"e+" not in out


def test_choices_and_members_are_told_apart():
    stream = frames(
        chunk("a [PHO", 0), chunk("b [PHONE_", 1), chunk(reasoning_content="[EMAIL"), chunk(index=1, content="2]"),
        chunk(reasoning_content="_1] then"), chunk("c [PHONE_1]", 0), chunk(finish="stop"), chunk(index=1, finish="stop"), DONE,
    )  # fmt: skip
    out = through(restorer(asked()), stream)
    assert content_of(out, 1) == "b 13900139000"
    assert content_of(out, 0, "reasoning_content") == f"{EMAIL} then"
    assert content_of(out, 0) == f"a [PHOc {PHONE}"  # thoughts came between: the first text could not go on


def test_tool_arguments_are_json_inside_json_and_values_are_escaped_twice():
    """(case 57)"""
    found = redact(chat(f"call {PHONE}, note {NOTE}"), redactor=QUOTED)
    calls = [{"tool_calls": [{"index": number, "function": {"arguments": char}}]}
             for char in '{"to":"[PHONE_1]","note":"[NOTE_1]"}' for number in (0, 1)]  # fmt: skip
    out = through(restorer(found), frames(*[chunk(**call) for call in calls], chunk(finish="tool_calls"), DONE))
    arguments = ["", ""]
    for event in events_of(out)[:-1]:
        for call in event["choices"][0]["delta"].get("tool_calls", ()):
            arguments[call["index"]] += call["function"]["arguments"]
    assert [json.loads(text) for text in arguments] == [{"to": PHONE, "note": NOTE}] * 2
    plain = {"choices": [{"message": {"content": "[NOTE_1]", "tool_calls": [{"function": {"arguments": '{"n":"[NOTE_1]"}'}}]}}]}
    message = json.loads(restorer(found).whole(json.dumps(plain).encode()))["choices"][0]["message"]
    assert message["content"] == NOTE
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"n": NOTE}


def test_json_that_the_client_asked_for_stays_json():
    found = redact(chat(NOTE, response_format={"type": "json_object"}), redactor=QUOTED)
    out = through(restorer(found), frames(*[chunk(char) for char in '{"note": "[NOTE_1]"}'], chunk(finish="stop")))
    assert json.loads(content_of(out)) == {"note": NOTE}


def test_text_completions():
    events = [{"id": "x", "choices": [{"index": 0, "text": char, "finish_reason": None}]} for char in "at [PHONE_1] [EM"]
    events.append({"id": "x", "choices": [{"index": 0, "text": "AIL", "finish_reason": "length"}]})
    out = through(restorer(redact({"prompt": PHONE}, "completions"), "completions"), frames(*events, DONE))
    texts = [event["choices"][0]["text"] for event in events_of(out)[:-1]]
    assert "".join(texts) == f"at {PHONE} [EMAIL"


def responses_events(text: str, arguments: str) -> list[dict]:
    at = {"output_index": 0, "item_id": "m", "content_index": 0}
    call = {"output_index": 1, "item_id": "f"}
    item = {"type": "message", "id": "m", "content": [{"type": "output_text", "text": text}]}
    function = {"type": "function_call", "id": "f", "name": "n", "arguments": arguments}
    events = [
        {"type": "response.created", "response": {"id": "r", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": {"type": "message", "id": "m", "content": []}},
        *[{"type": "response.output_text.delta", **at, "delta": char} for char in text],
        {"type": "response.output_text.done", **at, "text": text},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        *[{"type": "response.function_call_arguments.delta", **call, "delta": char} for char in arguments],
        {"type": "response.function_call_arguments.done", **call, "arguments": arguments},
        {"type": "response.output_item.done", "output_index": 1, "item": function},
        {"type": "response.completed", "response": {"id": "r", "output": [item, function]}},
    ]  # fmt: skip
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def test_responses_deltas_their_repeats_and_their_numbers():
    found = redact({"input": f"{PHONE} {NOTE}"}, "responses", QUOTED)
    stream = frames(*responses_events("hi [PHONE_1] [PHO", '{"n":"[NOTE_1]"}'), names=True)
    events = events_of(through(restorer(found, "responses"), stream))
    deltas = {"output_text": "", "function_call_arguments": ""}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["type"].split(".")[1]] += event["delta"]
    assert deltas["output_text"] == f"hi {PHONE} [PHO" and json.loads(deltas["function_call_arguments"]) == {"n": NOTE}
    done = {event["type"]: event for event in events if event["type"].endswith(".done") and "item" not in event}
    assert done["response.output_text.done"]["text"] == f"hi {PHONE} [PHO"
    assert json.loads(done["response.function_call_arguments.done"]["arguments"]) == {"n": NOTE}
    message, call = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == f"hi {PHONE} [PHO" and json.loads(call["arguments"]) == {"n": NOTE}
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(numbers)))  # with the frame that had to be put in


def test_messages_blocks():
    found = redact({"messages": [{"role": "user", "content": f"{PHONE} {NOTE}"}]}, "messages", QUOTED)
    events = [{"type": "message_start", "message": {"content": []}}]
    for index, (kind, member, text) in enumerate(
        [("thinking_delta", "thinking", "on [PHONE_1]"), ("text_delta", "text", "hi [PHONE_1] [NO"), ("input_json_delta", "partial_json", '{"n":"[NOTE_1]"}')]
    ):
        events.append({"type": "content_block_start", "index": index, "content_block": {}})
        events += [{"type": "content_block_delta", "index": index, "delta": {"type": kind, member: char}} for char in text]
        events.append({"type": "content_block_stop", "index": index})
    events += [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"}]
    got = events_of(through(restorer(found, "messages"), frames(*events, names=True)))
    texts = ["", "", ""]
    for event in got:
        if event["type"] == "content_block_delta":
            texts[event["index"]] += next(value for key, value in event["delta"].items() if key != "type")
    assert texts[:2] == [f"on {PHONE}", f"hi {PHONE} [NO"] and json.loads(texts[2]) == {"n": NOTE}
    assert [event["type"] for event in got][-2:] == ["message_delta", "message_stop"]


def test_a_whole_tool_input_of_messages():
    found = redact({"messages": [{"role": "user", "content": PHONE}]}, "messages")
    body = {"content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"to": "[PHONE_1]", "[PHONE_1]": 1}}]}
    assert json.loads(restorer(found, "messages").whole(json.dumps(body).encode()))["content"][0]["input"] == {"to": PHONE, PHONE: 1}


@pytest.mark.parametrize("end", ["", "error", "cut"])
def test_what_is_held_goes_out_when_the_stream_breaks(end):
    """(case 13)"""
    stream = frames(chunk("x [PHONE_1] [PHONE"))
    if end == "error":
        stream += frames({"error": {"message": "failed at [PHONE_1]", "type": "server_error"}})
    elif end == "cut":
        stream += b'data: {"choi'
    machine = restorer(asked())
    out = b"".join(machine.feed(stream[at : at + 1]) for at in range(len(stream)))
    if end == "error":
        assert events_of(out)[-1]["error"]["message"] == f"failed at {PHONE}"
        out = out[: out.index(b'data: {"error"')]
    else:
        out += machine.finish()
    if end == "cut":
        out = out.replace(b'data: {"choi', b"").rstrip(b"\n") + b"\n\n"
    assert content_of(out) == f"x {PHONE} [PHONE"


@pytest.mark.parametrize("dialect", ["data:%b\n\n", "data: %b\r\n\r\n", "data: %b\r\r", "event: x\nid: 1\ndata: %b\n\n", "\ufeffdata: %b\n\n", ": c\ndata: %b\n\n"])
def test_dialects_of_streams(dialect):
    """(case 18)"""
    line = dialect.encode()
    mark, line = line[:3] * line.startswith(b"\xef"), line.removeprefix(b"\xef\xbb\xbf")
    stream = mark + b"".join(line % json.dumps(chunk(char)).encode() for char in "[PHONE_1]!") + b"data: [DONE]  \n\ndata: [DONE]\n\nrest"
    out = through(restorer(asked()), stream)
    body = out[: out.index(b"data: [DONE]")]
    assert content_of(body) == f"{PHONE}!" and out.endswith(b"data: [DONE]  \n\ndata: [DONE]\n\nrest")


def test_tokens_of_log_probabilities_stay_as_the_model_wrote_them():
    event = chunk("[PHONE_1]")
    event["choices"][0]["logprobs"] = {"content": [{"token": "[PHONE_1]", "logprob": -0.5, "top_logprobs": []}]}
    got = events_of(restorer(asked()).feed(frames(event)))[0]["choices"][0]
    assert got["delta"]["content"] == PHONE and got["logprobs"] == event["choices"][0]["logprobs"]
    whole = {"choices": [{"message": {"content": "[PHONE_1]"}, "logprobs": event["choices"][0]["logprobs"]}]}
    choice = json.loads(restorer(asked()).whole(json.dumps(whole).encode()))["choices"][0]
    assert choice["message"]["content"] == PHONE and choice["logprobs"] == whole["choices"][0]["logprobs"]


def test_a_whole_answer_keeps_its_bytes_but_for_the_values():
    body = b'{ "id":1e400, "choices":[{"message":{"content":"\\u005bPHONE_1] \\"[EMAIL_1]\\""}}],"x":0.10 }'
    want = b'{ "id":1e400, "choices":[{"message":{"content":"%b \\"%b\\""}}],"x":0.10 }' % (PHONE.encode(), EMAIL.encode())
    assert restorer(asked()).whole(body) == want
    assert restorer(asked()).whole(b"bad gateway for [PHONE_1] \xff") == b"bad gateway for 13800138000 \xff"
