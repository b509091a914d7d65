"""The pieces of the translation by themselves: names, turns, chat answers in many dialects, and any JSON at all."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laya.errors import BadUpstream, ContextLengthExceeded, InvalidRequest, LayaError
from laya.gateway.api import messages, responses
from laya.gateway.api.answer import Ending, Usage
from laya.gateway.api.anthropic_errors import error_body
from laya.gateway.api.chat_answer import ChatAnswer, read_error
from laya.gateway.api.messages_answer import MessagesAnswer
from laya.gateway.api.pieces import CallArguments, CallEnd, CallStart, ReasoningPiece, TextPiece
from laya.gateway.api.responses_answer import ResponsesAnswer
from laya.gateway.api.toolnames import Tool, ToolNames, flat_name
from laya.gateway.api.turns import Turns
from laya.gateway.backend_apis import REMEMBER_S, BackendApis

# -- names -----------------------------------------------------------------------------------------------------------------


def test_a_flat_name_is_what_every_chat_api_takes():
    assert flat_name("add", "mcp__calc") == "mcp__calc__add" and flat_name("exec.command/x") == "exec_command_x"
    long = flat_name("n" * 80, "mcp__server")
    assert len(long) == 64 and long != flat_name("n" * 81, "mcp__server")
    assert long == flat_name("n" * 80, "mcp__server"), "the same from step to step"


def test_a_name_that_a_model_wrote_is_understood_where_only_one_tool_can_be_meant():
    names = ToolNames()
    for tool in (Tool("add", "mcp__a"), Tool("add", "mcp__b"), Tool("sub", "mcp__a"), Tool("shell")):
        assert names.add(tool) is not None
    assert names.add(Tool("add", "mcp__a")) is None
    assert names.meant_by("mcp__b__add") == Tool("add", "mcp__b") and names.meant_by("sub") == Tool("sub", "mcp__a")
    assert names.meant_by("mcp__a.sub") == Tool("sub", "mcp__a") and names.meant_by("add") == Tool("add")
    assert names.meant_by("invented") == Tool("invented")


# -- turns -----------------------------------------------------------------------------------------------------------------


def test_results_stand_behind_their_calls_and_strangers_are_told_in_words():
    turns = Turns()
    turns.user(["go"])
    turns.call("a", "f", "")
    turns.user(["by the way"])
    turns.result("a", ["2"])
    turns.result("lost", ["3"])
    roles = [(m["role"], m["content"]) for m in turns.messages()]
    assert roles[:3] == [("user", "go"), ("assistant", None), ("tool", "2")]
    assert roles[3][0] == "user" and "by the way" in roles[3][1] and "3" in roles[3][1]


STEP = st.one_of(
    st.tuples(st.just("system"), st.text(max_size=5)), st.tuples(st.just("user"), st.text(max_size=5)),
    st.tuples(st.just("assistant"), st.text(max_size=5)), st.tuples(st.just("call"), st.sampled_from("abc")),
    st.tuples(st.just("result"), st.sampled_from("abcd")),
)  # fmt: skip


def built(steps) -> list[dict]:
    turns = Turns()
    for kind, text in steps:
        if kind == "user":
            turns.user([text])
        elif kind == "call":
            turns.call(text, "f", "{}")
        elif kind == "result":
            turns.result(text, ["r"])
        else:
            getattr(turns, kind)(text)
    return turns.messages()


@given(st.lists(STEP, max_size=20))
def test_messages_keep_to_what_templates_take(steps):
    """One system message, at the front; no two neighbours of one role but for tool results."""
    roles = [message["role"] for message in built(steps)]
    assert "system" not in roles[1:]
    for one, two in zip(roles, roles[1:], strict=False):
        assert one != two or one == "tool"


@pytest.mark.parametrize("order", ["in turns", "calls first"])
def test_a_long_conversation_costs_time_in_proportion(order):
    """Four times the calls cost four times the time, and nothing like sixteen times."""

    def steps(count: int) -> list[tuple[str, str]]:
        calls, results = ([(kind, str(i)) for i in range(count)] for kind in ("call", "result"))
        return [*calls, *results] if order == "calls first" else [step for pair in zip(calls, results, strict=True) for step in pair]

    def seconds(count: int) -> float:
        given, taken = steps(count), []
        for _ in range(3):
            begun = time.process_time()
            made = built(given)
            taken.append(time.process_time() - begun)
            assert len(made) == (count + 1 if order == "calls first" else 2 * count)
        return min(taken)

    assert seconds(8000) < 10 * seconds(2000)


# -- chat answers ----------------------------------------------------------------------------------------------------------


def sse(*chunks: dict | str) -> bytes:
    return b"".join(b"data: " + (c if isinstance(c, str) else json.dumps(c)).encode() + b"\n\n" for c in chunks)


def delta(reason: str | None = None, **members) -> dict:
    return {"choices": [{"index": 0, "delta": members, "finish_reason": reason}]}


def call(index: int | None, id: str | None, name: str | None, arguments) -> dict:
    part = {"id": id, "function": {"name": name, "arguments": arguments}}
    return {**part, "index": index} if index is not None else part


def calls_of(*chunks: dict) -> list[tuple[str, str, str]]:
    """(id, name, arguments) of each call, read one byte at a time."""
    answer, found = ChatAnswer(), {}
    data = sse(*chunks, delta("tool_calls"), "[DONE]")
    for i in range(len(data)):
        for piece in answer.read_stream(data[i : i + 1]):
            if isinstance(piece, CallStart):
                found[piece.index] = [piece.id, piece.name, ""]
            elif isinstance(piece, CallArguments):
                found[piece.index][2] += piece.text
    assert answer.ended and answer.ending.reason == "tool_calls" and sorted(found) == list(range(len(found)))
    return [tuple(found[index]) for index in sorted(found)]


WANTED = [("c1", "f", '{"a":1}'), ("c2", "g", "{}")]


@pytest.mark.parametrize(
    "chunks",
    [
        [delta(tool_calls=[call(0, "c1", "f", "")]), delta(tool_calls=[call(0, None, None, '{"a":1}')]), delta(tool_calls=[call(1, "c2", "g", "{}")])],
        [delta(tool_calls=[call(0, "c1", "f", '{"a":1}'), call(1, "c2", "g", "{}")])],
        [delta(tool_calls=[call(0, "c1", "f", '{"a":1}')]), delta(tool_calls=[call(0, "c2", "g", "{}")])],
        [delta(tool_calls=[call(None, "c1", "f", '{"a":1}')]), delta(tool_calls=[call(None, "c2", "g", "{}")])],
        [delta(tool_calls=[call(0, "c1", "f", "")]), delta(tool_calls=[call(1, "c2", "g", "{}")]), delta(tool_calls=[call(0, None, None, '{"a":1}')])],
        [delta(tool_calls=[call(0, "c1", "f", '{"a"')]), delta(tool_calls=[call(0, "c1", "f", ":1}")]), delta(tool_calls=[call(5, "c2", "g", "{}")])],
        [delta(tool_calls=[call(0, "c1", "", '{"a"')]), delta(tool_calls=[call(0, None, "f", ":1}")]), delta(tool_calls=[call(1, "c2", "g", "{}")])],
        [delta(tool_calls=[call(0, "c1", "f", '{"a":1}')]), delta(tool_calls=[call(None, "c2", None, "")]), delta(tool_calls=[call(None, None, "g", "{}")])],
        [delta(tool_calls=[call(0, "c1", "f", {"a": 1})]), delta(tool_calls=[call(1, "c2", "g", {})])],
    ],
    ids=["usual", "at once", "always index 0", "no index", "mixed", "id again", "name later", "name later, no index", "objects"],
)  # fmt: skip
def test_calls_in_the_dialects_of_servers(chunks):
    """(cases 18, 29)"""
    assert calls_of(*chunks) == WANTED


def test_dialects_of_frames():
    """(case 18)"""
    answer = ChatAnswer()
    data = b'\xef\xbb\xbf: PROCESSING\r\n\r\ndata:{"choices":[{"index":0,"delta":{"content":"a"}}]}\r\n\r\ndata: {"choices":\rdata: []}\r\r'
    assert answer.read_stream(data) == [TextPiece("a")]
    tail = sse(delta(content="b"), delta("stop"), {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    assert answer.read_stream(tail + b"data: [DONE]  \n\ndata: junk\n\n") == [TextPiece("b")]
    assert answer.ending == Ending("stop", None, Usage(3, 0, 2))


@pytest.mark.parametrize(
    ("content", "read"),
    [
        (rb"a\ud83d", "a\ufffd"), (rb"\ude00b", "\ufffdb"), (rb"\ud83d\ude00 \uD83D", "\U0001f600 \ufffd"), (rb"\\ud83d \udC00", "\\ud83d \ufffd"),
        (b"c\xff", "c\ufffd"), ("\u4f60".encode()[:2], "\ufffd"), (rb"\ud83d\u0041", "\ufffdA"),
    ],
)  # fmt: skip
def test_text_that_is_no_unicode_costs_its_character_and_not_the_answer(content, read):
    """(case 12)"""
    answer = ChatAnswer()
    frame = b'data: {"choices":[{"index":0,"delta":{"content":"' + content + b'"}}]}\n\n'
    assert answer.read_stream(frame) == [TextPiece(read)]
    assert ChatAnswer().read_body(frame[6:].replace(b"delta", b"message")) == [TextPiece(read)]


@pytest.mark.parametrize(
    ("usage", "read"),
    [
        ("null", None), ("5", None), ("[]", None), ('{"prompt_tokens": 1.5}', None), ('{"prompt_tokens": "3"}', Usage(3, 0, 0)),
        ('{"prompt_tokens": -2, "completion_tokens": 4}', Usage(0, 0, 4)), ('{"prompt_tokens": null}', Usage(0, 0, 0)),
        ('{"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}', Usage(3, 2, 1)),
        ('{"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 7}}', Usage(3, 3, 0)), ('{"prompt_tokens": 4.0}', Usage(4, 0, 0)),
        ('{"prompt_tokens": 1180591620717411303424}', None), (f'{{"prompt_tokens": {"9" * 5000}}}', None),
    ],
)  # fmt: skip
def test_no_answer_is_lost_for_a_count_that_cannot_be_read(usage, read):
    answer = ChatAnswer()
    body = b'{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}],"usage":%b}' % usage.encode()
    assert answer.read_body(body) == [TextPiece("a")] and answer.ending == Ending("stop", None, read)


def test_an_empty_reason_in_every_chunk_is_none():
    """(case 13) A stream that is cut then is not taken for whole."""
    answer = ChatAnswer()
    assert answer.read_stream(sse(delta("", content="a"), delta("", content="b"))) == [TextPiece("a"), TextPiece("b")]
    assert not answer.whole
    answer.read_stream(sse(delta("stop")))
    assert answer.ending == Ending("stop")


@pytest.mark.parametrize("index", ["null", '"0"', "0", "0.0"])
def test_whatever_a_server_numbers_its_one_choice_with(index):
    frame = b'data: {"choices":[{"index":%b,"delta":{"content":"a"}},{"index":1,"delta":{"content":"b"}}]}\n\n' % index.encode()
    assert ChatAnswer().read_stream(frame) == [TextPiece("a")]


def test_the_one_call_of_servers_older_than_tool_calls():
    answer = ChatAnswer()
    parts = [{"name": "f", "arguments": ""}, {"arguments": '{"a"'}, {"arguments": ":1}"}]
    pieces = answer.read_stream(sse(*[delta(function_call=part) for part in parts], delta("function_call")))
    assert isinstance(pieces[0], CallStart) and pieces[0].name == "f" and pieces[0].id
    assert "".join(piece.text for piece in pieces[1:]) == '{"a":1}' and answer.ending.reason == "tool_calls"


def test_a_last_frame_without_its_blank_line_counts():
    answer = ChatAnswer()
    answer.read_stream(sse(delta(content="a"), delta("stop"))[:-1])
    answer.finish_stream()
    assert answer.ending.reason == "stop"


def test_a_server_that_gives_no_reason_but_says_done_has_ended():
    answer = ChatAnswer()
    answer.read_stream(sse(delta(content="a"), "[DONE]"))
    assert answer.ending == Ending("stop")


def test_what_stops_in_the_middle_has_no_ending():
    answer = ChatAnswer()
    answer.read_stream(sse(delta(content="a")))
    with pytest.raises(BadUpstream):
        _ = answer.ending


def test_a_call_that_never_gets_its_name_is_told():
    answer = ChatAnswer()
    assert answer.read_stream(sse(delta(tool_calls=[call(0, "c1", "", "{}")]), delta("tool_calls"), "[DONE]")) == []
    with pytest.raises(BadUpstream, match="without a name"):
        answer.call_ends()


@pytest.mark.parametrize("data", [b"<html>", b"[]", b"{}", b'{"choices":[]}', b'{"choices":7}', b"[" * 5000, b"\xff"])
def test_what_is_no_completion_is_a_bad_upstream(data):
    """(case 44)"""
    with pytest.raises(BadUpstream):
        ChatAnswer().read_body(data)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, {"error": {"message": "m", "code": "c"}}, "m"), (404, {"detail": "Not Found"}, "Not Found"), (500, {"message": "m"}, "m"),
        (422, {"detail": [{"loc": ["body"]}]}, "The backend answered 422."),
        (422, {"detail": [{"loc": ["body", 0, "a"], "msg": "m"}, {"msg": "n"}, 5]}, "body.0.a: m; n"), (502, {"error": "m"}, "m"), (418, {}, "The backend answered 418."),
    ],
)  # fmt: skip
def test_errors_of_backends(status, body, message):
    error = read_error(status, json.dumps(body).encode())
    assert (error.status, error.message) == (status, message)
    assert read_error(status, b"<html>").message == f"The backend answered {status}."


@pytest.mark.parametrize(
    "text",
    [
        "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4900 in the messages)",
        "This model's maximum context length is 4096 tokens, however the prompt is 5000 tokens. At least one must be left.",
        "the prompt has 5000 tokens, more than the context window of 4096 tokens",
    ],
)  # fmt: skip
def test_a_prompt_that_is_too_long_is_told_with_both_numbers(text):
    error = read_error(400, json.dumps({"error": {"message": text}}).encode())
    assert isinstance(error, ContextLengthExceeded)
    assert error_body(error)["error"]["message"] == "prompt is too long: 5000 tokens > 4096 maximum"


# -- what a backend has ------------------------------------------------------------------------------------------------------


def test_a_backend_that_was_found_lacking_is_asked_again_later():
    apis = BackendApis(None)
    assert not apis.lacks("responses", 0.0) and apis.unsure("responses")
    apis.found_lacking("messages", 0.0)
    assert apis.lacks("messages", REMEMBER_S - 1) and apis.lacks("count_tokens", 1.0) and not apis.lacks("messages", REMEMBER_S + 1)
    assert not apis.lacks("responses", 1.0), "each API for itself"


def test_what_is_configured_is_not_asked_about():
    apis = BackendApis(("chat", "messages"))
    assert apis.lacks("responses", 0.0) and not apis.lacks("messages", 0.0) and not apis.unsure("messages")
    assert not apis.lacks("count_tokens", 0.0) and apis.unsure("count_tokens"), "some have Messages but do not count"


# -- answers ---------------------------------------------------------------------------------------------------------------


def test_white_space_in_front_of_a_call_is_no_text_and_an_empty_answer_is_one():
    translation = responses.translate(responses.decode(b'{"input":"x","stream":false}'), None)

    def ended(*pieces) -> list[dict]:
        answer = ResponsesAnswer(translation.request, ToolNames(), "m", None)
        for piece in pieces:
            answer.piece(piece)
        return json.loads(answer.end(Ending("stop")))["output"]

    assert [item["type"] for item in ended(TextPiece("\n\n"), CallStart(0, "c", "f"), CallEnd(0))] == ["function_call"]
    assert ended(TextPiece("\n"), TextPiece("a"))[0]["content"][0]["text"] == "\na"
    assert ended()[0]["content"][0]["text"] == "", "a client without any item takes the answer for lost"


def test_text_behind_a_call_waits_for_its_end():
    request = messages.decode(b'{"max_tokens":5,"messages":[{"role":"user","content":"x"}],"stream":true}')
    answer = MessagesAnswer(request, ToolNames(), "m")
    out = answer.piece(CallStart(0, "c", "f")) + answer.piece(TextPiece("later"))
    assert b"later" not in out
    out = answer.piece(CallArguments(0, "{}")) + answer.piece(CallEnd(0))
    assert out.index(b"input_json_delta") < out.index(b"content_block_stop") < out.index(b"later")


PIECES = st.lists(
    st.one_of(
        st.builds(TextPiece, st.text(max_size=4)), st.builds(ReasoningPiece, st.text(min_size=1, max_size=4)),
        st.tuples(st.just("call"), st.integers(0, 2), st.text(max_size=3)), st.tuples(st.just("end"), st.integers(0, 2)),
    ),
    max_size=25,
)  # fmt: skip


def fed(answer, script) -> bytes:
    """The script's pieces in a valid order: a call starts before its arguments, and nothing comes behind its end."""
    out, begun, ended = answer.head(0), {}, set()
    for step in script:
        if not isinstance(step, tuple):
            out += answer.piece(step)
            continue
        number = step[1]
        if number in ended:
            continue
        if number not in begun:
            begun[number] = len(begun)
            out += answer.piece(CallStart(begun[number], f"c{number}", f"f{number}"))
        if step[0] == "end":
            ended.add(number)
            out += answer.piece(CallEnd(begun[number]))
        else:
            out += answer.piece(CallArguments(begun[number], step[2]))
    return out + answer.end(Ending("stop", None, Usage(1, 0, 1)))


