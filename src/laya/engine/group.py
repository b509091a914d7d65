"""One request inside the engine: the choices it runs, what it has counted, the events that tell of it.

Made by the scheduler when the first choice is taken from admission; owned by the engine thread.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from laya.engine.admission import Offer
from laya.engine.sequence import Sequence
from laya.schema.generation import Finished, Started, TokenLogprob

_SEED_BITS = 63  # fits a signed 64-bit tensor element


class Group:
    """`sequences` are the choices that live now; `over` tells that the last event went out. Times by the loop's clock."""

    __slots__ = (
        "offer", "request", "sequences", "prompt_ready", "announced", "over", "cached_tokens", "completion_tokens", "ended",
        "prompt_logprobs", "started_at", "first_token_at", "told", "_seed",
    )  # fmt: skip

    def __init__(self, offer: Offer, now: float) -> None:
        self.offer = offer
        self.request = offer.prepared.request
        sampling = self.request.sampling
        self.sequences: list[Sequence] = []
        self.prompt_ready = False  # the first choice has KV for the whole prompt: the others can share it
        self.announced = False
        self.over = False
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.ended = 0  # choices
        # Entry j belongs to prompt position j. Only the first choice computes them.
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(offer.prepared.prompt_ids)
        self.told: dict[tuple[int, int], float] = {}  # what the runs over options have told
        self.started_at = now
        self.first_token_at = 0.0
        self._seed = random.getrandbits(_SEED_BITS) if sampling.seed is None else sampling.seed

    @property
    def owner(self) -> Any:
        return self.offer.owner

    def choice(self, seq_id: int, index: int) -> Sequence:
        """A new sequence for choice `index`."""
        sampling = self.request.sampling
        if index > 0 and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        seed = (self._seed + index) % (1 << _SEED_BITS)
        prepared = self.offer.prepared
        ids = prepared.prompt_ids if prepared.options is None else prepared.prompt_ids + prepared.options.paths[index]
        sequence = Sequence(seq_id, ids, sampling, index=index, seed=seed)
        sequence.request = self
        if prepared.options is not None:
            sequence.asked = prepared.options.asked(index, len(prepared.prompt_ids))
        if prepared.grammar is not None:
            sequence.grammar = prepared.grammar.fork()
        sequence.arrival = self.offer.submitted_at
        self.sequences.append(sequence)
        return sequence

    def finish_prompt(self, sequence: Sequence, now: float) -> None:
        """The whole prompt was computed by the first choice: its log-probabilities are complete."""
        self.prompt_ready = True
        self.first_token_at = now
        if sequence.sampling.prompt_logprobs is not None:
            sequence.sampling = msgspec.structs.replace(sequence.sampling, prompt_logprobs=None)

    def started(self) -> Started:
        prepared = self.offer.prepared
        shown = None if self.prompt_logprobs is None else tuple(self.prompt_logprobs)
        self.prompt_logprobs = None
        return Started(len(prepared.prompt_ids), self.cached_tokens, shown, prepared.prompt_text)

    def finished(self, now: float) -> Finished:
        prepared = self.offer.prepared
        return Finished(
            option_logprobs=None if prepared.options is None else prepared.options.totals(self.told),
            prompt_tokens=len(prepared.prompt_ids),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            queue_s=self.started_at - self.offer.submitted_at,
            prefill_s=self.first_token_at - self.started_at,
            decode_s=now - self.first_token_at,
        )
