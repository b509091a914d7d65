"""Stages of the user's own: imported by name at start, called for each request and each text of its answer.

In: `module:factory` names. Out: `CustomStage`s, whose faults are one request's 500 with the stage's name and never more. The
protocol is `Stage` and `Answer` below, explained in docs/stages.md. Requests and the texts of answers are given to a stage in
a worker for what may hang; texts on the loop thread where the stage says that it is not `slow`.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from laya.errors import InternalError, LayaError, StartError
from laya.schema.codec import encode_members

_log = logging.getLogger(__name__)


class About(NamedTuple):
    """What a stage is told of a request beside its body."""

    api: str  # chat, completions, responses, messages, embeddings ...
    route: str  # the route's name
    key: str  # the API key's name; "" where there are no keys


class Answer(Protocol):
    """The texts of one answer, for a stage that changes them. `channel` tells the texts of one answer apart (its choices,
    its blocks)."""

    def delta(self, text: str, channel: str) -> str:
        """A piece of text as the model wrote it; what is returned goes on in its place. A plain answer is one piece."""

    def end(self, channel: str) -> str:
        """The channel has ended: what was held back, or ""."""


class Stage(Protocol):
    """What a factory returns. A stage may leave out either method."""

    slow: bool  # texts of answers are given to it in the worker; where it is False, on the loop thread. True where missing

    def request(self, body: dict[str, Any], about: About) -> dict[str, Any] | None:
        """The body to go on with; None: as it is. Raise a `laya.errors.LayaError` to refuse the request with it."""

    def answer(self, about: About) -> Answer | None:
        """What changes the texts of this request's answer; None: nothing does."""


class StageFailed(InternalError):
    code = "stage_failed"


class CustomStage:
    """One stage and its name. `faults` counts its requests that ended with 500."""

    def __init__(self, name: str, stage: Any) -> None:
        self.name = name
        self.faults = 0
        self.slow = bool(getattr(stage, "slow", True))
        self._request = getattr(stage, "request", None)
        self._answer = getattr(stage, "answer", None)

    @property
    def reads_requests(self) -> bool:
        return self._request is not None

    def request(self, body: dict[str, Any], about: About) -> dict[str, Any]:
        made = self._call(self._request, body, about)
        if made is not None and not isinstance(made, dict):
            raise self._failed(f"request returned {type(made).__name__}")
        return body if made is None else made

    def encoded(self, body: dict[str, Any]) -> bytes:
        """What it made, as JSON."""
        return self._call(encode_members, body)

    def answer(self, about: About) -> CustomAnswer | None:
        made = self._call(self._answer, about) if self._answer is not None else None
        return None if made is None else CustomAnswer(self, made)

    def text(self, call: Callable[..., str], *arguments: str) -> str:
        made = self._call(call, *arguments)
        if not isinstance(made, str):
            raise self._failed(f"an answer returned {type(made).__name__}")
        if not made.isascii():
            self._call(made.encode)  # half a surrogate pair could not be sent
        return made

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except LayaError:
            raise
        except BaseException as fault:  # also `sys.exit()`: it is one request's end, not ours
            raise self._failed(type(fault).__name__, fault) from None

    def late(self, limit_s: float) -> StageFailed:
        """It took longer than it may."""
        self.faults += 1
        _log.error("the stage %s did not return within %g s", self.name, limit_s)
        return StageFailed(f"The stage {self.name} did not return within {limit_s:g} s.")

    def _failed(self, why: str, fault: BaseException | None = None) -> StageFailed:
        self.faults += 1
        _log.error("the stage %s failed: %s", self.name, why, exc_info=fault)
        return StageFailed(f"The stage {self.name} failed.")


class CustomAnswer:
    """One answer's texts through one stage."""

    __slots__ = ("stage", "_answer")

    def __init__(self, stage: CustomStage, answer: Answer) -> None:
        self.stage = stage
        self._answer = answer

    def delta(self, text: str, channel: str) -> str:
        return self.stage.text(self._answer.delta, text, channel)

    def end(self, channel: str) -> str:
        return self.stage.text(self._answer.end, channel)


def load_stages(names: Iterable[str], folder: str) -> tuple[CustomStage, ...]:
    """Import and make them, in the order written. Modules may lie in `folder`, the configuration's own. Raises StartError that
    names the stage."""
    names = tuple(names)
    if names and folder not in sys.path:
        sys.path.append(folder)
    return tuple(_load(name) for name in names)


def _load(name: str) -> CustomStage:
    module, _, factory = name.partition(":")
    try:
        stage = getattr(importlib.import_module(module), factory)()
    except Exception as fault:
        raise StartError(f"stages.custom: {name} cannot be had: {type(fault).__name__}: {fault}") from None
    if not callable(getattr(stage, "request", None)) and not callable(getattr(stage, "answer", None)):
        raise StartError(f"stages.custom: {name} made something with neither `request` nor `answer`; see docs/stages.md")
    return CustomStage(name, stage)