@given(PIECES)
@settings(max_examples=200, deadline=None)
def test_a_messages_stream_says_what_the_plain_answer_says(script):
    """Blocks are opened one at a time, numbered from 0, closed once; their deltas joined are the plain answer's content."""
    made = {}
    for stream in (True, False):
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stream": stream, "thinking": {"type": "enabled"}}
        made[stream] = fed(MessagesAnswer(messages.decode(json.dumps(body).encode()), ToolNames(), "m"), script)
    blocks, open_at = [], None
    for frame in made[True].decode().split("\n\n")[:-1]:
        event = json.loads(frame.partition("data: ")[2])
        if event["type"] == "content_block_start":
            assert open_at is None and event["index"] == len(blocks)
            open_at = len(blocks)
            blocks.append([event["content_block"]["type"], ""])
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_at
            kind = event["delta"]["type"].removesuffix("_delta")
            blocks[-1][1] += "" if kind == "signature" else event["delta"]["partial_json" if kind == "input_json" else kind]
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_at
            open_at = None
    assert open_at is None
    plain = [[b["type"], b.get("text", b.get("thinking", ""))] for b in json.loads(made[False])["content"]]
    assert [b if b[0] != "tool_use" else ["tool_use", ""] for b in blocks] == plain


@given(PIECES)
@settings(max_examples=200, deadline=None)
def test_a_responses_stream_says_what_the_plain_answer_says(script):
    """(case 15)"""
    made = {}
    for stream in (True, False):
        request = responses.decode(json.dumps({"input": "x", "stream": stream}).encode())
        made[stream] = fed(ResponsesAnswer(request, ToolNames(), "m", None), script)
    events = [json.loads(frame.partition("data: ")[2]) for frame in made[True].decode().split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    done = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    added = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.added"}
    output = events[-1]["response"]["output"]
    assert [done[i] for i in range(len(output))] == output and {i: item["id"] for i, item in added.items()} == {i: item["id"] for i, item in done.items()}

    def bare(items) -> list:
        return [{key: value for key, value in item.items() if key != "id"} for item in items]

    assert bare(output) == bare(json.loads(made[False])["output"])


@pytest.mark.parametrize(
    ("api", "members", "told"),
    [
        (messages, {}, {"enable_thinking": False}), (messages, {"thinking": {"type": "adaptive"}}, None),
        (messages, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (messages, {"chat_template_kwargs": {"enable_thinking": True, "x": 1}}, {"enable_thinking": True, "x": 1}),
        (responses, {}, None), (responses, {"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        (responses, {"reasoning": {"effort": "high"}}, None),
    ],
)  # fmt: skip
def test_a_template_is_told_when_no_thoughts_are_wanted(api, members, told):
    """Only in process: chat has no member for it that every server takes."""
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "input": "x", **members}
    form = api.translate(api.decode(json.dumps(body).encode()), None).form
    assert form.in_process().chat_template_kwargs == told
    assert json.loads(form.encode("m", False)).get("chat_template_kwargs") == members.get("chat_template_kwargs")


# -- any JSON at all -------------------------------------------------------------------------------------------------------

WORDS = [
    "type", "role", "content", "text", "message", "user", "assistant", "system", "developer", "tool_use", "tool_result", "id", "name",
    "function_call", "function_call_output", "custom_tool_call", "call_id", "output", "arguments", "reasoning", "summary", "input",
    "image", "source", "base64", "input_image", "image_url", "namespace", "tools", "function", "custom", "parameters", "input_schema",
    "document", "thinking", "signature", "additional_tools", "tool_reference", "tool_name", "allowed_tools", "mode", "format",
    "json_schema", "tool_use_id", "is_error", "search_result", "item_reference", "input_text", "output_text", "tool", "any", "grammar",
]  # fmt: skip
WORD = st.sampled_from(WORDS)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=3), WORD),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORD, inner, max_size=6)), max_leaves=25,
)  # fmt: skip
OBJECTS = st.lists(st.dictionaries(WORD, JSON, max_size=7), max_size=4)


