"""One question on its way through a model: what is asked of it, one scoring request after another, and what follows from it.

In: a question, the state's text, the model's card; then each request's log-probabilities. Out: the next `GenerationRequest`, or
none, and then `shares`, one an option. Pure; one thread at a time.

Where the options can be read in time, one request lists them all with their descriptions and scores them as the answer. A long
choice takes three. The first two list nothing: each option's name is scored as the answer, given the state and given none, and
the difference tells how much the state speaks for it (names alone are likely or not by their length and commonness: Holtzman
and others, "Surface form competition", 2021). The third lists the likeliest with their descriptions, and divides among them
what they had together. The state stands first, so that each later request finds it in the prefix cache.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from laya.schema.codec import encode_members
from laya.schema.generation import ChatPrompt, GenerationRequest, ModelCard, SamplingParams
from laya.schema.systemone import MAX_OPTIONS, Choice, Noul, Question, Text

SYSTEM_TEXT = "Read the state and answer the question about it. Answer with exactly one of the options and nothing else."
YES, NO = "yes", "no"
SPACE = " "  # in front of an option where the prompt is plain text
# A processor reads some hundred tokens a second and clients wait ten seconds: so many options with a sentence each fit.
LISTED_ON_CPU = 16
# The list may take so many bytes for each token of the window: half of it in English, which has about four bytes to a token.
LIST_BYTES = 2
FEWEST = 2  # a list of one option is no question
_SCORE_ONLY = SamplingParams(temperature=0.0, max_tokens=0)


class Inquiry:
    """`first`, then `heard` with the figures of each request until it gives None; then `shares` stand."""

    def __init__(self, question: Question, state: str, request_id: str, client: str, card: ModelCard) -> None:
        self.question = question
        self.shares: list[float] = []
        self._state = state
        self._id = request_id
        self._client = client
        self._chat = card.chat
        self._instructions = _instructions(question)
        self._names = names_of(question)
        self._lines = _lines(question)
        self._most = most_listed(card.details)
        self._bytes = LIST_BYTES * card.max_model_len
        self._heat = card.details.get("decision_temperatures", {}).get(question.__struct_config__.tag, 1.0)
        self._listed = list(range(len(self._names)))  # the options of the last request, in their own order
        self._by_name: tuple[float, ...] | None = None  # log-probabilities of the names alone, given the state
        self._asks_names = isinstance(question, Choice) and not self._can_list_all()

    def first(self) -> GenerationRequest:
        return self._by_names(self._state) if self._asks_names else self._by_list()

    def heard(self, logprobs: tuple[float, ...]) -> GenerationRequest | None:
        """The figures of the last request, in the order of its options. None: that was all."""
        if not self._asks_names:
            self._divide(logprobs)
            return None
        if self._by_name is None:
            self._by_name = logprobs
            return self._by_names("")
        pairs = zip(self._by_name, logprobs, strict=True)
        spoken_for = [given - without if math.isfinite(without) else given for given, without in pairs]
        self.shares = softmax([value / self._heat for value in spoken_for])
        self._listed = self._likeliest()
        self._asks_names = False
        return self._by_list()

    def _divide(self, logprobs: tuple[float, ...]) -> None:
        """What the listed options have together, by the figures of the list; the others keep theirs."""
        shares = softmax([value / self._heat for value in logprobs])
        if not self.shares:
            self.shares = shares
            return
        together = math.fsum(self.shares[i] for i in self._listed)
        for i, share in zip(self._listed, shares, strict=True):
            self.shares[i] = together * share

    # -- which options are listed ----------------------------------------------------------------------------------------

    def _can_list_all(self) -> bool:
        return len(self._names) <= self._most and sum(map(_size, self._lines)) <= self._bytes

    def _likeliest(self) -> list[int]:
        """As many of the likeliest as may be listed, in their own order; equals by their own order."""
        ranked = sorted(range(len(self._names)), key=lambda i: (-self.shares[i], i))[: self._most]
        sizes = accumulate(_size(self._lines[i]) for i in ranked)
        fitting = sum(size <= self._bytes for size in sizes)
        return sorted(ranked[: max(FEWEST, fitting)])

    # -- what the model reads --------------------------------------------------------------------------------------------

    def _by_names(self, state: str) -> GenerationRequest:
        return self._request(state, self._names, "")

    def _by_list(self) -> GenerationRequest:
        lines = "\n".join([self._lines[i] for i in self._listed])
        return self._request(self._state, tuple(self._names[i] for i in self._listed), f"\n\nOptions:\n{lines}")

    def _request(self, state: str, names: tuple[str, ...], options: str) -> GenerationRequest:
        asked = f"State:\n{state}\n\nQuestion: {self._instructions}{options}"
        prompt: ChatPrompt | str = f"{SYSTEM_TEXT}\n\n{asked}\n\nAnswer:"
        if self._chat:
            prompt = ChatPrompt(messages=({"role": "system", "content": SYSTEM_TEXT}, {"role": "user", "content": asked}))
        else:
            names = tuple(f"{SPACE}{name}" for name in names)
        return GenerationRequest(id=self._id, prompt=prompt, sampling=_SCORE_ONLY, client=self._client, options=names)


def most_listed(details: dict[str, Any]) -> int:
    """How many options a list may have, by the details of a model's card."""
    chosen: int | None = details.get("decision_options")
    if chosen is not None:
        return chosen
    return LISTED_ON_CPU if str(details.get("device")).startswith("cpu") else MAX_OPTIONS


def text_of(text: Text) -> str:
    return text if isinstance(text, str) else encode_members(text).decode()


def names_of(question: Question) -> tuple[str, ...]:
    """What the model would have to say."""
    if isinstance(question, Noul):
        return YES, NO
    if isinstance(question, Choice):
        return tuple(question.criteria)
    return tuple(str(level) for level in range(len(question.criteria)))


def softmax(values: list[float]) -> list[float]:
    """Finite and summing to 1 whatever the values, even where all are minus infinity."""
    top = max(values)
    if not math.isfinite(top):
        return [1 / len(values)] * len(values)
    weights = [math.exp(value - top) for value in values]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _size(line: str) -> int:
    return len(line.encode()) + 1


def _instructions(question: Question) -> str:
    if question.instructions is not None:
        return text_of(question.instructions)
    return "Is it true?" if isinstance(question, Noul) else "Which option fits?"


def _lines(question: Question) -> list[str]:
    """The options as the model reads them."""
    if isinstance(question, Noul):
        criteria = question.criteria
        described: list[Text | None] = [criteria.yes, criteria.no] if criteria is not None else [None, None]
    elif isinstance(question, Choice):
        described = list(question.criteria.values())
    else:
        described = list(question.criteria)
    return [f"- {n}" if d is None else f"- {n}: {text_of(d)}" for n, d in zip(names_of(question), described, strict=True)]
