"""Clients that leave, requests that fail, steps that fail, a device that is lost: everything else goes on."""

from __future__ import annotations

import pytest

from laya.engine.step import DeviceLost
from laya.errors import EngineFailed, Unavailable

from .fake_runner import FakeRunner, reference
from .harness import Engine, prompt


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


def test_the_choices_that_wait_end_with_their_failed_request():
    engine = Engine(max_num_seqs=2)
    client = engine.offer(prompt(6), 10, n=9)
    engine.runner.sequence_error = lambda sequence: ValueError("nan") if sequence.num_generated == 4 else None
    engine.settle()
    assert isinstance(client.end, EngineFailed)
    assert {seq_id for batch in engine.runner.batches for seq_id, _, _ in batch} == {0, 1}


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
