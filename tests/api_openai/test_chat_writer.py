"""The answer to a chat request from an engine's events: text, thoughts, calls and log-probabilities, streamed and not."""

from __future__ import annotations

import json

import pytest

from laya.gateway.api import chat
from laya.schema.generation import Delta, Finished, ModelCard, TokenLogprob
from laya.schema.openai import decode_chat

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
USAGE = Finished(prompt_tokens=3, cached_tokens=1, completion_tokens=5)


def card(calls: str = "hermes", reasoning: str = "none") -> ModelCard:
    style = {"calls": calls, "reasoning": reasoning}
    return ModelCard(id="m", max_model_len=100, chat=True, details={"chat_style": style})


def writer(model: ModelCard, **members):
    body = {"messages": [{"role": "user", "content": "x"}], **members}
    return chat.writer_of(decode_chat(json.dumps(body).encode()), "m", 1, model)


def frames(raw: bytes) -> list[dict]:
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]


def streamed(model: ModelCard, parts: list[str], reason: str = "stop", **members) -> list[dict]:
    """The deltas and finish reasons of choice 0, the head left out."""
    writing = writer(model, stream=True, **members)
    assert frames(writing.head())[0]["choices"][0]["delta"]["role"] == "assistant"
    raw = b"".join(writing.delta(Delta(0, part, (1,))) for part in parts)
    raw += writing.delta(Delta(0, "", (), (), reason)) + writing.end(USAGE)
    assert raw.endswith(b"data: [DONE]\n\n") and b'"usage"' not in raw
    return [{**chunk["choices"][0]["delta"], "reason": chunk["choices"][0]["finish_reason"]} for chunk in frames(raw)]


def plain(model: ModelCard, parts: list[str], reason: str = "stop", **members) -> dict:
    writing = writer(model, **members)
    assert b"".join(writing.delta(Delta(0, part, (1,))) for part in parts) == b""
    writing.delta(Delta(0, "", (), (), reason))
    return json.loads(writing.end(USAGE))["choices"][0]


def test_calls_are_streamed_with_index_id_and_name_first():
    """(case 29)"""
    deltas = streamed(card(), list(f"Let me see.\n{CALL}\n{CALL}"), tools=[TOOL])
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert [c["index"] for c in calls] == [0, 0, 1, 1] and calls[0]["id"] != calls[2]["id"]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""} and calls[0]["type"] == "function"
    assert calls[1] == {"index": 0, "function": {"arguments": '{"city": "Paris"}'}}
    assert "".join(d.get("content", "") for d in deltas) == "Let me see." and deltas[-1] == {"reason": "tool_calls"}


def test_a_plain_answer_with_a_call_has_no_text():
    choice = plain(card(), [CALL], tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert "reasoning_content" not in choice["message"] and choice["message"]["refusal"] is None


def test_without_tools_on_offer_the_syntax_is_text():
    assert plain(card(), [CALL])["message"]["content"] == CALL
    assert plain(card(), [CALL], tools=[TOOL], tool_choice="none")["message"]["content"] == CALL
    assert "tool_calls" not in plain(card("none"), [CALL], tools=[TOOL])["message"]


def test_one_call_where_parallel_calls_are_off():
    assert len(plain(card(), [CALL, CALL], tools=[TOOL], parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_an_answer_cut_in_a_call_is_length_and_shows_what_was_written():
    choice = plain(card(), [CALL[:40]], "length", tools=[TOOL])
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == CALL[:40]


@pytest.mark.parametrize(("reasoning", "text"), [("tags", "<think>Hm.</think>\n\nYes."), ("open", "Hm.</think>\n\nYes.")])
def test_thoughts_go_out_apart_from_the_text(reasoning, text):
    """(case 25)"""
    deltas = streamed(card(reasoning=reasoning), list(text))
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm."
    assert "".join(d.get("content", "") for d in deltas) == "Yes."
    writing = writer(card(reasoning=reasoning))
    for piece in text:
        writing.delta(Delta(0, piece, (1,)))
    usage = json.loads(writing.end(USAGE))["usage"]
    assert 3 <= usage["completion_tokens_details"]["reasoning_tokens"] <= len(text) - len("Yes.")
    message = plain(card(reasoning=reasoning), [text])["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


def test_a_model_that_must_not_think_is_read_as_text_from_the_start():
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert plain(card(reasoning="open"), ["Yes."], **off)["message"]["content"] == "Yes."
    form = {"response_format": {"type": "json_object"}}
    assert plain(card(reasoning="open"), ["{}"], **form)["message"]["content"] == "{}"


def test_log_probabilities_go_with_the_text_they_belong_to():
    def entry(token: str) -> TokenLogprob:
        return TokenLogprob(1, token, token.encode(), -0.5)

    for text in ("Hi <tool", CALL):
        writing = writer(card(), stream=True, logprobs=True, tools=[TOOL])
        raw = b"".join(writing.delta(Delta(0, piece, (1,), (entry(piece),))) for piece in text)
        raw += writing.delta(Delta(0, "", (), (), "stop"))
        shown = [e["token"] for c in frames(raw) for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert "".join(shown) == text


def test_choices_have_parsers_of_their_own():
    """(case 30)"""
    writing = writer(card(), n=2, tools=[TOOL])
    for piece in CALL:
        writing.delta(Delta(0, piece, (1,)))
        writing.delta(Delta(1, piece.upper(), (1,)))
    for index in (0, 1):
        writing.delta(Delta(index, "", (), (), "stop"))
    first, second = json.loads(writing.end(USAGE))["choices"]
    assert first["finish_reason"] == "tool_calls" and second["finish_reason"] == "stop"
    assert second["message"]["content"] == CALL.upper()
