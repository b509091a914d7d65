"""Which way a plan's rows take through the decoder: the compiled step where it fits, else torch's own operations.

In: a `BatchPlan`. Out: the residual stream of its rows, and logits of chosen ones. Engine thread only.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from laya.model.attention_plan import KVWrite, Planner
from laya.model.batch_plan import BatchPlan
from laya.model.compiled import CompiledForward, why_not
from laya.model.kv_cache import KVCache
from laya.model.layers import Decoder

log = logging.getLogger("laya.model")


class Forward(Protocol):
    kind: str  # compiled | eager

    def run(self, plan: BatchPlan) -> torch.Tensor:
        """The residual stream after the last layer, float32 [rows, hidden + STREAM_TAIL]; writes the rows' keys and values."""

    def logits(self, wide: torch.Tensor) -> torch.Tensor:
        """Rows of what `run` gave -> float32 [rows, vocab]."""


class EagerForward:
    """Operation by operation, on every device and for every model."""

    kind = "eager"

    def __init__(self, decoder: Decoder, cache: KVCache) -> None:
        self.logits = decoder.logits
        self._decoder, self._cache = decoder, cache
        self._planner = Planner(cache, decoder.dtype)

    def run(self, plan: BatchPlan) -> torch.Tensor:
        device = self._cache.pool.device
        decodes, prefills = [], []
        for (table, count), first in zip(plan.tables, plan.first_rows, strict=True):
            start = plan.positions[first]
            if count == 1:
                decodes.append((table, start))
            else:
                prefills.append((table, start, count))
        write = KVWrite(plan.slots, self._cache)
        plans = {window: self._planner.plan(write, decodes, prefills, window) for window in self._decoder.windows}
        ids = torch.tensor(plan.token_ids, dtype=torch.int64, device=device)
        positions = torch.tensor(plan.positions, dtype=torch.int64, device=device)
        return self._decoder.forward(ids, positions, plans, self._cache)


def forward_of(decoder: Decoder, cache: KVCache, eager: bool) -> Forward:
    """`eager` asks for torch's own operations; a model that the compiled step does not fit takes them without being asked."""
    reason = "it was asked for" if eager else why_not(decoder, cache)
    if reason is None:
        return CompiledForward(decoder, cache)
    log.info("steps are computed operation by operation: %s", reason)
    return EagerForward(decoder, cache)
