"""/v1/responses and /v1/messages answered by the real model in process, through the real SDKs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest

from sdks import anthropic_client, openai_client
from server import Laya, running

PARIS = "What is the capital of France? Answer briefly."
USER = [{"role": "user", "content": PARIS}]
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def served(model_path, tmp_path_factory) -> Iterator[Laya]:
    config = {"inference": {"model": str(model_path), "name": "smol", "max_seq_len": 1024, "max_num_seqs": 2, "kv_cache": "64MiB"}}
    with running(config, tmp_path_factory.mktemp("served"), "serve") as laya:
        laya.wait_ready()
        yield laya


@pytest.fixture
def gpt(served):
    return openai_client(served)


@pytest.fixture
def claude(served):
    return anthropic_client(served)


@pytest.fixture
def cold(claude):
    """Greedy, for SDKs that do not know the member."""
    return {"model": "smol", "max_tokens": 30, "extra_body": {"temperature": 0}}


def test_every_api_gives_the_same_text_streamed_and_not(gpt, claude, cold):
    chat = gpt.chat.completions.create(model="smol", messages=USER, temperature=0, max_tokens=30)
    text = chat.choices[0].message.content
    plain = gpt.responses.create(model="smol", input=PARIS, temperature=0, max_output_tokens=30)
    assert "Paris" in text and plain.output_text == text
    with gpt.responses.stream(model="smol", input=PARIS, temperature=0, max_output_tokens=30) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert deltas == text and stream.get_final_response().status == "completed"
    message = claude.messages.create(messages=USER, **cold)
    with claude.messages.stream(messages=USER, **cold) as stream:
        assert "".join(stream.text_stream) == text == message.content[0].text
    assert plain.usage.input_tokens == chat.usage.prompt_tokens and plain.usage.output_tokens == chat.usage.completion_tokens
    told = message.usage
    assert told.input_tokens + told.cache_read_input_tokens == chat.usage.prompt_tokens and told.output_tokens == chat.usage.completion_tokens


def test_the_prompt_is_counted_before_it_is_answered(served, claude, cold):
    counted = claude.messages.count_tokens(model="smol", messages=USER, system="Be kind.").input_tokens
    usage = claude.messages.create(messages=USER, system="Be kind.", **cold).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    body = {"model": "smol", "max_tokens": 3, "system": "Be kind.", "messages": USER, "stream": True}
    first = served.call("POST", "/v1/messages", body)[1].split(b"\n\n")[0]
    assert json.loads(first.partition(b"data: ")[2])["message"]["usage"]["input_tokens"] == counted
    counted = openai_client(served).responses.input_tokens.count(model="smol", input=PARIS).input_tokens
    assert counted == openai_client(served).responses.create(model="smol", input=PARIS, max_output_tokens=1).usage.input_tokens


def test_forms_of_one_prompt_share_the_prefix_cache(claude, cold):
    long = "You know a lot about rivers and lakes. " * 20
    claude.messages.create(system=long, messages=USER, **cold)
    blocks = [{"type": "text", "text": "x-anthropic-billing-header: cc=1"}, {"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]
    again = claude.messages.create(system=blocks, messages=[{"role": "user", "content": [{"type": "text", "text": PARIS}]}], **cold)
    assert again.usage.cache_read_input_tokens > 100


def test_limits_and_stop_sequences(gpt, claude, cold):
    cut = gpt.responses.create(model="smol", input="Count to one hundred.", max_output_tokens=5, temperature=0)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens" and cut.usage.output_tokens == 5
    message = claude.messages.create(**{**cold, "max_tokens": 5}, messages=[{"role": "user", "content": "Count to one hundred."}])
    assert message.stop_reason == "max_tokens"
    text = claude.messages.create(messages=USER, **cold).content[0].text
    stopped = claude.messages.create(messages=USER, stop_sequences=[text[4:9]], **cold)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[4:9])
    assert text[4:9] not in "".join(block.text for block in stopped.content)


def test_a_limit_beyond_the_window_is_clamped(gpt, claude):
    """(case 26)"""
    assert gpt.responses.create(model="smol", input=PARIS, max_output_tokens=100_000, temperature=0).status == "completed"
    message = claude.messages.create(model="smol", max_tokens=16_000, messages=USER, extra_body={"temperature": 0})
    assert message.stop_reason == "end_turn"


def test_a_prompt_beyond_the_window_is_told_in_each_apis_words(gpt, claude, cold):
    """(case 28)"""
    long = "many words " * 2000
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model="smol", input=long)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1024 maximum"):
        claude.messages.create(messages=[{"role": "user", "content": long}], **cold)


def test_a_conversation_goes_on(gpt):
    first = gpt.responses.create(model="smol", input="My name is Ada.", temperature=0, max_output_tokens=10)
    second = gpt.responses.create(model="smol", input="Thanks.", previous_response_id=first.id, max_output_tokens=5)
    assert second.usage.input_tokens > first.usage.total_tokens and second.usage.input_tokens_details.cached_tokens > 0


def test_a_call_that_must_be_made_is_made(gpt, claude):
    """(case 29) In each API's form, streamed and not."""
    tool = {"type": "function", "name": "add", "description": "Add.", "parameters": ADD}
    given = {"model": "smol", "input": "Add one.", "tools": [tool], "tool_choice": "required", "temperature": 0, "max_output_tokens": 200}
    item = gpt.responses.create(**given, parallel_tool_calls=False).output[-1]
    assert item.type == "function_call" and item.name == "add" and set(json.loads(item.arguments)) == {"a"} and item.call_id
    with gpt.responses.stream(**given, parallel_tool_calls=False) as stream:
        assert stream.get_final_response().output[-1].arguments == item.arguments
    tools = [{"name": "add", "description": "Add.", "input_schema": ADD}]
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    with claude.messages.stream(model="smol", max_tokens=200, messages=[{"role": "user", "content": "Add one."}], tools=tools, tool_choice=choice) as s:
        message = s.get_final_message()
    assert message.stop_reason == "tool_use" and message.content[-1].name == "add" and set(message.content[-1].input) == {"a"}


