"""`POST /v1/chat/completions` for an in-process engine: messages in, one completion or a stream of chunks out."""

from __future__ import annotations

from typing import Any

from laya.errors import InvalidRequest, LayaError
from laya.gateway.api.sampling import COMMENT_FRAME, DONE_FRAME, chat_logprob, frame, new_id, now, sampling_of, usage_of
from laya.schema.codec import encode_json
from laya.schema.generation import ChatPrompt, Delta, Finished, GenerationRequest, Started
from laya.schema.openai import ChatRequest, Message, decode_chat

name = "chat"
# What clients call a role, and what chat templates know.
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool",
}  # fmt: skip
MAX_MESSAGES = 20_000  # far beyond any window; keeps the template's work bounded

decode = decode_chat


def generations_of(request: ChatRequest, request_id: str, client: str) -> list[GenerationRequest]:
    """Always one. Raises InvalidRequest naming the member at fault."""
    if request.response_format is not None and request.response_format.type != "text":
        raise InvalidRequest("`response_format` is not supported by the in-process engine.", param="response_format")
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("`top_logprobs` needs `logprobs` to be true.", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    tools = () if request.tool_choice == "none" else tuple(request.tools or ())
    prompt = ChatPrompt(messages=messages_of(request.messages), tools=tools, template_args=request.chat_template_kwargs or {})
    sampling = sampling_of(request, max_tokens=limit, logprobs=logprobs)
    salt = request.cache_salt or ""
    return [GenerationRequest(id=request_id, prompt=prompt, sampling=sampling, client=client, salt=salt)]


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


class ChatWriter:
    """Builds the answer to one request; see `gateway.local.Writer`."""

    def __init__(self, request: ChatRequest, model: str, prompts: int) -> None:
        self.stream = bool(request.stream)
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._logprobs = bool(request.logprobs)
        self._id = new_id("chatcmpl-")
        self._model = model
        self._created = now()
        n = request.n or 1
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._entries: list[list[dict]] = [[] for _ in range(n)]
        self._reasons: list[str | None] = [None] * n

    def _chunk(self, choices: list[dict], usage: dict | None = None) -> bytes:
        chunk = {
            "id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model,
            "system_fingerprint": None, "choices": choices,
        }  # fmt: skip
        if self._usage:
            chunk["usage"] = usage
        return frame(chunk)

    def _choice(self, index: int, delta: dict, logprobs: dict | None = None, reason: str | None = None) -> dict:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def head(self) -> bytes:
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk([self._choice(i, first)]) for i in range(len(self._texts)))

    def started(self, event: Started, first: int = 0) -> bytes:
        return b""

    def delta(self, event: Delta) -> bytes:
        index = event.index
        entries = [chat_logprob(entry) for entry in event.logprobs] if self._logprobs else []
        if not self.stream:
            self._texts[index].append(event.text)
            self._entries[index].extend(entries)
            if event.finish_reason:
                self._reasons[index] = event.finish_reason
            return b""
        out = b""
        if event.text or entries:
            logprobs = {"content": entries, "refusal": None} if self._logprobs else None
            out = self._chunk([self._choice(index, {"content": event.text}, logprobs)])
        if event.finish_reason:
            out += self._chunk([self._choice(index, {}, reason=event.finish_reason)])
        return out

    def end(self, event: Finished) -> bytes:
        if self.stream:
            return (self._chunk([], usage_of(event)) if self._usage else b"") + DONE_FRAME
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": "".join(text), "refusal": None, "annotations": []},
                "logprobs": {"content": entries, "refusal": None} if self._logprobs else None,
                "finish_reason": reason,
            }
            for i, (text, entries, reason) in enumerate(zip(self._texts, self._entries, self._reasons, strict=True))
        ]
        return encode_json({
            "id": self._id, "object": "chat.completion", "created": self._created, "model": self._model,
            "system_fingerprint": None, "choices": choices, "usage": usage_of(event),
        })  # fmt: skip

    def error(self, error: LayaError) -> bytes:
        return frame(error.body())

    def keep_alive(self) -> bytes:
        return COMMENT_FRAME


writer_of = ChatWriter
