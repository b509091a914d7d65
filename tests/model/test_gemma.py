"""Gemma 3 270M for real: Q5_0, Q4_K, Q6_K and Q8_0 in one file, five windowed layers of six, a sentencepiece vocabulary."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from laya.model.formats.gguf_header import Header, read_header
from laya.model.load import load
from laya.schema.generation import SamplingParams

from .drive import continuation, prefill, sequence

pytestmark = pytest.mark.timeout(400)  # logits of 262,144 words for each token of a long prompt, three times over, on a busy core

PROMPTS = [
    "The capital of France is", "def fibonacci(n):\n", "水の沸点は",
    # past the window of 512 tokens, so that windowed layers no longer see its beginning
    "Names: Ada, Bob.\n" + "The history of the city begins on the river, where traders from the north met others. " * 30 + "Names:",
]  # fmt: skip
NEW_TOKENS = 10
# float32 on both sides; the difference seen is 4e-5, over 18 layers with logits up to 30.
FLOAT32_BOUND = 1e-3
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)
BLOCKS = range(60)


@pytest.fixture(scope="module")
def exact(gemma_path):
    return load(str(gemma_path), device="cpu", dtype="float32", num_blocks=64, max_seq_len=1024)


@pytest.fixture(scope="module")
def answers(exact) -> list[tuple[list[int], list[int]]]:
    """(prompt, greedy continuation) of the exact mode."""
    runner, tokenizer, _ = exact
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    return [(ids, continuation(runner, sequence(ids, BLOCKS), NEW_TOKENS)) for ids in prompts]


@pytest.fixture(scope="module")
def reference(answers, gemma_path, tmp_path_factory) -> list[torch.Tensor]:
    """Log-probabilities [tokens, vocab] by transformers, which loads the same tensors from a GGUF file itself."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gemma")
    without_vocabulary(gemma_path, folder / "gemma.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="gemma.gguf", dtype=torch.float32).eval()
    assert model.config.sliding_window == 512 and len(model.model.layers) == 18
    with torch.inference_mode():
        return [model(torch.tensor([ids + new])).logits[0].log_softmax(-1) for ids, new in answers]


def without_vocabulary(path: Path, target: Path) -> None:
    """The same model and tensors, byte for byte. The gguf package takes a minute over 262,144 words, which no logit needs."""
    header = read_header(str(path))
    writer = gguf.GGUFWriter(str(target), "gemma3")
    for key, value in header.fields.items():
        if key.startswith("gemma3."):
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    writer.add_vocab_size(len(header.fields["tokenizer.ggml.tokens"]))
    data = np.memmap(path, mode="r", dtype=np.uint8)
    for entry in header.tensors:
        kind = gguf.GGMLQuantizationType(entry.type_id)
        writer.add_tensor(entry.name, raw_rows(entry, kind, data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def raw_rows(entry, kind: gguf.GGMLQuantizationType, data: np.ndarray) -> np.ndarray:
    """The file's bytes, a row of the matrix each."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = int(np.prod(entry.dimensions[1:], dtype=np.int64))
    row_bytes = entry.dimensions[0] // block * block_bytes
    raw = np.asarray(data[entry.offset : entry.offset + rows * row_bytes])
    if kind == gguf.GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(*reversed(entry.dimensions))
    return raw.reshape(rows, row_bytes)


def scores(runner, ids: list[int]) -> torch.Tensor:
    return torch.tensor([logprob for result in prefill(runner, sequence(ids, BLOCKS, SCORED)) for logprob, _ in result.prompt_logprobs])


def expected_scores(rows: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return rows[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


def test_the_file_holds_the_types_that_this_is_the_test_of(gemma_path):
    header: Header = read_header(str(gemma_path))
    kinds = {gguf.GGMLQuantizationType(entry.type_id).name for entry in header.tensors}
    assert kinds == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}


def test_greedy_text_is_transformers_text_or_a_near_tie(answers, reference):
    """Given the same tokens before it, each token is transformers' own choice: so the texts are the same from the start."""
    assert len(answers[-1][0]) > 512 + NEW_TOKENS
    for (ids, new), rows in zip(answers, reference, strict=True):
        for i, token in enumerate(new):
            row = rows[len(ids) - 1 + i]
            assert token == row.argmax() or row.max() - row[token] < FLOAT32_BOUND


def test_logprobs_agree_in_float32(exact, answers, reference):
    for (ids, new), rows in zip(answers, reference, strict=True):
        assert (scores(exact[0], ids + new) - expected_scores(rows, ids + new)).abs().max() < FLOAT32_BOUND


def test_logprobs_stay_close_with_quantised_weights(gemma_path, answers, reference):
    """What differs from the file's numbers: 5 and 6 bits with a scale for 16 or 32 weights become 8 bits with one a row, worth
    up to 1/254 of the row's largest weight each; scales of 4 bits and activations between products have bf16's 8 bits."""
    runner, _, card = load(str(gemma_path), device="cpu", num_blocks=64, max_seq_len=1024)
    assert card.details["quantization"] == "Q5_0 + Q4_K + Q8_0 + Q6_K" and not card.chat
    everything = []
    for (ids, new), rows in zip(answers, reference, strict=True):
        everything.append((scores(runner, ids + new) - expected_scores(rows, ids + new)).abs())
    differences = torch.cat(everything)
    assert differences.mean() < 0.05 and differences.max() < 0.8
