"""The runner's contract with the engine: what it fills in, what it leaves alone, what it reports."""

from __future__ import annotations

import weakref

import pytest
import torch

from laya.engine.step import Scheduled
from laya.model import attention_plan
from laya.model.forward import EagerForward
from laya.model.load import load
from laya.schema.generation import SamplingParams

from .drive import continuation, extend, prefill, prompt_ids, sequence


def test_only_the_last_known_token_is_followed_by_a_sample(tiny_models):
    runner, _ = tiny_models("llama")
    seq = sequence(prompt_ids(20), range(2))
    assert runner.run([]) == []
    first, second = prefill(runner, seq, chunks=[12])
    assert first.token_id is None and first.error is None
    assert 0 <= second.token_id < runner.vocab_size and second.logprob is None and second.top is None


def test_results_come_in_the_order_of_the_batch(tiny_models):
    """Decodes and prefills are computed in another order than they are scheduled."""
    runner, _ = tiny_models("llama")
    lengths = [5, 40, 1, 17, 1, 33]
    made = [sequence(prompt_ids(n, seed=i), range(8 * i, 8 * i + 4)) for i, n in enumerate(lengths)]
    alone = [prefill(runner, s)[-1].token_id for s in made]
    assert [r.token_id for r in runner.run([Scheduled(s, 0, len(s)) for s in made])] == alone


@pytest.mark.parametrize("chunks", [[], [1], [16, 16], [10, 1, 20]])
def test_prompt_logprobs_cover_every_prompt_token_but_the_first(tiny_models, chunks):
    runner, _ = tiny_models("llama")
    seq = sequence(prompt_ids(40), range(3), SamplingParams(temperature=0.0, prompt_logprobs=2))
    entries = [entry for result in prefill(runner, seq, chunks=chunks) for entry in result.prompt_logprobs]
    assert len(entries) == 39
    for logprob, top in entries:
        assert len(top) == 2 and top[0][1] >= top[1][1] >= -20 and logprob <= top[0][1] + 1e-6
    seq.token_ids.append(3)
    assert extend(runner, [seq], 1)[0][0].prompt_logprobs is None


def test_scoring_a_prompt_leaves_a_shared_prefix_untouched(tiny_models):
    """The row before a chunk is computed again for its logits; the block that holds it may be another sequence's too."""
    runner, _ = tiny_models("llama")
    seq = sequence(prompt_ids(40), range(3), SamplingParams(temperature=0.0, prompt_logprobs=0))
    runner.run([Scheduled(seq, 0, 32)])
    before = runner.cache.pool[:, :2].clone()
    result = runner.run([Scheduled(seq, 32, 8)])[0]
    assert len(result.prompt_logprobs) == 8 and torch.equal(runner.cache.pool[:, :2], before)


def test_warm_up_leaves_an_empty_pool(tiny_models):
    runner, _ = tiny_models("mistral")
    runner.warm_up(max_num_seqs=6, chunk_tokens=100)
    assert not runner.cache.pool.any()
    assert continuation(runner, sequence(prompt_ids(20), range(3)), 3)


def test_memory_counts_what_is_held(tiny_models):
    runner, _ = tiny_models("llama")
    report = runner.memory()
    assert report["kv"] == runner.cache.pool.nbytes and report["swap"] <= 1 << 20
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    assert report["params"] == 4 * (3 * layer + 2 * 320 * 64 + 64)


def test_close_frees_the_model_and_its_figures_stay(tmp_path):
    """Metrics are read by another thread than the one that closes it."""
    from . import tiny

    tiny.save("llama", tmp_path)
    runner, _, _ = load(str(tmp_path), device="cpu", num_blocks=8)
    weights, before = weakref.ref(runner.decoder), runner.memory()
    runner.close()
    assert weights() is None and runner.memory() == before and before["kv"] > 0 < before["params"]


def test_a_decode_with_4_bit_weights_is_the_same_to_the_bit_in_any_batch(smollm2):
    """Beside shorter and longer contexts, padded or not, and beside a prefill."""
    runner, _, _ = smollm2
    top = SamplingParams(temperature=0.0, logprobs=5)
    tables = [range(0, 20), range(20, 40), range(40, 60), range(60, 110), range(110, 160)]
    made = [sequence(prompt_ids(n, seed=n, vocab=40000), t, top) for n, t in zip((20, 33, 90, 300, 700), tables, strict=True)]
    for seq in made:
        prefill(runner, seq)
        seq.token_ids.append(77)
    steps = [Scheduled(seq, len(seq) - 1, 1) for seq in made]
    alone = [runner.run([step])[0].top for step in steps]
    assert [r.top for r in runner.run(steps)] == alone
    for count in (50, 120):  # few rows and many are multiplied in different ways
        chunk = Scheduled(sequence(prompt_ids(count), range(170, 180)), 0, count)
        assert [r.top for r in runner.run([chunk, *steps[::-1]])[1:]] == alone[::-1]


def test_a_long_decode_read_where_it_lies_is_the_same_as_gathered(smollm2, monkeypatch):
    runner, _, _ = smollm2
    top = SamplingParams(temperature=0.0, logprobs=5)
    scattered = [*range(60, 100, 2), *range(61, 101, 2)]  # cannot be read in place
    made = [sequence(prompt_ids(500, seed=n, vocab=40000), t, top) for n, t in enumerate((range(20, 60), scattered, range(100, 140)))]
    for seq in made:
        prefill(runner, seq)
        seq.token_ids.append(77)
    steps = [Scheduled(seq, len(seq) - 1, 1) for seq in made]
    eager, groups = EagerForward(runner.decoder, runner.cache), []
    decode_groups = eager._planner._decode_groups
    monkeypatch.setattr(runner, "forward", eager)
    monkeypatch.setattr(eager._planner, "_decode_groups", lambda *given: groups.append(len(made := decode_groups(*given))) or made)
    for limit in (16, 10_000):
        monkeypatch.setattr(attention_plan, "LONE_TOKENS", limit)
        found = [r.top for r in runner.run(steps)]
        monkeypatch.setattr(attention_plan, "LONE_TOKENS", 10_000)
        assert found == [r.top for r in runner.run(steps)]
    assert groups == [3, 1, 1, 1]


def test_a_seed_gives_the_same_text_alone_in_a_batch_and_after_preemption(smollm2):
    """With 4-bit weights too: a decode's numbers do not depend on its batch, bit for bit."""
    runner, tokenizer, _ = smollm2
    ids = tokenizer.encode("Once upon a time, in a small village by the sea,")
    warm = SamplingParams(temperature=0.9, top_p=0.95)
    alone = continuation(runner, sequence(ids, range(4), warm, seed=42), 24)
    batch = [sequence(ids, range(8 * i, 8 * i + 4), warm, seed=40 + i) for i in range(5)]
    for seq in batch:
        seq.token_ids.append(prefill(runner, seq)[-1].token_id)
    extend(runner, batch, 8)
    ticket = runner.swap_out(batch[2].block_table)
    batch[2].block_table = [100, 90, 95, 80]
    runner.swap_in(ticket, batch[2].block_table)
    extend(runner, batch[1:], 15)
    assert batch[2].token_ids[len(ids) :] == alone
    assert len({tuple(s.token_ids[-10:]) for s in batch[1:]}) == 4
    other = continuation(runner, sequence(ids, range(4), warm, seed=43), 24)
    assert other == batch[3].token_ids[len(ids) :] != alone
