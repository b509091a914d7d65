"""A model's answer taken apart while it is written: text, thoughts in <think> tags, and tool calls in the model's own syntax.

In: the text of one choice, cut anywhere. Out: pieces, in order. A call is held until its JSON is whole, so that what turns out
not to be one goes out as the text it was; all else is held only while it could be the start of a marker. Pure; any thread.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable

import msgspec

from laya.gateway.api.jsonextent import JsonExtent
from laya.gateway.api.pieces import CallArguments, CallEnd, CallStart, Piece, ReasoningPiece, TextPiece
from laya.gateway.api.sampling import new_id
from laya.schema.chat_style import ChatStyle, style_of

__all__ = [
    "CallArguments", "CallEnd", "CallStart", "Piece", "ReasoningPiece", "TextPiece", "ToolCallParser", "parser_for",
]  # fmt: skip

OPEN_THOUGHT, CLOSE_THOUGHT = "<think>", "</think>"
_OPEN_CALL = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>"}
_CLOSE_CALL = "</tool_call>"
# How an answer must begin to be a call without a marker: the special token that marks it is often not spelled out.
_BARE = {
    "llama3": re.compile(r'\{\s*"(?:name|type|function|parameters)"\s*:'),
    "mistral": re.compile(r'\[\s*\{\s*"(?:name|arguments)"\s*:'),
}
_BARE_PROSPECT = 40  # characters within which that beginning must show, white space included
_NAMED = re.compile(r"([A-Za-z0-9_.:-]{1,128})\s*(?:\[ARGS\]\s*)?(?=\{)")
_NAMED_PROSPECT = re.compile(r"[A-Za-z0-9_.:-]{0,128}\s*(?:\[A?R?G?S?\]?)?\s*\Z")
_MISTRAL_ID = string.ascii_letters + string.digits


_ABSENT = msgspec.Raw()


class _Function(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT


class _Written(msgspec.Struct):
    """One call as models write it."""

    name: str | None = None
    arguments: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT
    function: _Function | str | None = None


_decode_call = msgspec.json.Decoder(_Written).decode
_decode_calls = msgspec.json.Decoder(list[_Written]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode


class ToolCallParser:
    """`calls` is the number of calls found so far. `names` are the tools on offer (None: any), asked only where no marker shows
    a call; with `limit` further calls are dropped."""

    def __init__(self, style: ChatStyle, names: frozenset[str] | None = None, limit: int | None = None) -> None:
        self.calls = 0
        self.plain = style.calls == "none" and style.reasoning == "none"  # all text is text
        self._style = style.calls
        self._names = names
        self._limit = limit
        self._held = ""
        self._space = ""  # white space that is not shown when a call follows
        self._opened = ""  # what was taken off in front of the call that is being read
        self._extent: JsonExtent | None = None
        self._said = False  # something of the answer has gone out
        self._step: Callable[[list[Piece]], bool] = {
            "open": self._in_thought, "tags": self._before_thought,
        }.get(style.reasoning, self._at_start)  # fmt: skip

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while self._step(pieces):
            pass
        return pieces

    def end(self) -> list[Piece]:
        """What is still held, as the text or thought it is. The parser is of no further use."""
        held = self._opened + self._held
        if self._step == self._in_thought:
            return [ReasoningPiece(held)] if held else []
        if self._step == self._after_call and _CLOSE_CALL.startswith(held.strip()):
            return []  # the closing tag, perhaps cut off
        held = self._space + held
        return [TextPiece(held)] if held.strip() or (held and not self.calls) else []

    # -- steps: each takes from `_held` what it can and tells whether another step may go on -----------------------------

    def _before_thought(self, pieces: list[Piece]) -> bool:
        held = self._held.lstrip()
        if held.startswith(OPEN_THOUGHT):
            self._held = held[len(OPEN_THOUGHT) :]
            self._step = self._in_thought
            return True
        if OPEN_THOUGHT.startswith(held):
            return False
        self._step = self._at_start
        return True

    def _in_thought(self, pieces: list[Piece]) -> bool:
        if not self._said:
            self._held = self._held.lstrip()
        before, mark, after = self._held.partition(CLOSE_THOUGHT)
        if mark:
            self._held, self._said = after, False
            self._step = self._after_thought
        else:
            keep = _prospect(before, CLOSE_THOUGHT)
            before, self._held = before[: len(before) - keep], before[len(before) - keep :]
        if before:
            pieces.append(ReasoningPiece(before))
            self._said = not mark
        return bool(mark)

    def _after_thought(self, pieces: list[Piece]) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        self._step = self._at_start
        return True

    def _at_start(self, pieces: list[Piece]) -> bool:
        """An answer of some models may be a call without any marker."""
        pattern = _BARE.get(self._style)
        held = self._held.lstrip()
        if pattern is not None and held[:1] in ("", "{", "[") and not pattern.match(held):
            if len(self._held) < _BARE_PROSPECT and _may_become(held, self._style):
                return False
        elif pattern is not None and pattern.match(held):
            self._opened = self._held[: len(self._held) - len(held)]
            self._held = held
            self._step = self._in_bare_call
            return True
        self._step = self._in_text
        return bool(self._held)

    def _in_text(self, pieces: list[Piece]) -> bool:
        marker = _OPEN_CALL.get(self._style)
        if marker is None:
            text, self._held = self._held, ""
            if text:
                pieces.append(TextPiece(text))
            return False
        before, mark, after = self._held.partition(marker)
        if mark:
            self._held, self._opened = after, mark
            self._step = self._in_marked_call
        else:
            keep = _prospect(before, marker)
            before, self._held = before[: len(before) - keep], before[len(before) - keep :]
        self._say(pieces, before)
        return bool(mark)

    def _in_marked_call(self, pieces: list[Piece]) -> bool:
        held = self._held.lstrip()
        self._opened += self._held[: len(self._held) - len(held)]
        self._held = held
        if not held:
            return False
        if held[0] == "{" or (held[0] == "[" and self._style == "mistral"):
            return self._read_json(pieces, None)
        if self._style == "mistral":
            return self._in_named_call(pieces)
        return self._give_up(pieces)

    def _in_named_call(self, pieces: list[Piece]) -> bool:
        """Mistral's newer form: the name, then its arguments."""
        named = _NAMED.match(self._held)
        if named is None:
            return False if _NAMED_PROSPECT.match(self._held) else self._give_up(pieces)
        self._opened += named.group()
        self._held = self._held[named.end() :]
        name = named.group(1)
        self._step = lambda found: self._read_json(found, name)
        return True

    def _in_bare_call(self, pieces: list[Piece]) -> bool:
        return self._read_json(pieces, None, bare=True)

    def _after_call(self, pieces: list[Piece]) -> bool:
        """Between calls: the closing tag, separators, another call, or text again."""
        held = self._held.lstrip()
        if self._style == "hermes":
            if held.startswith(_CLOSE_CALL):
                self._held = held[len(_CLOSE_CALL) :]
                self._step = self._in_text
                return True
            if _CLOSE_CALL.startswith(held):
                return False
        else:
            held = held.lstrip(" \n;,")
            if not held:
                return False
        if held[0] == "{":
            self._opened, self._held = self._held[: len(self._held) - len(held)], held
            self._step = self._in_marked_call
            return True
        self._step = self._in_text
        return True

    # -- parts of steps ---------------------------------------------------------------------------------------------------

    def _read_json(self, pieces: list[Piece], name: str | None, bare: bool = False) -> bool:
        if self._extent is None:
            self._extent = JsonExtent()
        end = self._extent.find(self._held)
        if end is None:
            return False
        self._extent = None
        raw = self._held[:end]
        found = _read(raw, name)
        if not found or (bare and self._names is not None and not all(called in self._names for called, _ in found)):
            return self._give_up(pieces, end)
        self._held, self._opened, self._space = self._held[end:], "", ""
        for called, arguments in found:
            self._call(pieces, called, arguments)
        self._step = self._after_call
        return True

    def _call(self, pieces: list[Piece], name: str, arguments: str) -> None:
        if self._limit is not None and self.calls >= self._limit:
            return
        index, self.calls = self.calls, self.calls + 1
        pieces += (CallStart(index, self._new_id(), name), CallArguments(index, arguments), CallEnd(index))

    def _new_id(self) -> str:
        """Mistral's templates take ids of nine letters and digits only."""
        if self._style == "mistral":
            return "".join(secrets.choice(_MISTRAL_ID) for _ in range(9))
        return new_id("call_")

    def _give_up(self, pieces: list[Piece], count: int = 0) -> bool:
        """It was no call: the marker and `count` characters behind it are text."""
        self._extent = None
        self._say(pieces, self._opened + self._held[:count])
        self._opened, self._held = "", self._held[count:]
        self._step = self._in_text
        return bool(self._held)

    def _say(self, pieces: list[Piece], text: str) -> None:
        """Text goes out but for the white space at its end, which nobody wants in front of a call."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            pieces.append(TextPiece(shown))


def parser_for(
    template: str, override: str | None = None, tools: bool = True, *, style: ChatStyle | None = None,
    names: frozenset[str] | None = None, parallel: bool = True, thinking: bool = True,
) -> ToolCallParser:  # fmt: skip
    """The parser of one choice. A model's card has its `style` already (`style_of_card`); the template is read else.

    Without `tools` only thoughts are told from text. `thinking` false: the request has switched the opening thought off.
    """
    style = style or style_of(template, override)
    reasoning = "tags" if style.reasoning == "open" and not thinking else style.reasoning
    return ToolCallParser(ChatStyle((override or style.calls) if tools else "none", reasoning), names, None if parallel else 1)


def style_of_card(details: dict) -> ChatStyle:
    """The style noted on a `ModelCard` when its model was loaded."""
    noted = details.get("chat_style")
    return ChatStyle(**noted) if isinstance(noted, dict) else ChatStyle()


def _read(raw: str, name: str | None) -> list[tuple[str, str]]:
    """(name, arguments) of each call in a whole JSON value; empty when it is anything else."""
    try:
        if name is not None:
            _decode_object(raw)
            return [(name, raw)]
        written = _decode_calls(raw) if raw[0] == "[" else [_decode_call(raw)]
        return [_call_of(call) for call in written]
    except (ValueError, RecursionError):  # msgspec's errors and those of lone surrogates are ValueErrors
        return []


def _call_of(call: _Written) -> tuple[str, str]:
    """Raises ValueError when it names no function or its arguments are no object."""
    source: _Written | _Function = call.function if isinstance(call.function, _Function) else call
    name = call.function if isinstance(call.function, str) else source.name
    if not name:
        raise ValueError("no name")
    text = (bytes(source.arguments) or bytes(source.parameters)).decode()
    if text in ("", "null"):
        return name, "{}"
    if text.startswith('"'):  # some models write the arguments as a string that holds JSON
        text = _decode_text(text)
    _decode_object(text)
    return name, text


def _prospect(text: str, mark: str) -> int:
    """How many of the last characters could be the beginning of the mark."""
    at = max(0, len(text) - len(mark) + 1)
    while (at := text.find(mark[0], at)) >= 0:
        if mark.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


def _may_become(held: str, style: str) -> bool:
    """Whether more text could still turn `held` into the beginning of a bare call."""
    squeezed = "".join(held.split())
    lead = "{" if style == "llama3" else "[{"
    if len(squeezed) <= len(lead):
        return lead.startswith(squeezed)
    keys = ("name", "type", "function", "parameters") if style == "llama3" else ("name", "arguments")
    return any(f'{lead}"{key}":'.startswith(squeezed) for key in keys)
