"""One step's rows: which token ids at which positions, where their KV goes, what each attends to, which rows are read out.

In: the scheduler's list of `Scheduled`. Out: `BatchPlan` in plain numbers; `forward.py` and `compiled.py` bring them to the
device. Decodes come first (longest context first), then prefill chunks; results are given back in the scheduler's order by
`order`. Engine thread only.
"""

from __future__ import annotations

from laya.engine.step import Scheduled


class BatchPlan:
    """`items[i]` is the i-th of the row order; `last_rows[i]` its last row; `order[i]` its place in the scheduler's list.

    `extra[i]` is 1 where a row before the item's own was computed again for a prompt's log-probabilities. `token_ids`,
    `positions` and `slots` (rows of the pool) are by row, `tables` has (block table, rows) of each item.
    """

    __slots__ = ("items", "order", "extra", "first_rows", "last_rows", "token_ids", "positions", "slots", "tables")

    def __init__(self, items: list[Scheduled], order: list[int], extra: list[int]) -> None:
        self.items = items
        self.order = order
        self.extra = extra
        self.first_rows: list[int] = []
        self.last_rows: list[int] = []
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.tables: list[tuple[list[int], int]] = []


class BatchPlanner:
    """Turns batches into plans over blocks of `block_size`; `scratch_block` takes writes that nobody reads."""

    def __init__(self, block_size: int, scratch_block: int) -> None:
        self.block_size = block_size
        self.scratch_slot = scratch_block * block_size

    def plan(self, batch: list[Scheduled]) -> BatchPlan:
        extra = [int(scores_prompt(item) and item.start > 0) for item in batch]
        # A single token attends like a decode, whatever it is; the longest first so that neighbours are padded least.
        order = sorted(range(len(batch)), key=lambda i: (_kind(batch[i], extra[i]), -batch[i].start))
        plan = BatchPlan([batch[i] for i in order], order, [extra[i] for i in order])
        for item, again in zip(plan.items, plan.extra, strict=True):
            sequence, start, end = item.sequence, item.start - again, item.start + item.count
            plan.first_rows.append(len(plan.token_ids))
            if end - start == 1:
                plan.token_ids.append(sequence.token_ids[start])
                plan.positions.append(start)
            else:
                plan.token_ids.extend(sequence.token_ids[start:end])
                plan.positions.extend(range(start, end))
            plan.slots.extend(self._slots(sequence.block_table, start, end, again))
            plan.tables.append((sequence.block_table, end - start))
            plan.last_rows.append(len(plan.token_ids) - 1)
        return plan

    def _slots(self, table: list[int], start: int, end: int, again: int) -> list[int]:
        """Pool rows of positions [start, end). A row computed again must not touch its block: others may share it."""
        size = self.block_size
        own = [table[p // size] * size + p % size for p in range(start + again, end)]
        return [self.scratch_slot, *own] if again else own


def _kind(item: Scheduled, again: int) -> int:
    """0: a decode; 1: a chunk; 2: a chunk whose pieces are computed alone."""
    tiles = item.sequence.tiles
    if tiles is not None and item.start < tiles.prompt:
        return 2
    return int(item.count + again > 1)


def scores_prompt(item: Scheduled) -> bool:
    """Whether log-probabilities of prompt tokens in this run were asked for."""
    sequence = item.sequence
    return sequence.sampling.prompt_logprobs is not None and item.start < sequence.num_prompt_tokens
