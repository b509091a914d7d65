"""Every architecture against transformers on the same random weights, in float32."""

from __future__ import annotations

import pytest
import torch

from laya.model.load import load
from laya.schema.generation import SamplingParams

from . import tiny
from .drive import continuation, prefill, prompt_ids, sequence

# float32 on both sides: what is left is the order of sums over 3 layers of width 64.
FLOAT32_BOUND = 2e-4
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


def prompt_scores(runner, ids: list[int], **how) -> torch.Tensor:
    seq = sequence(ids, range(8, 24), SCORED)
    return torch.tensor([entry[0] for result in prefill(runner, seq, **how) for entry in result.prompt_logprobs])


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_prompt_logprobs_agree_with_transformers(kind, tiny_models):
    runner, referee = tiny_models(kind)
    ids = prompt_ids(75)
    expected = tiny.logprobs(referee, ids)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    assert (prompt_scores(runner, ids) - expected).abs().max() < FLOAT32_BOUND


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_greedy_decode_follows_transformers(kind, tiny_models):
    """Past the sliding window too: each new token is the referee's own choice, or within the bound of it."""
    runner, referee = tiny_models(kind)
    ids = prompt_ids(30, seed=2)
    new = continuation(runner, sequence(ids, range(40, 56)), 40)
    expected = tiny.logprobs(referee, ids + new)
    for i, token in enumerate(new):
        row = expected[len(ids) - 1 + i]
        assert row.max() - row[token] < FLOAT32_BOUND


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_chunks_give_what_the_whole_gives(kind, tiny_models):
    runner, _ = tiny_models(kind)
    ids = prompt_ids(70, seed=3)
    whole = prompt_scores(runner, ids)
    for chunks in ([16, 16], [1, 30, 1], [33], [69]):
        assert (prompt_scores(runner, ids, chunks=chunks) - whole).abs().max() < FLOAT32_BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_safetensors_read_exactly_in_float32_mode(dtype, tmp_path):
    referee = tiny.save("qwen3", tmp_path, dtype)
    runner, tokenizer, card = load(str(tmp_path), device="cpu", dtype="float32", num_blocks=32)
    ids = prompt_ids(40)
    expected = tiny.logprobs(referee, ids)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    assert (prompt_scores(runner, ids) - expected).abs().max() < FLOAT32_BOUND
    assert tokenizer.decode(tokenizer.encode("héllo")) == "héllo"
    assert card.max_model_len == 512 and not card.chat


def test_bfloat16_mode_stays_close(tmp_path):
    referee = tiny.save("llama", tmp_path, torch.bfloat16)
    runner, _, card = load(str(tmp_path), device="cpu", dtype="bfloat16", num_blocks=32)
    ids = prompt_ids(60)
    expected = tiny.logprobs(referee, ids)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    # bf16 keeps 8 bits: logits of this model reach 30, so one step of a logit is 0.125, and errors of 3 layers add up.
    assert (prompt_scores(runner, ids) - expected).abs().mean() < 0.15
    assert card.details["dtype"] == "bfloat16"
