"""Stored responses: conversations that go on, are read, listed and deleted, by their own key alone."""

from __future__ import annotations

import itertools
import json

import openai
import pytest

from client_run import Call, Step
from sdks import openai_client
from server import running

AUTH = {"authorization": "Bearer key-one"}


def test_a_conversation_goes_on_from_its_last_answer(gpt, backend):
    tools = [{"type": "function", "name": "add", "parameters": {}}]
    backend.play(Step("", (Call("c1", "add", {"a": 1}),)))
    first = gpt.responses.create(model="m", input="go", instructions="Be brief.", tools=tools)
    backend.play(Step("It is 2."))
    result = [{"type": "function_call_output", "call_id": "c1", "output": "2"}]
    second = gpt.responses.create(model="m", input=result, previous_response_id=first.id, tools=tools)
    assert [m["role"] for m in backend.asked["messages"]] == ["user", "assistant", "tool"], "instructions are not taken over"
    third = gpt.responses.create(model="m", input="thanks", previous_response_id=second.id)
    assert [m["role"] for m in backend.asked["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
    assert third.previous_response_id == second.id
    assert gpt.responses.create(model="m", input="other", previous_response_id=first.id), "a conversation may branch"


def test_a_streamed_answer_is_stored_too(gpt, backend):
    with gpt.responses.stream(model="m", input="hi") as stream:
        final = stream.get_final_response()
    assert gpt.responses.retrieve(final.id).output_text == final.output_text


def test_read_list_and_delete(gpt, backend, translating):
    first = gpt.responses.create(model="m", input="hi")
    second = gpt.responses.create(model="m", input="again", previous_response_id=first.id)
    assert gpt.responses.retrieve(second.id).to_dict() == second.to_dict()
    newest_first = [item.role for item in gpt.responses.input_items.list(second.id)]
    assert newest_first == ["user", "assistant", "user"]
    listed = json.loads(translating.get(f"/v1/responses/{second.id}/input_items?order=asc&limit=1", AUTH)[1])
    assert listed["has_more"] and listed["data"][0]["content"] == "hi"
    gpt.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.delete(second.id)


@pytest.mark.parametrize("known", [lambda i: {"id": f"msg_c{i}"}, lambda i: {}, lambda i: {"id": "msg_same"}], ids=["ids", "none", "equal"])
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_long_input_is_listed_page_by_page(gpt, backend, known, order):
    texts = [f"m{i}" for i in range(45)]
    items = [{"type": "message", "role": "user", "content": text, **known(i)} for i, text in enumerate(texts)]
    first = gpt.responses.create(model="m", input=items)
    pages = list(itertools.islice(gpt.responses.input_items.list(first.id, order=order).iter_pages(), 10))
    found = [item for page in pages for item in page.data]
    assert len(pages) == 3 and [item.content for item in found] == (texts if order == "asc" else texts[::-1])
    assert len({item.id for item in found}) == 45 and pages[0].last_id == pages[0].data[-1].id


def test_a_large_input_is_listed_beside_the_loop(gpt, backend):
    items = [{"role": "user", "content": "x" * 20_000} for _ in range(5)]
    assert len(list(gpt.responses.input_items.list(gpt.responses.create(model="m", input=items).id, limit=2))) == 5


def test_what_a_stored_answer_cannot_be_asked_for_is_said(gpt, backend, translating):
    first = gpt.responses.create(model="m", input="hi")
    for query in ("limit=0", "limit=101", "limit=x", f"limit=000000001{'9' * 5000}", "after=msg_unknown"):
        status, raw, _ = translating.call("GET", f"/v1/responses/{first.id}/input_items?{query}", headers=AUTH)
        assert status == 400 and json.loads(raw)["error"]["param"] == query.partition("=")[0], query
    with pytest.raises(openai.BadRequestError, match="as a stream"):
        gpt.responses.retrieve(first.id, stream=True)


def test_stored_items_can_be_named_instead_of_sent(gpt, backend, translating):
    """What one agent library does with every earlier item while it stores."""
    backend.play(Step("I look.", (Call("c1", "add", {"a": 1}),)))
    first = gpt.responses.create(model="m", input="go", tools=[{"type": "function", "name": "add", "parameters": {}}])
    named = [{"type": "item_reference", "id": item.id} for item in first.output]
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    given = {"model": "m", "input": [{"role": "user", "content": "go"}, *named, result]}
    backend.play(Step("It is 2."))
    second = gpt.responses.create(**given)
    assert [m["role"] for m in backend.asked["messages"]] == ["user", "assistant", "tool"]
    assert backend.asked["messages"][1]["content"] == "I look." and backend.asked["messages"][1]["tool_calls"][0]["id"] == "c1"
    gpt.responses.create(model="m", input="more", previous_response_id=second.id)
    assert [m["role"] for m in backend.asked["messages"]] == ["user", "assistant", "tool", "assistant", "user"]
    for client in (openai_client(translating, "key-two"), gpt):
        if client is gpt:
            gpt.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.create(**given)


def test_what_was_not_to_be_stored_is_not(gpt, backend):
    response = gpt.responses.create(model="m", input="hi", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError) as caught:
        gpt.responses.create(model="m", input="again", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"


def test_another_keys_answer_is_unknown(gpt, backend, translating):
    response = gpt.responses.create(model="m", input="hi")
    other = openai_client(translating, "key-two")
    for call in (
        lambda: other.responses.retrieve(response.id), lambda: other.responses.delete(response.id),
        lambda: other.responses.input_items.list(response.id),
        lambda: other.responses.create(model="m", input="x", previous_response_id=response.id),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            call()
    assert translating.get(f"/v1/responses/{response.id}")[0] == 401
    assert gpt.responses.retrieve(response.id).id == response.id


def test_a_route_that_redacts_stores_nothing(gpt, backend):
    kept = gpt.responses.create(model="m", input="hi")
    redacted = gpt.responses.create(model="secret", input="hi")
    assert redacted.store is False
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model="secret", input="x", previous_response_id=kept.id)
    assert caught.value.param == "previous_response_id"


def test_answers_are_never_cached(gpt, backend):
    """(case 61) Equal requests are two answers with two ids."""
    model = backend.play(Step("one"), Step("two"))
    answers = [gpt.responses.create(model="m", input="hi", temperature=0) for _ in range(2)]
    assert [a.output_text for a in answers] == ["one", "two"] and len(model.asked) == 2


def test_odd_paths_and_methods(translating):
    assert translating.call("POST", "/v1/responses/resp_1", {}, AUTH)[0] == 405
    assert translating.get("/v1/responses/resp_1/other", AUTH)[0] == 404
    assert translating.get("/v1/responses/resp_1/input_items?limit=x", AUTH)[0] == 404
    assert translating.get("/v1/responses/%00", AUTH)[0] == 404


def test_a_conversation_outlives_a_restart_in_the_persistent_mode(chat_upstream, backend, tmp_path):
    config = {
        "router": {"mode": "persistent", "path": str(tmp_path / "kept.sqlite")},
        "backends": {"up": {"url": chat_upstream.url, "health": None}}, "routes": [{"match": "*", "to": "up"}],
    }  # fmt: skip
    with running(config, tmp_path) as laya:
        first = openai_client(laya).responses.create(model="m", input="hi")
        assert laya.stop() == 0
    with running(config, tmp_path) as laya:
        client = openai_client(laya)
        assert client.responses.retrieve(first.id).output_text == first.output_text
        assert client.responses.create(model="m", input="again", previous_response_id=first.id).output_text
        assert [m["role"] for m in backend.asked["messages"]] == ["user", "assistant", "user"]


def test_a_large_conversation_is_worked_on_beside_the_loop(gpt, backend):
    text = "many words " * 20_000
    first = gpt.responses.create(model="m", input=text)
    second = gpt.responses.create(model="m", input=text, previous_response_id=first.id)
    assert backend.asked["messages"][0]["content"] == text and second.output_text
    assert gpt.responses.retrieve(second.id).output_text
