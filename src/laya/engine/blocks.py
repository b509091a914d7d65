"""Paged KV bookkeeping: which block holds which positions of which sequence, and the prefix cache.

In: sequences as they start, grow, advance and end. Out: block numbers in their tables. No KV data passes here. Called by
the scheduler on the engine thread only; every operation is O(blocks touched).

A full block whose KV is computed is offered to the prefix cache under the key (identity of the block before it, its token
ids). Identities are serial numbers never used twice, so the dictionary itself compares the tokens and the parent on a hit:
a chained hash without collisions, and a child whose parent was evicted can never be taken for another's. The first
block's parent is the tenant's salt. A pool belongs to one engine, so model, KV type and rope settings need no key.

Shared blocks are never written: a match stops short of the last known token, so at least one token is always recomputed,
into a block of the sequence's own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable

from laya.engine.sequence import Sequence
from laya.engine.tiles import Tiles

Key = tuple[Hashable, tuple[int, ...]]
_NONE = -2  # neither a block nor the neighbour before one


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. A block is used (referenced), cached and idle, or free."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._serials = [0] * num_blocks
        self._next_serial = 1
        self._cached: dict[Key, int] = {}
        # In order of freeing, the newest last: it is warm in the caches. A dictionary, so that a neighbour can be taken out.
        self._free = dict.fromkeys(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unreferenced, least recently used first

    @property
    def available(self) -> int:
        """Blocks that can be handed out now, idle cached ones included."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, token_ids: list[int], salt: str, tiles: Tiles | None = None) -> list[int]:
        """The cached blocks of the longest known prefix, short of the last token. Takes no reference.

        With `tiles` only blocks that were computed in the very same pieces, up to where one begins.
        """
        size = self.block_size
        parent: Hashable = salt if tiles is None else tiles.root(salt)
        found: list[int] = []
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            if tiles is not None:
                parent = tiles.parent(parent, start + size)
            block = self._cached.get((parent, tuple(token_ids[start : start + size])))
            if block is None:
                break
            found.append(block)
            parent = self._serials[block]
        return found if tiles is None else found[: tiles.start(len(found) * size) // size]

    def cost(self, token_ids: list[int], salt: str, tail: int = 0, tiles: Tiles | None = None) -> int:
        """How far `available` falls when a sequence of these tokens and `tail` more starts: blocks in use cost nothing."""
        shared = sum(1 for block in self.match(token_ids, salt, tiles) if self._refs[block])
        return self.blocks_for(len(token_ids) + tail) - shared

    def start(self, sequence: Sequence, salt: str, *, reuse: bool = True, limit: int | None = None) -> bool:
        """Give a sequence without blocks a table for all its known tokens; False, and nothing taken, if they are short.

        With `reuse` the cached prefix is shared and `num_computed` set past it; with `limit` only of the first so many tokens.
        """
        tiles = sequence.tiles
        shared = self.match(sequence.token_ids if limit is None else sequence.token_ids[:limit], salt, tiles) if reuse else []
        for block in shared:
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1
        sequence.block_table = shared
        sequence.num_computed = len(shared) * self.block_size
        sequence.num_registered = len(shared)
        sequence.chain = self._serials[shared[-1]] if shared else salt if tiles is None else tiles.root(salt)
        if self.grow(sequence, len(sequence)):
            return True
        self.release(sequence)
        return False

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make the table cover `num_tokens` positions; False, and nothing taken, if blocks are short."""
        need = self.blocks_for(num_tokens) - len(sequence.block_table)
        if need > self.available:
            return False
        table = sequence.block_table
        last, fresh = table[-1] if table else _NONE, []
        for _ in range(need):
            last = self._take(last + 1)
            fresh.append(last)
        table.extend(sorted(fresh))  # evicted ones come tail first
        return True

    def register(self, sequence: Sequence) -> None:
        """Offer the blocks that became full and computed to the prefix cache; a prefix known already keeps its block."""
        size = self.block_size
        for index in range(sequence.num_registered, sequence.num_computed // size):
            chain = sequence.chain if sequence.tiles is None else sequence.tiles.parent(sequence.chain, (index + 1) * size)
            key = (chain, tuple(sequence.token_ids[index * size : (index + 1) * size]))
            block = self._cached.get(key)
            if block is None:
                block = sequence.block_table[index]
                self._cached[key] = block
                self._keys[block] = key
                self._serials[block] = self._next_serial
                self._next_serial += 1
            sequence.chain = self._serials[block]
            sequence.num_registered = index + 1

    def release(self, sequence: Sequence) -> None:
        """Give back a sequence's references. Tails go idle before their parents, so eviction takes leaves first."""
        for block in reversed(sequence.block_table):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._keys[block] is None:
                    self._free[block] = None
                else:
                    self._idle[block] = None
        sequence.block_table = []

    def _take(self, neighbour: int) -> int:
        """Block `neighbour` where it is free: a lone decode reads blocks that lie side by side without gathering them."""
        if neighbour in self._free:
            block = neighbour
            del self._free[block]
        elif self._free:
            block, _ = self._free.popitem()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._cached[self._keys[block]]
            self._keys[block] = None
        self._refs[block] = 1
        return block

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Verify every invariant against the tables of all live sequences; raises AssertionError naming the block."""
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        free = self._free
        for block in range(self.num_blocks):
            refs, key = self._refs[block], self._keys[block]
            places = (refs > 0) + (block in free) + (block in self._idle)
            assert refs == held[block], f"block {block}: {refs} references counted, {held[block]} held"
            assert places == 1, f"block {block} is in {places} of used, free, idle"
            assert block not in free or key is None, f"block {block} is free but cached"
            assert block not in self._idle or key is not None, f"block {block} is idle but not cached"
            assert refs < 2 or key is not None, f"block {block} is shared before it was registered"
            assert key is None or self._cached.get(key) == block, f"block {block} is not where its key points"
        assert len(self._cached) == sum(key is not None for key in self._keys), "the cache holds a key without its block"
        for sequence in sequences:
            assert len(sequence.block_table) * self.block_size >= sequence.num_computed or not sequence.block_table
            writable = sequence.block_table[sequence.num_computed // self.block_size :]
            assert all(self._keys[block] is None for block in writable), "a cached block is about to be written"
