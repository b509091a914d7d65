"""The nano-vllm package driven for real on a CPU: right tokens, whatever else runs, and none of its faults come through."""

from __future__ import annotations

import random
import socket

import pytest
import torch

from laya.errors import ConfigError, DependencyError, EngineFailed
from laya.model import nano_fit, nano_package
from laya.schema.generation import Finished

from . import tiny
from .driven import BLOCK_TOKENS, POOL, SLOTS, WINDOW, Driven, Referee, load, make_folder, prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def loaded(folder):
    made = load(folder)
    yield made
    made[0].close()


@pytest.fixture
def engine(loaded):
    """A fresh loop over the one engine that a process may have."""
    runner, tokenizer, _ = loaded
    runner.reset()
    yield Driven(runner, tokenizer)
    runner.reset()


@pytest.fixture(scope="module")
def referee():
    return Referee()


# -- what it computes --------------------------------------------------------------------------------------------------------


def test_greedy_answers_are_transformers_own_alone_and_in_a_batch(engine, referee):
    """The base of the rotary angles is the model's, which the package does not find with this version of transformers."""
    prompts = [prompt(n, i) for i, n in enumerate((1, 40, 255, 256, 257, 512, 700))]
    together = [engine.ask(ids) for ids in prompts]
    engine.settle()
    for ids, client in zip(prompts, together, strict=True):
        assert client.token_ids() == referee.greedy(ids, 6), len(ids)
        alone = engine.ask(ids)
        engine.settle()
        assert alone.token_ids() == client.token_ids() and alone.finish() == "length"
    assert engine.most > 1


def test_a_prefix_in_use_is_shared(engine, referee):
    first = engine.ask(prompt(600, 1), 30)
    engine.turn()
    second = engine.ask(prompt(600, 1) + [65] * 9)
    engine.settle()
    assert first.started.cached_tokens == 0 and second.started.cached_tokens == 2 * BLOCK_TOKENS
    assert second.end.cached_tokens == 2 * BLOCK_TOKENS
    assert first.token_ids() == referee.greedy(prompt(600, 1), 30)
    assert second.token_ids() == referee.greedy(prompt(600, 1) + [65] * 9, 6)


@pytest.mark.parametrize("length", [256, 512])
def test_a_prompt_that_is_cached_to_its_last_token_still_gets_its_own_answer(engine, referee, length):
    """The package computes nothing for it, and fails or gives a neighbour's token."""
    ids = prompt(length, 3)
    clients = [engine.ask(ids, 20)]
    engine.turn()
    clients += [engine.ask(ids, 4), engine.ask(prompt(30, 4), 4)]
    engine.settle()
    assert clients[0].token_ids() == referee.greedy(ids, 20) and clients[1].token_ids() == referee.greedy(ids, 4)
    assert clients[1].started.cached_tokens == length - BLOCK_TOKENS


def test_tenants_with_a_salt_share_nothing(engine):
    ids = prompt(600, 5)
    cached = {}
    engine.ask(ids, 60, salt="red")
    engine.turn()
    for salt in ("red", "blue", ""):
        cached[salt] = engine.ask(ids, 2, salt=salt)
        while cached[salt].end is None:
            engine.turn()
    engine.settle()
    assert [cached[salt].started.cached_tokens for salt in ("red", "blue", "")] == [512, 0, 0]


def test_choices_of_one_request_are_each_a_sequence(engine, referee):
    client = engine.ask(prompt(300, 6), 5, n=3)
    engine.settle()
    assert [client.token_ids(i) for i in range(3)] == [referee.greedy(prompt(300, 6), 5)] * 3
    assert client.end.completion_tokens == 15


def test_sampling_parameters_are_honoured_by_sequence_and_seeds_repeat(engine):
    """The fork ignores top_p and penalties unless a neighbour sets them; here each row has its own."""
    ids = prompt(50, 7)
    how = {"temperature": 1.0, "seed": 11, "top_p": 0.7, "repetition_penalty": 1.2}

    def sampled(**beside):
        mates = [engine.ask(prompt(20 + i, 8 + i), 12, **beside) for i in range(2)] if beside else []
        client = engine.ask(ids, 12, **how)
        engine.settle()
        assert all(mate.ok for mate in mates)
        return client.token_ids()

    alone = sampled()
    assert sampled(top_k=3) == alone == sampled(frequency_penalty=1.0)
    biased = engine.ask(ids, 4, logit_bias={77: 100.0})
    engine.settle()
    assert biased.token_ids() == [77] * 4


