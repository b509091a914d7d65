"""The loop with its scheduler, over the runner that checks every KV read: outputs, caps, fairness, choices, opening."""

from __future__ import annotations

import pytest

from .fake_runner import FakeRunner, reference
from .harness import Engine, prompt


def test_one_request_generates_the_reference_and_tells_of_it_in_order():
    engine = Engine()
    client = engine.offer(prompt(21), 9)
    engine.settle()
    assert client.token_ids() == reference(prompt(21), 9)
    assert client.text() == engine.tokenizer.decode(client.token_ids()) and client.finish() == "length"
    assert (client.started.prompt_tokens, client.started.cached_tokens) == (21, 0)
    assert (client.end.prompt_tokens, client.end.completion_tokens) == (21, 9)
    assert client.end.prefill_s > 0 and client.end.decode_s > 0


def test_a_step_posts_one_batch():
    engine = Engine(max_num_seqs=4)
    for i in range(4):
        engine.offer(prompt(5, i), 6)
    for _ in range(8):
        before = len(engine.posts)
        engine.turn()
        assert len(engine.posts) <= before + 1
    engine.settle()


@pytest.mark.parametrize("length", [16, 32])
def test_a_prompt_of_whole_blocks_sent_twice_gives_the_same(length):
    """(case 46)"""
    engine = Engine(FakeRunner(block_size=16))
    cold = engine.offer(prompt(length), 5)
    engine.settle()
    warm = engine.offer(prompt(length), 5)
    engine.settle()
    assert cold.token_ids() == warm.token_ids() == reference(prompt(length), 5)
    assert warm.started.cached_tokens == warm.end.cached_tokens == length - 16


def test_salted_tenants_do_not_share_a_prefix():
    """(case 47)"""
    engine = Engine()
    engine.offer(prompt(20), 2, salt="a")
    engine.settle()
    other, same = engine.offer(prompt(20), 2, salt="b"), engine.offer(prompt(20), 2, salt="a")
    engine.settle()
    assert other.started.cached_tokens == 0 and same.started.cached_tokens == 16


def test_decodes_go_on_in_every_step_while_a_long_prompt_is_read():
    engine = Engine(max_num_seqs=2, prefill_chunk_tokens=8)
    engine.offer(prompt(3), 40)
    engine.turn()
    engine.offer(prompt(90, 1), 2)
    for _ in range(11):
        engine.turn()
        short, long = engine.runner.batches[-1]
        assert (short[0], short[2]) == (0, 1) and (long[0], long[2]) == (1, 7)
    engine.settle()


def test_no_more_requests_prefill_in_one_step_than_the_cap():
    for cap in (1, 2):
        engine = Engine(max_num_seqs=8, max_concurrent_prefills=cap)
        seen = 0
        for i in range(40):
            if i < 8:
                engine.offer(prompt(5 + 9 * (7 - i), i), 3)
            engine.turn()
            prefills = [count for _, start, count in engine.runner.batches[-1] if count > 1 or start == 0]
            seen = max(seen, len(prefills))
        assert seen == cap
        engine.settle()


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one_only():
    engine = Engine(max_num_seqs=4, prefill_chunk_tokens=10)
    long = engine.offer(prompt(200), 2)
    engine.turn()
    short = engine.offer(prompt(5, 1), 2)
    for _ in range(3):
        engine.turn()
    assert short.token_ids() and not long.token_ids()
    engine.settle()


def test_endless_short_requests_do_not_starve_a_long_one():
    engine = Engine(FakeRunner(num_blocks=80), max_num_seqs=4, prefill_chunk_tokens=8, queue_limit=100)
    long = engine.offer(prompt(200), 4)
    for i in range(400):
        while engine.admission.queued < 6:
            engine.offer(prompt(4, engine.loop.tally.steps + engine.admission.queued), 3, client=f"c{i % 3}")
        engine.turn()
        if long.end:
            break
    assert long.ok
    engine.settle()


