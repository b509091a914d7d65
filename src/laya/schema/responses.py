"""`POST /v1/responses` as a struct: unknown members are accepted, known ones have the right type or are refused.

Items and tools stay plain objects: their kinds are many, and unknown ones are skipped rather than refused. Decoders are
built once and are thread-safe.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from laya.schema.openai import Positive, Temperature, TopP


class TextOptions(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The second half are members of chat completions, which local servers take here too; they are passed on as given."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    include: list[Any] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None
    safety_identifier: str | None = None

    stop: Any = None
    seed: Any = None
    top_k: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    cache_salt: Any = None
    chat_template_kwargs: Any = None


PASSED_ON = (
    "temperature", "top_p", "stop", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "cache_salt", "chat_template_kwargs", "user", "prompt_cache_key",
)  # fmt: skip


class KeptConversation(msgspec.Struct, frozen=True):
    """What the response store holds of one answer: the answer itself, and all items up to and with its output. Or only the
    `backend` that holds them."""

    response: msgspec.Raw = msgspec.Raw()
    items: list[msgspec.Raw] = []
    own: int = 0  # how many of the items, from the end, are this answer's output
    backend: str | None = None


decode_responses = msgspec.json.Decoder(ResponsesRequest).decode
decode_kept = msgspec.json.Decoder(KeptConversation).decode
