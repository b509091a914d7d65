"""What a model's text is made of once its syntax is taken off: words, thoughts, and tool calls in parts."""

from __future__ import annotations

import msgspec


class TextPiece(msgspec.Struct, frozen=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    text: str


class CallStart(msgspec.Struct, frozen=True):
    """`index` counts the calls of one answer from 0; `id` is unique for ever."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """More of the arguments' JSON text; the parts joined are one JSON object."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    index: int


Piece = TextPiece | ReasoningPiece | CallStart | CallArguments | CallEnd
