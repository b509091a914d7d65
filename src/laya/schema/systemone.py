"""System One's request as structs: a state, and questions of three types about it.

`read` gives them checked, or raises Unprocessable with the place of the fault as its clients expect it. Pure; any thread.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from laya.errors import InvalidRequest, Unprocessable
from laya.schema.fields import MISSING

Text = str | dict[str, Any] | list[Any]
# The documented bounds of the API.
MAX_OPTIONS, MAX_LEVELS = 255, 10
MAX_QUESTIONS = 256  # each is read by the model once; more belong in several requests


class NoulCriteria(msgspec.Struct, frozen=True, rename={"yes": "true", "no": "false"}):
    """What counts as true and as false; either side may be missing."""

    yes: Text | None = None
    no: Text | None = None


class Noul(msgspec.Struct, frozen=True, tag_field="type", tag="noul"):
    """Is it so? The answer is a probability."""

    instructions: Text | None = None
    criteria: NoulCriteria | None = None


class Choice(msgspec.Struct, frozen=True, tag_field="type", tag="choice"):
    """Which one? `criteria` maps each option to its description."""

    criteria: Annotated[dict[str, Text | None], Meta(min_length=2, max_length=MAX_OPTIONS)]
    instructions: Text | None = None


class Score(msgspec.Struct, frozen=True, tag_field="type", tag="score"):
    """How much? `criteria` are the levels, low to high."""

    criteria: Annotated[list[Text], Meta(min_length=2, max_length=MAX_LEVELS)]
    instructions: Text | None = None


Question = Noul | Choice | Score


class _Body(msgspec.Struct, frozen=True):
    state: Text
    questions: Annotated[dict[str, msgspec.Raw], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    model: str | None = None


class SystemOneRequest(msgspec.Struct, frozen=True):
    state: Text
    questions: dict[str, Question]


_decode_body = msgspec.json.Decoder(_Body).decode
_decode_question = msgspec.json.Decoder(Question).decode


def read(body: bytes) -> SystemOneRequest:
    """Raises Unprocessable."""
    try:
        decoded = _decode_body(body)
    except (ValueError, RecursionError) as exc:
        raise _fault(exc, ()) from None
    questions: dict[str, Question] = {}
    for name, raw in decoded.questions.items():
        if not name:
            raise Unprocessable("A question's id must not be empty.", loc=("questions", ""))
        try:
            questions[name] = _decode_question(raw)
        except (ValueError, RecursionError) as exc:
            raise _fault(exc, ("questions", name)) from None
    return SystemOneRequest(decoded.state, questions)


def _fault(exc: Exception, place: tuple[str, ...]) -> InvalidRequest:
    if isinstance(exc, RecursionError):
        return Unprocessable("The body is nested too deeply.", loc=place)
    text, _, path = str(exc).partition(" - at `")
    inside = path.rstrip("`").removeprefix("$").replace("[", ".").replace("]", "")
    if text.startswith(MISSING):
        inside += f".{text[len(MISSING) : -1]}"
    return Unprocessable(text, loc=(*place, *(step for step in inside.split(".") if step and step != "...")))
