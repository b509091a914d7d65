"""Answers that native backends store: each under its own key, and at the backend that has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count

import openai
import pytest

from client_run import ChatModel, Step
from scripted_upstream import SSE_HEAD, Asked, ScriptedUpstream, answer, chunked
from sdks import KEYS, openai_client
from server import Laya, running


class Native:
    """A backend with Responses of its own, which knows its own answers only."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers = count()
        self.known: dict[str, dict] = {}

    def __call__(self, asked: Asked) -> list:
        if asked.target.startswith("/v1/responses/"):
            return self._stored(asked)
        if not asked.target.startswith("/v1/responses"):
            return ChatModel([Step(f"{self.name} by chat")])(asked)
        request = asked.json()
        previous = request.get("previous_response_id")
        if previous is not None and previous not in self.known:
            return [answer({"error": {"message": f"{self.name} does not know {previous}"}}, "404 Not Found")]
        text = [{"type": "output_text", "text": self.name, "annotations": []}]
        output = [{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": text}]
        made = {"id": f"resp_{self.name}_{next(self.numbers)}", "object": "response", "status": "completed", "output": output}
        self.known[made["id"]] = made
        if not request.get("stream"):
            return [answer(made)]
        kinds = ("response.created", "response.completed")
        frames = (f"event: {kind}\ndata: {json.dumps({'type': kind, 'response': made})}\n\n".encode() for kind in kinds)
        return [SSE_HEAD, *map(chunked, frames), b"0\r\n\r\n"]

    def _stored(self, asked: Asked) -> list:
        id = asked.target.removeprefix("/v1/responses/")
        if asked.method == "DELETE":
            self.known.pop(id)
            return [answer({"id": id, "object": "response.deleted", "deleted": True})]
        return [answer(self.known[id])] if id in self.known else [answer({"error": {"message": "unknown"}}, "404 Not Found")]


@pytest.fixture(scope="module")
def backends() -> Iterator[tuple[ScriptedUpstream, ScriptedUpstream]]:
    with ScriptedUpstream(Native("a")) as a, ScriptedUpstream(Native("b")) as b:
        yield a, b


@pytest.fixture(scope="module")
def laya(backends, tmp_path_factory) -> Iterator[Laya]:
    a, b = backends
    both = ["responses", "chat"]
    config = {
        "auth": {"keys": KEYS},
        "backends": {
            "a": {"url": a.url, "health": None, "apis": both}, "b": {"url": b.url, "health": None, "apis": both},
            "plain": {"url": a.url, "health": None, "apis": ["chat"]},
        },
        "routes": [
            {"match": "m", "to": ["a", "b"], "policy": "round_robin"}, {"match": "chat", "to": "plain"},
            {"name": "secret", "match": "secret", "to": "a", "redact": True}, {"match": "mixed", "to": ["plain", "b"], "policy": "round_robin"},
        ],
    }  # fmt: skip
    with running(config, tmp_path_factory.mktemp("native-store")) as laya:
        yield laya


@pytest.fixture
def gpt(laya):
    return openai_client(laya)


def test_a_conversation_goes_on_at_the_backend_that_has_it(gpt):
    for _ in range(3):
        first = gpt.responses.create(model="m", input="hi")
        for _ in range(3):
            again = gpt.responses.create(model="m", input="more", previous_response_id=first.id)
            assert again.output_text == first.output_text
            with gpt.responses.stream(model="m", input="more", previous_response_id=again.id) as stream:
                first = stream.get_final_response()
            assert first.output_text == again.output_text


def test_another_keys_answer_is_unknown(laya, gpt, backends):
    mine = gpt.responses.create(model="m", input="hi")
    asked = len(backends[0].asked) + len(backends[1].asked)
    other = openai_client(laya, "key-two")
    for call in (
        lambda: other.responses.create(model="m", input="x", previous_response_id=mine.id), lambda: other.responses.retrieve(mine.id),
        lambda: other.responses.delete(mine.id), lambda: gpt.responses.create(model="m", input="x", previous_response_id="resp_invented"),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            call()
    assert len(backends[0].asked) + len(backends[1].asked) == asked, "no backend was asked"


def test_read_and_delete_at_the_backend(gpt):
    for _ in range(2):
        mine = gpt.responses.create(model="m", input="hi")
        assert gpt.responses.retrieve(mine.id).output_text == mine.output_text
        gpt.responses.delete(mine.id)
        with pytest.raises(openai.NotFoundError):
            gpt.responses.retrieve(mine.id)


def test_a_conversation_that_lies_here_goes_on_anywhere(gpt, backends):
    """It is sent whole, as chat, because no backend knows it."""
    first = gpt.responses.create(model="chat", input="hi")
    assert first.output_text == "a by chat"
    again = gpt.responses.create(model="m", input="more", previous_response_id=first.id)
    assert again.output_text.endswith(" by chat")
    upstream = backends[0] if again.output_text.startswith("a") else backends[1]
    assert [m["role"] for m in upstream.asked[-1].json()["messages"]] == ["user", "assistant", "user"]
    assert gpt.responses.create(model="m", input="hi").output_text in ("a", "b"), "the backend still counts as native"


def test_a_conversation_at_a_backend_goes_back_there_from_one_without_the_api(gpt):
    first = next(r for r in (gpt.responses.create(model="m", input="hi") for _ in range(4)) if r.output_text == "b")
    for _ in range(2):
        assert gpt.responses.create(model="mixed", input="more", previous_response_id=first.id).output_text == "b"
    with pytest.raises(openai.NotFoundError):
        gpt.responses.create(model="chat", input="more", previous_response_id=first.id)


@pytest.mark.parametrize("store", [True, False])
def test_what_is_not_to_be_stored_is_not_known_afterwards(gpt, store):
    made = gpt.responses.create(model="m", input="hi", store=store)
    if store:
        assert gpt.responses.retrieve(made.id).id == made.id
        return
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(made.id)


def test_a_route_that_redacts_goes_on_from_nothing(gpt):
    kept = gpt.responses.create(model="m", input="hi")
    redacted = gpt.responses.create(model="secret", input="hi")
    with pytest.raises(openai.BadRequestError):
        gpt.responses.create(model="secret", input="x", previous_response_id=kept.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(redacted.id)
