"""`POST /v1/chat/completions` for an in-process engine: the request's messages, tools and form become one generation.

Responses and Messages requests come here too, once they are chat requests. `chat_writer` builds the answer. Pure; any thread.
"""

from __future__ import annotations

from typing import Any

from laya.errors import InvalidRequest
from laya.gateway.api.chat_writer import ChatWriter
from laya.gateway.api.sampling import sampling_of
from laya.gateway.api.structured import grammar_of
from laya.gateway.api.toolcalls import ToolCallParser, parser_for, style_of_card
from laya.gateway.api.toolplan import ToolPlan, plan_tools
from laya.schema.generation import ChatPrompt, GenerationRequest, ModelCard
from laya.schema.openai import ChatRequest, Message, decode_chat

name = "chat"
# What clients call a role, and what chat templates know.
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool",
}  # fmt: skip
MAX_MESSAGES = 20_000  # far beyond any window; keeps the template's work bounded

decode = decode_chat


def generations_of(request: ChatRequest, request_id: str, client: str, card: ModelCard) -> list[GenerationRequest]:
    """Always one. Raises InvalidRequest naming the member at fault."""
    plan = tools_of(request, card)
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    prompt = ChatPrompt(
        messages=messages_of(request.messages), tools=plan.shown, template_args=request.chat_template_kwargs or {}
    )  # fmt: skip
    sampling = sampling_of(request, max_tokens=limit, logprobs=logprobs)
    return [GenerationRequest(
        id=request_id, prompt=prompt, sampling=sampling, client=client, salt=request.cache_salt or "",
        grammar=plan.grammar or grammar_of(request),
    )]  # fmt: skip


def tools_of(request: ChatRequest, card: ModelCard) -> ToolPlan:
    return plan_tools(request.tools, request.tool_choice, request.parallel_tool_calls, style_of_card(card.details))


def parser_of(request: ChatRequest, card: ModelCard) -> ToolCallParser:
    """Reads one choice of the answer. A model that must answer in a given form, or was told not to think, is not thinking."""
    plan = tools_of(request, card)
    formed = plan.grammar is not None or grammar_of(request) is not None
    told = (request.chat_template_kwargs or {}).get("enable_thinking", (request.chat_template_kwargs or {}).get("thinking"))
    return parser_for(
        "", style=style_of_card(card.details), tools=bool(plan.shown), names=plan.names,
        parallel=request.parallel_tool_calls is not False, thinking=not formed and told is not False,
    )  # fmt: skip


def messages_of(messages: list[Message]) -> tuple[dict[str, Any], ...]:
    if not messages:
        raise InvalidRequest("`messages` must not be empty.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"`messages` has more than {MAX_MESSAGES} entries.", param="messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: Message, where: str) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"The role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    result: dict[str, Any] = {"role": role, "content": text_of(message.content, where)}
    for key in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        value = getattr(message, key)
        if value is not None:
            result[key] = value
    return result


def text_of(content: str | list[Any] | None, where: str) -> str:
    """Content as one text: a list of one text part and the same string make the same tokens."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        place = f"{where}.content[{i}]"
        if not isinstance(part, dict):
            raise InvalidRequest("A content part must be an object with a `type`.", param=place)
        kind = part.get("type")
        key = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "refusal"):
            raise InvalidRequest(f"This model reads text only; a part of type {kind!r} cannot be used.", param=f"{place}.type")
        if not isinstance(part.get(key), str):
            raise InvalidRequest(f"`{key}` must be a string.", param=f"{place}.{key}")
        texts.append(part[key])
    return "".join(texts)


def writer_of(request: ChatRequest, model: str, prompts: int, card: ModelCard) -> ChatWriter:
    return ChatWriter(request, model, [parser_of(request, card) for _ in range(request.n or 1)])
