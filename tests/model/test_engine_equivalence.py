"""The whole engine over real models: whatever else runs, waits, is cached, preempted or swapped, a request gets its own tokens.

float32 makes it exact: sums in another order differ by 1e-6, which decides no choice between tokens here.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.harness import Client, Engine
from laya.model.formats import open_checkpoint
from laya.model.kv_cache import KVCache
from laya.model.load import load
from laya.model.runner import TorchRunner
from laya.model.tokenizer import build_tokenizer

from .drive import prompt_ids

KINDS = ["llama", "mistral", "qwen2", "qwen3", "gemma3"]
ROOMY = 64  # blocks of 16 tokens
TEXTS = ["The capital of France is", "Once upon a time there was a fox who", "def add(a, b):\n    return"]
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


class Pooled(TorchRunner):
    """A loaded model over a pool of its own size, with a second pool of the CPU that stands for the host's."""

    def __init__(self, whole: TorchRunner, *, blocks: int, swap_blocks: int = 0) -> None:
        spec, pool = whole.decoder.spec, whole.cache.pool
        block_bytes = pool[:, 0].numel() * pool.element_size()
        cache = KVCache(
            layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim, num_blocks=blocks, block_size=16,
            dtype=pool.dtype, device=pool.device, swap_bytes=swap_blocks * block_bytes,
        )  # fmt: skip
        super().__init__(whole.decoder, cache, max_seq_len=min(whole.max_seq_len, blocks * 16), eos_token_ids=whole.eos_token_ids)
        self.swaps_in = 0
        self._live: set[int] = set()

    @property
    def swapped_tickets(self) -> int:
        return len(self._live)

    def swap_out(self, blocks):
        ticket = super().swap_out(blocks)
        if ticket is not None:
            self._live.add(id(ticket))
        return ticket

    def swap_in(self, ticket, blocks) -> None:
        super().swap_in(ticket, blocks)
        self._live.discard(id(ticket))
        self.swaps_in += 1

    def drop_swapped(self, ticket) -> None:
        super().drop_swapped(ticket)
        self._live.discard(id(ticket))


class Model:
    """Prompts of a model, and what each gets alone in an engine that nothing disturbs."""

    def __init__(self, runner: TorchRunner, tokenizer, prompts: list[list[int]], new_tokens: int) -> None:
        self.runner, self.tokenizer, self.prompts, self.new_tokens = runner, tokenizer, prompts, new_tokens
        self._alone: dict[tuple, list[int]] = {}

    def engine(self, *, blocks: int = ROOMY, swap_blocks: int = 0, **bounds) -> Engine:
        pooled = Pooled(self.runner, blocks=blocks, swap_blocks=swap_blocks)
        bounds = {"max_num_seqs": 8, "queue_limit": 1000, "queue_tokens": 10**6, "prefill_chunk_tokens": 512} | bounds
        return Engine(pooled, tokenizer=self.tokenizer, **bounds)

    def ask(self, engine: Engine, prompt: list[int], new_tokens: int | None = None) -> Client:
        return engine.offer(prompt, new_tokens or self.new_tokens, ignore_eos=True)

    def alone(self, prompt: list[int], new_tokens: int | None = None) -> list[int]:
        new_tokens = new_tokens or self.new_tokens
        key = (*prompt, -new_tokens)
        if key not in self._alone:
            engine = self.engine(max_num_seqs=1)
            client = self.ask(engine, prompt, new_tokens)
            engine.settle()
            self._alone[key] = client.token_ids()
        return self._alone[key]

    def check(self, clients: list[Client]) -> None:
        for client in clients:
            prepared = client.offer.prepared
            ids = client.token_ids()
            assert client.ok and ids == self.alone(prepared.prompt_ids, prepared.max_new_tokens)
            assert client.text() == self.tokenizer.decode(ids)  # the pieces of a stream are the whole text


