"""Requests as command-line clients send them, unknown members and all, and the answers that they act on."""

from __future__ import annotations

import concurrent.futures
import json

from client_run import Call, Step
from scripted_upstream import SSE_HEAD, Sleep, answer, chunked, completion

KEY = {"authorization": "Bearer key-one"}
SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {"command": {"type": "string"}}}
CODEX = {
    "model": "local", "stream": True, "tool_choice": "auto", "parallel_tool_calls": True, "store": False, "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0198-aa", "client_metadata": {"x-codex-turn": "{}"},
    "text": {"verbosity": "low"},
    "input": [
        {"type": "message", "id": "m1", "role": "developer", "content": [{"type": "input_text", "text": "You are a coding agent."}]},
        {"type": "message", "id": "m2", "role": "developer", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "id": "m3", "role": "user", "content": [{"type": "input_text", "text": "<environment_context></environment_context>"}]},
        {"type": "message", "id": "m4", "role": "user", "content": [{"type": "input_text", "text": "Say hello."}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Runs.", "strict": False, "parameters": SCHEMA},
        {"type": "namespace", "name": "multi_agent_v1", "tools": [{"type": "function", "name": "spawn", "parameters": SCHEMA}]},
        {"type": "web_search", "external_web_access": True}, {"type": "tool_search", "execution": "client"},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
    ],
}  # fmt: skip
CLAUDE = {
    "model": "local-model", "stream": True, "max_tokens": 32000, "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "output_config": {"effort": "high"},
    "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'}, "safeguards": [{"type": "auto_mode"}], "betas": ["x"],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.1c9; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Rules."},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Say hello.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
        {"role": "system", "content": [{"type": "text", "text": "Environment."}]},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs.", "input_schema": SCHEMA},
        {"name": "WebFetch", "description": "Fetches.", "input_schema": SCHEMA, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
}  # fmt: skip
TITLE = {
    **{key: CLAUDE[key] for key in ("model", "stream", "max_tokens", "metadata", "messages")}, "tools": [], "temperature": 1,
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {"title": {"type": "string"}}}}},
}  # fmt: skip


def events(raw: bytes) -> list[dict]:
    return [json.loads(line[6:]) for line in raw.decode().split("\n") if line.startswith("data: ")]


def ask(laya, path: str, body: dict) -> list[dict]:
    status, raw, headers = laya.call("POST", path, body, {**KEY, "accept": "text/event-stream", "x-unknown-header": "y", "anthropic-beta": "a,b"})
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), raw
    return events(raw)


def test_codex_gets_items_that_it_can_read(translating, backend):
    """What it shows is item.done alone; a call in a namespace is told with its namespace apart."""
    backend.play(Step("Hello there."), Step(calls=[Call("c1", "multi_agent_v1__spawn", {"command": "x"})]))
    said = ask(translating, "/v1/responses", CODEX)
    done = [event["item"] for event in said if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["role"], item["content"][0]["type"]) for item in done] == [("message", "assistant", "output_text")]
    assert done[0]["content"][0]["text"].strip() == "Hello there."
    last = said[-1]
    assert last["type"] == "response.completed" and last["response"]["id"].startswith("resp_")
    assert {"input_tokens", "output_tokens", "total_tokens"} <= last["response"]["usage"].keys()
    asked = backend.asked
    assert asked["messages"][0] == {"role": "system", "content": "You are a coding agent.\n\na\n\nb"}
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["exec_command", "multi_agent_v1__spawn", "apply_patch"]
    assert not any("$schema" in tool["function"]["parameters"] for tool in asked["tools"])
    (call,) = [event["item"] for event in ask(translating, "/v1/responses", CODEX) if event["type"] == "response.output_item.done"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "spawn", "multi_agent_v1")
    assert call["call_id"] and json.loads(call["arguments"]) == {"command": "x"}


