"""The same seed gives the same text whatever else is in the batch, as models are served: in every form of weights, bit for bit.

A request runs alone in an engine of its own, then in a random crowd: other prompts with and without seeds, prompts that share
its beginning, chunks cut by the step's budget, cached prefixes, choices that share a prompt, a pool so small that it is
preempted and swapped or computed anew. The tokens must be the same, and their log-probabilities to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.harness import Client, Engine
from laya.model.load import load
from laya.model.tokenizer import build_tokenizer

from . import gguf_files, tiny
from .drive import prompt_ids
from .test_engine_equivalence import Pooled

# Weights, and whether the compiled step may be taken where it is there: torch's own operations must hold the promise too.
FORMS = ["bf16 llama", "bf16 qwen2", "bf16 gemma3", "f32 qwen3", "Q4_1 eager", "Q8_0 eager", "Q4_1", "smollm2 eager", "smollm2"]
NEW_TOKENS = 12
BASE = prompt_ids(220, seed=3)
LENGTHS = [1, 5, 16, 63, 64, 65, 100, 128, 150, 200]
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


class Served:
    """A loaded model, and what each seeded request gets from it alone."""

    def __init__(self, runner, tokenizer, new_tokens: int) -> None:
        self.runner, self.tokenizer, self.new_tokens = runner, tokenizer, new_tokens
        self._alone: dict[tuple, list] = {}

    def engine(self, *, blocks: int = 64, swap_blocks: int = 0, **bounds) -> Engine:
        pooled = Pooled(self.runner, blocks=blocks, swap_blocks=swap_blocks)
        pooled.max_seq_len = 512
        bounds = {"max_num_seqs": 6, "queue_limit": 1000, "queue_tokens": 10**6, "prefill_chunk_tokens": 512} | bounds
        return Engine(pooled, tokenizer=self.tokenizer, **bounds)

    def ask(self, engine: Engine, ids: list[int], seed: int | None, *, new: int | None = None, n: int = 1, temperature: float = 1.0) -> Client:
        sampling = {"temperature": temperature, "top_p": 0.95, "logprobs": 1, "n": n, "ignore_eos": True}
        return engine.offer(ids, new or self.new_tokens, seed=seed, **sampling)

    def alone(self, ids: list[int], seed: int, temperature: float = 1.0, new: int | None = None) -> list:
        key = (*ids, -seed, temperature, new)
        if key not in self._alone:
            engine = self.engine()
            client = self.ask(engine, ids, seed, new=new, temperature=temperature)
            engine.settle()
            self._alone[key] = told(client)
        return self._alone[key]


def told(client: Client, index: int = 0) -> list:
    """(token, its log-probability) of one choice: what a client can see of the numbers, to the last bit."""
    assert client.ok, client.end
    return [(entry.token_id, entry.logprob) for d in client.deltas if d.index == index for entry in d.logprobs or ()]


@pytest.fixture(scope="session")
def served(tmp_path_factory, smollm2_path) -> Callable[[str], Served]:
    made: dict[str, Served] = {}
    folder = tmp_path_factory.mktemp("seeded")
    tiny.byte_tokenizer().save(str(folder / "tokenizer.json"))

    def get(form: str) -> Served:
        if form not in made:
            kind, _, what = form.partition(" ")
            sizes = {"device": "cpu", "num_blocks": 64, "eager": what == "eager"}
            if kind == "smollm2":
                runner, tokenizer, _ = load(smollm2_path, **sizes)
            elif kind in ("bf16", "f32"):
                tiny.save(what, path := folder / form)
                runner, _, _ = load(str(path), dtype="bfloat16" if kind == "bf16" else "float32", **sizes)
                tokenizer = build_tokenizer({"directory": str(folder)})
            else:
                gguf_files.save_gguf(path := folder / f"{form}.gguf", gguf.GGMLQuantizationType[kind])
                runner, tokenizer, _ = load(str(path), **sizes)
            made[form] = Served(runner, tokenizer, NEW_TOKENS if kind != "smollm2" else 6)
        return made[form]

    return get


@pytest.fixture
def two_threads():
    """Products are divided among threads, and then some sums have another order."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