def test_endless_short_requests_do_not_keep_a_long_one_from_its_blocks():
    engine = Engine(FakeRunner(num_blocks=60), max_num_seqs=16, prefill_chunk_tokens=8, max_concurrent_prefills=4)
    for i in range(20):
        engine.offer(prompt(4, i), 30)
    for _ in range(10):
        engine.turn()
    long = engine.offer(prompt(200), 4)
    for i in range(1500):
        while engine.admission.queued < 6:
            engine.offer(prompt(4, 20 + i + engine.admission.queued), 30)
        engine.turn()
        if long.end:
            break
    assert long.ok
    engine.settle()


def test_endless_long_requests_do_not_starve_a_short_one():
    engine = Engine(FakeRunner(num_blocks=120), max_num_seqs=2, prefill_chunk_tokens=8, queue_limit=100)
    for i in range(6):
        engine.offer(prompt(100, i), 4)
    for _ in range(5):
        engine.turn()
    short = engine.offer(prompt(4, 99), 2)
    for i in range(60):
        while engine.admission.queued < 6:
            engine.offer(prompt(100, 100 + i), 4)
        engine.turn()
        if short.end:
            break
    assert short.ok
    engine.settle()


def test_choices_of_one_request_share_the_prompt_and_run_in_slices():
    """(case 30)"""
    engine = Engine(max_num_seqs=2)
    client = engine.offer(prompt(21), 5, n=7)
    engine.settle()
    assert {d.index for d in client.deltas} == set(range(7))
    assert all(client.token_ids(i) == reference(prompt(21), 5) and client.finish(i) == "length" for i in range(7))
    assert client.end.completion_tokens == 35 and client.end.prompt_tokens == 21
    first_starts: dict[int, int] = {}
    for batch in engine.runner.batches:
        for seq_id, start, _ in batch:
            first_starts.setdefault(seq_id, start)
    assert [first_starts[i] for i in range(7)] == [0] + [20] * 6  # the others begin behind the shared blocks


def test_choices_have_seeds_of_their_own():
    engine = Engine(max_num_seqs=3)
    engine.offer(prompt(5), 3, n=3, seed=41)
    seeds = set()
    while engine.turn():
        seeds |= {s.seed for s in engine.loop.scheduler.sequences()}
    assert seeds == {41, 42, 43}


def test_max_tokens_zero_reads_the_prompt_and_ends_with_length():
    engine = Engine()
    client = engine.offer(prompt(30), 0, prompt_logprobs=0, prompt_text="text")
    engine.settle()
    assert [(d.text, d.finish_reason, d.token_ids) for d in client.deltas] == [("", "length", ())]
    assert client.end.completion_tokens == 0 and client.started.prompt_text == "text"


def test_prompt_logprobs_cover_every_position_over_chunks_and_cached_prefixes():
    engine = Engine(prefill_chunk_tokens=7, max_num_seqs=2)
    plain = engine.offer(prompt(40), 1)
    engine.settle()
    scored = engine.offer(prompt(40), 1, prompt_logprobs=1, n=2)
    engine.settle()
    entries = scored.started.prompt_logprobs
    assert len(entries) == 40 and entries[0] is None and all(e is not None for e in entries[1:])
    assert [e.token_id for e in entries[1:]] == prompt(40)[1:]
    assert scored.started.cached_tokens == 0 and plain.started.prompt_logprobs is None


def test_concurrency_opens_step_by_step():
    engine = Engine(open_all=False, max_num_seqs=6)
    for i in range(12):
        engine.offer(prompt(4, i), 25)
    levels = []
    while engine.turn():
        levels.append(engine.loop.opening.allowed)
    assert sorted(set(levels)) == [1, 2, 4, 6] and levels == sorted(levels)


def test_concurrency_stays_low_while_steps_are_slow():
    engine = Engine(open_all=False, max_num_seqs=4, step_timeout_s=10.0)

    def slow(batch):
        engine.clock.now += 5

    engine.runner.before_run = slow
    for i in range(3):
        engine.offer(prompt(4, i), 20)
    engine.turn()
    for _ in range(15):
        engine.turn()
    assert engine.loop.opening.allowed == 1