def test_figures_of_prompt_tokens_are_the_models_own(engine, referee):
    """Also where another request has the same prompt in the cache: figures need every position computed."""
    ids = prompt(600, 9)
    engine.ask(ids, 40)
    engine.turn()
    client = engine.ask(ids, 2, prompt_logprobs=2, logprobs=1)
    engine.settle()
    expected = tiny.logprobs(referee.model, ids)
    assert client.started.cached_tokens == 0 and client.started.prompt_logprobs[0] is None
    for position, shown in enumerate(client.started.prompt_logprobs[1:], 1):
        assert shown.token_id == ids[position]
        assert shown.logprob == pytest.approx(float(expected[position - 1, ids[position]]), abs=1e-4)
        assert shown.top[0][3] == pytest.approx(float(expected[position - 1].max()), abs=1e-4)
    assert client.deltas[0].logprobs[0].logprob == pytest.approx(float(expected[-1].max()), abs=1e-4)


def test_options_are_scored(engine, referee):
    ids = prompt(530, 10)
    options = ("yes", "no", "not now")
    client = engine.decide(ids, options)
    engine.settle()
    for option, total in zip(options, client.end.option_logprobs, strict=True):
        tokens = engine.tokenizer.encode(option)
        tokens += [257] if option == "no" else []  # the beginning of another needs its end
        expected = tiny.logprobs(referee.model, ids + tokens)
        assert total == pytest.approx(sum(float(expected[len(ids) - 1 + i, t]) for i, t in enumerate(tokens)), abs=1e-3)


# -- ends --------------------------------------------------------------------------------------------------------------------


def test_stops_lengths_and_end_tokens_are_the_loops_decision(engine, referee):
    ids = prompt(33, 11)
    plain = referee.greedy(ids, 12)
    by_id = engine.ask(ids, 12, stop_token_ids=(plain[4],))
    text = engine.ask(ids, 12)
    scored = engine.ask(ids, 0)
    engine.settle()
    assert by_id.finish() == "stop" and text.finish() == "length" and scored.finish() == "length"
    assert len(by_id.token_ids()) <= plain.index(plain[4]) + 1 and scored.end.completion_tokens == 0
    piece = text.text()[3:5]
    cut = engine.ask(ids, 12, stop=(piece,))
    engine.settle()
    assert cut.finish() == "stop" and piece not in cut.text() and text.text().startswith(cut.text())


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_moment_lose_no_block_and_touch_nobody_else(engine, referee, seed):
    draw = random.Random(seed)
    kept, gone = [], []
    for _ in range(60):
        if draw.random() < 0.3:
            ids = prompt(draw.choice((5, 100, 256, 300)), draw.randrange(6))
            (kept if draw.random() < 0.4 else gone).append((ids, engine.ask(ids, draw.randrange(2, 25))))
        for entry in [entry for entry in gone if draw.random() < 0.2]:
            gone.remove(entry)
            engine.leave(entry[1])
        engine.turn()
    for _, client in gone:
        engine.leave(client)
    engine.settle()  # nothing is held: no sequence, no block
    for ids, client in kept:
        assert client.token_ids() == referee.greedy(ids, len(client.token_ids())) and client.ok


# -- what the package never gets ----------------------------------------------------------------------------------------------


def test_never_more_sequences_than_slots_and_all_are_served(engine, referee):
    """Its own limit counts a step: sequences beyond it would starve."""
    prompts = [prompt(10 + i, i) for i in range(3 * SLOTS)]
    clients = [engine.ask(ids, 10) for ids in prompts]
    engine.settle()
    assert engine.most == SLOTS
    assert [c.token_ids() for c in clients] == [referee.greedy(ids, 10) for ids in prompts]


