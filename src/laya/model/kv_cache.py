"""The paged KV pool: one tensor over all layers, allocated and touched once, and the host pool that blocks are swapped to.

In: block numbers decided by the engine. Out: views for attention, tickets for swapped blocks. Engine thread only.
"""

from __future__ import annotations

import torch

# Views of runs of blocks kept for the next step: a lone decode asks for the same run `block_size` times.
RUNS_KEPT = 64


class SwapTicket:
    """Where swapped blocks lie in the host pool, in their sequence's order."""

    __slots__ = ("slots",)

    def __init__(self, slots: list[int]) -> None:
        self.slots = slots


class KVCache:
    """`pool` is [layers, blocks + 2, block_size, 2 * kv_heads, head_dim]: keys of all heads, then values, of each token.

    Two blocks stand behind those that the engine gives out: `pad_block` is always zero (padding of ragged tables must not
    bring in stale numbers that are not finite), `scratch_block` takes writes that nobody reads.
    """

    def __init__(
        self, *, layers: int, kv_heads: int, head_dim: int, num_blocks: int, block_size: int, dtype: torch.dtype,
        device: torch.device, swap_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pad_block = num_blocks
        self.scratch_block = num_blocks + 1
        shape = (layers, num_blocks + 2, block_size, 2 * kv_heads, head_dim)
        self.pool = torch.empty(shape, dtype=dtype, device=device).zero_()  # zero_ touches every page
        self.layers = list(self.pool.unbind(0))
        self.slots = [layer.view((num_blocks + 2) * block_size, 2 * kv_heads * head_dim) for layer in self.layers]
        block_bytes = self.pool[:, 0].numel() * self.pool.element_size()
        swap_blocks = swap_bytes // block_bytes
        self.host = torch.empty((swap_blocks, layers, *shape[2:]), dtype=dtype, pin_memory=device.type == "cuda").zero_()
        self._free = list(range(swap_blocks))
        self._runs: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def tokens(self, first: int, count: int) -> tuple[torch.Tensor, ...]:
        """Pool rows [first, first + count) of each layer, [count, 2 * kv_heads * head_dim]: views."""
        return self.pool.view(len(self.layers), -1, self.slots[0].shape[1])[:, first : first + count].unbind(0)

    def run(self, first: int, blocks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) of each layer for blocks that lie side by side, [1, kv_heads, tokens, head_dim]: views."""
        known = self._runs.get((first, blocks))
        if known is None:
            if len(self._runs) >= RUNS_KEPT:
                self._runs.clear()
            size = self.pool.shape
            run = self.pool[:, first : first + blocks].view(size[0], 1, blocks * size[2], 2, size[3] // 2, size[4])
            keys, values = run.permute(3, 0, 1, 4, 2, 5).unbind(0)
            known = self._runs[first, blocks] = list(zip(keys.unbind(0), values.unbind(0), strict=True))
        return known

    @property
    def nbytes(self) -> int:
        return self.pool.nbytes

    @property
    def swap_free(self) -> int:
        """Blocks of host memory not in use."""
        return len(self._free)

    def swap_out(self, blocks: list[int]) -> SwapTicket | None:
        if len(blocks) > len(self._free):
            return None
        slots = [self._free.pop() for _ in blocks]
        self.host[slots] = self.pool[:, blocks].transpose(0, 1).to(self.host.device)
        return SwapTicket(slots)

    def swap_in(self, ticket: SwapTicket, blocks: list[int]) -> None:
        if len(blocks) != len(ticket.slots):
            raise ValueError(f"a ticket of {len(ticket.slots)} blocks cannot fill {len(blocks)}")
        self.pool[:, blocks] = self.host[ticket.slots].transpose(0, 1).to(self.pool.device)
        self.drop(ticket)

    def drop(self, ticket: SwapTicket) -> None:
        """Give a ticket's host blocks back; a ticket already given back holds none."""
        self._free.extend(ticket.slots)
        ticket.slots = []

    def erase(self, slots: list[int]) -> None:
        """Zero single tokens in every layer, so that numbers which are not finite cannot reach the blocks' next owner."""
        for layer in self.slots:
            layer[slots] = 0
