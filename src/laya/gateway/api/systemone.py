"""`POST /v1/systemone` for an in-process engine: typed questions about a state, answered by the log-probabilities of options.

In: a request's body. Out: one scoring request a question, and from each option's log-probability the typed answer. Every
question is put to the model alone, the state first, so that questions share its KV and no question moves another's answer; ids
are never shown. On a processor a long list of options is first narrowed down (`shortlist`). Pure; any thread.
"""

from __future__ import annotations

import math

from laya.errors import LayaError
from laya.gateway.api.shortlist import most_shown, shortlist
from laya.schema.codec import encode_json
from laya.schema.generation import ChatPrompt, Delta, Finished, GenerationRequest, ModelCard, SamplingParams, Started
from laya.schema.systemone import Choice, Noul, Question, SystemOneRequest, Text, read

ALIAS = "jev-latest"  # the model name that clients of this API send unless told otherwise
SYSTEM_TEXT = "Read the state and answer the question about it. Answer with exactly one of the options and nothing else."
YES, NO = "yes", "no"
SPACE = " "  # in front of an option where the prompt is plain text

decode = read


def generations_of(request: SystemOneRequest, request_id: str, client: str, card: ModelCard) -> list[GenerationRequest]:
    state = text_of(request.state)
    return [
        _scoring(question, state, f"{request_id}-{i}", client, card)
        for i, question in enumerate(request.questions.values())
    ]  # fmt: skip


def _scoring(question: Question, state: str, request_id: str, client: str, card: ModelCard) -> GenerationRequest:
    instructions, names, lines = _instructions(question), _options(question), _lines(question)
    most = most_shown(card.details)
    if most is not None and len(names) > most:
        shown = shortlist(lines, f"{instructions}\n{state}", most)
        names, lines = tuple(names[i] for i in shown), [lines[i] for i in shown]
    asked = f"State:\n{state}\n\nQuestion: {instructions}\n\nOptions:\n" + "\n".join(lines)
    options = names
    prompt: ChatPrompt | str = f"{SYSTEM_TEXT}\n\n{asked}\n\nAnswer:"
    if card.chat:
        prompt = ChatPrompt(messages=({"role": "system", "content": SYSTEM_TEXT}, {"role": "user", "content": asked}))
    else:
        options = tuple(f"{SPACE}{name}" for name in names)
    sampling = SamplingParams(temperature=0.0, max_tokens=0)
    return GenerationRequest(id=request_id, prompt=prompt, sampling=sampling, client=client, options=options)


def text_of(text: Text) -> str:
    return text if isinstance(text, str) else encode_json(text).decode()


def _instructions(question: Question) -> str:
    if question.instructions is not None:
        return text_of(question.instructions)
    return "Is it true?" if isinstance(question, Noul) else "Which option fits?"


def _options(question: Question) -> tuple[str, ...]:
    """What the model would have to say."""
    if isinstance(question, Noul):
        return YES, NO
    if isinstance(question, Choice):
        return tuple(question.criteria)
    return tuple(str(level) for level in range(len(question.criteria)))


def _lines(question: Question) -> list[str]:
    """The options as the model reads them."""
    if isinstance(question, Noul):
        criteria = question.criteria
        described: list[Text | None] = [criteria.yes, criteria.no] if criteria is not None else [None, None]
    elif isinstance(question, Choice):
        described = list(question.criteria.values())
    else:
        described = list(question.criteria)
    names = _options(question)
    return [f"- {n}" if d is None else f"- {n}: {text_of(d)}" for n, d in zip(names, described, strict=True)]


def answer_of(question: Question, logprobs: dict[str, float], temperature: float = 1.0) -> dict:
    """The typed answer from each option's log-probability; one that was not shown to the model has none."""
    shares = softmax([logprobs.get(name, -math.inf) / temperature for name in _options(question)])
    if isinstance(question, Noul):
        return {"type": "noul", "noul": shares[0]}
    if isinstance(question, Choice):
        names = list(question.criteria)
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


def softmax(values: list[float]) -> list[float]:
    """Finite and summing to 1 whatever the values, even where all are minus infinity."""
    top = max(values)
    if not math.isfinite(top):
        return [1 / len(values)] * len(values)
    weights = [math.exp(value - top) for value in values]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


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

    def __init__(self, request: SystemOneRequest, model: str, card: ModelCard) -> None:
        self._questions = list(request.questions.items())
        self._model = model
        self._chat = card.chat
        self._temperatures = card.details.get("decision_temperatures", {})
        self._answers: dict[str, dict] = {}

    def decided(self, options: tuple[str, ...], event: Finished) -> None:
        """The next question's figures, for the options as they were scored."""
        name, question = self._questions[len(self._answers)]
        names = options if self._chat else [option.removeprefix(SPACE) for option in options]
        logprobs = dict(zip(names, event.option_logprobs or (), strict=True))
        self._answers[name] = answer_of(question, logprobs, self._temperatures.get(question.__struct_config__.tag, 1.0))

    def head(self) -> bytes:
        return b""

    def started(self, event: Started, first: int = 0) -> bytes:
        return b""

    def delta(self, event: Delta) -> bytes:
        return b""

    def end(self, event: Finished) -> bytes:
        usage = {"input_tokens": event.prompt_tokens, "output_tokens": event.completion_tokens}
        return encode_json({"model": self._model, "answers": self._answers, "usage": usage})

    def error(self, error: LayaError) -> bytes:
        return b""

    def keep_alive(self) -> bytes:
        return b""


def writer_of(request: SystemOneRequest, model: str, prompts: int, card: ModelCard) -> DecisionWriter:
    return DecisionWriter(request, model, card)


