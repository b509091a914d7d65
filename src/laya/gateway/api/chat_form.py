"""The one form that Responses and Messages requests are turned into: a chat completions body, and what leads back.

In: a translator builds it. Out: `in_process` reads it as a chat request for an engine; `encode` makes the body for a backend
that has only chat completions. Pure; any thread.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laya.errors import InvalidRequest
from laya.gateway.api.toolnames import Tool, ToolNames
from laya.schema.codec import encode_members
from laya.schema.fields import invalid_body
from laya.schema.openai import ChatRequest

# A tool of free text becomes a function of one string.
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's input, as it is."}},
    "required": ["input"],
    "additionalProperties": False,
}


class ChatForm(msgspec.Struct, kw_only=True):
    """`body` lacks model and stream. `members`: chat's words for members and the API's own, for errors about them. `thinks`
    false: the client wants no thoughts, which chat has no common word for; an engine's chat template is told."""

    body: dict[str, Any]
    names: ToolNames
    members: dict[str, str]
    thinks: bool = True

    def encode(self, model: str, stream: bool, *, capped: bool = True) -> bytes:
        """The body for a chat backend; not `capped`: without a limit on the answer, which is then the room left."""
        body = {"model": model, **self.body}
        if not capped:
            body.pop("max_tokens", None)
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            return encode_members(body)
        except RecursionError as exc:
            raise invalid_body(exc) from None

    def in_process(self) -> ChatRequest:
        """Raises InvalidRequest naming the member at fault."""
        try:
            return msgspec.convert(self.body | self._template_args(), ChatRequest)
        except msgspec.ValidationError as exc:
            raise self.own_words(invalid_body(exc)) from None

    def _template_args(self) -> dict[str, Any]:
        given = self.body.get("chat_template_kwargs")
        if self.thinks or not isinstance(given, dict | None):
            return {}
        return {"chat_template_kwargs": {"enable_thinking": False, **(given or {})}}

    def own_words(self, error: InvalidRequest) -> InvalidRequest:
        """An error about a member of chat, as one about the member that it was made from. What stands where inside is another
        matter: places in the messages are not places in the input."""
        for chats, own in self.members.items():
            if error.param is not None and error.param.startswith(chats):
                error.param = own
                break
        return error


def function_of(names: ToolNames, tool: Tool, source: dict[str, Any], parameters: object) -> dict[str, Any] | None:
    """A chat tool; None for a second one of the same name."""
    flat = names.add(tool)
    if flat is None:
        return None
    function: dict[str, Any] = {"name": flat}
    if isinstance(source.get("description"), str):
        function["description"] = source["description"]
    function["parameters"] = _schema(parameters)
    if source.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _schema(parameters: object) -> dict[str, Any]:
    """A function's schema without the `$schema` line, which some servers refuse and no model needs."""
    if not isinstance(parameters, dict):
        return {"type": "object", "properties": {}}
    return {key: value for key, value in parameters.items() if key != "$schema"}


def named_choice(flat: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": flat}}
