"""Every way to sample at once: a seeded request gets its own answer to the last bit, whoever runs beside it.

`test_seeded.py` holds it for each form of weights; here it is every setting of a request together, over a pool so small that
most are preempted, by the compiled step where it is built, else by torch's operations.
"""

from __future__ import annotations

import random

import pytest

from engine.harness import Client, Engine
from laya.engine.grammar import GrammarCompiler

from .drive import prompt_ids
from .test_engine_equivalence import Pooled

BASE = prompt_ids(130, seed=5)
KINDS = 150  # requests that differ; each is run alone once
ROUNDS = 25


class Crowd:
    """Random requests by number, and what each gets alone."""

    def __init__(self, runner, tokenizer) -> None:
        self._runner, self._tokenizer = runner, tokenizer
        self._grammar = GrammarCompiler(tokenizer, frozenset({257})).compile("regex", "[a-z]{3,30}x")
        self._alone: dict[int, list] = {}

    def engine(self, **bounds) -> Engine:
        pooled = Pooled(self._runner, blocks=bounds.pop("blocks", 64), swap_blocks=bounds.pop("swap_blocks", 0))
        bounds = {"max_num_seqs": 6, "queue_limit": 1000, "queue_tokens": 10**6} | bounds
        return Engine(pooled, tokenizer=self._tokenizer, **bounds)

    def ask(self, engine: Engine, number: int) -> Client:
        chance = random.Random(number)
        length = chance.choice([1, 2, 15, 16, 17, 31, 33, 64, 90, 120])
        ids = BASE[:length] + [chance.randrange(256) for _ in range(chance.choice([0, 0, 1, 3]))]
        sampling = {
            "temperature": chance.choice([0.0, 1.0, 0.5]), "seed": number, "logprobs": chance.choice([None, 0, 3]),
            "n": chance.choice([1, 1, 2, 3]), "ignore_eos": chance.random() < 0.5,
        }  # fmt: skip
        for some in (
            {"top_k": chance.choice([1, 5, 1000]), "top_p": 0.7}, {"min_p": 0.1}, {"repetition_penalty": chance.choice([0.5, 1.5])},
            {"presence_penalty": 1.0, "frequency_penalty": -0.5}, {"logit_bias": {chance.randrange(256): chance.choice([-100.0, 100.0])}},
            {"min_tokens": chance.choice([3, 50]), "stop_token_ids": tuple(chance.sample(range(256), 20))},
            {"stop": ("a", "\n", "the")}, {"prompt_logprobs": chance.choice([0, 2])}, {"grammar": self._grammar},
        ):  # fmt: skip
            if chance.random() < 0.2:
                sampling |= some
        return engine.offer(ids, chance.choice([1, 40, 70]), client=str(number % 3), salt=chance.choice(["", "t"]), **sampling)

    def alone(self, number: int) -> list:
        if number not in self._alone:
            engine = self.engine()
            client = self.ask(engine, number)
            engine.settle()
            self._alone[number] = told(client)
        return self._alone[number]


def told(client: Client) -> list:
    """All that a client hears, but for the cuts between pieces of text."""
    assert client.ok, client.end
    choices = range(client.offer.prepared.choices)
    entries = [[entry for d in client.deltas if d.index == i for entry in d.logprobs] for i in choices]
    return [
        [(client.text(i), client.token_ids(i), client.finish(i)) for i in choices], entries, client.started.prompt_logprobs,
        client.end.completion_tokens,
    ]  # fmt: skip


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_every_setting_together_gives_the_same_answer_in_any_company(architecture, tiny_gguf, tokenizer_of_bytes):
    crowd, chance = Crowd(tiny_gguf("Q4_1", "quantized", architecture)[0], tokenizer_of_bytes), random.Random(11)
    preempted = 0
    for _ in range(ROUNDS):
        engine = crowd.engine(
            blocks=13, swap_blocks=chance.choice([0, 5, 64]),
            prefill_chunk_tokens=chance.choice([16, 33, 80]), max_concurrent_prefills=chance.choice([1, 2, 3]),
        )  # fmt: skip
        asked = []
        for _ in range(chance.randrange(4, 10)):
            number = chance.randrange(KINDS)
            asked.append((crowd.ask(engine, number), number))
            for _ in range(chance.choice([0, 0, 1, 3])):
                engine.turn()
            if chance.random() < 0.2:
                engine.leave(chance.choice(engine.clients))
        engine.settle()
        preempted += engine.loop.scheduler.preemptions
        for client, number in asked:
            assert client.gone or told(client) == crowd.alone(number), number
    assert preempted > ROUNDS


@pytest.fixture(scope="module")
def tokenizer_of_bytes(tmp_path_factory):
    from laya.model.tokenizer import build_tokenizer

    from . import tiny

    folder = tmp_path_factory.mktemp("bytes")
    tiny.byte_tokenizer().save(str(folder / "tokenizer.json"))
    return build_tokenizer({"directory": str(folder)})
