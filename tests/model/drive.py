"""The runner driven by hand: sequences with block tables, prefill in pieces, greedy or seeded continuation."""

from __future__ import annotations

import random

from laya.engine.sequence import Sequence
from laya.engine.step import Sampled, Scheduled
from laya.model.runner import TorchRunner
from laya.schema.generation import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def sequence(ids: list[int], blocks: list[int], sampling: SamplingParams = GREEDY, seed: int = 0) -> Sequence:
    made = Sequence(0, ids, sampling, seed=seed)
    made.block_table = list(blocks)
    return made


def prompt_ids(length: int, seed: int = 1, vocab: int = 256) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(vocab) for i in range(length)]


def prefill(runner: TorchRunner, seq: Sequence, *, start: int = 0, chunks: list[int] | None = None) -> list[Sampled]:
    """Run the known tokens from `start` on, in chunks of these sizes (the rest in one); one result a chunk."""
    results = []
    for size in [*(chunks or []), len(seq.token_ids)]:
        count = min(size, len(seq.token_ids) - start)
        if count:
            results += runner.run([Scheduled(seq, start, count)])
            start += count
    return results


def extend(runner: TorchRunner, sequences: list[Sequence], steps: int) -> list[list[Sampled]]:
    """Decode all sequences together; appends the tokens and returns the results by sequence."""
    history: list[list[Sampled]] = [[] for _ in sequences]
    for _ in range(steps):
        for i, result in enumerate(runner.run([Scheduled(s, len(s) - 1, 1) for s in sequences])):
            assert result.error is None, result.error
            sequences[i].token_ids.append(result.token_id)
            history[i].append(result)
    return history


def continuation(runner: TorchRunner, seq: Sequence, steps: int, **how) -> list[int]:
    """Prefill, then decode: the ids of `steps` new tokens."""
    seq.token_ids.append(prefill(runner, seq, **how)[-1].token_id)
    extend(runner, [seq], steps - 1)
    return seq.token_ids[-steps:]
