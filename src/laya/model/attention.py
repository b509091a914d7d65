"""Attention over the paged pool: what to gather is planned once a step, then every layer does the same few operations.

In: a batch of (block table, start, count). Out: `AttentionPlan`s; `attend` on each layer's q, k, v. Decodes of similar length
are padded and computed together; a prefill chunk is computed alone. Engine thread only.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from laya.model.kv_cache import KVCache

# Tokens of padding that a group of decodes may carry before the rest is computed apart: a further gather and product costs
# about as much as attention over this many tokens (25 us against 0.05 us a token and layer).
PADDING_LIMIT = 512


class DecodeGroup:
    """Rows [first, last) of the batch, one query token each, over `blocks` blocks each, padded.

    `index` [rows * blocks] picks blocks, or `run` is the first block of the only row when its blocks lie side by side.
    `mask` [rows, 1, 1, blocks * block_size] is 0 or -inf.
    """

    __slots__ = ("first", "last", "blocks", "index", "run", "mask")

    def __init__(self, first: int, last: int, blocks: int, index: torch.Tensor | None, run: int, mask: torch.Tensor) -> None:
        self.first, self.last, self.blocks = first, last, blocks
        self.index, self.run, self.mask = index, run, mask


class PrefillChunk:
    """Rows [first, last): queries of one sequence. `index` None: it sees only its own rows, causally; else blocks to gather,
    of which the first `length` tokens count, and `mask` [rows, length] is 0 or -inf.
    """

    __slots__ = ("first", "last", "index", "length", "mask")

    def __init__(
        self, first: int, last: int, index: torch.Tensor | None = None, length: int = 0,
        mask: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self.first, self.last, self.index, self.length, self.mask = first, last, index, length, mask


class AttentionPlan:
    """What one step gathers, for layers with one window (None: all positions)."""

    __slots__ = ("slots", "decodes", "prefills")

    def __init__(self, slots: torch.Tensor, decodes: list[DecodeGroup], prefills: list[PrefillChunk]) -> None:
        self.slots = slots  # [rows]: where each row's key and value are written
        self.decodes = decodes
        self.prefills = prefills


class Heads:
    """Shapes of one layer's attention. `scale` multiplies the scores."""

    __slots__ = ("kv", "group", "dim", "q_width", "scale")

    def __init__(self, heads: int, kv_heads: int, dim: int, scale: float) -> None:
        self.kv, self.group, self.dim, self.scale = kv_heads, heads // kv_heads, dim, scale
        self.q_width = heads * dim


def attend(qkv: torch.Tensor, layer: torch.Tensor, slots: torch.Tensor, plan: AttentionPlan, heads: Heads) -> torch.Tensor:
    """qkv [rows, (heads + 2 * kv) * dim] -> [rows, heads * dim]. Writes the rows' keys and values into the pool first.

    `layer` is the layer's pool [blocks, block_size, 2 * kv, dim] and `slots` the same memory as [tokens, 2 * kv * dim].
    """
    slots.index_copy_(0, plan.slots, qkv[:, heads.q_width :])
    parts = [_decode(qkv, layer, group, heads) for group in plan.decodes]
    parts += [_prefill(qkv, layer, chunk, heads) for chunk in plan.prefills]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(qkv: torch.Tensor, layer: torch.Tensor, group: DecodeGroup, heads: Heads) -> torch.Tensor:
    rows = group.last - group.first
    # Query heads that share a key head stand where a longer query would: keys are read once and never repeated.
    q = qkv[group.first : group.last, : heads.q_width].view(rows, heads.kv, heads.group, heads.dim)
    if group.index is None:
        kv = layer[group.run : group.run + group.blocks]
    else:
        kv = layer.index_select(0, group.index)
    kv = kv.view(rows, -1, 2, heads.kv, heads.dim).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=group.mask, scale=heads.scale)
    return out.reshape(rows, heads.q_width)


