"""A Responses answer: the object, and the events that clients build their history from.

In: pieces and an ending. Out: frames, or the one body. What enters a client's history is `response.output_item.done`; for a
tool call it is held until the whole step has ended, because clients run the tool at that moment, and would run it again if
the step failed behind it. The last event is exactly one of response.completed, .incomplete and .failed. Loop thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from laya.errors import LayaError
from laya.gateway.api.answer import Ending, Usage
from laya.gateway.api.pieces import CallArguments, CallEnd, CallStart, Piece, ReasoningPiece, TextPiece
from laya.gateway.api.responses_items import CallItem, MessageItem, OutputItem, ReasoningItem
from laya.gateway.api.sampling import new_id, now
from laya.gateway.api.toolnames import ToolNames
from laya.schema.codec import encode_json, encode_members
from laya.schema.responses import ResponsesRequest
from laya.wire.sse import frame

# The codes of a failure that clients act on; all others are told as server_error, which they retry.
FAILURE_CODES = frozenset({"context_length_exceeded", "rate_limit_exceeded", "insufficient_quota", "invalid_prompt"})

Keep = Callable[[str, dict[str, Any]], None]


class ResponsesAnswer:
    """`keep(id, response)` is called with the whole answer when the client wants it stored."""

    def __init__(self, request: ResponsesRequest, names: ToolNames, model: str, keep: Keep | None) -> None:
        self.stream = bool(request.stream)
        self._names = names
        self._keep = keep
        self._sequence = 0
        self._items: list[OutputItem] = []
        self._calls: dict[int, CallItem] = {}
        self._open: OutputItem | None = None  # the message or thought that is being written
        self._space = ""  # white space in front of a text, dropped when a tool call follows instead
        self._response = _response_of(request, model, keep is not None)

    def head(self, prompt_tokens: int) -> bytes:
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def keep_alive(self) -> bytes:
        return self._lifecycle("response.in_progress")

    def piece(self, piece: Piece) -> bytes:
        kind = type(piece)
        if kind is TextPiece:
            return self._text(piece.text)
        if kind is CallArguments:
            call = self._calls[piece.index]
            return self._events(call.add(piece.text))
        if kind is ReasoningPiece:
            return self._written(ReasoningItem, piece.text)
        if kind is CallStart:
            return self._start_call(piece)
        if kind is CallEnd:
            self._calls[piece.index].ended = True
        return b""

    def end(self, ending: Ending) -> bytes:
        incomplete = _incomplete_reason(ending.reason)
        out = b"" if self._items else self._written(MessageItem, self._space)
        out += self._close(incomplete is not None)
        for call in self._calls.values():
            call.settle(cut=incomplete is not None)
            if call.status == "completed":
                out += self._events(call.close())
        response = self._response
        response["output"] = [item.shown() for item in self._items]
        response["usage"] = _usage_of(ending.usage)
        response["status"] = "incomplete" if incomplete else "completed"
        response["incomplete_details"] = {"reason": incomplete} if incomplete else None
        if self._keep is not None:
            self._keep(response["id"], response)
        return out + self._lifecycle(f"response.{response['status']}") if self.stream else encode_members(response)

    def error(self, error: LayaError) -> bytes:
        """Whatever went before: response.failed, with a text and a code that clients act on."""
        code = error.code if error.code in FAILURE_CODES else "server_error"
        message = error.message
        if error.retry_after is not None:  # one client reads the time from these words and from nowhere else
            message = f"{message} Please try again in {max(1.0, error.retry_after):g}s."
        self._response |= {
            "status": "failed", "error": {"code": code, "message": message},
            "output": [item.shown() for item in self._items if item.status == "completed"],
        }  # fmt: skip
        return self._lifecycle("response.failed")

    # -- items ---------------------------------------------------------------------------------------------------------

    def _text(self, text: str) -> bytes:
        if not isinstance(self._open, MessageItem):
            text = self._space + text
            if not text.strip():
                self._space = text
                return b""
            self._space = ""
        return self._written(MessageItem, text)

    def _written(self, kind: type[OutputItem], text: str) -> bytes:
        """More of the open item, or the first of a new one."""
        if type(self._open) is kind:
            return self._events(self._open.add(text))
        out = self._close(False)
        item = self._open = kind(len(self._items))
        self._items.append(item)
        return out + self._events(item.start()) + self._events(item.add(text))

    def _close(self, cut: bool) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        item.status = "incomplete" if cut else "completed"
        return self._events(item.close())

    def _start_call(self, piece: CallStart) -> bytes:
        out = self._close(False)
        self._space = ""
        call = CallItem(len(self._items), piece.id, self._names.meant_by(piece.name))
        self._items.append(call)
        self._calls[piece.index] = call
        return out + self._events(call.start())

    # -- frames --------------------------------------------------------------------------------------------------------

    def _events(self, events: list[dict[str, Any]]) -> bytes:
        return b"".join([self._event(event) for event in events]) if self.stream else b""

    def _event(self, event: dict[str, Any], encode: Callable[[Any], bytes] = encode_json) -> bytes:
        event["sequence_number"] = self._sequence
        self._sequence += 1
        return frame(encode(event), event["type"].encode())

    def _lifecycle(self, kind: str) -> bytes:
        return self._event({"type": kind, "response": self._response}, encode_members) if self.stream else b""


def _response_of(request: ResponsesRequest, model: str, stored: bool) -> dict[str, Any]:
    reasoning, text = request.reasoning, request.text
    return {
        "id": new_id("resp_"), "object": "response", "created_at": now(), "status": "in_progress", "background": False,
        "error": None, "incomplete_details": None, "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens, "max_tool_calls": request.max_tool_calls, "model": model, "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id, "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": request.safety_identifier, "service_tier": "default", "store": stored,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {
            "format": _as_given(text and text.format, {"type": "text"}), "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": _as_given(request.tool_choice, "auto"), "tools": _as_given(request.tools, []), "top_logprobs": 0,
        "top_p": 1.0 if request.top_p is None else request.top_p, "truncation": "disabled", "usage": None,
        "user": request.user, "metadata": _as_given(request.metadata, {}),
    }  # fmt: skip


def _as_given(value: Any, default: Any) -> msgspec.Raw:
    """What the answer repeats of the request: encoded once, however many events repeat it."""
    return msgspec.Raw(encode_members(value or default))


def _incomplete_reason(reason: str) -> str | None:
    return {"length": "max_output_tokens", "content_filter": "content_filter"}.get(reason)


def _usage_of(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
