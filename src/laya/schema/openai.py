"""OpenAI's requests as structs: unknown members are accepted, known ones have the right type and range or are refused.

Decoders are built once and are thread-safe. A `ValidationError` names the member; `schema.fields.invalid_body` puts it in
a client's words.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Temperature = Annotated[float, Meta(ge=0)]  # no upper bound: clients of local models use more than OpenAI's 2
TopP = Annotated[float, Meta(gt=0, le=1)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Choices = Annotated[int, Meta(ge=1, le=128)]  # OpenAI's bound
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]  # OpenAI's bound
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's member for what `response_format` cannot say: one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # in Lark's form
    json_object: bool | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """The members that chat and completions share; the second half are vLLM's names for what OpenAI lacks."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    n: Choices | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    user: str | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Count | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class Message(msgspec.Struct, frozen=True):
    """`content` is text, parts, or null; what else a message carries is kept for the chat template."""

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True):
    messages: list[Message]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    prompt: str | list[Any] | None = None  # text, token ids, or a list of either
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


decode_chat = msgspec.json.Decoder(ChatRequest).decode
decode_completion = msgspec.json.Decoder(CompletionRequest).decode
