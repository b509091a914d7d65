"""What attention writes and gathers in one step, worked out once and used by every layer.

In: a batch of (block table, start, count). Out: `AttentionPlan`s with index tensors, masks and views. Decodes of similar
length are padded to one group; a prefill chunk stands alone. Engine thread only.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from laya.model.kv_cache import KVCache

# Tokens of padding that a group of decodes may carry before the rest is computed apart: a further gather and product costs
# about as much as attention over this many tokens (25 us against 0.05 us a token and layer).
PADDING_LIMIT = 512
# From so many tokens on a decode whose blocks lie side by side is read where it lies, alone: gathering them into a batch costs
# more than a product of its own (eight rows, one core: 208 tokens 32 us a row against 29 us, 1024 tokens 86 us against 150 us).
LONE_TOKENS = 384


class DecodeGroup:
    """Rows [first, last) of the batch, one query token each, over the same number of blocks, padded.

    `index` [rows * blocks] picks blocks to gather; None where the only row's blocks lie side by side: then `views` holds each
    layer's (keys, values) as they lie in the pool. `mask` [rows, 1, 1, blocks * block_size] is 0 or -inf.
    """

    __slots__ = ("first", "last", "index", "views", "mask")

    def __init__(
        self, first: int, last: int, mask: torch.Tensor, *, index: torch.Tensor | None = None,
        views: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:  # fmt: skip
        self.first, self.last, self.index, self.views, self.mask = first, last, index, views, mask


class PrefillChunk:
    """Rows [first, last): queries of one sequence. `index` None: it sees only its own rows, causally; else blocks to gather,
    of which the first `length` tokens count, and `mask` [rows, length] is 0 or -inf.
    """

    __slots__ = ("first", "last", "index", "length", "mask")

    def __init__(
        self, first: int, last: int, index: torch.Tensor | None = None, length: int = 0, mask: torch.Tensor | None = None
    ) -> None:
        self.first, self.last, self.index, self.length, self.mask = first, last, index, length, mask


class AttentionPlan:
    """What one step writes and gathers, for layers with one window (None: all positions)."""

    __slots__ = ("write", "decodes", "prefills")

    def __init__(self, write: KVWrite, decodes: list[DecodeGroup], prefills: list[PrefillChunk]) -> None:
        self.write = write
        self.decodes = decodes
        self.prefills = prefills


class KVWrite:
    """Where the step's rows go: `slots` [rows], and each layer's rows themselves where the slots lie side by side."""

    __slots__ = ("slots", "targets")

    def __init__(self, slots: list[int], cache: KVCache) -> None:
        side_by_side = slots[-1] - slots[0] == len(slots) - 1 and all(b - a == 1 for a, b in itertools.pairwise(slots))
        self.slots = torch.tensor(slots, dtype=torch.int64, device=cache.pool.device)
        self.targets = cache.tokens(slots[0], len(slots)) if side_by_side else None


class Planner:
    """Builds the plans of a step on the host and moves them to the device."""

    def __init__(self, cache: KVCache, dtype: torch.dtype) -> None:
        self.cache = cache
        self.block_size = cache.block_size
        self.pad_block = cache.pad_block
        self.dtype = dtype
        self.device = cache.pool.device

    def plan(
        self, write: KVWrite, decodes: list[tuple[list[int], int, bool]], prefills: list[tuple[list[int], int, int]],
        window: int | None,
    ) -> AttentionPlan:  # fmt: skip
        """`decodes`: (block table, position, alone), longest first; `prefills`: (block table, start, count).
        Rows that attend `alone` are padded by nobody: padding changes the order of sums.

        Rows stand in this order, decodes first.
        """
        groups = self._decode_groups(decodes, window)
        chunks, first = [], len(decodes)
        for table, start, count in prefills:
            chunks.append(self._chunk(table, start, count, first, window))
            first += count
        return AttentionPlan(write, groups, chunks)

    def _decode_groups(self, decodes: list[tuple[list[int], int, bool]], window: int | None) -> list[DecodeGroup]:
        spans = [self._span(position, position + 1, window) for _, position, _ in decodes]
        lone = [decodes[i][2] or self._is_lone(decodes[i][0], *spans[i]) for i in range(len(decodes))]
        groups, first = [], 0
        while first < len(decodes):
            longest, last, padding = spans[first][1] - spans[first][0], first + 1, 0
            while last < len(decodes) and not lone[first] and not lone[last]:
                padding += (longest - (spans[last][1] - spans[last][0])) * self.block_size
                if padding > PADDING_LIMIT or spans[last][1] - spans[last][0] > longest:
                    break
                last += 1
            groups.append(self._group(decodes, spans, first, last, longest, window))
            first = last
        return groups

    def _is_lone(self, table: list[int], begin: int, end: int) -> bool:
        """Whether so much is seen, and side by side, that it is not worth gathering."""
        if (end - begin) * self.block_size < LONE_TOKENS:
            return False
        return table[begin:end] == list(range(table[begin], table[begin] + end - begin))

    def _group(
        self, decodes: list[tuple[list[int], int, bool]], spans: list[tuple[int, int]], first: int, last: int, blocks: int,
        window: int | None,
    ) -> DecodeGroup:  # fmt: skip
        table = np.full((last - first, blocks), self.pad_block, dtype=np.int64)
        starts = np.empty((last - first, 1), dtype=np.int64)  # positions of the first gathered token
        for i in range(first, last):
            begin, end = spans[i]
            table[i - first, : end - begin] = decodes[i][0][begin:end]
            starts[i - first] = begin * self.block_size
        positions = np.array([[decodes[i][1]] for i in range(first, last)], dtype=np.int64)
        mask = self._mask(starts + np.arange(blocks * self.block_size), positions, window)[:, None, None, :]
        if last - first == 1 and (np.diff(table[0]) == 1).all():
            return DecodeGroup(first, last, mask, views=self.cache.run(int(table[0, 0]), blocks))
        return DecodeGroup(first, last, mask, index=torch.from_numpy(table.reshape(-1)).to(self.device))

    def _chunk(self, table: list[int], start: int, count: int, first: int, window: int | None) -> PrefillChunk:
        end = start + count
        if start == 0 and (window is None or end <= window):
            return PrefillChunk(first, first + count)
        begin_block, end_block = self._span(start, end, window)
        length = end - begin_block * self.block_size
        index = torch.tensor(table[begin_block:end_block], dtype=torch.int64, device=self.device)
        mask = self._mask(np.arange(begin_block * self.block_size, end), np.arange(start, end)[:, None], window)
        return PrefillChunk(first, first + count, index, length, mask)

    def _span(self, first: int, end: int, window: int | None) -> tuple[int, int]:
        """Blocks [begin, end) that hold what the queries at positions [first, end) can see."""
        begin = 0 if window is None else max(0, first - window + 1) // self.block_size
        return begin, -(-end // self.block_size)

    def _mask(self, seen: np.ndarray, positions: np.ndarray, window: int | None) -> torch.Tensor:
        """0 where a query at `positions` sees the key at `seen`, else -inf; broadcast over both."""
        hidden = seen > positions
        if window is not None:
            hidden |= seen <= positions - window
        shown = torch.zeros(hidden.shape, dtype=self.dtype)
        return shown.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(self.device)