def _prefill(qkv: torch.Tensor, layer: torch.Tensor, chunk: PrefillChunk, heads: Heads) -> torch.Tensor:
    rows = chunk.last - chunk.first
    q = qkv[chunk.first : chunk.last, : heads.q_width].view(rows, heads.kv, heads.group, heads.dim).permute(1, 2, 0, 3)
    if chunk.index is None:
        kv = qkv[chunk.first : chunk.last, heads.q_width :].view(rows, 2, heads.kv, heads.dim)
    else:
        kv = layer.index_select(0, chunk.index).view(-1, 2, heads.kv, heads.dim)[: chunk.length]
    # [kv, group, tokens, dim] with stride 0 over the group: shared keys are not copied.
    kv = kv.permute(1, 2, 0, 3).unsqueeze(2).expand(2, heads.kv, heads.group, kv.shape[0], heads.dim)
    causal = chunk.index is None
    out = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=chunk.mask, is_causal=causal, scale=heads.scale)
    return out.permute(2, 0, 1, 3).reshape(rows, heads.q_width)


class Planner:
    """Builds the plans of a step on the host and moves them to the device."""

    def __init__(self, cache: KVCache, dtype: torch.dtype) -> None:
        self.block_size = cache.block_size
        self.pad_block = cache.pad_block
        self.dtype = dtype
        self.device = cache.pool.device

    def plan(
        self, slots: torch.Tensor, decodes: list[tuple[list[int], int]], prefills: list[tuple[list[int], int, int]],
        window: int | None,
    ) -> AttentionPlan:  # fmt: skip
        """`decodes`: (block table, position), sorted by position, longest first; `prefills`: (block table, start, count).

        Rows stand in this order, decodes first.
        """
        groups = self._decode_groups(decodes, window)
        chunks, first = [], len(decodes)
        for table, start, count in prefills:
            chunks.append(self._chunk(table, start, count, first, window))
            first += count
        return AttentionPlan(slots, groups, chunks)

    def _decode_groups(self, decodes: list[tuple[list[int], int]], window: int | None) -> list[DecodeGroup]:
        spans = [self._span(position, position + 1, window) for _, position in decodes]
        groups, first = [], 0
        while first < len(decodes):
            longest, last, padding = spans[first][1] - spans[first][0], first + 1, 0
            while last < len(decodes):
                padding += (longest - (spans[last][1] - spans[last][0])) * self.block_size
                if padding > PADDING_LIMIT or spans[last][1] - spans[last][0] > longest:
                    break
                last += 1
            groups.append(self._group(decodes, spans, first, last, longest, window))
            first = last
        return groups

    def _group(
        self, decodes: list[tuple[list[int], int]], spans: list[tuple[int, int]], first: int, last: int, blocks: int,
        window: int | None,
    ) -> DecodeGroup:  # fmt: skip
        table = np.full((last - first, blocks), self.pad_block, dtype=np.int64)
        starts = np.empty((last - first, 1), dtype=np.int64)  # positions of the first gathered token
        for i in range(first, last):
            begin, end = spans[i]
            table[i - first, : end - begin] = decodes[i][0][begin:end]
            starts[i - first] = begin * self.block_size
        positions = np.array([[decodes[i][1]] for i in range(first, last)], dtype=np.int64)
        seen = starts + np.arange(blocks * self.block_size)
        hidden = seen > positions
        if window is not None:
            hidden |= seen <= positions - window
        mask = self._mask(hidden)[:, None, None, :]
        if last - first == 1 and (np.diff(table[0]) == 1).all():
            return DecodeGroup(first, last, blocks, None, int(table[0, 0]), mask)
        return DecodeGroup(first, last, blocks, torch.from_numpy(table.reshape(-1)).to(self.device), 0, mask)

    def _chunk(self, table: list[int], start: int, count: int, first: int, window: int | None) -> PrefillChunk:
        end = start + count
        if start == 0 and (window is None or end <= window):
            return PrefillChunk(first, first + count)
        begin_block, end_block = self._span(start, end, window)
        length = end - begin_block * self.block_size
        index = torch.tensor(table[begin_block:end_block], dtype=torch.int64, device=self.device)
        seen = np.arange(begin_block * self.block_size, end)
        positions = np.arange(start, end)[:, None]
        hidden = seen > positions
        if window is not None:
            hidden |= seen <= positions - window
        return PrefillChunk(first, first + count, index, length, self._mask(hidden))

    def _span(self, first: int, end: int, window: int | None) -> tuple[int, int]:
        """Blocks [begin, end) that hold what the queries at positions [first, end) can see."""
        begin = 0 if window is None else max(0, first - window + 1) // self.block_size
        return begin, -(-end // self.block_size)

    def _mask(self, hidden: np.ndarray) -> torch.Tensor:
        shown = torch.zeros(hidden.shape, dtype=self.dtype)
        return shown.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(self.device)
