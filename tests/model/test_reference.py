"""SmolLM2 for real, against transformers in float32 on the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from laya.engine.step import Scheduled
from laya.model.load import load
from laya.schema.generation import SamplingParams

from .drive import extend, sequence

QUESTIONS = [
    "What is the capital of France? Answer briefly.", "Write a haiku about autumn rain.", "Explain how a hash table works.",
    "Translate to German: good morning, my friend.", "List three prime numbers larger than 50.", "def fibonacci(n):",
    "Who wrote Hamlet, and when?", "Summarise: the quick brown fox jumps over the lazy dog near the river bank at dawn.",
    "你好，请介绍一下你自己。", "Give me a recipe for pancakes with 4 ingredients.",
]  # fmt: skip
NEW_TOKENS = 16
FLOAT32_BOUND = 0.05  # what the project promises; the difference seen is 1e-5
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def exact(smollm2_path):
    """The mode that keeps the file's numbers and computes in float32."""
    return load(smollm2_path, device="cpu", dtype="float32", num_blocks=64, max_seq_len=512)


@pytest.fixture(scope="module")
def answers(exact) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy continuation) of the exact mode, all ten in one batch."""
    runner, tokenizer, _ = exact
    prompts = [tokenizer.encode_chat([{"role": "user", "content": q}], None, True) for q in QUESTIONS]
    sequences = [sequence(ids, range(6 * i, 6 * i + 6)) for i, ids in enumerate(prompts)]
    for seq, result in zip(sequences, runner.run([Scheduled(s, 0, len(s)) for s in sequences]), strict=True):
        seq.token_ids.append(result.token_id)
    extend(runner, sequences, NEW_TOKENS - 1)
    return [(ids, s.token_ids[len(ids) :]) for ids, s in zip(prompts, sequences, strict=True)]


@pytest.fixture(scope="module")
def reference(answers, smollm2_path) -> list[torch.Tensor]:
    """Log-probabilities [tokens, vocab] by transformers over each prompt and its continuation."""
    from transformers import AutoModelForCausalLM

    path = Path(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([ids + new])).logits[0].log_softmax(-1) for ids, new in answers]


def scores(runner, ids: list[int]) -> torch.Tensor:
    (result,) = runner.run([Scheduled(sequence(ids, range(6), SCORED), 0, len(ids))])
    return torch.tensor([logprob for logprob, _ in result.prompt_logprobs])


def expected_scores(rows: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return rows[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


def test_greedy_text_is_transformers_text_or_a_near_tie(answers, reference):
    """Given the same tokens before it, each token is transformers' own choice: so the texts are the same from the start."""
    for (ids, new), rows in zip(answers, reference, strict=True):
        for i, token in enumerate(new):
            row = rows[len(ids) - 1 + i]
            assert token == row.argmax() or row.max() - row[token] < FLOAT32_BOUND


def test_logprobs_agree_in_float32(exact, answers, reference):
    for (ids, new), rows in zip(answers, reference, strict=True):
        difference = scores(exact[0], ids + new) - expected_scores(rows, ids + new)
        assert difference.abs().max() < FLOAT32_BOUND


def test_logprobs_stay_close_with_4_bit_weights(smollm2, answers, reference):
    """The weights are the file's. What differs: activations, scales and zeros have bf16's 8 bits, the embedding one scale a
    row; each of 210 products adds a relative error near 2**-9, and logits near 20 turn the sum into some hundredths."""
    differences = []
    for (ids, new), rows in zip(answers, reference, strict=True):
        differences.append((scores(smollm2[0], ids + new) - expected_scores(rows, ids + new))[len(ids) - 1 :].abs())
    everything = torch.cat(differences)
    assert everything.mean() < 0.05 and everything.max() < 0.4


def test_the_served_mode_says_paris(smollm2, answers):
    runner, tokenizer, card = smollm2
    seq = sequence(answers[0][0], range(6))
    seq.token_ids.append(runner.run([Scheduled(seq, 0, len(seq))])[0].token_id)
    extend(runner, [seq], 7)
    assert "Paris" in tokenizer.decode(seq.token_ids[len(answers[0][0]) :])
    assert card.chat and card.details["quantization"] == "Q4_1 + Q8_0"
