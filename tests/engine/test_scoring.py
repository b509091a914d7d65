"""Options scored beside other work: right figures in slices, under preemption and aborts, and nothing left behind."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laya.engine.admission import Offer
from laya.engine.prepare import PromptLimits, prepare
from laya.errors import ContextLengthExceeded, LayaError, RateLimited
from laya.schema.generation import GenerationRequest, SamplingParams

from .fake_runner import FakeRunner, extend, reference
from .harness import Client, Engine, prompt


class TellingRunner(FakeRunner):
    """Answers what sequences ask of their positions, from the hash of what stands before."""

    def _outcome(self, work, hashes):
        outcome = super()._outcome(work, hashes)
        asked = work.sequence.asked or {}
        outcome.told = {
            (node, token): self.logprob(hashes[position], token)
            for position, (node, tokens) in asked.items() if work.start <= position < work.start + work.count
            for token in tokens
        }  # fmt: skip
        return outcome


def expected(engine: Engine, prompt_ids: list[int], options: tuple[str, ...]) -> list[float]:
    ids = [engine.tokenizer.encode(option) for option in options]
    totals = []
    for option in ids:
        beginning = any(other[: len(option)] == option and other != option for other in ids)
        before, total = 0, 0.0
        for token in prompt_ids:
            before = extend(before, token)
        for token in [*option, 0] if beginning or not option else option:
            total += FakeRunner.logprob(before, token)
            before = extend(before, token)
        totals.append(total)
    return totals


def decide(engine: Engine, prompt_ids: list[int], options: tuple[str, ...]) -> Client:
    request = GenerationRequest(
        id=f"d{len(engine.clients)}", prompt=prompt_ids, sampling=SamplingParams(temperature=0.0, max_tokens=0), options=options
    )  # fmt: skip
    limits = PromptLimits(window=engine.runner.max_seq_len, max_prompt_tokens=None, longest_token_bytes=8, vocab_size=1 << 20)
    prepared = prepare(request, engine.tokenizer, limits)
    client = Client()
    engine.admission.reserve(1)
    client.offer = Offer(prepared, client, engine.clock())
    engine.admission.offer(client.offer)
    engine.clients.append(client)
    return client


def check(engine: Engine, client: Client, prompt_ids: list[int], options: tuple[str, ...]) -> None:
    assert client.ok, client.end
    found = client.end.option_logprobs
    assert all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(found, expected(engine, prompt_ids, options), strict=True))
    assert client.end.completion_tokens == 0 and client.end.prompt_tokens == len(prompt_ids) and client.text() == ""


NAMES = ("Billing", "Bill", "Technical", "Sales", "", "Queue 1", "Queue 12", "Queue 2")


@pytest.mark.parametrize("size", [1, 4, 5, 8, 9])
def test_figures_are_those_of_each_option_alone(size):
    """(cases 46, 79) Whatever the prompt's length against the blocks, cold and from the prefix cache."""
    engine = Engine(TellingRunner(), max_num_seqs=3, prefill_chunk_tokens=8)
    for _ in range(2):
        client = decide(engine, prompt(size), NAMES)
        engine.settle()
        check(engine, client, prompt(size), NAMES)
    assert engine.clients[-1].end.cached_tokens == (size - 1) // 4 * 4


def test_more_runs_than_may_run_go_in_slices_beside_others():
    engine = Engine(TellingRunner(num_blocks=48), max_num_seqs=2, queue_limit=300, queue_tokens=10**6)
    options = tuple(f"{chr(97 + i % 26)}{i} x" for i in range(200))
    client = decide(engine, prompt(30), options)
    others = [engine.offer(prompt(6, 1 + i), 10, client=f"c{i}") for i in range(5)]
    engine.settle()
    check(engine, client, prompt(30), options)
    assert [other.token_ids() for other in others] == [reference(prompt(6, 1 + i), 10) for i in range(5)]
    assert len(client.offer.prepared.options.paths) > 100
    assert max(len(batch) for batch in engine.runner.batches) <= 2


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_mix_on_a_tight_pool_gives_right_figures_and_leaks_nothing(data):
    """(case 45)"""
    runner = TellingRunner(num_blocks=data.draw(st.integers(16, 24)), max_seq_len=64, swap_blocks=data.draw(st.sampled_from([0, 20])))
    engine = Engine(runner, max_num_seqs=4, queue_limit=1000, queue_tokens=10**6)
    names = st.lists(st.text("ab", max_size=6), min_size=2, max_size=9, unique=True).map(tuple)
    asked, written = [], []
    for number in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            prompt_ids, options = prompt(data.draw(st.integers(1, 40)), number % 2), data.draw(names)
            asked.append((decide(engine, prompt_ids, options), prompt_ids, options))
        else:
            prompt_ids, length = prompt(data.draw(st.integers(1, 12)), number % 2), data.draw(st.integers(1, 40))
            written.append((engine.offer(prompt_ids, length), prompt_ids, length))
        for _ in range(data.draw(st.integers(0, 3))):
            engine.turn()
    leaving = data.draw(st.sampled_from([None, *range(len(asked))]))
    if leaving is not None:
        engine.leave(asked.pop(leaving)[0])
    engine.settle()
    for client, prompt_ids, options in asked:
        check(engine, client, prompt_ids, options)
    for client, prompt_ids, length in written:
        assert client.token_ids() == reference(prompt_ids, length)


def test_a_run_that_fails_ends_its_request_alone():
    engine = Engine(TellingRunner(), max_num_seqs=4)
    engine.runner.sequence_error = lambda s: ValueError("nan") if s.asked and s.index == 2 else None
    failing, other = decide(engine, prompt(9), NAMES), engine.offer(prompt(5, 3), 6)
    engine.settle()
    assert isinstance(failing.end, LayaError) and other.ok


def test_a_runner_that_cannot_tell_is_an_error_and_not_an_invented_answer():
    engine = Engine(FakeRunner(), max_num_seqs=4)
    client = decide(engine, prompt(9), NAMES)
    engine.settle()
    assert isinstance(client.end, LayaError)


def test_what_does_not_fit_is_refused_before_it_is_queued():
    engine = Engine(TellingRunner(max_seq_len=32), queue_limit=4)
    with pytest.raises(ContextLengthExceeded):
        decide(engine, prompt(20), ("a", "b" * 12 + "c"))
    decide(engine, prompt(20), tuple(f"{chr(97 + i)}y" for i in range(20)))  # an empty queue takes whatever fits
    with pytest.raises(RateLimited):
        engine.offer(prompt(3), 1)
    engine.settle()
