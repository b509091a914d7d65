"""Choosing tokens: each setting does what its users expect, for each row of a batch on its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.engine.sequence import Sequence
from laya.errors import InvalidRequest
from laya.model.sampler import sample, uniform
from laya.schema.generation import SamplingParams

EOS = frozenset({0})
VOCAB = 1000  # more than the sampler's first look at candidates


def row(seed: int = 0, answer: tuple[int, ...] = (), prompt: tuple[int, ...] = (5, 6), **settings) -> Sequence:
    seq = Sequence(0, list(prompt), SamplingParams(**settings), seed=seed)
    seq.token_ids.extend(answer)
    return seq


def logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(scores: torch.Tensor, count: int = 400, **settings) -> list[int]:
    rows = [row(seed=i, **settings) for i in range(count)]
    return [result.token_id for result in sample(scores.expand(count, -1).clone(), rows, EOS)]


def test_temperature_zero_takes_the_likeliest():
    scores = logits(4)
    expected = scores.argmax(-1).tolist()
    assert [r.token_id for r in sample(scores, [row(seed=i, temperature=0.0) for i in range(4)], EOS)] == expected


def test_frequencies_follow_the_distribution():
    scores = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))
    tokens = draw(scores, 4000)
    for token, share in enumerate((0.5, 0.25, 0.15, 0.1)):
        # Four standard deviations; seeds are fixed, so this cannot flicker.
        assert abs(tokens.count(token) / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)


def test_temperature_sharpens_and_flattens():
    scores = torch.tensor([[2.0, 1.0, 0.0]])
    cold, warm, hot = (draw(scores, 1000, temperature=t).count(0) for t in (0.3, 1.0, 5.0))
    assert cold > warm > hot
    assert set(draw(scores, 200, temperature=1e-30)) == {0}


@pytest.mark.parametrize("vocab", [50, VOCAB])
def test_top_k_leaves_k(vocab):
    scores = logits(vocab=vocab)
    allowed = set(scores[0].topk(3).indices.tolist())
    assert set(draw(scores, temperature=50.0, top_k=3)) == allowed
    assert set(draw(scores, temperature=50.0, top_k=1)) == {scores.argmax().item()}


def test_a_top_k_beyond_the_first_candidates_still_ends_where_it_says():
    scores = logits()
    allowed = set(scores[0].topk(400).indices.tolist())
    drawn = set(draw(scores, 2000, temperature=1000.0, top_k=400))
    assert drawn <= allowed and len(drawn) > 350


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    scores = torch.log(torch.tensor([[0.5, 0.25, 0.15, 0.1]]))
    assert set(draw(scores, top_p=0.5)) == {0}
    assert set(draw(scores, top_p=0.51)) == {0, 1}
    assert set(draw(scores, top_p=0.8)) == {0, 1, 2}
    assert set(draw(scores, top_p=1e-9)) == {0}


def test_top_p_over_a_flat_distribution_looks_beyond_the_first_candidates():
    scores = torch.linspace(1e-4, 0, VOCAB).unsqueeze(0)  # nearly flat, in order
    drawn = draw(scores, 4000, top_p=0.6)
    assert max(drawn) > 500 and max(drawn) <= 601


def test_min_p_is_measured_against_the_likeliest():
    scores = torch.log(torch.tensor([[0.5, 0.26, 0.14, 0.1]]))
    assert set(draw(scores, min_p=0.5)) == {0, 1}
    assert set(draw(scores, min_p=0.99)) == {0}


def test_top_p_applies_to_what_top_k_left():
    scores = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    # Of the two left, the first holds 4/7: more than a half.
    assert set(draw(scores, top_k=2, top_p=0.5)) == {0}
    assert set(draw(scores, top_k=2, top_p=0.6)) == {0, 1}


@given(st.lists(st.tuples(st.integers(0, 2**62), st.floats(0.1, 3), st.sampled_from([0, 1, 5, 300, 5000]),
       st.sampled_from([1.0, 0.95, 0.3]), st.sampled_from([0.0, 0.05])), min_size=1, max_size=6))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_seed_gives_the_same_token_in_any_batch(rows):
    scores = logits(len(rows), seed=3).bfloat16().float()  # as a bf16 head gives them: many are equal

    def made():
        return [row(seed=s, temperature=t, top_k=k, top_p=p, min_p=m) for s, t, k, p, m in rows]

    together = [r.token_id for r in sample(scores.clone(), made(), EOS)]
    alone = [sample(scores[i : i + 1].clone(), [seq], EOS)[0].token_id for i, seq in enumerate(made())]
    backwards = [r.token_id for r in sample(scores.flip(0).clone(), made()[::-1], EOS)][::-1]
    assert together == alone == backwards


def test_of_equals_the_lowest_tokens_come_first_however_many_are_asked_for():
    """Where a cut falls among equals must not depend on what a row beside it asks for."""
    equal = torch.zeros(2, VOCAB)
    for others in (1, 50, 300):
        few, _ = sample(equal.clone(), [row(logprobs=3), row(logprobs=others)], EOS)
        assert [token for token, _ in few.top] == [0, 1, 2]
        mates = [row(seed=1, top_k=others)] * 3
        drawn = {sample(torch.zeros(4, VOCAB), [row(seed=i, top_k=4), *mates], EOS)[0].token_id for i in range(60)}
        assert drawn == {0, 1, 2, 3}


def test_the_random_number_depends_on_seed_and_position_alone():
    assert uniform(1, 5) == uniform(1, 5)
    numbers = {uniform(seed, position) for seed in range(40) for position in range(40)}
    assert len(numbers) == 1600 and all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 1600 - 0.5) < 0.03
    assert 0 <= uniform(-(2**70), 3) < 1


def test_repetition_penalty_touches_prompt_and_answer():
    scores = torch.tensor([[3.0, 2.9, -1.0, -1.1]])
    seq = row(prompt=(0,), answer=(2,), temperature=0.0, repetition_penalty=2.0)
    assert sample(scores, [seq], EOS)[0].token_id == 1
    assert scores[0].tolist() == pytest.approx([1.5, 2.9, -2.0, -1.1])


@pytest.mark.parametrize("penalty", [1e-308, 1e-45, 1e38, 1e308])
def test_the_most_absurd_penalty_leaves_something_to_choose(penalty):
    scores = torch.tensor([[3.0, 0.0, -1.0, 2.0]])
    result = sample(scores, [row(prompt=(0, 1), answer=(2,), repetition_penalty=penalty)], EOS)[0]
    assert result.error is None and torch.isfinite(scores).all()


def test_presence_and_frequency_count_the_answer_only():
    scores = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    rows = [row(prompt=(0, 0), answer=(1, 1, 2), presence_penalty=0.5, frequency_penalty=0.25), row(temperature=0.0)]
    sample(scores, rows, EOS)
    assert scores[0].tolist() == pytest.approx([1.0, 0.0, 0.25, 1.0])
    assert scores[1].tolist() == [1.0] * 4


def test_logit_bias_adds_and_ignores_ids_outside():
    scores = torch.zeros(1, 4)
    assert sample(scores, [row(temperature=0.0, logit_bias={2: 5.0, 99: 100.0, 0: -100.0})], EOS)[0].token_id == 2
    assert scores[0].tolist() == [-100.0, 0.0, 5.0, 0.0]


def test_min_tokens_keeps_endings_out_until_then():
    scores = torch.tensor([[9.0, 8.0, 1.0]])
    settings = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1,)}
    assert sample(scores.clone(), [row(answer=(2,), **settings)], EOS)[0].token_id == 2
    assert sample(scores.clone(), [row(answer=(2, 2), **settings)], EOS)[0].token_id == 0


class Grammar:
    def __init__(self, *allowed: int) -> None:
        bits = np.zeros(8 * math.ceil(VOCAB / 8), dtype=np.uint8)
        bits[list(allowed)] = 1
        self.mask = np.packbits(bits, bitorder="little").tobytes()

    def token_mask(self) -> bytes:
        return self.mask


def test_a_grammar_allows_only_its_tokens_whatever_the_biases():
    seq = row(temperature=1.0, logit_bias={3: 100.0})
    seq.grammar = Grammar(41, 977)
    assert {sample(logits(), [seq], EOS)[0].token_id for seq.seed in range(50)} <= {41, 977}


def test_a_grammar_with_nothing_left_ends_that_row_alone():
    stuck = row(temperature=0.0)
    stuck.grammar = Grammar()
    results = sample(logits(2), [stuck, row(temperature=0.0)], EOS)
    assert isinstance(results[0].error, InvalidRequest) and results[0].token_id is None, "its own request's doing"
    assert results[1].error is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_ends_alone(bad, temperature):
    scores = logits(3)
    scores[1, 500] = bad
    results = sample(scores, [row(seed=i, temperature=temperature) for i in range(3)], EOS)
    assert [r.error is None for r in results] == [True, False, True]


def test_logprobs_are_the_models_own():
    """Before penalties and temperature; the chosen token's, and the likeliest in order."""
    scores = logits(2)
    expected = scores.log_softmax(-1)
    rows = [row(temperature=0.0, logprobs=5, logit_bias={7: 50.0}), row(temperature=0.7, logprobs=0, seed=9)]
    first, second = sample(scores.clone(), rows, EOS)
    assert first.token_id == 7 and first.logprob == pytest.approx(expected[0, 7].item(), abs=1e-5)
    top = expected[0].topk(5)
    assert [token for token, _ in first.top] == top.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert second.top == [] and second.logprob == pytest.approx(expected[1, second.token_id].item(), abs=1e-5)
    assert sample(scores.clone(), [row(temperature=0.0)] * 2, EOS)[0].logprob is None
