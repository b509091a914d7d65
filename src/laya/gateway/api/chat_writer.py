"""The answer to a chat request under construction: chunks of a stream, or the one completion.

In: an engine's events. Out: frames, or the body at the end. Each choice has a parser of its own, which tells text from thoughts
and tool calls. See `gateway.local.Writer`. Loop thread only.
"""

from __future__ import annotations

from laya.errors import LayaError
from laya.gateway.api.pieces import CallArguments, CallEnd, CallStart, Piece, ReasoningPiece, TextPiece
from laya.gateway.api.sampling import COMMENT_FRAME, DONE_FRAME, chat_logprob, frame, new_id, now, usage_of
from laya.gateway.api.toolcalls import ToolCallParser
from laya.schema.codec import encode_json
from laya.schema.generation import Delta, Finished, Started
from laya.schema.openai import ChatRequest


class Choice:
    """One choice: its parser, and for a plain answer what it has said."""

    __slots__ = ("parser", "text", "thoughts", "calls", "entries", "reason", "thought_tokens")

    def __init__(self, parser: ToolCallParser) -> None:
        self.parser = parser
        self.text: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[dict] = []
        self.entries: list[dict] = []  # log-probabilities; in a stream those that wait for the next text
        self.reason: str | None = None
        self.thought_tokens = 0

    def pieces(self, event: Delta) -> list[Piece]:
        pieces = self.parser.feed(event.text) if event.text else []
        if event.finish_reason:
            pieces = pieces + self.parser.end()
            self.reason = "tool_calls" if self.parser.calls and event.finish_reason == "stop" else event.finish_reason
        if pieces and all(type(piece) is ReasoningPiece for piece in pieces):
            self.thought_tokens += len(event.token_ids)
        return pieces

    def keep(self, piece: Piece) -> None:
        if isinstance(piece, TextPiece):
            self.text.append(piece.text)
        elif isinstance(piece, ReasoningPiece):
            self.thoughts.append(piece.text)
        elif isinstance(piece, CallStart):
            self.calls.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        elif isinstance(piece, CallArguments):
            self.calls[piece.index]["function"]["arguments"] += piece.text

    def message(self) -> dict:
        text = "".join(self.text)
        message = {"role": "assistant", "content": text if text or not self.calls else None, "refusal": None, "annotations": []}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatWriter:
    def __init__(self, request: ChatRequest, model: str, parsers: list[ToolCallParser]) -> None:
        self.stream = bool(request.stream)
        self._usage = bool(request.stream_options and request.stream_options.include_usage)
        self._logprobs = bool(request.logprobs)
        self._quick = self.stream and not self._logprobs  # most streams: each piece of text is a chunk
        self._id = new_id("chatcmpl-")
        self._model = model
        self._created = now()
        self._choices = [Choice(parser) for parser in parsers]

    def head(self) -> bytes:
        first = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk([self._part(i, first)]) for i in range(len(self._choices)))

    def started(self, event: Started, first: int = 0) -> bytes:
        return b""

    def delta(self, event: Delta) -> bytes:
        choice = self._choices[event.index]
        if self._quick and choice.parser.plain and event.finish_reason is None:
            return self._chunk([self._part(event.index, {"content": event.text})]) if event.text else b""
        if self._logprobs:
            choice.entries += [chat_logprob(entry) for entry in event.logprobs]
        pieces = choice.pieces(event)
        if not self.stream:
            for piece in pieces:
                choice.keep(piece)
            return b""
        out = b"".join([self._delta_of(event.index, choice, piece) for piece in pieces if type(piece) is not CallEnd])
        if choice.entries and event.finish_reason:
            out += self._chunk([self._part(event.index, {"content": ""}, self._entries_of(choice))])
        if event.finish_reason:
            out += self._chunk([self._part(event.index, {}, reason=choice.reason)])
        return out

    def end(self, event: Finished) -> bytes:
        if self.stream:
            return (self._chunk([], self._usage_of(event)) if self._usage else b"") + DONE_FRAME
        choices = [
            {"index": i, "message": choice.message(), "logprobs": self._entries_of(choice), "finish_reason": choice.reason}
            for i, choice in enumerate(self._choices)
        ]
        return encode_json({
            "id": self._id, "object": "chat.completion", "created": self._created, "model": self._model,
            "system_fingerprint": None, "choices": choices, "usage": self._usage_of(event),
        })  # fmt: skip

    def _usage_of(self, event: Finished) -> dict:
        thoughts = sum(choice.thought_tokens for choice in self._choices)
        details = {"completion_tokens_details": {"reasoning_tokens": thoughts}} if thoughts else {}
        return usage_of(event) | details

    def error(self, error: LayaError) -> bytes:
        return frame(error.body())

    def keep_alive(self) -> bytes:
        return COMMENT_FRAME

    def _delta_of(self, index: int, choice: Choice, piece: Piece) -> bytes:
        """The chunk of a piece; id and name of a call stand in its first one only."""
        if isinstance(piece, TextPiece):
            return self._chunk([self._part(index, {"content": piece.text}, self._entries_of(choice))])
        if isinstance(piece, ReasoningPiece):
            return self._chunk([self._part(index, {"reasoning_content": piece.text})])
        if isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
        else:
            call = {"index": piece.index, "function": {"arguments": piece.text}}
        return self._chunk([self._part(index, {"tool_calls": [call]})])

    def _entries_of(self, choice: Choice) -> dict | None:
        """The log-probabilities that have come since they were last shown; null where none were asked for."""
        entries, choice.entries = choice.entries, []
        return {"content": entries, "refusal": None} if self._logprobs else None

    def _part(self, index: int, delta: dict, logprobs: dict | None = None, reason: str | None = None) -> dict:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, choices: list[dict], usage: dict | None = None) -> bytes:
        chunk = {
            "id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": self._model,
            "system_fingerprint": None, "choices": choices,
        }  # fmt: skip
        if self._usage:
            chunk["usage"] = usage
        return frame(chunk)