def test_an_image_is_refused_by_a_model_that_reads_text(gpt, claude, cold):
    """(case 21)"""
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model="smol", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]}])
    assert caught.value.param == "input"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        claude.messages.create(messages=[{"role": "user", "content": [image]}], **cold)


def test_a_router_in_front_of_an_engine_process(served, tmp_path, cold):
    """The engine's Laya has every API: requests pass untouched, and its stored answers are found through the router."""
    config = {"backends": {"engine": {"url": f"{served.url}/v1"}}, "routes": [{"match": "*", "to": "engine"}]}
    with running(config, tmp_path) as router:
        gpt, claude = openai_client(router), anthropic_client(router)
        first = gpt.responses.create(model="smol", input=PARIS, temperature=0, max_output_tokens=10)
        events = list(gpt.responses.create(
            model="smol", input="Why?", previous_response_id=first.id, max_output_tokens=5, stream=True
        ))  # fmt: skip
        assert events[-1].type == "response.incomplete"
        second = events[-1].response
        assert second.usage.input_tokens > first.usage.total_tokens
        assert gpt.responses.retrieve(second.id).output_text == second.output_text
        assert openai_client(served).responses.retrieve(second.id).id == second.id
        gpt.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            gpt.responses.retrieve(second.id)
        assert "Paris" in claude.messages.create(messages=USER, **cold).content[0].text
        usage = claude.messages.create(messages=USER, **cold).usage
        counted = claude.messages.count_tokens(model="smol", messages=USER).input_tokens
        assert counted == usage.input_tokens + usage.cache_read_input_tokens
        assert router.metric("laya_retries_total", reason="no_such_api") == 0


def test_an_empty_input_loads_the_model(gpt):
    """What one client sends before its first real request."""
    assert gpt.responses.create(model="smol", input="", max_output_tokens=1).usage.output_tokens == 1


