"""A router in front of a backend that has nothing but chat completions, and the SDKs that talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client_run import ChatModel, Step
from scripted_upstream import ScriptedUpstream
from sdks import KEYS, anthropic_client, openai_client
from server import Laya, running


class Backend:
    """The scripted backend; `play` sets what its model answers, or `upstream.script` what the server does."""

    def __init__(self, upstream: ScriptedUpstream) -> None:
        self.upstream = upstream
        self.model = ChatModel([Step("hi")])

    def play(self, *steps: Step) -> ChatModel:
        self.model = self.upstream.script = ChatModel(list(steps))
        return self.model

    @property
    def asked(self) -> dict:
        """The body of the last chat request."""
        return next(a for a in reversed(self.upstream.asked) if a.target.startswith("/v1/chat/completions")).json()


@pytest.fixture(scope="module")
def chat_upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream(ChatModel([Step("hi")])) as upstream:
        yield upstream


@pytest.fixture
def backend(chat_upstream) -> Backend:
    chat_upstream.asked.clear()
    made = Backend(chat_upstream)
    made.play(Step("Hello there."))
    return made


@pytest.fixture(scope="module")
def translating(chat_upstream, tmp_path_factory) -> Iterator[Laya]:
    """Two keys; a route that redacts, on which nothing may be stored; a backend that says it has no chat."""
    config = {
        "auth": {"keys": KEYS},
        "backends": {
            "up": {"url": chat_upstream.url, "health": None, "first_byte_timeout_s": 20, "idle_timeout_s": 20},
            "chatless": {"url": chat_upstream.url, "health": None, "apis": ["embeddings"]},
        },
        "routes": [
            {"name": "all", "match": "*", "to": "up"}, {"name": "none", "match": "nothing", "to": "chatless"},
            {"name": "secret", "match": "secret", "to": "up", "redact": True},
        ],
    }  # fmt: skip
    with running(config, tmp_path_factory.mktemp("translating")) as laya:
        yield laya


@pytest.fixture
def gpt(translating):
    return openai_client(translating)


@pytest.fixture
def claude(translating):
    return anthropic_client(translating)
