"""The nano-vllm driver in the engine loop, turned by hand, with the package's own books checked after each turn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from transformers import PreTrainedModel

from engine.harness import Client, Engine
from laya.engine.admission import Offer
from laya.engine.prepare import PromptLimits, prepare
from laya.model import nanovllm
from laya.model.nano_fit import BLOCK_TOKENS
from laya.schema.generation import GenerationRequest, SamplingParams

from . import nano_device, tiny

POOL = 8  # blocks of 256 tokens: four sequences with a prompt of one and an answer within the second
WINDOW = 1024
SLOTS = 4
_SIZES = {"max_position_embeddings": 2 * WINDOW}


def make_folder(folder: Path) -> Path:
    """A tiny random Qwen 3 that the package computes in float64; its answers are then transformers' own."""
    tiny.make("qwen3", **_SIZES).save_pretrained(folder)
    tiny.byte_tokenizer().save(str(folder / "tokenizer.json"))
    nano_device.write_config_dtype(folder, "float64")
    return folder


def load(folder: Path, **sizes):
    """(runner, tokenizer, card) with the host for a device."""
    nano_device.bring_to_host()
    sizes = {"num_blocks": POOL, "max_seq_len": WINDOW, "max_num_seqs": SLOTS, "enforce_eager": True} | sizes
    return nanovllm.load(str(folder), **sizes)


class Referee:
    """transformers, greedy; each answer is computed once."""

    def __init__(self) -> None:
        self.model: PreTrainedModel = tiny.make("qwen3", **_SIZES).double()
        self._known: dict[tuple, list[int]] = {}

    def greedy(self, ids: list[int], count: int) -> list[int]:
        key = (*ids, -count)
        if key not in self._known:
            prompt = torch.tensor([ids])
            with torch.inference_mode():
                out = self.model.generate(
                    prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                    eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
            self._known[key] = out[0, len(ids) :].tolist()
        return self._known[key]


class Driven(Engine):
    """Every turn: no sequence beyond the slots, no block lost, none double, and the package never preempts by itself."""

    def __init__(self, runner: nanovllm.NanoRunner, tokenizer, **bounds) -> None:
        bounds = {"max_num_seqs": SLOTS, "queue_limit": 1000, "queue_tokens": 10**6, "prefill_chunk_tokens": 512} | bounds
        runner.swapped_tickets = 0  # what the harness asks of runners that swap
        super().__init__(runner, tokenizer=tokenizer, **bounds)
        self.theirs = runner._engine.scheduler
        self.theirs.preempt = self._never
        self.read: list[bool] = []  # whether each step read prompts
        self.most = 0

    def _never(self, sequence) -> None:
        raise AssertionError("the package preempted by itself")

    def turn(self) -> bool:
        busy = super().turn()
        if busy and self.runner._rows is not None:
            self.read.append(any(row.end - row.start > 1 for row in self.runner._rows))
        return busy

    def check(self) -> None:
        scheduler, theirs = self.loop.scheduler, self.theirs
        held = [h.theirs for h in self.runner._held.values()]
        assert {id(s) for s in (*theirs.waiting, *theirs.running)} == {id(s) for s in held}
        assert len(theirs.running) + len(theirs.waiting) == len(held) == len(scheduler.running)
        self.most = max(self.most, len(held))
        assert scheduler.size <= self.loop.opening.allowed
        manager = theirs.block_manager
        refs = Counter(block for s in held for block in s.block_table)
        assert {b.block_id: b.ref_count for b in manager.blocks if b.ref_count} == dict(refs)
        assert sorted([*manager.free_block_ids, *manager.used_block_ids]) == list(range(len(manager.blocks)))
        assert self.admission.waiting >= 0 and self.admission.waiting_tokens >= 0
        for sequence in scheduler.running:
            assert self.runner._held[sequence.seq_id].theirs.token_ids == sequence.token_ids

    def ask(self, ids: list[int], count: int = 6, *, salt: str = "", **sampling) -> Client:
        """As `offer`, at any temperature, and to the length asked for."""
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": count} | sampling)
        return self._enter(GenerationRequest(id="a", prompt=ids, salt=salt, sampling=params))

    def decide(self, ids: list[int], options: tuple[str, ...]) -> Client:
        """Score the options behind the prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=0)
        return self._enter(GenerationRequest(id="d", prompt=ids, sampling=params, options=options))

    def _enter(self, request: GenerationRequest) -> Client:
        limits = PromptLimits(window=WINDOW, max_prompt_tokens=None, longest_token_bytes=8, vocab_size=1 << 20)
        client = Client()
        self.admission.reserve(request.sampling.n)
        client.offer = Offer(prepare(request, self.tokenizer, limits), client, self.clock())
        self.admission.offer(client.offer)
        self.clients.append(client)
        return client


def prompt(length: int, seed: int) -> list[int]:
    """Printable bytes; prompts of different seeds share no block."""
    return [32 + (seed * 7919 + i * 31 + i * i * seed) % 90 for i in range(length)]


__all__ = ["BLOCK_TOKENS", "Driven", "POOL", "Referee", "SLOTS", "WINDOW", "load", "make_folder", "prompt"]
