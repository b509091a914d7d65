"""A runner without a model: the next token is a hash of the whole prefix, and the KV pool is a dictionary.

It checks what a real one cannot see: that every position a step reads was written, into the block the table names, by the
same prefix. A scheduler that shares, evicts, swaps or hands out blocks wrongly fails here at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache

from laya.engine.sequence import Sequence
from laya.engine.step import Sampled, Scheduled

EOS = 0
VOCAB = 512


class KvError(BaseException):
    """The engine broke the runner's contract. Not an Exception, so that the loop's containment lets it through."""


@lru_cache(maxsize=200_000)
def extend(prefix_hash: int, token_id: int) -> int:
    return int.from_bytes(hashlib.blake2b(b"%d,%d" % (prefix_hash, token_id), digest_size=7).digest(), "big")


def next_token(prefix_hash: int, eos_every: int) -> int:
    """Mostly an ordinary token, EOS about once in `eos_every`; 0 for never."""
    if eos_every and prefix_hash % eos_every == 0:
        return EOS
    return 1 + (prefix_hash >> 8) % (VOCAB - 1)


def reference(prompt_ids: list[int], max_new_tokens: int, eos_every: int = 0) -> list[int]:
    """What an undisturbed run generates, EOS included."""
    prefix_hash = 0
    for token_id in prompt_ids:
        prefix_hash = extend(prefix_hash, token_id)
    out: list[int] = []
    while len(out) < max_new_tokens:
        token_id = next_token(prefix_hash, eos_every)
        out.append(token_id)
        if token_id == EOS:
            break
        prefix_hash = extend(prefix_hash, token_id)
    return out


class FakeRunner:
    vocab_size = VOCAB
    eos_token_ids = frozenset({EOS})

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, max_seq_len: int = 256, swap_blocks: int = 0, eos_every: int = 0,
        rows_are_exact: bool = True,
    ) -> None:  # fmt: skip
        self.num_blocks = num_blocks
        self.rows_are_exact = rows_are_exact
        self.block_size = block_size
        self.max_seq_len = max_seq_len
        self.eos_every = eos_every
        self.swap_blocks_free = swap_blocks
        self.before_run: Callable[[list[Scheduled]], None] = lambda batch: None
        self.sequence_error: Callable[[Sequence], Exception | None] = lambda sequence: None
        self.batches: list[list[tuple[int, int, int]]] = []  # (seq_id, start, count) of every step
        self.swaps_out = self.swaps_in = 0
        self.closed = False
        self._tickets: dict[int, list[dict]] = {}
        self._kv: dict[int, dict[int, tuple[int, int, int]]] = {}  # block -> offset -> (token, position, prefix hash)

    def run(self, batch: list[Scheduled]) -> list[Sampled]:
        if not batch:
            raise KvError("an empty step")
        self.batches.append([(work.sequence.seq_id, work.start, work.count) for work in batch])
        self.before_run(batch)
        written: dict[tuple[int, int], tuple[int, int, int]] = {}
        hashes = [self._write(work, written) for work in batch]
        return [self._outcome(work, prefix) for work, prefix in zip(batch, hashes, strict=True)]

    def _write(self, work: Scheduled, written: dict) -> list[int]:
        sequence, table = work.sequence, work.sequence.block_table
        if work.count < 1 or work.start + work.count > len(sequence.token_ids):
            raise KvError(f"scheduled [{work.start}, +{work.count}) of {len(sequence.token_ids)} tokens")
        if len(table) * self.block_size < work.start + work.count:
            raise KvError("the table is too short for the step")
        prefix, hashes = 0, []
        for position in range(work.start + work.count):
            prefix = extend(prefix, sequence.token_ids[position])
            hashes.append(prefix)
            block, offset = table[position // self.block_size], position % self.block_size
            entry = (sequence.token_ids[position], position, prefix)
            if position >= work.start:
                if written.setdefault((block, offset), entry) != entry:
                    raise KvError(f"two sequences write block {block}, offset {offset}, in one step")
                self._kv.setdefault(block, {})[offset] = entry
        return hashes

    def _outcome(self, work: Scheduled, hashes: list[int]) -> Sampled:
        sequence, table = work.sequence, work.sequence.block_table
        for position, prefix in enumerate(hashes):  # after all writes of the step: none may have hit this one
            block, offset = table[position // self.block_size], position % self.block_size
            found = self._kv.get(block, {}).get(offset)
            if found != (sequence.token_ids[position], position, prefix):
                raise KvError(f"sequence {sequence.seq_id} reads {found} at position {position}")
        error = self.sequence_error(sequence)
        if error is not None:
            return Sampled(error=error)
        asked = sequence.sampling.prompt_logprobs
        prompt_logprobs = None
        if asked is not None:
            span = range(max(work.start, 1), work.start + work.count)
            prompt_logprobs = [(self.logprob(hashes[p - 1], sequence.token_ids[p]), []) for p in span]
        if not work.samples:
            return Sampled(prompt_logprobs=prompt_logprobs)
        token_id = next_token(hashes[-1], self.eos_every)
        outcome = Sampled(token_id, prompt_logprobs=prompt_logprobs)
        if sequence.sampling.logprobs is not None:
            outcome.logprob = self.logprob(hashes[-1], token_id)
            outcome.top = [(token_id, outcome.logprob)][: sequence.sampling.logprobs]
        return outcome

    @staticmethod
    def logprob(prefix: int, token_id: int) -> float:
        return -(extend(prefix, token_id) % 1000) / 100

    def swap_out(self, blocks: list[int]) -> int | None:
        if len(blocks) > self.swap_blocks_free:
            return None
        self.swap_blocks_free -= len(blocks)
        self.swaps_out += 1
        self._tickets[self.swaps_out] = [dict(self._kv.get(block, {})) for block in blocks]
        return self.swaps_out

    def swap_in(self, ticket: int, blocks: list[int]) -> None:
        saved = self._tickets.pop(ticket)
        if len(saved) != len(blocks):
            raise KvError(f"{len(saved)} blocks were swapped out, {len(blocks)} come back")
        self.swap_blocks_free += len(saved)
        self.swaps_in += 1
        for block, kv in zip(blocks, saved, strict=True):
            self._kv[block] = dict(kv)

    def drop_swapped(self, ticket: int) -> None:
        self.swap_blocks_free += len(self._tickets.pop(ticket))

    @property
    def swapped_tickets(self) -> int:
        return len(self._tickets)

    def warm_up(self, max_num_seqs: int, chunk_tokens: int) -> None:
        pass

    def memory(self) -> dict[str, int]:
        return {"params": 0, "kv": self.num_blocks}

    def close(self) -> None:
        self.closed = True


class FakeTokenizer:
    """Token 0 is EOS, 1..256 are the bytes, the rest pieces of several bytes (some cut characters, some hold two)."""

    vocab_size = VOCAB
    bos_token_id: int | None = 256
    eos_token_ids = frozenset({EOS})
    has_chat_template = True

    def __init__(self) -> None:
        pool = "the and cat 你好 🚀é stop ABC DEF ".encode()
        pieces = [pool[i % len(pool) :][: 2 + i % 4] or b"x" for i in range(VOCAB - 257)]
        self._pieces = [b"", *(bytes([i]) for i in range(256)), *pieces]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def decode(self, ids: list[int]) -> str:
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", "replace")

    def render_chat(self, messages, tools, add_generation_prompt, **args) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + ("<assistant>" if add_generation_prompt else "")

    def encode_chat(self, messages, tools, add_generation_prompt, **args) -> list[int]:
        return self.encode(self.render_chat(messages, tools, add_generation_prompt, **args))
