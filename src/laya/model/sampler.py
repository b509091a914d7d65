"""From logits to tokens, for a whole batch at once: penalties, masks, temperature, top-k/top-p/min-p, seeds, log-probabilities.

In: float32 logits [rows, vocab] and each row's sequence. Out: one `Sampled` a row. Engine thread only.

Randomness is one number a row, a hash of (seed, position): the same seed gives the same text whatever else is in the batch
and after any preemption. Log-probabilities are the model's own, before penalties, masks and temperature.
"""

from __future__ import annotations

import torch

from laya.engine.sequence import Sequence
from laya.engine.step import Sampled
from laya.errors import EngineFailed, InvalidRequest
from laya.model.logit_rules import apply_rules

# Candidates looked at first for top-p and min-p: nearly always enough, and a hundred times cheaper than sorting a vocabulary.
NUCLEUS = 256

_MASK = (1 << 64) - 1


def sample(logits: torch.Tensor, sequences: list[Sequence], eos_token_ids: frozenset[int]) -> list[Sampled]:
    """One token a row. A row that holds a number that is not finite (or has nothing left to choose) gets `error`.

    `logits` may be changed in place.
    """
    peaks, greedy = logits.max(dim=-1)  # NaN wins every comparison, so a bad row shows in its peak
    sound = torch.isfinite(peaks).tolist()
    measured = _measure(logits, sequences)
    if apply_rules(logits, sequences, eos_token_ids):
        peaks, greedy = logits.max(dim=-1)
        open_rows = torch.isfinite(peaks).tolist()
    else:
        open_rows = sound
    tokens = greedy.tolist()
    rows = [i for i, sequence in enumerate(sequences) if sequence.sampling.temperature > 0 and open_rows[i] and sound[i]]
    if rows:
        for row, token in zip(rows, _draw(logits, rows, [sequences[i] for i in rows]), strict=True):
            tokens[row] = token
    results = []
    for i, token in enumerate(tokens):
        if not sound[i]:
            results.append(Sampled(error=EngineFailed("the model computed numbers that are not finite for this request")))
        elif not open_rows[i]:
            results.append(Sampled(error=InvalidRequest("no token is allowed here by this request's grammar and biases")))
        else:
            results.append(_with_logprobs(Sampled(token), measured.get(i)))
    return results


def score(logits: torch.Tensor, targets: list[int], top: int) -> list[tuple[float, list[tuple[int, float]]]]:
    """(log-probability of the target, the `top` likeliest) for each row, of the model's own distribution."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(targets, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    likeliest = _top(logprobs, top)
    return list(zip(chosen, likeliest, strict=True))


def tell(logits: torch.Tensor, asked: list[tuple[int, list[int]]]) -> dict[tuple[int, int], float]:
    """(node, token) -> log-probability of the token in that node's row, of the model's own distribution."""
    logprobs = torch.log_softmax(logits, dim=-1)
    told = {}
    for row, (node, tokens) in enumerate(asked):
        for token, value in zip(tokens, logprobs[row, tokens].tolist(), strict=True):
            told[node, token] = value
    return told


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else: two rounds of a 64-bit mixer (splitmix64's) over both."""
    return (_mix(_mix(seed & _MASK) ^ (position & _MASK)) >> 32) / 2**32


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class _Measured:
    """Log-probabilities of one row, taken before the rules change its logits."""

    __slots__ = ("logprobs", "top")

    def __init__(self, logprobs: torch.Tensor, top: list[tuple[int, float]]) -> None:
        self.logprobs = logprobs
        self.top = top


