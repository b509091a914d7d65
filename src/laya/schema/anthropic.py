"""`POST /v1/messages` as structs: unknown members are accepted, known ones have the right type or are refused.

Content blocks and tools stay plain objects: clients send kinds that are newer than any list. Decoders are built once and
are thread-safe.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from laya.schema.openai import Positive, Temperature, TopP

Blocks = list[dict[str, Any]]


class MessageParam(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ThinkingParam(msgspec.Struct, frozen=True):
    type: str | None = None
    display: str | None = None
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None
    effort: str | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class PromptParams(msgspec.Struct, frozen=True, kw_only=True):
    """The members that make the prompt: all that counting needs."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | Blocks | None = None
    tools: Blocks | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the older place of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(PromptParams, frozen=True, kw_only=True):
    max_tokens: Positive
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Any = None
    cache_salt: Any = None


decode_messages = msgspec.json.Decoder(MessagesRequest).decode
decode_prompt = msgspec.json.Decoder(PromptParams).decode
