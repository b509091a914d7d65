"""The model on its device behind the engine's `Runner` interface: a batch of `Scheduled` in, one `Sampled` each out.

In: decisions of the scheduler (what to run, in which blocks). Out: tokens and log-probabilities. Engine thread only; it keeps
no state between steps but weights and the KV pool, so a sequence may be preempted, swapped or dropped at any step.
"""

from __future__ import annotations

import torch

from laya.engine.sequence import Sequence
from laya.engine.step import Sampled, Scheduled
from laya.errors import EngineFailed
from laya.model.batch_plan import BatchPlan, BatchPlanner, scores_prompt
from laya.model.device_faults import contained
from laya.model.forward import forward_of
from laya.model.kv_cache import KVCache, SwapTicket
from laya.model.layers import Decoder, Layer
from laya.model.sampler import sample, score, tell
from laya.schema.generation import SamplingParams

SCORED_ROWS = 64  # prompt rows whose logits exist at once: 64 x 152,000 x 4 bytes are 39 MB, a whole chunk's would be 300


class TorchRunner:
    """Implements `laya.engine.step.Runner` with torch."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, max_seq_len: int, eos_token_ids: frozenset[int], eager: bool = False
    ) -> None:
        """`eager`: torch's own operations also where the compiled step would fit."""
        self.decoder = decoder
        self.cache = cache
        self.block_size = cache.block_size
        self.num_blocks = cache.num_blocks
        self.vocab_size = decoder.spec.vocab
        self.max_seq_len = max_seq_len
        self.eos_token_ids = eos_token_ids
        self._planner = BatchPlanner(cache.block_size, cache.scratch_block)
        self.forward = forward_of(decoder, cache, eager)
        self.rows_are_exact = self.forward.rows_are_exact
        self._place = cache.pool.device
        self._sizes = {"params": decoder.nbytes, "kv": cache.nbytes, "swap": cache.host.nbytes}

    @contained
    @torch.inference_mode()
    def run(self, batch: list[Scheduled]) -> list[Sampled]:
        """One step. A sequence whose numbers are not finite gets an error and leaves nothing in its blocks; others go on."""
        if not batch:
            return []
        plan = self._planner.plan(batch)
        hidden = self.forward.run(plan)
        last = hidden if len(hidden) == len(plan.items) else hidden[plan.last_rows]
        broken = self._erase_broken(last, plan)
        results = self._sample(last, plan, broken)
        for i, item in enumerate(plan.items):
            if i not in broken and scores_prompt(item):
                results[i].prompt_logprobs = self._score_prompt(hidden, plan, i)
            if i not in broken and item.sequence.asked:
                results[i].told = self._tell(hidden, plan, i)
        ordered: list[Sampled] = [results[0]] * len(results)
        for i, place in enumerate(plan.order):
            ordered[place] = results[i]
        return ordered

    def _erase_broken(self, last: torch.Tensor, plan: BatchPlan) -> frozenset[int]:
        """Items whose last row is not finite. Their rows of this step are zeroed: a block's next owner gathers whole blocks."""
        # A sum is finite only if all its numbers are (float32 has room for any real hidden state's sum).
        sound = torch.isfinite(last.sum(dim=-1)).tolist()
        broken = frozenset(i for i, ok in enumerate(sound) if not ok)
        for i in broken:
            self.cache.erase(plan.slots[plan.first_rows[i] : plan.last_rows[i] + 1])
        return broken

    def _sample(self, last: torch.Tensor, plan: BatchPlan, broken: frozenset[int]) -> list[Sampled]:
        """One result an item in row order; only rows that are sampled go through the head."""
        results = [Sampled() for _ in plan.items]
        for i in broken:
            results[i].error = EngineFailed("the model computed numbers that are not finite for this request")
        rows = [i for i, item in enumerate(plan.items) if item.samples and i not in broken]
        if rows:
            sequences = [plan.items[i].sequence for i in rows]
            seeded = any(sequence.sampling.seed is not None for sequence in sequences)
            logits = self.forward.logits(last if len(rows) == len(last) else last[rows], seeded)
            sampled = sample(logits, sequences, self.eos_token_ids)
            for i, result in zip(rows, sampled, strict=True):
                results[i] = result
        return results

    def _score_prompt(
        self, hidden: torch.Tensor, plan: BatchPlan, i: int
    ) -> list[tuple[float, list[tuple[int, float]]]]:  # fmt: skip
        """Entry j belongs to the j-th token of [max(start, 1), start + count) that is a prompt token."""
        item = plan.items[i]
        sequence = item.sequence
        first = max(item.start, 1)
        end = min(item.start + item.count, sequence.num_prompt_tokens)
        # Row r computed position item.start - extra + r, whose logits speak of the next position.
        row = plan.first_rows[i] + first - 1 - (item.start - plan.extra[i])
        entries: list[tuple[float, list[tuple[int, float]]]] = []
        for begin in range(first, end, SCORED_ROWS):
            targets = sequence.token_ids[begin : min(begin + SCORED_ROWS, end)]
            at = row + begin - first
            logits = self.forward.logits(hidden[at : at + len(targets)])
            entries += score(logits, targets, sequence.sampling.prompt_logprobs)
        return entries

    def _tell(self, hidden: torch.Tensor, plan: BatchPlan, i: int) -> dict[tuple[int, int], float]:
        """Log-probabilities of the next tokens asked for at positions of this run."""
        item = plan.items[i]
        asked = item.sequence.asked
        positions = [position for position in range(item.start, item.start + item.count) if position in asked]
        told: dict[tuple[int, int], float] = {}
        first = plan.first_rows[i] + plan.extra[i] - item.start
        for begin in range(0, len(positions), SCORED_ROWS):
            some = positions[begin : begin + SCORED_ROWS]
            logits = self.forward.logits(hidden[[first + position for position in some]])
            told |= tell(logits, [asked[position] for position in some])
        return told

    @torch.inference_mode()
    def swap_out(self, blocks: list[int]) -> SwapTicket | None:
        return self.cache.swap_out(blocks)

    @torch.inference_mode()
    def swap_in(self, ticket: SwapTicket, blocks: list[int]) -> None:
        self.cache.swap_in(ticket, blocks)

    def drop_swapped(self, ticket: SwapTicket) -> None:
        self.cache.drop(ticket)

    @torch.inference_mode()
    def warm_up(self, max_num_seqs: int, chunk_tokens: int) -> None:
        """The largest prefill chunk and a full decode batch at the longest context the pool holds; the pool is zero after it.

        Temporaries live for one layer, so the long contexts go through one layer of each kind (else a window of 8192 tokens
        takes a quarter of a minute on one core), and a short sequence through all. Call before any sequence has KV: blocks
        are used without asking for them.
        """
        reach = max(1, min(self.max_seq_len, self.num_blocks * self.block_size))
        chunk = min(chunk_tokens, reach)
        whole = self.decoder.layers
        self.decoder.layers = whole[: _first_of_each_kind(whole)]
        try:
            self.run([Scheduled(self._dummy(reach), reach - chunk, chunk)])
            self.run([Scheduled(self._dummy(reach), reach - 1, 1) for _ in range(max_num_seqs)])
        finally:
            self.decoder.layers = whole
        short = min(chunk, self.block_size)
        self.run([Scheduled(self._dummy(short), 0, short)])
        self.cache.pool.zero_()

    def _dummy(self, length: int) -> Sequence:
        """A sequence of zeros whose table takes the pool's blocks in turn."""
        sequence = Sequence(-1, [0] * length, SamplingParams(temperature=1.0, top_p=0.9))
        sequence.block_table = [i % self.num_blocks for i in range(-(-length // self.block_size))]
        return sequence

    def memory(self) -> dict[str, int]:
        """Bytes: params, kv (pool), swap (host pool), and what the device says. Any thread, also after `close`: metrics ask."""
        return self._sizes | device_memory(self._place)

    def close(self) -> None:
        """Free the weights and the pool. Nothing can be run after it."""
        del self.decoder, self.cache, self.forward
        if self._place.type == "cuda":
            torch.cuda.empty_cache()


def device_memory(place: torch.device) -> dict[str, int]:
    """device_allocated and device_peak in bytes on CUDA, nothing elsewhere."""
    if place.type != "cuda":
        return {}
    return {
        "device_allocated": torch.cuda.memory_allocated(place), "device_peak": torch.cuda.max_memory_allocated(place)
    }  # fmt: skip


def _first_of_each_kind(layers: list[Layer]) -> int:
    """How many layers from the start hold one of every kind."""
    firsts = {layer.kind: number for number, layer in reversed(list(enumerate(layers)))}
    return max(firsts.values()) + 1
