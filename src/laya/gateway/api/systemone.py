"""`POST /v1/systemone` for an in-process engine: typed questions about a state, answered by the log-probabilities of options.

In: a request's body. Out: an `Inquiry` a question, and from the shares of its options the typed answer. Every question is put
to the model alone, the state first, so that questions share its KV and no question moves another's answer; ids are never
shown. Pure; any thread.
"""

from __future__ import annotations

from laya.errors import LayaError
from laya.gateway.api.inquiry import Inquiry, names_of, text_of
from laya.schema.codec import encode_members
from laya.schema.generation import Delta, Finished, ModelCard, Started
from laya.schema.systemone import Choice, Noul, Question, SystemOneRequest, read

ALIAS = "jev-latest"  # the model name that clients of this API send unless told otherwise

decode = read


def generations_of(request: SystemOneRequest, request_id: str, client: str, card: ModelCard) -> list[Inquiry]:
    state = text_of(request.state)
    return [
        Inquiry(question, state, f"{request_id}-{i}", client, card) for i, question in enumerate(request.questions.values())
    ]  # fmt: skip


def answer_of(question: Question, shares: list[float]) -> dict:
    """The typed answer from each option's share."""
    if isinstance(question, Noul):
        return {"type": "noul", "noul": shares[0]}
    if isinstance(question, Choice):
        names = names_of(question)
        best = max(range(len(shares)), key=shares.__getitem__)
        probabilities = dict(zip(names, shares, strict=True))
        return {
            "type": "choice", "choice": names[best], "probabilities": probabilities, "confidence": choice_confidence(shares),
        }  # fmt: skip
    return {
        "type": "score",
        "score": sum(level * share for level, share in enumerate(shares)),
        "legend": {str(level): text for level, text in enumerate(question.criteria)},
        "probabilities": {str(level): share for level, share in enumerate(shares)},
        "confidence": score_confidence(shares),
    }


def choice_confidence(shares: list[float]) -> float:
    """(m - 1/n) / (1 - 1/n): 0 for an even spread, 1 for certainty."""
    even = 1 / len(shares)
    return min(1.0, max(0.0, (max(shares) - even) / (1 - even)))


def score_confidence(shares: list[float]) -> float:
    """1 less the mean distance from the likeliest level, in units of what an even spread has from the middle."""
    count = len(shares)
    mode = max(range(count), key=shares.__getitem__)
    spread = sum(share * abs(level - mode) for level, share in enumerate(shares))
    even = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return min(1.0, max(0.0, 1 - spread / even))


class DecisionWriter:
    """Keeps the answers until all are there; see `gateway.local.Writer`. There is no stream."""

    stream = False

    def __init__(self, request: SystemOneRequest, model: str) -> None:
        self._names = list(request.questions)
        self._model = model
        self._answers: dict[str, dict] = {}

    def decided(self, inquiry: Inquiry) -> None:
        """The next question's answer."""
        self._answers[self._names[len(self._answers)]] = answer_of(inquiry.question, inquiry.shares)

    def head(self) -> bytes:
        return b""

    def started(self, event: Started, first: int = 0) -> bytes:
        return b""

    def delta(self, event: Delta) -> bytes:
        return b""

    def end(self, event: Finished) -> bytes:
        usage = {"input_tokens": event.prompt_tokens, "output_tokens": event.completion_tokens}
        return encode_members({"model": self._model, "answers": self._answers, "usage": usage})

    def error(self, error: LayaError) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return b""


def writer_of(request: SystemOneRequest, model: str, prompts: int, card: ModelCard) -> DecisionWriter:
    return DecisionWriter(request, model)


