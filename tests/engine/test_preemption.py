"""Blocks run out: swap, recompute, order of return; and random workloads against the reference."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .fake_runner import FakeRunner, reference
from .harness import Engine, prompt


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


def test_a_prompt_that_was_swapped_half_read_goes_on_in_chunks():
    """(case 46) Whether it reads or decodes is not told by what it has generated alone."""
    runner = FakeRunner(num_blocks=14, block_size=4, max_seq_len=56, swap_blocks=100)
    engine = Engine(runner, max_num_seqs=2, prefill_chunk_tokens=4)
    older = engine.offer(prompt(11), 30)
    engine.turn()
    younger = engine.offer(prompt(40, 1), 6)
    while not engine.loop.scheduler.paused:
        engine.turn()
    read = engine.loop.scheduler.paused[0].num_computed
    assert 0 < read < 35 and runner.swapped_tickets == 1
    engine.settle()
    rest = [count for batch in runner.batches for number, start, count in batch if number == 1 and read <= start < 40]
    assert runner.swaps_in == 1 and sum(rest) == 40 - read and len(rest) == -(-(40 - read) // 6), rest  # 6 tokens a step
    assert older.token_ids() == reference(prompt(11), 30) and younger.token_ids() == reference(prompt(40, 1), 6)


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


def test_prompt_logprobs_survive_preemption():
    runner = FakeRunner(num_blocks=12, max_seq_len=48)
    engine = Engine(runner, max_num_seqs=3, max_concurrent_prefills=3, prefill_chunk_tokens=5)
    clients = [engine.offer(prompt(14, i), 25, prompt_logprobs=0) for i in range(3)]
    engine.settle()
    assert engine.loop.scheduler.preemptions
    for i, client in enumerate(clients):
        assert client.token_ids() == reference(prompt(14, i), 25)
        assert [e.token_id for e in client.started.prompt_logprobs[1:]] == prompt(14, i)[1:]


def test_a_new_prompt_leaves_each_running_sequence_a_block_to_grow_into():
    engine = Engine(FakeRunner(num_blocks=10, max_seq_len=40), max_num_seqs=2)
    engine.offer(prompt(3), 20)
    engine.turn()
    assert engine.loop.scheduler.blocks.available == 9
    engine.offer(prompt(36, 1), 2)
    engine.turn()
    assert len(engine.loop.scheduler.running) == 1
    engine.settle()
    assert engine.loop.scheduler.preemptions == 0


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
