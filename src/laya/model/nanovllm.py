"""The nano-vllm package behind the engine's runner interface: its scheduler picks, its model runs, our sampler chooses.

In: sequences handed over and taken back by `engine.driven`. Out: one `Sampled` for each that a step ran. Engine thread only.

The package never ends a sequence by itself: stop strings, lengths, aborts and errors are all `drop`. Its sampler is replaced by
Laya's, so every sampling parameter, grammar and log-probability works as with the torch engine; log-probabilities of prompt
tokens and of options are computed from the hidden states that pass on their way to the head.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

from laya.engine.sequence import Sequence
from laya.engine.step import Sampled, Scheduled
from laya.model.describe import has_chat_template
from laya.model.device_faults import contained
from laya.model.formats import open_checkpoint
from laya.model.load import default_id, usable_window
from laya.model.nano_fit import BLOCK_TOKENS
from laya.model.nano_package import Package, PrefixKeys
from laya.model.runner import SCORED_ROWS, device_memory
from laya.model.sampler import sample, score, tell
from laya.model.tokenizer import ModelTokenizer, build_tokenizer
from laya.schema.generation import ModelCard, SamplingParams

log = logging.getLogger("laya.model")

# Keys of ended prefixes that an older version leaves in its table, for each block of the pool, before they are swept out.
_STALE_KEYS = 4


def load(
    path: str, *, dtype: str | None = None, max_seq_len: int | None = None, num_blocks: int, max_num_seqs: int = 1,
    enforce_eager: bool = False, model_id: str | None = None, progress: Callable[[int, int], None] | None = None,
    tokenizer: ModelTokenizer | None = None,
) -> tuple[NanoRunner, ModelTokenizer, ModelCard]:  # fmt: skip
    """Blocks are of 256 tokens; `dtype` auto (None) is what the folder says. The caller knows that the model is one for the
    package (`nano_fit`). Raises DependencyError without it, ConfigError for a second engine of it.
    """
    began = time.monotonic()
    package = Package()
    checkpoint = open_checkpoint(path)
    tokenizer = tokenizer or build_tokenizer(checkpoint.tokenizer)
    window = usable_window(checkpoint, max_seq_len, num_blocks * BLOCK_TOKENS)
    spec = checkpoint.spec
    engine = package.open(
        path, spec, window=window, num_blocks=num_blocks, max_num_seqs=max_num_seqs, enforce_eager=enforce_eager,
        dtype=torch.bfloat16 if dtype == "bfloat16" else None,
    )  # fmt: skip
    runner = NanoRunner(package, engine, vocab_size=spec.vocab, max_seq_len=window, eos_token_ids=tokenizer.eos_token_ids)
    if progress is not None:
        progress(spec.layers, spec.layers)  # it reads a model in one call
    log.info("loaded %s into nano-vllm in %.1f s", path, time.monotonic() - began)
    details = {
        "architecture": spec.architecture, "quantization": checkpoint.quantization, "dtype": runner.dtype,
        "device": runner.device,
        "parameters": sum(t.rows * t.columns for t in checkpoint.tensors.values()), "engine": "nano-vllm",
        "max_num_seqs": max_num_seqs, "chat_style": msgspec.to_builtins(tokenizer.chat_style),
    }  # fmt: skip
    card = ModelCard(
        id=model_id or default_id(path), max_model_len=window, chat=has_chat_template(checkpoint),
        created=int(os.stat(path).st_mtime), details=details,
    )  # fmt: skip
    return runner, tokenizer, card


class _Held:
    """A sequence in the package's hands. `shareable`: how many of its first blocks may come from the prefix cache."""

    __slots__ = ("own", "theirs", "salt", "shareable")

    def __init__(self, own: Sequence, theirs: Any) -> None:
        self.own, self.theirs = own, theirs
        self.salt = own.request.request.salt.encode() if own.request is not None else b""
        reusable = len(own)
        if own.asked is not None:  # figures are wanted from the prompt's last token on
            reusable = min(own.asked) + 1
        self.shareable = 0 if own.sampling.prompt_logprobs is not None else (reusable - 1) // BLOCK_TOKENS


class _Row:
    """One sequence of the step that runs: tokens [start, end) of it are computed."""

    __slots__ = ("held", "start", "end", "result")

    def __init__(self, held: _Held, start: int) -> None:
        self.held, self.start, self.end = held, start, held.theirs.num_tokens
        self.result = Sampled()