def test_a_client_that_leaves_frees_its_sequence(served):
    """(case 10)"""
    body = json.dumps({"model": "smol", "input": "Tell me a long story.", "stream": True, "max_output_tokens": 900}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with served.connect() as sock:
        sock.sendall(head % len(body) + body)
        sock.settimeout(20)
        while b"output_text.delta" not in sock.recv(65536):
            pass
    assert served.wait_for(lambda: served.metric("laya_sequences_running") == 0, 5)
    assert served.metric("laya_requests_total", api="responses", outcome="client_closed") >= 1


HELLO = [{"role": "user", "content": "hi"}]
BIG = {"x": 10**40}


@pytest.mark.parametrize(
    ("path", "members", "param"),
    [
        ("responses", {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ("responses", {"input": "hi", "background": True}, "background"), ("responses", {"input": "hi", "conversation": "c"}, "conversation"),
        ("responses", {"input": "hi", "prompt": {"id": "p"}}, "prompt"), ("chat/completions", {}, "messages"),
        ("messages", {"messages": HELLO, "max_tokens": 5, "output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ("messages", {"messages": HELLO, "max_tokens": 5, "stop_sequences": [""]}, "stop_sequences"),
        ("messages", {"messages": HELLO}, "max_tokens"), ("messages/count_tokens", {}, "messages"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "odd"}]}], "max_tokens": 5}, "messages"),
        ("messages", {"messages": [{"role": "user"}], "max_tokens": 5}, "messages[0].content"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_member_as_the_api_calls_it(served, path, members, param):
    """(cases 20-23)"""
    status, raw, _ = served.call("POST", f"/v1/{path}", {"model": "smol", **members})
    error = json.loads(raw)["error"]
    assert status == 400
    if path.startswith("messages"):
        assert error["message"].startswith(f"{param.replace('[', '.').replace(']', '')}: "), error
    else:
        assert error["param"] == param, error
        assert error["code"] == ("unsupported_parameter" if param in ("background", "conversation", "prompt") else None)


def test_what_is_absent_or_off_is_no_reason_to_refuse(gpt):
    body = {"background": False, "conversation": None, "prompt": None, "truncation": "auto", "service_tier": "flex", "include": ["x"]}
    assert gpt.responses.create(model="smol", input="hi", max_output_tokens=3, extra_body=body).status == "incomplete"


def test_numbers_of_any_size_pass_through_every_api(served):
    """(case 31) In schemas, in calls of the history, in a state and in the legend that is echoed."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "default": BIG}
    function = {"type": "function", "function": {"name": "add", "parameters": schema}}
    asked = {
        "chat/completions": {"messages": HELLO, "tools": [function], "max_tokens": 3},
        "responses": {"input": "hi", "tools": [{"type": "function", "name": "add", "parameters": schema}], "max_output_tokens": 3},
        "messages": {"max_tokens": 3, "tools": [{"name": "add", "input_schema": schema}], "messages": [
            *HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": BIG}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
        ]},
        "systemone": {"state": BIG, "questions": {"q": {"type": "score", "criteria": [BIG, "high"]}}},
    }  # fmt: skip
    for path, body in asked.items():
        status, raw, _ = served.call("POST", f"/v1/{path}", {"model": "smol", **body})
        assert status == 200, (path, raw)
    assert json.loads(raw)["answers"]["q"]["legend"]["0"] == BIG


def test_a_slash_too_many_and_paths_beside_the_apis(served):
    """(case 9)"""
    assert served.call("POST", "/v1/responses/", {"model": "smol", "input": "hi", "max_output_tokens": 1})[0] == 200
    assert served.call("POST", "/v1/messages/", {"model": "smol", "messages": HELLO, "max_tokens": 1})[0] == 200
    status, raw, _ = served.call("POST", "/v1/messages/batches", {})
    assert status == 404 and json.loads(raw)["type"] == "error" and json.loads(raw)["error"]["type"] == "not_found_error"
