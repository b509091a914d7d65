"""`POST /v1/messages` and its count_tokens: a request becomes a chat request; pieces of an answer become the API's own.

In: the body. Out: a `Translation`. Pure; any thread, but for `answer`, which belongs to the loop.
"""

from __future__ import annotations

from collections.abc import Callable

from laya.gateway.api.messages_answer import MessagesAnswer
from laya.gateway.api.messages_input import chat_form_of
from laya.schema.anthropic import MessagesRequest, PromptParams, decode_messages, decode_prompt

decode = decode_messages
decode_count = decode_prompt


class MessagesTranslation:
    def __init__(self, request: PromptParams, kept: None = None, referenced: dict | None = None) -> None:
        self.request = request
        self.stream = isinstance(request, MessagesRequest) and bool(request.stream)
        self.form = chat_form_of(request)

    def answer(self, model: str, keep: Callable[[str, Callable[[], bytes]], None] | None) -> MessagesAnswer:
        """Nothing is stored."""
        return MessagesAnswer(self.request, self.form.names, model)


def previous_of(request: PromptParams) -> None:
    """Every request brings its whole conversation."""


def references_of(request: PromptParams) -> list[str]:
    return []


translate = MessagesTranslation