def test_it_is_not_stepped_when_idle(engine):
    for _ in range(3):
        assert engine.turn() is False
    engine.ask(prompt(5, 0), 2)
    engine.settle()


def test_blocks_that_run_out_preempt_the_youngest_and_its_answer_is_what_it_was(engine, referee):
    """The fork's own preemption leaves a sequence in two queues."""
    prompts = [prompt(500 + i, i) for i in range(3)]
    clients = [engine.ask(ids, 40) for ids in prompts]
    engine.settle()
    assert engine.loop.scheduler.preemptions > 0
    assert [c.token_ids() for c in clients] == [referee.greedy(ids, 40) for ids in prompts]
    assert all(c.end.cached_tokens == c.started.cached_tokens for c in clients)


def test_a_prompt_without_room_waits_outside_and_blocks_nobody(engine, referee):
    long, short = prompt(900, 1), prompt(20, 2)
    first = engine.ask(long, 80)
    second = engine.ask(prompt(1000, 3), 20)
    engine.turn()
    third = engine.ask(short, 5)
    engine.settle()
    assert first.token_ids() == referee.greedy(long, 80) and second.ok
    assert third.token_ids() == referee.greedy(short, 5)


def test_decodes_go_on_between_prompts(engine):
    running = engine.ask(prompt(10, 1), 60)
    engine.turn()
    for i in range(12):
        engine.ask(prompt(200, 2 + i), 2)
    while running.end is None:
        engine.turn()
    assert sum(engine.read) > 5 and not any(a and b for a, b in zip(engine.read[1:], engine.read[2:], strict=False))
    engine.settle()


@pytest.mark.parametrize(("sequences", "slots"), [(1, 1), (3, 4), (5, 8), (9, 16), (16, 16), (17, 32), (40, 48)])
def test_there_is_a_captured_graph_for_every_batch(sequences, slots):
    """The package captures 1, 2, 4, 8 and multiples of 16 up to its limit, and looks for the next one up."""
    assert nano_fit.graph_slots(sequences) == slots
    captured = [1, 2, 4, 8, *range(16, slots + 1, 16)]
    assert all(any(size >= batch for size in captured) for batch in range(1, sequences + 1))


# -- faults ------------------------------------------------------------------------------------------------------------------


def break_steps(engine: Driven, monkeypatch, which) -> list[int]:
    """Let the model runner raise in the steps that `which(sequences, reads prompts)` picks; returns their sizes."""
    runner = engine.runner._engine.model_runner
    run, broken = type(runner).run, []

    def failing(sequences, reads_prompts):
        if which(sequences, reads_prompts):
            broken.append(len(sequences))
            raise RuntimeError("planted")
        return run(runner, sequences, reads_prompts)

    monkeypatch.setattr(runner, "run", failing, raising=False)
    return broken


def test_a_step_that_fails_ends_its_sequences_and_no_other(engine, referee, monkeypatch):
    ids = prompt(600, 12)
    running = engine.ask(prompt(30, 1), 30)
    engine.turn()
    with monkeypatch.context() as patch:
        broken = break_steps(engine, patch, lambda sequences, reads: reads)
        hurt = engine.ask(ids, 5)
        while hurt.end is None:
            engine.turn()
    assert broken == [1] and isinstance(hurt.end, EngineFailed) and running.end is None
    again = engine.ask(ids, 20)
    engine.turn()
    engine.turn()
    same = engine.ask(ids, 5)
    engine.settle()
    assert running.token_ids() == referee.greedy(prompt(30, 1), 30)
    assert again.started.cached_tokens == 0, "blocks of a step that failed hold nothing"
    assert again.token_ids() == referee.greedy(ids, 20) and same.token_ids() == referee.greedy(ids, 5)


