"""What a sequence gets must not depend on its batch, its chunks, its blocks, or on having been cached or swapped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laya.engine.step import Scheduled
from laya.schema.generation import SamplingParams

from .drive import continuation, extend, prefill, prompt_ids, sequence

WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=3)
MODES = [("llama", None), ("mistral", None), ("gemma3", None), ("Q4_1", "quantized"), ("Q8_0", "quantized")]
# Sums of the same numbers in another order: float32 and, with quantised weights, activations rounded to bf16 (8 bits).
BOUNDS = {None: 1e-4, "quantized": 0.15}


@pytest.fixture(params=MODES, ids=lambda mode: mode[0])
def case(request, tiny_models, tiny_gguf):
    """(runner, bound): float32 models of three kinds, and two quantised ones."""
    kind, dtype = request.param
    runner = tiny_models(kind)[0] if dtype is None else tiny_gguf(kind, dtype)[0]
    return runner, BOUNDS[dtype]


def first_logprob(runner, seq, **how) -> dict[int, float]:
    return dict(prefill(runner, seq, **how)[-1].top)


def close(a: dict[int, float], b: dict[int, float], bound: float) -> bool:
    """The likeliest three agree where both name them; one that only one names must be near the other's last."""
    floor = min(min(a.values()), min(b.values())) - bound
    return all(abs(a.get(t, floor) - b.get(t, floor)) <= 2 * bound for t in a.keys() | b.keys())


def test_a_batch_of_ragged_decodes_gives_what_each_gives_alone(case):
    runner, bound = case
    lengths = [3, 16, 17, 40, 64]
    alone = []
    for i, length in enumerate(lengths):
        seq = sequence(prompt_ids(length, seed=i), range(10 * i, 10 * i + 8), WITH_LOGPROBS)
        prefill(runner, seq)
        seq.token_ids.append(7)
        alone.append(runner.run([Scheduled(seq, length, 1)])[0])
    together = [sequence([*prompt_ids(n, seed=i), 7], range(10 * i, 10 * i + 8), WITH_LOGPROBS) for i, n in enumerate(lengths)]
    for seq, length in zip(together, lengths, strict=True):
        prefill_only = Scheduled(seq, 0, length)
        runner.run([prefill_only])
    for mine, single in zip(runner.run([Scheduled(s, len(s) - 1, 1) for s in together]), alone, strict=True):
        assert close(dict(mine.top), dict(single.top), bound)


def test_prefill_beside_decodes_gives_what_each_gives_alone(case):
    runner, bound = case
    decoding = sequence([*prompt_ids(30, seed=1), 7], range(4), WITH_LOGPROBS)
    prefill_first = sequence(prompt_ids(45, seed=2), range(8, 12), WITH_LOGPROBS)
    runner.run([Scheduled(decoding, 0, 30)])
    alone = [runner.run([Scheduled(prefill_first, 0, 45)])[0], runner.run([Scheduled(decoding, 30, 1)])[0]]
    mixed = runner.run([Scheduled(prefill_first, 0, 45), Scheduled(decoding, 30, 1)])
    for mine, single in zip(mixed, alone, strict=True):
        assert close(dict(mine.top), dict(single.top), bound)


def test_chunked_prefill_gives_what_whole_prefill_gives(case):
    runner, bound = case
    ids = prompt_ids(61, seed=4)
    whole = first_logprob(runner, sequence(ids, range(8), WITH_LOGPROBS))
    for chunks in ([16, 16, 16], [5, 20, 1], [60]):
        assert close(first_logprob(runner, sequence(ids, range(20, 28), WITH_LOGPROBS), chunks=chunks), whole, bound)


