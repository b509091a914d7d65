"""What Responses and Messages answers are built from, whoever generates: pieces, then an ending.

In: an engine's events (through `EngineWriter`) or a chat backend's answer (`chat_answer`). Out: an `Answer` of the API turns
them into frames of a stream, or into the one body at the end. Loop thread only.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from laya.errors import LayaError
from laya.gateway.api.pieces import Piece, ReasoningPiece
from laya.gateway.api.toolcalls import ToolCallParser
from laya.schema.generation import Delta, Finished, Started


class Usage(msgspec.Struct, frozen=True):
    """Tokens: of the prompt (those read from the cache among them), of the answer (thoughts among them)."""

    prompt: int
    cached: int
    completion: int
    reasoning: int = 0


class Ending(msgspec.Struct, frozen=True):
    """Why the model stopped, in chat's words: stop | length | tool_calls | content_filter. Usage None: not told."""

    reason: str
    stop_match: str | None = None
    usage: Usage | None = None


class Answer(Protocol):
    """An answer under construction. For a plain answer all but `end` return b"", and `end` returns the body."""

    stream: bool

    def head(self, prompt_tokens: int) -> bytes:
        """The first frames; `prompt_tokens` is 0 where it is not known yet."""

    def piece(self, piece: Piece) -> bytes: ...

    def end(self, ending: Ending) -> bytes: ...

    def error(self, error: LayaError) -> bytes:
        """The last frames of a stream that fails."""

    def keep_alive(self) -> bytes:
        """An event that real clients count as a sign of life."""


class EngineWriter:
    """A `gateway.local.Writer` that feeds an engine's events to an `Answer`."""

    def __init__(self, answer: Answer, parser: ToolCallParser) -> None:
        self.stream = answer.stream
        self.prompt_tokens = 0  # set when the prompt was counted, before `head` is asked for
        self._answer = answer
        self._parser = parser
        self._reason = "stop"
        self._stop_match: str | None = None
        self._thoughts = 0

    def head(self) -> bytes:
        return self._answer.head(self.prompt_tokens)

    def started(self, event: Started, first: int = 0) -> bytes:
        return b""

    def delta(self, event: Delta) -> bytes:
        pieces = self._parser.feed(event.text)
        if event.finish_reason:
            pieces = pieces + self._parser.end()
            self._reason = event.finish_reason
            self._stop_match = event.stop_match if isinstance(event.stop_match, str) else None
        if pieces and all(type(piece) is ReasoningPiece for piece in pieces):
            self._thoughts += len(event.token_ids)
        return b"".join([self._answer.piece(piece) for piece in pieces])

    def end(self, event: Finished) -> bytes:
        reason = "tool_calls" if self._reason == "stop" and self._parser.calls else self._reason
        usage = Usage(event.prompt_tokens, event.cached_tokens, event.completion_tokens, self._thoughts)
        return self._answer.end(Ending(reason, self._stop_match, usage))

    def error(self, error: LayaError) -> bytes:
        return self._answer.error(error)

    def keep_alive(self) -> bytes:
        return self._answer.keep_alive()
