"""One step's rows: which token ids at which positions, where their KV goes, what each attends to, which rows are read out.

In: the scheduler's list of `Scheduled`. Out: `BatchPlan` with tensors on the device. Decodes come first (longest context
first), then prefill chunks; results are given back in the scheduler's order by `order`. Engine thread only.
"""

from __future__ import annotations

import torch

from laya.engine.step import Scheduled
from laya.model.attention_plan import AttentionPlan, KVWrite, Planner


class BatchPlan:
    """`items[i]` is the i-th of the row order; `last_rows[i]` its last row; `order[i]` its place in the scheduler's list.

    `extra[i]` is 1 where a row before the item's own was computed again for a prompt's log-probabilities.
    """

    __slots__ = ("items", "order", "extra", "first_rows", "last_rows", "token_ids", "positions", "write", "plans")

    def __init__(self, items: list[Scheduled], order: list[int], extra: list[int]) -> None:
        self.items = items
        self.order = order
        self.extra = extra
        self.first_rows: list[int] = []
        self.last_rows: list[int] = []
        self.token_ids: torch.Tensor
        self.positions: torch.Tensor
        self.write: KVWrite
        self.plans: dict[int | None, AttentionPlan]


class BatchPlanner:
    """Turns batches into plans; `windows` are those of the model's layers."""

    def __init__(self, planner: Planner, windows: set[int | None], scratch_block: int) -> None:
        self.planner = planner
        self.windows = windows
        self.scratch_slot = scratch_block * planner.block_size

    def plan(self, batch: list[Scheduled]) -> BatchPlan:
        extra = [int(scores_prompt(item) and item.start > 0) for item in batch]
        # A single token attends like a decode, whatever it is; the longest first so that neighbours are padded least.
        order = sorted(range(len(batch)), key=lambda i: (batch[i].count + extra[i] > 1, -batch[i].start))
        plan = BatchPlan([batch[i] for i in order], order, [extra[i] for i in order])
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        decodes, prefills = [], []
        for item, again in zip(plan.items, plan.extra, strict=True):
            sequence, start, end = item.sequence, item.start - again, item.start + item.count
            plan.first_rows.append(len(ids))
            if end - start == 1:
                ids.append(sequence.token_ids[start])
                positions.append(start)
                decodes.append((sequence.block_table, start))
            else:
                ids.extend(sequence.token_ids[start:end])
                positions.extend(range(start, end))
                prefills.append((sequence.block_table, start, end - start))
            slots.extend(self._slots(sequence.block_table, start, end, again))
            plan.last_rows.append(len(ids) - 1)
        device = self.planner.device
        plan.token_ids = torch.tensor(ids, dtype=torch.int64, device=device)
        plan.positions = torch.tensor(positions, dtype=torch.int64, device=device)
        plan.write = KVWrite(slots, self.planner.cache)
        plan.plans = {window: self.planner.plan(plan.write, decodes, prefills, window) for window in self.windows}
        return plan

    def _slots(self, table: list[int], start: int, end: int, again: int) -> list[int]:
        """Pool rows of positions [start, end). A row computed again must not touch its block: others may share it."""
        size = self.planner.block_size
        own = [table[p // size] * size + p % size for p in range(start + again, end)]
        return [self.scratch_slot, *own] if again else own


def scores_prompt(item: Scheduled) -> bool:
    """Whether log-probabilities of prompt tokens in this run were asked for."""
    sequence = item.sequence
    return sequence.sampling.prompt_logprobs is not None and item.start < sequence.num_prompt_tokens