def test_blocks_of_a_failed_step_are_found_by_nobody_in_versions_that_keep_keys(engine, referee, monkeypatch):
    """Upstream leaves a block's key in its table until the block has another owner."""
    manager, ids = engine.theirs.block_manager, prompt(600, 13)
    deallocate = manager.deallocate

    def keeps_keys(sequence):
        keys = dict(manager.hash_to_block_id)
        known = {block: (manager.blocks[block].hash, manager.blocks[block].token_ids) for block in keys.values()}
        deallocate(sequence)
        manager.hash_to_block_id.update(keys)
        for block, (key, token_ids) in known.items():
            manager.blocks[block].update(key, token_ids)

    with monkeypatch.context() as patch:
        patch.setattr(manager, "deallocate", keeps_keys)
        broken = break_steps(engine, patch, lambda sequences, reads: not broken)
        hurt, again = engine.ask(ids, 5), engine.ask(ids, 5)
        engine.settle()
        assert isinstance(hurt.end, EngineFailed) and again.token_ids() == referee.greedy(ids, 5)
        assert again.started.cached_tokens == 0
        after = engine.ask(ids, 5)
        engine.settle()
        assert after.started.cached_tokens == 512 and after.token_ids() == referee.greedy(ids, 5)


def test_a_decode_that_fails_ends_what_was_in_it_and_the_engine_goes_on(engine, referee, monkeypatch):
    clients = [engine.ask(prompt(255, i), 20) for i in range(3)]
    for _ in range(6):
        engine.turn()
    with monkeypatch.context() as patch:
        broken = break_steps(engine, patch, lambda sequences, reads: not reads)
        while not broken:
            engine.turn()
    assert broken == [3] and all(isinstance(client.end, EngineFailed) for client in clients)
    assert engine.loop.scheduler.blocks.used == 0
    after = engine.ask(prompt(255, 0), 6)
    engine.settle()
    assert after.token_ids() == referee.greedy(prompt(255, 0), 6)


def test_a_schedule_that_fails_starts_over_with_an_empty_pool(engine, referee, monkeypatch):
    clients = [engine.ask(prompt(100, i), 20) for i in range(2)]
    while any(client.started is None for client in clients):
        engine.turn()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_pick", lambda: (_ for _ in ()).throw(AssertionError("planted")))
        engine.turn()
    assert all(isinstance(client.end, EngineFailed) for client in clients)
    after = engine.ask(prompt(100, 0), 6)
    engine.settle()
    assert after.token_ids() == referee.greedy(prompt(100, 0), 6)


def test_numbers_that_are_not_finite_end_one_sequence(engine, referee, monkeypatch):
    head = engine.runner._head
    clients = [engine.ask(prompt(20, i), 8) for i in range(3)]
    while any(client.started is None for client in clients):
        engine.turn()

    def spoiled(hidden):
        logits = head(hidden).clone()
        logits[1] = float("nan")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_head", spoiled)
        engine.turn()
    engine.settle()
    assert [isinstance(client.end, Finished) for client in clients] == [True, False, True]
    assert clients[0].token_ids() == referee.greedy(prompt(20, 0), 8) and "finite" in str(clients[1].end)


# -- the process around it ----------------------------------------------------------------------------------------------------


def test_the_process_keeps_its_defaults_and_opens_no_port(loaded):
    assert torch.get_default_dtype() is torch.float32 and torch.get_default_device() == torch.device("cpu")
    assert torch.distributed.get_world_size() == 1
    with socket.socket() as probe:  # what the package would meet itself on
        assert probe.connect_ex(("127.0.0.1", 2333)) != 0


def test_a_second_engine_is_refused(loaded, folder):
    with pytest.raises(ConfigError, match="one engine of nano-vllm"):
        load(folder)


def test_the_pool_is_what_was_planned(loaded):
    runner, _, card = loaded
    assert runner.num_blocks == POOL and runner.memory()["kv"] == 2 * 3 * POOL * BLOCK_TOKENS * 2 * 16 * 8
    assert runner.memory()["params"] >= card.details["parameters"] * 8
    assert card.max_model_len == WINDOW and card.details["engine"] == "nano-vllm" and card.details["dtype"] == "float64"


def test_keys_that_a_version_leaves_behind_are_swept_out(engine):
    manager = engine.theirs.block_manager
    manager.hash_to_block_id.update({-2 - i: i % POOL for i in range(40)})
    engine.ask(prompt(300, 1), 2)
    engine.settle()
    assert len(manager.hash_to_block_id) <= POOL


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nanovllm", None)
    with pytest.raises(DependencyError, match="nano-vllm cannot be imported"):
        nano_package.Package()