@given(OBJECTS, OBJECTS, JSON, JSON)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_is_translated_or_refused(items, tools, choice, text):
    """(cases 20-23, 31) Never another exception, which would be a 500, and what comes out can be encoded."""
    bodies = [
        (responses, {"input": items, "tools": tools}), (responses, {"input": items, "tools": tools, "tool_choice": choice, "text": text}),
        (messages, {"max_tokens": 5, "messages": [{"role": "user", "content": items}], "tools": tools}),
        (messages, {"max_tokens": 5, "messages": [{"role": "assistant", "content": items}], "system": items, "tool_choice": choice}),
    ]  # fmt: skip
    for api, body in bodies:
        try:
            request = api.decode(json.dumps(body).encode())
        except ValueError:
            continue  # the wrong type: refused before the translation
        try:
            translation = api.translate(request, None)
        except InvalidRequest as refused:
            assert refused.param
            continue
        json.loads(translation.form.encode("m", True))
        try:
            translation.form.in_process()
        except InvalidRequest as refused:
            assert refused.param


CALL_PART = st.fixed_dictionaries({}, optional={
    "index": st.one_of(st.none(), st.integers(-1, 3)), "id": st.one_of(st.none(), st.sampled_from(["a", "b", ""])),
    "function": st.fixed_dictionaries({}, optional={"name": st.sampled_from(["f", "", None]), "arguments": st.one_of(JSON, st.text(max_size=3))}),
})  # fmt: skip
SAID = st.fixed_dictionaries({}, optional={
    "content": st.one_of(st.text(max_size=3), JSON), "reasoning_content": st.text(max_size=3), "refusal": st.text(max_size=3),
    "tool_calls": st.lists(CALL_PART, max_size=3),
})  # fmt: skip
CHUNK = st.one_of(JSON, st.fixed_dictionaries({}, optional={
    "choices": st.lists(st.fixed_dictionaries({"index": st.integers(0, 1)}, optional={
        "delta": SAID, "message": SAID, "finish_reason": st.sampled_from(["stop", "length", "tool_calls", None, "odd"]), "stop_reason": JSON,
    }), max_size=2),
    "usage": st.one_of(st.none(), JSON, st.just({"prompt_tokens": 1, "completion_tokens": None})), "error": st.one_of(st.none(), JSON),
}))  # fmt: skip


