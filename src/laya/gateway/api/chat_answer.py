"""A chat backend's answer taken apart: pieces and an ending, from its JSON or its stream.

In: bytes of the dialects that chat servers speak. Out: pieces; `ending` once the model has said why it stopped. What cannot be
read raises BadUpstream; an error that the backend tells in its stream is raised as what it is. One object reads one answer.
Loop thread only.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from laya.errors import BadUpstream, ContextLengthExceeded, LayaError, by_status
from laya.gateway.api.answer import Ending, Usage
from laya.gateway.api.pieces import CallArguments, CallEnd, CallStart, Piece, ReasoningPiece, TextPiece
from laya.gateway.api.sampling import new_id
from laya.schema.codec import encode_members
from laya.wire.sse import MAX_EVENT_BYTES, EventStream

# How servers say that a prompt does not fit; OpenAI's code is asked for first.
_TOO_LONG = ("maximum context length", "context length", "context window", "context size", "prompt is too long")
MAX_FAULTS = 8  # of those that it lists
MAX_MESSAGE = 2000  # characters of a backend's error text that are passed on
_FIRST = (0, None, "0")  # numbers of the one choice
MAX_CALLS = 128  # tool calls in one answer; a backend that counts further is broken


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Said(msgspec.Struct):
    """A message or a delta of one."""

    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None  # the one call of servers older than `tool_calls`


class _Choice(msgspec.Struct):
    index: Any = 0  # some servers say null, or a string
    message: _Said | None = None
    delta: _Said | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


# Tokens, as far as any JSON reader has whole numbers: a count beyond that is none.
_Tokens = Annotated[int, Meta(lt=2**53)]


class _Details(msgspec.Struct):
    cached_tokens: _Tokens | None = None
    reasoning_tokens: _Tokens | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    """A completion, or a chunk of one."""

    choices: list[_Choice] | None = None
    usage: msgspec.Raw = msgspec.Raw(b"null")  # read by itself: no answer is lost for its count
    error: Any = None


_decode = msgspec.json.Decoder(_Body).decode
_decode_usage = msgspec.json.Decoder(_Usage | None, strict=False).decode  # 12.0 is a count too
# Half a surrogate pair as JSON escapes it; what must not be taken for one comes first: an escaped backslash, a whole pair.
_HALF_PAIR = re.compile(
    rb"(\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_decode_any = msgspec.json.Decoder().decode


class ChatAnswer:
    """`whole`: the model has stopped by itself, so what came is all there is. `ended`: `[DONE]` was read."""

    def __init__(self) -> None:
        self.ended = False
        self._events = EventStream()
        self._reason: str | None = None
        self._stop_match: str | None = None
        self._usage: Usage | None = None
        self._calls: list[str | None] = []  # ids, by our own count
        self._unnamed: tuple[str | None, str] | None = None  # of a call whose name has not come: id, arguments
        self._numbers: dict[int, int] = {}  # the backend's index -> ours

    @property
    def whole(self) -> bool:
        return self._reason is not None or self.ended

    @property
    def ending(self) -> Ending:
        """Raises BadUpstream when the answer stopped in the middle."""
        if not self.whole:
            raise BadUpstream("The backend ended its stream before the answer was complete.")
        reason = self._reason or "stop"
        if self._calls and reason in ("stop", "function_call"):
            reason = "tool_calls"
        return Ending(reason, self._stop_match, self._usage)

    def read_stream(self, data: bytes) -> list[Piece]:
        """The pieces in the frames that are whole now."""
        pieces: list[Piece] = []
        for _, payload, _ in self._events.feed(data):
            if payload is not None and not self.ended:
                self._read_frame(payload.strip(), pieces)
        return pieces

    def finish_stream(self) -> list[Piece]:
        """The stream has ended; a last frame may lack its blank line."""
        pieces: list[Piece] = []
        last = self._events.finish()
        if last is not None and last[1] is not None and not self.ended:
            self._read_frame(last[1].strip(), pieces)
        return pieces

    def read_body(self, data: bytes) -> list[Piece]:
        """The pieces of a plain answer."""
        body = self._decoded(data)
        if not body.choices:
            raise BadUpstream("The backend's answer has no choices.")
        pieces: list[Piece] = []
        self._read(body, pieces)
        self._reason = self._reason or "stop"
        return pieces

    def _read_frame(self, payload: bytes, pieces: list[Piece]) -> None:
        if payload == b"[DONE]":
            self.ended = True
        elif payload:
            self._read(self._decoded(payload), pieces)

    def _decoded(self, data: bytes) -> _Body:
        try:
            body = _decode(data)
        except (ValueError, RecursionError):
            body = _mended(data)
        if body.error:
            raise error_of(500, {"error": body.error})
        return body

    def _read(self, body: _Body, pieces: list[Piece]) -> None:
        for choice in body.choices or ():
            if choice.index not in _FIRST:
                continue  # one answer was asked for
            said = choice.delta or choice.message
            if said is not None:
                self._read_said(said, pieces)
            if choice.finish_reason:  # "" in every chunk is how some servers say null
                self._reason = choice.finish_reason
                if isinstance(choice.stop_reason, str):
                    self._stop_match = choice.stop_reason
        usage = _read_usage(body.usage)
        if usage is not None:
            self._usage = usage

    def _read_said(self, said: _Said, pieces: list[Piece]) -> None:
        thought = said.reasoning_content or said.reasoning
        if thought:
            pieces.append(ReasoningPiece(thought))
        for text in (_text_of(said.content), said.refusal):
            if text:
                pieces.append(TextPiece(text))
        for call in said.tool_calls or ():
            self._read_call(call, pieces)
        if said.function_call is not None and not said.tool_calls:
            self._read_call(_Call(index=0, function=said.function_call), pieces)

    def _read_call(self, call: _Call, pieces: list[Piece]) -> None:
        function = call.function or _Function()
        arguments = "" if function.arguments is None else function.arguments
        if isinstance(arguments, dict):
            arguments = encode_members(arguments).decode()
        index = self._number_of(call)
        if index == len(self._calls):
            given_id, early = self._unnamed or (None, "")
            given_id, arguments = call.id or given_id, early + arguments
            if index >= MAX_CALLS or len(arguments) > MAX_EVENT_BYTES:
                raise BadUpstream("The backend began too many tool calls, or one without a name.")
            if not function.name:  # some servers send the id first and the name with a later part
                self._unnamed = given_id, arguments
                return
            self._unnamed = None
            self._calls.append(given_id)
            pieces.append(CallStart(index, given_id or new_id("call_"), function.name))
        if arguments:
            pieces.append(CallArguments(index, arguments))

    def _number_of(self, call: _Call) -> int:
        """Our number of the call; a new one when this part begins a call. Some servers give no index, or always 0."""
        new = len(self._calls)
        if call.index is None:
            known = (call.id is None and self._unnamed is None) or call.id in self._calls
            number = (self._calls.index(call.id) if call.id in self._calls else new - 1) if known and new else new
            return max(0, number)
        number = self._numbers.get(call.index, new)
        if number < new and call.id and self._calls[number] and call.id != self._calls[number]:
            number = self._calls.index(call.id) if call.id in self._calls else new
        self._numbers[call.index] = number
        return number

    def call_ends(self) -> list[Piece]:
        """Every call is whole, now that the model has stopped by itself. Raises BadUpstream where one never got its name."""
        if self._unnamed is not None:
            raise BadUpstream("The backend sent a tool call without a name.")
        return [CallEnd(index) for index in range(len(self._calls))]


def _text_of(content: str | list[Any] | None) -> str | None:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content


def _mended(data: bytes) -> _Body:
    """An answer with text that is no Unicode (bytes of half a character, half a surrogate pair), those as U+FFFD."""
    try:
        return _decode(_HALF_PAIR.sub(lambda found: found[1] or rb"\ufffd", data.decode("utf-8", "replace").encode()))
    except (ValueError, RecursionError):
        raise BadUpstream("The backend's answer is not a chat completion.") from None


def _read_usage(raw: msgspec.Raw) -> Usage | None:
    """None where there is none, or none that can be read."""
    try:
        usage = _decode_usage(raw)
    except (ValueError, RecursionError):
        return None
    return None if usage is None else _usage_of(usage)


def _usage_of(usage: _Usage) -> Usage:
    read, written = usage.prompt_tokens_details, usage.completion_tokens_details
    told = usage.prompt_tokens, read and read.cached_tokens, usage.completion_tokens, written and written.reasoning_tokens
    prompt, cached, completion, reasoning = (max(0, count or 0) for count in told)
    return Usage(prompt, min(cached, prompt), completion, min(reasoning, completion))


def read_error(status: int, data: bytes) -> LayaError:
    """A backend's error answer as an error of ours, with its status and words."""
    try:
        body = _decode_any(data)
    except (ValueError, RecursionError):
        body = None
    return error_of(status, body if isinstance(body, dict) else {})


