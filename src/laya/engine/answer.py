"""One choice's answer under construction: tokens in, deltas out, and the decision that it has ended.

Called on the engine thread, once for every sampled token. A token's id and log-probability leave together with its text,
so that neither tells of a stop string that is still held back.
"""

from __future__ import annotations

from laya.engine.detokenize import Detokenizer
from laya.engine.sequence import Sequence
from laya.engine.step import Sampled, Tokenizer
from laya.schema.generation import Delta, TokenLogprob


def token_logprob(tokenizer: Tokenizer, token_id: int, logprob: float, top: list[tuple[int, float]] | None) -> TokenLogprob:
    """A runner's figures with the tokens spelled out; bytes that are no whole character show as U+FFFD in `token`."""
    spelled = tokenizer.token_bytes(token_id)
    likeliest = []
    for other, value in top or ():
        other_bytes = tokenizer.token_bytes(other)
        likeliest.append((other, other_bytes.decode("utf-8", "replace"), other_bytes, value))
    return TokenLogprob(token_id, spelled.decode("utf-8", "replace"), spelled, logprob, tuple(likeliest))


class Answer:
    """Text and end of one sequence. `finish_reason` is None while it runs."""

    __slots__ = ("finish_reason", "_tokenizer", "_text", "_eos", "_stop_ids", "_max_new", "_waiting")

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, eos: frozenset[int], max_new_tokens: int) -> None:
        sampling = sequence.sampling
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer, sampling.stop)
        self._eos = frozenset() if sampling.ignore_eos else eos
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._max_new = max_new_tokens
        # (place of its first character, id, log-probability) of the tokens whose text is held back: one for each held
        # character at most, and those without text between them.
        self._waiting: list[tuple[int, int, TokenLogprob | None]] = []

    def accept(self, sequence: Sequence, outcome: Sampled) -> Delta | None:
        """Take in the token just appended to `sequence`; None when nothing can be shown yet."""
        token_id = outcome.token_id
        text, place = self._text, self._text.num_decoded
        generated, min_tokens = sequence.num_generated, sequence.sampling.min_tokens
        shown = None
        if outcome.logprob is not None and sequence.sampling.logprobs is not None:
            shown = token_logprob(self._tokenizer, token_id, outcome.logprob, outcome.top)
        self._waiting.append((place, token_id, shown))

        match: str | int | None = None
        if generated > min_tokens and (token_id in self._stop_ids or token_id in self._eos):
            self.finish_reason = "stop"
            match = token_id if token_id in self._stop_ids else None
            piece = text.finish()
        else:
            piece = text.push(token_id, generated >= min_tokens)
            if text.stopped_by is None and generated >= self._max_new:
                self.finish_reason = "length"
                piece += text.finish()
            if text.stopped_by is not None:  # the last, flushed character can complete a stop string too
                self.finish_reason = "stop"
                match = text.stopped_by
        if not piece and self.finish_reason is None:
            return None
        ids, logprobs = self._release()
        return Delta(sequence.index, piece, ids, logprobs, self.finish_reason, match)

    def _release(self) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """The tokens whose text began to go out; at the end all but those behind a stop string's start."""
        text, waiting = self._text, self._waiting
        count = len(waiting)
        if text.num_emitted < text.num_decoded:
            while count and waiting[count - 1][0] >= text.num_emitted:
                count -= 1
        out, self._waiting = waiting[:count], waiting[count:]
        return tuple(entry[1] for entry in out), tuple(entry[2] for entry in out if entry[2] is not None)
