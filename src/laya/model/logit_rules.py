"""What a request's settings forbid or favour, applied to logits before a token is chosen.

In: float32 logits [rows, vocab] and the rows' sequences. Out: the same tensor, changed in place. Only rows that ask for
something are touched; each kind of rule is one operation over all of them. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from laya.engine.sequence import Sequence

_FINITE = torch.finfo(torch.float32)
Rule = Callable[[torch.Tensor, list[int], list[Sequence]], None]


def apply_rules(logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> bool:
    """True if anything was changed. Order: repetition, presence and frequency, bias, min_tokens, grammar."""
    changed = False
    for wanted, rule in _RULES:
        rows = [i for i, sequence in enumerate(sequences) if wanted(sequence)]
        if rows:
            rule(logits, rows, [sequences[i] for i in rows])
            changed = True
    # Where a grammar is over nothing but the end can come, however short the answer.
    held = [i for i, s in enumerate(sequences) if s.num_generated < s.sampling.min_tokens and s.grammar is None]
    if held:
        _forbid_endings(logits, held, [sequences[i] for i in held], eos_token_ids)
    # Last: a grammar's word is final, so that no bias can lead out of it.
    ruled = [i for i, sequence in enumerate(sequences) if sequence.grammar is not None]
    for row in ruled:
        _apply_mask(logits[row], sequences[row].grammar.token_mask())
    return changed or bool(held) or bool(ruled)


def _repetition(logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
    """Scores of tokens seen in prompt or answer are divided by the penalty where positive, multiplied where negative."""
    at_row, at_token = _pairs(logits, rows, [set(s.token_ids) for s in sequences])
    penalty = torch.tensor([s.sampling.repetition_penalty for s in sequences], dtype=torch.float32, device=logits.device)
    penalty.clamp_(_FINITE.tiny, _FINITE.max)
    each = penalty.repeat_interleave(torch.tensor([len(set(s.token_ids)) for s in sequences], device=logits.device))
    seen = logits[at_row, at_token]
    # The most absurd penalty leaves every number finite: a row with one that is not has nothing to choose from.
    logits[at_row, at_token] = torch.where(seen > 0, seen / each, seen * each).clamp_(_FINITE.min, _FINITE.max)


def _counts(logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
    """Scores of generated tokens lose `presence` once and `frequency` for each time."""
    answers = [s.token_ids[s.num_prompt_tokens :] for s in sequences]
    at_row, at_token = _pairs(logits, rows, answers)
    each_row = torch.tensor([len(answer) for answer in answers], device=logits.device)
    frequency = torch.tensor([s.sampling.frequency_penalty for s in sequences], device=logits.device)
    logits.index_put_((at_row, at_token), -frequency.repeat_interleave(each_row), accumulate=True)
    different = [set(answer) for answer in answers]
    at_row, at_token = _pairs(logits, rows, different)
    each_row = torch.tensor([len(answer) for answer in different], device=logits.device)
    presence = torch.tensor([s.sampling.presence_penalty for s in sequences], device=logits.device)
    logits.index_put_((at_row, at_token), -presence.repeat_interleave(each_row), accumulate=True)


def _bias(logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
    vocab = logits.shape[1]
    biases = [{t: b for t, b in (s.sampling.logit_bias or {}).items() if 0 <= t < vocab} for s in sequences]
    at_row, at_token = _pairs(logits, rows, biases)
    values = torch.tensor([b for bias in biases for b in bias.values()], dtype=torch.float32, device=logits.device)
    logits.index_put_((at_row, at_token), values, accumulate=True)


def _forbid_endings(logits: torch.Tensor, rows: list[int], sequences: list[Sequence], eos: frozenset[int]) -> None:
    """Until `min_tokens` are out, nothing that would end the answer can be chosen."""
    vocab = logits.shape[1]
    endings = [{t for t in (*eos, *s.sampling.stop_token_ids) if 0 <= t < vocab} for s in sequences]
    logits[_pairs(logits, rows, endings)] = float("-inf")


def _apply_mask(row: torch.Tensor, mask: bytes | bytearray | memoryview | np.ndarray) -> None:
    """`mask`: one bit a token, the lowest bit of the first byte being token 0; missing bits forbid."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[: row.shape[0]]
    allowed = torch.zeros(row.shape[0], dtype=torch.bool)
    allowed[: len(bits)] = torch.from_numpy(bits).bool()
    row.masked_fill_(~allowed.to(row.device), float("-inf"))


def _pairs(logits: torch.Tensor, rows: list[int], tokens: list) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, token) index tensors for collections of tokens, one collection a row."""
    at_row = [row for row, group in zip(rows, tokens, strict=True) for _ in group]
    at_token = [token for group in tokens for token in group]
    return torch.tensor(at_row, device=logits.device, dtype=torch.int64), torch.tensor(
        at_token, device=logits.device, dtype=torch.int64
    )


_RULES: tuple[tuple[Callable[[Sequence], bool], Rule], ...] = (
    (lambda s: s.sampling.repetition_penalty != 1.0, _repetition),
    (lambda s: (s.sampling.presence_penalty or s.sampling.frequency_penalty) != 0.0, _counts),
    (lambda s: bool(s.sampling.logit_bias), _bias),
)