def test_claude_code_is_taken_as_it_is(translating, backend):
    """A system message in the middle, a billing line, deferred and foreign tools, members of next year; the title request too."""
    kinds = [event["type"] for event in ask(translating, "/v1/messages?beta=true", CLAUDE)]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.index("content_block_start") < kinds.index("content_block_delta") < kinds.index("content_block_stop")
    asked = backend.asked
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["Bash"] and asked["max_tokens"] == 32000
    assert asked["messages"][0] == {"role": "system", "content": "You are an agent.\n\nRules."} and "cache_control" not in json.dumps(asked)
    assert "Environment." in asked["messages"][-1]["content"] and asked["messages"][-1]["role"] == "user"
    plain = {**CLAUDE, "messages": [CLAUDE["messages"][0], {"role": "system", "content": "Environment."}]}
    ask(translating, "/v1/messages?beta=true", plain)
    assert backend.asked["messages"] == asked["messages"], "a string later and blocks now are the same prompt"
    ask(translating, "/v1/messages?beta=true", TITLE)
    assert backend.asked["response_format"]["type"] == "json_schema" and "tools" not in backend.asked
    status, raw, _ = translating.call("POST", "/v1/messages?beta=true", {**CLAUDE, "stream": False}, {"x-api-key": "key-one"})
    assert status == 200 and json.loads(raw)["type"] == "message", "what it falls back to when a stream was no good"


def test_a_burst_of_counts_is_answered(translating, backend):
    """One client asks for 24 at once."""
    body = {key: CLAUDE[key] for key in ("model", "system", "messages", "tools")}
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda _: translating.call("POST", "/v1/messages/count_tokens?beta=true", body, KEY), range(24)))
    assert all(status == 200 and json.loads(raw)["input_tokens"] > 0 for status, raw, _ in found)


def test_the_list_of_models_serves_every_client(translating):
    status, raw, _ = translating.call("GET", "/v1/models?limit=1000", headers=KEY)
    body = json.loads(raw)
    assert status == 200 and body["object"] == "list"
    assert all({"id", "object", "created", "owned_by"} <= entry.keys() for entry in body["data"])
    assert all({"name", "description", "release_date"} <= entry.keys() for entry in body["models"])
    assert translating.call("HEAD", "/")[0] < 500


WINDOW = "This model's maximum context length is 10 tokens, however the prompt is 20 tokens."
# what the backend says late: (status, error, code in the stream, words in it)
REFUSALS = [
    ("429 Too Many Requests", {"message": "Slow down."}, "rate_limit_exceeded", "try again in 7s"),
    ("429 Too Many Requests", {"message": "No money.", "code": "insufficient_quota"}, "insufficient_quota", "No money."),
    ("400 Bad Request", {"message": WINDOW}, "context_length_exceeded", "maximum context length"),
    ("400 Bad Request", {"message": "Odd.", "code": "invalid_prompt"}, "invalid_prompt", "Odd."),
    ("500 Internal Server Error", {"message": "Broken.", "code": "odd"}, "server_error", "Broken."),
]


def test_a_refusal_inside_a_begun_stream_has_the_code_that_codex_acts_on(translating, backend):
    """It reads how long to wait from the words alone."""

    def late(asked) -> list:
        status, error, _, _ = REFUSALS[int(asked.json()["messages"][-1]["content"])]
        return [Sleep(5.8), answer({"error": error}, status, "retry-after: 7\r\ncontent-type: application/json\r\n")]

    backend.upstream.script = late
    with concurrent.futures.ThreadPoolExecutor(len(REFUSALS)) as pool:
        found = pool.map(lambda i: ask(translating, "/v1/responses", {**CODEX, "input": str(i)})[-1], range(len(REFUSALS)))
        for last, (_, _, code, words) in zip(found, REFUSALS, strict=True):
            assert last["type"] == "response.failed" and last["response"]["error"]["code"] == code
            assert words in last["response"]["error"]["message"]


def test_what_langchain_asks_for_is_passed_on(translating, backend):
    """`stream: false` spelled out, a forced function without parallel calls, a schema: the backend gets the same bytes' worth."""
    tool = {"type": "function", "function": {"name": "Answer", "parameters": SCHEMA}}
    body = {"model": "m", "stream": False, "messages": [{"role": "user", "content": "hi"}], "tools": [tool], "parallel_tool_calls": False,
            "tool_choice": {"type": "function", "function": {"name": "Answer"}}}  # fmt: skip
    backend.upstream.script = lambda asked: [answer(completion("x"))]
    assert translating.call("POST", "/v1/chat/completions", body, KEY)[0] == 200 and backend.asked == body
    backend.upstream.script = lambda asked: [SSE_HEAD, chunked(b"data: [DONE]\n\n"), b"0\r\n\r\n"]
    raw = translating.call("POST", "/v1/chat/completions", {**body, "stream": True}, KEY)[1]
    assert raw == b"data: [DONE]\n\n", "no usage chunk for a client that did not ask"