@settings(max_examples=10, **QUIET)
def test_the_same_seed_gives_the_same_text_in_any_company(form, served, data):
    model = served(form)
    draw = data.draw
    engine = model.engine(
        blocks=draw(st.sampled_from([18, 24, 64])), swap_blocks=draw(st.sampled_from([0, 8, 64])),
        prefill_chunk_tokens=draw(st.sampled_from([80, 130, 512])), max_concurrent_prefills=draw(st.integers(1, 3)),
    )  # fmt: skip
    seeded: list[tuple[Client, list[int], int, float]] = []
    for _ in range(draw(st.integers(2, 7))):
        ids = BASE[: draw(st.sampled_from(LENGTHS))] + draw(st.sampled_from([[], [9], [7, 8]]))
        seed, heat = draw(st.sampled_from([None, 1, 2])), draw(st.sampled_from([0.0, 1.0, 1.0]))
        client = model.ask(engine, ids, seed, temperature=heat)
        if seed is not None:
            seeded.append((client, ids, seed, heat))
        for _ in range(draw(st.sampled_from([0, 0, 1, 3, 20]))):
            engine.turn()
        if draw(st.integers(0, 5)) == 0:
            engine.leave(draw(st.sampled_from(engine.clients)))
    engine.settle()
    for client, ids, seed, heat in seeded:
        if not client.gone:
            assert told(client) == model.alone(ids, seed, heat)


@pytest.mark.parametrize("form", ["bf16 llama", "f32 qwen3", "Q4_1 eager", "Q8_0 eager"])
def test_a_full_batch_of_seeds_on_two_threads(form, served, two_threads):
    """Eight beside one another, begun one after the other, beside some without a seed; each equals its own run alone."""
    model = served(form)
    model._alone.clear()  # of the other number of threads
    engine = model.engine(max_num_seqs=10, blocks=200)
    crowd = []
    for i, length in enumerate((5, 64, 100, 150, 200, 33, 129, 17)):
        crowd.append((model.ask(engine, BASE[i : i + length], i), BASE[i : i + length], i))
        if i % 3 == 0:
            model.ask(engine, BASE[2 * i : 2 * i + 50], None)
        engine.turn()
    engine.settle()
    for client, ids, seed in crowd:
        assert told(client) == model.alone(ids, seed)


@pytest.mark.parametrize("form", ["bf16 llama", "Q4_1 eager", "Q4_1"])
def test_choices_of_a_seeded_request_are_the_requests_of_the_seeds_that_follow(form, served):
    model = served(form)
    engine = model.engine()
    client = model.ask(engine, BASE[:150], 40, n=3)
    engine.settle()
    assert [told(client, i) for i in range(3)] == [model.alone(BASE[:150], 40 + i) for i in range(3)]


@pytest.mark.parametrize("form", ["bf16 llama", "Q4_1 eager", "Q4_1"])
@pytest.mark.parametrize("swap_blocks", [0, 64])
def test_a_seeded_answer_that_is_preempted_goes_on_as_if_nothing_had_been(form, served, swap_blocks):
    """(case 45) Its own tokens are computed anew as they were: one by one, beside others."""
    model = served(form)
    engine = model.engine(blocks=10, swap_blocks=swap_blocks)
    clients = [(model.ask(engine, BASE[: 28 + i], i, new=50), i) for i in range(4)]
    engine.settle()
    assert engine.loop.scheduler.preemptions > 0 and (engine.runner.swaps_in > 0) == (swap_blocks > 0)
    for client, i in clients:
        assert told(client) == model.alone(BASE[: 28 + i], i, new=50)


def test_a_seeded_prompt_is_taken_from_the_cache_up_to_a_tile(served):
    """(case 46) And a block that was computed in other pieces is not taken for it."""
    model = served("bf16 llama")
    engine = model.engine()
    model.ask(engine, BASE[:200], None)
    engine.settle()
    first, again, other = (model.ask(engine, ids, 5) for ids in (BASE[:200], BASE[:200], BASE[:170]))
    engine.settle()
    assert [client.started.cached_tokens for client in (first, again, other)] == [0, 192, 128]
    assert told(first) == told(again) == model.alone(BASE[:200], 5)
    assert told(other) == model.alone(BASE[:170], 5)


LONG = prompt_ids(480, seed=8)


@pytest.mark.parametrize("form", ["f32 qwen3", "bf16 llama", "Q4_1 eager"])  # float32 shows it, bf16 rounds it away
def test_a_long_seeded_decode_is_padded_by_nobody(form, served):
    """Beyond `LONE_TOKENS` too, where a decode whose blocks lie side by side attends alone without being asked: those of the
    first ones do not, since the next one's begin where theirs would go on.
    """
    model = served(form)
    engine = model.engine(blocks=300)
    lengths = (382, 397, 411, 428, 444, 470)
    seeded = [(model.ask(engine, LONG[:n], n, new=24), n) for n in lengths]
    engine.settle()
    for client, n in seeded:
        assert told(client) == model.alone(LONG[:n], n, new=24)