@pytest.fixture(scope="session")
def models(tiny_models, tmp_path_factory, smollm2_path) -> Callable[[str], Model]:
    made: dict[str, Model] = {}
    from .tiny import byte_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(folder / "tokenizer.json"))

    def get(kind: str) -> Model:
        if kind not in made and kind == "smollm2":
            runner, tokenizer, _ = load(smollm2_path, device="cpu", dtype="float32", num_blocks=4, max_seq_len=64)
            runner.max_seq_len = ROOMY * 16
            made[kind] = Model(runner, tokenizer, [tokenizer.encode(text) for text in TEXTS], 28)
        elif kind not in made:
            tokenizer = build_tokenizer({"directory": str(folder)})
            prompts = [prompt_ids(length, seed=i) for i, length in enumerate((5, 16, 17, 33, 48, 70))]
            made[kind] = Model(tiny_models(kind)[0], tokenizer, prompts, 40)
        return made[kind]

    return get


@pytest.fixture(params=[*KINDS, "smollm2"])
def model(request, models) -> Model:
    return models(request.param)


def test_smollm2_is_the_real_one(smollm2_path):
    assert open_checkpoint(smollm2_path).spec.layers == 30


def test_batched_is_alone(model):
    engine = model.engine()
    clients = [model.ask(engine, prompt) for prompt in model.prompts]
    engine.settle()
    model.check(clients)


def test_chunked_is_whole(model):
    engine = model.engine(prefill_chunk_tokens=16, max_concurrent_prefills=3)
    clients = [model.ask(engine, prompt + model.prompts[0] * 3, 12) for prompt in model.prompts]
    engine.settle()
    model.check(clients)


def test_prefix_cached_is_cold(model):
    """(case 46) Prompts that share a long beginning, ending at a block's border, before it and after it; and the same once more."""
    engine = model.engine()
    shared = [token for prompt in model.prompts * 3 for token in prompt][:32]
    clients = []
    for prompt in [shared, shared[:31], [*shared, 7], [*shared, 7, 8], shared]:
        clients.append(model.ask(engine, prompt, 12))
        engine.settle()
    model.check(clients)
    assert [client.started.cached_tokens for client in clients] == [0, 16, 32, 32, 16]


@pytest.mark.parametrize("swap_blocks", [0, 64])
def test_preempted_and_swapped_are_undisturbed(model, swap_blocks):
    """(case 45) A pool too small for all: some lose their blocks, to the second pool or to be computed again."""
    longest = max(len(prompt) for prompt in model.prompts) + model.new_tokens
    engine = model.engine(blocks=-(-longest // 16) + 1, swap_blocks=swap_blocks)
    clients = [model.ask(engine, prompt) for prompt in model.prompts + model.prompts[:3]]
    engine.settle()
    model.check(clients)
    assert engine.loop.scheduler.preemptions > 0
    assert (engine.runner.swaps_in > 0) == (swap_blocks > 0)


def test_choices_that_share_a_prompt_are_each_alone(model):
    engine = model.engine()
    prompt = model.prompts[-1]
    client = engine.offer(prompt, model.new_tokens, n=3, ignore_eos=True)
    engine.settle()
    assert [client.token_ids(i) for i in range(3)] == [model.alone(prompt)] * 3


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@given(data=st.data())
@settings(max_examples=12, **QUIET)
def test_random_workloads_are_undisturbed(kind, models, data):
    """Arrivals, departures, chunk sizes, pool and swap space drawn at random; invariants are checked after each step."""
    model = models(kind)
    engine = model.engine(
        blocks=data.draw(st.integers(9, 24)), swap_blocks=data.draw(st.sampled_from([0, 6, 64])),
        max_num_seqs=data.draw(st.integers(1, 6)), prefill_chunk_tokens=data.draw(st.sampled_from([16, 40, 512])),
        max_concurrent_prefills=data.draw(st.integers(1, 3)),
    )  # fmt: skip
    engine.loop.opening.allowed = engine.settings.max_num_seqs
    clients = []
    for _ in range(data.draw(st.integers(2, 7))):
        prompt = data.draw(st.sampled_from(model.prompts))[: data.draw(st.sampled_from([3, 16, 32, 99]))]
        clients.append(model.ask(engine, prompt, data.draw(st.sampled_from([1, 20, 40]))))
        for _ in range(data.draw(st.integers(0, 12))):
            engine.turn()
        if data.draw(st.integers(0, 4)) == 0:
            engine.leave(data.draw(st.sampled_from(clients)))
    engine.settle()
    model.check([client for client in clients if not client.gone])
