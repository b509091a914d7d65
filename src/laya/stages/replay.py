"""The one form in which an answer is kept, made from a plain answer or a stream, and told again as either.

In: whole answers of chat and completions (plain or events), and plain ones of the other APIs. Out: the plain body; or None
where an answer must not be kept: an error, one that is cut, one that ended for another reason than its own. Pure; any thread.

A stream told again has the whole text in one delta, or in a few where it is long: it is there already, and clients join deltas
anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from laya.schema.codec import decode_members, encode_members
from laya.stages.cache_key import Question

# How an answer ends by itself. `length` counts only where the request set the limit; a filter may decide otherwise next time.
WHOLE_ENDS = frozenset({"stop", "tool_calls", "function_call"})
OBJECTS = {"chat": ("chat.completion", "chat.completion.chunk"), "completions": ("text_completion", "text_completion")}
_OWN = frozenset({"choices", "usage", "object"})
# Characters of one delta: with six bytes for each still far below what readers of streams take as one event.
DELTA_CHARS = 64 * 1024

# What shapes that no server of the API sends end in.
_ODD = (TypeError, AttributeError, KeyError, ValueError)

_decode = msgspec.json.Decoder(dict[str, Any]).decode


def from_plain(api: str, body: bytes, question: Question) -> bytes | None:
    """The body, if it may be kept."""
    if api not in OBJECTS:  # numbers in their thousands, which need not be read
        try:
            error = decode_members(body).get("error")
        except (ValueError, RecursionError):
            return None
        return body if error is None or bytes(error) == b"null" else None
    answer = _object(body)
    if answer is None or answer.get("error") is not None:
        return None
    try:
        return body if _ended(answer, question) and _events(api, answer, True) else None
    except _ODD:  # it could not be told as a stream
        return None


def from_stream(api: str, events: list[bytes], tokens: tuple[int, int] | None, question: Question) -> tuple[bytes, bool] | None:
    """(plain body, whether it has usage) of the data of a stream's events, the mark of the end among them. `tokens` are those
    of prompt and answer, where we counted ourselves."""
    if not events or events[-1].strip() != b"[DONE]":
        return None
    try:
        return _joined(api, events[:-1], tokens, question)
    except _ODD:
        return None


def _joined(api: str, events: list[bytes], tokens, question: Question) -> tuple[bytes, bool] | None:
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for data in events:
        chunk = _object(data)
        if chunk is None or chunk.get("error") is not None:
            return None
        _join(answer, {key: value for key, value in chunk.items() if key not in ("choices", "object")}, ())
        for piece in chunk.get("choices") or ():
            _add_choice(choices.setdefault(piece.get("index", 0), {}), piece)
    answer["object"] = OBJECTS[api][0]
    answer["choices"] = [_closed(api, index, _settled(choices[index])) for index in sorted(choices)]
    if answer.get("usage") is None:
        answer.pop("usage", None)
        if tokens is not None:
            prompt, completion = tokens
            answer["usage"] = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return (encode_members(answer), "usage" in answer) if _ended(answer, question) else None


def told_as_stream(api: str, body: bytes, with_usage: bool) -> bytes:
    """The events of a kept answer."""
    return _events(api, _decode(body), with_usage)


def _events(api: str, answer: dict[str, Any], with_usage: bool) -> bytes:
    head = {key: value for key, value in answer.items() if key not in _OWN}
    head["object"] = OBJECTS[api][1]
    if with_usage:
        head["usage"] = None
    frames = []
    for choice in answer["choices"]:
        for piece in _pieces(api, choice):
            frames.append(b"data: " + encode_members({**head, "choices": [{"index": choice["index"], **piece}]}) + b"\n\n")
    if with_usage and answer.get("usage") is not None:
        frames.append(b"data: " + encode_members({**head, "choices": [], "usage": answer["usage"]}) + b"\n\n")
    frames.append(b"data: [DONE]\n\n")
    return b"".join(frames)


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        return _decode(data)
    except (ValueError, RecursionError):
        return None


def _ended(answer: dict[str, Any], question: Question) -> bool:
    """Every choice ended by itself, or at the limit that the request set."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        return False
    reasons = {choice.get("finish_reason") for choice in choices}
    if reasons <= WHOLE_ENDS:
        return True
    usage = answer.get("usage")
    used = usage.get("completion_tokens") if isinstance(usage, dict) else None
    reached = type(used) is int and question.limit is not None and used >= question.limit
    return reached and reasons <= WHOLE_ENDS | {"length"}


# -- from deltas to a message ------------------------------------------------------------------------------------------

# Members of a delta that are given once, not piece by piece.
_ONCE = frozenset({"role", "id", "type", "name", "index", "finish_reason", "stop_reason"})


