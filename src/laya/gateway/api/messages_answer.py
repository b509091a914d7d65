"""An Anthropic Messages answer: the object, and the events of its stream.

In: pieces and an ending. Out: frames, or the one body. A stream has one open block at a time: what belongs to another block
while a tool call is still open waits behind it. Loop thread only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from laya.errors import LayaError
from laya.gateway.api.answer import Ending, Usage
from laya.gateway.api.anthropic_errors import error_body
from laya.gateway.api.pieces import CallArguments, CallEnd, CallStart, Piece, ReasoningPiece, TextPiece
from laya.gateway.api.sampling import new_id
from laya.gateway.api.toolnames import ToolNames
from laya.schema.anthropic import MessagesRequest
from laya.schema.codec import encode_json, encode_members
from laya.wire.sse import frame

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class Block:
    """One content block. `kind` is text, thinking or tool_use; `ended`: nothing more of it can come."""

    __slots__ = ("kind", "parts", "call_id", "name", "ended")

    def __init__(self, kind: str, call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.parts: list[str] = []
        self.call_id = call_id
        self.name = name
        self.ended = False


class MessagesAnswer:
    def __init__(self, request: MessagesRequest, names: ToolNames, model: str) -> None:
        self.stream = bool(request.stream)
        self._names = names
        thinking = request.thinking
        self._thoughts = thinking is not None and thinking.type in ("enabled", "adaptive")
        self._shown_thoughts = self._thoughts and thinking is not None and thinking.display != "omitted"
        self._content: list[dict[str, Any]] = []  # closed blocks
        self._open: Block | None = None
        self._waiting: list[Block] = []
        self._calls: dict[int, Block] = {}
        self._space = ""  # white space in front of a text, dropped when a tool call follows instead
        self._message: dict[str, Any] = {
            "id": new_id("msg_"), "type": "message", "role": "assistant", "model": model, "content": [], "stop_reason": None,
            "stop_sequence": None,
        }  # fmt: skip

    def head(self, prompt_tokens: int) -> bytes:
        message = {**self._message, "usage": _usage_of(Usage(prompt_tokens, 0, 0))}
        return self._event("message_start", message=message) + self._event("ping")

    def keep_alive(self) -> bytes:
        return self._event("ping")

    def piece(self, piece: Piece) -> bytes:
        kind = type(piece)
        if kind is TextPiece:
            return self._text(piece.text)
        if kind is CallArguments:
            return self._add(self._calls[piece.index], piece.text)
        if kind is ReasoningPiece:
            return self._written("thinking", piece.text) if self._thoughts else b""
        if kind is CallStart:
            self._space = ""
            block = self._calls[piece.index] = Block("tool_use", piece.id, self._names.meant_by(piece.name).name)
            return self._begin(block)
        if kind is CallEnd:
            self._calls[piece.index].ended = True
            return self._settle()
        return b""

    def end(self, ending: Ending) -> bytes:
        out = self._written("text", self._space) if self._space and not self._content and self._open is None else b""
        for block in (self._open, *self._waiting):
            if block is not None:
                block.ended = True
        out += self._settle() + self._close()
        reason = STOP_REASONS.get(ending.reason, "end_turn")
        if ending.stop_match is not None and reason == "end_turn":
            reason = "stop_sequence"
        matched = ending.stop_match if reason == "stop_sequence" else None
        usage = _usage_of(ending.usage)
        if not self.stream:
            return encode_members({
                **self._message, "content": self._content, "stop_reason": reason, "stop_sequence": matched, "usage": usage,
            })  # fmt: skip
        delta = {"stop_reason": reason, "stop_sequence": matched}
        return out + self._event("message_delta", delta=delta, usage=usage) + self._event("message_stop")

    def error(self, error: LayaError) -> bytes:
        return frame(encode_json(error_body(error)), b"error")

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _text(self, text: str) -> bytes:
        last = self._waiting[-1] if self._waiting else self._open
        if last is None or last.kind != "text":
            text = self._space + text
            if not text.strip():
                self._space = text
                return b""
            self._space = ""
        return self._written("text", text)

    def _written(self, kind: str, text: str) -> bytes:
        """More of the last block, or the first of a new one."""
        last = self._waiting[-1] if self._waiting else self._open
        if last is not None and last.kind == kind:
            return self._add(last, text)
        block = Block(kind)
        return self._begin(block) + self._add(block, text)

    def _begin(self, block: Block) -> bytes:
        """Open it, or put it in line behind a tool call that is not whole yet."""
        last = self._waiting[-1] if self._waiting else self._open
        if last is not None and last.kind != "tool_use":
            last.ended = True
        self._waiting.append(block)
        return self._settle()

    def _add(self, block: Block, text: str) -> bytes:
        block.parts.append(text)
        return self._delta(block, text) if block is self._open else b""

    def _settle(self) -> bytes:
        """Close what has ended and open what waits, as far as that goes."""
        out = b""
        while self._waiting and (self._open is None or self._open.ended):
            out += self._close()
            self._open = self._waiting.pop(0)
            out += self._start(self._open)
        return out

    def _start(self, block: Block) -> bytes:
        if not self.stream:
            return b""
        if block.kind == "tool_use":
            shown: dict[str, Any] = {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        elif block.kind == "thinking":
            shown = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            shown = {"type": "text", "text": ""}
        out = self._event("content_block_start", index=len(self._content), content_block=shown)
        return out + self._delta(block, "".join(block.parts))

    def _delta(self, block: Block, text: str) -> bytes:
        if not self.stream or not text or (block.kind == "thinking" and not self._shown_thoughts):
            return b""
        if block.kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            delta = {"type": f"{block.kind}_delta", block.kind: text}
        return self._event("content_block_delta", index=len(self._content), delta=delta)

    def _close(self) -> bytes:
        block, self._open = self._open, None
        if block is None:
            return b""
        index, out = len(self._content), b""
        shown = self._shown(block)
        if block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": shown["signature"]}
            out = self._event("content_block_delta", index=index, delta=signature)
        self._content.append(shown)
        return out + self._event("content_block_stop", index=index)

    def _shown(self, block: Block) -> dict[str, Any]:
        text = "".join(block.parts)
        if block.kind == "tool_use":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _input_of(text)}
        if block.kind == "thinking":  # clients send the block back whole, and drop one without a signature
            return {"type": "thinking", "thinking": text if self._shown_thoughts else "", "signature": new_id("laya")}
        return {"type": "text", "text": text}

    def _event(self, kind: str, **members: Any) -> bytes:
        return frame(encode_json({"type": kind, **members}), kind.encode()) if self.stream else b""


def _input_of(arguments: str) -> dict[str, Any]:
    """The arguments as the object that the API promises, whatever the model wrote."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (ValueError, RecursionError):
        return {"__unparsedToolInput": {"raw": arguments, "len": len(arguments)}}


def _usage_of(usage: Usage | None) -> dict[str, int]:
    """The prompt's tokens apart by where they were read from, as Anthropic counts them."""
    counted = usage or Usage(0, 0, 0)
    return {
        "input_tokens": counted.prompt - counted.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counted.cached,
        "output_tokens": counted.completion,
    }
