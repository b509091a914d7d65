"""The loop with its scheduler, over the runner that checks every KV read: outputs, fairness, preemption, abort, faults."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.engine.step import DeviceLost
from laya.errors import EngineFailed, Unavailable

from .fake_runner import FakeRunner, reference
from .harness import Engine


def prompt(length: int, seed: int = 0) -> list[int]:
    return [1 + (seed * 7919 + i * 31) % 500 for i in range(length)]


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


@pytest.mark.parametrize("swap_blocks", [0, 12, 1000])
def test_forced_preemption_with_a_shared_prefix_changes_no_output(swap_blocks):
    """(case 45)"""
    runner = FakeRunner(num_blocks=40, block_size=4, max_seq_len=160, swap_blocks=swap_blocks)
    engine = Engine(runner, max_num_seqs=8, queue_limit=1000, queue_tokens=10**6)
    shared = prompt(10)
    clients = [engine.offer([*shared, 1 + i], 30 + i % 40) for i in range(256)]
    engine.settle()
    for i, client in enumerate(clients):
        assert client.token_ids() == reference([*shared, 1 + i], 30 + i % 40)
    assert engine.loop.scheduler.preemptions > 20
    assert (runner.swaps_in > 0) == (swap_blocks > 0)


def test_a_full_swap_space_falls_back_to_recomputing():
    runner = FakeRunner(num_blocks=12, max_seq_len=48, swap_blocks=5)
    engine = Engine(runner, max_num_seqs=4)
    clients = [engine.offer(prompt(8, i), 30) for i in range(4)]
    engine.settle()
    assert [c.token_ids() for c in clients] == [reference(prompt(8, i), 30) for i in range(4)]
    assert 0 < runner.swaps_out < engine.loop.scheduler.preemptions


def test_a_swap_that_fails_is_recomputed():
    runner = FakeRunner(num_blocks=12, max_seq_len=48, swap_blocks=100)

    def broken(ticket, blocks):
        raise OSError("pinned memory is gone")

    runner.swap_in = broken
    engine = Engine(runner, max_num_seqs=4)
    clients = [engine.offer(prompt(8, i), 30) for i in range(4)]
    engine.settle()
    assert runner.swaps_out > 0
    assert [c.token_ids() for c in clients] == [reference(prompt(8, i), 30) for i in range(4)]


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


def test_nothing_new_starts_before_what_was_preempted_goes_on():
    engine = Engine(FakeRunner(num_blocks=14, max_seq_len=56), max_num_seqs=4)
    for i in range(3):
        engine.offer(prompt(8, i), 45)
    held = 0
    for i in range(400):
        if engine.admission.queued < 2 and i < 200:
            engine.offer(prompt(2, 50 + i), 2)
        paused = list(engine.loop.scheduler.paused)
        known = {s.seq_id for s in engine.loop.scheduler.sequences()}
        engine.turn()
        if paused and paused[0] in engine.loop.scheduler.paused:
            held += 1
            assert {s.seq_id for s in engine.loop.scheduler.sequences()} <= known
    assert held > 10
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


def test_prompt_logprobs_survive_preemption():
    runner = FakeRunner(num_blocks=12, max_seq_len=48)
    engine = Engine(runner, max_num_seqs=3, max_concurrent_prefills=3, prefill_chunk_tokens=5)
    clients = [engine.offer(prompt(14, i), 25, prompt_logprobs=0) for i in range(3)]
    engine.settle()
    assert engine.loop.scheduler.preemptions
    for i, client in enumerate(clients):
        assert client.token_ids() == reference(prompt(14, i), 25)
        assert [e.token_id for e in client.started.prompt_logprobs[1:]] == prompt(14, i)[1:]


def test_an_abort_frees_the_blocks_before_the_next_step():
    """(case 10)"""
    engine = Engine(max_num_seqs=2)
    stays, leaves = engine.offer(prompt(9), 12), engine.offer(prompt(30, 1), 50)
    for _ in range(4):
        engine.turn()
    engine.leave(leaves)
    engine.turn()
    assert {s.request.owner for s in engine.loop.scheduler.sequences()} == {stays}
    engine.settle()
    assert stays.token_ids() == reference(prompt(9), 12)


def test_a_client_that_leaves_while_queued_is_never_prefilled():
    """(case 51)"""
    engine = Engine(max_num_seqs=1)
    engine.offer(prompt(9), 12)
    engine.turn()
    leaves = engine.offer(prompt(30, 1), 5)
    engine.leave(leaves)
    assert engine.admission.waiting == 0 and engine.admission.waiting_tokens == 0
    engine.settle()
    assert {seq_id for batch in engine.runner.batches for seq_id, _, _ in batch} == {0}


def test_a_request_that_waits_too_long_is_told_to_come_back():
    engine = Engine(max_num_seqs=1, queue_timeout_s=1.0)
    engine.offer(prompt(9), 150)
    late = engine.offer(prompt(9, 1), 5)
    engine.settle()
    assert isinstance(late.end, Unavailable) and late.end.retry_after >= 1 and late.started is None


def test_a_fault_of_one_sequence_ends_its_request_only():
    """(case 32)"""
    engine = Engine(max_num_seqs=3)
    clients = [engine.offer(prompt(6, i), 10, n=1 + i % 2) for i in range(3)]

    def broken(sequence):
        return ValueError("nan") if sequence.request.owner is clients[1] and sequence.num_generated == 4 else None

    engine.runner.sequence_error = broken
    engine.settle()
    assert isinstance(clients[1].end, EngineFailed) and "nan" not in clients[1].end.message
    assert clients[0].ok and clients[2].ok and clients[0].token_ids() == reference(prompt(6), 10)


def test_a_fault_of_a_whole_step_ends_the_requests_in_it_and_the_loop_goes_on():
    """(case 53)"""
    engine = Engine(max_num_seqs=2)
    clients = [engine.offer(prompt(6, i), 10) for i in range(3)]

    def fail(batch):
        if len(engine.runner.batches) == 5:
            raise MemoryError("out of memory")

    engine.runner.before_run = fail
    engine.settle()
    assert [type(c.end) for c in clients[:2]] == [EngineFailed, EngineFailed] and clients[2].ok
    assert engine.loop.tally.failed_steps == 1


def test_a_runner_that_returns_too_few_outcomes_fails_the_step():
    engine = Engine(max_num_seqs=2)
    run, engine.runner.run = engine.runner.run, lambda batch: []
    client = engine.offer(prompt(6), 4)
    engine.turn()
    assert isinstance(client.end, EngineFailed)
    engine.runner.run = run
    again = engine.offer(prompt(6), 4)
    engine.settle()
    assert again.ok


def test_broken_bookkeeping_ends_what_runs_and_starts_over_with_an_empty_pool(monkeypatch):
    engine = Engine(FakeRunner(num_blocks=12, max_seq_len=48, swap_blocks=50), max_num_seqs=3)
    clients = [engine.offer(prompt(8, i), 30) for i in range(4)]
    while not engine.loop.scheduler.paused:
        engine.turn()
    monkeypatch.setattr(engine.loop.scheduler, "_decode", lambda batch: 1 / 0)
    engine.turn()
    monkeypatch.undo()
    assert [type(c.end) for c in clients[:3]] == [EngineFailed] * 3
    engine.settle()
    assert clients[3].ok


def test_a_broken_tokenizer_fails_its_request_only():
    engine = Engine(max_num_seqs=2)
    good, bad = engine.offer(prompt(6), 3), engine.offer(prompt(6, 1), 3)
    wrong = reference(prompt(6, 1), 3)[1]
    assert wrong not in reference(prompt(6), 3)
    spell = engine.tokenizer.token_bytes

    def token_bytes(token_id):
        if token_id == wrong:
            raise KeyError(token_id)
        return spell(token_id)

    engine.tokenizer.token_bytes = token_bytes
    engine.settle()
    assert isinstance(bad.end, EngineFailed) and good.ok


def test_a_lost_device_ends_the_loop_and_everything_waiting():
    """(case 53)"""
    engine = Engine(max_num_seqs=1)
    clients = [engine.offer(prompt(6, i), 10) for i in range(3)]

    def lost(batch):
        raise DeviceLost("fell off the bus")

    engine.runner.before_run = lost
    with pytest.raises(DeviceLost):
        engine.loop.run()
    engine.loop.end_all(lambda: EngineFailed("The engine has failed."))
    assert [type(c.end) for c in clients] == [EngineFailed] * 3
    with pytest.raises(EngineFailed):
        engine.offer(prompt(3), 1)


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


_request = st.tuples(
    st.integers(1, 40), st.integers(0, 30), st.integers(0, 3), st.integers(1, 3), st.sampled_from(["", "x"]),
    st.one_of(st.none(), st.integers(0, 25)), st.integers(0, 12),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(_request, min_size=1, max_size=14),
    num_blocks=st.integers(18, 40), swap_blocks=st.sampled_from([0, 6, 100]), max_num_seqs=st.integers(1, 6),
    prefills=st.integers(1, 3), chunk=st.sampled_from([1, 5, 16, 64]), eos_every=st.sampled_from([0, 12]),
)  # fmt: skip
def test_any_workload_gives_the_reference_and_leaks_nothing(
    requests, num_blocks, swap_blocks, max_num_seqs, prefills, chunk, eos_every
):
    """Shared prefixes, n, aborts at any step, preemption by swap and recompute. (case 45)"""
    runner = FakeRunner(num_blocks=num_blocks, block_size=4, max_seq_len=72, swap_blocks=swap_blocks, eos_every=eos_every)
    engine = Engine(
        runner, max_num_seqs=max_num_seqs, max_concurrent_prefills=prefills, prefill_chunk_tokens=chunk, queue_limit=10**6,
        queue_tokens=10**6, queue_timeout_s=1e9,
    )  # fmt: skip
    plan = sorted(enumerate(requests), key=lambda item: item[1][6])
    clients, turn = {}, 0
    while plan or turn < 60:
        while plan and plan[0][1][6] <= turn:
            i, (length, max_new, family, n, salt, _, _) = plan.pop(0)
            clients[i] = engine.offer(prompt(length, family), max_new, n=n, salt=salt, client=str(family))
        for i, (*_, leaves, arrives) in enumerate(requests):
            if leaves is not None and i in clients and turn == arrives + leaves and clients[i].end is None:
                engine.leave(clients[i])
        engine.turn()
        turn += 1
    engine.settle()
    for i, client in clients.items():
        length, max_new, family, n, *_ = requests[i]
        expected = reference(prompt(length, family), max_new, eos_every)
        for index in range(n):
            if client.gone:
                assert client.token_ids(index) == expected[: len(client.token_ids(index))]
            else:
                assert client.ok and client.token_ids(index) == expected