class _Text:
    """A text that still grows: to join it at each piece would take time with the square of its length."""

    __slots__ = ("pieces",)

    def __init__(self, first: str) -> None:
        self.pieces = [first]


def _settled(value: Any) -> Any:
    """The value with its texts joined."""
    if isinstance(value, _Text):
        return "".join(value.pieces)
    if isinstance(value, dict):
        return {key: _settled(member) for key, member in value.items()}
    return [_settled(item) for item in value] if isinstance(value, list) else value


def _add_choice(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    rest = {key: value for key, value in piece.items() if key not in ("delta", "index")}
    _join(choice, rest, _ONCE)
    delta = piece.get("delta")
    if isinstance(delta, dict):
        _join(choice.setdefault("message", {}), delta, _ONCE)


def _join(whole: dict[str, Any], piece: dict[str, Any], once) -> None:
    """Texts and lists go on, maps are joined, everything else is replaced; null takes nothing away. `once` names texts that
    do not go on; () stands for all, and for lists too."""
    for key, value in piece.items():
        had = whole.get(key)
        if value is None or had is None:
            if had is None:
                whole[key] = _listed(value) if key == "tool_calls" and value else value
        elif isinstance(value, str) and isinstance(had, str | _Text) and once and key not in once:
            if isinstance(had, str):
                had = whole[key] = _Text(had)
            had.pieces.append(value)
        elif isinstance(value, list) and isinstance(had, list) and once:
            if key == "tool_calls":
                _calls(had, value)
            else:
                had.extend(value)
        elif isinstance(value, dict) and isinstance(had, dict):
            _join(had, value, once)
        else:
            whole[key] = value


def _listed(calls: list[Any]) -> list[Any]:
    return _calls([], calls)


def _calls(had: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for piece in pieces:
        call = next((call for call in had if call.get("index") == piece.get("index")), None)
        if call is None:
            had.append(piece)
        else:
            _join(call, piece, _ONCE)
    return had


def _closed(api: str, index: int, choice: dict[str, Any]) -> dict[str, Any]:
    """A choice with the members that a plain answer always has, in their order."""
    rest = {"logprobs": None, "finish_reason": None, **{key: value for key, value in choice.items() if key != "message"}}
    if api != "chat":
        return {"index": index, "text": rest.pop("text", "") or "", **rest}
    message = {"role": "assistant", "content": None, "refusal": None, **choice.get("message", {})}
    if message.get("tool_calls"):
        message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in message["tool_calls"]]
    return {"index": index, "message": message, **rest}


# -- from a message to deltas ------------------------------------------------------------------------------------------


def _pieces(api: str, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    logprobs, reason = choice.get("logprobs"), choice.get("finish_reason")
    more = {k: v for k, v in choice.items() if k not in ("index", "message", "text", "logprobs", "finish_reason")}
    if api != "chat":
        first, *rest = _cut(choice.get("text", ""))
        yield {"text": first, "logprobs": logprobs, "finish_reason": None}
        for text in rest:
            yield {"text": text, "logprobs": None, "finish_reason": None}
        yield {"text": "", "logprobs": None, "finish_reason": reason, **more}
        return
    message = choice.get("message") or {}
    first = {"role": message.get("role", "assistant"), "content": None if message.get("content") is None else ""}
    yield {"delta": first, "logprobs": None, "finish_reason": None}
    delta = {key: value for key, value in message.items() if key != "role" and value is not None and value != ""}
    if delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    for place, piece in enumerate(_deltas(delta) if delta else ()):
        yield {"delta": piece, "logprobs": None if place else logprobs, "finish_reason": None}
    yield {"delta": {}, "logprobs": None, "finish_reason": reason, **more}


def _deltas(delta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The delta itself where it is short; what is long in it, also a tool call's arguments, comes in pieces behind it."""
    later: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    for name, value in delta.items():
        if name == "tool_calls":
            value = [_shortened(call, later) for call in value]
        elif isinstance(value, str) and len(value) > DELTA_CHARS:
            later += [{name: piece} for piece in _cut(value)]
            value = ""
        first[name] = value
    yield first
    yield from later


def _shortened(call: dict[str, Any], later: list[dict[str, Any]]) -> dict[str, Any]:
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(text, str) or len(text) <= DELTA_CHARS:
        return call
    later += [{"tool_calls": [{"index": call["index"], "function": {"arguments": piece}}]} for piece in _cut(text)]
    return {**call, "function": {**function, "arguments": ""}}


def _cut(text: Any) -> list[Any]:
    if not isinstance(text, str) or len(text) <= DELTA_CHARS:
        return [text]
    return [text[at : at + DELTA_CHARS] for at in range(0, len(text), DELTA_CHARS)]