def _measure(logits: torch.Tensor, sequences: list[Sequence]) -> dict[int, _Measured]:
    rows = [i for i, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
    if not rows:
        return {}
    logprobs = torch.log_softmax(logits[rows], dim=-1)
    likeliest = _top(logprobs, max(sequences[i].sampling.logprobs for i in rows))
    return {
        row: _Measured(logprobs[j], likeliest[j][: sequences[row].sampling.logprobs]) for j, row in enumerate(rows)
    }  # fmt: skip


def _with_logprobs(result: Sampled, measured: _Measured | None) -> Sampled:
    if measured is not None:
        result.logprob = float(measured.logprobs[result.token_id])
        result.top = measured.top
    return result


def _top(logprobs: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    if count == 0:
        return [[] for _ in range(logprobs.shape[0])]
    values, ids = _likeliest(logprobs, min(count, logprobs.shape[1]))
    return [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]


def _draw(logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> list[int]:
    """Sample the given rows: inverse of the cumulative distribution at each row's own number."""
    heat = torch.tensor([s.sampling.temperature for s in sequences], dtype=torch.float32, device=logits.device)
    chosen = logits if len(rows) == logits.shape[0] else logits[rows]
    # The smallest temperatures would overflow: taking the peak off first keeps every exponent at or below zero.
    heat = heat.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    probabilities = (chosen - chosen.amax(dim=-1, keepdim=True)).div_(heat).softmax(dim=-1)
    points = torch.tensor(
        [uniform(s.seed, len(s.token_ids)) for s in sequences], dtype=torch.float64, device=logits.device
    )  # fmt: skip
    tokens = [0] * len(rows)
    cut = [i for i, s in enumerate(sequences) if _is_cut(s)]
    whole = [i for i, s in enumerate(sequences) if not _is_cut(s)]
    if whole:
        some = probabilities[whole] if cut else probabilities
        for i, token in zip(whole, _invert(some, points[whole]).tolist(), strict=True):
            tokens[i] = token
    if cut:
        some = probabilities[cut] if whole else probabilities
        for i, token in zip(cut, _draw_cut(some, points[cut], [sequences[i] for i in cut]), strict=True):
            tokens[i] = token
    return tokens


def _is_cut(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _draw_cut(probabilities: torch.Tensor, points: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """Rows with top-k, top-p or min-p: only the likeliest candidates are sorted, all of them if those do not suffice."""
    vocab = probabilities.shape[1]
    limits = [(s.sampling.top_k if 0 < s.sampling.top_k < vocab else vocab) for s in sequences]
    narrow = max(limit if limit < vocab else NUCLEUS for limit in limits)
    values, ids = _likeliest(probabilities, min(narrow, vocab))
    kept, enough = _keep(values, sequences, limits)
    if not all(enough):
        values, ids = probabilities.sort(dim=-1, descending=True, stable=True)
        kept, _ = _keep(values, sequences, limits)
    places = _invert(values.mul(kept), points)
    return ids.gather(1, places.unsqueeze(1)).squeeze(1).tolist()


def _likeliest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) of each float32 row's `count` largest, largest first and of equals the lowest id first.

    torch's own choice among equals (bf16 heads give many) depends on `count`, and that is the largest which any row asks for.
    """
    bits = values.view(torch.int32)
    # As an integer a float keeps its order once the magnitude of negative ones is turned round.
    keys = (bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)).long().bitwise_left_shift_(32)
    last = values.shape[1] - 1
    best = keys.bitwise_or_(torch.arange(last, -1, -1, device=values.device)).topk(count, dim=-1).values
    ids = last - best.bitwise_and_(0xFFFFFFFF)
    return values.gather(1, ids), ids


def _keep(values: torch.Tensor, sequences: list[Sequence], limits: list[int]) -> tuple[torch.Tensor, list[bool]]:
    """Which of the sorted candidates stay, and whether every one that could stay is among them.

    In order: top-k; then top-p over what is left, made a distribution again; then min-p against the likeliest.
    """
    device, count = values.device, values.shape[1]
    top_k = torch.tensor(limits, device=device).unsqueeze(1)
    top_p = torch.tensor([s.sampling.top_p for s in sequences], dtype=torch.float64, device=device).unsqueeze(1)
    min_p = torch.tensor([s.sampling.min_p for s in sequences], dtype=torch.float32, device=device).unsqueeze(1)
    within_k = torch.arange(count, device=device) < top_k
    reach = values.double().mul_(within_k).cumsum_(dim=-1)
    # Without a top-k that ends among the candidates, the whole distribution's sum is 1.
    total = torch.where(top_k <= count, reach[:, -1:], torch.ones_like(reach[:, -1:]))
    before = (reach - values).div_(total)
    kept = within_k & (before < top_p) & (values >= min_p * values[:, :1])
    kept[:, 0] = True
    enough = [
        count >= limit or bool(reach[i, -1] >= top_p[i, 0]) or bool(values[i, -1] < min_p[i, 0] * values[i, 0])
        for i, limit in enumerate(limits)
    ]  # fmt: skip
    return kept, enough


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """The first place of each row whose cumulative weight exceeds point * total; weights need not sum to 1."""
    reach = weights.double().cumsum_(dim=-1)
    # A point is below 1 by at least 2**-32, so it lies strictly below the end and the place found has some weight.
    return torch.searchsorted(reach, (points * reach[:, -1]).unsqueeze(1), right=True).squeeze(1)
