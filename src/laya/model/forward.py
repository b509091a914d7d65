"""Which way a plan's rows take through the decoder: the compiled step where it fits, else torch's own operations.

In: a `BatchPlan`. Out: the residual stream of its rows, and logits of chosen ones. Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

import torch

from laya.engine.tiles import Tiles
from laya.model.attention_plan import KVWrite, Planner
from laya.model.batch_plan import BatchPlan
from laya.model.compiled import CompiledForward, why_not
from laya.model.kv_cache import KVCache
from laya.model.layers import Decoder
from laya.model.rows import Rows

log = logging.getLogger("laya.model")


class Forward(Protocol):
    kind: str  # compiled | eager
    rows_are_exact: bool  # of every row, in any company; if not, of sequences with `tiles`

    def run(self, plan: BatchPlan) -> torch.Tensor:
        """The residual stream after the last layer, float32 [rows, hidden + STREAM_TAIL]; writes the rows' keys and values."""

    def logits(self, wide: torch.Tensor, exact: bool = False) -> torch.Tensor:
        """Rows of what `run` gave -> float32 [rows, vocab]. `exact`: each row's are the same to the bit in any company."""


class EagerForward:
    """Operation by operation, on every device and for every model."""

    kind = "eager"
    rows_are_exact = False

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.logits = decoder.logits
        self._decoder, self._cache = decoder, cache
        self._planner = Planner(cache, decoder.dtype)

    def run(self, plan: BatchPlan) -> torch.Tensor:
        device = self._cache.pool.device
        decodes, prefills, pieces, free = [], [], [], 0
        for i, (table, count) in enumerate(plan.tables):
            first, tiles = plan.first_rows[i], plan.items[i].sequence.tiles
            start = plan.positions[first]
            if count == 1 and (tiles is None or start >= tiles.prompt):
                decodes.append((table, start, tiles is not None))
            elif tiles is None:
                prefills.append((table, start, count))
                free += count
            else:
                for begin, end in _pieces(tiles, start, start + count, plan.extra[i]):
                    prefills.append((table, begin, end - begin))
                    pieces.append((first + begin - start, first + end - start))
        exact = bool(pieces) or any(alone for _, _, alone in decodes)
        rows = Rows(len(decodes), free, tuple(pieces), exact)
        write = KVWrite(plan.slots, self._cache)
        plans = {window: self._planner.plan(write, decodes, prefills, window) for window in self._decoder.windows}
        ids = torch.tensor(plan.token_ids, dtype=torch.int64, device=device)
        positions = torch.tensor(plan.positions, dtype=torch.int64, device=device)
        return self._decoder.forward(ids, positions, plans, self._cache, rows)


def _pieces(tiles: Tiles, start: int, end: int, again: int) -> Iterator[tuple[int, int]]:
    """Runs of [start, end) that are computed alone; the first `again` positions are there for their logits only."""
    if again:
        yield start, start + again
    begin = start + again
    while begin < end:
        after = tiles.after(begin)
        yield begin, after
        begin = after


def forward_of(decoder: Decoder, cache: KVCache, eager: bool) -> Forward:
    """`eager` asks for torch's own operations; a model that the compiled step does not fit takes them without being asked."""
    reason = "it was asked for" if eager else why_not(decoder, cache)
    if reason is None:
        return CompiledForward(decoder, cache)
    log.info("steps are computed operation by operation: %s", reason)
    return EagerForward(decoder, cache)