def error_of(status: int, body: dict[str, Any]) -> LayaError:
    told = body.get("error", body.get("detail", body))
    fields = told if isinstance(told, dict) else {"message": told}
    text = _faults_of(told) if isinstance(told, list) else fields.get("message")
    message = text[:MAX_MESSAGE] if isinstance(text, str) and text else f"The backend answered {status}."
    code = fields.get("code")
    if status in (400, 413, 500) and (code == "context_length_exceeded" or _says_too_long(message)):
        return ContextLengthExceeded(message)
    error = by_status(status, message)
    error.status = status
    if isinstance(code, str):
        error.code = code
    if isinstance(fields.get("param"), str):
        error.param = fields["param"]
    return error


def _faults_of(told: list[Any]) -> str:
    """The words of a server that lists what it found wrong: `[{"loc": [...], "msg": "..."}]`."""
    faults = [fault for fault in told[:MAX_FAULTS] if isinstance(fault, dict) and isinstance(fault.get("msg"), str)]
    places = [fault.get("loc") for fault in faults]
    return "; ".join(
        f"{'.'.join(map(str, place))}: {fault['msg']}" if isinstance(place, list) else fault["msg"]
        for place, fault in zip(places, faults, strict=True)
    )  # fmt: skip


def _says_too_long(message: str) -> bool:
    lower = message.lower()
    return any(words in lower for words in _TOO_LONG)