@pytest.mark.parametrize("length", [31, 32, 48, 64])
def test_a_cached_prefix_gives_what_a_cold_prompt_gives(case, length):
    """(case 46) Lengths that are a multiple of the block: the last token alone is computed again."""
    runner, bound = case
    ids = prompt_ids(length, seed=5)
    cold = first_logprob(runner, sequence(ids, [3, 1, 4, 0], WITH_LOGPROBS))
    cached = min(length - 1, length // 16 * 16)
    again = sequence(ids, [3, 1, 4, 0], WITH_LOGPROBS)
    assert close(first_logprob(runner, again, start=cached), cold, bound)


def test_block_tables_in_any_order_give_the_same(case):
    runner, _ = case
    ids = prompt_ids(50, seed=6)
    straight = continuation(runner, sequence(ids, range(6)), 20)
    assert continuation(runner, sequence(ids, [41, 7, 30, 2, 19, 11]), 20) == straight


def test_a_shared_prefix_is_only_read(case):
    """Two sequences share two whole blocks; what either computes after them leaves the other's numbers alone."""
    runner, bound = case
    prefix = prompt_ids(32, seed=7)
    first = sequence([*prefix, 1, 2, 3], [10, 11, 12], WITH_LOGPROBS)
    cold = first_logprob(runner, first)
    second = sequence([*prefix, 9, 8], [10, 11, 13], WITH_LOGPROBS)
    prefill(runner, second, start=32)
    extend(runner, [second], 5)
    again = sequence([*prefix, 1, 2, 3], [10, 11, 14], WITH_LOGPROBS)
    assert close(first_logprob(runner, again, start=32), cold, bound)


def test_swapping_out_and_in_changes_nothing(case):
    """Bit for bit: the blocks come back elsewhere and the continuation is the same."""
    runner, _ = case
    ids = prompt_ids(40, seed=8)
    undisturbed = continuation(runner, sequence(ids, range(5)), 30)
    seq = sequence(ids, range(5))
    start = continuation(runner, seq, 10)
    ticket = runner.swap_out(seq.block_table)
    prefill(runner, sequence(prompt_ids(64, seed=9), range(5)))  # others take its blocks meanwhile
    seq.block_table = [50, 20, 33, 21, 60]
    runner.swap_in(ticket, seq.block_table)
    extend(runner, [seq], 20)
    assert [*start, *seq.token_ids[-20:]] == undisturbed


def test_swap_space_is_bounded_and_given_back(tiny_models):
    runner, _ = tiny_models("llama")
    room = runner.cache.swap_free
    tickets = []
    while (ticket := runner.swap_out([0, 1, 2])) is not None:
        tickets.append(ticket)
    assert len(tickets) == room // 3
    for ticket in tickets[1:]:
        runner.drop_swapped(ticket)
        runner.drop_swapped(ticket)  # twice does no harm
    runner.swap_in(tickets[0], [5, 6, 7])
    assert runner.cache.swap_free == room


def test_recomputing_after_preemption_gives_the_same_text(tiny_models):
    """(case 45) Prompt and answer so far are prefilled again in other blocks; greedy text goes on as if undisturbed."""
    runner, _ = tiny_models("llama")
    ids = prompt_ids(25, seed=10)
    undisturbed = continuation(runner, sequence(ids, range(4)), 30)
    seq = sequence(ids, range(4))
    continuation(runner, seq, 12)
    seq.block_table = [9, 8, 30, 31]
    seq.token_ids.append(prefill(runner, seq, chunks=[17])[-1].token_id)
    extend(runner, [seq], 17)
    assert seq.token_ids[25:] == undisturbed


def test_rows_not_finite_end_one_sequence_and_leave_nothing_behind(tiny_models):
    """The poisoned sequence gets an error; its batch-mates and the next owner of its blocks get clean numbers."""
    runner, _ = tiny_models("llama")
    healthy_alone = first_logprob(runner, sequence(prompt_ids(20, seed=11), [0, 1], WITH_LOGPROBS))
    poisoned_token = 300
    embed = runner.decoder.embed.weight
    kept = embed[poisoned_token].clone()
    with torch.inference_mode():
        embed[poisoned_token] = float("nan")
    try:
        healthy = sequence(prompt_ids(20, seed=11), [0, 1], WITH_LOGPROBS)
        poisoned = sequence([*prompt_ids(10), poisoned_token, *prompt_ids(9)], [2, 3])
        unfinished = sequence([*prompt_ids(10), poisoned_token, *prompt_ids(9)], [4, 5])
        mixed = runner.run([Scheduled(poisoned, 0, 20), Scheduled(healthy, 0, 20), Scheduled(unfinished, 0, 15)])
    finally:
        with torch.inference_mode():
            embed[poisoned_token] = kept
    assert mixed[0].error is not None and mixed[2].error is not None and mixed[1].error is None
    assert dict(mixed[1].top) == pytest.approx(healthy_alone, abs=1e-4)
    reuse = sequence(prompt_ids(20, seed=11), [2, 5], WITH_LOGPROBS)
    assert dict(prefill(runner, reuse, chunks=[3])[-1].top) == pytest.approx(healthy_alone, abs=1e-4)


@given(st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_mixtures_equal_lone_runs(tiny_models, data):
    """Random prompts, chunk sizes and moments of joining: each greedy text is that of a run alone, in any company."""
    runner, _ = tiny_models("llama")
    count = data.draw(st.integers(1, 5))
    lengths = [data.draw(st.integers(1, 50)) for _ in range(count)]
    waits = [data.draw(st.integers(0, 6)) for _ in range(count)]
    sizes = [data.draw(st.integers(1, 40)) for _ in range(count)]
    prompts = [prompt_ids(length, seed=100 + i) for i, length in enumerate(lengths)]
    alone = [continuation(runner, sequence(ids, range(5)), 12) for ids in prompts]
    sequences = [sequence(ids, range(6 * i, 6 * i + 5)) for i, ids in enumerate(prompts)]
    computed = [0] * count
    step = 0
    while any(s.num_generated < 12 for s in sequences):
        batch = []
        for i, seq in enumerate(sequences):
            if step >= waits[i] and seq.num_generated < 12:
                batch.append((i, Scheduled(seq, computed[i], min(sizes[i], len(seq) - computed[i]))))
        for (i, work), result in zip(batch, runner.run([work for _, work in batch]), strict=True):
            computed[i] += work.count
            if result.token_id is not None:
                sequences[i].token_ids.append(result.token_id)
        step += 1
    assert [s.token_ids[-12:] for s in sequences] == alone