@given(st.lists(CHUNK, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_answer_of_a_backend_is_read_or_refused(chunks, stream, whole):
    """(case 18) Never another exception: the client would wait for ever."""
    bodies = [
        (responses, {"input": "x", "stream": stream}),
        (messages, {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stream": stream, "thinking": {"type": "enabled"}}),
    ]  # fmt: skip
    for api, body in bodies:
        translation, read = api.translate(api.decode(json.dumps(body).encode()), None), ChatAnswer()
        answer = translation.answer("m", None)
        answer.head(0)
        try:
            pieces = read.read_body(json.dumps(chunks[0]).encode()) if whole and chunks else read.read_stream(sse(*chunks))
            for piece in [*pieces, *read.finish_stream(), *read.call_ends()]:
                answer.piece(piece)
            out = answer.end(read.ending)
        except LayaError as refused:
            out = answer.error(refused)
        assert out or not stream


def test_integers_of_any_size_and_deep_nesting():
    """(case 31)"""
    big = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"n": 10**40}}
    body = json.dumps({"input": [{"role": "user", "content": "x"}, big], "metadata": {"n": 10**40}}).encode()
    translation = responses.translate(responses.decode(body), None)
    assert b"1" + b"0" * 40 in translation.form.encode("m", False)
    assert b"1" + b"0" * 40 in translation.answer("m", None).end(Ending("stop"))
    deep = b'{"input":"x","tools":[{"type":"function","name":"f","parameters":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}]}"
    translation = responses.translate(responses.decode(deep), None)
    assert translation.form.encode("m", False).count(b'{"a":') == 900 and translation.answer("m", None).end(Ending("stop"))