class _Pool:
    """The package's block manager, counted. Blocks that only the prefix cache knows are free to it."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.num_blocks = len(manager.blocks)

    @property
    def available(self) -> int:
        return len(self.manager.free_block_ids)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def forget_prefixes(self) -> None:
        self.manager.hash_to_block_id.clear()

    def sweep(self) -> None:
        """Some versions leave a key behind when its block gets another owner."""
        keys = self.manager.hash_to_block_id
        if len(keys) > _STALE_KEYS * self.num_blocks:
            kept = {key: block for key, block in keys.items() if self.manager.blocks[block].hash == key}
            keys.clear()
            keys.update(kept)


class NanoRunner:
    """Implements `laya.engine.step.PackageRunner`."""

    schedules = True
    block_size = BLOCK_TOKENS

    def __init__(
        self, package: Package, engine: Any, *, vocab_size: int, max_seq_len: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.vocab_size = vocab_size
        self.max_seq_len = max_seq_len
        self.eos_token_ids = eos_token_ids
        self._package = package
        self._engine = engine
        self._scheduler = engine.scheduler
        self._model = engine.model_runner.model
        self._pristine = copy.deepcopy(engine.scheduler.block_manager)
        self._held: dict[int, _Held] = {}  # by our number
        self._theirs: dict[int, _Held] = {}  # by the package's
        self._rows: list[_Row] | None = None  # of the step that runs, once the package has picked them
        self._pick, engine.scheduler.schedule = engine.scheduler.schedule, self._picked
        engine.model_runner.sampler = self._sample
        self._head, self._model.compute_logits = self._model.compute_logits, self._logits
        self.blocks = self._fresh_pool()
        self.num_blocks = self.blocks.num_blocks
        unique = {p.data_ptr(): p.nbytes for p in self._model.parameters()}  # a tied head is one with the embedding
        self._sizes = {"params": sum(unique.values()), "kv": engine.model_runner.kv_cache.nbytes}
        self._place = self._model.lm_head.weight.device

    @property
    def dtype(self) -> str:
        return str(self._model.lm_head.weight.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self._place)

    # -- what the scheduler does ---------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        # Its own limits are never reached: the loop ends a sequence, and decides why.
        limits = self._package.SamplingParams(temperature=1.0, max_tokens=self.max_seq_len, ignore_eos=True)
        held = _Held(sequence, self._package.Sequence(list(sequence.token_ids), limits))
        self._held[sequence.seq_id] = self._theirs[held.theirs.seq_id] = held
        self._scheduler.add(held.theirs)

    def drop(self, sequence: Sequence) -> None:
        held = self._held.pop(sequence.seq_id, None)
        if held is None:
            return
        del self._theirs[held.theirs.seq_id]
        for queue in (self._scheduler.waiting, self._scheduler.running):
            if held.theirs in queue:
                queue.remove(held.theirs)
        if held.theirs.block_table:
            self._scheduler.block_manager.deallocate(held.theirs)
        self.blocks.sweep()

    def blocks_to_grow(self) -> int:
        return sum(theirs.num_blocks - len(theirs.block_table) for theirs in self._scheduler.running)

    def reset(self) -> None:
        self._held.clear()
        self._theirs.clear()
        self._scheduler.waiting.clear()
        self._scheduler.running.clear()
        self.blocks = self._fresh_pool()

    def _fresh_pool(self) -> _Pool:
        manager = copy.deepcopy(self._pristine)
        PrefixKeys(manager, self._rules)
        self._scheduler.block_manager = manager
        return _Pool(manager)

    def _rules(self, theirs: Any) -> tuple[bytes, int]:
        held = self._theirs[theirs.seq_id]
        return held.salt, held.shareable

    # -- one step ------------------------------------------------------------------------------------------------------------

    @contained
    @torch.inference_mode()
    def run(self, batch: list[Scheduled]) -> list[Sampled]:
        """One step of the package; `batch` is cut down to what it ran. After a fault its prefix cache is empty: blocks are
        entered there before they are computed.
        """
        self._rows = None
        lengths = {held.theirs.seq_id: held.theirs.num_tokens for held in self._held.values()}
        try:
            self._engine.step()
        except BaseException:
            if self._rows is None:  # its bookkeeping failed: nothing in it can be trusted
                self.reset()
            else:
                self._cut(batch)
                self.blocks.forget_prefixes()
            raise
        results = self._cut(batch)
        for row in self._rows:
            if row.held.theirs.num_tokens == lengths[row.held.theirs.seq_id]:  # part of a prompt: what was sampled is void
                row.result.token_id = None
        return results

    def _cut(self, batch: list[Scheduled]) -> list[Sampled]:
        rows = {row.held.own.seq_id: row for row in self._rows}
        batch[:] = [work for work in batch if work.sequence.seq_id in rows]
        for work in batch:
            row = rows[work.sequence.seq_id]
            work.start, work.count = row.start, row.end - row.start
        return [rows[work.sequence.seq_id].result for work in batch]

    def _picked(self) -> tuple[list[Any], bool]:
        """In place of the package's `schedule`: the same, and remembered."""
        picked, reads_prompts = self._pick()
        self._rows = [
            _Row(self._theirs[theirs.seq_id], theirs.num_cached_tokens if reads_prompts else theirs.num_tokens - 1)
            for theirs in picked
        ]
        return picked, reads_prompts

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """In place of the model's `compute_logits`: the same, and figures of prompt tokens where they were asked for."""
        if self._rows is not None and any(_scored(row) for row in self._rows):
            firsts = self._package.context().cu_seqlens_q.tolist()
            for first, row in zip(firsts, self._rows, strict=False):
                self._score(hidden[first : first + row.end - row.start], row)
        return self._head(hidden)

    def _score(self, hidden: torch.Tensor, row: _Row) -> None:
        """`hidden` [end - start, width] of one sequence. Entry j of a prompt's figures belongs to token max(start, 1) + j."""
        own, result = row.held.own, row.result
        if _scores_prompt(row):
            result.prompt_logprobs = []
            end = min(row.end, own.num_prompt_tokens)
            for begin in range(max(row.start, 1), end, SCORED_ROWS):
                targets = own.token_ids[begin : min(begin + SCORED_ROWS, end)]
                logits = self._logits_of(hidden[begin - 1 - row.start :][: len(targets)])
                result.prompt_logprobs += score(logits, targets, own.sampling.prompt_logprobs)
        positions = [position for position in own.asked or () if row.start <= position < row.end]
        for begin in range(0, len(positions), SCORED_ROWS):
            some = positions[begin : begin + SCORED_ROWS]
            logits = self._logits_of(hidden[[position - row.start for position in some]])
            result.told = (result.told or {}) | tell(logits, [own.asked[position] for position in some])

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self._model.lm_head.weight).float()

    def _sample(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """In place of the package's sampler, which knows neither greedy nor seeds. A row in error gets a token nobody sees."""
        sampled = sample(logits.float(), [row.held.own for row in self._rows], self.eos_token_ids)
        for row, outcome in zip(self._rows, sampled, strict=True):
            outcome.prompt_logprobs, outcome.told = row.result.prompt_logprobs, row.result.told
            row.result = outcome
        return torch.tensor([outcome.token_id or 0 for outcome in sampled])

    # -- the rest of a runner ------------------------------------------------------------------------------------------------

    def warm_up(self, max_num_seqs: int, chunk_tokens: int) -> None:
        """A full decode batch, so that what is compiled for it is compiled now; the package has read its longest prompt."""
        dummies = [Sequence(-1 - i, [0], SamplingParams(temperature=1.0, top_p=0.9)) for i in range(max_num_seqs)]
        dummies = dummies[: self.blocks.available]
        for dummy in dummies:
            self.add(dummy)
        try:
            for _ in range(2):
                self.run([Scheduled(dummy, 0, 1) for dummy in dummies])
        finally:
            self.reset()

    def memory(self) -> dict[str, int]:
        """Bytes: params, kv, and what the device says: device_allocated and device_peak. Any thread, also after `close`."""
        return self._sizes | device_memory(self._place)

    def close(self) -> None:
        """Free the weights and the pool. Nothing can be run after it."""
        package, engine = self._package, self._engine
        self._held.clear()
        self._theirs.clear()
        del self._engine, self._scheduler, self._model, self._head, self._pick  # `blocks` are still counted
        try:
            package.close(engine)
        finally:
            del engine
            if self._place.type == "cuda":
                torch.cuda.empty_cache()


def _scores_prompt(row: _Row) -> bool:
    own = row.held.own
    return own.sampling.prompt_logprobs is not None and row.start < own.num_prompt_tokens


def _scored(row: _Row) -> bool:
    return bool(row.held.own.asked) or _scores_prompt(row)
